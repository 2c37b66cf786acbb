"""Evaluations of a frozen backbone, by name. Each is one file, and one line here (docs/developing/evaluations.md).

An evaluation's file holds its settings, a function that measures, and an `EVALUATION` that says how to show the number.
`marginlens NAME --help` prints the file's docstring. Commands, the files of `evaluations/`, the columns of `marginlens
runs`, sweeps and reports follow from this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from marginlens.data.feed import Feed
    from marginlens.output import Display
    from marginlens.settings import Settings

MODULES = {
    "knn": "marginlens.evals.knn",
    "probe": "marginlens.evals.probe",
    "transfer": "marginlens.evals.transfer",
}
HEADLINE = "probe"
"""The evaluation that every run should have, and that follows each run of a sweep."""


class Task(NamedTuple):
    """The backbone to measure, and the data."""

    backbone: nn.Module
    """Frozen: its checksum is compared before and after."""
    feed: Feed
    size: int
    """Side of the images in pre-training, in pixels."""
    precision: torch.dtype
    display: Display


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: its settings, its measurement and its display."""

    settings: type[Settings]
    measure: Callable[[Task, Sequence[Any]], Mapping[Any, dict[str, Any]]]
    """Returns the numbers, including top1, for each of the settings, which differ only in their learning rate. Settings
    that diverged to NaN are left out."""
    title: str = ""
    """Heading of its column, if that differs from its name."""
    elsewhere: bool = False
    """True if it uses other data than the run learned from."""
    needs: tuple[str, ...] = ()
    """Numbers besides top1 that every record has."""
    how: Callable[[Any], str] = lambda record: ""
    """Returns in a few words how a record was made."""
    remark: Callable[[Any], str] = lambda record: ""
    """Returns a warning about a record."""

    @property
    def rated(self) -> bool:
        """True if it has a learning rate, so that several rates can be tried side by side."""
        return "lr" in self.settings.model_fields


def get(name: str) -> Evaluation:
    """Return the evaluation with this name."""
    if name not in MODULES:
        close = get_close_matches(name, MODULES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(MODULES)}"
        raise ValueError(f"there is no evaluation {name[:80]!r}; {hint}")
    found: Evaluation = importlib.import_module(MODULES[name]).EVALUATION
    return found


def usual(name: str, data: str, given: Mapping[str, Any] | None = None) -> Settings:
    """Return an evaluation's settings on a data set: given values, then the recipe's, then the defaults."""
    from marginlens.settings import build

    model = get(name).settings
    found: Settings = build(model, {**model.recipes.get(data, {}), **(given or {})})
    return found


def titles() -> dict[str, str]:
    """Return, by name, the headings of the evaluations on a run's own data."""
    return {name: get(name).title or name for name in MODULES if not get(name).elsewhere}
