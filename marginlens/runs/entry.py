"""One folder of a store, looked at: what state its run is in, and what it has to show. Looking changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from marginlens.files import opened, parse
from marginlens.train import check, checkpoint
from marginlens.train.files import lines, read_json
from marginlens.train.record import EVALUATION_FILES, Run, open_run

State = Literal["complete", "running", "interrupted", "failed", "unreadable"]
STATES: tuple[State, ...] = ("complete", "running", "interrupted", "failed", "unreadable")

RECORDS = ("config.json", "environment.jsonl", "metrics.jsonl", "speed.jsonl", "result.json", "failure.json")
"""What a run's folder holds besides its evaluations and its weights."""
_HEADER = 100_000_000
"""The longest header of a file of weights that safetensors reads."""
_LONGEST = 500
"""Characters of a line, without what to do."""


@dataclass(frozen=True)
class Entry:
    """A folder of a store. What could be read was read once, when it was looked at."""

    path: Path
    state: State
    """running: its lock is held; interrupted: none of the others; unreadable: corrupt, foreign, half-written."""
    run: Run | None = None
    """None when unreadable."""
    why: str = ""
    """One line for failed and unreadable."""

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def result(self) -> dict[str, Any]:
        """What pre-training gave; empty before its end."""
        return self.run.result if self.run and self.run.complete else {}

    @cached_property
    def evaluation_files(self) -> dict[str, dict[str, Any]]:
        """Every probe, kNN and transfer that was measured, by the name of its file."""
        return self.run.evaluation_files if self.run else {}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Every probe, kNN and transfer that was measured."""
        return list(self.evaluation_files.values())

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """Where and when it was begun and gone on with: the lines of environment.jsonl."""
        return lines(self.path / "environment.jsonl") if self.run else []

    @cached_property
    def last(self) -> dict[str, Any]:
        """The metrics of the last epoch; empty before the first one's end."""
        return self._metrics[1]

    @property
    def epochs_done(self) -> int:
        """Epochs whose metrics are written."""
        return self._metrics[0]

    @cached_property
    def _metrics(self) -> tuple[int, dict[str, Any]]:
        return check.metrics(self.path / "metrics.jsonl") if self.run else (0, {})

    @cached_property
    def speeds(self) -> list[float]:
        """Images a second, of the epochs in which they were measured."""
        return check.speed(self.path / "speed.jsonl") if self.run else []

    @property
    def device(self) -> str:
        """What it ran on last."""
        return str(self.starts[-1].get("device", "")) if self.starts else ""

    @property
    def started(self) -> str:
        """When it was begun, in UTC."""
        return str(self.starts[0].get("time", "")) if self.starts else ""

    @cached_property
    def weights(self) -> bool:
        """Whether a checkpoint is there that looks whole: its length is what it says, its content is not hashed."""
        return self.run is not None and any(_looks_whole(p) for p in checkpoint.names(self.path / "checkpoints"))

    @cached_property
    def size_bytes(self) -> int:
        """Of all its files; links are not followed."""
        return size_of(self.path)

    @cached_property
    def weights_bytes(self) -> int:
        """Of its checkpoints."""
        return size_of(self.path / "checkpoints")

    @cached_property
    def changed(self) -> float:
        """When a record of it was last written, in seconds since 1970."""
        found = [self.path / name for name in RECORDS] + list((self.path / "evaluations").glob(EVALUATION_FILES))
        return max((path.stat().st_mtime for path in found if path.is_file()), default=0.0)


def examine(path: Path, *, ours: bool = False) -> Entry:
    """The entry of a folder; `ours`: its lock is held by the caller, which does not make it a running one."""
    try:
        run = _open(path)
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
            state, why = "failed", _failure(path / "failure.json")
        found = Entry(path, state, run, why)
        _check(found)
        return found
    except OSError as error:
        return Entry(path, "unreadable", why=_remedied(f"{path} cannot be read ({error.strerror or error})"))
    except ValueError as error:
        return Entry(path, "unreadable", why=_remedied(" ".join(str(error).split())))
    except Exception as error:  # one bad folder never keeps us from showing the others
        why = f"{path} holds a record that no run wrote ({type(error).__name__})"
        return Entry(path, "unreadable", why=_remedied(why))


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
    """Relative name of every plain file in a folder; links are neither followed nor listed."""
    with os.scandir(folder / below) as found:
        for item in sorted(found, key=lambda item: item.name):
            name = f"{below}{item.name}"
            if item.is_dir(follow_symlinks=False):
                yield from files(folder, f"{name}/")
            elif item.is_file(follow_symlinks=False):
                yield name


def when(one: Mapping[str, Any]) -> str:
    """The time at which an evaluation was made."""
    return str(one.get("environment", {}).get("time", ""))


def _open(path: Path) -> Run:
    if not path.exists():
        raise ValueError(f"{path} is a broken symlink; remove it, or restore what it pointed to")
    if not (path / "config.json").is_file():
        inside = sorted(os.listdir(path))
        if any(name.startswith(".config.json") for name in inside) or inside == ["lock"]:
            raise ValueError(f"{path} is half-written: it has no config.json yet; remove it if nothing is writing it")
        raise ValueError(f"{path} is not a run's folder: it has no config.json; move it out of the store")
    return open_run(path)


def _check(entry: Entry) -> None:
    """Reads every record once, so that whoever uses the entry meets no surprise."""
    path, run = entry.path, entry.run
    assert run is not None
    check.settings(path / "config.json", run.settings)
    _ = entry.result, entry.evaluation_files, entry.last, entry.speeds
    if entry.state == "complete" and entry.epochs_done != run.settings.epochs:
        of = f"{entry.epochs_done} of {run.settings.epochs} epochs"
        raise ValueError(f"{path / 'metrics.jsonl'} lost lines: the run is complete, and it has {of}")
    check.starts(path / "environment.jsonl", entry.starts)


def _failure(path: Path) -> str:
    found = read_json(path)
    check.failure(path, found)
    return _first_line(found["line"])


def size_of(folder: Path) -> int:
    """Of what is there at this moment: a run at work writes and removes files meanwhile."""
    total = 0
    for below, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(below, name)).st_size
    return total


def _looks_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
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


def _first_line(said: object) -> str:
    return " ".join(str(said).split())[:_LONGEST]
