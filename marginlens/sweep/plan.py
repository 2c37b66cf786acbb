"""A plan: every job with its state in the store. Making a plan changes nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from marginlens.data import store as data_store
from marginlens.data.feed import open_feed
from marginlens.data.prepare import open_data
from marginlens.data.sources import SOURCES
from marginlens.errors import DataError
from marginlens.evals.features import parts
from marginlens.files import expanded, reason
from marginlens.parameters import quoted
from marginlens.runs.config import Pretrain, run_name
from marginlens.runs.evaluate import Wanted, missing
from marginlens.runs.query import spelled
from marginlens.runs.run import Run, Unreadable
from marginlens.runs.store import evaluation, lookup, scan, unbegun
from marginlens.settings import Settings
from marginlens.sweep.job import Job
from marginlens.train.trainer import check_data

State = Literal["cached", "to run", "interrupted", "failed", "blocked"]
STATES: tuple[State, ...] = ("cached", "to run", "interrupted", "failed", "blocked")

_SAID = ("method", "data", "effect", "seed")
"""Settings that every job's name has."""


@dataclass(frozen=True)
class Step:
    """A job, and its state in the store."""

    number: int
    name: str
    job: Job
    state: State
    """interrupted and failed continue from their last checkpoint; blocked cannot run, and `why` tells what to do."""
    missing: tuple[Wanted, ...]
    run: Run | Unreadable | None = None
    why: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """The fingerprints of its data that are known."""
    cells: tuple[str, ...] = ()
    """The cells of the paper that it is for: "Tab. 2: MoCo/CIFAR10/plain"."""

    @property
    def due(self) -> bool:
        """True if the job has work left and is not blocked."""
        return self.state not in ("cached", "blocked")

    @property
    def epochs_left(self) -> int:
        """The epochs of pre-training that are left."""
        epochs = self.job.settings.epochs
        if not isinstance(self.run, Run):
            return epochs
        if self.run.complete:
            return 0
        return epochs - self.run.epochs_done if self.run.weights else epochs

    @property
    def follows(self) -> str:
        """The missing evaluations, for the terminal."""
        return ", ".join(e.name for e in self.missing)

    @property
    def left(self) -> Job:
        """The job without the evaluations that are measured already."""
        return self.job.model_copy(update={"evaluations": self.missing})

    def facts(self) -> dict[str, Any]:
        """Return the step for --json."""
        found: dict[str, Any] = {"number": self.number, "name": self.name, "state": self.state, "why": self.why}
        found |= {"run": str(self.run.path) if self.run else None, "epochs_left": self.epochs_left}
        found |= {"evaluations": [e.name for e in self.missing], "cells": list(self.cells)}
        return found | {"settings": self.job.settings.model_dump(mode="json")}


def make_plan(
    jobs: Sequence[Job],
    runs: str | Path,
    fingerprints: Mapping[str, str],
    held: Sequence[Run | Unreadable] | None = None,
) -> list[Step]:
    """Look every job up in the store. `fingerprints` has "" for data that are not prepared.

    `held` is the content of the store, if it has been read already.
    """
    held = look(runs) if held is None else held
    named = names(jobs)
    steps = []
    for number, (job, name) in enumerate(zip(jobs, named, strict=True), 1):
        found = lookup(held, job.settings, fingerprints.get(job.settings.data, ""))
        bad = _in_its_place(held, job, fingerprints) if found is None else None
        lacking = {e: rates for e in job.evaluations if (rates := _unmeasured(found, e, fingerprints))}
        state, why = _state(found, bad, lacking)
        known = {data: fingerprints[data] for data in job.data if fingerprints.get(data)}
        steps.append(Step(number, name, job, state, tuple(lacking), found or bad, why, known))
    return steps


def look_again(step: Step, runs: str | Path) -> Step:
    """Return a step by the present state of the store."""
    (now,) = make_plan([step.job], runs, step.fingerprints)
    return replace(now, number=step.number, name=step.name, cells=step.cells)


def look(runs: str | Path) -> list[Run | Unreadable]:
    """Return the content of a store; [] if it does not exist."""
    folder = expanded(runs)
    try:
        os.stat(folder)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise ValueError(f"--runs is {quoted(str(runs))}: {reason(error)}; give another folder") from None
    return scan(folder)


def away(steps: Sequence[Step]) -> list[Step]:
    """Return the plan for machines that do not see the store: a run with weights here cannot continue there."""
    return [_away(step) for step in steps]


def counts(steps: Sequence[Step]) -> dict[str, int]:
    """Count the steps of each state."""
    found = Counter(step.state for step in steps)
    return {state: found[state] for state in STATES if found[state]}


def evenly(jobs: Sequence[Job]) -> list[Job]:
    """Sort by seed, so that a table fills evenly: the first seed of every cell comes before the second of any."""
    return sorted(jobs, key=lambda job: job.settings.seed)


def names(jobs: Sequence[Job]) -> list[str]:
    """Return a name for each job that identifies it: its usual words, and every other setting that differs."""
    values = [job.settings.model_dump(mode="json") for job in jobs]
    differ = [name for name in differing([job.settings for job in jobs]) if name not in _SAID]
    return [
        " ".join([job.name, *(f"{name}={value[name]}" for name in differ)])
        for job, value in zip(jobs, values, strict=True)
    ]


def differing(settings: Sequence[Pretrain]) -> list[str]:
    """Return the settings that differ, without those that only follow from a recipe."""
    values = [one.model_dump(mode="json") for one in settings]
    chosen = {name for one in settings for name in spelled(one)}
    return [n for n in Pretrain.model_fields if n in chosen and len({str(value[n]) for value in values}) > 1]


def prepared(jobs: Sequence[Job], draw: bool) -> dict[str, str]:
    """Return the fingerprint of each data set of the jobs; "" if it is not prepared.

    `draw` makes a missing data set that is generated; without it nothing is written.
    """
    return {name: _fingerprint(name, draw) for name in dict.fromkeys(name for job in jobs for name in job.data)}


def check_known(steps: Sequence[Step], fingerprints: Mapping[str, str]) -> None:
    """Raise for data that are neither prepared nor known by name."""
    for name in _asked(steps):
        if not fingerprints[name] and name not in SOURCES:
            open_data(name)  # its error lists the known names


def check_prepared(steps: Sequence[Step], fingerprints: Mapping[str, str]) -> None:
    """Raise if data of a due step are missing, or do not fit its settings."""
    lacking = [name for name in _asked(steps) if not fingerprints[name]]
    if len(lacking) == 1:
        open_data(lacking[0])  # its error tells how to prepare them
    if lacking:
        run = " and ".join(f"marginlens data prepare {name}" for name in lacking)
        raise DataError(f"{', '.join(lacking)} are not prepared in {data_store.root()}; run: {run}")
    feeds = {name: open_feed(name, torch.device("cpu")) for name in _asked(steps)}
    for step in steps:
        if step.due:
            try:
                check_data(step.job.settings, feeds[step.job.settings.data])
                for wanted in step.missing:
                    parts(feeds[wanted.data], getattr(wanted.settings, "holdout", 0))
            except ValueError as error:
                raise ValueError(f"[{step.number}] {step.name} cannot be run: {error}") from None


def _asked(steps: Sequence[Step]) -> list[str]:
    """Return the data of the due steps, each once."""
    return list(dict.fromkeys(name for step in steps if step.due for name in step.left.data))


def _away(step: Step) -> Step:
    if not step.due or not isinstance(step.run, Run):
        return step
    if not step.run.weights:  # nothing to continue from
        return replace(step, state="to run", why="")
    what = "the weights that it needs are" if step.run.state == "complete" else "it was begun"
    todo = "continue with --executor local, or remove it with marginlens runs prune"
    why = f"{what} in {step.run.path}, which the cluster does not see; {todo}"
    return replace(step, state="blocked", why=f"{step.why}; {why}" if step.why else why)


def _fingerprint(name: str, draw: bool) -> str:
    drawn = name in SOURCES and SOURCES[name].drawn
    if not data_store.exists(name) and not (draw and drawn):
        return ""
    return open_data(name).fingerprint


def _unmeasured(run: Run | None, wanted: Wanted, fingerprints: Mapping[str, str]) -> list[Settings]:
    """Return the settings of an evaluation, and of those beside it, that have no record in the store."""
    if run is None or (run.state == "running" and not run.complete):
        return wanted.several
    data = fingerprints.get(wanted.data, "")
    found = {one: evaluation(run, wanted.kind, wanted.data, one, data) for one in wanted.several}
    left = missing(wanted.several, {one: record for one, record in found.items() if record})
    return left or [one for one in [wanted.settings] if not found[one]]


def _in_its_place(
    held: Sequence[Run | Unreadable], job: Job, fingerprints: Mapping[str, str]
) -> Run | Unreadable | None:
    """Return a folder that has the name of a job's run, but holds another or a damaged one."""
    data = fingerprints.get(job.settings.data, "")
    if not data:
        return None
    name = run_name(job.settings, data)
    return next((one for one in held if one.name == name and not unbegun(one.path)), None)


def _state(
    run: Run | None, bad: Run | Unreadable | None, lacking: Mapping[Wanted, Sequence[Settings]]
) -> tuple[State, str]:
    if bad is not None:
        return "blocked", f"its folder cannot be used: {bad.why}"
    if run is None:
        return "to run", ""
    if run.state == "running" and (lacking or run.outcome is None):
        return "blocked", f"{run.path} is in use by another process; wait for it, or stop it first"
    if run.state in ("interrupted", "failed"):
        return ("failed", run.why) if run.state == "failed" else ("interrupted", "")
    if not lacking:
        return "cached", ""
    if run.weights:
        return "to run", ""
    lacks = ", ".join(_said(wanted, several) for wanted, several in lacking.items())
    return "blocked", (
        f"{lacks} is missing, and its weights are gone: remove {run.path} (marginlens runs prune), then run again"
    )


def _said(wanted: Wanted, several: Sequence[Settings]) -> str:
    if wanted.settings in several:
        return wanted.name
    rates = ", ".join(f"{getattr(one, 'lr', 0):g}" for one in several)
    return f"{wanted.name} at a learning rate of {rates}"
