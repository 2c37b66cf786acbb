"""Folders and files that are there whole or not at all: written under another name, flushed, renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

from marginlens.files import below, opened, reason
from marginlens.output import complain

Own = Callable[[Path], Iterable[str]]
"""Returns the names of the files that we wrote in a folder; raises a DataError if the folder is not ours."""
_ELSEWHERE = "set MARGINLENS_DATA to another folder"


class DataError(ValueError):
    """Report data on disk that the user can repair: one line that says what happened, and what to do."""


@contextmanager
def partial(where: Path, name: str, own: Own | None = None) -> Iterator[Path]:
    """Make a hidden folder to write into; remove it if anything goes wrong, and what killed writers left before.

    With `own`, a folder that a killed writer had moved aside, and not replaced yet, is put back first.
    """
    try:
        where.mkdir(parents=True, exist_ok=True)
        _sweep(where, name, own)
        folder = where / f".{name}.{_host()}.{unique()}.partial"
        folder.mkdir()
    except OSError as error:
        raise DataError(f"cannot write to {where} ({error.strerror}); {_ELSEWHERE}") from None
    try:
        yield folder
    except OSError as error:
        raise DataError(f"cannot write {name} to {where} ({error.strerror}); {_ELSEWHERE}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path, own: Own) -> None:
    """Rename a complete folder to its final name, in place of one that we wrote; what fails leaves the old one there.

    Several writers may do this at once: each one's folder is in place for a while, and the last one's stays.
    """
    while True:
        before = _inode(final)
        try:
            check_ours(final, own)
        except (DataError, OSError):
            if _inode(final) != before:
                continue  # another writer replaced it while we looked
            raise
        old = final.with_name(f".{final.name}.{_host()}.{unique()}.old")
        try:
            with suppress(FileNotFoundError):  # another writer has just moved it away
                final.rename(old)
            folder.rename(final)
        except BaseException as error:
            if not os.path.lexists(final):
                with suppress(OSError):
                    old.rename(final)
                raise
            _discard(old, final, own)
            if not isinstance(error, OSError):
                raise
        else:
            _discard(old, final, own)
            return


def check_ours(final: Path, own: Own) -> None:
    """Raise unless a folder may be replaced: it does not exist, is empty, or holds nothing but what we wrote."""
    if not os.path.lexists(final):
        return
    if final.is_symlink() or not final.is_dir():
        what = "a symlink" if final.is_symlink() else "a file"
        raise DataError(f"{final} is {what}, and is never replaced; remove it, or {_ELSEWHERE}")
    held = set(below(final))
    if strangers := sorted(held - {*own(final)} if held else ()):
        raise DataError(f"{final} holds {strangers[0]}, which no data set has; move that file away, or {_ELSEWHERE}")


def _discard(old: Path, final: Path, own: Own) -> None:
    """Remove a folder of ours that was replaced; where a stranger's file came into it meanwhile, keep it in sight."""
    if not os.path.lexists(old):
        return
    try:
        check_ours(old, own)
    except (DataError, OSError) as error:
        kept = final.with_name(f"{final.name}-replaced-{unique()}")
        old.rename(kept)
        complain(f"what {final} held before is kept as {kept.name} ({reason(error)})")
        return
    shutil.rmtree(old, ignore_errors=True)


def _inode(path: Path) -> int:
    """Return the number of what a name stands for now; 0 for nothing."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def moving(final: Path) -> bool:
    """Return True while a writer is replacing this folder: the old one is aside, the new one not yet in its place."""
    return any(_made_aside(final.name, path.name, "old") for path in final.parent.glob(f".{escape(final.name)}.*.old"))


def save(path: Path, content: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        flush(file)


def put(path: Path, content: bytes) -> None:
    """Write a file that is there whole or as it was: written aside, flushed, renamed."""
    aside = path.with_name(f".{path.name}.{unique()}")
    try:
        save(aside, content)
        aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def put_new(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; raise if something has its name by then."""
    aside = path.with_name(f".{path.name}.{unique()}")
    try:
        save(aside, content)
        try:
            os.link(aside, path)  # a rename would replace what came there meanwhile
        except FileExistsError:
            raise DataError(f"{path} is there already; remove it, or give --out another name") from None
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise
            aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def deliver(path: Path, content: bytes, mark: str = "") -> None:
    """Write a file at a place that the user named: where a symlink leads, or into a stream, such as /dev/stdout.

    With a mark, a file that is there already is replaced only if it begins so: we wrote it then.
    """
    if is_stream(path):
        with _opened(path) as file:
            file.write(content)
    else:
        check_replaceable(path, mark)
        put(Path(os.path.realpath(path)), content)


def check_replaceable(path: Path, mark: str) -> None:
    """Raise if a file is there that does not begin as what we write: `mark` is a pattern of its first bytes."""
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
"""Bytes at a file's beginning that tell what it is."""


def is_stream(path: Path) -> bool:
    """A pipe, a device or a file that is open already, which its reader would miss if another took its name."""
    return bool(_OPEN.match(str(_led(path)))) or (path.exists() and not path.is_file() and not path.is_dir())


_OPEN = re.compile(r"/(?:proc/([^/]+)|dev)/fd/(\d+)")
"""A file that a process has open: whose, if it is said, and its number there."""


def _led(path: Path) -> Path:
    """Where links lead, as far as to what is open."""
    for _ in range(40):  # as many links as Linux follows
        if _OPEN.match(str(path)) or not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return path


def _opened(path: Path) -> BinaryIO:
    """A stream to write to. A file that we have open goes on where it is, or what we print next would lie over it."""
    found = _OPEN.fullmatch(str(_led(path)))
    if found and found[1] in (None, "self", str(os.getpid())) and path.is_file():
        if sys.stdout is not None:
            sys.stdout.flush()
        return os.fdopen(os.dup(int(found[2])), "wb")
    return open(path, "ab", opener=_read_by_somebody)


def _read_by_somebody(name: str, flags: int) -> int:
    """Open a stream that somebody reads: a named pipe without a reader would let us wait for ever."""
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
"""Seconds that we wait for a reader of a pipe."""


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Around the writing of a file, whose folder is made: what the disk refuses is one line that names the option."""
    if str(path) == "-":
        raise DataError(f"{option} - is no file's name; give {option} /dev/stdout for standard output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BrokenPipeError:  # whoever read it has read enough
        raise
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror or error}); give {option} another place") from None


def unique() -> str:
    """For a name that nobody else has: the process, and eight digits."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def flush(file: BinaryIO) -> None:
    """Waits until the disk has what was written."""
    file.flush()
    os.fsync(file.fileno())


def _sweep(where: Path, name: str, own: Own | None) -> None:
    """Remove what writers on this host left behind when they were killed; a stranger's file of such a name stays."""
    for kind in ("partial", "old"):
        for left in where.glob(f".{escape(name)}.*.{kind}"):
            made = _made_aside(name, left.name, kind)
            if not made or made[1] != _host() or _alive(int(made[2])):
                continue
            if kind == "partial":
                shutil.rmtree(left, ignore_errors=True)
            elif not os.path.lexists(where / name):
                left.rename(where / name)
            elif own is not None:
                _discard(left, where / name, own)


def _made_aside(name: str, aside: str, kind: str) -> re.Match[str] | None:
    """Return host and process of the writer that made such a folder, None if it is not a name that we give."""
    return re.fullmatch(rf"\.{re.escape(name)}\.([^.]+)\.(\d+)-[0-9a-f]{{8}}\.{kind}", aside)


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
