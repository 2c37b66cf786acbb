"""The table of probes that differ in their learning rate alone.

Which rate suits a linear layer depends on how large the features are, and an effect changes that too. At one rate for
all, a backbone with smaller features looks worse than it is.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from marginlens.methods import METHODS
from marginlens.output import counted
from marginlens.paper.match import worth
from marginlens.report.figures import LINES, Panel, Point, logarithmic, panels, picture
from marginlens.report.gather import Gathered, Line, std_of
from marginlens.report.grids import Grid, Item, Piece, mean_of, measure, number, say
from marginlens.runs.query import apart
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run

Series = dict[float, Evaluation]
"""Probes by their learning rate, the same in all else."""


def series(run: Run) -> dict[str, Series]:
    """Return a run's probes at two learning rates or more, by all that they share."""
    found: dict[str, Series] = {}
    for one in run.evaluations:
        if one.rate is not None:
            probes = found.setdefault(_shared(one), {})
            probes[one.rate] = max(probes.get(one.rate, one), one, key=worth)
    return {shared: dict(sorted(probes.items())) for shared, probes in found.items() if len(probes) > 1}


def _shared(one: Evaluation) -> str:
    """Return all that tells a probe from others, but for its rate."""
    rest = one.settings.model_dump(mode="json", exclude={"lr"})
    return json.dumps([one.kind, one.data, one.data_fingerprint, rest], sort_keys=True)


def beside(seen: Run) -> list[Evaluation]:
    """Probes that stand in this table alone: at another rate than the recipe's, beside one at the recipe's."""
    return [
        one
        for probes in series(seen).values()
        if any("lr" not in other.odd for other in probes.values())
        for one in probes.values()
        if "lr" in one.odd
    ]


def highest(line: Line) -> Item:
    """What a cell's runs have at the learning rate that suits them best, of the seeds that have more rates than one."""
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
    """Return rates at which a layer was lost beside these."""
    return {rate for one in probes.values() for rate in one.lost}


def _best(group: Sequence[tuple[Run, Series]]) -> tuple[float, float] | None:
    """Of the rates that every seed was probed at, and none diverged, the one with the highest mean, and that mean."""
    means = {
        rate: statistics.fmean(held[rate].top1 for _, held in group)
        for rate in _common(group)
        if not any(held[rate].diverged for _, held in group)
    }
    return max(means.items(), key=lambda pair: pair[1], default=None)


def _common(group: Sequence[tuple[Run, Series]]) -> list[float]:
    """The rates that every seed was probed at."""
    return sorted(set.intersection(*(set(held) for _, held in group))) if group else []


def rates_grid(gathered: Gathered) -> Grid:
    """A row for the seeds of a setting and a kind of probe, a column for each learning rate."""
    groups = _groups(gathered)
    rates = sorted({rate for group in groups for _, probes in group for rate in probes})
    about = (
        "Top-1 by the learning rate of the linear layer; all layers of a run saw the same crops. Small features need a "
        "higher rate: at one rate for all, part of a difference between two backbones is their features' size. The "
        "feature norm is the mean over the images that were tested on."
    )
    head = ("runs", "pre-training", "evaluation", "feature norm", *(f"lr {rate:g}" for rate in rates), "highest at")
    return Grid("rates", "The probe's learning rate", about, head, [_row(group, rates) for group in groups])


def rates_figure(gathered: Gathered) -> str:
    """A panel for what was pre-trained on and how it was probed, in it a line for each effect, plain first."""
    return panels(_panels(_groups(gathered)))


def rates_picture(gathered: Gathered) -> str:
    """The same of probes by the recipe but for their rate, as an SVG file, a line for each row of the paper's tables.

    Of backbones by the recipe, and panels that compare some, where there are any: a picture with everything that was
    ever tried shows nothing.
    """
    groups = [group for group in _groups(gathered) if all(set(one.odd) <= {"lr"} for one in group[0][1].values())]
    groups = [group for group in groups if not apart(group[0][0].settings)] or groups
    if not groups:
        raise ValueError(
            "no run was probed at several learning rates and else by the recipe: marginlens probe RUN --beside 3 10 30"
        )
    lines = Counter(map(_panel_of, groups))
    shown = _panels([group for group in groups if lines[_panel_of(group)] > 1] or groups, _rows_of(gathered))
    effects = {effect for one in shown for effect in one.series}
    if len(effects) > LINES:
        raise ValueError(
            f"{len(effects)} effects were probed at several learning rates, and a picture tells {LINES} apart; "
            "choose some of the tables with --only"
        )
    return picture(shown)


def _rows_of(gathered: Gathered) -> dict[str, str]:
    """What the paper's tables call a run, by its key, in their order: pos+curv has other numbers on other data."""
    tables = [lines for key, lines in gathered.lines.items() if gathered.tables[key].kind == "table"]
    found = {seen.key: line.cell for lines in tables for line in lines for seen in line.runs}
    return {key: cell.path.split("/", 2)[2] for key, cell in found.items()}


def _panels(groups: Sequence[Sequence[tuple[Run, Series]]], rows: Mapping[str, str] | None = None) -> list[Panel]:
    """A line goes over the rates of all its seeds: with fewer at some, a step between seeds would look like one of
    rates. It is named by its effect, or by its row where it has one, and has one colour in all panels, as far as there
    are colours."""
    found: dict[tuple[int, str, str, int], dict[str, list[Point]]] = {}
    rows = rows or {}
    order = list(rows.values())
    places = {key: order.index(row) for key, row in rows.items()}
    for group in sorted(groups, key=lambda group: _far(group[0][0], places)):
        first = group[0][0]
        chosen, besides = first.settings, apart(first.settings)
        effect = rows.get(first.key) or (f"{chosen.effect}, {besides}" if besides else chosen.effect)
        named, names = effect, found.setdefault(_panel_of(group), {})
        while effect in names:  # as far as settings tell; the data's content or the numerics are others
            effect = f"{named} [{len(names) + 1}]"
        names[effect] = []
        for rate in _common(group) or sorted({rate for _, held in group for rate in held}):
            tops = [one.top1 for one in _at(group, rate)]
            said = f"{effect}, lr {rate:g}: {_mean(group, rate).text}"
            lost = any(one.diverged for one in _at(group, rate))
            names[effect].append(Point(rate, statistics.fmean(tops), std_of(tops) or 0.0, said, first.key, lost))
    everywhere: dict[str, list[Point]] = {effect: [] for names in found.values() for effect in names}
    same = everywhere if len(everywhere) <= LINES else {}
    return [
        logarithmic(
            f"{list(METHODS)[method]} {data}: {measured}",
            f"the layer's learning rate ({counted(epochs, 'epoch')} of pre-training)",
            same | found[method, data, measured, epochs],
        )
        for method, data, measured, epochs in sorted(found)
    ]


def _panel_of(group: Sequence[tuple[Run, Series]]) -> tuple[int, str, str, int]:
    """What the lines of a panel share: the method's place, the data, how it was probed, the length of pre-training."""
    first, probes = group[0]
    chosen = first.settings
    return list(METHODS).index(chosen.method), chosen.data, _measured(probes), chosen.epochs


def _far(seen: Run, places: Mapping[str, int]) -> tuple[bool, bool, int]:
    """How far from the base line: plain by the recipe comes first, plain otherwise, then what has a place."""
    plain = seen.settings.effect == "plain"
    return not plain, plain and bool(apart(seen.settings)), places.get(seen.key, len(places))


def _groups(gathered: Gathered) -> list[list[tuple[Run, Series]]]:
    """The seeds of a setting with what each has of a kind of probe."""
    groups: dict[tuple[tuple[str, str, int], str], list[tuple[Run, Series]]] = {}
    for seen in gathered.runs:
        for kind, probes in series(seen).items():
            groups.setdefault((seen.family, kind), []).append((seen, probes))
    return [sorted(group, key=lambda held: held[0].order) for group in groups.values()]


def _measured(probes: Series) -> str:
    """What the probes of a series are, but for their rate."""
    return measure(next(iter(probes.values())), but=("lr",))


def _at(group: Sequence[tuple[Run, Series]], rate: float) -> list[Evaluation]:
    """What the seeds that were probed at a rate have there."""
    return [held[rate] for _, held in group if rate in held]


def _mean(group: Sequence[tuple[Run, Series]], rate: float) -> Item:
    found = _at(group, rate)
    return mean_of([one.top1 for one in found], len(group), sum(one.diverged for one in found), group[0][0])


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
    runs = Item(tuple(Piece(f"seed {seen.settings.seed}", seen) for seen, _ in group))
    at = Item() if best is None else say(f"{best[0]:g}", sort=best[0])
    size = say("" if norm is None else f"{norm:.2f}", sort=norm)
    return runs, say(about), say(_measured(probes)), size, *(_mean(group, rate) for rate in rates), at
