"""Probes that differ in their learning rate alone, as a table and as figures.

The best rate of a linear layer depends on the size of the features, and an effect changes that size. At one rate for
all, a backbone with smaller features looks worse than it is.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from marginlens.methods import METHODS
from marginlens.output import counted
from marginlens.paper.match import worth
from marginlens.report.figures import COLOURS, LINES, Panel, Point, logarithmic, panels, picture
from marginlens.report.grids import Grid, Item, Piece, mean_item, measure, say
from marginlens.report.lines import Gathered, Line
from marginlens.runs.query import apart
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.runs.seeds import Top, number, order, over_seeds, std_of

Series = dict[float, Evaluation]
"""Probes by their learning rate; all else is the same."""


def series(run: Run) -> dict[str, Series]:
    """Return a run's probes at two or more learning rates, by the settings that they share."""
    found: dict[str, Series] = {}
    for one in run.evaluations:
        if one.rate is not None:
            probes = found.setdefault(_shared(one), {})
            probes[one.rate] = max(probes.get(one.rate, one), one, key=worth)
    return {shared: dict(sorted(probes.items())) for shared, probes in found.items() if len(probes) > 1}


def _shared(one: Evaluation) -> str:
    """Return everything that identifies a probe, without its rate."""
    rest = one.settings.model_dump(mode="json", exclude={"lr"})
    return json.dumps([one.kind, one.data, one.data_fingerprint, rest], sort_keys=True)


def beside(run: Run) -> list[Evaluation]:
    """Return probes at other rates than the recipe's, if one at the recipe's rate is beside them."""
    return [
        one
        for probes in series(run).values()
        if any("lr" not in other.odd for other in probes.values())
        for one in probes.values()
        if "lr" in one.odd
    ]


def highest(line: Line) -> Item:
    """Return a cell's mean at its best learning rate, over the seeds that were probed at several."""
    found = [(value.run, series(value.run).get(_shared(value.one), {})) for value in line.values]
    found = [(run, probes) for run, probes in found if probes]
    if (best := _best(found)) is None:
        return Item()
    have = max(rate for _, probes in found for rate in probes)
    tried = max([have, *(rate for _, probes in found for rate in _lost(probes))])
    notes = ["the highest tried"] if best[0] == tried else []
    notes += ["the highest that all seeds have"] if best[0] == max(_common(found)) < have else []
    notes += [f"{len(found)} of {len(line.values)} seeds"] if len(found) < len(line.values) else []
    about = f" ({', '.join(notes)})" if notes else ""
    return say(f"{number(best[1])} at {best[0]:g}{about}", sort=best[1])


def _lost(probes: Series) -> set[float]:
    """Return the rates at which a layer beside these became NaN."""
    return {rate for one in probes.values() for rate in one.lost}


def _best(group: Sequence[tuple[Run, Series]]) -> tuple[float, float] | None:
    """Return the rate with the highest mean, and that mean, of rates that every seed has and where none diverged."""
    means = {
        rate: statistics.fmean(held[rate].top1 for _, held in group)
        for rate in _common(group)
        if not any(held[rate].diverged for _, held in group)
    }
    return max(means.items(), key=lambda pair: pair[1], default=None)


def _common(group: Sequence[tuple[Run, Series]]) -> list[float]:
    """Return the rates that every seed was probed at."""
    return sorted(set.intersection(*(set(held) for _, held in group))) if group else []


def rates_grid(gathered: Gathered) -> Grid:
    """Return a row for each setting and kind of probe, with a column for each learning rate."""
    groups = _groups(gathered)
    rates = sorted({rate for group in groups for _, probes in group for rate in probes})
    about = (
        "Top-1 by the learning rate of the linear layer; all layers of a run saw the same crops. Small features need a "
        "higher rate: at one rate for all, part of a difference between two backbones is their features' size. The "
        "feature norm is the mean over the images that were tested on."
    )
    head = ("pre-training", "evaluation", "feature norm", *(f"lr {rate:g}" for rate in rates), "highest at", "runs")
    return Grid("rates", "The probe's learning rate", about, head, [_row(group, rates) for group in groups])


def rates_figure(gathered: Gathered) -> str:
    """Return a panel for each data set and kind of probe, with a line for each setting, plain first."""
    return panels(_panels(_groups(gathered)))


def rates_picture(gathered: Gathered) -> str:
    """Return an SVG file of probes by the recipe at other rates, with a line for each row of the paper's tables.

    If any backbone is by the recipe, only those are shown, in panels that compare several.
    """
    groups = [group for group in _groups(gathered) if all(set(one.odd) <= {"lr"} for one in group[0][1].values())]
    groups = [group for group in groups if not apart(group[0][0].settings)] or groups
    if not groups:
        raise ValueError(
            "no run was probed at several learning rates, all else by the recipe; "
            "run: marginlens probe RUN --beside 3 10 30"
        )
    lines = Counter(map(_panel_of, groups))
    shown = _panels([group for group in groups if lines[_panel_of(group)] > 1] or groups, _rows_of(gathered))
    effects = {effect for one in shown for effect in one.series}
    if len(effects) > LINES:
        raise ValueError(
            f"{len(effects)} effects were probed at several learning rates, and a picture shows at most {LINES}; "
            "choose tables with --only"
        )
    return picture(shown)


def _rows_of(gathered: Gathered) -> dict[str, str]:
    """Return the row of each run in the paper's tables, by its key: pos+curv has other numbers on other data."""
    tables = [lines for key, lines in gathered.lines.items() if gathered.tables[key].kind == "table"]
    found = {run.key: line.cell for lines in tables for line in lines for run in line.runs}
    return {key: cell.path.split("/", 2)[2] for key, cell in found.items()}


def _panels(groups: Sequence[Sequence[tuple[Run, Series]]], rows: Mapping[str, str] | None = None) -> list[Panel]:
    """Return the panels, with a line for each setting in the same colour everywhere, as far as colours go.

    A line has the rates that all seeds share: otherwise a difference between seeds would look like one of rates.
    A panel of many lines is split by the settings other than the effect.
    """
    found: dict[tuple[Any, ...], dict[str, list[Point]]] = {}
    rows = rows or {}
    listed = list(rows.values())
    places = {key: listed.index(row) for key, row in rows.items()}
    count = Counter(map(_panel_of, groups))
    for group in sorted(groups, key=lambda group: _far(group[0][0], places)):
        first, of = group[0][0], _panel_of(group)
        besides = apart(first.settings)
        split = besides if count[of] > COLOURS else ""
        effect = first.settings.effect + (f", {besides}" if besides and not split else "")
        named = effect = rows.get(first.key) or effect
        names = found.setdefault((*of, split), {})
        while effect in names:  # runs of other data content or numerics have the same words
            effect = f"{named} [{len(names) + 1}]"
        names[effect] = []
        for rate in _common(group) or sorted({rate for _, held in group for rate in held}):
            tops = _tops(group, rate)
            numbers = [top.top1 for top in tops]
            said = f"{effect}, lr {rate:g}: {over_seeds(tops, len(group))}"
            lost = any(top.diverged for top in tops)
            names[effect].append(Point(rate, statistics.fmean(numbers), std_of(numbers) or 0.0, said, first.key, lost))
    everywhere: dict[str, list[Point]] = {effect: [] for names in found.values() for effect in names}
    same = everywhere if len(everywhere) <= LINES else {}
    return [
        logarithmic(
            f"{list(METHODS)[method]} {data}: {measured}{f', {split}' * bool(split)}",
            f"the layer's learning rate ({counted(epochs, 'epoch')} of pre-training)",
            same | dict(lines[i : i + LINES]),
        )
        for method, data, measured, epochs, split in sorted(found)
        for lines in [list(found[method, data, measured, epochs, split].items())]
        for i in range(0, len(lines), LINES)
    ]


def _panel_of(group: Sequence[tuple[Run, Series]]) -> tuple[int, str, str, int]:
    """Return what the lines of a panel share: the method's index, the data, the kind of probe, the epochs."""
    first, probes = group[0]
    chosen = first.settings
    return list(METHODS).index(chosen.method), chosen.data, _measured(probes), chosen.epochs


def _far(run: Run, places: Mapping[str, int]) -> tuple[bool, bool, int]:
    """Sort plain by the recipe first, then other plain runs, then rows of the paper in their order."""
    plain = run.settings.effect == "plain"
    return not plain, plain and bool(apart(run.settings)), places.get(run.key, len(places))


def _groups(gathered: Gathered) -> list[list[tuple[Run, Series]]]:
    """Return the seeds of each setting, with their probes of each kind."""
    groups: dict[tuple[tuple[str, str, int], str], list[tuple[Run, Series]]] = {}
    for run in gathered.runs:
        for kind, probes in series(run).items():
            groups.setdefault((run.family, kind), []).append((run, probes))
    made = [sorted(group, key=lambda held: held[0].order) for group in groups.values()]
    return sorted(made, key=lambda group: order(group[0][0]))


def _measured(probes: Series) -> str:
    """Name the probes of a series, without their rate."""
    return measure(next(iter(probes.values())), but=("lr",))


def _at(group: Sequence[tuple[Run, Series]], rate: float) -> list[Evaluation]:
    """Return the probes at a rate, of the seeds that have it."""
    return [held[rate] for _, held in group if rate in held]


def _tops(group: Sequence[tuple[Run, Series]], rate: float) -> list[Top]:
    return [Top(one.top1, one.diverged) for one in _at(group, rate)]


def _row(group: Sequence[tuple[Run, Series]], rates: Sequence[float]) -> tuple[Item, ...]:
    first, probes = group[0]
    chosen = first.settings
    besides = apart(chosen)
    about = f"{chosen.method} {chosen.data} {chosen.effect}, {counted(chosen.epochs, 'epoch')}"
    about += f", {besides}" if besides else ""
    norms = [
        known.feature_norm for _, held in group for known in list(held.values())[:1] if known.feature_norm is not None
    ]
    norm = statistics.fmean(norms) if norms else None
    best = _best(group)
    runs = Item(tuple(Piece(f"seed {run.settings.seed}", run) for run, _ in group))
    at = Item() if best is None else say(f"{best[0]:g}", sort=best[0])
    size = say("" if norm is None else f"{norm:.2f}", sort=norm)
    means = (mean_item(_tops(group, rate), len(group)) for rate in rates)
    return say(about), say(_measured(probes)), size, *means, at, runs
