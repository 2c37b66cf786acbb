"""What `marginlens runs` prints: a table of runs, one run in full, several side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from marginlens.output import PLAIN
from marginlens.output import plain as plain_table
from marginlens.runs.entry import Entry, when
from marginlens.runs.fields import RECIPE, apart, odd, value
from marginlens.runs.store import records
from marginlens.train.accuracy import diverged

NOTE = "* by an evaluation that is not the recipe's; marginlens runs show says which"
DIVERGED = " (diverged)"
"""Behind the accuracy of a probe whose loss ended far above guessing's."""

_MEASURED = ("loss", "knn", "probe")


def listed(entries: Sequence[Entry], title: str) -> str:
    """A line for each run, in plain columns: a frame around thousands of them takes longer than reading them."""
    rows = [("run", "state", "epochs", "loss", "kNN", "probe", "weights", "started", "settings")]
    for entry in entries:
        assert entry.run is not None
        epochs = f"{entry.epochs_done}/{entry.run.settings.epochs}"
        loss, knn, probe = (shown(value(entry, field), field) + _mark(entry, field) for field in _MEASURED)
        kept = "yes" if entry.weights else ""
        besides = apart(entry.run.settings)
        rows.append((entry.name, entry.state, epochs, loss, knn, probe, kept, entry.started[:16], besides))
    if not any(row[-1] for row in rows[1:]):
        rows = [(*row[:-1], "") for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    marked = any("*" in cell for row in rows for cell in row[4:6])
    return "\n".join([title, *lines, *([NOTE] if marked else [])])


def compared(found: dict[str, Any]) -> str:
    """Settings that differ, then results; a column for each run."""
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


def comparison(entries: Sequence[Entry]) -> dict[str, Any]:
    """What differs in the settings, and what came of it."""
    dumps = [entry.run.settings.model_dump(mode="json") for entry in entries if entry.run]
    differing = {name: [dump[name] for dump in dumps] for name in dumps[0] if len({str(d[name]) for d in dumps}) > 1}
    results: dict[str, list[Any]] = {
        "state": [entry.state for entry in entries],
        "epochs_done": [entry.epochs_done for entry in entries],
        "loss": [entry.last.get("loss") for entry in entries],
        "spread": [entry.last.get("spread") for entry in entries],
        "seconds": [entry.result.get("seconds") for entry in entries],
        "device": [entry.device for entry in entries],
    }
    latest = [{label(one): one for one in sorted(entry.evaluations, key=when)} for entry in entries]
    tops = [{name: one["top1"] for name, one in held.items()} for held in latest]
    tops = [{"knn at the end": entry.last.get("knn")} | top for entry, top in zip(entries, tops, strict=True)]
    results |= {label: [top.get(label) for top in tops] for label in dict.fromkeys(n for top in tops for n in top)}
    bad: dict[str, list[int]] = {}
    for i, held in enumerate(latest):
        for name in (name for name, one in held.items() if diverged(one)):
            bad.setdefault(name, []).append(i)
    names = [entry.name for entry in entries]
    return {"runs": names, "settings": differing, "results": results, "diverged": bad}


def described(entry: Entry) -> dict[str, Any]:
    """All that a run says of itself."""
    assert entry.run is not None
    return {
        "run": str(entry.path),
        "id": entry.run.id,
        "state": entry.state,
        **({"why": entry.why} if entry.why else {}),
        "settings": entry.run.settings.model_dump(mode="json"),
        "data_fingerprint": entry.run.data,
        "epochs_done": entry.epochs_done,
        "last_epoch": entry.last,
        "result": entry.result,
        "evaluations": entry.evaluations,
        "starts": entry.starts,
        "has_weights": entry.weights,
        "bytes": entry.size_bytes,
        "files": sorted(records(entry.path)),
        "command": f"{entry.run.command} --resume",
    }


def full(found: dict[str, Any]) -> str:
    """One run, for reading: what came of it, then its settings, as options, since some metrics have the same names."""
    head = Table(show_header=False)
    head.add_row("state", found["state"] + (f": {found['why']}" if "why" in found else ""))
    head.add_row("epochs done", f"{found['epochs_done']} of {found['settings']['epochs']}")
    for name, number in found["last_epoch"].items():
        if name not in ("epoch", "step"):
            head.add_row(name, shown(number, name))
    for one in found["evaluations"]:
        head.add_row(label(one), f"{one['top1']:.2f} %{DIVERGED if diverged(one) else ''}")
    for start in found["starts"]:
        head.add_row("start", f"{start.get('time', '')} on {start.get('device', '')}, step {start.get('step', 0)}")
    head.add_row("weights kept", "yes" if found["has_weights"] else "no")
    head.add_row("size on disk", amount(found["bytes"]))
    head.add_section()
    for name, setting in found["settings"].items():
        head.add_row(f"--{name.replace('_', '-')}", shown(setting, name))
    return f"{found['run']}\n{_text(head)}\nthe same run: {found['command']}"


def amount(count: int) -> str:
    """Bytes, for reading: 3.7 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def shown(found: Any, field: str) -> str:
    """A value as a table has it."""
    if found is None:
        return ""
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, list | tuple):
        return " ".join(f"{x:g}" for x in found)
    if isinstance(found, float):
        percent = field in ("knn", "probe") or field.split()[0] in ("knn", "probe", "transfer")
        return f"{found:.2f} %" if percent else f"{found:.5g}"
    return str(found)


def _mark(entry: Entry, field: str) -> str:
    by = value(entry, f"{field}_by") if field != "loss" else None
    bad = DIVERGED if field == "probe" and value(entry, "diverged") else ""
    return bad if by in (None, RECIPE) else f"{bad} *"


def label(one: dict[str, Any]) -> str:
    """What tells one evaluation from another: its kind, its data, and whatever is not as usual for those data."""
    words = [one["kind"], "to" if one["kind"] == "transfer" else "on", one["data"]]
    return " ".join([*words, *(f"{name}={shown(setting, name)}" for name, setting in odd(one).items())])


def _text(table: Table) -> str:
    """As wide as it must be where the output is no terminal, so that no name is cut there."""
    console = Console(**PLAIN, color_system=None)  # a style would be an escape sequence, as a hostile name is
    if not console.is_terminal:
        width = max(80, console.measure(plain_table(table)).maximum + 200)
        console = Console(file=io.StringIO(), width=width, **PLAIN)
    with console.capture() as said:
        console.print(plain_table(table))
    return said.get().rstrip("\n")
