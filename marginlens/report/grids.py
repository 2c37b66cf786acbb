"""The tables of a report as rows of text, numbers and links, before they become HTML, Markdown or LaTeX."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginlens.paper import Table
from marginlens.report.again import spelled, unusual
from marginlens.report.gather import Gathered, Line
from marginlens.report.seen import Seen
from marginlens.sweep.cells import when
from marginlens.train.config import Pretrain

SPREAD = (
    "Accuracies are top-1 in percent, after the last epoch. The paper does not say what its ± means, nor how many "
    "seeds it had; ours is the sample standard deviation over seeds, and none is given for one seed."
)
NOT_RUN = "not run"


@dataclass(frozen=True)
class Piece:
    """Text, and the run it links to."""

    text: str
    run: Seen | None = None


@dataclass(frozen=True)
class Item:
    """What stands in a table's cell."""

    pieces: tuple[Piece, ...] = ()
    sort: float | None = None
    """The number to sort by; without one the text is."""
    note: str = ""
    """Where a published number stands in the paper."""

    @property
    def text(self) -> str:
        return ", ".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Grid:
    """A table: what each column is called, and its rows."""

    key: str
    title: str
    about: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Item, ...]]


def say(text: str, run: Seen | None = None, sort: float | None = None) -> Item:
    """A cell of one piece."""
    return Item((Piece(text, run),) if text else (), sort)


def number(mean: float | None, std: float | None = None) -> str:
    """89.90 ± 0.12."""
    if mean is None:
        return ""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def paper_grid(table: Table, lines: Sequence[Line]) -> Grid:
    """A table of the paper, ours beside it: a row for each of its cells."""
    about = " ".join(part for part in (table.caption, table.note) if part)
    title = f"{table.name}: {table.title}"
    if table.kind == "hyper-parameters":
        rows = [(say(v.row), say(v.column), _value(v.value)) for v in table.values]
        return Grid(table.key, title, about, ("row", "column", "published"), rows)
    head = ("row", "column", "published", "ours", "difference", "seeds", "runs")
    return Grid(table.key, title, about, head, [_paper_row(line) for line in lines])


def looks_grid(gathered: Gathered) -> Grid:
    """Shorter looks and rehearsals, none beside a published number."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in (line for lines in gathered.looks.values() for line in lines):
        same = (line.label, *((v.run.key, v.top1) for v in line.values), *((p.run.key, p.said) for p in line.partial))
        groups.setdefault(same, []).append(line)
    rows = [
        (say(lines[0].label), say(_places(gathered, lines)), _mean(lines[0]), _count(lines[0]), _runs(lines[0]))
        for lines in groups.values()
    ]
    about = (
        "Not the paper's settings: fewer epochs, or other data. Good for seeing that a pipeline runs and which way a "
        "setting pulls; not to be laid beside a published number."
    )
    return Grid("looks", "Shorter looks and rehearsals", about, ("label", "in place of", "ours", "seeds", "runs"), rows)


def others_grid(gathered: Gathered) -> Grid:
    """Runs that are no cell's own, by the settings in which they differ; a row for those of several seeds."""
    runs, said = gathered.others, gathered.labels
    groups: dict[tuple[str, str, int], list[Seen]] = {}
    for seen in runs:
        shared = seen.settings.model_copy(update={"seed": 0}).model_dump_json()
        groups.setdefault((shared, seen.run.data, seen.run.numerics), []).append(seen)
    firsts = [group[0] for group in groups.values()]
    fields = _differing(firsts)
    targets = {(one["data"], one["data_fingerprint"]) for seen in runs for one in seen.evaluations}
    several = {data for data, count in Counter(data for data, _ in targets).items() if count > 1}
    results = {seen.key: _results(seen, several) for seen in runs}
    columns = sorted({name for found in results.values() for name in found}, key=lambda n: (n not in _FIRST, n))
    rows = []
    for group in groups.values():
        group.sort(key=lambda seen: (seen.settings.seed, seen.entry.name))
        row = [_setting(group[0], name) for name in fields] + [say(said.get(group[0].key, ""))]
        row += [_mean_of([(results[s.key][name], s) for s in group if name in results[s.key]]) for name in columns]
        pieces = tuple(Piece(f"seed {seen.settings.seed}{_unless_complete(seen)}", seen) for seen in group)
        rows.append((*row, say(str(len(group)), sort=len(group)), Item(pieces)))
    about = (
        "Sweeps, shorter looks, rehearsals: the settings in which they differ, and what they gave, as the mean over "
        "seeds ± the sample standard deviation."
    )
    head = (*(name.replace("_", " ") for name in fields), "label", *columns, "seeds", "runs")
    return Grid("others", "All other runs by their settings", about, head, rows)


def bad_grid(bad: Iterable[tuple[str, str]], *, by_name: bool = False) -> Grid:
    """Folders that could not be read, by their path, or by their name, which says nothing of where the store lies."""
    known = [(Path(p).name, why.replace(p, Path(p).name)) for p, why in bad] if by_name else bad
    rows = [(say(path), say(why)) for path, why in known]
    return Grid("unreadable", "Folders that could not be read", "", ("folder", "why"), rows)


def grids(gathered: Gathered) -> list[Grid]:
    """All tables, in the order of the page; of a figure, the points that have runs."""
    found = []
    for key, table in gathered.tables.items():
        grid = paper_grid(table, gathered.lines[key])
        if table.kind != "figure":
            found.append(grid)
        elif rows := [row for row, line in zip(grid.rows, gathered.lines[key], strict=True) if _any(line)]:
            about = f"{grid.about} {len(rows)} of {len(grid.rows)} points have runs."
            found.append(Grid(grid.key, grid.title, about, grid.head, rows))
    more = (looks_grid(gathered), others_grid(gathered), bad_grid(gathered.bad, by_name=True))
    return found + [grid for grid in more if grid.rows]


_FIRST = ("loss", "kNN")
_CONTENT = "content of the data"


def _value(value: float | None) -> Item:
    return say("-") if value is None else say(f"{value:g}", sort=value)


def _paper_row(line: Line) -> tuple[Item, ...]:
    published, difference = line.cell.published, line.difference
    printed = Item()
    if published is not None:
        printed = Item((Piece(str(published)),), published.mean, line.cell.address)
    gap = say("" if difference is None else f"{difference:+.2f}", sort=difference)
    column = line.cell.column + (" (our grid)" if line.cell.ours else "")
    return say(line.cell.row), say(column), printed, _mean(line), gap, _count(line), _runs(line)


def _mean(line: Line) -> Item:
    return say(number(line.mean, line.std), line.values[0].run if line.values else None, line.mean)


def _count(line: Line) -> Item:
    count = len(line.values)
    return say(str(count) if count else "", sort=count or None)


def _any(line: Line) -> bool:
    return bool(line.values or line.partial)


def _runs(line: Line) -> Item:
    """Each run's own number, or what became of it."""
    if not _any(line):
        return say(f"{NOT_RUN}: {line.cell.why_not}" if line.cell.why_not else NOT_RUN)
    pieces = [(v.run.settings.seed, f"{v.top1:.2f}", v.run) for v in line.values]
    pieces += [(p.run.settings.seed, p.said, p.run) for p in line.partial]
    pieces.sort(key=lambda piece: piece[0])
    return Item(tuple(Piece(f"seed {seed}: {text}", run) for seed, text, run in pieces))


def _places(gathered: Gathered, lines: Sequence[Line]) -> str:
    """The cells that these lines look at, as the paths of each table, joined where only the data differ."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for line in lines:
        method, data, rest = line.cell.path.split("/", 2)
        paths = found.setdefault(gathered.tables[line.cell.table].name, {})
        paths.setdefault((method, rest), []).append(data)
    said = {name: [f"{m}/{'+'.join(datas)}/{r}" for (m, r), datas in paths.items()] for name, paths in found.items()}
    return "; ".join(f"{name}: {', '.join(cells)}" for name, cells in said.items())


def _differing(runs: Sequence[Seen]) -> list[str]:
    """What tells runs apart at a glance, and every other setting that is not the recipe's own in some of them."""
    given = {name for seen in runs for name in spelled(seen.settings)} - {"seed"}
    found = [name for name in Pretrain.model_fields if name in given]
    contents = {(seen.settings.data, seen.run.data) for seen in runs}
    return found + ([_CONTENT] if len(contents) > len({data for data, _ in contents}) else [])


def _setting(seen: Seen, name: str) -> Item:
    if name == _CONTENT:
        return say(seen.run.data[:10])
    value = seen.settings.model_dump(mode="json")[name]
    if isinstance(value, bool):
        return say("yes" if value else "no")
    if isinstance(value, int | float):
        return say(f"{value:g}", sort=float(value))
    return say(" ".join(f"{x:g}" for x in value) if isinstance(value, list) else str(value))


def _results(seen: Seen, several: Collection[str]) -> dict[str, float]:
    """What a run gave, by the name of a column; `several`: data that differ in content, which is then named too."""
    result = seen.entry.result
    found = {name: result[key] for key, name in (("loss", "loss"), ("knn", "kNN")) if key in result}
    for known in sorted(seen.evaluations, key=when):
        foreign = known["kind"] == "transfer" and known["data"] in several
        found[measure(known) + (f" of content {known['data_fingerprint'][:10]}" if foreign else "")] = known["top1"]
    return found


def measure(known: Mapping[str, Any]) -> str:
    """An evaluation in words: its kind, its data, and settings that are not the usual ones."""
    more = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in unusual(known).items())
    return f"{known['kind']} {known['data']}" + (f" ({more})" if more else "")


def _plain(value: Any) -> str:
    return " to ".join(str(x) for x in value) if isinstance(value, list) else str(value)


def _mean_of(values: Sequence[tuple[float, Seen]]) -> Item:
    if not values:
        return Item()
    numbers = [value for value, _ in values]
    mean, std = statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None
    return say(number(mean, std), values[0][1], mean)


def _unless_complete(seen: Seen) -> str:
    return "" if seen.entry.state == "complete" else f": {seen.said}"
