"""Whole methods around anyone's backbone: `method.loss(views)`, and `method.after_step()` after the optimiser's step.

    method = MoCoV3(backbone, effect="emphasis(s=5)")
    loss = method.loss([strong, weak])      # two views (n, 3, h, w) of the same n images
    loss.backward(); optimizer.step()
    method.after_step()

A new method is one file, and one entry here; its arguments say which settings it takes in the laboratory.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from marginlens.loss import Rows
from marginlens.methods.byol import BYOL
from marginlens.methods.mocov3 import MoCoV3
from marginlens.methods.simclr import SimCLR


class Method(Protocol):
    """What a training loop asks of a method, which is an `nn.Module` besides."""

    @property
    def backbone(self) -> nn.Module:
        """The encoder that learns, and that is evaluated afterwards."""

    @property
    def student(self) -> nn.ModuleDict:
        """The backbone and the projector that learn."""

    def loss(self, views: Sequence[Tensor]) -> Tensor:
        """The loss of two views of a batch."""

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The first half of `loss`: what the student makes of the views."""

    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The second half: what the queries are compared with; needs nothing of the first, so it can run beside it."""

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """The loss of both halves."""

    def rows(self, views: Sequence[Tensor]) -> Rows:
        """What the loss sees of each row, without gradient; batch norms count the batch."""

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        """Moves the teacher, if there is one; `momentum` None is the method's own."""


METHODS: dict[str, type[Any]] = {"mocov3": MoCoV3, "simclr": SimCLR, "byol": BYOL}

__all__ = ["BYOL", "METHODS", "Method", "MoCoV3", "SimCLR"]
