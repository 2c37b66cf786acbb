"""From a plan to runs: says what it will do, does it by an executor, and says what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marginlens.errors import Asked, Stopped, signals
from marginlens.output import plain
from marginlens.runs.run import Run, Unreadable, examine
from marginlens.runs.store import drop_weights, evaluation, lookup
from marginlens.runs.texts import DIVERGED, amount, label
from marginlens.sweep import cluster, pool
from marginlens.sweep.estimate import Estimator, spoken
from marginlens.sweep.job import Executor, note_crash
from marginlens.sweep.plan import Step, counts, look, look_again
from marginlens.sweep.pool import Outcome

SHOWN = 60
"""Lines of a plan that are printed; --json has them all."""

_NUMBERS = 5
"""Runs of a cell that are named."""


@dataclass(frozen=True)
class Work:
    """A plan with what it takes to carry it out."""

    steps: list[Step]
    place: Executor
    estimator: Estimator
    slots: int
    begin: Callable[[Callable[[], bool], Callable[[str], None]], Iterator[Outcome]]
    """Starts the executor."""

    @property
    def due(self) -> list[Step]:
        return [step for step in self.steps if step.due]

    def facts(self) -> dict[str, Any]:
        """The plan for --json."""
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
    """Return the plan as text: of each run what is cached, what follows, and how long it should take.

    Names come from records and files: the console must not read them as markup.
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
    """How many, and how long."""
    said = ", ".join(f"{count} {state}" for state, count in counts(work.steps).items())
    line = f"{len(work.steps)} run{'s' * (len(work.steps) != 1)}: {said}"
    return f"{line}; {_time(work, work.steps)}" if work.due else f"{line}; nothing to do"


def carry_out(work: Work, say: Callable[[str], None]) -> dict[str, Any]:
    """Does what is due, and returns how it ended; `Stopped` comes later, from `finish`."""
    place, begin = work.place, time.monotonic()
    deadline = begin + 60 * place.limit_minutes if place.limit_minutes else float("inf")
    steps, ended = {step.number: step for step in work.due}, {}
    # Ray prints what its nodes say to standard output, which is for the result
    if place.records_only:
        _drop_cached(work.steps, say)
    with signals() as asked, redirect_stdout(sys.stderr):

        def ending() -> bool:
            return bool(asked.signal) or time.monotonic() >= deadline

        for outcome in work.begin(ending, say):
            step = steps[outcome.number]
            ended[step.number] = _stopped(work, step, outcome) if outcome.state == "stopped" else outcome
            _note(work, step, ended[step.number], say)
            left = [step for number, step in steps.items() if number not in ended]
            if left and not ending():
                say(f"{len(ended)} of {len(steps)} runs ended; {_time(work, left)}")
    return _summary(work, ended, asked, time.monotonic() - begin)


def finish(found: Mapping[str, Any]) -> None:
    """Raises what a command must end with: a signal, runs that failed, runs that could not be begun."""
    if found["signal"]:
        raise Stopped(f"stopped by {found['signal']}; {_left(found)}", found["code"])
    if found["failed"]:
        first = found["failed"][0]
        raise Stopped(f"{len(found['failed'])} of {found['runs']} runs failed; the first is {_of(first)}")
    if found["blocked"]:
        first = found["blocked"][0]
        raise ValueError(f"{len(found['blocked'])} of {found['runs']} runs cannot be done; the first is {_of(first)}")


def said(found: Mapping[str, Any]) -> str:
    """What came of it, for the terminal."""
    lines = [f"[{one['number']}] {one['name']} failed: {one['line']}" for one in found["failed"]]
    if found["left"] and not found["signal"]:  # of a signal, `finish` says it
        lines.append(_left(found))
    done = f"{found['done']} run{'s' * (found['done'] != 1)} done in {spoken(found['seconds'])}"
    others = {"done before": found["cached"]}
    others |= {state: len(found[state]) for state in ("failed", "blocked", "left") if found[state]}
    said = ", ".join([done, *(f"{count} {state}" for state, count in others.items())])
    return "\n".join([*lines, f"{said}, all in {found['store']}"])


def _note(work: Work, step: Step, outcome: Outcome, say: Callable[[str], None]) -> None:
    if outcome.state == "done":
        run = examine(Path(outcome.run))
        made = []
        if isinstance(run, Run):
            if not outcome.line:
                work.estimator.finished(step, run, outcome.seconds)
            made = [evaluation(run, wanted.kind, wanted.data, wanted.settings) for wanted in step.missing]
        top = [f"{label(one)} {one.top1:.2f} %{DIVERGED * one.diverged}" for one in made if one is not None]
        how = outcome.line or f"in {spoken(outcome.seconds)}"
        say(f"[{step.number}] done {how}: {', '.join(top) or run.name}")
        return
    say(f"[{step.number}] {outcome.line if outcome.state == 'stopped' else f'{outcome.state}: {outcome.line}'}")
    if outcome.crashed:
        crashed = lookup(look(work.place.runs), step.job.settings, step.fingerprints.get(step.job.settings.data, ""))
        if crashed is not None:
            note_crash(crashed, outcome.line)


def _stopped(work: Work, step: Step, outcome: Outcome) -> Outcome:
    """The outcome with a line that says where the run stopped, and what the same command does with it."""
    if work.place.executor == "ray" and not work.place.shared:
        return replace(outcome, line="stopped on the cluster")
    now, epochs = look_again(step, work.place.runs), step.job.settings.epochs
    if now.epochs_left == epochs:
        where = (
            "in its first epoch; the same command goes on there"
            if _kept(now)
            else "before it had a checkpoint, and begins again"
        )
    elif now.epochs_left:
        where = f"after {epochs - now.epochs_left} of {epochs} epochs; the same command goes on there"
    else:
        where = f"in its {now.missing[0].name}, which begins again" if now.missing else "when all was measured"
    killed = f"; it {outcome.line}" if outcome.line else ""
    return replace(outcome, line=f"stopped {where}{killed}")


def _kept(step: Step) -> bool:
    return isinstance(step.run, Run) and step.run.weights


def _drop_cached(steps: Sequence[Step], say: Callable[[str], None]) -> None:
    """Removes the weights of what was done before, which a process may have left that was stopped at its very end."""
    for step in steps:
        if step.state == "cached" and isinstance(step.run, Run):
            try:
                if freed := drop_weights(step.run):
                    say(f"[{step.number}] was done before: its weights are removed, {amount(freed)}")
            except ValueError as error:
                say(f"[{step.number}] keeps its weights: {error}")


def _summary(work: Work, ended: Mapping[int, Outcome], asked: Asked, seconds: float) -> dict[str, Any]:
    def listed(chosen: Sequence[tuple[Step, str]]) -> list[dict[str, Any]]:
        return [{"number": step.number, "name": step.name, "line": line} for step, line in chosen]

    states = {number: outcome.state for number, outcome in ended.items()}
    left = [(s, ended[s.number].line if s.number in ended else "not begun") for s in work.due]
    held = [(s, ended[s.number].line) for s in work.due if states.get(s.number) == "blocked"]
    return {
        "runs": len(work.steps),
        "done": sum(state == "done" for state in states.values()),
        "cached": sum(step.state == "cached" for step in work.steps),
        "failed": listed([(s, ended[s.number].line) for s in work.due if states.get(s.number) == "failed"]),
        "left": listed([(s, line) for s, line in left if states.get(s.number, "stopped") == "stopped"]),
        "blocked": listed([(s, s.why) for s in work.steps if s.state == "blocked"] + held),
        "seconds": seconds,
        "store": work.place.runs,
        "signal": asked.signal,
        "code": asked.code,
    }


def _left(found: Mapping[str, Any]) -> str:
    """What is not done, and how to go on."""
    count = len(found["left"])
    if not count:
        return "all runs had ended"
    return f"{count} of {found['runs']} runs are left; the same command goes on where they are"


def _of(one: Mapping[str, Any]) -> str:
    return f"[{one['number']}] {one['name']}: {one['line']}"


def _time(work: Work, steps: Sequence[Step]) -> str:
    guess = work.estimator.total(steps, work.slots)
    if guess is None:
        return "time unknown: not all of this has been measured on this device before"
    return f"about {spoken(guess)} to go, as measured here"


def _cells(steps: Sequence[Step]) -> Iterator[str]:
    """The cells of the paper that runs are for, with the runs: one for each seed."""
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
