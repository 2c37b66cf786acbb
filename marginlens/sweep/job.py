"""A job: one pre-training, and the evaluations that follow it at once. As JSON it travels to whoever does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marginlens.runs.store import drop_weights
from marginlens.train import pretrain as training
from marginlens.train import probe as probing
from marginlens.train import record
from marginlens.train.config import PROBE_RECIPES, Pretrain, Probe, Settings, build
from marginlens.train.places import Machine, Rates
from marginlens.train.record import Run
from marginlens.train.stop import Stopped


class Evaluation(Settings):
    """A linear probe of a job's run, on its own data or on others."""

    kind: Literal["probe", "transfer"]
    data: str
    settings: Probe
    beside: Rates = ()
    """Learning rates to try beside its own, on the same crops."""

    @property
    def name(self) -> str:
        """Short, for the terminal."""
        return "probe" if self.kind == "probe" else f"transfer to {self.data}"

    @property
    def several(self) -> list[Probe]:
        """The probe at its own rate, and at those beside it."""
        return probing.at_rates(self.settings, self.beside)


class Job(Settings):
    """One pre-training and its evaluations."""

    settings: Pretrain
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def data(self) -> tuple[str, ...]:
        """Every data set that it asks for, each once."""
        return tuple(dict.fromkeys((self.settings.data, *(e.data for e in self.evaluations))))

    @property
    def name(self) -> str:
        """Short, for the terminal."""
        chosen = self.settings
        return f"{chosen.method} {chosen.data} {chosen.effect} seed {chosen.seed}"

    def with_rates(self, beside: Rates) -> Job:
        """The same with more learning rates for each of its probes."""
        more = tuple(one.model_copy(update={"beside": beside}) for one in self.evaluations)
        return self.model_copy(update={"evaluations": more})


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


def evaluate(kind: Literal["probe", "transfer"], data: str, epochs: int | None = None, holdout: int = 0) -> Evaluation:
    """The evaluation that the recipe has for a data set, or one of fewer epochs, or one that spares the test set."""
    recipe: dict[str, Any] = PROBE_RECIPES.get(data, {}) | ({} if epochs is None else {"epochs": epochs})
    recipe |= {"holdout": holdout} if holdout else {}
    return Evaluation(kind=kind, data=data, settings=build(Probe, recipe))


def merge(jobs: Iterable[Job]) -> list[Job]:
    """Each pre-training once, with the evaluations of all jobs that ask for it; in the order they first come in."""
    found: dict[Pretrain, dict[Evaluation, None]] = {}
    for job in jobs:
        found.setdefault(job.settings, {}).update(dict.fromkeys(job.evaluations))
    return [Job(settings=settings, evaluations=tuple(evaluations)) for settings, evaluations in found.items()]


def perform(job: Job, where: Where, ended: Callable[[], bool] = lambda: False) -> Path:
    """Does what is missing of a job, and returns the run's folder; `ended` says between two parts whether to stop."""
    at: dict[str, Any] = {"device": where.device, "workers": where.workers}
    begun: dict[str, Any] = {"runs": where.runs, "engine": where.engine, "knn_every": where.knn_every}
    with record.keeping():  # between two parts nobody else removes the weights
        run = training.pretrain(job.settings, resume=True, **begun, **at)
        for wanted in job.evaluations:
            if ended():
                raise Stopped("stopped before its evaluations; the same command goes on with them", 143)
            if wanted.kind == "probe":
                probing.probe(run, wanted.settings, beside=wanted.beside, **at)
            else:
                probing.transfer(run, wanted.data, wanted.settings, beside=wanted.beside, **at)
        if where.records_only:
            try:
                drop_weights(run)
            except ValueError as error:  # all is measured
                print(f"its weights stay: {error}", file=sys.stderr)
    return run.path


def note_crash(run: Run, line: str) -> None:
    """Writes down why a run ended that could not do so itself, unless it goes on by now or is complete."""
    with suppress(OSError, Stopped, ValueError), record.locked(run):
        if not run.complete:
            last: dict[str, Any] = next(reversed(run.metrics), {})
            record.note_failure(run, line, 1, last.get("step", 0))
