"""Plain InfoNCE as people write it, from packages, and ours: functions (a, b) -> loss, by layout.

All normalise their inputs, so all compute the same. Packages are imported on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import marginlens as ml
from marginlens import kernels

TAU = 0.25
PML_LIMIT = 256
"""Pairs; beyond them pytorch-metric-learning's memory, which is cubic, has no place on a CPU."""

DETACHED, BOTH, SIMCLR = "MoCo, keys detached", "MoCo, both sides", "SimCLR"
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(q: Tensor, k: Tensor) -> Tensor:
    """The usual implementation."""
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / TAU
    return F.cross_entropy(logits, torch.arange(len(q), device=q.device))


def cross_entropy_2n(z1: Tensor, z2: Tensor) -> Tensor:
    """The usual implementation for SimCLR."""
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / TAU).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


def metric_learning(z1: Tensor, z2: Tensor) -> Tensor:
    """pytorch-metric-learning; its memory is cubic in the batch."""
    from pytorch_metric_learning import losses

    return losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=TAU))(z1, z2)


def lightly(z1: Tensor, z2: Tensor) -> Tensor:
    """lightly's NTXentLoss, without a memory bank."""
    from lightly.loss import NTXentLoss

    return NTXentLoss(temperature=TAU)(z1, z2)


def cut(impl: str) -> Loss:
    """Apple's cut cross entropy: the keys over tau are the classifier, the targets are on the diagonal."""

    def loss(q: Tensor, k: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        e, c = F.normalize(q.float(), dim=1), F.normalize(k.float(), dim=1) / TAU
        targets = torch.arange(len(q), device=q.device)
        return linear_cross_entropy(e.to(q.dtype), c.to(q.dtype), targets, impl=impl)

    return loss


def torch_linear(q: Tensor, k: Tensor) -> Tensor:
    """torch's own linear_cross_entropy in its chunked form, since torch 2.13."""
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    e, c = F.normalize(q, dim=1), F.normalize(k, dim=1) / TAU
    targets = torch.arange(len(q), device=q.device)
    return F.linear_cross_entropy(e, c, targets, options=options)  # type: ignore[attr-defined]


VALUES = 16
"""Columns of the values that FlexAttention has to be given; nothing is made of them, so they are as few as it takes."""


def _flex_lse(q: Tensor, k: Tensor, score_mod: Any) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    values = k.detach()[:, :VALUES].contiguous()
    asked = (q[None, None], k[None, None], values[None, None], score_mod)
    _, found = flex_attention(*asked, scale=1.0 / TAU, return_aux=AuxRequest(lse=True))
    return found.lse[0, 0]


def _not_the_positive(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i == j, -float("inf"), score)


def _other_sample(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i // 2 == j // 2, -float("inf"), score)


def _joined(positive: Tensor, A: Tensor) -> Tensor:
    return -F.logsigmoid(positive - A).mean()


def flex(q: Tensor, k: Tensor) -> Tensor:
    """FlexAttention's log-sum-exp over the negatives; to be compiled."""
    u, v = (F.normalize(x.float(), dim=1).to(x.dtype) for x in (q, k))
    return _joined((u * v).float().sum(1) / TAU, _flex_lse(u, v, _not_the_positive))


def flex_2n(z1: Tensor, z2: Tensor) -> Tensor:
    """The same for SimCLR; the two views of a sample are neighbours, so that the mask needs no size."""
    u, v = (F.normalize(x.float(), dim=1).to(x.dtype) for x in (z1, z2))
    z = torch.stack([u, v], dim=1).flatten(0, 1)
    A = _flex_lse(z, z, _other_sample)
    return _joined(((u * v).float().sum(1) / TAU).repeat_interleave(2), A)


def ours(loss: Callable[..., Tensor], **options: Any) -> Loss:
    return lambda a, b: loss(a, b, tau=TAU, **options)


def on_cpu() -> dict[str, dict[str, Loss]]:
    """Return contestants by layout on a CPU."""
    moco: dict[str, Loss] = {
        "F.cross_entropy": cross_entropy,
        "reference": ours(ml.info_nce, impl="reference"),
        "chunked": ours(ml.info_nce, impl="chunked"),
        "chunked, emphasis(s=20, c=2.5)": ours(ml.info_nce, impl="chunked", effect=ml.Emphasis(s=20, c=2.5)),
    }
    simclr: dict[str, Loss] = {
        "F.cross_entropy": cross_entropy_2n,
        "reference": ours(ml.nt_xent, impl="reference"),
        "chunked": ours(ml.nt_xent, impl="chunked"),
        "pytorch-metric-learning": metric_learning,
    }
    return {DETACHED: moco, BOTH: moco, SIMCLR: simclr}


def on_gpu(layout: str, dtype: torch.dtype, n: int) -> dict[str, Loss]:
    """Return contestants that run on a GPU without compilation; the others are in `compiled`."""
    simclr = layout == SIMCLR
    mine = ml.nt_xent if simclr else ml.info_nce
    found: dict[str, Loss] = {"F.cross_entropy": cross_entropy_2n if simclr else cross_entropy}
    for impl in ("reference", "chunked", "triton", "auto"):
        if impl in kernels.IMPLS:
            found[impl] = ours(mine, impl=impl)
    if dtype == torch.bfloat16:
        found["auto, emphasis(s=20, c=2.5)"] = ours(mine, effect=ml.Emphasis(s=20, c=2.5))
    if simclr:
        found["lightly NTXentLoss"] = lightly
        if n <= PML_LIMIT:
            found["pytorch-metric-learning"] = metric_learning
    else:
        if dtype == torch.bfloat16:
            found["cut-cross-entropy, exact"] = cut("cce_exact")
            found["cut-cross-entropy, as it comes"] = cut("cce")
        if hasattr(F, "linear_cross_entropy"):
            found["torch linear_cross_entropy"] = torch_linear
    return found


def compiled(layout: str, dtype: torch.dtype) -> dict[str, tuple[Loss, bool]]:
    """Return contestants to compile, bf16 only: name -> (loss, whether one compilation serves every size)."""
    if dtype != torch.bfloat16:
        return {}
    simclr = layout == SIMCLR
    return {
        "F.cross_entropy, compiled": (cross_entropy_2n if simclr else cross_entropy, False),
        "FlexAttention, compiled": (flex_2n if simclr else flex, True),
    }
