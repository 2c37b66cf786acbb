"""Folders and files that are there whole or not at all: written under another name, flushed, renamed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO


class DataError(ValueError):
    """Something about data on disk that the user can mend; its message is one line that says what and how."""


@contextmanager
def partial(where: Path, name: str) -> Iterator[Path]:
    """A folder to write into; gone again if anything goes wrong. Leftovers of killed writers are swept up first."""
    elsewhere = "set MARGINLENS_DATA to another folder"
    try:
        where.mkdir(parents=True, exist_ok=True)
        _sweep(where, name)
        folder = where / f".{name}.{_host()}.{unique()}.partial"
        folder.mkdir()
    except OSError as error:
        raise DataError(f"cannot write to {where} ({error.strerror}); {elsewhere}") from None
    try:
        yield folder
    except OSError as error:
        raise DataError(f"cannot write {name} to {where} ({error.strerror}); {elsewhere}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Gives a complete folder its name, and replaces what was there: a rename, so that no reader meets half of it."""
    while True:
        try:
            folder.rename(final)
            break
        except OSError:
            if not final.exists():
                raise
        old = folder.with_name(folder.name.replace(".partial", ".old"))
        try:
            final.rename(old)
        except FileNotFoundError:
            continue  # another writer has just moved it away
        shutil.rmtree(old, ignore_errors=True)


def save(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        flush(file)


def put(path: Path, content: bytes) -> None:
    """A file that is there whole or as it was: written aside, flushed, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(aside, content)
        aside.rename(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def deliver(path: Path, content: bytes) -> None:
    """`put` at a place that the user named: where a link leads; a stream, such as /dev/stdout, is written to."""
    if is_stream(path):
        with _opened(path) as file:
            file.write(content)
    else:
        put(Path(os.path.realpath(path)), content)


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
    return path.open("ab")


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


def _sweep(where: Path, name: str) -> None:
    """Removes what writers on this host left behind that no longer run."""
    for old in [*where.glob(f".{escape(name)}.*.partial"), *where.glob(f".{escape(name)}.*.old")]:
        host, writer = old.name.split(".")[-3:-1]
        if host == _host() and not _alive(int(writer.split("-")[0])):
            shutil.rmtree(old, ignore_errors=True)


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
