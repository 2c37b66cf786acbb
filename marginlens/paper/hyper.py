"""The hyper-parameter tables (Tabs. 5 to 8), and the ImageNet settings of Appendix C.2.

Every value of m1, m2, s and c behind Tabs. 2 to 4 is here. The cells of those tables read it from here.
"""

from __future__ import annotations

from marginlens.paper.cells import Table, Value, number
from marginlens.paper.recipe import DATA


def _table(key: str, title: str, caption: str, label: str, columns: dict[str, str], rows: str, note: str = "") -> Table:
    """Build a table from its layout. Each method is named in the first row of its block; `columns` maps symbol to
    heading.
    """
    values: list[Value] = []
    printed = ""
    for line in rows.strip().splitlines():
        words = line.split()
        if words[0] not in DATA:
            printed, *words = words
        data, *numbers = words
        for (symbol, column), text in zip(columns.items(), numbers, strict=True):
            row = f"{printed}, {data}"
            address = f"{number(key)}, row {row}, column {column}"
            value = None if text == "-" else float(text)
            values.append(Value(printed.removesuffix("v3"), data, symbol, value, row, column, address))
    return Table(key, title, "hyper-parameters", caption, label, (), note, tuple(values))


MARGINS = _table(
    "tab5",
    "Margins",
    "Margin values for four datasets (Tab. 2).",
    "tab:hparam_margins",
    {"m1": "m1", "m2": "m2"},
    """
    MoCov3  CIFAR10       0.1  0.4
            CIFAR100      0.5  0.7
            STL10         0.4  0.6
            TinyImageNet  0.1  0.4
    SimCLR  CIFAR10       0.5  0.4
            CIFAR100      0.6  0.6
            STL10         0.0  0.2
            TinyImageNet  0.0  0.8
    """,
    "The caption names Tab. 2 alone; Sec. 5.6 tests each model in both settings, so Tab. 3 has the same margins.",
)

SCALES = _table(
    "tab6",
    "Scales s without curvature",
    "Scaling factors of pos. only models.",
    "tab:hparam_pos",
    {"s": "pos. (s)"},
    """
    MoCov3  CIFAR10       20
            CIFAR100      20
            STL10         40
            TinyImageNet  20
    SimCLR  CIFAR10       1.125
            CIFAR100      1.0625
            STL10         1.0625
            TinyImageNet  1.0625
    """,
)

CURVES = _table(
    "tab7",
    "Scales s with curvatures c",
    "Scaling factors and curvature factors.",
    "tab:hparam_pos_curv",
    {"s": "pos. (s)", "c": "curv. (c)"},
    """
    MoCov3  CIFAR10       20     0.7
            CIFAR100      40     1
            STL10         40     2.5
            TinyImageNet  40     2.5
    SimCLR  CIFAR10       2.5    0.7
            CIFAR100      2      0.7
            STL10         1.25   0.7
            TinyImageNet  1.125  1.0
    BYOL    CIFAR10       -      1.0
            CIFAR100      -      2.5
            STL10         -      5.0
            TinyImageNet  -      2.5
    """,
    "Tab. 8 has the same LaTeX label, so every reference to this table prints as one to Tab. 8.",
)

RATIOS = _table(
    "tab8",
    "Margins m1 of the ratio",
    "Angular margin m1 to calculate the ratio (Tabs. 2 and 3)",
    "tab:hparam_pos_curv",
    {"m1": "m1"},
    """
    MoCov3  CIFAR10       1.6
            CIFAR100      1.6
            STL10         0.4
            TinyImageNet  1.6
    SimCLR  CIFAR10       0.2
            CIFAR100      0.2
            STL10         0.4
            TinyImageNet  0.2
    """,
    "Carries the label of Tab. 7.",
)

IMAGENET = {"MoCo": {"s": 10.0, "c": 1.5}, "SimCLR": {"s": 2.0, "c": 1.0}}
"""Appendix C.2: scale and curvature behind Tab. 4."""

IMAGENET_STATED: dict[str, float | str] = {"encoder": "resnet50", "epochs": 100, "probe_epochs": 90, "batch": 4096}
"""Sec. 5.1 and Appendix C.2. The rest is from the official MoCo v3 and SimCLR; SimCLR has a two-layer projector."""

TABLES = (MARGINS, SCALES, CURVES, RATIOS)


def given(table: Table, method: str, data: str) -> dict[str, float]:
    """Return a table's values for a method on a data set, by symbol. A dash is left out."""
    found = [v for v in table.values if (v.method, v.data) == (method, data)]
    if not found:
        raise ValueError(f"{table.name} has no row for {method} on {data}; its rows are {_rows(table)}")
    return {v.symbol: v.value for v in found if v.value is not None}


def _rows(table: Table) -> str:
    return "; ".join(dict.fromkeys(v.row for v in table.values))
