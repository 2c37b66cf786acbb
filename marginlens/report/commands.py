"""`marginlens report`: its docstring is what --help prints."""

from __future__ import annotations

import json as jsons
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from marginlens.files import check_replaceable, deliver, expanded, is_stream, reason, writing
from marginlens.files import text as text_of
from marginlens.options import MaybePath
from marginlens.output import legible, say, say_json
from marginlens.paper import TABLES
from marginlens.parameters import hint
from marginlens.report.gather import gather
from marginlens.report.latex import latex as make_latex
from marginlens.report.lines import Gathered, Line
from marginlens.report.page import page
from marginlens.report.rates import rates_picture
from marginlens.report.tables import brief, settings_facts
from marginlens.report.tables import insert as put_in
from marginlens.report.tables import markdown as make_markdown
from marginlens.runs.store import scan

MARKS = {
    "html": "<!doctype html>\n<html[^\n]*\n<title>marginlens report</title>",
    "md": "# Results\n\nMade by `marginlens report`",
    "tex": "% made by marginlens report",
    "svg": "<svg [^>]*><style>\n:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff",
}
"""The beginning of each kind of file that a report writes. A file that begins otherwise is never replaced."""


def report(
    *,
    runs: tuple[Path, ...] = (Path("runs"),),
    out: Path = Path("report"),
    only: tuple[str, ...] = (),
    paper: bool = False,
    markdown: MaybePath = None,
    latex: MaybePath = None,
    insert: MaybePath = None,
    rates: MaybePath = None,
    json: bool = False,
) -> None:
    """Write a report: means over the seeds of each setting, curves, and the paper's tables with our numbers beside.

    It needs run records only: no data set, no GPU. Folders that cannot be read are listed in the page, and make the
    exit code 2. For example:

        marginlens report

        marginlens report --runs runs ~/other/runs --only tab2 tab3

        marginlens report --markdown docs/results.md

    Args:
        runs: Stores to read: folders of runs.
        out: The folder to write: report.html, tables.md, tables.tex.
        only: Only these tables and figures, e.g. tab2 'fig*', and the runs that stand in them; not given: all.
        paper: Show every table of the paper, also tables and rows without a run.
        markdown: Write the Markdown tables to this file instead of OUT/tables.md.
        latex: Write the LaTeX tables to this file instead of OUT/tables.tex.
        insert: Put a table of the cells that were run, by the first reading of each, into this Markdown file, between
            the marks <!-- marginlens report --> and <!-- end of marginlens report -->.
        rates: Draw probes at several learning rates into this file, as SVG.
        json: Print the tables' numbers as JSON.
    """
    found = read(runs, only, paper)
    notes = _check_only(found, runs, only)
    if insert:
        insert_brief(found, expanded(insert))  # before anything is written
    if rates:
        check_replaceable(expanded(rates), MARKS["svg"])
    written = write(found, runs, out, markdown, latex)
    if insert:
        _put(expanded(insert), insert_brief(found, expanded(insert)), "--insert")  # read anew: it may have been edited
        written.append(str(expanded(insert)))
    if rates:
        _put(expanded(rates), legible(rates_picture(found)), "--rates", MARKS["svg"])
        written.append(str(expanded(rates)))
    if json:
        say_json(jsons.dumps({"written": written} | summary(found), indent=1, allow_nan=False))
    else:
        apart = any(is_stream(Path(path)) for path in written)
        count = len(found.runs)
        line = f"{count} run{'s' * (count != 1)}; wrote {', '.join(written)}"
        notes += [f"{found.diverged} evaluation{'s' * (found.diverged > 1)} diverged"] if found.diverged else []
        say("; ".join([line, *notes]), error=apart)
    if found.bad:
        others = f" (and {len(found.bad) - 1} more, which the report lists)" if len(found.bad) > 1 else ""
        raise ValueError(f"the report is written, but a folder cannot be read: {found.bad[0][1]}{others}")


def read(runs: Sequence[Path], only: Sequence[str] = (), paper: bool = False) -> Gathered:
    """Read stores, and put their runs beside the paper's tables, or beside `only` some of them."""
    chosen = _tables(only)
    return gather([entry for store in dict.fromkeys(runs) for entry in scan(store)], TABLES, chosen, paper)


def _check_only(found: Gathered, runs: Sequence[Path], only: Sequence[str]) -> list[str]:
    """Return a note on the chosen tables without a run; raise if no chosen table has one."""
    if not only or found.paper:
        return []
    missing = [table.name for key, table in found.tables.items() if not found.shown.get(key) and not found.looks[key]]
    if len(missing) < len(found.tables):
        return [f"no run stands in {', '.join(missing)}"] if missing else []
    stores = ", ".join(str(store) for store in dict.fromkeys(runs))
    every = read(runs)
    known = [key for key in every.tables if key in every.shown or every.looks[key]]
    has = f"give one of {', '.join(known)}" if known else "no other table has one; leave out --only"
    raise ValueError(
        f"--only {' '.join(only)}: no run in {stores} stands in {', '.join(missing)}; {has}, or add --paper"
    )


def write(
    found: Gathered, runs: Sequence[Path], out: Path, markdown: Path | None = None, latex: Path | None = None
) -> list[str]:
    """Write the three files, and return their names."""
    out = expanded(out)
    table = expanded(markdown) if markdown else out / "tables.md"
    tex = expanded(latex) if latex else out / "tables.tex"
    files = {"html": out / "report.html", "md": table, "tex": tex}
    for kind, path in files.items():  # before anything is written
        check_replaceable(path, MARKS[kind])
    body = legible(page(found, [str(store) for store in dict.fromkeys(runs)]))
    _put(out / "report.html", body, "--out", MARKS["html"])
    at = Path("tables.md") if is_stream(table) else table  # links of a stream start at the working directory
    _put(table, legible(make_markdown(found, at)), "--markdown" if markdown else "--out", MARKS["md"])
    _put(tex, legible(make_latex(found)), "--latex" if latex else "--out", MARKS["tex"])
    return [str(path) for path in files.values()]


def insert_brief(found: Gathered, path: Path) -> str:
    """Return a file's text with the brief table between its marks."""
    try:
        held = text_of(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path} ({reason(error)}); --insert names a Markdown file") from None
    try:
        return put_in(held, legible(brief(found, path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def summary(found: Gathered) -> dict[str, Any]:
    """Return the numbers of the tables as plain values."""
    tables = {key: [_plain(line) for line in lines] for key, lines in found.shown.items() if lines}
    looks = {key: [_plain(line) for line in lines] for key, lines in found.looks.items() if lines}
    bad = [{"folder": path, "why": why} for path, why in found.bad]
    known = {"runs": len(found.runs), "settings": settings_facts(found)}
    return known | {"tables": tables, "looks": looks, "unreadable": bad}


def _plain(line: Line) -> dict[str, Any]:
    printed = line.cell.published
    known: dict[str, Any] = {"path": line.cell.path, "address": line.cell.address, "label": line.label}
    if printed is not None and not line.label:
        known |= {"published": printed.mean, "published_spread": printed.spread}
    known |= {"mean": line.mean, "std": line.std, "difference": line.difference, "seeds": len(line.values)}
    known |= {"gain": line.gain, "published_gain": line.published_gain, "gain_diverged": line.gain_diverged}
    values = [
        {"run": v.run.name, "seed": v.run.settings.seed, "top1": v.top1, "diverged": v.diverged} for v in line.values
    ]
    partial = [{"run": p.run.name, "seed": p.run.settings.seed, "said": p.said} for p in line.partial]
    return known | {"values": values, "partial": partial}


def _tables(patterns: Sequence[str]) -> list[str]:
    """Return the tables that match; raise for a pattern that matches none."""
    found: list[str] = []
    for pattern in patterns:
        some = [key for key in TABLES if fnmatchcase(key, pattern.lower())]
        if not some:
            raise ValueError(f"there is no table or figure {pattern!r}; {hint(pattern, TABLES)}")
        found += [key for key in some if key not in found]
    return found


def _put(path: Path, text: str, option: str, mark: str = "") -> None:
    """Write a file aside and rename it. `option` named its place; `mark` is the beginning of a file of ours."""
    with writing(path, option):
        deliver(path, text.encode(), mark)
