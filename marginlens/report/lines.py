"""The parts of a report: a cell of the paper with its runs, one number per seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from marginlens.paper import Cell, Table
from marginlens.runs.config import NUMERICS
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.runs.seeds import std_of


@dataclass(frozen=True)
class Value:
    """The number of one seed, and the evaluation that measured it."""

    run: Run
    one: Evaluation

    @property
    def top1(self) -> float:
        return self.one.top1

    @property
    def diverged(self) -> bool:
        """True if its probe diverged."""
        return self.one.diverged


@dataclass(frozen=True)
class Partial:
    """A run without a number, and the reason."""

    run: Run
    said: str


@dataclass(frozen=True)
class Line:
    """A cell of the paper and its runs, one per seed. A label marks runs of fewer epochs or other data."""

    cell: Cell
    label: str = ""
    values: tuple[Value, ...] = ()
    partial: tuple[Partial, ...] = ()
    plain: Line | None = None
    """The line of the same cell without its effect, if that has been run."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(sorted([v.run for v in self.values] + [p.run for p in self.partial], key=lambda run: run.order))

    @property
    def mean(self) -> float | None:
        return statistics.fmean(v.top1 for v in self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return std_of([v.top1 for v in self.values])

    @property
    def diverged(self) -> int:
        """The number of seeds whose probe diverged."""
        return sum(value.diverged for value in self.values)

    @property
    def difference(self) -> float | None:
        """Our mean minus the published number."""
        mean, published = self.mean, self.cell.published
        return None if mean is None or published is None or self.label else mean - published.mean

    @property
    def gain(self) -> float | None:
        """Our mean minus our mean without the effect."""
        mean, plain = self.mean, self.plain.mean if self.plain else None
        return None if mean is None or plain is None else mean - plain

    @property
    def gain_diverged(self) -> bool:
        """True if a probe of either mean diverged."""
        return self.plain is not None and bool(self.diverged or self.plain.diverged)

    @property
    def published_gain(self) -> float | None:
        """The published number minus the published number without the effect."""
        published, plain = self.cell.published, self.plain.cell.published if self.plain else None
        return None if published is None or plain is None else published.mean - plain.mean


@dataclass(frozen=True)
class Gathered:
    """Everything that a report shows."""

    tables: dict[str, Table]
    lines: dict[str, list[Line]]
    """A line per cell of each table."""
    looks: dict[str, list[Line]]
    """Shorter looks and rehearsals of each table's cells."""
    runs: list[Run]
    """Every readable run; with --only, those of the chosen tables."""
    bad: list[tuple[str, str]]
    """Unreadable folders, and why."""
    copies: dict[str, list[str]]
    """Other folders of the same run, by its key."""
    paper: bool = False
    """True if tables and rows without a run are shown too."""

    @property
    def shown(self) -> dict[str, list[Line]]:
        """Return the lines to show of each table to show."""
        found = {key: lines if self._whole(key) else [x for x in lines if x.runs] for key, lines in self.lines.items()}
        return {key: lines for key, lines in found.items() if lines or self._whole(key)}

    @property
    def diverged(self) -> int:
        """The number of evaluations that diverged."""
        return sum(one.diverged for run in self.runs for one in run.evaluations)

    def _whole(self, key: str) -> bool:
        """True if a table is shown with every row. A figure is too if it is a map of an equation, without points."""
        table = self.tables[key]
        return self.paper and (table.kind != "figure" or not table.cells)


def cells_of(lines: Iterable[Line]) -> int:
    """Count cells, each once whatever its readings."""
    return len({line.cell.address for line in lines})


def numerics_of(run: Run) -> str:
    """Return a note if a run's numbers would come out otherwise today, else ""."""
    return "" if run.numerics == NUMERICS else f"numerics {run.numerics}, not {NUMERICS}"


def short(run: Run) -> str:
    """Return the state of a run in a few words."""
    if run.state == "interrupted":
        return f"interrupted at epoch {run.epochs_done} of {run.settings.epochs}"
    return run.state


def ending(run: Run) -> str:
    """Return the state of a run, and why it failed."""
    return f"failed: {run.why}" if run.state == "failed" else short(run)
