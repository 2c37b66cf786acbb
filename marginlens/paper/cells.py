"""What the registry is made of: a published number, a cell, a value of a hyper-parameter table, a table or figure."""

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
    """A number as printed. `spread` is what follows "±": the paper says neither what that is nor of how many seeds."""

    mean: float
    spread: float | None
    digits: int = 3
    """Decimals as printed."""

    def __str__(self) -> str:
        mean = f"{self.mean:.{self.digits}f}"
        return mean if self.spread is None else f"{mean} ± {self.spread:.{self.digits}f}"


@dataclass(frozen=True)
class Cell:
    """One number of the paper, or one point of a figure: what to run for it, what was published, where it stands."""

    table: str
    path: str
    """Unique within the table: method/data/row."""
    row: str
    column: str
    settings: Settings | None = field(hash=False)
    """Of `Pretrain`, without a seed; None where marginlens cannot run it."""
    why_not: str
    measure: Literal["probe", "transfer"]
    to: str
    """The data set transferred to; "" for a probe."""
    published: Published | None
    """None: the number is not in the paper's text."""
    address: str
    ours: bool = False
    """Whether a swept value (of s, c, m1, the batch size) is our choice, because the paper's text does not give it."""
    at: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The parameters that make this cell, by the paper's symbols (and batch, epochs): a figure's coordinates."""
    reading: str = ""
    """Which of the paper's readings this is, by what differs from the first; "" for the first."""

    @property
    def alternatives(self) -> Mapping[str, Settings]:
        """Settings for other readings of the paper's words, by what differs; empty where there is one reading."""
        return {} if self.reading or self.settings is None else others(self.settings)


@dataclass(frozen=True)
class Value:
    """One value of a hyper-parameter table; None where the table has a dash."""

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
    """As printed, mathematics as words."""
    label: str
    """Its label in the LaTeX source; two tables have the same."""
    cells: tuple[Cell, ...]
    note: str
    """What the paper leaves open here."""
    values: tuple[Value, ...] = ()
    """Of a hyper-parameter table."""
    x: str = ""
    """Of a figure: the key in `Cell.at` of the horizontal axis."""
    series: str = ""
    """What one line is: a key in `Cell.at`, or "method"."""
    x_log: bool = False
    given: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where the text gives the values of an axis (a key in `Cell.at`, "method", "data"); an axis not here is ours."""
    fixed: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parameters that the caption fixes."""

    @property
    def name(self) -> str:
        return number(self.key)


def number(key: str) -> str:
    """tab2 -> Tab. 2."""
    return f"{key[:3].capitalize()}. {key[3:]}"


def show(value: float) -> str:
    """A parameter as the paper writes it: 20, 1.0625, inf, 1/3."""
    return "1/3" if math.isclose(value, 1 / 3) else f"{value:g}"


def grid(text: str) -> list[list[str]]:
    """The cells of a table that is written with | between them."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def published(text: str) -> Published:
    """Reads "89.413 ± 0.109" or "68.9"."""
    found = _PRINTED.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a published number; write it as printed, such as '89.413 ± 0.109'")
    mean, decimals, spread = found.groups()
    return Published(float(mean), float(spread) if spread else None, len(decimals))
