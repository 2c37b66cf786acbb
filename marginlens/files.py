"""Files that a stranger may have made: only regular ones are opened, read up to a bound, parsed to a depth.

Whatever is refused raises an OSError or a ValueError whose text is the reason, without the file's name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

MIB = 1 << 20
JSON_BYTES = 64 * MIB
"""The longest JSON that is read: a store of 100,000 classes needs 5 MiB, a run of 1,000 epochs less."""
DEPTH = 32
"""How deep JSON may be nested: what we write needs 5, and repr and pydantic give up at some hundreds."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.S)


def opened(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe would wait for ever, and a device has no end."""
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
        content = file.read(min(size, most) + 1)  # which takes as much memory as it is asked for
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {spoken(most)}, which is all that is read", str(path))
    return content


def text(path: Path, most: int = JSON_BYTES) -> str:
    """Return the text of a regular UTF-8 file."""
    content = read(path, most)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def parse(said: str) -> Any:
    """Return the value of JSON, if it is not nested deeper than `DEPTH`."""
    if said.count("[") + said.count("{") > DEPTH and _depth(said) > DEPTH:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    try:
        return json.loads(said)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} levels deep") from None
    except ValueError as error:
        if "digits" in str(error):  # Python's own words name a function that would lift its limit
            raise ValueError("it holds a whole number of thousands of digits") from None
        raise


def spoken(count: int) -> str:
    """Return a number of bytes for reading: 64 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count //= 1024
    return f"{count:,} {unit}"


def reason(error: Exception) -> str:
    """Return what an error says, without its number and the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def below(folder: Path) -> Iterator[str]:
    """Yield the relative name of every file and every empty folder in a folder; symlinks are not followed.

    Litter that systems leave does not count. A folder that cannot be listed raises: it may hold anything.
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
    """Return how deep brackets are nested; those in strings do not count."""
    depth = deepest = 0
    for found in _TOKEN.finditer(said):
        if found[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in ("]", "}"):
            depth -= 1
    return deepest
