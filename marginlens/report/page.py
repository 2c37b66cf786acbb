"""The report's page: one HTML file with everything in it.

Whatever comes from a record is escaped where it enters the page. Tables, figures and sections are there without a
script; the script sorts, filters, and draws the curves of a chosen run.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence

from marginlens.paper import Table
from marginlens.report.assets import SCRIPT, STYLE
from marginlens.report.figures import figure
from marginlens.report.gather import Gathered, Line, cells_of
from marginlens.report.grids import (
    GAIN,
    NOT_RUN,
    SPREAD,
    WIDE,
    Grid,
    Item,
    Piece,
    bad_grid,
    looks_grid,
    paper_grid,
)
from marginlens.report.others import others_grid
from marginlens.report.rates import rates_figure, rates_grid
from marginlens.report.sections import curves, section, stands
from marginlens.report.seen import Seen

_NUMBERS = ("published", "ours", "difference", GAIN, "seeds", "cells", "run", "partial", "looks")


def page(gathered: Gathered, stores: Iterable[str]) -> str:
    """The whole page."""
    parts = [_table_section(gathered, key) for key in gathered.tables]
    parts.append(_looks(gathered))
    rates = rates_grid(gathered)
    if rates.rows:
        parts.append(_section(rates, rates_figure(gathered) + _table(rates)))
    if gathered.others:
        parts.append(_section(others_grid(gathered)))
    parts += [_curves(gathered.runs), _runs(gathered)]
    if gathered.bad:
        parts.append(_section(bad_grid(gathered.bad)))
    body = "".join(parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>marginlens report</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<header><h1>marginlens report</h1>
<p>{_summary(gathered, stores)}</p>
<p>"Understanding Contrastive Learning Through the Lens of Margins" (arXiv 2306.11526), and our runs beside it.
{_e(SPREAD)} A number is a link to its run; of several seeds, to the first.</p></header>
<main>{_overview(gathered, bool(rates.rows))}{body}</main>
<script>{SCRIPT}</script>
</body></html>
"""


def _e(text: object) -> str:
    return html.escape(str(text))


def _summary(gathered: Gathered, stores: Iterable[str]) -> str:
    states = Counter(seen.entry.state for seen in gathered.runs)
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    bad = f"; {len(gathered.bad)} folder{'s' * (len(gathered.bad) > 1)} could not be read" if gathered.bad else ""
    names = ", ".join(f"<code>{_e(store)}</code>" for store in stores)
    count = len(gathered.runs)
    return f"{count or 'No'} run{'s' * (count != 1)} in {names}{f': {said}' if said else ''}{_e(bad)}."


def _overview(gathered: Gathered, rates: bool) -> str:
    """What has been run of each table, and the way to each part; `rates`: that of the probes' learning rates too."""
    rows = []
    for key, table in gathered.tables.items():
        lines = gathered.lines[key]
        has = (lines, [x for x in lines if x.values], [x for x in lines if x.partial], gathered.looks[key])
        said = "".join(f'<td class="n">{cells_of(some)}</td>' for some in has)
        if not lines:
            said = f'<td colspan="4" class="small">{_e(table.kind if table.values else "no runs")}</td>'
        name = f'<a href="#{_e(key)}">{_e(table.name)}</a>'
        rows.append(f"<tr><td>{name}</td><td>{_e(table.title)}</td>{said}</tr>")
    ways = [("looks", "Shorter looks and rehearsals"), ("curves", "Curves"), ("runs", "Runs")]
    ways += [("rates", "The probe's learning rate")] if rates else []
    ways += [("others", "All other runs")] if gathered.others else []
    ways += [("unreadable", "Folders that could not be read")] if gathered.bad else []
    nav = "".join(f'<a href="#{key}">{name}</a>' for key, name in ways)
    head = _head(("", "", "cells", "run", "partial", "looks"), sortable=False)
    shown = f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
    return f'<nav aria-label="parts">{nav}</nav>{shown}'


def _table_section(gathered: Gathered, key: str) -> str:
    table, lines = gathered.tables[key], gathered.lines[key]
    grid = paper_grid(table, lines)
    if table.kind != "figure":
        return _section(grid)
    if not lines:
        return _section(grid, "")
    drawn = figure(table, lines, published=True) or "<p>No point of this figure has been run.</p>"
    points = f"<details><summary>Its {len(lines)} points</summary><div>{_table(grid)}</div></details>"
    return _section(grid, drawn + points)


def _looks(gathered: Gathered) -> str:
    """Shorter looks and rehearsals: figures by label, then the table."""
    grid = looks_grid(gathered)
    if not grid.rows:
        return f'<section><h2 id="looks">{_e(grid.title)}</h2><p>None.</p></section>'
    drawn = []
    for key, lines in gathered.looks.items():
        if (table := gathered.tables[key]).kind == "figure":
            drawn += [_look(table, label, lines) for label in sorted({line.label for line in lines})]
    return _section(grid, "".join(drawn) + _table(grid))


def _look(table: Table, label: str, lines: Sequence[Line]) -> str:
    """A figure from runs of one label, which stands above it."""
    drawn = figure(table, [line for line in lines if line.label == label])
    return f"<h3>{_e(table.name)}: {_e(table.title)} ({_e(label)})</h3>{drawn}" if drawn else ""


def _curves(runs: Sequence[Seen]) -> str:
    head = '<section id="curves"><h2>Curves</h2>'
    if not runs:
        return f"{head}<p>No run has any.</p></section>"
    choices = "".join(f'<option value="{i}">{_e(seen.entry.name)}</option>' for i, seen in enumerate(runs))
    return (
        f'{head}<p class="about">Loss, nearest neighbours, learning rate and spread by epoch. With every '
        "effect but margin this is the plain loss, and the gradient is not its derivative: a lower curve need not be a "
        "better run.</p>"
        f'<div class="tools"><label>Run <select id="curve-run">{choices}</select></label>'
        f'<label>and beside it <select id="curve-beside"><option value="">none</option>{choices}</select></label></div>'
        '<div class="key" id="curve-key"></div><div class="panels" id="curve-plots"></div>'
        f'<script type="application/json" id="curve-data">{curves(runs)}</script></section>'
    )


def _runs(gathered: Gathered) -> str:
    places, names = stands(gathered), {key: table.name for key, table in gathered.tables.items()}
    made = "".join(
        section(seen, i, places.get(seen.key, []), gathered.copies.get(seen.key, []), names)
        for i, seen in enumerate(gathered.runs)
    )
    tools = _tools("all-runs", "runs", len(gathered.runs), ran=False)
    return f'<section><h2 id="runs">Runs</h2>{tools}<div id="all-runs">{made or "<p>None.</p>"}</div></section>'


def _section(grid: Grid, body: str | None = None) -> str:
    """A part of the page: what the grid is about, and a body, which is its table if nothing else is given."""
    body = _table(grid) if body is None else body
    about = f'<p class="about">{_e(grid.about)}</p>' if grid.about else ""
    return f'<section><h2 id="{_e(grid.key)}">{_e(grid.title)}</h2>{about}{body}</section>'


def _table(grid: Grid) -> str:
    rows = "".join(_row(grid, row) for row in grid.rows)
    of = f"rows-{grid.key}"
    ran = any(_empty(row) for row in grid.rows) and not all(_empty(row) for row in grid.rows)
    tools = _tools(of, grid.title, len(grid.rows), ran)
    measured = [name for i, name in enumerate(grid.head) if any(row[i].sort is not None for row in grid.rows)]
    head = _head(grid.head, [*_NUMBERS, *measured])
    return f'{tools}<div class="scroll"><table>{head}<tbody id="{_e(of)}">{rows}</tbody></table></div>'


def _tools(of: str, what: str, count: int, ran: bool) -> str:
    if count < 2:
        return ""
    box = '<label><input type="checkbox"> only what was run</label>' if ran else ""
    search = f'<input type="search" placeholder="filter" aria-label="filter {_e(what)}">'
    return f'<div class="tools" data-of="{_e(of)}">{search}{box}<output aria-live="polite"></output></div>'


def _head(names: Sequence[str], numbers: Sequence[str] = _NUMBERS, sortable: bool = True) -> str:
    cells = "".join(
        f"<th{' class=n' if name in numbers else ''} scope=col>"
        + (f'<button type="button">{_e(name)}</button>' if sortable else _e(name))
        + "</th>"
        for name in names
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _row(grid: Grid, row: Sequence[Item]) -> str:
    cells = "".join(_cell(name, item) for name, item in zip(grid.head, row, strict=True))
    return f"<tr{' class=none' if _empty(row) else ''}>{cells}</tr>\n"


def _empty(row: Sequence[Item]) -> bool:
    return bool(row) and row[-1].text.startswith(NOT_RUN)


def _cell(name: str, item: Item) -> str:
    kind = "n" if name in _NUMBERS or item.sort is not None else "wide" if name in WIDE else ""
    sort = "" if item.sort is None else f' data-v="{item.sort!r}"'
    title = f' title="{_e(item.note)}"' if item.note else ""
    text = ", ".join(_piece(piece) for piece in item.pieces)
    return f"<td{f' class={kind}' if kind else ''}{sort}{title}>{text}</td>"


def _piece(piece: Piece) -> str:
    title = f' title="{_e(piece.note)}"' if piece.note else ""
    return f'<a href="#{piece.run.key}"{title}>{_e(piece.text)}</a>' if piece.run else _e(piece.text)
