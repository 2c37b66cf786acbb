"""The tables of a report as rows of text, numbers and links, before they become HTML, Markdown or LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from marginlens.paper import Table
from marginlens.report.gather import Gathered, Line, ending, short, std_of
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run

SPREAD = (
    "Accuracies are top-1 in percent, after the last epoch. The paper does not say what its ± means, nor how many "
    "seeds it had; ours is the sample standard deviation over seeds, and none is given for one seed. A gain is over "
    "plain: of our means, and in brackets of the published ones."
)
NOT_RUN = "not run"
GAIN = "gain (published)"
"""Over plain: what the effect gives here, and in the paper."""
WIDE = ("runs", "pre-training", "label", "why", "in place of", "folder")
"""Columns of words, which are given more room."""


@dataclass(frozen=True)
class Piece:
    """Text, and the run it links to."""

    text: str
    run: Run | None = None
    note: str = ""
    """What else is to be said of it."""


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


def say(text: str, run: Run | None = None, sort: float | None = None) -> Item:
    """A cell of one piece."""
    return Item((Piece(text, run),) if text else (), sort)


def number(mean: float | None, std: float | None = None) -> str:
    """89.90 ± 0.12."""
    if mean is None:
        return ""
    return f"{_rounded(mean)}" if std is None else f"{_rounded(mean)} ± {_rounded(std)}"


def _rounded(found: float) -> Decimal:
    """To two places as by hand: half of the last one goes up, where binary fractions would toss a coin."""
    return Decimal(repr(round(found, 9))).quantize(Decimal("0.01"), ROUND_HALF_UP) + 0  # and -0 is 0


def noted(text: str, have: int, seeds: int, diverged: int) -> str:
    """A mean, and what it leaves out or should not have in it: 60.40 (1 of 2 seeds), 31.20 (2 diverged)."""
    said = [f"{have} of {seeds} seeds"] if have < seeds else []
    if diverged:
        said.append("diverged" if have == 1 else f"{diverged} diverged")
    return f"{text} ({', '.join(said)})" if said else text


def mean_of(numbers: Sequence[float], seeds: int, diverged: int, run: Run) -> Item:
    """The mean of what some of the seeds have, with its spread; nothing where none has it."""
    if not numbers:
        return Item()
    mean = statistics.fmean(numbers)
    return say(noted(number(mean, std_of(numbers)), len(numbers), seeds, diverged), run, mean)


def paper_grid(table: Table, lines: Sequence[Line]) -> Grid:
    """A table of the paper, ours beside it: a row for each of its cells."""
    about = " ".join(part for part in (table.caption, table.note) if part)
    title = f"{table.name}: {table.title}"
    if table.kind == "hyper-parameters":
        rows = [(say(v.row), say(v.column), _value(v.value)) for v in table.values]
        return Grid(table.key, title, about, ("row", "column", "published"), rows)
    head = ("row", "column", "published", "ours", "difference", GAIN, "seeds", "runs")
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


def bad_grid(bad: Iterable[tuple[str, str]], *, by_name: bool = False) -> Grid:
    """Folders that could not be read, by their path, or by their name, which says nothing of where the store lies."""
    known = [(Path(p).name, why.replace(p, Path(p).name)) for p, why in bad] if by_name else bad
    rows = [(say(path), say(why)) for path, why in known]
    return Grid("unreadable", "Folders that could not be read", "", ("folder", "why"), rows)


def _value(value: float | None) -> Item:
    return say("-") if value is None else say(f"{value:g}", sort=value)


def _paper_row(line: Line) -> tuple[Item, ...]:
    published, difference = line.cell.published, line.difference
    printed = Item()
    if published is not None:
        printed = Item((Piece(str(published)),), published.mean, line.cell.address)
    column = line.cell.column + (" (our grid)" if line.cell.ours else "")
    gap = say(signed(difference), sort=difference)
    return say(line.cell.row), say(column), printed, _mean(line), gap, _gain(line), _count(line), _runs(line)


def _gain(line: Line) -> Item:
    """+5.09 (+4.46)."""
    if line.plain is None:
        return Item()
    printed = signed(line.published_gain)
    said = signed(line.gain) + (f" ({printed})" if printed else "")
    return say(f"{said} (diverged)" if line.gain_diverged else said, sort=line.gain)


def signed(found: float | None) -> str:
    """+4.46; nothing of nothing."""
    return "" if found is None else f"{_rounded(found):+}"


def _mean(line: Line) -> Item:
    if not line.values:
        return Item()
    diverged = sum(value.diverged for value in line.values)
    return mean_of([value.top1 for value in line.values], len(line.values), diverged, line.values[0].run)


def _count(line: Line) -> Item:
    count = len(line.values)
    return say(str(count) if count else "", sort=count or None)


def _runs(line: Line) -> Item:
    """Each run's own number, or what became of it."""
    if not line.runs:
        return say(f"{NOT_RUN}: {line.cell.why_not}" if line.cell.why_not else NOT_RUN)
    pieces = [(v.run, noted(f"{v.top1:.2f}", 1, 1, v.diverged), "") for v in line.values]
    pieces += [(p.run, short(p.run), p.said) if p.said == ending(p.run) else (p.run, p.said, "") for p in line.partial]
    pieces.sort(key=lambda piece: piece[0].settings.seed)
    return Item(tuple(Piece(f"seed {run.settings.seed}: {text}", run, note) for run, text, note in pieces))


def _places(gathered: Gathered, lines: Sequence[Line]) -> str:
    """The cells that these lines look at, as the paths of each table, joined where only the data differ."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for line in lines:
        method, data, rest = line.cell.path.split("/", 2)
        paths = found.setdefault(gathered.tables[line.cell.table].name, {})
        paths.setdefault((method, rest), []).append(data)
    said = {name: [f"{m}/{'+'.join(datas)}/{r}" for (m, r), datas in paths.items()] for name, paths in found.items()}
    return "; ".join(f"{name}: {', '.join(cells)}" for name, cells in said.items())


def measure(known: Evaluation, but: Sequence[str] = ()) -> str:
    """An evaluation in words: its kind, its data, and settings that are not the usual ones, `but` these."""
    said = {name: value for name, value in known.odd.items() if name not in but}
    more = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in said.items())
    return f"{known['kind']} {known['data']}" + (f" ({more})" if more else "")


def _plain(value: Any) -> str:
    return " to ".join(str(x) for x in value) if isinstance(value, list) else str(value)
