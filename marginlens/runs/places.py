"""Options of `marginlens runs ...`: which store, which of its runs."""

from __future__ import annotations

from pydantic import Field

from marginlens.train.config import Settings


class StorePlace(Settings):
    """Where the runs are."""

    runs: str = Field("runs", description="Folder of runs.")


class Choice(StorePlace):
    """Which of them."""

    where: tuple[str, ...] = Field(
        (), description="Only runs that meet these, e.g. data=cifar10 'effect=emphasis*' 'epochs>=100' state=complete."
    )


class ListPlace(Choice):
    """In which order."""

    sort: str = Field("name", description="The field to sort by, such as loss, knn, probe, started or a setting.")
    reverse: bool = Field(False, description="The greatest first.")


class PrunePlace(Choice):
    """What to remove."""

    failed: bool = Field(False, description="Runs that failed.")
    interrupted: bool = Field(False, description="Runs that were interrupted, which --resume could have gone on with.")
    weights: bool = Field(False, description="Weights of complete runs; their records stay.")
    older_than: float = Field(0.0, ge=0, description="Only runs in which nothing was written for so many days.")
    yes: bool = Field(False, description="Remove them; otherwise it is only said what would be removed.")
