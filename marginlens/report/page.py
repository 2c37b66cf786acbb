"""The report's page: one self-contained HTML file.

Tables, figures and sections need no script. The script sorts, filters and draws curves.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginlens import evals
from marginlens.lens import figures as theory
from marginlens.output import counted
from marginlens.report import render
from marginlens.report.figures import figure
from marginlens.report.grids import GAIN, SPREAD, WIDE, Grid, Item, bad_grid, looks_grid, measure, paper_grid
from marginlens.report.lines import Gathered, cells_of, ending
from marginlens.report.rates import rates_figure, rates_grid
from marginlens.report.tables import cells_grid, settings_grid
from marginlens.runs.config import Pretrain
from marginlens.runs.query import apart, spelled
from marginlens.runs.records import Epoch, Evaluation, Look
from marginlens.runs.run import Run
from marginlens.runs.seeds import by_setting

POINTS = 200
"""The most points of a curve, evenly chosen, the last one among them."""
CURVES = ("loss", "knn", "lr", "spread", "embedding_spread")
LENS_CURVES: dict[str, Callable[[Look], float | None]] = {
    "lens_angle": lambda look: math.degrees(look.get("angle", math.nan)),
    "lens_pull": lambda look: (look.get("pull") or {}).get("positive"),
    "lens_rank": lambda look: (look.get("features") or {}).get("rank"),
}
"""Curves of what a lens saw, for runs that were made with `--lens`."""
SHOWN = 8
"""The number of settings whose curves are drawn at first: one for each colour."""
_NUMBERS = ("published", "ours", "difference", GAIN, "seeds")
"""Columns of numbers, even if they are empty."""
_SKIPPED = ("time", "engine_about", "device", "step")

Place = tuple[str, str, str, list[Run]]
"""A table's name, the section with its number, a cell's path, and the other seeds."""
Drawing = tuple[str, str]
"""A heading, or "", and the figure below it."""


@dataclass(frozen=True)
class Part:
    """A part of the page: drawings, and a table under them."""

    grid: Grid
    drawings: Sequence[Drawing] = ()
    folded: bool = False
    """True if the reader opens the table."""

    @property
    def head(self) -> list[tuple[str, str]]:
        """The name of each column, and "n" if it has numbers."""
        sorted_by = {i for row in self.grid.rows for i, item in enumerate(row) if item.sort is not None}
        return [(name, "n" * (name in _NUMBERS or i in sorted_by)) for i, name in enumerate(self.grid.head)]

    @property
    def rows(self) -> list[tuple[bool, list[tuple[str, Item]]]]:
        """Each row: True if it was run, and its items, each with its kind: "n" for a number, "wide" for words."""
        ran = self._ran
        return [
            (i in ran, [(_kind(name, item), item) for name, item in zip(self.grid.head, row, strict=True)])
            for i, row in enumerate(self.grid.rows)
        ]

    @property
    def partly_run(self) -> bool:
        """True if some rows were run, and others were not."""
        return len(self._ran) < len(self.grid.rows)

    @property
    def _ran(self) -> set[int]:
        """The rows that link to a run; all of them in a table without links."""
        linked = {i for i, row in enumerate(self.grid.rows) if any(piece.run for item in row for piece in item.pieces)}
        return linked or set(range(len(self.grid.rows)))


def page(gathered: Gathered, stores: Iterable[str]) -> str:
    """Return the whole page."""
    rates, looks, cells = rates_grid(gathered), looks_grid(gathered), cells_grid(gathered)
    states = Counter(run.state for run in gathered.runs)
    every = {key: _table(gathered, key) for key in gathered.shown}
    tables = {key: part for key, part in every.items() if part.grid.rows or part.drawings}
    places = _places(gathered, tables)
    return render(
        "report.html.j2",
        stores=list(stores),
        states=", ".join(f"{count} {state}" for state, count in sorted(states.items())),
        spread=SPREAD,
        settings=Part(settings_grid(gathered)),
        curves=_curves(gathered),
        overview=[(gathered.tables[key], key if key in tables else "cells", _counts(gathered, key)) for key in every],
        tables=list(tables.values()),
        cells=Part(cells) if cells.rows else None,
        looks=Part(looks, _looks(gathered)) if looks.rows else None,
        rates=Part(rates, [("", rates_figure(gathered))], folded=True) if rates.rows else None,
        bad=Part(bad_grid(gathered.bad)) if gathered.bad else None,
        runs=[_run(run, places.get(run.key, []), gathered.copies.get(run.key, [])) for run in gathered.runs],
    )


def commands(path: Path, settings: Pretrain, evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the commands that repeat a run: pre-training, then each evaluation."""
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


def _kind(name: str, item: Item) -> str:
    return "n" if name in _NUMBERS or item.sort is not None else "wide" if name in WIDE else ""


def _counts(gathered: Gathered, key: str) -> list[int]:
    """Count the cells of a table: all, those with a number, with a partial run, with a shorter look."""
    lines = gathered.lines[key]
    groups = (lines, [x for x in lines if x.values], [x for x in lines if x.partial], gathered.looks[key])
    return [cells_of(group) for group in groups] if lines else []


def _table(gathered: Gathered, key: str) -> Part:
    """Return a table of the paper, or a figure with its points."""
    table, lines = gathered.tables[key], gathered.shown[key]
    drawn = figure(table, gathered.lines[key], published=True) if table.kind == "figure" else ""
    if key in theory.FIGURES:  # a map of an equation needs no run
        drawn = f"<figure>{theory.inline(key)}<figcaption>{theory.CAPTIONS[key]}</figcaption></figure>"
    return Part(paper_grid(table, lines), [("", drawn)] if drawn else [])


def _looks(gathered: Gathered) -> list[Drawing]:
    """Return the figures of shorter looks and rehearsals, one for each label."""
    drawings = []
    for key, lines in gathered.looks.items():
        table = gathered.tables[key]
        for label in sorted({line.label for line in lines}) if table.kind == "figure" else ():
            drawn = figure(table, [line for line in lines if line.label == label])
            drawings += [(f"{table.name}: {table.title} ({label})", drawn)] if drawn else []
    return drawings


def _places(gathered: Gathered, tables: Container[str]) -> dict[str, list[Place]]:
    """Return the cells that each run stands in, by its key; `tables` are the sections that the page has."""
    places: dict[str, list[Place]] = {}
    for part, otherwise in ((gathered.lines, "cells"), (gathered.looks, "looks")):
        for key, lines in part.items():
            for line in lines:
                path = line.cell.path + (f" ({line.label})" if line.label else "")
                for run in line.runs:
                    others = [other for other in line.runs if other.key != run.key]
                    at = key if key in tables and not line.label else otherwise
                    places.setdefault(run.key, []).append((gathered.tables[key].name, at, path, others))
    return places


def _curves(gathered: Gathered) -> dict[str, list[Any]]:
    """Return the settings that have curves, each with its number of runs, and the curves of every run."""
    groups = [[run for run in group if run.metrics] for group in by_setting(gathered.runs)]
    groups = [group for group in groups if group]
    about = [_words(group[0]) for group in groups]
    differing = [i for i in range(len(about[0])) if len({words[i] for words in about}) > 1] if about else []
    names = [", ".join(words[i] for i in differing if words[i]) for words in about]
    fallback = "by the recipe" if differing else "every run"
    return {
        "settings": [
            {"about": name or fallback, "count": len(group), "on": i < SHOWN}
            for i, (name, group) in enumerate(zip(names, groups, strict=True))
        ],
        "runs": [
            {"key": run.key, "seed": run.settings.seed, "setting": i, **_curve(run.metrics, run.looks)}
            for i, group in enumerate(groups)
            for run in group
        ],
    }


def _curve(metrics: Sequence[Epoch], looks: Sequence[Look] = ()) -> dict[str, list[Any]]:
    """Return the curves of a run over its epochs, and of what a lens saw."""
    if len(metrics) > POINTS:
        picked = {round(i * (len(metrics) - 1) / (POINTS - 1)) for i in range(POINTS)}
        rare = sum("knn" in line for line in metrics) <= POINTS
        # epochs with nearest neighbours stay, unless nearly all have them
        metrics = [line for i, line in enumerate(metrics) if i in picked or (rare and "knn" in line)]
    curves = {name: [_short(line.get(name)) for line in metrics] for name in CURVES}
    seen = {look.epoch: look for look in looks}
    for name, number in LENS_CURVES.items():
        curves[name] = [_short(number(seen[line.epoch])) if line.epoch in seen else None for line in metrics]
    shown = {name: values for name, values in curves.items() if any(x is not None for x in values)}
    return {"epoch": [line.epoch for line in metrics]} | shown


def _short(value: float | None) -> float | None:
    """Round a number to five digits, which is enough for a picture."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _run(run: Run, places: Sequence[Place], copies: Sequence[str]) -> dict[str, Any]:
    """Return the section of one run: commands to repeat it, evaluations, environment, configuration."""
    return {
        "key": run.key,
        "name": run.name,
        "about": ", ".join(filter(None, [*_words(run), f"seed {run.settings.seed}"])),
        "failed": run.state == "failed",
        "ending": ending(run),
        "path": run.path,
        "copies": copies,
        "result": _facts(run.outcome.plain()) if run.outcome else "",
        "places": places,
        "curve": bool(run.metrics),
        "commands": "\n".join(commands(run.path, run.settings, run.evaluations)),
        "command": run.command,
        "evaluations": [_evaluation(known) for known in run.evaluations],
        "starts": [f"from step {x.step}: " * bool(x.step) + _environment(x.plain()) for x in run.starts],
        "settings": _settings(run.settings.model_dump(mode="json")),
    }


def _words(run: Run) -> tuple[str, ...]:
    """Return a run's method, data, effect, epochs and other settings in words."""
    chosen = run.settings
    epochs = counted(chosen.epochs, "epoch")
    return chosen.method, chosen.data, chosen.effect, epochs, apart(chosen)


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
