"""Texts of `marginlens runs`: a table of runs, one run in full, several side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from marginlens import evals
from marginlens.output import PLAIN
from marginlens.output import plain as plain_table
from marginlens.runs.query import RECIPE, apart, value
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.runs.store import records

NOTE = "* by an evaluation that is not the recipe's; marginlens runs show RUN says which"
DIVERGED = " (diverged)"
"""Mark behind the accuracy of a probe that diverged: its loss ended far above guessing's."""


def listed(runs: Sequence[Run], title: str) -> str:
    """Return a line for each run in plain columns, because drawing a frame around thousands of runs is slow."""
    measured = {"loss": "loss"} | evals.titles()
    rows = [("run", "state", "epochs", *measured.values(), "weights", "started", "settings")]
    for run in runs:
        epochs = f"{run.epochs_done}/{run.settings.epochs}"
        numbers = (shown(value(run, field), field) + _mark(run, field) for field in measured)
        kept = "yes" if run.weights else ""
        rows.append((run.name, run.state, epochs, *numbers, kept, run.started[:16], apart(run.settings)))
    if not any(row[-1] for row in rows[1:]):
        rows = [(*row[:-1], "") for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    marked = any("*" in cell for row in rows for cell in row[4 : 3 + len(measured)])
    return "\n".join([title, *lines, *([NOTE] if marked else [])])


def compared(found: dict[str, Any]) -> str:
    """Return a table of differing settings, then results, with a column for each run."""
    names = found["runs"]
    table = Table("", *(f"{i + 1}" for i in range(len(names))))
    for part in ("settings", "results"):
        for field, values in found[part].items():
            bad = found["diverged"].get(field, ()) if part == "results" else ()
            said = (shown(v, field) + (DIVERGED if i in bad else "") for i, v in enumerate(values))
            table.add_row(field, *said)
        table.add_section()
    heads = "\n".join(f"{i + 1}: {name}" for i, name in enumerate(names))
    same = "" if found["settings"] else "the settings are the same\n"
    return f"{heads}\n{same}{_text(table)}"


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings that differ, and the results."""
    dumps = [run.settings.model_dump(mode="json") for run in runs]
    differing = {name: [dump[name] for dump in dumps] for name in dumps[0] if len({str(d[name]) for d in dumps}) > 1}
    results: dict[str, list[Any]] = {
        "state": [run.state for run in runs],
        "epochs_done": [run.epochs_done for run in runs],
        "loss": [run.last.loss if run.last else None for run in runs],
        "spread": [run.last.spread if run.last else None for run in runs],
        "seconds": [run.outcome.seconds if run.outcome else None for run in runs],
        "device": [run.device for run in runs],
    }
    latest = [{label(one): one for one in sorted(run.evaluations, key=lambda one: one.time)} for run in runs]
    tops: list[dict[str, Any]] = [{name: one.top1 for name, one in held.items()} for held in latest]
    ends = [run.last.knn if run.last else None for run in runs]
    tops = [{"knn at the end": end} | top for end, top in zip(ends, tops, strict=True)]
    results |= {label: [top.get(label) for top in tops] for label in dict.fromkeys(n for top in tops for n in top)}
    bad: dict[str, list[int]] = {}
    for i, held in enumerate(latest):
        for name in (name for name, one in held.items() if one.diverged):
            bad.setdefault(name, []).append(i)
    names = [run.name for run in runs]
    return {"runs": names, "settings": differing, "results": results, "diverged": bad}


def described(run: Run) -> dict[str, Any]:
    """Return everything known about a run."""
    return {
        "run": str(run.path),
        "id": run.id,
        "state": run.state,
        **({"why": run.why} if run.why else {}),
        "settings": run.settings.model_dump(mode="json"),
        "data_fingerprint": run.data,
        "epochs_done": run.epochs_done,
        "last_epoch": run.last.plain() if run.last else {},
        "result": run.outcome.plain() if run.outcome else {},
        "evaluations": [one.plain() | {"label": label(one), "diverged": one.diverged} for one in run.evaluations],
        "starts": [start.plain() for start in run.starts],
        "has_weights": run.weights,
        "bytes": run.size_bytes,
        "files": sorted(records(run.path)),
        "command": f"{run.command} --resume",
    }


def full(found: dict[str, Any]) -> str:
    """Return one run as text: results first, then settings as options, because some metrics have a setting's name."""
    head = Table(show_header=False)
    head.add_row("state", found["state"] + (f": {found['why']}" if "why" in found else ""))
    head.add_row("epochs done", f"{found['epochs_done']} of {found['settings']['epochs']}")
    for name, number in found["last_epoch"].items():
        if name not in ("epoch", "step"):
            head.add_row(name, shown(number, name))
    for one in found["evaluations"]:
        head.add_row(one["label"], f"{one['top1']:.2f} %{DIVERGED if one['diverged'] else ''}")
    for start in found["starts"]:
        head.add_row("start", f"{start.get('time', '')} on {start.get('device', '')}, step {start.get('step', 0)}")
    head.add_row("weights kept", "yes" if found["has_weights"] else "no")
    head.add_row("size on disk", amount(found["bytes"]))
    head.add_section()
    for name, setting in found["settings"].items():
        head.add_row(f"--{name.replace('_', '-')}", shown(setting, name))
    return f"{found['run']}\n{_text(head)}\nthe same run: {found['command']}"


def amount(count: int) -> str:
    """Format a number of bytes: 3.7 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def shown(found: Any, field: str) -> str:
    """Format a value for a table."""
    if found is None:
        return ""
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, list | tuple):
        return " ".join(f"{x:g}" for x in found)
    if isinstance(found, float):
        percent = field.split()[0] in evals.MODULES
        return f"{found:.2f} %" if percent else f"{found:.5g}"
    return str(found)


def _mark(run: Run, field: str) -> str:
    by = value(run, f"{field}_by") if field != "loss" else None
    bad = DIVERGED if field == evals.HEADLINE and value(run, "diverged") else ""
    return bad if by in (None, RECIPE) else f"{bad} *"


def label(one: Evaluation) -> str:
    """Return an evaluation's name: its kind, its data, and settings that differ from the usual ones."""
    return " ".join([one.name, *(f"{name}={shown(setting, name)}" for name, setting in one.odd.items())])


def _text(table: Table) -> str:
    """Render a table. If the output is not a terminal, it is as wide as needed, so that no name is cut."""
    console = Console(**PLAIN, color_system=None)  # a style would be an escape sequence, as a hostile name is
    if not console.is_terminal:
        width = max(80, console.measure(plain_table(table)).maximum + 200)
        console = Console(file=io.StringIO(), width=width, **PLAIN)
    with console.capture() as said:
        console.print(plain_table(table))
    return said.get().rstrip("\n")
