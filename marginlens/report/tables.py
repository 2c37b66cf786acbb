"""Our runs by setting, our cells of the paper, and all tables as Markdown."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from marginlens import evals
from marginlens.report.grids import (
    CELL,
    SPREAD,
    Grid,
    Item,
    Piece,
    bad_grid,
    cell_row,
    looks_grid,
    mean_item,
    measure,
    paper_grid,
    runs_of,
    say,
)
from marginlens.report.lines import Gathered, Line, ending, numerics_of, short
from marginlens.report.rates import beside, highest, rates_grid
from marginlens.runs.query import apart, spelled
from marginlens.runs.run import Run
from marginlens.runs.seeds import ABOUT, Top, by_setting, facts

BEST = "ours at its best rate"
Tops = dict[str, Top]
"""The numbers of a run by the names of their columns."""


def settings_grid(gathered: Gathered) -> Grid:
    """A row for each setting: the mean and spread over its seeds of everything that was measured."""
    groups, several = by_setting(gathered.runs), _several(gathered.runs)
    tops = {run.key: _tops(run, several) for run in gathered.runs}
    columns = sorted({name for found in tops.values() for name in found}, key=_rank)
    optional: dict[str, Callable[[Run], str]] = {
        "other settings": lambda run: apart(run.settings),
        "data fingerprint": lambda run: run.data[:10] if run.settings.data in several else "",
        "numerics": numerics_of,
    }
    used = {name: of for name, of in optional.items() if any(of(group[0]) for group in groups)}
    rows = []
    for group in groups:
        chosen = group[0].settings
        about = [say(chosen.data), say(chosen.method), say(chosen.effect), say(str(chosen.epochs), sort=chosen.epochs)]
        about += [say(of(group[0])) for of in used.values()]
        means = [mean_item(_of(group, tops, name), len(group)) for name in columns]
        rows.append((*about, _seeds(group), *means, _runs(group, tops)))
    head = ("data", "method", "effect", "epochs", *used, "seeds", *columns, "runs")
    note = f"Each number is the {ABOUT}. Other settings are those that differ from the recipe."
    if count := gathered.diverged:
        note += (
            f" {count} evaluation{'s' * (count > 1)} diverged: the layer ended worse than guessing, so the number says "
            "nothing of the backbone. Lower the probe's learning rate, for example with --beside 0.1 0.3, or give it "
            "more epochs."
        )
    return Grid("settings", "Runs by setting", note, head, rows)


def settings_facts(gathered: Gathered) -> list[dict[str, Any]]:
    """Return the same as plain values."""
    several = _several(gathered.runs)
    tops = {run.key: _tops(run, several) for run in gathered.runs}
    found = []
    for group in by_setting(gathered.runs):
        settings = {name: value for name, value in spelled(group[0].settings).items() if name != "seed"}
        names = sorted({name for run in group for name in tops[run.key]}, key=_rank)
        runs = [{"run": run.name, "seed": run.settings.seed, "state": run.state} for run in group]
        measured = {name: facts(_of(group, tops, name)) for name in names}
        found.append({"settings": settings, "measured": measured, "runs": runs})
    return found


def _several(runs: Iterable[Run]) -> set[str]:
    """Return the names of data sets of which runs saw more than one content."""
    contents = {(run.settings.data, run.data) for run in runs}
    contents |= {(one.data, one.data_fingerprint) for run in runs for one in run.evaluations}
    return {data for data, count in Counter(data for data, _ in contents).items() if count > 1}


def _of(group: Sequence[Run], tops: dict[str, Tops], name: str) -> list[Top]:
    """Return a number of each seed that has it."""
    return [tops[run.key][name] for run in group if name in tops[run.key]]


def _rank(column: str) -> tuple[int, str]:
    """Sort columns: the headline, other evaluations, nearest neighbours, the loss."""
    last = [evals.titles()["knn"], "loss"]
    return (last.index(column) + 2 if column in last else not column.startswith(evals.HEADLINE)), column


def _tops(run: Run, several: Collection[str]) -> Tops:
    """Return the numbers of a run; `several` names data sets with more than one fingerprint, which is then shown."""
    titles = evals.titles()
    result = run.outcome.plain() if run.outcome else {}
    found = {name: Top(float(result[key])) for key, name in ({"loss": "loss"} | titles).items() if key in result}
    elsewhere = beside(run)
    for one in sorted((one for one in run.evaluations if one not in elsewhere), key=lambda one: one.time):
        if evals.get(one.kind).elsewhere:
            name = measure(one) + (f" of {one.data_fingerprint[:10]}" if one.data in several else "")
        else:
            name = measure(one, data=False) if one.odd else titles[one.kind]
        found[name] = Top(one.top1, one.diverged)
    return found


def _seeds(group: Sequence[Run]) -> Item:
    """The number of seeds; "1 of 3" if some did not end."""
    ended = sum(run.complete for run in group)
    return say(str(ended) if ended == len(group) else f"{ended} of {len(group)}", sort=ended)


def _runs(group: Sequence[Run], tops: dict[str, Tops]) -> Item:
    """Each seed, with its state or what was not measured if that differs from the others."""
    names = dict.fromkeys(name for run in group for name in tops[run.key])
    pieces = []
    for run in group:
        text = short(run)
        if run.complete:
            missing = [name for name in names if name not in tops[run.key]]
            if not any(one.kind == evals.HEADLINE for one in run.evaluations):
                missing = [evals.HEADLINE, *(name for name in missing if not name.startswith(evals.HEADLINE))]
            absent = f"complete, no {', no '.join(missing)}" if missing else ""
            text = absent if run.state == "complete" else text
        note = ending(run) if text == short(run) != ending(run) else ""
        pieces.append(Piece(f"seed {run.settings.seed}" + (f": {text}" if text else ""), run, note))
    return Item(tuple(pieces))


def cells_grid(gathered: Gathered) -> Grid:
    """A row for each cell of the paper that has a run, in whatever reading; cells of one run are one row."""
    rows = [
        (say(gathered.tables[line.cell.table].name), *cell_row(line), highest(line), runs_of(line))
        for line in _cells(gathered)
    ]
    about = "Cells of several tables that are the same runs have one row, that of the last table."
    return Grid("cells", "Cells of the paper that were run", about, ("table", *CELL, BEST, "runs"), rows)


def _cells(gathered: Gathered) -> list[Line]:
    """Return the lines with runs; a point of a figure only if no table has it."""
    found: dict[tuple[object, ...], Line] = {}
    for kind in ("table", "figure"):
        for line in (x for key, lines in gathered.lines.items() if gathered.tables[key].kind == kind for x in lines):
            same = (line.cell.to, line.cell.reading, *(run.key for run in line.runs))
            if line.runs and (kind == "table" or same not in found):
                found.pop(same, None)
                found[same] = line
    return list(found.values())


def grids(gathered: Gathered) -> list[Grid]:
    """Return all tables in the order of the page: ours by setting, then the paper's."""
    papers = [paper_grid(gathered.tables[key], lines) for key, lines in gathered.shown.items()]
    more = (cells_grid(gathered), looks_grid(gathered), rates_grid(gathered), bad_grid(gathered.bad, by_name=True))
    return [grid for grid in (settings_grid(gathered), *papers, *more) if grid.rows]


BEGIN, END = "<!-- marginlens report -->", "<!-- end of marginlens report -->"
"""The marks in a Markdown file between which `--insert` puts its table."""


def markdown(gathered: Gathered, at: Path) -> str:
    """Return all tables as Markdown for the file `at`, with links relative to it."""
    link = _linked(at)
    parts = ["# Results\n\n", f"Made by `marginlens report` from run records. {_escape_markdown(SPREAD)}\n"]
    for grid in grids(gathered):
        parts.append(f"\n## {_escape_markdown(grid.title)}\n\n")
        parts.append(f"{_escape_markdown(grid.about)}\n\n" if grid.about else "")
        parts.append(_markdown_rows(grid.head, grid.rows, link))
    return "".join(parts)


def brief(gathered: Gathered, at: Path) -> str:
    """Return one Markdown table of the cells that have a number, by the first reading of each, without figures."""
    lines = [line for line in _cells(gathered) if line.values and not line.cell.reading]
    tables = [line for line in lines if gathered.tables[line.cell.table].kind == "table"]
    rows = [(say(gathered.tables[x.cell.table].name), *cell_row(x), highest(x)) for x in tables]
    return _markdown_rows(("", *CELL, BEST), rows, _linked(at))


def insert(text: str, table: str) -> str:
    """Return a Markdown text with the table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for the table: write {BEGIN} and {END} where it belongs")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def _linked(at: Path) -> Callable[[Piece], str]:
    """Return a function that writes a piece of text with a link to its run's folder, relative to the file `at`."""

    def link(piece: Piece) -> str:
        text = _escape_markdown(piece.text)
        if piece.run is None:
            return text
        return f"[{text}]({quote(os.fsencode(os.path.relpath(piece.run.path, at.parent)))})"

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
