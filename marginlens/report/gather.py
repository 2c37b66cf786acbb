"""Decide which run stands in which cell of the paper, from run records alone.

A run counts beside a published number only if its settings are the cell's (any seed), it is complete, and it was
evaluated as the paper does. Shorter looks and rehearsals are lines of their own, with a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import marginlens as ml
from marginlens import evals
from marginlens.paper import Cell, Table, readings
from marginlens.paper.match import Label, follows, match, standing
from marginlens.report.lines import Gathered, Line, Partial, Value, ending, numerics_of
from marginlens.runs.config import NUMERICS, Pretrain
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run, Unreadable

Usual = Mapping[tuple[Label, str], str]
"""The fingerprint of the data that counts in a table, by the label of its runs and the name of the data."""


def read_all(
    held: Iterable[Run | Unreadable],
) -> tuple[list[Run], list[tuple[str, str]], dict[str, list[str]]]:
    """Return every run once, unreadable folders with the reason, and the folders of further copies by key.

    Of several copies, the first of those that got furthest counts. Copies with the same result share their evaluations.
    """
    bad: list[tuple[str, str]] = []
    found: dict[str, list[Run]] = {}
    for one in held:
        if isinstance(one, Run):
            found.setdefault(one.key, []).append(one)
        else:
            bad.append((str(one.path), one.why))
    runs: list[Run] = []
    copies: dict[str, list[str]] = {}
    for key, same in found.items():
        best = max(same, key=lambda run: (run.complete, len(run.evaluations), len(run.metrics)))
        runs.append(best.joined(_joined(best, same)))
        if len(same) > 1:
            copies[key] = [str(run.path) for run in same if run is not best]
    return runs, bad, copies


def _joined(best: Run, same: Iterable[Run]) -> dict[str, Evaluation]:
    """Return the evaluations of a run and of its copies with the same result, of each name the latest."""
    joined: dict[str, Evaluation] = {}
    for run in same:
        if run.outcome == best.outcome:  # another outcome means other weights
            for name, one in run.evaluation_files.items():
                if name not in joined or one.time > joined[name].time:
                    joined[name] = one
    return dict(sorted(joined.items()))


def usual_contents(found: Iterable[tuple[Cell, Run, Label]]) -> Usual:
    """Return the fingerprint that counts of each data set: the latest of a complete run, else the latest."""
    latest: dict[tuple[Label, str], tuple[bool, str, str]] = {}
    for cell, run, kind in found:
        marks = [(run.settings.data, run.resumed, run.data)]
        if evals.get(cell.measure).elsewhere:
            marks += [(one.data, one.time, one.data_fingerprint) for one in standing(cell, run, kind)]
        for data, time, content in marks:
            latest[kind, data] = max(latest.get((kind, data), (False, "", "")), (run.complete, time, content))
    return {key: content for key, (_, _, content) in latest.items()}


def odd_data(one: Evaluation, kind: Label, usual: Usual) -> str:
    """Return why an evaluation does not count, if its data differ from the others'; else ""."""
    return odd_content(one.data, one.data_fingerprint, usual.get((kind, one.data), one.data_fingerprint))


def odd_content(data: str, content: str, usual: str) -> str:
    """Return both fingerprints if they differ, else ""."""
    if content == usual:
        return ""
    return f"not counted: the content of its {data} is {content[:10]}, and {usual[:10]} counts"


def gather(
    held: Iterable[Run | Unreadable], tables: Mapping[str, Table], only: Sequence[str] = (), paper: bool = False
) -> Gathered:
    """Put every run where it belongs. `only` names tables to keep; `paper` shows what has no run, too."""
    tables = {key: _read(table) for key, table in tables.items()}
    runs, bad, copies = read_all(held)
    found = _kept(_matches(tables, runs))
    groups: dict[tuple[str, str], list[tuple[Run, Label]]] = {}
    by_table: dict[str, list[tuple[Cell, Run, Label]]] = {}
    for cell, run, kind in found:
        groups.setdefault((cell.table, cell.path), []).append((run, kind))
        by_table.setdefault(cell.table, []).append((cell, run, kind))
    chosen = {key: table for key, table in tables.items() if not only or key in only}
    lines: dict[str, list[Line]] = {}
    looks: dict[str, list[Line]] = {}
    for key, table in chosen.items():
        usual = usual_contents(by_table.get(key, []))
        made = [_lines(cell, groups.get((key, cell.path), []), usual) for cell in table.cells]
        lines[key] = _with_plain([first for first, *_ in made if first.runs or not first.cell.reading])
        looks[key] = [look for _, *more in made for look in more]
    if only:
        shown = {s.key for part in (lines, looks) for held in part.values() for line in held for s in line.runs}
        runs = [run for run in runs if run.key in shown]
    return Gathered(chosen, lines, looks, runs, bad, copies, paper)


def _with_plain(lines: Sequence[Line]) -> list[Line]:
    """Give each line the line of plain that differs in its effect alone."""
    ran = [line for line in lines if line.values]
    plains = {_but_effect(line.cell): line for line in ran if _asked(line.cell, "effect") == "plain"}
    return [
        replace(line, plain=plains.get(_but_effect(line.cell)))
        if line.values and _asked(line.cell, "effect") != "plain"
        else line
        for line in lines
    ]


def _but_effect(cell: Cell) -> str:
    """Return a cell's settings without its effect, as text."""
    return repr((cell.to, sorted((name, value) for name, value in (cell.settings or {}).items() if name != "effect")))


def _read(table: Table) -> Table:
    """Return a table with a cell for each reading of the paper's words."""
    return replace(table, cells=tuple(read for cell in table.cells for read in readings(cell)))


def _matches(tables: Mapping[str, Table], runs: Iterable[Run]) -> list[tuple[Cell, Run, Label]]:
    """Return each pair of a cell and a run that matches it, with the kind of match.

    Method and effect must agree for any match, so runs are indexed by them. Settings are compared once, however many
    cells and seeds share them.
    """
    index: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        groups = index.setdefault((run.settings.method, run.settings.effect), {})
        groups.setdefault(run.but_seed, []).append(run)
    known: dict[tuple[str, str], Label | None] = {}
    found: list[tuple[Cell, Run, Label]] = []
    for cell in (cell for table in tables.values() for cell in table.cells if cell.settings is not None):
        asked = repr((sorted((cell.settings or {}).items()), sorted(cell.at.items())))
        for shared, group in index.get((_asked(cell, "method"), str(ml.effect(_asked(cell, "effect")))), {}).items():
            if (asked, shared) not in known:
                known[asked, shared] = match(cell, group[0])
            if (kind := known[asked, shared]) is not None:
                found += [(cell, run, kind) for run in group]
    return found


def _asked(cell: Cell, name: str) -> Any:
    """Return a setting of the cell."""
    assert cell.settings is not None
    return cell.settings.get(name, Pretrain.model_fields[name].default)


_RANKS: tuple[Label, ...] = ("exact", "shorter", "rehearsal")


def _kept(found: Sequence[tuple[Cell, Run, Label]]) -> list[tuple[Cell, Run, Label]]:
    """Drop matches that tell nothing new.

    An exact run of one cell is no shorter look at another: 200 epochs of Tab. 2 at the 1,000 of Tab. 9. A shorter look
    is no rehearsal. Of shorter looks, those at the cells of fewest epochs stay. A run that matches several readings
    of a cell counts for the first.
    """
    ranks: dict[str, int] = {}
    for _, run, kind in found:
        ranks[run.key] = min(ranks.get(run.key, len(_RANKS)), _RANKS.index(kind))
    found = [(cell, run, kind) for cell, run, kind in found if _RANKS.index(kind) == ranks[run.key]]
    fewest: dict[str, int] = {}
    for cell, run, _ in found:
        fewest[run.key] = min(fewest.get(run.key, 1 << 60), _asked(cell, "epochs"))
    kept: dict[tuple[str, str], tuple[Cell, Run, Label]] = {}
    for cell, run, kind in found:
        if kind == "exact" or _asked(cell, "epochs") == fewest[run.key]:
            kept.setdefault((cell.address, run.key), (cell, run, kind))
    return list(kept.values())


def _lines(cell: Cell, runs: Sequence[tuple[Run, Label]], usual: Usual) -> list[Line]:
    """Return the cell's own line, which may be empty, then a line per label. Each seed counts once in a line."""
    values: dict[str, dict[int, Value]] = {}
    partial: dict[str, list[Partial]] = {}
    bare: list[tuple[str, Run]] = []
    latest = sorted(runs, key=lambda pair: pair[0].resumed, reverse=True)
    for run, kind in sorted(latest, key=lambda pair: pair[0].settings.seed):
        label, found = _label(cell, run, kind, None), None
        said = odd_content(run.settings.data, run.data, usual[kind, run.settings.data])
        if not said and run.complete:
            able = standing(cell, run, kind)
            found = next((one for one in able if not odd_data(one, kind, usual)), None)
            said = odd_data(able[0], kind, usual) if able and found is None else ""
        if found is not None:
            label = _label(cell, run, kind, found)
            value = Value(run, found)
            first = values.setdefault(label, {}).setdefault(run.settings.seed, value)
            said = "" if first.run is run else f"not counted: {first.run.name} has this seed already"
            if label and kind == "exact" and not said:
                partial.setdefault("", []).append(Partial(run, _not_quite(run, label)))
        elif not said and (kind == "exact" or not run.complete):
            said = _lacks(cell, run)
        elif not said:
            bare.append((label, run))
        if said:
            partial.setdefault(label, []).append(Partial(run, said))
    for label, run in bare:  # a look without a number is only worth a word beside another seed that has one
        if at := next((key for key in values if key == label or key.startswith(f"{label}, ")), ""):
            partial.setdefault(at, []).append(Partial(run, _no_number(cell)))
    keys = ["", *sorted({*values, *partial} - {""})]
    return [Line(cell, key, tuple(values.get(key, {}).values()), tuple(partial.get(key, ()))) for key in keys]


def _not_quite(run: Run, label: str) -> str:
    """Return why an exact run does not count in the cell's own line."""
    return f"not counted: {numerics_of(run)}" if numerics_of(run) else f"complete, only a shorter look ({label})"


def _label(cell: Cell, run: Run, kind: Label, found: Evaluation | None) -> str:
    """Return the label of a run in a cell; "" for an exact run that was probed in full."""
    said = [f"rehearsal on {run.settings.data}"] if kind == "rehearsal" else []
    if run.settings.epochs != (asked := _asked(cell, "epochs")):
        said.append(f"{run.settings.epochs} of {asked} epochs")
    if found is not None:
        full = follows(cell, run.settings.data if kind == "rehearsal" else None).settings
        if found.settings != full:  # `standing` allows fewer epochs alone
            probed, most = (getattr(one, "epochs", 0) for one in (found.settings, full))
            said.append(f"probe of {probed} of {most} epochs")
        if found.numerics not in (NUMERICS, run.numerics):
            said.append(f"evaluated with numerics {found.numerics}, not {NUMERICS}")
    if odd := numerics_of(run):
        said.append(odd)
    return ", ".join(said)


def _lacks(cell: Cell, run: Run) -> str:
    """Return why an exact run has no number."""
    if not run.complete:
        return ending(run)
    wanted = follows(cell)
    if any((known.kind, known.data) == (wanted.kind, wanted.data) for known in run.evaluations):
        return f"complete, {wanted.name} has other settings"
    return _no_number(cell)


def _no_number(cell: Cell) -> str:
    return f"complete, no {follows(cell).name}"
