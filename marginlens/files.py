"""Read files that a stranger may have made, and write files that are whole or not there.

Only regular files are opened. They are read up to a size and parsed to a depth. A refusal is an OSError or a ValueError
whose text is the reason, without the file's name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from marginlens.errors import DataError

try:
    import fcntl as fcntl  # from here for everyone who locks files, because one place should report its absence
except ModuleNotFoundError:
    raise ImportError(
        "the laboratory needs Linux or macOS; on Windows run it in WSL (losses, methods and encoders work anywhere)",
        name="fcntl",
    ) from None

MIB = 1 << 20
JSON_BYTES = 64 * MIB
"""Longest JSON to read: a store of 100,000 classes needs 5 MiB, a run of 1,000 epochs less."""
DEPTH = 32
"""Deepest nesting of JSON: our own needs 5 levels, and repr and pydantic give up at some hundreds."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.S)


def opened(path: Path) -> BufferedReader:
    """Open a regular file for reading: a pipe could wait forever, and a device has no end."""
    _regular(path, os.stat(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file, if there are at most `most`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, most) + 1)  # because read() takes as much memory as it is asked for
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {spoken(most)}, and no more is read", str(path))
    return content


def text(path: Path, most: int = JSON_BYTES) -> str:
    """Return the text of a regular UTF-8 file."""
    content = read(path, most)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def parse(said: str) -> Any:
    """Return the value of a JSON text; raise if it is nested deeper than `DEPTH`."""
    if said.count("[") + said.count("{") > DEPTH and _depth(said) > DEPTH:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    try:
        return json.loads(said)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} levels deep") from None
    except ValueError as error:
        if "digits" in str(error):  # because Python's own message names a function that would lift its limit
            raise ValueError("it holds a whole number of thousands of digits") from None
        raise


def spoken(count: int) -> str:
    """Return a number of bytes as a reader says it: 64 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count //= 1024
    return f"{count:,} {unit}"


def reason(error: Exception) -> str:
    """Return an error's message without its number and the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def below(folder: Path) -> Iterator[str]:
    """Yield the relative name of every file and every empty folder in a folder; symlinks are not followed.

    Files that systems leave behind are skipped. A folder that cannot be listed raises, because it may hold anything.
    """
    for at, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        for name in (*files, *links):
            if not _LITTER.fullmatch(name):
                yield os.path.relpath(os.path.join(at, name), folder)
        if not folders and not files and at != str(folder):
            yield os.path.relpath(at, folder)


_LITTER = re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+", re.S)
"""Names of files that macOS, Windows and NFS put into any folder."""


def _raise(error: OSError) -> None:
    raise error


def _regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    what = next((name for test, name in _KINDS if test(status.st_mode)), "a special file")
    raise OSError(errno.EINVAL, f"it is {what}, and must be a regular file", str(path))


def _depth(said: str) -> int:
    """Return how deep brackets are nested, without those in strings."""
    depth = deepest = 0
    for found in _TOKEN.finditer(said):
        if found[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in ("]", "}"):
            depth -= 1
    return deepest


def expanded(path: str | PathLike[str]) -> Path:
    """Return a path with its ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"the ~ of {path} stands for no folder ({error})") from None


def save(path: Path, content: bytes) -> None:
    """Write a new file, and flush it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        flush(file)


def put(path: Path, content: bytes) -> None:
    """Replace a file in one step: write it aside, flush it, rename it."""
    aside = path.with_name(f".{path.name}.{unique()}")
    try:
        save(aside, content)
        aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def put_new(path: Path, content: bytes) -> None:
    """Write a new file in one step; raise if another file has taken its name meanwhile."""
    aside = path.with_name(f".{path.name}.{unique()}")
    try:
        save(aside, content)
        try:
            os.link(aside, path)  # because a rename would replace a file that came there meanwhile
        except FileExistsError:
            raise DataError(f"{path} is there already; remove it, or give --out another name") from None
        except OSError:  # because some file systems have no hard links
            if os.path.lexists(path):
                raise
            aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def deliver(path: Path, content: bytes, mark: str = "") -> None:
    """Write a file where the user asked for it: through a symlink, or into a stream such as /dev/stdout.

    With a mark, an existing file is replaced only if it begins with that mark, so only if we wrote it.
    """
    if is_stream(path):
        with _opened(path) as file:
            file.write(content)
    else:
        check_replaceable(path, mark)
        put(Path(os.path.realpath(path)), content)


def check_replaceable(path: Path, mark: str) -> None:
    """Raise if the path holds a file that is not ours: `mark` is a pattern of our first bytes."""
    if not path.exists() or is_stream(path):
        return
    with opened(path) as file:
        begin = file.read(_MARKED)
    if begin and not re.match(mark.encode(), begin, re.S):
        raise DataError(
            f"{path} was not written by this version of marginlens, and is not replaced; "
            f"remove it, or give another name"
        )


_MARKED = 4096
"""First bytes of a file that are compared with a mark."""


def is_stream(path: Path) -> bool:
    """True for a pipe, a device or an open file: its reader would miss a new file under the same name."""
    return bool(_OPEN.match(str(_led(path)))) or (path.exists() and not path.is_file() and not path.is_dir())


_OPEN = re.compile(r"/(?:proc/([^/]+)|dev)/fd/(\d+)")
"""Path of an open file: its process, if it is given, and its number there."""


def _led(path: Path) -> Path:
    """Follow symlinks, and stop at an open file."""
    for _ in range(40):  # because Linux follows as many
        if _OPEN.match(str(path)) or not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return path


def _opened(path: Path) -> BinaryIO:
    """Open a stream for writing. Append to a file that we have open already, or our next output would overwrite it."""
    found = _OPEN.fullmatch(str(_led(path)))
    if found and found[1] in (None, "self", str(os.getpid())) and path.is_file():
        if sys.stdout is not None:
            sys.stdout.flush()
        return os.fdopen(os.dup(int(found[2])), "wb")
    return open(path, "ab", opener=_read_by_somebody)


def _read_by_somebody(name: str, flags: int) -> int:
    """Open a stream that has a reader: a named pipe without one would make us wait forever."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            handle = os.open(name, flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > end:
                raise OSError(errno.ENXIO, "nobody reads from this pipe", name) from None
            time.sleep(0.05)
        else:
            os.set_blocking(handle, True)
            return handle


_PATIENCE = 5.0
"""Seconds to wait for the reader of a pipe."""


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Make a file's folder, and report a failed write in one line that names the option."""
    if str(path) == "-":
        raise DataError(f"{option} - is not a file name; give {option} /dev/stdout for standard output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BrokenPipeError:  # because the reader has read enough
        raise
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror or error}); give {option} another place") from None


def unique() -> str:
    """Return the process id and eight random digits, for a file name of our own."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def flush(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
