"""BYOL (Grill et al. 2020): a student predicts what a slow teacher sees of the same image; positives alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from marginlens.checks import EffectLike
from marginlens.effects import PLAIN, Effect, Emphasis, factors
from marginlens.loss import Impl, Rows, positive_only, rows
from marginlens.methods.graphs import by_graph
from marginlens.methods.views import arguments, features_of, pair
from marginlens.modules import Setting, register_effect, settings_of
from marginlens.nets.ema import constant_momentum, ema_update, teacher_of
from marginlens.nets.fast import each
from marginlens.nets.heads import predictor, projector
from marginlens.nets.parts import apart, count_once, in_parts, part_size, together
from marginlens.parameters import shortest


@by_graph
class BYOL(nn.Module):
    """Student: backbone, projector, predictor, on the strong view. Teacher: their EMA without predictor, on the weak.

    The loss is -cos / tau; at tau = 0.5 it has the gradient of BYOL's 2 - 2 cos. `symmetric` adds the loss with the
    views exchanged.
    """

    tau, effect, impl = (Setting() for _ in range(3))

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
        check_effect(self.settings["effect"], type(self).__name__)
        register_effect(self, self.settings["effect"])
        dim, self.bn_splits = features_of(backbone, features, size), bn_splits
        self.student = nn.ModuleDict(
            {"backbone": backbone, "projector": projector(dim, hidden=hidden, out=out, last_bn=last_bn, bias=bias)}
        )
        self.predictor = predictor(out, hidden=hidden, last_bn=predictor_bn, bias=bias)
        count_once(backbone, bn_splits)
        self.teacher = teacher_of(self.student)
        constant_momentum(momentum, 0, 1)  # refuses what is none
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
        return Rows(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        ema_update(self.teacher, self.student, self.momentum if momentum is None else momentum)

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The student's predictions (n, out); two of them if the loss is symmetric."""
        strong, weak = pair(views)
        predict = partial(self._predict, part=part_size(len(strong), self.bn_splits))
        return each(predict, (strong, weak) if self.symmetric else (strong,))

    @torch.no_grad()
    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """What they predict: the teacher's embeddings (n, out) of the other view."""
        strong, weak = pair(views)
        target = partial(self._target, part=part_size(len(weak), self.bn_splits))
        seen = [apart(x, self.bn_splits) for x in ((weak, strong) if self.symmetric else (weak,))]
        return [together(k, self.bn_splits) for k in each(target, seen)]

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """The loss of predictions against what they predict."""
        found = [positive_only(p, z, **settings_of(self)) for p, z in zip(queries, keys, strict=True)]
        return torch.stack(found).sum()

    def _predict(self, x: Tensor, part: int) -> Tensor:
        embedding: Tensor = self.predictor(self.student["projector"](in_parts(self.student["backbone"], x, part)))
        return embedding

    def _target(self, x: Tensor, part: int) -> Tensor:
        embedding: Tensor = self.teacher["projector"](in_parts(self.teacher["backbone"], x, part))
        return embedding


def check_effect(effect: Effect, method: str) -> None:
    """Refuses what means nothing without negatives, and s, which is only a learning rate without them."""
    for factor in factors(effect):
        if factor.needs_negatives:
            raise ValueError(
                f"{effect}: {factor.needs_negatives} acts through negatives, and {method} has none; "
                f"{method} takes margin(m1=...) and emphasis(c=...)"
            )
        if isinstance(factor, Emphasis) and shortest(factor.s) != "1":
            raise ValueError(
                f"{effect}: without negatives s multiplies the whole gradient, so it is only a learning rate; "
                f"raise lr instead (curvature, emphasis(c=...), does mean something)"
            )
