"""The result tables as printed: Tabs. 1 to 4, and the 1,000-epoch tables 9 and 10.

Each block has the layout of its table, so it can be compared by eye. Values of m1, m2, s and c come from the
hyper-parameter tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from marginlens.effects import Kind
from marginlens.paper.cells import Cell, Table, grid, number, published, show
from marginlens.paper.hyper import CURVES, IMAGENET, IMAGENET_STATED, MARGINS, RATIOS, SCALES, given
from marginlens.paper.recipe import DATA, run, spell, spell_attenuation

ROWS = {
    "": ("plain", None),
    "+ margins": ("margins", MARGINS),
    "+ pos.": ("pos", SCALES),
    "+ pos. & curv.": ("pos+curv", CURVES),
    "+ ratio.": ("ratio", RATIOS),
    "+ curv.": ("curv", CURVES),
}
"""A row of Tabs. 2 and 3 as printed: its name in a path, and the table of its parameters."""

_TARGETS = {"CIFAR100": "CIFAR10", "CIFAR10": "CIFAR100", "TinyImageNet": "STL10", "STL10": "TinyImageNet"}
"""Columns of the transfer tables, in their order: pre-trained on -> target."""

_ATTENUATION = """
    MoCo   | 0    | 89.413          | 60.956          | 87.629          | 42.133
           | 0.25 | 89.376 | 89.713 | 60.857 | 61.217 | 87.292 | 87.455 | 42.420 | 42.460
           | 1    | 89.743 | 89.633 | 60.997 | 61.263 | 87.329 | 87.442 | 42.797 | 42.510
    SimCLR | 0    | 89.653          | 62.655          | 87.188          | 44.184
           | 0.25 | 89.867 | 89.557 | 62.407 | 62.763 | 87.200 | 87.042 | 44.206 | 44.197
           | 1    | 89.735 | 89.767 | 62.840 | 62.800 | 87.300 | 87.317 | 44.260 | 44.260
"""

_PROBING = """
    MoCo           | 89.413 ± 0.109 | 60.956 ± 0.167 | 87.629 ± 0.175 | 42.133 ± 0.225
    + margins      | 89.840 ± 0.105 | 61.796 ± 0.254 | 87.688 ± 0.275 | 42.860 ± 0.280
    + pos.         | 90.663 ± 0.159 | 65.413 ± 0.205 | 90.357 ± 0.398 | 48.273 ± 0.405
    + pos. & curv. | 90.865 ± 0.025 | 66.095 ± 0.295 | 90.361 ± 0.057 | 48.503 ± 0.270
    + ratio.       | 90.100 ± 0.017 | 61.767 ± 0.040 | 88.000 ± 0.078 | 43.283 ± 0.031
    SimCLR         | 89.653 ± 0.207 | 62.655 ± 0.277 | 87.188 ± 0.145 | 44.184 ± 0.220
    + margins      | 90.447 ± 0.191 | 63.507 ± 0.414 | 87.430 ± 0.220 | 44.593 ± 0.410
    + pos.         | 89.695 ± 0.150 | 62.917 ± 0.302 | 87.284 ± 0.248 | 44.348 ± 0.295
    + pos. & curv. | 90.190 ± 0.067 | 63.503 ± 0.279 | 87.346 ± 0.156 | 44.376 ± 0.201
    + ratio.       | 89.920 ± 0.066 | 63.437 ± 0.045 | 87.658 ± 0.029 | 45.010 ± 0.040
    BYOL           | 90.283 ± 0.109 | 61.006 ± 0.140 | 87.546 ± 0.668 | 41.846 ± 0.097
    + curv.        | 90.485 ± 0.085 | 61.170 ± 0.340 | 88.051 ± 0.230 | 43.332 ± 0.564
"""

_TRANSFER = """
    MoCo           | 75.417 ± 0.241 | 43.590 ± 0.225 | 72.013 ± 0.250 | 31.140 ± 0.130
    + margins      | 75.380 ± 0.418 | 43.190 ± 0.255 | 72.154 ± 0.654 | 30.543 ± 0.160
    + pos.         | 78.847 ± 0.244 | 55.113 ± 0.434 | 78.100 ± 0.185 | 41.825 ± 0.431
    + pos. & curv. | 78.600 ± 0.042 | 52.940 ± 0.750 | 78.734 ± 0.040 | 41.777 ± 0.690
    + ratio.       | 76.027 ± 0.074 | 44.113 ± 0.012 | 72.567 ± 0.040 | 32.070 ± 0.050
    SimCLR         | 77.300 ± 0.014 | 48.845 ± 0.615 | 75.533 ± 0.026 | 35.108 ± 0.453
    + margins      | 76.377 ± 0.301 | 47.023 ± 0.219 | 75.617 ± 0.273 | 34.747 ± 0.430
    + pos.         | 76.893 ± 0.220 | 49.090 ± 0.262 | 75.675 ± 0.194 | 35.067 ± 0.380
    + pos. & curv. | 76.620 ± 0.190 | 48.683 ± 0.107 | 75.571 ± 0.220 | 34.280 ± 0.215
    + ratio.       | 77.440 ± 0.346 | 49.903 ± 0.025 | 75.983 ± 0.029 | 35.237 ± 0.032
    BYOL           | 75.086 ± 0.156 | 41.560 ± 0.321 | 69.433 ± 0.272 | 30.306 ± 0.309
    + curv.        | 74.820 ± 0.552 | 39.445 ± 0.078 | 72.442 ± 0.366 | 29.260 ± 0.028
"""

_IMAGENET = """
    MoCov3         | 100 | 68.9
    + pos. & curv. | 100 | 70.9
    SimCLR         | 100 | 64.7
    + pos. & curv. | 100 | 65.7
"""

_PROBING_1000 = """
     1 | 1000 | 91.142 ± 0.218 | 65.010 ± 0.215 | 90.280 ± 0.113 | 45.682 ± 0.151
    10 | 1000 | 92.386 ± 0.100 | 69.136 ± 0.421 | 90.633 ± 0.244 | 50.478 ± 0.237
    20 | 1000 | 92.624 ± 0.161 | 69.466 ± 0.183 | 90.860 ± 0.122 | 51.154 ± 0.184
    40 | 1000 | 92.648 ± 0.171 | 69.408 ± 0.342 | 91.098 ± 0.209 | 51.138 ± 0.362
"""

_TRANSFER_1000 = """
     1 | 1000 | 75.298 ± 0.310 | 40.696 ± 0.327 | 71.088 ± 0.361 | 30.358 ± 0.304
    10 | 1000 | 79.858 ± 0.255 | 53.028 ± 0.569 | 77.533 ± 0.101 | 38.702 ± 0.420
    20 | 1000 | 80.144 ± 0.105 | 54.515 ± 0.235 | 78.623 ± 0.193 | 40.464 ± 0.341
    40 | 1000 | 79.800 ± 0.162 | 54.612 ± 0.317 | 78.810 ± 0.198 | 40.600 ± 0.360
"""

_NO_IMAGENET = (
    "marginlens has neither ImageNet as a data set nor the official MoCo v3 and SimCLR recipes that the paper ran there"
)


def _where(key: str, row: str, column: str) -> str:
    return f"{number(key)}, row {row}, column {column}"


def _columns(measure: Literal["probe", "transfer"]) -> list[tuple[str, str, str]]:
    """Return (pre-trained on, the column as printed, our name of the target) for each column."""
    if measure == "probe":
        return [(data, data, "") for data in DATA]
    return [(data, f"{data} -> {target}", DATA[target]) for data, target in _TARGETS.items()]


def _attenuation(key: str, text: str) -> Iterator[Cell]:
    """Yield Tab. 1's cells. At alpha = 0 both types are the plain loss, so the table has one number for both."""
    method = ""
    for name, alpha, *numbers in grid(text):
        method = name or method
        kinds: tuple[Kind, ...] = ("I", "II") if float(alpha) else ("I",)
        places = [(data, kind) for data in DATA for kind in kinds]
        row = f"{method}, alpha = {alpha}"
        for (data, kind), printed in zip(places, numbers, strict=True):
            column, end = (f"{data}, type {kind}", f"/{kind}") if float(alpha) else (data, "")
            path, where = f"{method}/{data}/alpha={alpha}{end}", _where(key, row, column)
            settings = run(method, data, spell_attenuation(float(alpha), kind))
            at = {"alpha": float(alpha)}
            yield Cell(key, path, row, column, settings, "", "probe", "", published(printed), where, at=at)


def _methods(key: str, text: str, measure: Literal["probe", "transfer"]) -> Iterator[Cell]:
    method = ""
    for first, *numbers in grid(text):
        method, added = (method, first) if first.startswith("+") else (first, "")
        name, source = ROWS[added]
        row = f"{method} {added}".strip()
        for (data, column, to), printed in zip(_columns(measure), numbers, strict=True):
            at = given(source, method, data) if source else {}
            path, where = f"{method}/{column.replace(' ', '')}/{name}", _where(key, row, column)
            settings = run(method, data, spell(at))
            yield Cell(key, path, row, column, settings, "", measure, to, published(printed), where, at=at)


def _imagenet(key: str, text: str) -> Iterator[Cell]:
    method = ""
    for first, epochs, printed in grid(text):
        method, added = (method, first) if first.startswith("+") else (first, "")
        short, (name, _) = method.removesuffix("v3"), ROWS[added]
        row = f"{f'{method} {added}'.strip()}, Epoch = {epochs}"
        at = {"epochs": float(epochs), "batch": float(IMAGENET_STATED["batch"])} | (IMAGENET[short] if added else {})
        where = _where(key, row, "ImageNet")
        path = f"{short}/ImageNet/{name}"
        yield Cell(key, path, row, "ImageNet", None, _NO_IMAGENET, "probe", "", published(printed), where, at=at)


def _long(key: str, text: str, measure: Literal["probe", "transfer"]) -> Iterator[Cell]:
    for s, epochs, *numbers in grid(text):
        at = {"s": float(s), "epochs": float(epochs)}
        row = f"s = {s}, epochs = {epochs}"
        for (data, column, to), printed in zip(_columns(measure), numbers, strict=True):
            path, where = f"MoCo/{column.replace(' ', '')}/s={show(at['s'])}", _where(key, row, column)
            settings = run("MoCo", data, spell(at), epochs=int(epochs))
            yield Cell(key, path, row, column, settings, "", measure, to, published(printed), where, at=at)


_SPREAD = "What '±' means, and of how many seeds, is not stated."
_NORMS = "What MoCo's batch norms saw is not stated: here it is a quarter of the batch, and with bn_splits=1 all of it."
_SCOPE = "Whether the ratio scales the positive's gradient (Alg. 4) or the row's (Sec. 5.4) is not known."

ATTENUATION = Table(
    "tab1",
    "Attenuation",
    "table",
    "The effect of each gradient attenuation type and attenuation magnitude alpha.",
    "tab:attenuation",
    tuple(_attenuation("tab1", _ATTENUATION)),
    f"Without spread. The row alpha = 0 has the means of Tab. 2's plain rows. {_NORMS}",
)
PROBING = Table(
    "tab2",
    "Linear probing",
    "table",
    "Linear probing. pos. denotes emphasizing positive samples and curv. denotes controlling the curvature of positive "
    "gradient scales.",
    "tab:main_frozen",
    tuple(_methods("tab2", _PROBING, "probe")),
    f"{_SPREAD} {_NORMS} {_SCOPE}",
)
TRANSFER = Table(
    "tab3",
    "Transfer",
    "table",
    "Transfer learning. While freezing the pretrained backbone model, only the linear layer was tuned to the target "
    'dataset. It is expressed in the form of "pretrained dataset -> target dataset".',
    "tab:main-transfer",
    tuple(_methods("tab3", _TRANSFER, "transfer")),
    f"{_SPREAD} {_NORMS} {_SCOPE} "
    "The models are those of Tab. 2 (Sec. 5.6), with the parameters for the data set pre-trained on.",
)
IMAGENET_PROBING = Table(
    "tab4",
    "ImageNet",
    "table",
    "Top 1 accuracy of ResNet-50 when linear probing on ImageNet.",
    "tab:imagenet",
    tuple(_imagenet("tab4", _IMAGENET)),
    "Without spread. Appendix C.2 implies that SimCLR's baseline is the official number; of MoCo v3's it does not say.",
)
PROBING_1000 = Table(
    "tab9",
    "Linear probing after 1,000 epochs",
    "table",
    "Linear Probing of MoCov3.",
    "tab:linear-prob-1000",
    tuple(_long("tab9", _PROBING_1000, "probe")),
    f"{_SPREAD} {_NORMS}",
)
TRANSFER_1000 = Table(
    "tab10",
    "Transfer after 1,000 epochs",
    "table",
    "Transfer Learning of MoCov3.",
    "tab:transfer-1000",
    tuple(_long("tab10", _TRANSFER_1000, "transfer")),
    f"{_SPREAD} {_NORMS}",
)

TABLES = (ATTENUATION, PROBING, TRANSFER, IMAGENET_PROBING, PROBING_1000, TRANSFER_1000)
