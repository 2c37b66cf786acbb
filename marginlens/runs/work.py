"""Work on a run: create its folder, hold it for one process, and note starts and failures."""

from __future__ import annotations

import errno
import os
import platform
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import marginlens
from marginlens.data.feed import Feed
from marginlens.errors import DataError, Stopped, disk
from marginlens.files import expanded, fcntl
from marginlens.runs.config import NUMERICS, Pretrain, digits, facts, name_of
from marginlens.runs.records import FORMAT, save_json
from marginlens.runs.run import Run, open_run

_KEPT: ContextVar[dict[Path, Hold] | None] = ContextVar("kept", default=None)
"""Folders held until the end of `keeping`."""
_HOLDER = b"process "
"""First bytes of a lock file; the name of its holder follows."""


class InUse(ValueError):  # noqa: N818  it is a state, not always an error
    """A run that another process holds."""

    code = 75
    """Exit code of a worker that finds its run in use. This is no failure: it may retry."""


@dataclass(frozen=True)
class Hold:
    """A run's folder, held by this process through two locks: on the folder, and on a file in it.

    - The file's lock alone is not enough: the file can be removed, and another one locked.
    - The folder's lock alone is not enough: not every file system can lock folders.
    - filelock is not enough: it cannot lock a folder, or test a lock without writing to the store.
    """

    path: Path
    folder: int
    """Open handle of the folder."""
    file: int
    """Open handle of its file `lock`."""
    guarded: bool
    """True if the folder itself is locked, too."""

    def check(self) -> None:
        """Raise if the folder's name now belongs to another folder. Nothing more may be written then."""
        if not self._same(self.path, self.folder):
            raise Stopped(f"{self.path} was moved, removed or replaced meanwhile; nothing was written to it since")
        if not self.guarded and not self._same(self.path / "lock", self.file):
            raise Stopped(
                f"{self.path / 'lock'} was removed meanwhile, and another process may work there; nothing was "
                f"written since. Go on with --resume"
            )

    @staticmethod
    def _same(path: Path, handle: int) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(handle))
        except OSError:
            return False

    def close(self) -> None:
        """Release the folder."""
        os.close(self.file)
        os.close(self.folder)


@contextmanager
def locked(run: Run) -> Iterator[Hold]:
    """Hold the run's folder for this process. The system releases it however the process ends."""
    kept = _KEPT.get()
    if kept is not None:
        if run.path not in kept:
            kept[run.path] = _take(run)
        yield kept[run.path]
        return
    hold = _take(run)
    try:
        yield hold
    finally:
        hold.close()


@contextmanager
def keeping() -> Iterator[None]:
    """Keep a run that is locked inside until the end; it can be locked again inside."""
    kept: dict[Path, Hold] = {}
    before = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(before)
        for hold in kept.values():
            hold.close()


def _take(run: Run) -> Hold:
    """Lock the run's folder and its lock file. The locks last while the two are open."""
    path = run.path / "lock"
    again = {"kept": "nothing was lost", "then": "give the command again"}
    with disk(run.path, **again):
        folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with disk(path, **again):
            # no symlink, because we would write into its target; no pipe, because we would wait
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(path, flags, 0o666)
        try:
            _check_lock_file(path, file)
            guarded, sole = _lock(folder), _lock(file)
            if sole is None:
                raise ValueError(f"{path} cannot be locked on this file system; give --runs a folder on another one")
            if guarded is False or not sole:
                holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
                raise InUse(f"{run.path} is in use by {holder}; wait for it, or stop it first")
            with disk(path, **again):
                os.truncate(file, 0)
                os.pwrite(file, _HOLDER + f"{os.getpid()} on {platform.node()}".encode(), 0)
        except BaseException:
            os.close(file)
            raise
    except BaseException:
        os.close(folder)
        raise
    return Hold(run.path, folder, file, bool(guarded))


def _check_lock_file(path: Path, file: int) -> None:
    """Raise unless this is a lock file, because it will be written to."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ValueError(f"{path} is not a regular file; remove it")
    if os.pread(file, len(_HOLDER), 0) not in (b"", _HOLDER):
        raise ValueError(f"{path} was not written by marginlens; move it away")


def _lock(file: int) -> bool | None:
    """Lock a file, and retry briefly, because others look at it for a moment. Return None if it cannot be locked at
    all.
    """
    for pause in (0.01, 0.1, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
    return False


_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot lock a folder, such as NFS."""


def make_run(settings: Pretrain, feed: Feed, runs: Path) -> Run:
    """Return the run with these settings, and create its folder if needed.

    An existing folder must hold the same run.
    """
    fingerprint = feed.fingerprint
    if settings.weights:  # absolute, so that it is found from any working directory
        settings = settings.model_copy(update={"weights": str(expanded(settings.weights).absolute())})
    identity = facts(settings, fingerprint)
    id_ = digits(identity)
    path = expanded(runs) / name_of(settings, id_)
    if (path / "config.json").exists():
        run = open_run(path)
        if run.id != id_:
            raise ValueError(f"{path} holds a run of other settings; give --runs another folder")
        return replace(run, settings=settings)  # these settings, because the initial weights may have moved
    try:
        path.mkdir(parents=True, exist_ok=True)
        known = {"format": FORMAT, "id": id_, "settings": settings.model_dump(mode="json")}
        known |= {"data": fingerprint, "mean": feed.mean, "std": feed.std}
        save_json(path / "config.json", known | {"identity": identity})
    except OSError as error:
        with suppress(OSError):
            path.rmdir()  # because an empty folder in a store is reported as damaged
        raise ValueError(f"cannot write to {path} ({error.strerror}); give --runs another folder") from None
    return open_run(path)


@contextmanager
def failures(run: Run, step: Callable[[], int], hold: Hold | None = None) -> Iterator[None]:
    """Note in failure.json that the run failed, and at which step.

    A stop by a signal is no failure, and neither is invalid input at the start. If the folder is no longer the run's,
    nothing is written.
    """
    try:
        yield
    except Exception as error:
        code = error.code if isinstance(error, Stopped) else 2 if isinstance(error, ValueError) else 1
        crashed = not isinstance(error, Stopped | ValueError)
        if crashed or isinstance(error, DataError) or (isinstance(error, Stopped) and code < 128):
            said = f"{type(error).__name__}: {error}" if crashed else str(error)
            with suppress(Stopped):
                if hold is not None:
                    hold.check()
                note_failure(run, said, code, step())
        raise


def note_failure(run: Run, line: str, code: int, step: int) -> None:
    """Write failure.json, if possible: the failure may be a full disk."""
    known = {"time": _now(), "line": " ".join(line.split()), "code": code, "step": step}
    with suppress(OSError):
        save_json(run.path / "failure.json", known)


def environment(device: torch.device, **more: Any) -> dict[str, Any]:
    """Return the software, device and time of a run."""
    cuda = device.type == "cuda"
    return {
        "time": _now(),
        "marginlens": marginlens.__version__,
        "numerics": NUMERICS,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(torch.get_num_threads()),
        **({"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} if cuda else {}),
        **more,
    }


def cpu_name(threads: int | str) -> str:
    """Return the device name that a run on this number of CPU threads records."""
    return f"CPU, {threads} threads"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def _commit() -> str:
    """Return the commit of the package's checkout, with a + if files were changed, or "" outside a checkout.

    Cached, because a process runs the code that it has loaded, whatever is committed meanwhile.
    """
    ask = ["git", "-C", str(Path(marginlens.__file__).parent)]
    describe = [*ask, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        # fails if the package is inside somebody else's checkout
        subprocess.run([*ask, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=5, check=True)
        found = subprocess.run(describe, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
