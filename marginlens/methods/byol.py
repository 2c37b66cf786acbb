"""BYOL (Grill et al. 2020): a student predicts a slow teacher's embedding of the same image.

It uses positives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from marginlens.loss import joined, positive_only, rows
from marginlens.methods.protocol import (
    PLAIN,
    EffectLike,
    Impl,
    Rows,
    Setting,
    arguments,
    by_graph,
    check_no_negatives,
    features_of,
    pair,
    register_effect,
    settings_of,
)
from marginlens.nets import constant_momentum, count_once, ema_update, embed, predictor, projector, teacher_of


@by_graph
class BYOL(nn.Module):
    """Train a student to predict a teacher, without negatives.

    The student is backbone, projector and predictor, on the strong view. The teacher is the EMA of backbone and
    projector, on the weak view. The loss is -cos / tau; tau = 0.5 gives the gradient of BYOL's 2 - 2 cos. `symmetric`
    adds the loss with the views exchanged.
    """

    tau, effect, impl = (Setting() for _ in range(3))
    recipe: ClassVar[dict[str, Any]] = {"tau": 0.5, "beta": 0.0}
    """Defaults of the laboratory's recipe for this method, at the recipe's batch size."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tau: float = 0.5,
        effect: EffectLike = PLAIN,
        momentum: float = 0.99,
        hidden: int = 2048,
        out: int = 128,
        last_bn: bool = False,
        bias: bool = True,
        predictor_bn: bool = False,
        bn_splits: int = 1,
        symmetric: bool = False,
        features: int | None = None,
        size: int = 32,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.settings = arguments(tau, 0.0, effect, impl)
        del self.settings["beta"]
        check_no_negatives(self.settings["effect"], type(self).__name__)
        register_effect(self, self.settings["effect"])
        dim, self.bn_splits = features_of(backbone, features, size), bn_splits
        self.student = nn.ModuleDict(
            {"backbone": backbone, "projector": projector(dim, hidden=hidden, out=out, last_bn=last_bn, bias=bias)}
        )
        self.predictor = predictor(out, hidden=hidden, last_bn=predictor_bn, bias=bias)
        count_once(backbone, bn_splits)
        self.teacher = teacher_of(self.student)
        constant_momentum(momentum, 0, 1)  # raises for an invalid momentum
        self.momentum, self.symmetric = momentum, symmetric

    @property
    def backbone(self) -> nn.Module:
        return self.student["backbone"]

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        return self.loss(views)

    def loss(self, views: Sequence[Tensor]) -> Tensor:
        return self.compare(self.queries(views), self.keys(views))

    def rows(self, views: Sequence[Tensor]) -> Rows:
        with torch.no_grad():
            pairs = zip(self.queries(views), self.keys(views), strict=True)
            found = [rows(p, z, layout="positive_only", **settings_of(self)) for p, z in pairs]
        return joined(found)

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        ema_update(self.teacher, self.student, self.momentum if momentum is None else momentum)

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the student's predictions (n, out), two of them if the loss is symmetric."""
        strong, weak = pair(views)
        return embed(
            self.student["backbone"],
            lambda x: self.predictor(self.student["projector"](x)),
            (strong, weak) if self.symmetric else (strong,),
            self.bn_splits,
        )

    @torch.no_grad()
    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the targets: the teacher's embeddings (n, out) of the other view."""
        strong, weak = pair(views)
        seen = (weak, strong) if self.symmetric else (weak,)
        return embed(self.teacher["backbone"], self.teacher["projector"], seen, self.bn_splits, [True] * len(seen))

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """Return the loss of predictions against their targets."""
        found = [positive_only(p, z, **settings_of(self)) for p, z in zip(queries, keys, strict=True)]
        return torch.stack(found).sum()
