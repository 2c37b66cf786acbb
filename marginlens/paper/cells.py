"""The registry's types: a published number, a cell, a value of a hyper-parameter table, a table or figure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from marginlens.paper.recipe import others

Settings = Mapping[str, Any]
Kind = Literal["table", "figure", "hyper-parameters"]

_PRINTED = re.compile(r"(\d+\.(\d+))(?: ± (\d+\.\d+))?")


@dataclass(frozen=True)
class Published:
    """A number as printed. `spread` follows "±": the paper does not say what it is, or of how many seeds."""

    mean: float
    spread: float | None
    digits: int = 3
    """Decimals as printed."""

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.spread is None else f"{mean} ± {self.spread:.{self.digits}f}"


@dataclass(frozen=True)
class Cell:
    """One number of the paper, or one point of a figure: its settings, its published value and its address."""

    table: str
    path: str
    """Unique within the table: method/data/row."""
    row: str
    column: str
    settings: Settings | None = field(hash=False)
    """For `Pretrain`, without a seed. None if marginlens cannot run the cell."""
    why_not: str
    """Why marginlens cannot run it, or ""."""
    measure: Literal["probe", "transfer"]
    to: str
    """The data set transferred to; "" for a probe."""
    published: Published | None
    """None: the number is not in the paper's text."""
    address: str
    ours: bool = False
    """True if a swept value (s, c, m1, batch size) is our choice, because the paper's text does not give it."""
    at: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parameters of this cell, by the paper's symbols (and batch, epochs): a figure's coordinates."""
    reading: str = ""
    """Which of the paper's readings this is, named by its difference from the first; "" for the first."""

    @property
    def alternatives(self) -> Mapping[str, Settings]:
        """Settings of other readings of the paper's words, by their difference; empty if there is one reading."""
        return {} if self.reading or self.settings is None else others(self.settings)


@dataclass(frozen=True)
class Value:
    """One value of a hyper-parameter table. None stands for a dash."""

    method: str
    data: str
    symbol: str
    value: float | None
    row: str
    column: str
    address: str


@dataclass(frozen=True)
class Table:
    """A table or a figure of the paper."""

    key: str
    title: str
    kind: Kind
    caption: str
    """As printed, with formulas in words."""
    label: str
    """The label in the LaTeX source. Two tables have the same one."""
    cells: tuple[Cell, ...]
    note: str
    """Details that the paper leaves open."""
    values: tuple[Value, ...] = ()
    """Values of a hyper-parameter table."""
    x: str = ""
    """Key in `Cell.at` of a figure's horizontal axis."""
    series: str = ""
    """Meaning of one line in a figure: a key in `Cell.at`, or "method"."""
    x_log: bool = False
    given: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where the text gives an axis's values, by key in `Cell.at`, "method" or "data". Other axes are our choice."""
    fixed: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parameters that the caption fixes."""

    @property
    def name(self) -> str:
        return number(self.key)


def number(key: str) -> str:
    """Return a table's name: tab2 -> Tab. 2."""
    return f"{key[:3].capitalize()}. {key[3:]}"


def show(value: float) -> str:
    """Write a parameter as the paper does: 20, 1.0625, inf, 1/3."""
    return "1/3" if math.isclose(value, 1 / 3) else f"{value:g}"


def grid(text: str) -> list[list[str]]:
    """Return the cells of a table that is written with | between them."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def published(text: str) -> Published:
    """Parse "89.413 ± 0.109" or "68.9"."""
    found = _PRINTED.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a published number; write it as printed, such as '89.413 ± 0.109'")
    mean, decimals, spread = found.groups()
    return Published(float(mean), float(spread) if spread else None, len(decimals))
