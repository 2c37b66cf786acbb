"""From run records to what a report says: which run stands for which cell of the paper, and what it measured.

A run counts beside a published number only when its settings are the cell's (any seed), it is complete, and it was
evaluated as the paper does. Shorter looks and rehearsals are lines of their own, with a label. Nothing is computed
here but means and standard deviations, and no data set is opened.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import marginlens as ml
from marginlens import evals
from marginlens.paper import Cell, Table, readings
from marginlens.paper.match import Label, follows, match, standing
from marginlens.runs.config import NUMERICS, Pretrain
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run, Unreadable

Usual = Mapping[tuple[Label, str], str]
"""The content of data that counts in a table, by the kind of its runs and the name of the data."""


def numerics_of(run: Run) -> str:
    """Return what must be said of a run whose numbers mean something else now; "" for all others."""
    return "" if run.numerics == NUMERICS else f"numerics {run.numerics}, not {NUMERICS}"


def short(run: Run) -> str:
    """Return what became of a run, in a few words."""
    if run.state == "interrupted":
        return f"interrupted at epoch {run.epochs_done} of {run.settings.epochs}"
    return run.state


def ending(run: Run) -> str:
    """Return what became of a run, and why."""
    return f"failed: {run.why}" if run.state == "failed" else short(run)


def read_all(
    held: Iterable[Run | Unreadable],
) -> tuple[list[Run], list[tuple[str, str]], dict[str, list[str]]]:
    """Return every run once, folders that cannot be read with why, and further copies of runs by key.

    Of copies in several stores the one that got furthest counts, the first of equals; evaluations of copies that came
    to the same result are joined.
    """
    bad: list[tuple[str, str]] = []
    found: dict[str, list[Run]] = {}
    for one in held:
        if isinstance(one, Run):
            found.setdefault(one.key, []).append(one)
        else:
            bad.append((str(one.path), one.why))
    runs: list[Run] = []
    copies: dict[str, list[str]] = {}
    for key, same in found.items():
        best = max(same, key=lambda run: (run.complete, len(run.evaluations), len(run.metrics)))
        runs.append(best.joined(_joined(best, same)))
        if len(same) > 1:
            copies[key] = [str(run.path) for run in same if run is not best]
    return runs, bad, copies


def _joined(best: Run, same: Iterable[Run]) -> dict[str, Evaluation]:
    """Return the evaluations of a run and of its copies: of one name, which is one measurement, the latest."""
    joined: dict[str, Evaluation] = {}
    for run in same:
        if run.outcome == best.outcome:  # the same weights; another outcome's numbers are not this one's
            for name, one in run.evaluation_files.items():
                if name not in joined or one.time > joined[name].time:
                    joined[name] = one
    return dict(sorted(joined.items()))


def usual_contents(found: Iterable[tuple[Cell, Run, Label]]) -> Usual:
    """Return, where data of one name differ in content, the latest of a complete run, else the latest."""
    latest: dict[tuple[Label, str], tuple[bool, str, str]] = {}
    for cell, run, kind in found:
        marks = [(run.settings.data, run.resumed, run.data)]
        if evals.get(cell.measure).elsewhere:
            marks += [(one.data, one.time, one.data_fingerprint) for one in standing(cell, run, kind)]
        for data, time, content in marks:
            latest[kind, data] = max(latest.get((kind, data), (False, "", "")), (run.complete, time, content))
    return {key: content for key, (_, _, content) in latest.items()}


def odd_data(one: Evaluation, kind: Label, usual: Usual) -> str:
    """Return what is odd about the content that an evaluation was made on; "" where it is that of the others."""
    return odd_content(one.data, one.data_fingerprint, usual.get((kind, one.data), one.data_fingerprint))


def odd_content(data: str, content: str, usual: str) -> str:
    """Return which content some data have, and which counts; "" where they are the same."""
    if content == usual:
        return ""
    return f"not counted: the content of its {data} is {content[:10]}, and {usual[:10]} counts"


@dataclass(frozen=True)
class Value:
    """A number that a run gave."""

    run: Run
    one: Evaluation
    """The evaluation that it stands in."""

    @property
    def top1(self) -> float:
        return self.one.top1

    @property
    def diverged(self) -> bool:
        """By its probe's loss."""
        return self.one.diverged


@dataclass(frozen=True)
class Partial:
    """A run that gave no number, and why."""

    run: Run
    said: str


@dataclass(frozen=True)
class Line:
    """A cell of the paper and its runs, one per seed; with a label, runs that are not quite the cell's."""

    cell: Cell
    label: str = ""
    values: tuple[Value, ...] = ()
    partial: tuple[Partial, ...] = ()
    plain: Line | None = None
    """The line of the same cell without its effect, where the table has one that has run."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(sorted([v.run for v in self.values] + [p.run for p in self.partial], key=lambda seen: seen.order))

    @property
    def mean(self) -> float | None:
        return statistics.fmean(v.top1 for v in self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return std_of([v.top1 for v in self.values])

    @property
    def difference(self) -> float | None:
        """Ours less the published number."""
        mean, published = self.mean, self.cell.published
        return None if mean is None or published is None or self.label else mean - published.mean

    @property
    def gain(self) -> float | None:
        """What the effect gives: ours less ours without it."""
        mean, plain = self.mean, self.plain.mean if self.plain else None
        return None if mean is None or plain is None else mean - plain

    @property
    def gain_diverged(self) -> bool:
        """Whether a probe that diverged has a part in the gain."""
        return self.plain is not None and any(value.diverged for value in (*self.values, *self.plain.values))

    @property
    def published_gain(self) -> float | None:
        """The same of the published numbers."""
        published, plain = self.cell.published, self.plain.cell.published if self.plain else None
        return None if published is None or plain is None else published.mean - plain.mean


@dataclass(frozen=True)
class Gathered:
    """All that a report shows."""

    tables: dict[str, Table]
    lines: dict[str, list[Line]]
    """A line per cell of each table."""
    looks: dict[str, list[Line]]
    """Shorter looks and rehearsals of each table's cells."""
    others: list[Run]
    """Runs that are no cell's own."""
    runs: list[Run]
    """Every run that could be read."""
    bad: list[tuple[str, str]]
    """Folders that could not be read, and why."""
    copies: dict[str, list[str]]
    """Folders that hold the same run as the one that is shown, by its key."""
    labels: dict[str, str]
    """What must be said of a run that is a shorter look or a rehearsal, by its key."""


def gather(held: Iterable[Run | Unreadable], tables: Mapping[str, Table], only: Sequence[str] = ()) -> Gathered:
    """Reads every run once and puts it where it belongs; of `only` these tables, where it is given."""
    tables = {key: _read(table) for key, table in tables.items()}
    runs, bad, copies = read_all(held)
    found = _kept(_matches(tables, runs))
    own = {seen.key for _, seen, kind in found if kind == "exact"}
    groups: dict[tuple[str, str], list[tuple[Run, Label]]] = {}
    by_table: dict[str, list[tuple[Cell, Run, Label]]] = {}
    for cell, seen, kind in found:
        groups.setdefault((cell.table, cell.path), []).append((seen, kind))
        by_table.setdefault(cell.table, []).append((cell, seen, kind))
    chosen = {key: table for key, table in tables.items() if not only or key in only}
    lines: dict[str, list[Line]] = {}
    looks: dict[str, list[Line]] = {}
    for key, table in chosen.items():
        usual = usual_contents(by_table.get(key, []))
        made = [_lines(cell, groups.get((key, cell.path), []), usual) for cell in table.cells]
        lines[key] = _with_plain([first for first, *_ in made if first.runs or not first.cell.reading])
        looks[key] = [look for _, *more in made for look in more]
    others = [] if only else [seen for seen in runs if seen.key not in own]
    if only:
        shown = {s.key for part in (lines, looks) for held in part.values() for line in held for s in line.runs}
        runs = [seen for seen in runs if seen.key in shown]
    labels = {seen.key: odd for seen in runs if (odd := numerics_of(seen))}
    labels |= {seen.key: label for cell, seen, kind in found if (label := _label(cell, seen, kind, None))}
    return Gathered(chosen, lines, looks, others, runs, bad, copies, labels)


def _with_plain(lines: Sequence[Line]) -> list[Line]:
    """The lines of a table, each with the line of plain that differs by its effect only."""
    ran = [line for line in lines if line.values]
    plains = {_but_effect(line.cell): line for line in ran if _asked(line.cell, "effect") == "plain"}
    return [
        replace(line, plain=plains.get(_but_effect(line.cell)))
        if line.values and _asked(line.cell, "effect") != "plain"
        else line
        for line in lines
    ]


def _but_effect(cell: Cell) -> str:
    """What a cell asks for beside its effect."""
    return repr((cell.to, sorted((name, value) for name, value in (cell.settings or {}).items() if name != "effect")))


def cells_of(lines: Iterable[Line]) -> int:
    """How many cells these lines are of, whatever the reading."""
    return len({line.cell.address for line in lines})


def std_of(numbers: Sequence[float]) -> float | None:
    """The sample standard deviation over seeds; none for one seed."""
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def _read(table: Table) -> Table:
    """A table whose cells come by every reading of the paper's words; other readings are only shown where they ran."""
    return replace(table, cells=tuple(read for cell in table.cells for read in readings(cell)))


def _matches(tables: Mapping[str, Table], runs: Iterable[Run]) -> list[tuple[Cell, Run, Label]]:
    """Each pair of a cell and a run that has to do with it.

    Settings are compared once, however many cells and seeds share them, and only where method and effect agree, which
    no label changes. Cells that share them may be swept along others, and a rehearsal keeps what is swept.
    """
    index: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for seen in runs:
        groups = index.setdefault((seen.settings.method, seen.settings.effect), {})
        groups.setdefault(seen.but_seed, []).append(seen)
    known: dict[tuple[str, str], Label | None] = {}
    found: list[tuple[Cell, Run, Label]] = []
    for cell in (cell for table in tables.values() for cell in table.cells if cell.settings is not None):
        asked = repr((sorted((cell.settings or {}).items()), sorted(cell.at.items())))
        for shared, group in index.get((_asked(cell, "method"), str(ml.effect(_asked(cell, "effect")))), {}).items():
            if (asked, shared) not in known:
                known[asked, shared] = match(cell, group[0])
            if (kind := known[asked, shared]) is not None:
                found += [(cell, seen, kind) for seen in group]
    return found


def _asked(cell: Cell, name: str) -> Any:
    """A setting of the cell."""
    assert cell.settings is not None
    return cell.settings.get(name, Pretrain.model_fields[name].default)


_RANKS: tuple[Label, ...] = ("exact", "shorter", "rehearsal")


def _kept(found: Sequence[tuple[Cell, Run, Label]]) -> list[tuple[Cell, Run, Label]]:
    """Without looks that say nothing.

    A run that is some cell's own is no shorter look at another's (200 epochs of Tab. 2 at the 1,000 of Tab. 9), one
    that is a shorter look is no rehearsal, and of shorter looks those at the cells of fewest epochs count. What several
    readings of a cell have in common, as a rehearsal may be, is the first one's.
    """
    ranks: dict[str, int] = {}
    for _, seen, kind in found:
        ranks[seen.key] = min(ranks.get(seen.key, len(_RANKS)), _RANKS.index(kind))
    found = [(cell, seen, kind) for cell, seen, kind in found if _RANKS.index(kind) == ranks[seen.key]]
    fewest: dict[str, int] = {}
    for cell, seen, _ in found:
        fewest[seen.key] = min(fewest.get(seen.key, 1 << 60), _asked(cell, "epochs"))
    kept: dict[tuple[str, str], tuple[Cell, Run, Label]] = {}
    for cell, seen, kind in found:
        if kind == "exact" or _asked(cell, "epochs") == fewest[seen.key]:
            kept.setdefault((cell.address, seen.key), (cell, seen, kind))
    return list(kept.values())


def _lines(cell: Cell, runs: Sequence[tuple[Run, Label]], usual: Usual) -> list[Line]:
    """The cell's own line, whatever is in it, and then one for each label; one number per seed in each."""
    values: dict[str, dict[int, Value]] = {}
    partial: dict[str, list[Partial]] = {}
    bare: list[tuple[str, Run]] = []
    latest = sorted(runs, key=lambda pair: pair[0].resumed, reverse=True)
    for seen, kind in sorted(latest, key=lambda pair: pair[0].settings.seed):
        label, found = _label(cell, seen, kind, None), None
        said = odd_content(seen.settings.data, seen.data, usual[kind, seen.settings.data])
        if not said and seen.complete:
            able = standing(cell, seen, kind)
            found = next((one for one in able if not odd_data(one, kind, usual)), None)
            said = odd_data(able[0], kind, usual) if able and found is None else ""
        if found is not None:
            label = _label(cell, seen, kind, found)
            value = Value(seen, found)
            first = values.setdefault(label, {}).setdefault(seen.settings.seed, value)
            said = "" if first.run is seen else f"not counted: {first.run.name} has this seed already"
            if label and kind == "exact" and not said:
                partial.setdefault("", []).append(Partial(seen, _not_quite(seen, label)))
        elif not said and (kind == "exact" or not seen.complete):
            said = _lacks(cell, seen)
        elif not said:
            bare.append((label, seen))
        if said:
            partial.setdefault(label, []).append(Partial(seen, said))
    for label, seen in bare:  # a look without a number lacks it where another seed has it, and nothing elsewhere
        if at := next((key for key in values if key == label or key.startswith(f"{label}, ")), ""):
            partial.setdefault(at, []).append(Partial(seen, _no_number(cell)))
    keys = ["", *sorted({*values, *partial} - {""})]
    return [Line(cell, key, tuple(values.get(key, {}).values()), tuple(partial.get(key, ()))) for key in keys]


def _not_quite(seen: Run, label: str) -> str:
    """Why a number of a cell's own run is not in the cell's own line."""
    return f"not counted: {numerics_of(seen)}" if numerics_of(seen) else f"complete, only a shorter look ({label})"


def _label(cell: Cell, seen: Run, kind: Label, found: Evaluation | None) -> str:
    """What must be said wherever a number of this run stands; nothing of a cell's own run that was probed in full."""
    said = [f"rehearsal on {seen.settings.data}"] if kind == "rehearsal" else []
    if seen.settings.epochs != (asked := _asked(cell, "epochs")):
        said.append(f"{seen.settings.epochs} of {asked} epochs")
    if found is not None:
        full = follows(cell, seen.settings.data if kind == "rehearsal" else None).settings
        if found.settings != full:  # in its epochs alone, or it would not stand here
            probed, most = (getattr(one, "epochs", 0) for one in (found.settings, full))
            said.append(f"probe of {probed} of {most} epochs")
        if found.numerics not in (NUMERICS, seen.numerics):
            said.append(f"evaluated with numerics {found.numerics}, not {NUMERICS}")
    if odd := numerics_of(seen):
        said.append(odd)
    return ", ".join(said)


def _lacks(cell: Cell, seen: Run) -> str:
    """Why a run has no number for its own cell."""
    if not seen.complete:
        return ending(seen)
    wanted = follows(cell)
    if any((known.kind, known.data) == (wanted.kind, wanted.data) for known in seen.evaluations):
        return f"complete, {wanted.name} has other settings"
    return _no_number(cell)


def _no_number(cell: Cell) -> str:
    return f"complete, no {follows(cell).name}"
