"""A job: one pre-training, and the evaluations that follow it at once. As JSON it travels to whoever does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from marginlens import evals
from marginlens.errors import Stopped
from marginlens.paper import Cell
from marginlens.paper.match import follows, variants
from marginlens.runs import work
from marginlens.runs.config import Pretrain
from marginlens.runs.evaluate import Wanted, evaluate
from marginlens.runs.run import Run, open_run
from marginlens.runs.store import drop_weights
from marginlens.runs.work import note_failure
from marginlens.settings import MOST, Machine, Rates, Settings, build
from marginlens.train import pretrain as training


class Job(Settings):
    """One pre-training and its evaluations."""

    settings: Pretrain
    evaluations: tuple[Wanted, ...] = ()

    @property
    def data(self) -> tuple[str, ...]:
        """Every data set that it asks for, each once."""
        return tuple(dict.fromkeys((self.settings.data, *(e.data for e in self.evaluations))))

    @property
    def name(self) -> str:
        """Short, for the terminal."""
        chosen = self.settings
        return f"{chosen.method} {chosen.data} {chosen.effect} seed {chosen.seed}"

    def with_more(self, also: Sequence[str], beside: Rates) -> Job:
        """Return the same with further evaluations, and with more learning rates for each that has one."""
        further = (wanted(kind, self.settings.data) for kind in also)
        every = dict.fromkeys((*self.evaluations, *further))
        rated = (one.model_copy(update={"beside": beside}) if evals.get(one.kind).rated else one for one in every)
        return self.model_copy(update={"evaluations": tuple(rated)})


class Kept(Machine):
    """Where jobs are done, and what is kept of them: nothing of this changes a result."""

    runs: str = Field("runs", description="Folder of runs; what is complete in it is not run again.")
    engine: Literal["auto", "eager", "graph"] = Field("auto", description="As for marginlens pretrain.")
    knn_every: int = Field(10, ge=0, description="Epochs between looks at nearest neighbours; 0: at the end only.")
    records_only: bool = Field(False, description="Keep a run's results, and remove its weights when it is done.")


class Where(Kept):
    """The same for one job, with what it is to find there."""

    fingerprints: dict[str, str] = {}
    """Of the data that were planned with, by their names; what has none may be whatever is there."""


def wanted(kind: str, data: str, epochs: int | None = None, holdout: int = 0) -> Wanted:
    """Return the recipe's evaluation on a data set, or one of fewer epochs, or one that spares the test set."""
    given = ({} if epochs is None else {"epochs": epochs}) | ({"holdout": holdout} if holdout else {})
    return Wanted(kind=kind, data=data, settings=evals.usual(kind, data, given))


def merge(jobs: Iterable[Job]) -> list[Job]:
    """Each pre-training once, with the evaluations of all jobs that ask for it; in the order they first come in."""
    found: dict[Pretrain, dict[Wanted, None]] = {}
    for job in jobs:
        found.setdefault(job.settings, {}).update(dict.fromkeys(job.evaluations))
    return [Job(settings=settings, evaluations=tuple(evaluations)) for settings, evaluations in found.items()]


def perform(job: Job, where: Where, ended: Callable[[], bool] = lambda: False) -> Path:
    """Does what is missing of a job, and returns the run's folder; `ended` says between two parts whether to stop."""
    at: dict[str, Any] = {"device": where.device, "workers": where.workers}
    begun: dict[str, Any] = {"runs": where.runs, "engine": where.engine, "knn_every": where.knn_every}
    with work.keeping():  # between two parts nobody else removes the weights
        run = training.pretrain(job.settings, resume=True, **begun, **at)
        for one in job.evaluations:
            if ended():
                raise Stopped("stopped before its evaluations; the same command goes on with them", 143)
            to = one.data if evals.get(one.kind).elsewhere else ""
            evaluate(run, one.kind, one.settings, to=to, beside=one.beside, **at)
        if where.records_only:
            try:
                drop_weights(run)
            except ValueError as error:  # all is measured
                print(f"its weights stay: {error}", file=sys.stderr)
    return run.path


def note_crash(run: Run, line: str) -> None:
    """Writes down why a run ended that could not do so itself, unless it goes on by now or is complete."""
    with suppress(OSError, Stopped, ValueError), work.locked(run):
        run = open_run(run.path)  # as it is now
        if not run.complete:
            note_failure(run, line, 1, run.last.step if run.last else 0)


def job(
    cell: Cell,
    seed: int,
    epochs: int | None = None,
    dataset: str | None = None,
    probe_epochs: int | None = None,
) -> Job:
    """What to do for one seed of a cell."""
    settings = build(Pretrain, variants(cell, epochs, dataset) | {"seed": seed})
    return Job(settings=settings, evaluations=(follows(cell, dataset, probe_epochs),))


AT_ONCE = 1000
"""Runs at once on one machine or one GPU: beyond that it is a mistake."""


class Executor(Kept):
    """By whom, how many at once and for how long runs are done."""

    beside: Rates = Field((), description="Learning rates to try beside each probe's own, on the same crops.")
    also: tuple[str, ...] = Field((), description="Further evaluations of each run on its own data, such as knn.")
    dry_run: bool = Field(False, description="Say what would be run, and stop.")
    limit_minutes: float = Field(0.0, ge=0, description="Stop cleanly after so many minutes; 0: when all is done.")
    most: int = Field(100, ge=1, description="More runs than this are confirmed first.")
    yes: bool = Field(False, description="Confirm that.")
    executor: Literal["local", "ray"] = Field("local", description="This machine, or a Ray cluster.")
    per_gpu: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on each GPU of this machine.")
    at_once: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on this machine's CPU, which share its cores.")
    address: str = Field("auto", description="Of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
    gpus_per_run: float = Field(
        0.0,
        ge=0,
        description="Ray: GPUs of a run, 0.5 for two on one; 0: one, if the cluster has any.",
    )
    cpus_per_run: float = Field(1.0, ge=0, description="Ray: cores of a run.")
    retries: int = Field(3, ge=0, description="Ray: how often a run that was lost with its node is begun again.")
    shared: bool = Field(False, description="Ray: --runs is storage that every node sees; else records come home.")

    @field_validator("also")
    @classmethod
    def _of_own_data(cls, also: tuple[str, ...]) -> tuple[str, ...]:
        if other := [name for name in also if evals.get(name).elsewhere]:
            raise ValueError(f"also is {other[0]!r}, which is made on other data; marginlens sweep has --transfer-to")
        return also

    @property
    def where(self) -> Where:
        """What a job is told of this."""
        return Where(**{name: getattr(self, name) for name in Kept.model_fields})


class SweepPlace(Executor):
    """What follows each run of a sweep."""

    probe: bool = Field(True, description="Probe every run on its own data.")
    probe_epochs: int = Field(0, ge=0, le=MOST, description="Epochs of each probe; 0: as the recipe has it.")
    holdout: int = Field(
        0, ge=0, le=MOST, description="Test probes on so many images kept back from training, not on the test set."
    )
    transfer_to: tuple[str, ...] = Field((), description="Data sets to transfer every run to.")


class GridPlace(SweepPlace):
    """The same with the grid, as a file has it."""

    grid: tuple[str, ...] = Field((), description='Settings and their values, such as "seed=0|1|2".')


class Selection(Settings):
    """Which cells of the paper, and how much of each."""

    only: tuple[str, ...] = Field(
        ("*",), min_length=1, description="Cells whose path matches one of these, e.g. 'MoCo/CIFAR10/*' '*/plain'."
    )
    seeds: int = Field(1, ge=1, le=1000, description="Seeds of each cell: 0, 1, ...")
    epochs: int = Field(0, ge=0, description="A shorter look: epochs of pre-training; 0: the paper's.")
    probe_epochs: int = Field(0, ge=0, description="Epochs of each probe; 0: the paper's.")
    readings: bool = Field(
        False,
        description="Also run the other readings of the paper's words: scope=row of the ratio, bn_splits=1 of MoCo v3.",
    )
    dataset: str = Field("", description="A rehearsal on these data, e.g. shapes, with their own recipe.")


class TableSelection(Selection):
    """The same with the tables, as a file has it."""

    tables: tuple[str, ...] = Field((), description="Tables and figures, such as tab2 or fig3.")
