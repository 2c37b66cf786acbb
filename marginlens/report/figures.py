"""The paper's figures from our runs, as SVG that needs no script and prints.

The SVG is written here and not by a plotting library: the page stays small, points are links, and colours follow the
reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from marginlens.paper import Cell, Published, Table, elsewhere
from marginlens.report import render
from marginlens.report.lines import Line
from marginlens.runs.seeds import number

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 28, 44
TITLE = 7.8
"""The mean width of a letter in a panel's name, in pixels."""
CLOSE = 26
"""The least distance between labels of an axis, in pixels."""

COLOURS = 8
"""The number of colours: --c0 to --c7 of the style."""
LINES = 2 * COLOURS
"""The number of series that look different."""

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Point:
    """A mean over seeds at a place on the axis, or a published number."""

    x: float
    y: float
    spread: float
    said: str
    link: str
    lost: bool = False
    """True if one of its probes diverged. It is then a cross beside the line."""


@dataclass(frozen=True)
class Panel:
    """Series over an axis. Colours follow the order of the series; the second eight have hollow marks, dashed lines."""

    name: str
    about: str
    label: str
    across: Mapping[float, float]
    """The position of each value of the axis."""
    series: Mapping[str, Sequence[Point]]
    printed: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """Published numbers by series."""


def figure(table: Table, lines: Sequence[Line], *, published: bool = False) -> str:
    """Return a panel per data set; `published` adds numbers that a table of the paper has for the same run."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(_data(line), []).append(line)
    return panels(
        [_panel(table, name, held, published) for name, held in groups.items() if any(x.values for x in held)]
    )


def _data(line: Line) -> str:
    """Return the data of a cell, or of its rehearsal, which is the same for all cells."""
    return line.runs[0].settings.data if line.label.startswith("rehearsal") else line.cell.path.split("/")[1]


def _series(table: Table, cell: Cell) -> str:
    name = cell.path.split("/")[0] if table.series == "method" else f"{table.series} = {cell.at[table.series]:g}"
    return f"{name} ({cell.reading})" if cell.reading else name


def _panel(table: Table, name: str, lines: Sequence[Line], published: bool) -> Panel:
    series: dict[str, list[Point]] = {_series(table, line.cell): [] for line in lines}
    printed: dict[str, list[Point]] = {}
    for line in lines:
        own = _series(table, line.cell)
        x = line.cell.at[table.x]
        if line.mean is not None:
            lost = line.diverged
            seeds = f"{len(line.values)} seed{'s' * (len(line.values) > 1)}{f', {lost} diverged' * bool(lost)}"
            said = f"{own}, {line.cell.column}: {number(line.mean, line.std)} ({seeds})"
            point = Point(x, line.mean, line.std or 0.0, said, line.values[0].run.key, bool(lost))
            series[own].extend([point] if point not in series[own] else [])
        if published and (known := _published(line.cell)):
            where, value = known
            printed.setdefault(own, []).append(Point(x, value.mean, value.spread or 0.0, f"{where}: {value}", ""))
    across = _across(sorted({line.cell.at[table.x] for line in lines}), table.x_log)
    grid = "" if table.x in table.given else " (the grid is ours)"
    about = f"{table.name}, {name}: top-1 accuracy (%) by {table.x}"
    return Panel(name, about, f"{table.x}{grid}", across, series, printed)


def logarithmic(name: str, label: str, series: Mapping[str, Sequence[Point]]) -> Panel:
    """Return a panel with a logarithmic axis, labelled at the values of points as far as there is room."""
    values = sorted({point.x for points in series.values() for point in points})
    return Panel(name, f"{name}: top-1 by {label}", label, _across(values, log=True), series)


def picture(shown: Sequence[Panel]) -> str:
    """Return panels of the same series as an SVG file, two in a row, with one legend below."""
    wide, high = 2 * WIDTH, -(-len(shown) // 2) * HEIGHT
    parts = [
        f'<g transform="translate({i % 2 * WIDTH} {i // 2 * HEIGHT})">{_plot(one, linked=False)}</g>'
        for i, one in enumerate(shown)
    ]
    x, y = LEFT, high + 18
    for i, own in enumerate(shown[0].series):
        room = 30 + 7 * len(own)
        x, y = (LEFT, y + 20) if x > LEFT and x + room > wide else (x, y)
        parts.append(f'<circle class="{_colour(i)}" cx="{x}" cy="{y - 4}" r="5"/>')
        parts.append(f'<text x="{x + 12}" y="{y}">{html.escape(own)}</text>')
        x += room
    view = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {y + 14}" width="{wide}"'
    style = f'<style>\n{render("chart.css.j2")}</style><rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return f"<svg {view}>{style}{''.join(parts)}</svg>\n"


def panels(shown: Sequence[Panel]) -> str:
    """Return panels side by side, as many as fit."""
    return f'<div class="panels">{"".join(map(_draw, shown))}</div>' if shown else ""


def _draw(one: Panel) -> str:
    shown = [(i, own) for i, (own, found) in enumerate(one.series.items()) if found or own in one.printed]
    keys = "".join(f'<span><i class="{_colour(i)}"></i>{html.escape(own)}</span>' for i, own in shown)
    keys += "<span><b>&#9671;</b> published, in a table</span>" if one.printed else ""
    keys += (
        "<span><b>&#10005;</b> diverged</span>" if any(p.lost for found in one.series.values() for p in found) else ""
    )
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{html.escape(one.about)}">'
    drawn = _plot(one, linked=True)
    return f'<figure class="panel">{head}{drawn}</svg><figcaption class="key">{keys}</figcaption></figure>'


def _plot(one: Panel, *, linked: bool) -> str:
    """Return the axes, lines and marks of a panel; marks link to runs if the page has them."""
    points = [p for group in (*one.series.values(), *one.printed.values()) for p in group]
    up, ticks = _up([p.y - p.spread for p in points] + [p.y + p.spread for p in points])
    parts = [_axes(one.name, one.label, one.across, up, ticks)]
    for i, (own, found) in reversed(list(enumerate(one.series.items()))):  # the first, the base line, lies on top
        parts += [_line(i, sorted(found, key=lambda p: p.x), one.across, up)]
        marks = found if linked else [replace(p, link="") for p in found]
        parts += [_mark(i, p, one.across[p.x], up, own=True) for p in marks]
        parts += [_mark(i, p, one.across[p.x], up, own=False) for p in one.printed.get(own, [])]
    return "".join(parts)


def _published(cell: Cell) -> tuple[str, Published] | None:
    """Return the number that the paper prints for this run, in the figure or in a table, and its address."""
    found = [c for c in (cell, *elsewhere(cell)) if c.published is not None]
    return (found[0].address, found[0].published) if found and found[0].published is not None else None


def _across(values: Sequence[float], log: bool) -> Mapping[float, float]:
    """Return the position of each value; infinity, which means no effect, is set apart at the right end."""
    finite = [v for v in values if math.isfinite(v)]
    turned = [math.log(v) for v in finite] if log and all(v > 0 for v in finite) else list(finite)
    low, high = min(turned, default=0.0), max(turned, default=1.0)
    end = WIDTH - RIGHT - 8 - (34 if len(finite) < len(values) else 0)
    wide = (end - LEFT - 8) / ((high - low) or 1.0)
    found = {v: LEFT + 8 + wide * (t - low) for v, t in zip(finite, turned, strict=True)}
    return found | {v: float(WIDTH - RIGHT - 8) for v in values if not math.isfinite(v)}


def _up(values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return the vertical scale, and round numbers on it."""
    low, high = min(values), max(values)
    span = max(high - low, 0.5)
    low, high = low - 0.06 * span, max(high, low + span) + 0.06 * span
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough)
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return (lambda y: HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (y - low) / (high - low)), ticks


def _axes(name: str, label: str, across: Mapping[float, float], up: Scale, ticks: Sequence[float]) -> str:
    parts = [_title(name)]
    for y in ticks:
        at = up(y)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{at + 4:.1f}">{y:g}</text>')
    last = -math.inf
    for value, x in sorted(across.items(), key=lambda pair: pair[1]):
        if x - last >= CLOSE:
            text = "none" if math.isinf(value) else f"{value:.3g}"
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{text}</text>'
            )
            last = x
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    said = f'<text class="tick" text-anchor="middle" x="{middle}" y="{HEIGHT - 8}">{html.escape(label)}</text>'
    return "".join(parts) + said


def _title(name: str) -> str:
    """Return the name over the axes if it fits, else over the whole panel, squeezed if needed."""
    wide, whole = TITLE * len(name), WIDTH - 8
    x = LEFT if wide <= WIDTH - LEFT else 4
    squeezed = f' textLength="{whole}" lengthAdjust="spacingAndGlyphs"' if wide > whole else ""
    return f'<text class="name" x="{x}" y="16"{squeezed}>{html.escape(name)}</text>'


def _line(i: int, points: Sequence[Point], across: Mapping[float, float], up: Scale) -> str:
    d = "L".join(f"{across[p.x]:.1f} {up(p.y):.1f}" for p in points if math.isfinite(p.x) and not p.lost)
    return f'<path class="line s{i % COLOURS}{" second" * (i >= COLOURS)}" d="M{d}"/>' if d else ""


def _colour(i: int) -> str:
    """Return the class of a series' marks."""
    return f"k{i % COLOURS}{' hollow' * (i >= COLOURS)}"


def _mark(i: int, point: Point, x: float, up: Scale, *, own: bool) -> str:
    """Return a disc for our mean, a cross if it diverged, or a diamond for a published number, with an error bar."""
    y, low, high = up(point.y), up(point.y - point.spread), up(point.y + point.spread)
    bar = f'<path class="bar s{i % COLOURS}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>' if point.spread else ""
    title = f"<title>{html.escape(point.said)}</title>"
    if not own:
        d = f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"
        return f'{bar}<path class="printed s{i % COLOURS}" d="{d}">{title}</path>'
    cross = f'<path class="printed s{i % COLOURS}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8">{title}</path>'
    disc = f'<circle class="dot {_colour(i)}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'
    disc = cross if point.lost else disc
    if not point.link:
        return bar + disc
    return f'{bar}<a href="#{point.link}" aria-label="{html.escape(point.said)}">{disc}</a>'
