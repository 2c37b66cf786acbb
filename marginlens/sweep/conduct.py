"""Show a plan, and carry it out by an executor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marginlens.errors import signals
from marginlens.output import plain
from marginlens.runs.run import Run, Unreadable, examine
from marginlens.runs.store import drop_weights, evaluation, lookup
from marginlens.runs.texts import DIVERGED, amount, label
from marginlens.sweep import cluster, pool
from marginlens.sweep.estimate import Estimator, spoken
from marginlens.sweep.job import Executor, note_crash
from marginlens.sweep.plan import Step, counts, look, look_again
from marginlens.sweep.pool import Outcome
from marginlens.sweep.summary import summary

SHOWN = 60
"""The most lines of a plan that are printed; --json has them all."""

_NUMBERS = 5
"""The most runs of a cell that are named."""


@dataclass(frozen=True)
class Work:
    """A plan and its executor."""

    steps: list[Step]
    place: Executor
    estimator: Estimator
    slots: int
    begin: Callable[[Callable[[], bool], Callable[[str], None]], Iterator[Outcome]]
    """Start the executor; yields an outcome for each step."""

    @property
    def due(self) -> list[Step]:
        return [step for step in self.steps if step.due]

    def facts(self) -> dict[str, Any]:
        """Return the plan for --json."""
        plan = [
            step.facts() | {"estimate_seconds": self.estimator.guess(step) if step.due else None} for step in self.steps
        ]
        found: dict[str, Any] = {"plan": plan, "counts": counts(self.steps), "at_once": self.slots}
        return found | {"estimate_seconds": self.estimator.total(self.steps, self.slots)}


def prepare(steps: list[Step], place: Executor, held: Sequence[Run | Unreadable]) -> Work:
    """Choose the executor; its estimate rests on the runs of the store."""
    due = [step for step in steps if step.due]
    if place.executor == "ray":
        wide = cluster.describe(place) if due and not place.dry_run else cluster.Wide(1, 0.0)

        def on_ray(ending: Callable[[], bool], say: Callable[[str], None]) -> Iterator[Outcome]:
            return cluster.run_ray(due, place, wide.gpus, ending, say)

        return Work(steps, place, Estimator(held, "", place.engine), wide.slots, on_ray)
    slots = pool.make_slots(place.device, place.per_gpu, place.at_once)

    def here(ending: Callable[[], bool], say: Callable[[str], None]) -> Iterator[Outcome]:
        return pool.run_local(due, place.where, slots, ending, say)

    estimator = Estimator(held, pool.device_name(slots), place.engine)
    return Work(steps, place, estimator, min(len(slots), max(len(due), 1)), here)


def show(work: Work, console: Console, title: str) -> str:
    """Return the plan as text: the state of each run, its evaluations, and its estimated time.

    Names come from records and files, so the console must not read markup in them.
    """
    table = Table("", "run", "pre-training", "then", "estimate", title=title)
    for step in work.steps[:SHOWN]:
        guess = work.estimator.guess(step) if step.due else None
        table.add_row(str(step.number), step.name, _state(step), _then(step), "" if guess is None else spoken(guess))
    with console.capture() as drawn:
        console.print(plain(table))
    lines = [drawn.get().rstrip("\n")]
    if len(work.steps) > SHOWN:
        lines.append(f"... and {len(work.steps) - SHOWN} more")
    lines += _cells(work.steps) if work.place.dry_run else ()
    lines += [f"[{step.number}] is left out: {step.why}" for step in work.steps if step.state == "blocked"]
    return "\n".join([*lines, totals(work)])


def totals(work: Work) -> str:
    """Return the number of runs in each state, and the estimated time."""
    said = ", ".join(f"{count} {state}" for state, count in counts(work.steps).items())
    line = f"{len(work.steps)} run{'s' * (len(work.steps) != 1)}: {said}"
    return f"{line}; {_time(work, work.steps)}" if work.due else f"{line}; nothing to do"


def carry_out(work: Work, say: Callable[[str], None]) -> dict[str, Any]:
    """Do what is due, and return the summary; `finish` raises `Stopped` later."""
    place, begin = work.place, time.monotonic()
    deadline = begin + 60 * place.limit_minutes if place.limit_minutes else float("inf")
    steps, ended = {step.number: step for step in work.due}, {}
    runs = {step.number: step.run for step in work.steps if step.state == "cached" and isinstance(step.run, Run)}
    # Ray prints the lines of its nodes to standard output, which is for the result
    if place.records_only:
        _drop_cached(work.steps, say)
    with signals() as asked, redirect_stdout(sys.stderr):

        def ending() -> bool:
            return bool(asked.signal) or time.monotonic() >= deadline

        for outcome in work.begin(ending, say):
            step = steps[outcome.number]
            ended[step.number] = _stopped(work, step, outcome) if outcome.state == "stopped" else outcome
            if run := _note(work, step, ended[step.number], say):
                runs[step.number] = run
            left = [step for number, step in steps.items() if number not in ended]
            if left and not ending():
                say(f"{len(ended)} of {len(steps)} runs ended; {_time(work, left)}")
    return summary(work.steps, ended, runs, asked, time.monotonic() - begin, place.runs)


def _note(work: Work, step: Step, outcome: Outcome, say: Callable[[str], None]) -> Run | None:
    """Say how a step ended; return its run if it is done."""
    if outcome.state == "done":
        run = examine(Path(outcome.run))
        if not isinstance(run, Run):
            say(f"[{step.number}] done, but its folder cannot be read: {run.why}")
            return None
        if not outcome.line:
            work.estimator.finished(step, run, outcome.seconds)
        how = outcome.line or f"in {spoken(outcome.seconds)}"
        say(f"[{step.number}] done {how}: {', '.join(_tops(step, run)) or run.name}")
        return run
    say(f"[{step.number}] {outcome.line if outcome.state == 'stopped' else f'{outcome.state}: {outcome.line}'}")
    if outcome.crashed:
        crashed = lookup(look(work.place.runs), step.job.settings, step.fingerprints.get(step.job.settings.data, ""))
        if crashed is not None:
            note_crash(crashed, outcome.line)
    return None


def _tops(step: Step, run: Run) -> Iterator[str]:
    """Yield each accuracy that a step measured, at every learning rate, and the rates that diverged."""
    for wanted in step.missing:
        for settings in wanted.several:
            if one := evaluation(run, wanted.kind, wanted.data, settings):
                yield f"{label(one)} {one.top1:.2f} %{DIVERGED * one.diverged}"
                if settings == wanted.settings:
                    yield from (f"{one.name} lr={rate:g} diverged (NaN)" for rate in one.lost)


def _stopped(work: Work, step: Step, outcome: Outcome) -> Outcome:
    """Return the outcome with a line on where the run stopped, and how it continues."""
    if work.place.executor == "ray" and not work.place.shared:
        return replace(outcome, line="stopped on the cluster")
    now, epochs = look_again(step, work.place.runs), step.job.settings.epochs
    if now.epochs_left == epochs:
        where = (
            "in its first epoch; the same command continues there"
            if _kept(now)
            else "before its first checkpoint; the same command begins it again"
        )
    elif now.epochs_left:
        where = f"after {epochs - now.epochs_left} of {epochs} epochs; the same command continues there"
    else:
        where = f"in its {now.missing[0].name}, which begins again" if now.missing else "after its last evaluation"
    killed = f"; it {outcome.line}" if outcome.line else ""
    return replace(outcome, line=f"stopped {where}{killed}")


def _kept(step: Step) -> bool:
    return isinstance(step.run, Run) and step.run.weights


def _drop_cached(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Remove weights of runs that were done before: a process that was stopped at its very end may have left them."""
    for step in steps:
        if step.state == "cached" and isinstance(step.run, Run):
            try:
                if freed := drop_weights(step.run):
                    say(f"[{step.number}] was done before: its weights are removed, {amount(freed)}")
            except ValueError as error:
                say(f"[{step.number}] keeps its weights: {error}")


def _time(work: Work, steps: Sequence[Step]) -> str:
    guess = work.estimator.total(steps, work.slots)
    if guess is None:
        return "time unknown: not all of this was measured on this device before"
    return f"about {spoken(guess)} to go, as measured here"


def _cells(steps: Sequence[Step]) -> Iterator[str]:
    """Yield the cells of the paper that runs are for, with the numbers of the runs."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for step in steps:
        runs.setdefault(step.cells, []).append(str(step.number))
    for cells, numbers in runs.items():
        if cells:
            yield f"[{', '.join(numbers[:_NUMBERS] + ['...'] * (len(numbers) > _NUMBERS))}] {'; '.join(cells)}"


def _state(step: Step) -> str:
    epochs = step.job.settings.epochs
    if step.state == "cached" or (step.due and not step.epochs_left):
        return "cached"
    if step.state in ("interrupted", "failed"):
        return f"{step.state}, {step.epochs_left} of {epochs} epochs left"
    return step.state if step.state == "blocked" else f"{epochs} epoch{'s' * (epochs > 1)}"


def _then(step: Step) -> str:
    done = len(step.job.evaluations) - len(step.missing)
    return ", ".join([step.follows] * bool(step.missing) + [f"{done} cached"] * bool(done))
