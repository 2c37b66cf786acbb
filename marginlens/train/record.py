"""A run's folder: what was asked for, where it ran, what was measured.

config.json         settings, data fingerprint, version of the numerics, hash
environment.jsonl   a line per start: versions, device, git commit, time
metrics.jsonl       a line per epoch; what a second run of the same settings gives again, bit for bit on a CPU
speed.jsonl         a line per epoch: seconds, images per second
checkpoints/        the last two (`checkpoint.py`)
result.json         there when the run is complete
failure.json        there when its last start failed: time, line, exit code, step
evaluations/        probe, kNN, transfer: a file each
tensorboard/        the same curves, when tensorboard is installed
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import shlex
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

import torch

import marginlens
from marginlens.data.atomic import DataError
from marginlens.data.views import Triple
from marginlens.paths import expanded
from marginlens.train import check, checkpoint
from marginlens.train.config import Pretrain, build
from marginlens.train.feed import Feed
from marginlens.train.files import lines, read_json, save_json
from marginlens.train.identity import NEUTRAL, NUMERICS, changed, digits, facts, name_of
from marginlens.train.stop import Stopped, disk

FORMAT = 1
EVALUATION_FILES = "[!.]*.json"
"""Of evaluations/; a hidden one is another program's, or was never finished."""
_KEPT: ContextVar[dict[Path, Hold] | None] = ContextVar("kept", default=None)
"""Folders that are held until the end of `keeping`."""
_HOLDER = b"process "
"""How a lock file begins, in which its holder is named."""


@dataclass(frozen=True)
class Run:
    """A run's folder, and what it says of itself."""

    path: Path
    settings: Pretrain
    id: str
    data: str
    """The fingerprint of the data it learns from."""
    mean: Triple
    std: Triple
    """What its images are normalised by."""
    identity: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What its id is the hash of."""

    @property
    def numerics(self) -> int:
        """The version of the numerics that it was begun with."""
        return int(self.identity.get("numerics", NUMERICS))

    @property
    def command(self) -> str:
        """What to type for this run: its own record spells everything out, and asks for the same store."""
        config, store = (shlex.quote(str(at)) for at in (self.path / "config.json", self.path.parent))
        return f"marginlens pretrain --config {config} --runs {store}"

    @property
    def complete(self) -> bool:
        return (self.path / "result.json").is_file()

    @property
    def result(self) -> dict[str, Any]:
        """What pre-training gave: epochs, steps, loss, kNN, the weights' checksum."""
        if not self.complete:
            raise ValueError(f"{self.path} is not complete; go on with: {self.command} --resume")
        found = read_json(self.path / "result.json")
        check.result(self.path / "result.json", found)
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary per epoch."""
        return lines(self.path / "metrics.jsonl")

    @property
    def evaluation_files(self) -> dict[str, dict[str, Any]]:
        """Every probe, kNN and transfer that was measured, by the name of its file."""
        return {path.name: self.evaluation(path) for path in sorted((self.path / "evaluations").glob(EVALUATION_FILES))}

    def evaluation(self, path: Path) -> dict[str, Any]:
        """One of them."""
        try:
            found = read_json(path)
            check.evaluation(path, found, self.id, self.settings.data)
        except ValueError as error:
            raise ValueError(f"{error}; remove that file, and evaluate again") from None
        return found

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Every probe, kNN and transfer that was measured."""
        return list(self.evaluation_files.values())

    def checkpoint(self) -> checkpoint.Checkpoint:
        """Return the last checkpoint of a complete run, whose records are whole too."""
        steps = self.result["steps"]
        check_records(self)
        found, damaged = checkpoint.newest(self.path / "checkpoints", self.id)
        if found is None:
            raise ValueError(f"{self.path} has no checkpoint: its weights are gone, its records can still be read")
        if damaged or found.facts["step"] != steps:
            why = damaged[0] if damaged else f"{self.path} lacks its last checkpoint"
            raise ValueError(f"{why}; this makes the end again: {self.command} --resume")
        return found


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


def check_records(run: Run) -> None:
    """Raise if the metrics are not those of a complete run: a proper line for each epoch."""
    check.metrics(run.path / "metrics.jsonl")
    epochs = [line.get("epoch") for line in run.metrics]
    if epochs != list(range(1, run.settings.epochs + 1)):
        raise ValueError(
            f"{run.path / 'metrics.jsonl'} has {len(epochs)} of {run.settings.epochs} epochs: its lines were lost or "
            f"changed, and cannot be made again; move {run.path} away, and start over"
        )


def open_run(path: Run | str | os.PathLike[str]) -> Run:
    """A run by its folder; one that is open already is returned as it is."""
    if isinstance(path, Run):
        return path
    folder = expanded(path)
    if not (folder / "config.json").is_file():
        what = "is not a run's folder: it has no config.json" if folder.exists() else "does not exist"
        near = sorted(p.name for p in folder.parent.glob(f"{escape(folder.name)}*") if (p / "config.json").is_file())
        hint = f"did you mean {folder.parent / near[0]}?" if near else "give the folder that marginlens pretrain named"
        raise ValueError(f"{folder} {what}; {hint}")
    found = read_json(folder / "config.json")
    if found.get("format") != FORMAT or "settings" not in found:
        raise ValueError(f"{folder / 'config.json'} was not written by this version of marginlens")
    try:
        settings = build(Pretrain, NEUTRAL | found["settings"])
        mean, std = (_triple(found[key]) for key in ("mean", "std"))
        run = Run(folder, settings, str(found["id"]), str(found["data"]), mean, std, dict(found.get("identity", {})))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a run's: {error}") from None
    if what := changed(run.settings, run.data, run.id, run.identity):
        raise ValueError(f"{folder / 'config.json'} was changed: {what}")
    return run


class InUse(ValueError):  # noqa: N818  it is a state, not always an error
    """A run that another process holds."""

    code = 75
    """What a worker ends with that finds its run so: it is no failure, and may be tried again."""


@dataclass(frozen=True)
class Hold:
    """A run's folder, held by this process: the folder itself is locked, and a file in it.

    The file's lock alone would not do: it can be removed, and another one be locked. The folder's alone would not
    either: not every file system can lock folders.
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


def _triple(values: Any) -> Triple:
    red, green, blue = (float(x) for x in values)
    if not math.isfinite(red + green + blue):
        raise ValueError(f"{values} are not three numbers")
    return red, green, blue


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
