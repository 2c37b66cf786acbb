"""The end of a sweep: the means over seeds of each grid point, how many runs ended, and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from marginlens import evals
from marginlens.errors import Asked, Stopped
from marginlens.output import plain
from marginlens.runs.query import plain as shown
from marginlens.runs.query import words
from marginlens.runs.run import Run
from marginlens.runs.seeds import ABOUT, Top, facts, noted
from marginlens.runs.seeds import number as spread
from marginlens.runs.store import evaluation
from marginlens.sweep.estimate import spoken
from marginlens.sweep.plan import Step, differing
from marginlens.sweep.pool import Outcome


def summary(
    steps: Sequence[Step],
    ended: Mapping[int, Outcome],
    runs: Mapping[int, Run],
    asked: Asked,
    seconds: float,
    store: str,
) -> dict[str, Any]:
    """Return what came of a plan; `ended` and `runs` are by the number of a step."""

    def listed(chosen: Sequence[tuple[Step, str]]) -> list[dict[str, Any]]:
        return [{"number": step.number, "name": step.name, "line": line} for step, line in chosen]

    due = [step for step in steps if step.due]
    states = {number: outcome.state for number, outcome in ended.items()}
    lines = [(step, ended[step.number].line if step.number in ended else "not begun") for step in due]
    of = {
        state: [(step, line) for step, line in lines if states.get(step.number, "stopped") == state]
        for state in ("failed", "stopped", "blocked")
    }
    return {
        "runs": len(steps),
        "done": sum(state == "done" for state in states.values()),
        "cached": sum(step.state == "cached" for step in steps),
        "failed": listed(of["failed"]),
        "left": listed(of["stopped"]),
        "blocked": listed([(step, step.why) for step in steps if step.state == "blocked"] + of["blocked"]),
        "means": means(steps, runs),
        "seconds": seconds,
        "store": store,
        "signal": asked.signal,
        "code": asked.code,
    }


def means(steps: Sequence[Step], runs: Mapping[int, Run]) -> list[dict[str, Any]]:
    """Return the mean and spread over seeds of each evaluation, for each point of the grid."""
    points: dict[str, list[Step]] = {}
    for step in steps:
        points.setdefault(step.job.settings.model_copy(update={"seed": 0}).model_dump_json(), []).append(step)
    names = differing([same[0].job.settings for same in points.values()]) or ["effect"]
    found = []
    for same in points.values():
        settings = same[0].job.settings.model_dump(mode="json")
        tops: dict[str, list[Top]] = {}
        for step in same:
            for name, top in _measured(step, runs[step.number]) if step.number in runs else ():
                tops.setdefault(name, []).append(top)
        point = {"settings": {name: settings[name] for name in names}}
        seeds = [step.job.settings.seed for step in same]
        found.append(point | {"seeds": seeds, "evaluations": {name: facts(held) for name, held in tops.items()}})
    return found


def _measured(step: Step, run: Run) -> list[tuple[str, Top]]:
    """Return the evaluations of a job that its run has, each with a name, and the nearest neighbours at the end."""
    kept = [
        (wanted, evaluation(run, wanted.kind, wanted.data, settings))
        for wanted in step.job.evaluations
        for settings in wanted.several
    ]
    found = [
        (" ".join(filter(None, [wanted.name, words(one.odd)])), Top(one.top1, one.diverged))
        for wanted, one in kept
        if one
    ]
    end = run.outcome.knn if run.outcome else None
    return found if end is None else [*found, (evals.titles()["knn"], Top(end))]


def means_table(found: Sequence[Mapping[str, Any]], console: Console) -> str:
    """Return the means as a table for the terminal, and a warning if probes diverged; "" if nothing was measured."""
    columns = list(dict.fromkeys(name for point in found for name in point["evaluations"]))
    if not columns:
        return ""
    table = Table(*found[0]["settings"], "seeds", *columns)
    for point in found:
        settings = [shown(value) for value in point["settings"].values()]
        seeds = len(point["seeds"])
        table.add_row(*settings, str(seeds), *(_text(point["evaluations"].get(name), seeds) for name in columns))
    with console.capture() as drawn:
        console.print(plain(table))
    lines = [f"Each number is the {ABOUT}.", drawn.get().rstrip("\n")]
    numbers = [number for point in found for number in point["evaluations"].values()]
    if diverged := sum(number["diverged"] for number in numbers):
        lines.append(
            f"{diverged} evaluation{'s' * (diverged > 1)} diverged: the layer ended worse than guessing, "
            "so the accuracy says nothing of the backbone. Try lower learning rates (--beside 0.1 0.3) or more "
            "epochs (--probe-epochs)."
        )
    return "\n".join(lines)


def _text(number: Mapping[str, Any] | None, seeds: int) -> str:
    """Write a mean with its spread and notes; "" if nothing was measured."""
    if number is None:
        return ""
    return noted(spread(number["mean"], number["std"]), number["seeds"], seeds, number["diverged"])


def said(found: Mapping[str, Any]) -> str:
    """Return the counts at the end for the terminal, with each run that failed."""
    lines = [f"[{one['number']}] {one['name']} failed: {one['line']}" for one in found["failed"]]
    if found["left"] and not found["signal"]:  # `finish` says it after a signal
        lines.append(_left(found))
    done = f"{found['done']} run{'s' * (found['done'] != 1)} done in {spoken(found['seconds'])}"
    others = {"done before": found["cached"]}
    others |= {state: len(found[state]) for state in ("failed", "blocked", "left") if found[state]}
    counts = ", ".join([done, *(f"{count} {state}" for state, count in others.items())])
    return "\n".join([*lines, f"{counts}, all in {found['store']}"])


def finish(found: Mapping[str, Any]) -> None:
    """Raise if a signal stopped the plan, runs failed, or runs could not begin."""
    if found["signal"]:
        raise Stopped(f"stopped by {found['signal']}; {_left(found)}", found["code"])
    if found["failed"]:
        first = found["failed"][0]
        raise Stopped(f"{len(found['failed'])} of {found['runs']} runs failed; the first is {_of(first)}")
    if found["blocked"]:
        first = found["blocked"][0]
        raise ValueError(f"{len(found['blocked'])} of {found['runs']} runs cannot be done; the first is {_of(first)}")


def _left(found: Mapping[str, Any]) -> str:
    count = len(found["left"])
    if not count:
        return "all runs had ended"
    return f"{count} of {found['runs']} runs are left; the same command continues them"


def _of(one: Mapping[str, Any]) -> str:
    return f"[{one['number']}] {one['name']}: {one['line']}"
