"""Options that do not change a result: where a command runs, what it writes, how often it looks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from marginlens.train.config import Settings, Size

Rates = tuple[Annotated[float, Field(ge=0)], ...]


class Machine(Settings):
    """Where to compute."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:1.")
    workers: int = Field(2, ge=0, description="Processes that decode a folder's images.")


class PretrainPlace(Machine):
    """Where and how a pre-training runs."""

    runs: str = Field("runs", description="Folder of runs; the run gets a folder of its own in it.")
    engine: Literal["auto", "eager", "graph"] = Field(
        "auto", description="The step as one CUDA graph, or one operation after another; auto: a graph if possible."
    )
    resume: bool = Field(False, description="Go on where the same run was interrupted; start it if it was not.")
    knn_every: int = Field(10, ge=0, description="Epochs between looks at nearest neighbours; 0: at the end only.")
    checkpoint_seconds: float = Field(60.0, ge=0, description="Time between checkpoints.")


class EvaluatePlace(Machine):
    """Where an evaluation runs."""

    again: bool = Field(False, description="Measure again what was measured before.")


class ProbePlace(EvaluatePlace):
    """What is tried beside it."""

    beside: Rates = Field((), description="Learning rates to try beside --lr, on the same crops: one probe of each.")


class TransferPlace(ProbePlace):
    """Where to transfer to."""

    to: str = Field(description="The prepared data set to transfer to.")


class EmbedPlace(Machine):
    """What to embed."""

    data: str = Field(description="A folder of images, or the name of a prepared data set.")
    out: str = Field(description="The safetensors file to write.")
    split: str = Field("", description="The split to embed; not given: the first one.")
    size: Size = Field(0, description="Side of the images in pixels; 0: as in pre-training.")
    resize: int = Field(0, ge=0, description="Resize images to this before the central crop; 0: to the crop.")
    skip_bad: bool = Field(False, description="Leave out images that cannot be decoded.")


class ExportPlace(Settings):
    """What to write."""

    out: str = Field(description="The safetensors file to write; its model card is written beside it.")
