"""Temporary folders of runs on the nodes of a cluster: locked while they are used, removed also after a kill.

The task that reads a run's records holds the lock file, and the worker that writes them holds the folder itself. A
folder of ours that nobody holds was left by a killed process. The next task on the node removes it, the next driver
does, or the worker that was left alone. Other people's folders stay, whatever they are called.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from marginlens.files import fcntl

PREFIX = "marginlens-run-"
NEW, HELD = ".new", ".held"
"""The lock file before and after its maker has locked it."""
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""The names that `mkdtemp` makes of the prefix."""
_ABANDONED = 3600.0
"""Seconds after which an empty folder is abandoned: its maker puts the lock file there at once."""


@contextmanager
def make() -> Iterator[Path]:
    """Make a locked folder for one run, and remove it at the end; first remove what killed runs left."""
    sweep()
    folder, lock = _made()
    try:
        yield folder
    finally:
        with suppress(OSError):
            _remove(folder)
        os.close(lock)


def sweep() -> None:
    """Remove the folders that killed runs left on this machine."""
    root = tempfile.gettempdir()
    with suppress(OSError):
        for name in os.listdir(root):
            discard(Path(root, name))


def discard(folder: Path, *, mine: bool = False) -> None:
    """Remove a folder if it is a scratch folder of ours that nobody holds; `mine`: nobody but this worker."""
    with suppress(OSError):
        if not _ours(folder):
            return
        names = os.listdir(folder)
        if not names and _abandoned(folder):
            os.rmdir(folder)
        elif HELD in names or names == [NEW]:
            lock = folder / (HELD if HELD in names else NEW)
            with _locked(lock), nullcontext() if mine else _locked(folder):
                _remove(folder)


@contextmanager
def used(folder: Path) -> Iterator[None]:
    """Hold a scratch folder for the worker that writes into it; do nothing about any other folder."""
    with _locked(folder, fcntl.LOCK_SH) if _ours(folder) else nullcontext():
        yield


def _made() -> tuple[Path, int]:
    """Return a new folder and its lock; try again if another task took it for one that was left, before the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(folder / NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(folder / NEW, folder / HELD)
                return folder, lock
            except BaseException:
                os.close(lock)
                raise
        except FileNotFoundError:
            continue
        except BaseException:
            with suppress(OSError):
                _remove(folder)
            raise


def _ours(folder: Path) -> bool:
    """True if a path has the name and the place of our folders, and is a plain folder of this user."""
    if not _NAME.fullmatch(folder.name) or str(folder.parent) != tempfile.gettempdir():
        return False
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _abandoned(folder: Path) -> bool:
    """True if an empty folder is as `mkdtemp` makes it, and too old to be in the making."""
    status = os.lstat(folder)
    return status.st_mode & 0o777 == 0o700 and time.time() - status.st_mtime > _ABANDONED


@contextmanager
def _locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Lock a plain file or a folder; raise OSError if somebody else has it, or if it is anything else."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(f"{path} is neither a file nor a folder")
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock file last: a folder that a kill leaves half removed is then still recognised."""
    with os.scandir(folder) as inside:
        others = [item for item in inside if item.name not in (NEW, HELD)]
    for item in others:
        if item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(item.path)
    if set(os.listdir(folder)) <= {NEW, HELD}:
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)
