"""Refuse writes outside of the temporary folder: hostile words name other places, and we may be root."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

_OPEN = ("/dev/",)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.symlink", "os.link", "os.rename")
_CHANGES += ("shutil.rmtree", "shutil.move", "os.chown", "os.utime")
_shut = False


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Refuse writes elsewhere, as for a user without permission, inside the `with` block."""
    global _shut  # noqa: PLW0603  an audit hook cannot be removed
    _shut = True
    try:
        yield
    finally:
        _shut = False


def _watch(event: str, given: tuple[Any, ...]) -> None:
    if not _shut:
        return
    if event == "open":
        path, mode, flags = given
        if isinstance(path, str | bytes | os.PathLike) and (set(mode or "") & set("wax+") or (flags or 0) & _WRITES):
            _check(os.path.realpath(path))
    elif event in _CHANGES:
        first, last = {"os.symlink": (1, 2), "os.rename": (0, 2), "os.link": (0, 2)}.get(event, (0, 1))
        for path in given[first:last]:
            if isinstance(path, str | bytes | os.PathLike):  # not a file that is open
                name = os.path.abspath(os.fsdecode(path))
                _check(os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name)))


def _check(path: str | bytes) -> None:
    name = os.fsdecode(path)
    if not name.startswith((f"{_HOME}{os.sep}", *_OPEN)) and name != _HOME:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


_HOME = os.path.realpath(tempfile.gettempdir())
sys.addaudithook(_watch)
