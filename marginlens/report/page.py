"""The report's page: one HTML file with everything in it, which works from a disk and without a network.

Tables, figures and sections are there without a script; the script sorts, filters, and draws the curves of a run.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginlens import evals
from marginlens.output import counted
from marginlens.paper import Table
from marginlens.report import render
from marginlens.report.figures import figure
from marginlens.report.gather import Gathered, Line, cells_of, ending
from marginlens.report.grids import (
    GAIN,
    NOT_RUN,
    SPREAD,
    WIDE,
    Grid,
    Item,
    bad_grid,
    looks_grid,
    measure,
    paper_grid,
)
from marginlens.report.rates import rates_figure, rates_grid
from marginlens.report.tables import others_grid
from marginlens.runs.config import Pretrain
from marginlens.runs.query import apart, spelled
from marginlens.runs.records import Epoch, Evaluation
from marginlens.runs.run import Run

POINTS = 200
"""Points of a curve in the page at most, evenly chosen with the last one among them."""
CURVES = ("loss", "knn", "lr", "spread", "embedding_spread")
_NUMBERS = ("published", "ours", "difference", GAIN, "seeds")
"""Columns of numbers, also where a table has none yet."""
_SKIPPED = ("time", "engine_about", "device", "step")

Drawing = tuple[str, str]
"""A heading, or "", and the figure below it."""


@dataclass(frozen=True)
class Part:
    """A part of the page: drawings, and a table under them."""

    grid: Grid
    drawings: Sequence[Drawing] = ()
    points: bool = False
    """True if the table has the points of a figure, and is folded."""

    @property
    def head(self) -> list[tuple[str, str]]:
        """The name of each column, and "n" if it has numbers."""
        sorted_by = {i for row in self.grid.rows for i, item in enumerate(row) if item.sort is not None}
        return [(name, "n" * (name in _NUMBERS or i in sorted_by)) for i, name in enumerate(self.grid.head)]

    @property
    def rows(self) -> list[tuple[bool, list[tuple[str, Item]]]]:
        """Each row: True if it was run, and its items, each with its kind: "n" for a number, "wide" for words."""
        return [
            (_ran(row), [(_kind(name, item), item) for name, item in zip(self.grid.head, row, strict=True)])
            for row in self.grid.rows
        ]

    @property
    def partly_run(self) -> bool:
        """True if some rows were run, and others were not."""
        return len({_ran(row) for row in self.grid.rows}) == 2


def page(gathered: Gathered, stores: Iterable[str]) -> str:
    """Return the whole page."""
    looks, rates = looks_grid(gathered), rates_grid(gathered)
    states = Counter(run.state for run in gathered.runs)
    places = _places(gathered)
    return render(
        "report.html.j2",
        stores=list(stores),
        states=", ".join(f"{count} {state}" for state, count in sorted(states.items())),
        spread=SPREAD,
        overview=[(table, _counts(gathered, key)) for key, table in gathered.tables.items()],
        tables=[_table(table, gathered.lines[key]) for key, table in gathered.tables.items()],
        looks=Part(looks, _looks(gathered)),
        rates=Part(rates, [("", rates_figure(gathered))]) if rates.rows else None,
        others=Part(others_grid(gathered)) if gathered.others else None,
        bad=Part(bad_grid(gathered.bad)) if gathered.bad else None,
        curves=[{"key": run.key, "name": run.name, **_curve(run.metrics)} for run in gathered.runs],
        runs=[_run(run, places.get(run.key, []), gathered.copies.get(run.key, [])) for run in gathered.runs],
    )


def commands(path: Path, settings: Pretrain, evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the lines to type where the report was made: pre-training, then each evaluation."""
    store, folder = shlex.quote(str(path.parent)), shlex.quote(str(path))
    lines = [f"marginlens pretrain {' '.join(_option(n, v) for n, v in spelled(settings).items())} --runs {store}"]
    for known in evaluations:
        words = [f"marginlens {shlex.quote(known.kind)} {folder}"]
        words += [f"--to {shlex.quote(known.data)}"] if evals.get(known.kind).elsewhere else []
        words += [_option(name, value) for name, value in known.odd.items()]
        lines.append(" ".join(words))
    return lines


def _option(name: str, value: Any) -> str:
    dashed = shlex.quote(name.replace("_", "-"))
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    if isinstance(value, list | tuple):
        return f"--{dashed} {' '.join(shlex.quote(str(x)) for x in value)}"
    return f"--{dashed} {shlex.quote(str(value))}"


def _ran(row: Sequence[Item]) -> bool:
    return not (row and row[-1].text.startswith(NOT_RUN))


def _kind(name: str, item: Item) -> str:
    return "n" if name in _NUMBERS or item.sort is not None else "wide" if name in WIDE else ""


def _counts(gathered: Gathered, key: str) -> list[int]:
    """Return how many cells a table has, and how many have a number, a partial run, and a shorter look."""
    lines = gathered.lines[key]
    groups = (lines, [x for x in lines if x.values], [x for x in lines if x.partial], gathered.looks[key])
    return [cells_of(group) for group in groups] if lines else []


def _table(table: Table, lines: Sequence[Line]) -> Part:
    """Return a table of the paper, or a figure with its points."""
    drawn = figure(table, lines, published=True) if table.kind == "figure" and lines else ""
    return Part(paper_grid(table, lines), [("", drawn)] if drawn else [], table.kind == "figure" and bool(lines))


def _looks(gathered: Gathered) -> list[Drawing]:
    """Return the figures of shorter looks and rehearsals, one for each label."""
    drawings = []
    for key, lines in gathered.looks.items():
        table = gathered.tables[key]
        for label in sorted({line.label for line in lines}) if table.kind == "figure" else ():
            drawn = figure(table, [line for line in lines if line.label == label])
            drawings += [(f"{table.name}: {table.title} ({label})", drawn)] if drawn else []
    return drawings


def _places(gathered: Gathered) -> dict[str, list[tuple[Table, str, list[Run]]]]:
    """Return the cells that each run stands in, by its key: the table, the cell's path, and the other seeds."""
    places: dict[str, list[tuple[Table, str, list[Run]]]] = {}
    for part in (gathered.lines, gathered.looks):
        for key, lines in part.items():
            for line in lines:
                path = line.cell.path + (f" ({line.label})" if line.label else "")
                for run in line.runs:
                    others = [other for other in line.runs if other.key != run.key]
                    places.setdefault(run.key, []).append((gathered.tables[key], path, others))
    return places


def _curve(metrics: Sequence[Epoch]) -> dict[str, list[Any]]:
    """Return the curves of a run that has them, over its epochs."""
    if len(metrics) > POINTS:
        picked = {round(i * (len(metrics) - 1) / (POINTS - 1)) for i in range(POINTS)}
        rare = sum("knn" in line for line in metrics) <= POINTS
        # epochs with nearest neighbours stay, unless nearly all have them
        metrics = [line for i, line in enumerate(metrics) if i in picked or (rare and "knn" in line)]
    curves = {name: [_short(line.get(name)) for line in metrics] for name in CURVES}
    shown = {name: values for name, values in curves.items() if any(x is not None for x in values)}
    return {"epoch": [line.epoch for line in metrics]} | shown


def _short(value: float | None) -> float | None:
    """Return a number to five digits, which is as much as a picture shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _run(run: Run, places: Sequence[tuple[Table, str, list[Run]]], copies: Sequence[str]) -> dict[str, Any]:
    """Return the section of one run: how to make it again, where it ran, its evaluations, its configuration."""
    chosen = run.settings
    about = f"{chosen.method}, {chosen.data}, {chosen.effect}, {counted(chosen.epochs, 'epoch')}, seed {chosen.seed}"
    return {
        "key": run.key,
        "name": run.name,
        "about": about + (f", {besides}" if (besides := apart(chosen)) else ""),
        "failed": run.state == "failed",
        "ending": ending(run),
        "path": run.path,
        "copies": copies,
        "result": _facts(run.outcome.plain()) if run.outcome else "",
        "places": places,
        "curve": bool(run.metrics),
        "commands": "\n".join(commands(run.path, chosen, run.evaluations)),
        "command": run.command,
        "evaluations": [_evaluation(known) for known in run.evaluations],
        "starts": [f"from step {x.step}: " * bool(x.step) + _environment(x.plain()) for x in run.starts],
        "settings": _settings(chosen.model_dump(mode="json")),
    }


def _evaluation(known: Evaluation) -> dict[str, Any]:
    plain = known.plain()
    return {
        "measure": measure(known),
        "diverged": known.diverged,
        "numbers": _facts({name: value for name, value in plain.items() if isinstance(value, int | float)}),
        "settings": _settings(plain["settings"]),
        "environment": _environment(known.environment.plain()),
    }


def _facts(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in known.items())


def _environment(known: Mapping[str, Any]) -> str:
    first = [str(known["device"])] if "device" in known else []
    rest = [f"{k} {v}" for k, v in known.items() if k not in _SKIPPED and v != ""]
    when = [f"at {known['time']}"] if "time" in known else []
    return ", ".join([*first, *rest, *when])


def _settings(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {json.dumps(v)}" for k, v in known.items())
