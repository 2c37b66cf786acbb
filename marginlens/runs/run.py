"""A run's folder, and its contents.

config.json         settings, data fingerprint, version of the numerics, hash
environment.jsonl   a line per start: versions, device, git commit, time
metrics.jsonl       a line per epoch; on a CPU, a second run of the same settings gives the same bits
speed.jsonl         a line per epoch: seconds, images per second
lens.jsonl          a line per epoch: rows of the loss, with `--lens`
checkpoints/        the last two (`checkpoint.py`)
result.json         present if the run is complete
failure.json        present if its last start failed: time, line, exit code, step
evaluations/        a file for each evaluation
tensorboard/        the same curves, if tensorboard is installed
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from marginlens import evals
from marginlens.data.views import Triple
from marginlens.files import expanded, fcntl, opened, parse
from marginlens.runs import checkpoint, records
from marginlens.runs.config import NEUTRAL, NUMERICS, Pretrain, changed
from marginlens.runs.records import Config, Epoch, Evaluation, Failure, Look, Result, Speed, Start
from marginlens.settings import MOST, build, quoted_input

State = Literal["complete", "running", "interrupted", "failed", "unreadable"]
STATES: tuple[State, ...] = ("complete", "running", "interrupted", "failed", "unreadable")

RECORDS = (
    "config.json",
    "environment.jsonl",
    "metrics.jsonl",
    "speed.jsonl",
    "lens.jsonl",
    "result.json",
    "failure.json",
)
"""Files of a run's folder, besides its evaluations and its weights."""
EVALUATION_FILES = "[!.]*.json"
"""In evaluations/. A hidden file is another program's, or unfinished."""
_HEADER = 100_000_000
"""Longest header that safetensors reads."""
_LONGEST = 500
"""Characters of a line, without its remedy."""

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run's folder. A run from `open_run` reads its records again at each access.

    A run from a store was examined as a whole: it has a state, and keeps the records read at that time.
    """

    path: Path
    settings: Pretrain
    id: str
    data: str
    """Fingerprint of the data it learns from."""
    mean: Triple
    std: Triple
    """Mean and std that normalise its images."""
    identity: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The facts whose hash is the id."""
    state: State = "interrupted"
    """State when the store was read. "running": its lock is held. "interrupted": none of the other states."""
    why: str = ""
    """Why it failed, in a line."""
    _seen: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """Records read with the store; None means that nothing is kept."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def key(self) -> str:
        """Its name in a page: letters, digits and dashes."""
        return f"run-{self.id}"

    @property
    def numerics(self) -> int:
        """Version of the numerics at its start."""
        return int(self.identity.get("numerics", NUMERICS))

    @property
    def command(self) -> str:
        """The command that makes this run: all settings from its own record, in the same store."""
        config, store = (shlex.quote(str(at)) for at in (self.path / "config.json", self.path.parent))
        return f"marginlens pretrain --config {config} --runs {store}"

    @property
    def complete(self) -> bool:
        return (self.path / "result.json").is_file() if self._seen is None else self.outcome is not None

    @property
    def result(self) -> Result:
        """The result of pre-training: epochs, steps, loss, kNN. Raises if the run is not complete."""
        if self.outcome is None:
            raise ValueError(f"{self.path} is not complete; resume it with: {self.command} --resume")
        return self.outcome

    @property
    def outcome(self) -> Result | None:
        """The same, or None before the end."""
        path = self.path / "result.json"
        return self._kept("outcome", lambda: records.one(Result, path) if path.is_file() else None)

    @property
    def metrics(self) -> list[Epoch]:
        """Metrics of each epoch."""
        return self._kept("metrics", lambda: records.lines(Epoch, self.path / "metrics.jsonl"))

    @property
    def speeds(self) -> list[Speed]:
        """Speed of each epoch."""
        return self._kept("speeds", lambda: records.lines(Speed, self.path / "speed.jsonl"))

    @property
    def looks(self) -> list[Look]:
        """Looks of a lens, one for each epoch; [] if the run was made without a lens."""
        return self._kept("looks", lambda: records.lines(Look, self.path / "lens.jsonl"))

    @property
    def starts(self) -> list[Start]:
        """Where and when it was started and resumed."""
        return self._kept("starts", lambda: records.lines(Start, self.path / "environment.jsonl"))

    @property
    def evaluation_files(self) -> dict[str, Evaluation]:
        """Every evaluation, by the name of its file."""
        found = (self.path / "evaluations").glob(EVALUATION_FILES)
        return self._kept("evaluations", lambda: {path.name: self.evaluation(path) for path in sorted(found)})

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation."""
        return list(self.evaluation_files.values())

    def evaluation(self, path: Path) -> Evaluation:
        """Return the record of an evaluation of this run."""
        try:
            found = records.one(Evaluation, path)
            if found.run != self.id:
                raise ValueError(f"{path} is from the run {quoted_input(found.run)}, but in the folder of {self.id}")
            if not evals.get(found.kind).elsewhere and found.data != self.settings.data:
                raise ValueError(
                    f"{path} is on {quoted_input(found.data)}, but its run learned from {self.settings.data}"
                )
        except ValueError as error:
            raise ValueError(f"{error}; remove that file, and evaluate again") from None
        return found

    @property
    def last(self) -> Epoch | None:
        """Metrics of the last epoch; None before the first epoch ends."""
        return self.metrics[-1] if self.metrics else None

    @property
    def epochs_done(self) -> int:
        """Number of epochs with metrics."""
        return len(self.metrics)

    @property
    def device(self) -> str:
        """Device of the last start."""
        return self.starts[-1].device if self.starts else ""

    @property
    def started(self) -> str:
        """Time of the first start, in UTC."""
        return self.starts[0].time if self.starts else ""

    @property
    def resumed(self) -> str:
        """Time of the last start, in UTC."""
        return self.starts[-1].time if self.starts else ""

    @property
    def but_seed(self) -> str:
        """All settings but the seed."""
        return self._kept("but_seed", lambda: self.settings.model_copy(update={"seed": 0}).model_dump_json())

    @property
    def family(self) -> tuple[str, str, int]:
        """Shared by runs that differ only in their seed: settings, the data's content, the numerics."""
        return self.but_seed, self.data, self.numerics

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: by seed, then by name."""
        return self.settings.seed, self.name

    @property
    def weights(self) -> bool:
        """True if a checkpoint looks whole: its length matches its header. Its content is not hashed."""
        found = self.path / "checkpoints"
        return self._kept("weights", lambda: any(_looks_whole(path) for path in checkpoint.names(found)))

    @property
    def size_bytes(self) -> int:
        """Size of all its files. Symlinks are not followed."""
        return self._kept("size", lambda: size_of(self.path))

    @property
    def weights_bytes(self) -> int:
        """Size of its checkpoints."""
        return size_of(self.path / "checkpoints")

    @property
    def changed(self) -> float:
        """Time of the last write to a record, in seconds since 1970."""
        found = [self.path / name for name in RECORDS] + list((self.path / "evaluations").glob(EVALUATION_FILES))
        return max((path.stat().st_mtime for path in found if path.is_file()), default=0.0)

    def checkpoint(self) -> checkpoint.Checkpoint:
        """Return the last checkpoint of a complete run. Raise unless its records are whole, too."""
        steps = self.result.steps
        self.check_records()
        found, damaged = checkpoint.newest(self.path / "checkpoints", self.id)
        if found is None:
            raise ValueError(f"{self.path} has no checkpoint: its weights are gone, its records can still be read")
        if damaged or found.facts["step"] != steps:
            why = damaged[0] if damaged else f"{self.path} has lost its last checkpoint"
            raise ValueError(f"{why}; to redo the end, run: {self.command} --resume")
        return found

    def check_records(self) -> None:
        """Raise unless the metrics are those of a complete run: one valid line for each epoch."""
        epochs = [line.epoch for line in self.metrics]
        if epochs != list(range(1, self.settings.epochs + 1)):
            raise ValueError(
                f"{self.path / 'metrics.jsonl'} has {len(epochs)} of {self.settings.epochs} epochs: its lines were "
                f"lost or changed, and cannot be made again; move {self.path} away, and start over"
            )

    def joined(self, evaluations: dict[str, Evaluation]) -> Run:
        """Return the run with the evaluations of its copies in other stores."""
        return replace(self, _seen={**(self._seen or {}), "evaluations": evaluations})

    def _kept(self, name: str, read: Callable[[], T]) -> T:
        if self._seen is None:
            return read()
        if name not in self._seen:
            self._seen[name] = read()
        found: T = self._seen[name]
        return found


@dataclass(frozen=True)
class Unreadable:
    """A folder of a store that no run wrote, or that is damaged."""

    path: Path
    why: str
    """The reason in a line, with what to do."""
    state: State = "unreadable"

    @property
    def name(self) -> str:
        return self.path.name


def open_run(path: Run | str | os.PathLike[str]) -> Run:
    """Return a run by its folder. An open run is returned unchanged."""
    if isinstance(path, Run):
        return path
    folder = expanded(path)
    if not (folder / "config.json").is_file():
        what = "is not a run's folder: it has no config.json" if folder.exists() else "does not exist"
        near = sorted(p.name for p in folder.parent.glob(f"{escape(folder.name)}*") if (p / "config.json").is_file())
        hint = f"did you mean {folder.parent / near[0]}?" if near else "give the folder that marginlens pretrain named"
        raise ValueError(f"{folder} {what}; {hint}")
    content = records.read_json(folder / "config.json")
    if content.get("format") != records.FORMAT:
        raise ValueError(f"{folder / 'config.json'} was not written by this version of marginlens")
    found = records.checked(Config, content, str(folder / "config.json"))
    try:
        settings = build(Pretrain, NEUTRAL | found.settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a run's: {error}") from None
    if what := changed(settings, found.data, found.id, found.identity):
        raise ValueError(f"{folder / 'config.json'} was changed: {what}")
    return Run(folder, settings, found.id, found.data, (*found.mean,), (*found.std,), found.identity)  # type: ignore[arg-type]


def examine(path: Path, *, ours: bool = False) -> Run | Unreadable:
    """Examine a folder of a store without changing it. `ours` means that the caller holds the lock, so it is not
    running.
    """
    try:
        run = replace(_open(path), _seen={})
        for name in RECORDS:
            if os.path.lexists(path / name) and not (path / name).is_file():
                raise ValueError(f"{path / name} is not a file; remove it, or put the file in its place")
        why = ""
        state: State = "interrupted"
        if not ours and held(path):
            state = "running"
        elif run.complete:
            state = "complete"
        elif (path / "failure.json").is_file():
            state, why = "failed", _one_line(records.one(Failure, path / "failure.json").line)
        found = replace(run, state=state, why=why)
        _check(found)
        return found
    except OSError as error:
        return Unreadable(path, _remedied(f"{path} cannot be read ({error.strerror or error})"))
    except ValueError as error:
        return Unreadable(path, _remedied(" ".join(str(error).split())))
    except Exception as error:  # because one bad folder must not hide the others
        return Unreadable(path, _remedied(f"{path} holds a record that no run wrote ({type(error).__name__})"))


def held(path: Path) -> bool:
    """True if a process holds the run's folder, here or, if the file system reports it, on another machine."""
    return _locked(path, os.O_DIRECTORY) or _locked(path / "lock", os.O_NOFOLLOW)


def _locked(path: Path, kind: int) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | kind)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(file)
    return False


def files(folder: Path, below: str = "") -> Iterator[str]:
    """Yield the relative name of every plain file in a folder. Symlinks are neither followed nor listed."""
    with os.scandir(folder / below) as found:
        for item in sorted(found, key=lambda item: item.name):
            name = f"{below}{item.name}"
            if item.is_dir(follow_symlinks=False):
                yield from files(folder, f"{name}/")
            elif item.is_file(follow_symlinks=False):
                yield name


def size_of(folder: Path) -> int:
    """Return the size of the files there at this moment; a running run writes and removes files meanwhile."""
    total = 0
    for below, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(below, name)).st_size
    return total


def _open(path: Path) -> Run:
    if not path.exists():
        raise ValueError(f"{path} is a broken symlink; remove it, or restore what it pointed to")
    if not (path / "config.json").is_file():
        inside = sorted(os.listdir(path))
        if any(name.startswith(".config.json") for name in inside) or inside == ["lock"]:
            raise ValueError(f"{path} is half-written: it has no config.json yet; remove it if nothing is writing it")
        raise ValueError(f"{path} is not a run's folder: it has no config.json; move it out of the store")
    return open_run(path)


def _check(run: Run) -> None:
    """Read every record once, so that later reads do not fail."""
    for name, value in run.settings:
        if isinstance(value, int) and value > MOST and name != "seed":
            raise ValueError(f"{run.path / 'config.json'} has {name} {quoted_input(value)}; the maximum is {MOST}")
    _ = run.outcome, run.evaluation_files, run.metrics, run.speeds, run.starts, run.looks
    if run.state == "complete" and run.epochs_done != run.settings.epochs:
        of = f"{run.epochs_done} of {run.settings.epochs} epochs"
        raise ValueError(f"{run.path / 'metrics.jsonl'} lost lines: the run is complete, but it has {of}")


def _looks_whole(path: Path) -> bool:
    """True if a safetensors file is as long as its header says."""
    try:
        with opened(path) as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 0 < length <= min(size - 8, _HEADER):
                return False
            header = parse(file.read(length).decode())
        end = max((spec["data_offsets"][1] for name, spec in header.items() if name != "__metadata__"), default=0)
        return bool(size == 8 + length + end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remedied(why: str) -> str:
    """Return a line of limited length that ends with what to do."""
    if not re.search(r"; (re)?move (it|that file)\b", why):
        why += "; repair it, or move its folder out of the store"
    what, _, remedy = why.rpartition("; ")
    return f"{what[:_LONGEST]}; {remedy}"


def _one_line(said: str) -> str:
    return " ".join(said.split())[:_LONGEST]
