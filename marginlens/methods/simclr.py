"""SimCLR (Chen et al. 2020): two views of each image among all views of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from marginlens.loss import nt_xent, rows
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
from marginlens.nets import count_once, embed, projector


@by_graph
class SimCLR(nn.Module):
    """Train backbone and projector on a strong and a weak view of each image: 2n embeddings, 2n - 2 negatives for each.

    Each view passes on its own, so batch norms see one kind of view at a time, as in MoCo v3. `last_bn` appends a batch
    norm without affine parameters to the projector.
    """

    tau, beta, effect, impl = (Setting() for _ in range(4))

    def __init__(
        self,
        backbone: nn.Module,
        *,
        tau: float = 0.25,
        beta: float = 1.0,
        effect: EffectLike = PLAIN,
        hidden: int = 2048,
        out: int = 128,
        last_bn: bool = False,
        bias: bool = True,
        bn_splits: int = 1,
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
        count_once(backbone, bn_splits)

    @property
    def backbone(self) -> nn.Module:
        return self.student["backbone"]

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        return self.loss(views)

    def loss(self, views: Sequence[Tensor]) -> Tensor:
        return self.compare(self.queries(views), self.keys(views))

    def rows(self, views: Sequence[Tensor]) -> Rows:
        with torch.no_grad():
            return rows(*self.queries(views), layout="nt_xent", **settings_of(self))

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        """Do nothing: there is no teacher."""

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the embeddings (n, out) of both views."""
        return embed(self.student["backbone"], self.student["projector"], pair(views), self.bn_splits, (False, True))

    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return no keys, because the embeddings are compared with each other."""
        return []

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """Return the loss over all embeddings."""
        return nt_xent(*queries, *keys, **settings_of(self))
