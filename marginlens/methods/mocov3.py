"""MoCo v3 (Chen, Xie, He 2021): a student's view of an image against a slow teacher's views of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from marginlens.loss import info_nce, joined, rows
from marginlens.methods.protocol import (
    PLAIN,
    EffectLike,
    Impl,
    Rows,
    Setting,
    arguments,
    by_graph,
    features_of,
    pair,
    register_effect,
    settings_of,
)
from marginlens.nets import constant_momentum, count_once, ema_update, embed, predictor, projector, teacher_of


@by_graph
class MoCoV3(nn.Module):
    """Train a student against a teacher, with the teacher's embeddings of the batch's other images as negatives.

    The student is backbone, projector and predictor, on the strong view. The teacher is the EMA of backbone and
    projector, on the weak view. docs/reference/methods.md has measurements of these options:

    - `last_bn` appends a batch norm without affine parameters to the projector. s = 20 gains with it and loses without.
    - `predictor_bn` appends one to the predictor.
    - `bn_splits` splits the batch into this number of parts for the backbone's batch norms. 1 works for any batch; the
      laboratory's recipe uses parts of 64 images.
    - `symmetric` adds the loss with the views exchanged; `two_tau` multiplies the loss by 2 tau. The official code does
      both; the paper does not say.
    """

    tau, beta, effect, impl = (Setting() for _ in range(4))
    recipe: ClassVar[dict[str, Any]] = {"last_bn": True, "predictor_bn": True, "bn_splits": 4}
    """Defaults of the laboratory's recipe for this method, at the recipe's batch size. For other batches `bn_splits`
    changes, so that parts keep their size."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tau: float = 0.25,
        beta: float = 1.0,
        effect: EffectLike = PLAIN,
        momentum: float = 0.99,
        hidden: int = 2048,
        out: int = 128,
        last_bn: bool = True,
        bias: bool = True,
        predictor_bn: bool = True,
        bn_splits: int = 1,
        symmetric: bool = False,
        two_tau: bool = False,
        features: int | None = None,
        size: int = 32,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.settings = arguments(tau, beta, effect, impl)
        register_effect(self, self.settings["effect"])
        dim, self.bn_splits = features_of(backbone, features, size), bn_splits
        self.student = nn.ModuleDict(
            {"backbone": backbone, "projector": projector(dim, hidden=hidden, out=out, last_bn=last_bn, bias=bias)}
        )
        self.predictor = predictor(out, hidden=hidden, last_bn=predictor_bn, bias=bias)
        count_once(backbone, bn_splits)
        self.teacher = teacher_of(self.student)
        constant_momentum(momentum, 0, 1)  # raises for an invalid momentum
        self.momentum, self.symmetric, self.scale = momentum, symmetric, 2.0 * self.settings["tau"] if two_tau else 1.0

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
            found = [rows(q, k, **settings_of(self)) for q, k in pairs]
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
        """Return the teacher's embeddings (n, out) of the view that the query has not seen."""
        strong, weak = pair(views)
        seen = (weak, strong) if self.symmetric else (weak,)
        return embed(self.teacher["backbone"], self.teacher["projector"], seen, self.bn_splits, [True] * len(seen))

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """Return the loss of queries against keys."""
        found = [info_nce(q, k, **settings_of(self)) for q, k in zip(queries, keys, strict=True)]
        return self.scale * torch.stack(found).sum()
