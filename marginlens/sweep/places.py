"""Options of `sweep` and `reproduce` that do not change a result: where runs are done, by whom, and for how long."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from marginlens.sweep.job import Kept, Where
from marginlens.train.check import MOST
from marginlens.train.config import Settings
from marginlens.train.places import Rates

AT_ONCE = 1000
"""Runs at once on one machine or one GPU: beyond that it is a mistake."""


class Executor(Kept):
    """By whom, how many at once and for how long runs are done."""

    beside: Rates = Field((), description="Learning rates to try beside each probe's own, on the same crops.")
    dry_run: bool = Field(False, description="Say what would be run, and stop.")
    limit_minutes: float = Field(0.0, ge=0, description="Stop cleanly after so many minutes; 0: when all is done.")
    most: int = Field(100, ge=1, description="More runs than this are confirmed first.")
    yes: bool = Field(False, description="Confirm that.")
    executor: Literal["local", "ray"] = Field("local", description="This machine, or a Ray cluster.")
    per_gpu: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on each GPU of this machine.")
    at_once: int = Field(1, ge=1, le=AT_ONCE, description="Runs at once on this machine's CPU, which share its cores.")
    address: str = Field("auto", description="Of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
    gpus_per_run: float = Field(
        0.0,
        ge=0,
        description="Ray: GPUs of a run, 0.5 for two on one; 0: one, if the cluster has any.",
    )
    cpus_per_run: float = Field(1.0, ge=0, description="Ray: cores of a run.")
    retries: int = Field(3, ge=0, description="Ray: how often a run that was lost with its node is begun again.")
    shared: bool = Field(False, description="Ray: --runs is storage that every node sees; else records come home.")

    @property
    def where(self) -> Where:
        """What a job is told of this."""
        return Where(**{name: getattr(self, name) for name in Kept.model_fields})


class SweepPlace(Executor):
    """What follows each run of a sweep."""

    probe: bool = Field(True, description="Probe every run on its own data.")
    probe_epochs: int = Field(0, ge=0, le=MOST, description="Epochs of each probe; 0: as the recipe has it.")
    holdout: int = Field(
        0, ge=0, le=MOST, description="Test probes on so many images kept back from training, not on the test set."
    )
    transfer_to: tuple[str, ...] = Field((), description="Data sets to transfer every run to.")


class GridPlace(SweepPlace):
    """The same with the grid, as a file has it."""

    grid: tuple[str, ...] = Field((), description='Settings and their values, such as "seed=0|1|2".')


class Selection(Settings):
    """Which cells of the paper, and how much of each."""

    only: tuple[str, ...] = Field(
        ("*",), min_length=1, description="Cells whose path matches one of these, e.g. 'MoCo/CIFAR10/*' '*/plain'."
    )
    seeds: int = Field(1, ge=1, le=1000, description="Seeds of each cell: 0, 1, ...")
    epochs: int = Field(0, ge=0, description="A shorter look: epochs of pre-training; 0: the paper's.")
    probe_epochs: int = Field(0, ge=0, description="Epochs of each probe; 0: the paper's.")
    readings: bool = Field(
        False,
        description="Also run the other readings of the paper's words: scope=row of the ratio, bn_splits=1 of MoCo v3.",
    )
    dataset: str = Field("", description="A rehearsal on these data, e.g. shapes, with their own recipe.")


class TableSelection(Selection):
    """The same with the tables, as a file has it."""

    tables: tuple[str, ...] = Field((), description="Tables and figures, such as tab2 or fig3.")
