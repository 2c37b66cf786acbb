"""A run at work: its folder is begun, held by one process at a time, and its starts and failures are noted."""

from __future__ import annotations

import errno
import fcntl
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
from marginlens.files import expanded
from marginlens.runs.config import NUMERICS, Pretrain, digits, facts, name_of
from marginlens.runs.records import FORMAT, save_json
from marginlens.runs.run import Run, open_run

_KEPT: ContextVar[dict[Path, Hold] | None] = ContextVar("kept", default=None)
"""Folders that are held until the end of `keeping`."""
_HOLDER = b"process "
"""How a lock file begins, in which its holder is named."""


class InUse(ValueError):  # noqa: N818  it is a state, not always an error
    """A run that another process holds."""

    code = 75
    """What a worker ends with that finds its run so: it is no failure, and may be tried again."""


@dataclass(frozen=True)
class Hold:
    """A run's folder, held by this process: the folder itself is locked, and a file in it.

    The file's lock alone would not do: it can be removed, and another one be locked. The folder's alone would not
    either: not every file system can lock folders. filelock would not do: it cannot lock a folder, and it cannot tell
    whether a lock is held without writing to a store that is only looked at.
    """

    path: Path
    folder: int
    """The folder, open."""
    file: int
    """Its file `lock`, open."""
    guarded: bool
    """True if the folder is locked, and not only its file."""

    def check(self) -> None:
        """Raise if what is at the folder's name now is not what this process holds: nothing more may be written."""
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
        """Let go of the folder."""
        os.close(self.file)
        os.close(self.folder)


@contextmanager
def locked(run: Run) -> Iterator[Hold]:
    """Hold the run's folder for this process; the system lets go of it however the process ends."""
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
    """Keep a run that is locked inside of this so until its end; it can be locked inside again."""
    kept: dict[Path, Hold] = {}
    before = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(before)
        for hold in kept.values():
            hold.close()


def _take(run: Run) -> Hold:
    """Lock the run's folder and its lock file, which stay locked while they are open."""
    path = run.path / "lock"
    again = {"kept": "nothing was lost", "then": "give the command again"}
    with disk(run.path, **again):
        folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with disk(path, **again):
            # a link would let us write into what it leads to, and a pipe would wait
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
    """Raise unless a lock file is one: it is written to."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ValueError(f"{path} is not a regular file; remove it")
    if os.pread(file, len(_HOLDER), 0) not in (b"", _HOLDER):
        raise ValueError(f"{path} was not written by marginlens; move it away")


def _lock(file: int) -> bool | None:
    """Lock what no other process holds for longer than a look at it takes; None if this cannot be locked at all."""
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
"""Errors of file systems that cannot lock a folder, as NFS cannot."""


def make_run(settings: Pretrain, feed: Feed, runs: Path) -> Run:
    """The folder of a run with these settings, made if it is not there; what is there must be the same run."""
    fingerprint = feed.fingerprint
    if settings.weights:  # found from elsewhere too
        settings = settings.model_copy(update={"weights": str(expanded(settings.weights).absolute())})
    identity = facts(settings, fingerprint)
    id_ = digits(identity)
    path = expanded(runs) / name_of(settings, id_)
    if (path / "config.json").exists():
        run = open_run(path)
        if run.id != id_:
            raise ValueError(f"{path} holds a run of other settings; give --runs another folder")
        return replace(run, settings=settings)  # the weights it starts from may lie elsewhere by now
    try:
        path.mkdir(parents=True, exist_ok=True)
        known = {"format": FORMAT, "id": id_, "settings": settings.model_dump(mode="json")}
        known |= {"data": fingerprint, "mean": feed.mean, "std": feed.std}
        save_json(path / "config.json", known | {"identity": identity})
    except OSError as error:
        with suppress(OSError):
            path.rmdir()  # an empty one would be no run's folder, for everyone who looks into the store
        raise ValueError(f"cannot write to {path} ({error.strerror}); give --runs another folder") from None
    return open_run(path)


@contextmanager
def failures(run: Run, step: Callable[[], int], hold: Hold | None = None) -> Iterator[None]:
    """Note in failure.json that the run failed, and at which step.

    A signal that asked it to end is no failure, nor is a start that was refused at the door. A folder that is no
    longer the run's gets no note.
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
    """failure.json, if the disk takes it: that it is full is the failure, perhaps."""
    known = {"time": _now(), "line": " ".join(line.split()), "code": code, "step": step}
    with suppress(OSError):
        save_json(run.path / "failure.json", known)


def environment(device: torch.device, **more: Any) -> dict[str, Any]:
    """Where and with what a run runs."""
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
    """What a run on so many threads of a CPU records as its device."""
    return f"CPU, {threads} threads"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def _commit() -> str:
    """The commit of the package's own checkout, with a + where files were changed; '' when it is not in one.

    Asked once: a process runs the code that it has loaded, whatever is committed meanwhile.
    """
    ask = ["git", "-C", str(Path(marginlens.__file__).parent)]
    describe = [*ask, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        # fails where the package lies in someone else's checkout
        subprocess.run([*ask, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=5, check=True)
        found = subprocess.run(describe, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
