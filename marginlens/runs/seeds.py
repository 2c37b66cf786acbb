"""The mean and spread of a number over the seeds of a setting, and how both are written."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from marginlens.methods import METHODS
from marginlens.runs.query import ALWAYS, spelled
from marginlens.runs.run import Run

ABOUT = "mean ± sample standard deviation over seeds; one seed has no deviation"


class Top(NamedTuple):
    """The number of one seed."""

    top1: float
    diverged: bool = False
    """True if its probe diverged. The number then says nothing of the backbone."""


def std_of(numbers: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None for one number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def number(mean: float | None, std: float | None = None) -> str:
    """Write 89.90 ± 0.12; "" for None."""
    if mean is None:
        return ""
    return f"{rounded(mean)}" if std is None else f"{rounded(mean)} ± {rounded(std)}"


def rounded(value: float) -> Decimal:
    """Round to two places as by hand, half up: binary fractions would toss a coin. There is no minus zero."""
    return Decimal(repr(round(value, 9))).quantize(Decimal("0.01"), ROUND_HALF_UP) + 0


def over_seeds(tops: Sequence[Top], seeds: int) -> str:
    """Write the mean of the seeds that have a number: 60.40 (1 of 2 seeds), 31.20 ± 1.10 (2 diverged)."""
    numbers = [top.top1 for top in tops]
    if not numbers:
        return ""
    return noted(
        number(statistics.fmean(numbers), std_of(numbers)), len(tops), seeds, sum(top.diverged for top in tops)
    )


def facts(tops: Sequence[Top]) -> dict[str, float | int | None]:
    """Return the same as numbers."""
    numbers = [top.top1 for top in tops]
    found: dict[str, float | int | None] = {"mean": statistics.fmean(numbers), "std": std_of(numbers)}
    return found | {"seeds": len(tops), "diverged": sum(top.diverged for top in tops)}


def noted(text: str, have: int, seeds: int, diverged: int) -> str:
    """Return a mean with the seeds that it has no number of, and those that diverged."""
    notes = [f"{have} of {seeds} seeds"] if have < seeds else []
    if diverged:
        notes.append("diverged" if have == 1 else f"{diverged} diverged")
    return f"{text} ({', '.join(notes)})" if notes else text


def by_setting(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs that differ in their seed alone, each group by seed. Effects of one setting follow each other."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.family, []).append(run)
    return sorted(
        (sorted(group, key=lambda run: run.order) for group in groups.values()), key=lambda one: order(one[0])
    )


def order(run: Run) -> tuple[Any, ...]:
    """Sort by data, method, epochs, other settings, effect, plain first; numbers by size."""
    chosen = run.settings
    others = [(name, *_comparable(value)) for name, value in spelled(chosen).items() if name not in ALWAYS]
    method = list(METHODS).index(chosen.method)
    effect = [float(text) if i % 2 else text for i, text in enumerate(re.split(r"(\d+\.?\d*)", chosen.effect))]
    return chosen.data, method, chosen.epochs, len(others), others, chosen.effect != "plain", effect, run.family


def _comparable(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))
