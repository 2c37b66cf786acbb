"""All tables of a report, and how they are written as Markdown.

The same records give the same bytes: nothing here knows the time or the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from marginlens.report.gather import Gathered, cells_of
from marginlens.report.grids import GAIN, SPREAD, Grid, Item, Piece, bad_grid, looks_grid, paper_grid, say
from marginlens.report.others import others_grid
from marginlens.report.rates import highest, rates_grid

BEGIN, END = "<!-- marginlens report -->", "<!-- end of marginlens report -->"
"""Between these a Markdown file has the table of what was run."""


def grids(gathered: Gathered) -> list[Grid]:
    """All tables, in the order of the page; of a figure, the points that have runs."""
    found = []
    for key, table in gathered.tables.items():
        grid = paper_grid(table, gathered.lines[key])
        if table.kind != "figure":
            found.append(grid)
        elif rows := [row for row, line in zip(grid.rows, gathered.lines[key], strict=True) if line.runs]:
            lines = gathered.lines[key]
            ran, every = cells_of(line for line in lines if line.runs), cells_of(lines)
            about = f"{grid.about} {ran} of {every} points have runs."
            found.append(Grid(grid.key, grid.title, about, grid.head, rows))
    more = (
        looks_grid(gathered),
        rates_grid(gathered),
        others_grid(gathered),
        bad_grid(gathered.bad, by_name=True),
    )
    return found + [grid for grid in more if grid.rows]


def markdown(gathered: Gathered, at: Path) -> str:
    """The tables as Markdown for the file `at`, runs linked relative to it."""
    link = _linked(at)
    parts = ["# Results\n\n", f"Made by `marginlens report` from run records. {_escape_markdown(SPREAD)}\n"]
    for grid in grids(gathered):
        parts.append(f"\n## {_escape_markdown(grid.title)}\n\n")
        parts.append(f"{_escape_markdown(grid.about)}\n\n" if grid.about else "")
        parts.append(_markdown_rows(grid.head, grid.rows, link))
    return "".join(parts)


def brief(gathered: Gathered, at: Path) -> str:
    """One Markdown table of the cells that have a number, by the first reading of each, without figures.

    Of cells that are one run it has the last.
    """
    rows: dict[tuple[object, ...], tuple[Item, ...]] = {}
    for table in (table for table in gathered.tables.values() if table.kind == "table"):
        ran = [line for line in gathered.lines[table.key] if line.values and not line.cell.reading]
        for line, row in zip(ran, paper_grid(table, ran).rows, strict=True):
            one = (line.cell.to, *(v.run.key for v in line.values))
            rows.pop(one, None)
            rows[one] = (say(table.name), *row[:-1], highest(line))
    head = ("", "row", "column", "published", "ours", "difference", GAIN, "seeds", "ours at its best rate")
    return _markdown_rows(head, list(rows.values()), _linked(at))


def insert(text: str, table: str) -> str:
    """A Markdown text with the table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for the table: write {BEGIN} and {END} where it belongs")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def _linked(at: Path) -> Callable[[Piece], str]:
    """Writes a piece of text, linked to its run's folder relative to the file `at`."""

    def link(piece: Piece) -> str:
        text = _escape_markdown(piece.text)
        if piece.run is None:
            return text
        return f"[{text}]({quote(os.fsencode(os.path.relpath(piece.run.entry.path, at.parent)))})"

    return link


def _markdown_rows(head: Sequence[str], rows: Sequence[tuple[Item, ...]], link: Callable[[Piece], str]) -> str:
    lines = [f"| {' | '.join(_escape_markdown(name) for name in head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_joined(item, link) for item in row)} |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _joined(item: Item, write: Callable[[Piece], str]) -> str:
    return ", ".join(write(piece) for piece in item.pieces)


def _escape_markdown(text: str) -> str:
    flat = " ".join(text.split()).replace("->", "→")
    kept = re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", flat)
    return kept.replace("&", "&amp;")
