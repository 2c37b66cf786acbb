"""The paper's theoretical figures, drawn: Figs. 1, 2 and 8, as files that are the same for the same numbers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from marginlens.files import check_replaceable, deliver, writing
from marginlens.lens import theory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawing: TypeAlias = "tuple[Callable[[Figure], None], tuple[float, float]]"
"""A function that draws a figure, and its size in inches."""
KINDS = ("png", "svg", "pdf")
MARKS = {
    "png": "[^P]PNG.{4,60}tEXtSoftware\0marginlens",
    "svg": "<\\?xml.{0,400}<title>marginlens",
    "pdf": "%PDF-",
    "md": "# Claims of the paper, checked\n",
}
"""How a file begins that we wrote. A stranger's is never replaced."""
FIG8_M1, FIG8_TAU = (0.2, 0.4, 0.8, 1.6, 3.1), (0.1, 0.25, 1.0)
"""The paper's caption names m1 and tau, and no values: these m1 are those of its Fig. 7, and the tau are ours."""
ONE = "#2ca02c"
"""The colour of the line where a weight is 1: green, as in the paper."""
_STYLE: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "marginlens",
}


def save(out: Path, drawings: Mapping[str, Drawing]) -> list[Path]:
    """Write each drawing as PNG, SVG and PDF into a folder, and return the files."""
    paths = [out / f"{name}.{kind}" for name in drawings for kind in KINDS]
    for path in paths:
        check_replaceable(path, MARKS[path.suffix[1:]])
        if path.suffix == ".pdf" and path.exists() and not path.with_suffix(".png").exists():
            # because the beginning of a PDF does not say who wrote it, and the picture beside it does
            raise ValueError(
                f"{path} was not written by marginlens, and is not replaced; remove it, or name another OUT"
            )
    for path in paths:
        with writing(path, "OUT"):
            deliver(path, drawn(drawings[path.stem], path.stem, path.suffix[1:]), MARKS[path.suffix[1:]])
    return paths


def drawn(drawing: Drawing, name: str, kind: str) -> bytes:
    """Return a drawing as the bytes of a file."""
    import matplotlib
    from matplotlib.figure import Figure

    draw, size = drawing
    facts: dict[str, Any] = {
        "png": {"Software": "marginlens"},
        "svg": {"Title": f"marginlens {name}", "Date": None},
        "pdf": {"Creator": "marginlens", "Producer": None, "CreationDate": None},
    }
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        draw(figure)
        figure.savefig(file, format=kind, metadata=facts[kind])
    return file.getvalue()


def inline(name: str) -> str:
    """Return a figure as an SVG element for a page."""
    return element(drawn(FIGURES[name], name, "svg"), name)


def element(svg: bytes, name: str) -> str:
    """Return a drawing as an SVG element. Its ids begin with its name, because ids are unique in a page."""
    text = svg.decode()
    text = re.sub(r' id="image\w*"', "", text)  # because two equal images have one id
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text[text.index("<svg") :])


def draw_map(axes: Axes, found: theory.Map, title: str, *, weight: bool, label: str) -> None:
    """Draw a map over the positive's angle and probability; a weight by its logarithm, with a line where it is 1."""
    from matplotlib.colors import TwoSlopeNorm

    theta, q = found.theta[:, 0].numpy(), found.q[0].numpy()
    value = found.value.abs().clamp(min=1e-12).log10().numpy().T if weight else found.value.numpy().T
    limit = min(3.0, float(abs(value).max())) or 1.0
    look: dict[str, Any] = (
        {"cmap": "RdBu_r", "norm": TwoSlopeNorm(0.0, -limit, limit)} if weight else {"cmap": "cividis"}
    )
    mesh = axes.pcolormesh(theta, q, value, shading="auto", rasterized=True, **look)
    if weight and value.min() < 0.0 < value.max():
        axes.contour(theta, q, value, levels=[0.0], colors=[ONE], linewidths=1.6)
    axes.set(title=title, xlabel=r"angle of the positive $\theta^+$", ylabel=r"its probability $\tilde q^+$")
    axes.set_xticks([0.0, math.pi / 2, math.pi], ["0", r"$\pi/2$", r"$\pi$"])
    bar = axes.figure.colorbar(mesh, ax=axes, label=label)
    if weight:
        ticks = [t for t in (-3, -2, -1, 0, 1, 2, 3) if abs(t) <= limit] if limit >= 1 else [-limit, 0.0, limit]
        bar.set_ticks(ticks, labels=[f"{10.0**t:g}" if t == int(t) else f"{10.0**t:.3g}" for t in ticks])


def draw_figure_1(figure: Figure) -> None:
    """Draw Fig. 1: magnitudes of the gradient without margins, beta = 1 and tau = 0.25."""
    left, right = figure.subplots(1, 2)
    positive, negative = theory.figure_1()
    draw_map(left, positive, "positive", weight=False, label=r"$|\partial L / \partial \theta^+|$")
    draw_map(right, negative, "negative", weight=False, label=r"$|\partial L / \partial \theta^-|$")
    right.set(xlabel=r"angle of the negative $\theta^-$", ylabel=r"its probability $\tilde q^-$")


def draw_figure_2(figure: Figure) -> None:
    """Draw Fig. 2: both multipliers of an angular margin, beta = 1, tau = 0.25, m1 = 0.4."""
    left, right = figure.subplots(1, 2)
    angular, ratio = theory.figure_2()
    turned = r"$|\sin(\theta + m_1) / \sin\theta|$"
    draw_map(left, angular, "on positives alone", weight=True, label=turned)
    left.axvline(math.pi - 0.4, color="black", lw=0.8, ls=":")
    left.text(math.pi - 0.43, 0.5, "beyond: repelled", rotation=90, ha="right", va="center", fontsize=8)
    draw_map(right, ratio, "on the whole row", weight=True, label=r"$(p - \beta q) / (p - \beta \tilde q)$")


def draw_figure_8(figure: Figure) -> None:
    """Draw Fig. 8: the ratio for a grid of angular margins and temperatures."""
    grid = figure.subplots(len(FIG8_TAU), len(FIG8_M1), sharex=True, sharey=True)
    for row, tau in zip(grid, FIG8_TAU, strict=True):
        for axes, m1 in zip(row, FIG8_M1, strict=True):
            draw_map(axes, theory.figure_ratio(m1, tau, 81), f"m1 = {m1:g}, tau = {tau:g}", weight=True, label="")
            axes.set(xlabel="", ylabel="")
    figure.supxlabel(r"angle of the positive $\theta^+$")
    figure.supylabel(r"its probability $\tilde q^+$")


FIGURES: dict[str, Drawing] = {
    "fig1": (draw_figure_1, (8.4, 3.4)),
    "fig2": (draw_figure_2, (8.4, 3.4)),
    "fig8": (draw_figure_8, (15.0, 7.2)),
}
CAPTIONS = {
    "fig1": "Fig. 1, Eq. 3: the gradient of the loss without margins fades as a probability nears its target. "
    "beta = 1, tau = 0.25.",
    "fig2": "Fig. 2, Theorem 4.1: an angular margin multiplies the gradient of positives by the left map, and of the "
    "whole row by the right one. beta = 1, tau = 0.25, m1 = 0.4. The green line is where the weight is 1.",
    "fig8": "Fig. 8, Lemma 4.2: the ratio for five margins and three temperatures. The green line is where it is 1.",
}
