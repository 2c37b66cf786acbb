"""The tables as LaTeX that fits a page: each column gets the width of its longest word, and a share of the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from marginlens.report.grids import NOT_RUN, SPREAD, Grid, Item
from marginlens.report.lines import Gathered
from marginlens.report.tables import grids

PACKAGES = ("array", "booktabs", "longtable", "lscape")


class Page(NamedTuple):
    """A size of letters, an orientation, and the characters of mixed text that then fit a line."""

    size: str
    sideways: bool
    characters: int


PAGES = (
    Page("footnotesize", False, 73),
    Page("scriptsize", False, 84),
    Page("footnotesize", True, 116),
    Page("scriptsize", True, 134),
    Page("tiny", True, 156),
)
"""In order of preference, for the text width of LaTeX's own classes: 345 pt, and 550 pt in landscape."""

GAP = 1.5
"""The space between two columns, in characters."""

MOST, LONG = 0.8, 30
"""A column has room for the share MOST of its longest cell, counted up to LONG characters."""


def latex(gathered: Gathered) -> str:
    """Return all tables, for \\input or to copy from."""
    parts = [f"% made by marginlens report from run records; needs \\usepackage{{{','.join(PACKAGES)}}}\n"]
    parts.append(f"% {SPREAD.replace('±', '+-')}\n")
    return "".join(parts + [_table(grid) for grid in grids(gathered)])


def _table(grid: Grid) -> str:
    names, rows = _without_runs(grid)
    page, columns = _layout([names, *rows])
    head = " & ".join(map(_escape, names))
    before, after = ("\\begin{landscape}", "\\end{landscape}") if page.sideways else ("", "")
    lines = [
        f"\n{{{before}\\{page.size}\\setlength{{\\tabcolsep}}{{3pt}}",
        f"\\begin{{longtable}}{{{columns}}}",
        f"\\caption{{{_escape(_flat(grid.title))}}}\\label{{tab:ours-{grid.key}}}\\\\",
        f"\\toprule\n{head} \\\\\n\\midrule\n\\endhead",
        *(f"{' & '.join(map(_escape, row))} \\\\" for row in rows),
        f"\\bottomrule\n\\end{{longtable}}{after}}}\n",
    ]
    return "\n".join(lines)


def _layout(rows: Sequence[Sequence[str]]) -> tuple[Page, str]:
    """Return the first page with enough room for all columns, and the columns.

    A column needs room for its longest word and most of its longest cell; a long cell breaks into lines. The rest of
    the line goes first to the columns that need the least.
    """
    cells = list(zip(*rows, strict=True))
    lengths = [max(map(len, column)) + GAP for column in cells]
    words = [max(len(word) for cell in column for word in cell.split(" ")) + GAP for column in cells]
    wide = [max(word, MOST * min(length, LONG)) for word, length in zip(words, lengths, strict=True)]
    page = next((page for page in PAGES if sum(wide) <= page.characters), PAGES[-1])
    if sum(lengths) <= page.characters:
        return page, "l" * len(cells)
    rest = page.characters - sum(wide)
    for i in sorted(range(len(cells)), key=lambda i: lengths[i] - wide[i]):
        more = max(0.0, min(lengths[i] - wide[i], rest))
        wide[i], rest = wide[i] + more, rest - more
    shares = (int(1000 * one / sum(wide)) / 1000 for one in wide)  # rounded down: together no more than the line
    made = (f"p{{\\dimexpr {share:.3f}\\linewidth-2\\tabcolsep\\relax}}" for share in shares)
    return page, "".join(f">{{\\raggedright\\arraybackslash}}{one}" for one in made)


def _without_runs(grid: Grid) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows without empty columns, and without the runs, to which no link leads here."""
    rows = [[_cell(item) for item in row] for row in grid.rows]
    kept = [i for i, name in enumerate(grid.head) if name != "runs" and any(row[i] for row in rows)]
    if {"ours", "runs"} <= set(grid.head):
        ours, runs = grid.head.index("ours"), grid.head.index("runs")
        for row in rows:
            row[ours] = row[ours] or (NOT_RUN if row[runs].startswith(NOT_RUN) else "not measured")
    return [grid.head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _cell(item: Item) -> str:
    """Return a cell's text: a number stays on a line with its spread, and a minus is a minus sign."""
    return re.sub(r"(?<![^(])-(?=\d)", "\u2212", _flat(item.text).replace(" ± ", "\u00a0±\u00a0"))


def _flat(text: str) -> str:
    return " ".join(text.split())


_LETTERS = {c: f"\\{c}" for c in "{}$&#%_"} | {
    "[": "{[}",  # after the end of a row these two would be a part of it
    "*": "{*}",
    "\\": "\\textbackslash{}",
    "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "±": "$\\pm$",
    "\u2212": "$-$",
    "\u00a0": "~",
}
_ACCENTED = {chr(i) for i in range(192, 256)} - set("ÐÞðþ")


def _escape(text: str) -> str:
    """Escape a text for LaTeX; a letter without a glyph becomes a question mark."""
    flat = text.replace("->", "\0")
    made = "".join(_LETTERS.get(c, c if c == "\0" or 32 <= ord(c) < 127 or c in _ACCENTED else "?") for c in flat)
    return re.sub("-(?=-)", "-{}", made.replace("\0", "$\\to$"))
