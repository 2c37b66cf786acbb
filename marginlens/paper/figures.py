"""The figures: sweeps behind Figs. 3 to 7, and the maps of Figs. 1, 2 and 8, which need no run.

The paper's source has no figure files, and its text gives none of their values, so no cell here has a published number.
If the text does not give a grid either, the grid is our choice (`Cell.ours`, `Table.given`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product

from marginlens.paper.cells import Cell, Table, number, show
from marginlens.paper.recipe import BATCH, DATA, run, spell

CURVATURES = (1 / 3, 0.5, 0.7, 1.0, 1.5, 2.5, 5.0)
"""Sec. 5.3: "three convex (c is 1/3, 0.5, 0.7), three concave (c is 1.5, 2.5, 5), and linear (c is 1) curves"."""

RATIO_MARGINS = (0.2, 0.4, 0.8, 1.6, 3.1)
"""Sec. 5.4: "m1 of 0.2, 0.4, 0.8, 1.6, and 3.1"."""

OUR_SCALES = {
    "MoCo": (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0),
    "SimCLR": (1.0, 1.0625, 1.125, 1.25, 1.5, 2.0, 2.5, 4.0),
}
"""Our grid of s: the values of Tabs. 6, 7 and 9, values between them, and one above the largest."""

OUR_BATCHES = (256, 512, 1024, 2048)
OUR_BATCH_SCALES = (1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
OUR_BATCH_DATA = ("CIFAR100",)
"""Our grid of Fig. 4: batch sizes from the recipe's upwards, and steps of s for a logarithmic axis."""

OUR_CURVED_SCALES = (1.0, 5.0, 20.0, 40.0)
"""Our scales of Fig. 6: MoCo's in Tab. 7, and two below them."""

_UNKNOWN = "The values are not in the text: unknown."
_PROBE = "By which evaluation the accuracy was measured is not stated; ours is the linear probe."


def _points(
    key: str, methods: Iterable[str], datas: Iterable[str], grid: Iterable[dict[str, float]], ours: Iterable[str]
) -> Iterator[Cell]:
    """Yield one cell for each method, data set and point of the grid. `ours` names the swept parameters that are our
    choice.
    """
    points = list(grid)
    chosen = set(ours)
    for method, data, at in product(methods, datas, points):
        # these two values mean no effect, so they are our base line, whoever chose the grid
        baseline = math.isinf(at.get("c", 1.0)) or at.get("m1") == 0.0
        row, column = f"{method}, {data}", ", ".join(f"{name} = {show(value)}" for name, value in at.items())
        path = "/".join((method, data, *(f"{name}={_plain(value)}" for name, value in at.items())))
        yield Cell(
            key,
            path,
            row,
            column,
            run(method, data, spell(at), batch=int(at.get("batch", BATCH))),
            "",
            "probe",
            "",
            None,
            f"{number(key)}, {row}, {column}",
            ours=baseline or not chosen.isdisjoint(at),
            at=at,
        )


def _plain(value: float) -> str:
    """Write a parameter for a path, in which / is a separator."""
    return show(value).replace("1/3", "0.333")


GRADIENT = Table(
    "fig1",
    "Gradient without margins",
    "figure",
    "Gradient magnitudes of contrastive learning loss without margins (Eq. 3). beta, and tau was set to 1, and 0.25, "
    "respectively. q^+ and q^- denote the estimated probability of positive and negative samples. theta^+ and theta^- "
    "refer to the angles of positive and negative samples.",
    "fig:org-grad",
    (),
    "A map of an equation, no run: marginlens.lens.theory.figure_1.",
    fixed={"beta": 1.0, "tau": 0.25},
)
MULTIPLIERS = Table(
    "fig2",
    "Multipliers of the angular margin",
    "figure",
    "The gradient multipliers pertaining to the angular margin m_1 (Eq. 6). beta, tau, and m_1 was set to 1, 0.25, and "
    "0.4, respectively. The left figure shows the map that applies only to positive samples, while the right figure "
    "illustrates the multiplier map that applies to both positive and negative samples. The green lines indicate where "
    "the weight is 1. Best viewed in color.",
    "fig:m1-scale",
    (),
    "A map of an equation, no run: marginlens.lens.theory.figure_2.",
    fixed={"beta": 1.0, "tau": 0.25, "m1": 0.4},
)
SCALE = Table(
    "fig3",
    "Emphasis s",
    "figure",
    "Top 1 accuracy when emphasizing positive samples using s (Eq. 8).",
    "fig:pos-emp",
    (
        *_points("fig3", ("MoCo",), DATA, ({"s": s} for s in OUR_SCALES["MoCo"]), ours=("s",)),
        *_points("fig3", ("SimCLR",), DATA, ({"s": s} for s in OUR_SCALES["SimCLR"]), ours=("s",)),
    ),
    f"{_UNKNOWN} So are the grid of s and the data sets: ours. {_PROBE}",
    x="s",
    series="method",
    x_log=True,
    given={"method": "Sec. 5.2"},
)
BATCH_SIZE = Table(
    "fig4",
    "SimCLR: batch size and s",
    "figure",
    "Relationship between the batch size and the positive sample gradient multiplier s in SimCLR. The x axis is for s "
    "and is in log scale.",
    "fig:reb-simclr-bs",
    tuple(
        _points(
            "fig4",
            ("SimCLR",),
            OUR_BATCH_DATA,
            ({"batch": float(b), "s": s} for b in OUR_BATCHES for s in OUR_BATCH_SCALES),
            ours=("batch", "s"),
        )
    ),
    f"{_UNKNOWN} So are the batch sizes, the grid of s, the data set, and whether the learning rate grew with the "
    f"batch size: ours; the learning rate stays. {_PROBE}",
    x="s",
    series="batch",
    x_log=True,
    given={"method": "Fig. 4, caption"},
)
CURVATURE = Table(
    "fig5",
    "Curvature c",
    "figure",
    "Controlling positive sample gradient scale curvatures using c (Eq. 11). s was set to one.",
    "fig:curve-acc",
    tuple(_points("fig5", ("MoCo", "SimCLR", "BYOL"), DATA, ({"c": c} for c in (*CURVATURES, math.inf)), ours=())),
    f"{_UNKNOWN} So are the methods and data sets ('various'): ours, all of them. c = inf, no curvature, is our base "
    f"line. {_PROBE}",
    x="c",
    series="method",
    x_log=True,
    given={"c": "Sec. 5.3"},
    fixed={"s": 1.0},
)
SCALE_AND_CURVATURE = Table(
    "fig6",
    "MoCo: s and c",
    "figure",
    "Controlling both the scale s and curvature c of MoCo (Eq. 11).",
    "fig:sc-curve-acc",
    tuple(
        _points(
            "fig6",
            ("MoCo",),
            DATA,
            ({"s": s, "c": c} for s in OUR_CURVED_SCALES for c in (*CURVATURES, math.inf)),
            ours=("s",),
        )
    ),
    f"{_UNKNOWN} So are the grid of s, the data sets, and which of s and c is on the axis: ours. c = inf, no "
    f"curvature, is our base line. {_PROBE}",
    x="c",
    series="s",
    x_log=True,
    given={"method": "Fig. 6, caption", "c": "Sec. 5.3"},
)
RATIO = Table(
    "fig7",
    "Ratio m1",
    "figure",
    "The 1 accuracy when scaling gradients by the ratio (Sec. 5.4).",
    "fig:third-ratio",
    tuple(_points("fig7", ("MoCo", "SimCLR"), DATA, ({"m1": m1} for m1 in (0.0, *RATIO_MARGINS)), ours=())),
    f"{_UNKNOWN} So are the methods and data sets: ours, those of Tab. 8. m1 = 0 is our base line. Whether the ratio "
    f"scales the positive's gradient (Alg. 4) or the row's (Sec. 5.4) is not known. {_PROBE}",
    x="m1",
    series="method",
    given={"m1": "Sec. 5.4"},
)
RATIO_MAPS = Table(
    "fig8",
    "The ratio",
    "figure",
    "Visualization of (p_ij - beta q_ij) / (p_ij - beta tilde q_ij). The green lines indicate where the ratio is one. "
    "m_1 and tau are the angular margin and temperature, respectively (Eq. 4).",
    "fig:appendix-the-ratio",
    (),
    "Maps of an equation, no run: marginlens.lens.theory.figure_ratio. Its values of m1 and tau are not in the text: "
    "unknown.",
)

TABLES = (GRADIENT, MULTIPLIERS, SCALE, BATCH_SIZE, CURVATURE, SCALE_AND_CURVATURE, RATIO, RATIO_MAPS)
