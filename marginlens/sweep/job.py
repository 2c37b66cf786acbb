"""A job: one pre-training and the evaluations after it. It travels to its worker as JSON."""

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
        """The data sets of the job, each once."""
        return tuple(dict.fromkeys((self.settings.data, *(e.data for e in self.evaluations))))

    @property
    def name(self) -> str:
        """A short name for the terminal."""
        chosen = self.settings
        return f"{chosen.method} {chosen.data} {chosen.effect} seed {chosen.seed}"

    def with_more(self, also: Sequence[str], beside: Rates) -> Job:
        """Return the job with further evaluations, and with more learning rates for each that has one."""
        further = (wanted(kind, self.settings.data) for kind in also)
        every = dict.fromkeys((*self.evaluations, *further))
        rated = (one.model_copy(update={"beside": beside}) if evals.get(one.kind).rated else one for one in every)
        return self.model_copy(update={"evaluations": tuple(rated)})


class Kept(Machine):
    """Where jobs run, and what is kept of them: nothing here changes a result."""

    runs: str = Field("runs", description="Folder of runs. A complete run in it is not run again.")
    engine: Literal["auto", "eager", "graph"] = Field("auto", description="As for marginlens pretrain.")
    knn_every: int = Field(
        10, ge=0, description="Epochs between measurements of nearest neighbours; 0: at the end only."
    )
    records_only: bool = Field(False, description="Remove the weights of a run when it is done, and keep its records.")


class Where(Kept):
    """The same for one job, with the fingerprints of its data."""

    fingerprints: dict[str, str] = {}
    """Fingerprints by the name of the data; data without one may have any content."""


def wanted(kind: str, data: str, epochs: int | None = None, holdout: int = 0) -> Wanted:
    """Return the recipe's evaluation on a data set, or one of fewer epochs, or one on held-out training images."""
    given = ({} if epochs is None else {"epochs": epochs}) | ({"holdout": holdout} if holdout else {})
    return Wanted(kind=kind, data=data, settings=evals.usual(kind, data, given))


def merge(jobs: Iterable[Job]) -> list[Job]:
    """Merge jobs of the same pre-training, in the order of the first of each."""
    found: dict[Pretrain, dict[Wanted, None]] = {}
    for job in jobs:
        found.setdefault(job.settings, {}).update(dict.fromkeys(job.evaluations))
    return [Job(settings=settings, evaluations=tuple(evaluations)) for settings, evaluations in found.items()]


def perform(job: Job, where: Where, ended: Callable[[], bool] = lambda: False) -> Path:
    """Do what is missing of a job, and return the run's folder; `ended` is asked before each evaluation."""
    at: dict[str, Any] = {"device": where.device, "workers": where.workers}
    begun: dict[str, Any] = {"runs": where.runs, "engine": where.engine, "knn_every": where.knn_every}
    with work.keeping():  # nobody else removes the weights between two parts
        run = training.pretrain(job.settings, resume=True, **begun, **at)
        for one in job.evaluations:
            if ended():
                raise Stopped("stopped before its evaluations; the same command continues with them", 143)
            to = one.data if evals.get(one.kind).elsewhere else ""
            evaluate(run, one.kind, one.settings, to=to, beside=one.beside, **at)
        if where.records_only:
            try:
                drop_weights(run)
            except ValueError as error:  # the job is done all the same
                print(f"its weights stay: {error}", file=sys.stderr)
    return run.path


def note_crash(run: Run, line: str) -> None:
    """Write down why a run crashed, unless it is complete or has continued meanwhile."""
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
    """Return the job of one seed of a cell."""
    settings = build(Pretrain, variants(cell, epochs, dataset) | {"seed": seed})
    return Job(settings=settings, evaluations=(follows(cell, dataset, probe_epochs),))


AT_ONCE = 1000
"""The most runs at once on one machine or one GPU; more is a mistake."""


class Executor(Kept):
    """The executor: where, how many at once, and for how long."""

    beside: Rates = Field((), description="Further learning rates of each probe, on the same crops.")
    also: tuple[str, ...] = Field((), description="Further evaluations of each run on its own data, such as knn.")
    dry_run: bool = Field(False, description="Show the plan, and stop.")
    limit_minutes: float = Field(0.0, ge=0, description="Stop cleanly after this many minutes; 0: no limit.")
    most: int = Field(100, ge=1, description="Ask before more runs than this.")
    yes: bool = Field(False, description="Do not ask.")
    executor: Literal["local", "ray"] = Field("local", description="This machine, or a Ray cluster.")
    per_gpu: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on each GPU of this machine.")
    at_once: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on this machine's CPU; they share its cores.")
    address: str = Field("auto", description="Ray: the cluster, as auto, HOST:PORT or ray://HOST:PORT.")
    gpus_per_run: float = Field(
        0.0,
        ge=0,
        description="Ray: GPUs per run; 0.5: two runs on a GPU; 0: one if the cluster has GPUs.",
    )
    cpus_per_run: float = Field(1.0, ge=0, description="Ray: cores per run.")
    retries: int = Field(3, ge=0, description="Ray: retries of a run that was lost with its node.")
    shared: bool = Field(False, description="Ray: --runs is storage that every node sees; else records are sent back.")

    @field_validator("also")
    @classmethod
    def _of_own_data(cls, also: tuple[str, ...]) -> tuple[str, ...]:
        if other := [name for name in also if evals.get(name).elsewhere]:
            raise ValueError(f"also is {other[0]!r}, which is made on other data; marginlens sweep has --transfer-to")
        return also

    @property
    def where(self) -> Where:
        """The part of this that a job needs."""
        return Where(**{name: getattr(self, name) for name in Kept.model_fields})


class SweepPlace(Executor):
    """The evaluations after each run of a sweep."""

    probe: bool = Field(True, description="Probe every run on its own data.")
    probe_epochs: int = Field(0, ge=0, le=MOST, description="Epochs of each probe; 0: the recipe's.")
    holdout: int = Field(
        0, ge=0, le=MOST, description="Test probes on this many images kept back from training, not on the test set."
    )
    transfer_to: tuple[str, ...] = Field((), description="Data sets to transfer every run to.")


class GridPlace(SweepPlace):
    """The same with the grid, for a file."""

    grid: tuple[str, ...] = Field((), description='Settings and their values, such as "seed=0|1|2".')


class Selection(Settings):
    """Which cells of the paper to run, and how much of each."""

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
    """The same with the tables, for a file."""

    tables: tuple[str, ...] = Field((), description="Tables and figures, such as tab2 or fig3.")
