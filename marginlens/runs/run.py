"""A run's folder, and what it says of itself.

config.json         settings, data fingerprint, version of the numerics, hash
environment.jsonl   a line per start: versions, device, git commit, time
metrics.jsonl       a line per epoch; what a second run of the same settings gives again, bit for bit on a CPU
speed.jsonl         a line per epoch: seconds, images per second
lens.jsonl          a line per epoch: rows of the loss, with `--lens`
checkpoints/        the last two (`checkpoint.py`)
result.json         there when the run is complete
failure.json        there when its last start failed: time, line, exit code, step
evaluations/        a file for each evaluation
tensorboard/        the same curves, when tensorboard is installed
"""

from __future__ import annotations

import errno
import fcntl
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
from marginlens.files import expanded, opened, parse
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
"""What a run's folder holds besides its evaluations and its weights."""
EVALUATION_FILES = "[!.]*.json"
"""Of evaluations/; a hidden one is another program's, or was never finished."""
_HEADER = 100_000_000
"""The longest header of a file of weights that safetensors reads."""
_LONGEST = 500
"""Characters of a line, without what to do."""

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run's folder. `open_run` gives one whose records are read anew each time that they are asked for.

    One of a store was looked at as a whole: it has a state, and what was read then is kept.
    """

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
    state: State = "interrupted"
    """As it was when its store was read. running: its lock is held; interrupted: none of the others."""
    why: str = ""
    """Why it failed, in a line."""
    _seen: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """What was read when its store was; None: nothing is kept."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def key(self) -> str:
        """Its name in a page: letters, digits and dashes."""
        return f"run-{self.id}"

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
        return (self.path / "result.json").is_file() if self._seen is None else self.outcome is not None

    @property
    def result(self) -> Result:
        """What pre-training gave: epochs, steps, loss, kNN, the weights' checksum."""
        if self.outcome is None:
            raise ValueError(f"{self.path} is not complete; go on with: {self.command} --resume")
        return self.outcome

    @property
    def outcome(self) -> Result | None:
        """The same, or None before the end."""
        path = self.path / "result.json"
        return self._kept("outcome", lambda: records.one(Result, path) if path.is_file() else None)

    @property
    def metrics(self) -> list[Epoch]:
        """What was measured in each epoch."""
        return self._kept("metrics", lambda: records.lines(Epoch, self.path / "metrics.jsonl"))

    @property
    def speeds(self) -> list[Speed]:
        """How fast each epoch was."""
        return self._kept("speeds", lambda: records.lines(Speed, self.path / "speed.jsonl"))

    @property
    def looks(self) -> list[Look]:
        """What a lens saw in each epoch; [] if the run was made without one."""
        return self._kept("looks", lambda: records.lines(Look, self.path / "lens.jsonl"))

    @property
    def starts(self) -> list[Start]:
        """Where and when it was begun and resumed."""
        return self._kept("starts", lambda: records.lines(Start, self.path / "environment.jsonl"))

    @property
    def evaluation_files(self) -> dict[str, Evaluation]:
        """Every evaluation that was measured, by the name of its file."""
        found = (self.path / "evaluations").glob(EVALUATION_FILES)
        return self._kept("evaluations", lambda: {path.name: self.evaluation(path) for path in sorted(found)})

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation that was measured."""
        return list(self.evaluation_files.values())

    def evaluation(self, path: Path) -> Evaluation:
        """Return the record of an evaluation of this run."""
        try:
            found = records.one(Evaluation, path)
            if found.run != self.id:
                raise ValueError(f"{path} is of the run {quoted_input(found.run)}, and lies in the folder of {self.id}")
            if not evals.get(found.kind).elsewhere and found.data != self.settings.data:
                raise ValueError(
                    f"{path} is on {quoted_input(found.data)}, and its run learned from {self.settings.data}"
                )
        except ValueError as error:
            raise ValueError(f"{error}; remove that file, and evaluate again") from None
        return found

    @property
    def last(self) -> Epoch | None:
        """The metrics of the last epoch; None before the first one's end."""
        return self.metrics[-1] if self.metrics else None

    @property
    def epochs_done(self) -> int:
        """Epochs whose metrics are written."""
        return len(self.metrics)

    @property
    def device(self) -> str:
        """What it ran on last."""
        return self.starts[-1].device if self.starts else ""

    @property
    def started(self) -> str:
        """When it was begun, in UTC."""
        return self.starts[0].time if self.starts else ""

    @property
    def resumed(self) -> str:
        """When it was last begun or resumed, in UTC."""
        return self.starts[-1].time if self.starts else ""

    @property
    def but_seed(self) -> str:
        """All its settings but the seed."""
        return self._kept("but_seed", lambda: self.settings.model_copy(update={"seed": 0}).model_dump_json())

    @property
    def family(self) -> tuple[str, str, int]:
        """What runs share that differ in their seed alone: settings, the data's content, the numerics."""
        return self.but_seed, self.data, self.numerics

    @property
    def order(self) -> tuple[int, str]:
        """By seed, and then by name."""
        return self.settings.seed, self.name

    @property
    def weights(self) -> bool:
        """True if a checkpoint is there that looks whole: its length is what it says, its content is not hashed."""
        found = self.path / "checkpoints"
        return self._kept("weights", lambda: any(_looks_whole(path) for path in checkpoint.names(found)))

    @property
    def size_bytes(self) -> int:
        """Of all its files; links are not followed."""
        return self._kept("size", lambda: size_of(self.path))

    @property
    def weights_bytes(self) -> int:
        """Of its checkpoints."""
        return size_of(self.path / "checkpoints")

    @property
    def changed(self) -> float:
        """When a record of it was last written, in seconds since 1970."""
        found = [self.path / name for name in RECORDS] + list((self.path / "evaluations").glob(EVALUATION_FILES))
        return max((path.stat().st_mtime for path in found if path.is_file()), default=0.0)

    def checkpoint(self) -> checkpoint.Checkpoint:
        """Return the last checkpoint of a complete run, whose records are whole too."""
        steps = self.result.steps
        self.check_records()
        found, damaged = checkpoint.newest(self.path / "checkpoints", self.id)
        if found is None:
            raise ValueError(f"{self.path} has no checkpoint: its weights are gone, its records can still be read")
        if damaged or found.facts["step"] != steps:
            why = damaged[0] if damaged else f"{self.path} lacks its last checkpoint"
            raise ValueError(f"{why}; this makes the end again: {self.command} --resume")
        return found

    def check_records(self) -> None:
        """Raise if the metrics are not those of a complete run: a proper line for each epoch."""
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
    """In a line, with what to do."""
    state: State = "unreadable"

    @property
    def name(self) -> str:
        return self.path.name


def open_run(path: Run | str | os.PathLike[str]) -> Run:
    """Return a run by its folder; one that is open already is returned as it is."""
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
    """Look at a folder of a store, and change nothing; `ours`: its lock is held by the caller, so it is not running."""
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
    except Exception as error:  # one bad folder never keeps us from showing the others
        return Unreadable(path, _remedied(f"{path} holds a record that no run wrote ({type(error).__name__})"))


def held(path: Path) -> bool:
    """Return True if some process holds the run's folder, here or, where the file system says so, elsewhere."""
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
    """Yield the relative name of every plain file in a folder; links are neither followed nor listed."""
    with os.scandir(folder / below) as found:
        for item in sorted(found, key=lambda item: item.name):
            name = f"{below}{item.name}"
            if item.is_dir(follow_symlinks=False):
                yield from files(folder, f"{name}/")
            elif item.is_file(follow_symlinks=False):
                yield name


def size_of(folder: Path) -> int:
    """Return the size of what is there at this moment: a run at work writes and removes files meanwhile."""
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
    """Read every record once, so that whoever uses the run meets no surprise."""
    for name, value in run.settings:
        if isinstance(value, int) and value > MOST and name != "seed":
            raise ValueError(f"{run.path / 'config.json'} has {name} {quoted_input(value)}; the most is {MOST}")
    _ = run.outcome, run.evaluation_files, run.metrics, run.speeds, run.starts
    if run.state == "complete" and run.epochs_done != run.settings.epochs:
        of = f"{run.epochs_done} of {run.settings.epochs} epochs"
        raise ValueError(f"{run.path / 'metrics.jsonl'} lost lines: the run is complete, and it has {of}")


def _looks_whole(path: Path) -> bool:
    """Return True if a safetensors file is as long as its header says."""
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
    """Return a line, not too long, that ends with what to do."""
    if not re.search(r"; (re)?move (it|that file)\b", why):
        why += "; repair it, or move its folder out of the store"
    what, _, remedy = why.rpartition("; ")
    return f"{what[:_LONGEST]}; {remedy}"


def _one_line(said: str) -> str:
    return " ".join(said.split())[:_LONGEST]
