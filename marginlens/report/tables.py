"""The table of runs that are no cell's own: a row for the seeds of a setting, by the settings in which they differ."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from urllib.parse import quote

from marginlens import evals
from marginlens.report.gather import Gathered, cells_of, ending, short
from marginlens.report.grids import (
    GAIN,
    SPREAD,
    Grid,
    Item,
    Piece,
    bad_grid,
    looks_grid,
    mean_of,
    measure,
    paper_grid,
    say,
)
from marginlens.report.rates import beside, highest, rates_grid
from marginlens.runs.config import Pretrain
from marginlens.runs.query import plain, spelled
from marginlens.runs.run import Run

_FIRST = ("loss", "kNN")
_CONTENT = "content of the data"
Results = dict[str, tuple[float, bool]]
"""What a run gave by the name of a column, and whether that is of a probe that diverged."""


def others_grid(gathered: Gathered) -> Grid:
    """Runs that are no cell's own; a setting that all of them share is said above the table."""
    runs, said = gathered.others, gathered.labels
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for seen in runs:
        groups.setdefault(seen.family, []).append(seen)
    firsts = [group[0] for group in groups.values()]
    fields, same = _differing(firsts)
    targets = {(one.data, one.data_fingerprint) for seen in runs for one in seen.evaluations}
    several = {data for data, count in Counter(data for data, _ in targets).items() if count > 1}
    results = {seen.key: _results(seen, several) for seen in runs}
    columns = sorted({name for found in results.values() for name in found}, key=lambda n: (n not in _FIRST, n))
    rows = []
    for group in groups.values():
        group.sort(key=lambda seen: seen.order)
        row = [_runs(group, results)] + [_setting(group[0], name) for name in fields]
        row += [say(said.get(group[0].key, ""))] + [_mean_of(group, results, name) for name in columns]
        rows.append((*row, _seeds(group)))
    about = (
        "Sweeps, shorter looks, rehearsals: the settings in which they differ, and what they gave, as the mean over "
        "seeds ± the sample standard deviation."
    )
    about += f" All have {', '.join(f'{_name(n)} {_setting(firsts[0], n).text}' for n in same)}." if same else ""
    head = ("runs", *(_name(name) for name in fields), "label", *columns, "seeds")
    return Grid("others", "All other runs by their settings", about, head, rows)


def _differing(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """What tells runs apart, and what is the same in all: of what is always said, and what some have by no recipe."""
    given = {name for seen in runs for name in spelled(seen.settings)} - {"seed"}
    found = [name for name in Pretrain.model_fields if name in given]
    contents = {(seen.settings.data, seen.data) for seen in runs}
    found += [_CONTENT] if len(contents) > len({data for data, _ in contents}) else []
    same = [name for name in found if len(runs) > 1 and len({_setting(seen, name).text for seen in runs}) == 1]
    return [name for name in found if name not in same], same


def _name(field: str) -> str:
    return field.replace("_", " ")


def _setting(seen: Run, name: str) -> Item:
    if name == _CONTENT:
        return say(seen.data[:10])
    value = seen.settings.model_dump(mode="json")[name]
    return say(plain(value, " "), sort=float(value) if type(value) in (int, float) else None)


def _results(seen: Run, several: Collection[str]) -> Results:
    """What a run gave; `several`: data that differ in content, which is then named too."""
    ended = {"loss": "loss"} | evals.titles()
    result = seen.outcome.plain() if seen.outcome else {}
    found = {name: (float(result[key]), False) for key, name in ended.items() if key in result}
    elsewhere = beside(seen)
    for known in sorted((one for one in seen.evaluations if one not in elsewhere), key=lambda one: one.time):
        foreign = evals.get(known.kind).elsewhere and known.data in several
        name = measure(known) + (f" of content {known['data_fingerprint'][:10]}" if foreign else "")
        found[name] = known.top1, known.diverged
    return found


def _mean_of(group: Sequence[Run], results: dict[str, Results], name: str) -> Item:
    """Over the seeds that have it, with how many these are where some have not."""
    found = [(seen, *results[seen.key][name]) for seen in group if name in results[seen.key]]
    first = found[0][0] if found else group[0]
    return mean_of([top for _, top, _ in found], len(group), sum(bad for _, _, bad in found), first)


def _seeds(group: Sequence[Run]) -> Item:
    """How many came to an end, of how many there are."""
    ended = sum(seen.complete for seen in group)
    return say(str(ended) if ended == len(group) else f"{ended} of {len(group)}", sort=ended)


def _runs(group: Sequence[Run], results: dict[str, Results]) -> Item:
    """Each seed, and what became of it or what it lacks."""
    names = dict.fromkeys(name for seen in group for name in results[seen.key])
    pieces = []
    for seen in group:
        said = short(seen)
        if seen.complete:
            lacks = [name for name in names if name not in results[seen.key]]
            if not any(one.kind == evals.HEADLINE for one in seen.evaluations):
                lacks = [evals.HEADLINE, *(name for name in lacks if not name.startswith(evals.HEADLINE))]
            missing = f"complete, no {', no '.join(lacks)}" if lacks else ""
            said = missing if seen.state == "complete" else said
        note = ending(seen) if said == short(seen) != ending(seen) else ""
        pieces.append(Piece(f"seed {seen.settings.seed}" + (f": {said}" if said else ""), seen, note))
    return Item(tuple(pieces))


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
