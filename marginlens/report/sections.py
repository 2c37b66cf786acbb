"""What the page says of one run: its configuration, the commands that make it again, where it ran, its evaluations."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from marginlens.report.again import commands
from marginlens.report.gather import Gathered, Line
from marginlens.report.grids import measure
from marginlens.report.seen import Seen
from marginlens.runs.fields import apart
from marginlens.train.accuracy import diverged

POINTS = 200
"""Points of a curve in the page at most, evenly chosen with the last one among them."""

CURVES = ("loss", "knn", "lr", "spread", "embedding_spread")
_SKIPPED = ("time", "engine_about")


def stands(gathered: Gathered) -> dict[str, list[Line]]:
    """The lines of tables that each run stands in, by its key."""
    found: dict[str, list[Line]] = {}
    for part in (gathered.lines, gathered.looks):
        for line in (line for lines in part.values() for line in lines):
            for seen in line.runs:
                found.setdefault(seen.key, []).append(line)
    return found


def section(seen: Seen, number: int, lines: Sequence[Line], copies: Sequence[str], names: Mapping[str, str]) -> str:
    """One run; `number` is its place among the curves, `names` are the tables'."""
    chosen, failed = seen.settings, " failed" if seen.entry.state == "failed" else ""
    about = f"{chosen.method}, {chosen.data}, {chosen.effect}, {chosen.epochs} epochs, seed {chosen.seed}"
    about += f", {besides}" if (besides := apart(chosen)) else ""
    parts = [f"<p>Folder: <code>{_e(seen.entry.path)}</code></p>"]
    parts += [f"<p>The same run is also in <code>{_e(path)}</code>.</p>" for path in copies]
    if seen.entry.result:
        parts.append(f"<p>Pre-training: {_e(_facts(seen.entry.result))}</p>")
    if lines:
        parts.append(f"<p>Stands in: {'; '.join(_place(line, seen, names) for line in lines)}</p>")
    parts.append(f'<p><a href="#curves" data-curve="{number}">Its curves</a></p>' if seen.metrics else "")
    again = commands(seen.entry.path, chosen, seen.evaluations)
    parts.append(f"<h3>Commands</h3><pre>{_e(chr(10).join(again))}</pre>")
    parts.append(f'<p class="small">The first, with everything spelled out: <code>{_e(seen.run.command)}</code></p>')
    if seen.evaluations:
        parts.append(f"<h3>Evaluations</h3>{''.join(_evaluation(known) for known in seen.evaluations)}")
    parts.append(f"<h3>Environment</h3>{''.join(_start(start) for start in seen.entry.starts) or '<p>none</p>'}")
    parts.append(f"<h3>Configuration</h3><pre>{_e(_settings(chosen.model_dump(mode='json')))}</pre>")
    head = f'<b>{_e(about)}</b> <span class="state{failed}">{_e(seen.said)}</span>'
    return f'<details class="run" id="{seen.key}"><summary>{head}</summary><div>{"".join(parts)}</div></details>\n'


def curves(runs: Sequence[Seen]) -> str:
    """The metrics of all runs as JSON that may stand in a page."""
    found = [{"key": seen.key, "name": seen.entry.name, **_curve(seen.metrics)} for seen in runs]
    return json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _curve(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    if len(metrics) > POINTS:
        picked = {round(i * (len(metrics) - 1) / (POINTS - 1)) for i in range(POINTS)}
        rare = sum("knn" in line for line in metrics) <= POINTS
        # epochs at which nearest neighbours were looked at stay, unless that was at nearly all
        metrics = [line for i, line in enumerate(metrics) if i in picked or (rare and "knn" in line)]
    found = {name: [_short(line.get(name)) for line in metrics] for name in CURVES}
    return {"epoch": [line["epoch"] for line in metrics]} | {
        n: v for n, v in found.items() if any(x is not None for x in v)
    }


def _short(value: Any) -> float | None:
    """Five digits: what a picture shows."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def _e(text: object) -> str:
    return html.escape(str(text))


def _place(line: Line, seen: Seen, names: Mapping[str, str]) -> str:
    """A cell that the run stands in, and its other seeds."""
    label = f" ({line.label})" if line.label else ""
    others = [s for s in line.runs if s.key != seen.key]
    with_ = ", ".join(f'<a href="#{s.key}">seed {s.settings.seed}</a>' for s in others)
    where = f'<a href="#{_e(line.cell.table)}">{_e(names[line.cell.table])}</a>, {_e(line.cell.path)}{_e(label)}'
    return where + (f" with {with_}" if with_ else "")


def _facts(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in known.items())


def _evaluation(known: Mapping[str, Any]) -> str:
    numbers = {k: v for k, v in known.items() if isinstance(v, int | float)}
    where = f"<br>{_e(_environment(known['environment']))}"
    more = f'<span class="small">{_e(_settings(known["settings"]))}{where}</span>'
    bad = ' <span class="bad">diverged</span>' if diverged(known) else ""
    return f"<p><b>{_e(measure(known))}</b>{bad}: {_e(_facts(numbers))}<br>{more}</p>"


def _start(start: Mapping[str, Any]) -> str:
    step = f"from step {start['step']}: " if start.get("step") else ""
    return f"<p>{_e(step)}{_e(_environment(start))}</p>"


def _environment(known: Mapping[str, Any]) -> str:
    first = [str(known["device"])] if "device" in known else []
    rest = [f"{k} {v}" for k, v in known.items() if k not in (*_SKIPPED, "device", "step") and v != ""]
    when = [f"at {known['time']}"] if "time" in known else []
    return ", ".join([*first, *rest, *when])


def _settings(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {json.dumps(v)}" for k, v in known.items())
