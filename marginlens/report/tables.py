"""The tables as Markdown and as LaTeX.

The same records give the same bytes: nothing here knows the time or the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from marginlens.report.gather import Gathered
from marginlens.report.grids import SPREAD, Item, Piece, grids, paper_grid, say

_WIDE = ("runs", "label", "why", "in place of", "folder")


BEGIN, END = "<!-- marginlens report -->", "<!-- end of marginlens report -->"
"""Between these a Markdown file has the table of what was run."""


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
    """One Markdown table of the cells that have a number, without figures; of cells that are one run, the last."""
    rows: dict[tuple[object, ...], tuple[Item, ...]] = {}
    for table in (table for table in gathered.tables.values() if table.kind == "table"):
        ran = [line for line in gathered.lines[table.key] if line.values]
        for line, row in zip(ran, paper_grid(table, ran).rows, strict=True):
            one = (line.cell.to, *(v.run.key for v in line.values))
            rows.pop(one, None)
            rows[one] = (say(table.name), *row[:-1])
    head = ("", "row", "column", "published", "ours", "difference", "seeds")
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
        return f"[{text}]({quote(os.path.relpath(piece.run.entry.path, at.parent))})"

    return link


def _markdown_rows(head: Sequence[str], rows: Sequence[tuple[Item, ...]], link: Callable[[Piece], str]) -> str:
    lines = [f"| {' | '.join(_escape_markdown(name) for name in head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_joined(item, link) for item in row)} |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def latex(gathered: Gathered) -> str:
    """The tables as LaTeX for booktabs and longtable: \\input it, or copy one out."""
    parts = ["% made by marginlens report from run records; needs \\usepackage{booktabs,longtable}\n"]
    parts.append(f"% {SPREAD.replace('±', '+-')}\n")
    for grid in grids(gathered):
        head = " & ".join(_escape_latex(name) for name in grid.head)
        widths = "".join("p{0.28\\linewidth}" if name in _WIDE else "l" for name in grid.head)
        parts.append(f"\n{{\\small\n\\begin{{longtable}}{{{widths}}}\n\\caption{{{_escape_latex(grid.title)}}}")
        parts.append(f"\\label{{tab:ours-{grid.key}}}\\\\\n\\toprule\n{head} \\\\\n\\midrule\n\\endhead\n")
        parts += [
            f"{' & '.join(_joined(item, lambda piece: _escape_latex(piece.text)) for item in row)} \\\\\n"
            for row in grid.rows
        ]
        parts.append("\\bottomrule\n\\end{longtable}}\n")
    return "".join(parts)


def _joined(item: Item, write: Callable[[Piece], str]) -> str:
    return ", ".join(write(piece) for piece in item.pieces)


def _escape_markdown(text: str) -> str:
    flat = " ".join(text.split()).replace("->", "→")
    kept = re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", flat)
    return kept.replace("&", "&amp;")


_LATEX = {c: f"\\{c}" for c in "{}$&#%_"} | {
    "\\": "\\textbackslash{}",
    "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "±": "$\\pm$",
}


def _escape_latex(text: str) -> str:
    """What LaTeX sets as it is written; a letter that plain LaTeX has no glyph for becomes a question mark."""
    flat = " ".join(text.split()).replace("->", "\0")
    made = "".join(
        _LATEX.get(c, c if c == "\0" or 32 <= ord(c) < 127 or ord(c) in range(192, 256) else "?") for c in flat
    )
    return made.replace("\0", "$\\to$")
