"""What of the paper a run is: a cell as the paper has it, a shorter look at one, or a rehearsal on other data.

Neither a shorter look nor a rehearsal may stand beside a published number without its label: whoever shows a run asks
`match` or `measured` here.
"""

from __future__ import annotations

from typing import Any, Literal

from marginlens.paper import Cell
from marginlens.sweep.job import Evaluation, Job, evaluate, same
from marginlens.train.config import RECIPES, Pretrain, Probe, build
from marginlens.train.identity import NEUTRAL_EVALUATION
from marginlens.train.record import Run

Label = Literal["exact", "shorter", "rehearsal"]

REHEARSAL_EPOCHS = 10
"""Of a rehearsal that does not say how many."""

_OF_THE_DATA = ("split", "size", "stem", "limit", "warmup")
"""Settings that belong to a cell's data, and go with them."""


def variants(cell: Cell, epochs: int | None = None, dataset: str | None = None) -> dict[str, Any]:
    """Settings for `build(Pretrain, ...)`, without a seed: the cell's, or with fewer epochs, or on other data.

    Other data bring what their recipe sets (encoder, batch, ...), in place of the cell's.
    """
    if cell.settings is None:
        raise ValueError(f"{cell.address} cannot be run: {cell.why_not}")
    own: Pretrain = build(Pretrain, cell.settings)
    if dataset and dataset != own.data:
        gone = {*_OF_THE_DATA, *RECIPES.get(own.data, {}), *RECIPES.get(dataset, {}), "data", "epochs"}
        kept = {name: value for name, value in cell.settings.items() if name not in gone}
        return kept | {"data": dataset, "epochs": REHEARSAL_EPOCHS if epochs is None else epochs}
    if epochs is None or epochs == own.epochs:
        return dict(cell.settings)
    if epochs > own.epochs:
        raise ValueError(
            f"epochs is {epochs}, and {cell.address} has {own.epochs}: --epochs is for a shorter look; "
            f"marginlens sweep runs any settings"
        )
    return dict(cell.settings) | {"epochs": epochs, "warmup": min(own.warmup, epochs // 4)}


def follows(cell: Cell, dataset: str | None = None, probe_epochs: int | None = None) -> Evaluation:
    """The evaluation that gives a cell's number."""
    if cell.measure == "probe":
        data = dataset or str(build(Pretrain, variants(cell)).data)
        return evaluate("probe", data, probe_epochs)
    return evaluate("transfer", dataset or cell.to, probe_epochs)


def job(
    cell: Cell,
    seed: int,
    epochs: int | None = None,
    dataset: str | None = None,
    probe_epochs: int | None = None,
) -> Job:
    """What to do for one seed of a cell."""
    settings = build(Pretrain, variants(cell, epochs, dataset) | {"seed": seed})
    return Job(settings=settings, evaluations=(follows(cell, dataset, probe_epochs),))


def match(cell: Cell, run: Run) -> Label | None:
    """What a run is to a cell, by its settings: any seed, everything else counts."""
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


def measured(cell: Cell, run: Run) -> tuple[dict[str, Any], Label] | None:
    """The record of a run's evaluation that stands for a cell, and the label that it must carry.

    A probe of fewer epochs than the cell's makes an exact run a shorter look. Of several, the longest probe counts.
    """
    label = match(cell, run)
    if label is None:
        return None
    wanted = follows(cell, run.settings.data if label == "rehearsal" else None)
    best: tuple[dict[str, Any], Label] | None = None
    for found in run.evaluations:
        if found.get("kind") != wanted.kind or found.get("data") != wanted.data:
            continue
        probe: Probe = build(Probe, NEUTRAL_EVALUATION | found["settings"])
        epochs, asked = probe.epochs, wanted.settings.epochs
        if epochs > asked or probe != wanted.settings.model_copy(update={"epochs": epochs}):
            continue
        if best is None or epochs > best[0]["settings"]["epochs"]:
            best = found, "shorter" if epochs < asked and label == "exact" else label
    return best


def _rehearsed(cell: Cell, ran: Pretrain) -> Pretrain | None:
    """The rehearsal of a cell on a run's data; None where that data cannot carry it."""
    try:
        settings: Pretrain = build(Pretrain, variants(cell, ran.epochs, ran.data))
    except ValueError:
        return None
    return settings


def _alike(one: Pretrain | None, other: Pretrain) -> bool:
    """The same but for the seed."""
    return one is not None and same(one.model_copy(update={"seed": other.seed})) == same(other)
