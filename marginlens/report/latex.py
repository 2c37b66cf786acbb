"""The tables as LaTeX, none broader than a page: columns get what their longest words need, and share the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from marginlens.report.gather import Gathered
from marginlens.report.grids import GAIN, NOT_RUN, SPREAD, Grid, Item
from marginlens.report.tables import grids

PACKAGES = ("array", "booktabs", "longtable", "lscape")


class Page(NamedTuple):
    """How a table may be set, and how many characters of mixed text a line then has."""

    size: str
    sideways: bool
    characters: int


PAGES = (
    Page("footnotesize", False, 73),
    Page("scriptsize", False, 84),
    Page("footnotesize", True, 116),
    Page("scriptsize", True, 134),
)
"""In the order of preference, for the text width of LaTeX's own classes: 345 pt, and 550 pt on a page on its side."""

GAP = 1.5
"""What the space between two columns takes, in characters."""

MOST, LONG = 0.8, 30
"""A column has room for this share of its longest cell, as far as that is no longer than so many characters."""


def latex(gathered: Gathered) -> str:
    """The tables, to \\input or to copy one out."""
    parts = [f"% made by marginlens report from run records; needs \\usepackage{{{','.join(PACKAGES)}}}\n"]
    parts.append(f"% {SPREAD.replace('±', '+-')}\n")
    return "".join(parts + [_table(grid) for grid in grids(gathered)])


def _table(grid: Grid) -> str:
    names, rows = _without_runs(grid)
    page, columns = _layout([names, *rows])
    caption = f"{grid.title}. {grid.about}" if grid.key == "others" else grid.title  # it says what they share
    head = " & ".join(map(_escape, names))
    before, after = ("\\begin{landscape}", "\\end{landscape}") if page.sideways else ("", "")
    lines = [
        f"\n{{{before}\\{page.size}\\setlength{{\\tabcolsep}}{{3pt}}",
        f"\\begin{{longtable}}{{{columns}}}",
        f"\\caption{{{_escape(_flat(caption))}}}\\label{{tab:ours-{grid.key}}}\\\\",
        f"\\toprule\n{head} \\\\\n\\midrule\n\\endhead",
        *(f"{' & '.join(map(_escape, row))} \\\\" for row in rows),
        f"\\bottomrule\n\\end{{longtable}}{after}}}\n",
    ]
    return "\n".join(lines)


def _layout(rows: Sequence[Sequence[str]]) -> tuple[Page, str]:
    """The first page that all columns have enough room on, and the columns.

    Enough is room for its longest word and for most of its longest cell, but for a long one, which breaks into lines.
    What is left goes first to the columns that need the least.
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
    """A table beside the paper without the run of each seed, to which no link leads here; that there is none stays.

    Nor has it a column for gains where there are none.
    """
    rows = [[_cell(item) for item in row] for row in grid.rows]
    kept = [i for i, name in enumerate(grid.head) if name != GAIN or any(row[i] for row in rows)]
    if {"ours", "runs"} <= set(grid.head):
        ours, runs = grid.head.index("ours"), grid.head.index("runs")
        kept.remove(runs)
        for row in rows:
            row[ours] = row[ours] or (NOT_RUN if row[runs].startswith(NOT_RUN) else "not measured")
    return [grid.head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _cell(item: Item) -> str:
    """A cell's text; a number stays on a line with its spread, and a negative one has a minus."""
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
    """What LaTeX sets as it is written; a letter that plain LaTeX has no glyph for becomes a question mark."""
    flat = text.replace("->", "\0")
    made = "".join(_LETTERS.get(c, c if c == "\0" or 32 <= ord(c) < 127 or c in _ACCENTED else "?") for c in flat)
    return re.sub("-(?=-)", "-{}", made.replace("\0", "$\\to$"))
