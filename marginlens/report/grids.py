"""The tables of a report as rows of text, numbers and links, before they become HTML, Markdown or LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginlens.paper import Table
from marginlens.report.lines import Gathered, Line, ending, short
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.runs.seeds import Top, noted, number, over_seeds, rounded

SPREAD = (
    "Accuracies are top-1 in percent, after the last epoch. The paper does not say what its ± means, nor how many "
    "seeds it had; ours is the sample standard deviation over seeds, and none is given for one seed. A gain is over "
    "plain: of our means, and in brackets of the published ones."
)
NOT_RUN = "not run"
GAIN = "gain (published)"
"""The heading of gains over plain: ours, and the paper's."""
WIDE = ("runs", "pre-training", "evaluation", "label", "why", "in place of", "folder", "other settings")
"""Columns of words, which get more room."""
CELL = ("row", "column", "published", "ours", "difference", GAIN, "seeds")


@dataclass(frozen=True)
class Piece:
    """Text, the run that it links to, and a note."""

    text: str
    run: Run | None = None
    note: str = ""


@dataclass(frozen=True)
class Item:
    """The content of a table's cell."""

    pieces: tuple[Piece, ...] = ()
    sort: float | None = None
    """The number to sort by; None: sort by the text."""
    note: str = ""
    """The address of a published number in the paper."""

    @property
    def text(self) -> str:
        return ", ".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Grid:
    """A table: its title, a sentence about it, its columns and rows."""

    key: str
    title: str
    about: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Item, ...]]


def say(text: str, run: Run | None = None, sort: float | None = None) -> Item:
    """Return an item of one piece."""
    return Item((Piece(text, run),) if text else (), sort)


def mean_item(tops: Sequence[Top], seeds: int, run: Run | None = None) -> Item:
    """Return the mean and spread of the seeds that have a number; an empty item if none has."""
    return say(over_seeds(tops, seeds), run, statistics.fmean(top.top1 for top in tops)) if tops else Item()


def signed(value: float | None) -> str:
    """Format with a sign; "" for None."""
    return "" if value is None else f"{rounded(value):+}"


def paper_grid(table: Table, lines: Sequence[Line]) -> Grid:
    """A table or figure as the paper lays it out: data sets or an axis across, each number with the published one.

    Rows and columns without a number are left out, unless lines without a run are given: then all are shown.
    """
    about = " ".join(part for part in (table.caption, table.note) if part)
    title = f"{table.name}: {table.title}"
    if table.kind == "hyper-parameters":
        cells = {(v.row, v.column): (_value(v.value),) for v in table.values}
        return _laid(table.key, title, about, cells, ("",))
    every = any(not line.runs for line in lines)
    printed = any(line.cell.published for line in lines)
    found = {_place(table, line): line for line in lines}
    rows = {row for (row, _), line in found.items() if every or line.values}
    columns = {column for (_, column), line in found.items() if every or line.values}
    kept = {at: _numbers(line, printed) for at, line in found.items() if at[0] in rows and at[1] in columns}
    return _laid(table.key, title, about, kept, ("published", "ours") if printed else ("",))


def _laid(
    key: str, title: str, about: str, cells: Mapping[tuple[str, str], tuple[Item, ...]], parts: Sequence[str]
) -> Grid:
    """Return the grid of these cells, each of as many items as `parts` has names."""
    rows, columns = (list(dict.fromkeys(at[i] for at in cells)) for i in (0, 1))
    head = [f"{column} {part}".strip() for column in columns for part in parts]
    empty = (Item(),) * len(parts)
    body = [(say(row), *(item for column in columns for item in cells.get((row, column), empty))) for row in rows]
    return Grid(key, title, about, ("row", *head), body)


def _place(table: Table, line: Line) -> tuple[str, str]:
    """Return the row and column of a cell; the type of attenuation belongs to the row."""
    row, column = line.cell.row, line.cell.column
    if table.kind == "figure":
        return row, f"{column} (our grid)" if line.cell.ours else column
    data, comma, kind = column.partition(", ")
    return f"{row}{comma}{kind}", data


def _numbers(line: Line, printed: bool) -> tuple[Item, ...]:
    """Return our number, beside the published one in a table that prints some."""
    ours = mean(line) if line.values else say(", ".join(sorted({short(p.run) for p in line.partial})) or NOT_RUN)
    return (published(line), ours) if printed else (ours,)


def looks_grid(gathered: Gathered) -> Grid:
    """Shorter looks and rehearsals, none beside a published number."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in (line for lines in gathered.looks.values() for line in lines):
        same = (line.label, *((v.run.key, v.top1) for v in line.values), *((p.run.key, p.said) for p in line.partial))
        groups.setdefault(same, []).append(line)
    rows = [
        (say(lines[0].label), say(_places(gathered, lines)), mean(lines[0]), _count(lines[0]), runs_of(lines[0]))
        for lines in groups.values()
    ]
    about = "Fewer epochs than the paper's, or other data: not to be laid beside a published number."
    return Grid("looks", "Shorter looks and rehearsals", about, ("label", "in place of", "ours", "seeds", "runs"), rows)


def bad_grid(bad: Iterable[tuple[str, str]], *, by_name: bool = False) -> Grid:
    """Unreadable folders, by path or by name: a name does not tell where the store is."""
    known = [(Path(p).name, why.replace(p, Path(p).name)) for p, why in bad] if by_name else bad
    rows = [(say(path), say(why)) for path, why in known]
    return Grid("unreadable", "Folders that could not be read", "", ("folder", "why"), rows)


def cell_row(line: Line) -> tuple[Item, ...]:
    """The columns `CELL` of a line."""
    column = line.cell.column + (" (our grid)" if line.cell.ours else "")
    gap = say(signed(line.difference), sort=line.difference)
    return say(line.cell.row), say(column), published(line), mean(line), gap, _gain(line), _count(line)


def published(line: Line) -> Item:
    """The published number of a cell, with its address."""
    known = line.cell.published
    return Item() if known is None else Item((Piece(str(known)),), known.mean, line.cell.address)


def mean(line: Line) -> Item:
    """Our mean of a cell, which links to its first run."""
    tops = [Top(value.top1, value.diverged) for value in line.values]
    return mean_item(tops, len(tops), line.values[0].run) if tops else Item()


def runs_of(line: Line) -> Item:
    """Each run's own number, or its state."""
    if not line.runs:
        return say(f"{NOT_RUN}: {line.cell.why_not}" if line.cell.why_not else NOT_RUN)
    pieces = [(v.run, noted(number(v.top1), 1, 1, v.diverged), "") for v in line.values]
    pieces += [(p.run, short(p.run), p.said) if p.said == ending(p.run) else (p.run, p.said, "") for p in line.partial]
    pieces.sort(key=lambda piece: piece[0].settings.seed)
    return Item(tuple(Piece(f"seed {run.settings.seed}: {text}", run, note) for run, text, note in pieces))


def _value(value: float | None) -> Item:
    return say("-") if value is None else say(f"{value:g}", sort=value)


def _gain(line: Line) -> Item:
    """+5.09 (+4.46)."""
    if line.plain is None:
        return Item()
    printed = signed(line.published_gain)
    text = signed(line.gain) + (f" ({printed})" if printed else "")
    return say(f"{text} (diverged)" if line.gain_diverged else text, sort=line.gain)


def _count(line: Line) -> Item:
    count = len(line.values)
    return say(str(count) if count else "", sort=count or None)


def _places(gathered: Gathered, lines: Sequence[Line]) -> str:
    """The cells that these lines look at, as paths by table, data sets of one path joined."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for line in lines:
        method, data, rest = line.cell.path.split("/", 2)
        paths = found.setdefault(gathered.tables[line.cell.table].name, {})
        paths.setdefault((method, rest), []).append(data)
    texts = {name: [f"{m}/{'+'.join(datas)}/{r}" for (m, r), datas in paths.items()] for name, paths in found.items()}
    return "; ".join(f"{name}: {', '.join(cells)}" for name, cells in texts.items())


def measure(known: Evaluation, but: Sequence[str] = (), *, data: bool = True) -> str:
    """Name an evaluation: its kind, its data, and the settings that are not the recipe's, `but` these."""
    odd = {name: value for name, value in known.odd.items() if name not in but}
    more = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in odd.items())
    name = f"{known.kind} {known.data}" if data else known.kind
    return name + (f" ({more})" if more else "")


def _plain(value: Any) -> str:
    return " to ".join(str(x) for x in value) if isinstance(value, list) else str(value)
