"""Evaluations of a frozen backbone, by name: each is one file, and one line here (docs/developing/evaluations.md).

An evaluation's file has the settings that determine its number, a function that measures, and an `EVALUATION` that says
how the number is shown. Its docstring is what `marginlens NAME --help` prints. Commands, the files of `evaluations/`,
the columns of `marginlens runs`, sweeps and reports follow from it.
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
"""The evaluation that a run is expected to have, and that follows each run of a sweep."""


class Task(NamedTuple):
    """What is measured, and on what."""

    backbone: nn.Module
    """Frozen: its checksum is compared before and after."""
    feed: Feed
    size: int
    """Side of the images in pre-training, in pixels."""
    precision: torch.dtype
    display: Display


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: its settings, how it is measured, how its number is shown."""

    settings: type[Settings]
    measure: Callable[[Task, Sequence[Any]], Mapping[Any, dict[str, Any]]]
    """Returns the numbers of each settings, top1 among them. Several settings differ in their learning rate alone; one
    that diverged to NaN is left out."""
    title: str = ""
    """The heading of its column, if that is not its name."""
    elsewhere: bool = False
    """True if it is made on other data than the run learned from."""
    needs: tuple[str, ...] = ()
    """Numbers besides top1 that every record of it has."""
    how: Callable[[Any], str] = lambda record: ""
    """Returns in a few words how a record was made."""
    remark: Callable[[Any], str] = lambda record: ""
    """Returns a warning about a record."""

    @property
    def rated(self) -> bool:
        """True if it has a learning rate: several can then be tried beside each other."""
        return "lr" in self.settings.model_fields


def get(name: str) -> Evaluation:
    """Return the evaluation of that name."""
    if name not in MODULES:
        close = get_close_matches(name, MODULES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(MODULES)}"
        raise ValueError(f"there is no evaluation {name[:80]!r}; {hint}")
    found: Evaluation = importlib.import_module(MODULES[name]).EVALUATION
    return found


def usual(name: str, data: str, given: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of an evaluation on a data set: what is given, else the recipe's, else the defaults."""
    from marginlens.settings import build

    model = get(name).settings
    found: Settings = build(model, {**model.recipes.get(data, {}), **(given or {})})
    return found


def titles() -> dict[str, str]:
    """Return the headings of the evaluations that a run has on its own data, by their names."""
    return {name: get(name).title or name for name in MODULES if not get(name).elsewhere}
