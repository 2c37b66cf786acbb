"""Relate a run to the paper's cells: a cell itself ("exact"), a shorter look at one, or a rehearsal on other data.

A shorter look or a rehearsal must never stand beside a published number without its label. So code that shows a run
asks `match` or `standing` here.
"""

from __future__ import annotations

from typing import Any, Literal

from marginlens import evals
from marginlens.data.sources import recipes
from marginlens.paper.cells import Cell
from marginlens.runs.config import NUMERICS, Pretrain
from marginlens.runs.evaluate import Wanted
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.settings import build

Label = Literal["exact", "shorter", "rehearsal"]
REHEARSAL_EPOCHS = 10
"""Default epochs of a rehearsal."""
_OF_THE_DATA = ("split", "size", "stem", "limit", "warmup")
"""Settings that belong to a cell's data, and change with them."""
_SWEPT = tuple(name for name in Pretrain.model_fields if name != "epochs")
"""Settings that a rehearsal keeps if they define the cell, as the batch size does in Fig. 4."""


def variants(cell: Cell, epochs: int | None = None, dataset: str | None = None) -> dict[str, Any]:
    """Return settings for `build(Pretrain, ...)` without a seed: the cell's, perhaps with fewer epochs or other data.

    Other data bring their recipe's settings (encoder, batch, ...) in place of the cell's, except for those that the
    cell sweeps.
    """
    if cell.settings is None:
        raise ValueError(f"{cell.address} cannot be run: {cell.why_not}")
    own: Pretrain = build(Pretrain, cell.settings)
    if dataset and dataset != own.data:
        asked = recipes("pretrain")
        gone = {*_OF_THE_DATA, *asked.get(own.data, {}), *asked.get(dataset, {}), "data", "epochs"}
        kept = {name: value for name, value in cell.settings.items() if name not in gone}
        kept |= {name: getattr(own, name) for name in cell.at if name in _SWEPT}
        return kept | {"data": dataset, "epochs": REHEARSAL_EPOCHS if epochs is None else epochs}
    if epochs is None or epochs == own.epochs:
        return dict(cell.settings)
    if epochs > own.epochs:
        raise ValueError(
            f"epochs is {epochs}, but {cell.address} has {own.epochs}: --epochs is for a shorter look; "
            f"marginlens sweep runs any settings"
        )
    return dict(cell.settings) | {"epochs": epochs, "warmup": min(own.warmup, epochs // 4)}


def follows(cell: Cell, dataset: str | None = None, probe_epochs: int | None = None) -> Wanted:
    """Return the evaluation that gives a cell's number, or a shorter one."""
    data = dataset or cell.to or str(build(Pretrain, variants(cell)).data)
    settings = evals.usual(cell.measure, data)
    if probe_epochs is not None:
        if probe_epochs > (most := getattr(settings, "epochs", 0)):
            raise ValueError(
                f"probe_epochs is {probe_epochs}, but {cell.address} has {most} on {data}: --probe-epochs is for a "
                f"shorter look; marginlens sweep runs any settings"
            )
        settings = settings.model_copy(update={"epochs": probe_epochs})
    return Wanted(kind=cell.measure, data=data, settings=settings)


def match(cell: Cell, run: Run) -> Label | None:
    """Return a run's relation to a cell, by its settings. The seed does not matter; everything else does."""
    if cell.settings is None:
        return None
    own: Pretrain = build(Pretrain, cell.settings)
    ran = run.settings
    if _alike(own, ran):
        return "exact"
    if ran.data == own.data:
        short = ran.epochs < own.epochs and _alike(build(Pretrain, variants(cell, ran.epochs)), ran)
        return "shorter" if short else None
    return "rehearsal" if _alike(_rehearsed(cell, ran), ran) else None


def standing(cell: Cell, run: Run, label: Label) -> list[Evaluation]:
    """Return the run's evaluations that can stand for a matching cell, best first.

    Best is the longest probe, which may be shorter than the cell's. Among equals it is the latest, because data of the
    same name may have changed in between.
    """
    wanted = follows(cell, run.settings.data if label == "rehearsal" else None)
    most = getattr(wanted.settings, "epochs", 0)
    found = []
    for one in run.evaluations:
        epochs = getattr(one.settings, "epochs", 0)
        alike = one.settings.model_copy(update={"epochs": most}) if most else one.settings
        if (one.kind, one.data, alike) == (wanted.kind, wanted.data, wanted.settings) and epochs <= most:
            found.append(one)
    return sorted(found, key=worth, reverse=True)


def worth(one: Evaluation) -> tuple[int, bool, str]:
    """Return a sort key: the greatest evaluation counts."""
    return getattr(one.settings, "epochs", 0), one.numerics == NUMERICS, one.time


def _rehearsed(cell: Cell, ran: Pretrain) -> Pretrain | None:
    """Return the rehearsal of a cell on a run's data, or None if the cell's settings do not fit those data."""
    try:
        settings: Pretrain = build(Pretrain, variants(cell, ran.epochs, ran.data))
    except ValueError:
        return None
    return settings if settings.size else settings.model_copy(update={"size": ran.size})  # a folder's own


def _alike(one: Pretrain | None, other: Pretrain) -> bool:
    """True if the settings are the same but for the seed."""
    return one is not None and one.model_copy(update={"seed": other.seed}) == other
