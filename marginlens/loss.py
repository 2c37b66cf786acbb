"""Generalized InfoNCE in three layouts: `info_nce` (MoCo), `nt_xent` (SimCLR), `positive_only` (BYOL).

Each layout turns embeddings into a `Row` (`layouts.py`); from there on all are the same: `_value` joins the row with
an effect.

For every effect but `Plain` and `Margin` the value is the plain loss, and the gradient is the one the paper declares,
not the value's derivative.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from marginlens import checks
from marginlens.autodiff import apply, once
from marginlens.checks import EffectLike
from marginlens.effects import PLAIN, Effect, LogWeights, Row, log_one_minus
from marginlens.layouts import Settings, byol, moco, settings, simclr
from marginlens.parameters import Number, log

Reduction = Literal["mean", "none"]
Impl = Literal["auto", "reference", "chunked", "triton"]
Layout = Literal["info_nce", "nt_xent", "positive_only"]

_WHY = (
    "the gradient that this effect declares is not the derivative of its value, so it has no second derivative; "
    "only plain and margin can be differentiated twice"
)


def info_nce(
    q: Tensor,
    k: Tensor,
    *,
    tau: Number = 0.25,
    beta: float = 1.0,
    effect: EffectLike = PLAIN,
    positives: Tensor | None = None,
    queue: Tensor | None = None,
    in_batch: bool = True,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
    check: bool = False,
) -> Tensor:
    """Eqs. 1, 3, 5, rows of q against rows of k (MoCo's layout).

    q (n, d) and k (m, d) need not be normalised. The positive of row i is row i of k, or row `positives[i]`; all
    other rows of k (unless `in_batch=False`), and all of `queue` (r, d), are its negatives. Gradients flow to whatever
    requires them: detach what should not learn. `tau`, from 1e-6 to 1e6, may be a tensor that learns. `beta` is in
    [0, 1]. Half-precision inputs are computed in float32, and the value is float32.

    `impl` names a kernel: "auto" takes Triton's on a GPU. There, products of half-precision inputs
    are in bf16, and those of float32 inputs follow `torch.set_float32_matmul_precision`; sums are in float32.

    `check=True` also looks for NaN, infinity, rows too short for a finite gradient (below 1e-31 in float32), and
    numbers and indices out of range, where looking costs a device synchronisation.
    """
    ask = settings(tau, beta, effect, reduction, impl, check)
    return _reduce(_value(moco(q, k, positives, queue, in_batch, ask), ask), reduction)


def nt_xent(
    z1: Tensor,
    z2: Tensor,
    *,
    tau: Number = 0.25,
    beta: float = 1.0,
    effect: EffectLike = PLAIN,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
    check: bool = False,
) -> Tensor:
    """Eqs. 1, 3, 5 among 2n embeddings (SimCLR's layout).

    z1 (n, d) and z2 (n, d) are two views of the same samples: each embedding's positive is its other view, its
    negatives are the 2n - 2 embeddings of other samples. With `reduction="none"`: (2n,), the rows of z1 first. `tau` is
    from 1e-6 to 1e6, `beta` in [0, 1].
    """
    ask = settings(tau, beta, effect, reduction, impl, check)
    return _reduce(_value(simclr(z1, z2, ask), ask), reduction)


def positive_only(
    p: Tensor,
    z: Tensor,
    *,
    tau: Number = 0.5,
    effect: EffectLike = PLAIN,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
    check: bool = False,
) -> Tensor:
    """Eqs. 3, 5 at beta = 0: positives alone (BYOL's layout); 2 + this, at tau = 0.5, is BYOL's 2 - 2 cos.

    p (n, d) and z (n, d) pair up row by row. There are no negatives, so effects that act through them are refused.
    `tau` is from 1e-6 to 1e6.
    `impl` is taken for the sake of one signature: there is nothing for a kernel to do.
    """
    ask = settings(tau, 0.0, effect, reduction, impl, check)
    return _reduce(_value(byol(p, z, ask), ask), reduction)


class Rows(NamedTuple):
    """What the loss saw of each row; every field (n,), without gradient."""

    c: Tensor
    """Cosine of the positive's angle."""
    theta: Tensor
    """The positive's angle in radians."""
    A: Tensor
    """log-sum-exp of the negatives' logits; -inf where there are none."""
    q: Tensor
    """Eq. 4: the positive's estimated probability, margins included."""
    f: Tensor
    """Theorem 4.1: sin(theta + m1) / sin(theta), 1 without a margin; where negative, the positive is repelled."""
    w_pos: Tensor
    """What the effect multiplies the positive's gradient by."""
    w_neg: Tensor
    """What the effect multiplies each negative's gradient by."""
    loss: Tensor
    """The row's value."""
    tau: Tensor
    """The temperature that the row was made with."""
    beta: Tensor
    """The weight of the denominator that the row was made with."""


@torch.no_grad()
def rows(
    q: Tensor,
    k: Tensor,
    *,
    layout: Layout = "info_nce",
    tau: Number | None = None,
    beta: float | None = None,
    effect: EffectLike = PLAIN,
    positives: Tensor | None = None,
    queue: Tensor | None = None,
    in_batch: bool = True,
    impl: Impl = "auto",
    check: bool = False,
) -> Rows:
    """What the loss sees of each row, for logging and for the lens.

    Takes the arguments of the loss that `layout` names, but no `reduction`; `tau` and `beta` default to that loss's.
    """
    checks.one_of("layout", layout, ("info_nce", "nt_xent", "positive_only"))
    tau = (0.5 if layout == "positive_only" else 0.25) if tau is None else tau
    beta = (0.0 if layout == "positive_only" else 1.0) if beta is None else beta
    ask = settings(tau, beta, effect, "none", impl, check, every_row_fact=True)
    if layout != "info_nce" and (positives is not None or queue is not None or not in_batch):
        raise ValueError(f"positives, queue and in_batch belong to layout 'info_nce', not {layout!r}")
    if layout == "positive_only" and ask.beta != 0.0:
        raise ValueError(f"beta is {ask.beta:g}; layout 'positive_only' has no negatives, so it must be 0")
    if layout == "info_nce":
        row = moco(q, k, positives, queue, in_batch, ask)
    else:
        row = simclr(q, k, ask) if layout == "nt_xent" else byol(q, k, ask)
    return describe(row, ask)


def describe(row: Row, ask: Settings) -> Rows:
    """Return what the loss sees of rows that have their sines and negatives."""
    w = ask.effect.log_weights(row) or LogWeights()
    zeros = torch.zeros_like(row.cos)
    return Rows(
        c=row.cos,
        theta=row.theta,
        A=row.A,
        q=torch.sigmoid(ask.effect.logit(row) - row.A),
        f=slope(row, ask.effect),
        w_pos=(zeros + w.positive + w.row).exp(),
        w_neg=(zeros + w.row).exp(),
        loss=_value(row, ask),
        tau=zeros + 1.0 / row.scale,
        beta=zeros + ask.beta,
    )


def _value(row: Row, ask: Settings) -> Tensor:
    """Eqs. 3, 5: each row's loss -b + beta * log(e^b + e^A), (n,), with the gradient that the effect declares."""
    beta, b = ask.beta, ask.effect.logit(row)
    with torch.no_grad():
        w = ask.effect.log_weights(row)
        if torch.compiler.is_exporting():
            _check_export(row, ask, declared=w is not None)
        if w is not None:
            x = row.A - b
            rest = logsigmoid(x)  # log of 1 - q
            db = -((rest if beta == 1.0 else log_one_minus(beta, -x)) + (w.positive + w.row)).exp()
            dA = ((rest if beta == 1.0 else log(beta) + rest) + w.row).exp()
    if w is None:
        return _plain_value(b, row.A, beta)
    value: Tensor = apply(_Declared, b, row.A, beta, db, dA)
    return value


def _check_export(row: Row, ask: Settings, declared: bool) -> None:
    """Raise a RuntimeError if `torch.export` would write a program with a wrong backward pass, or with none."""
    if declared:
        raise RuntimeError(
            "this effect declares its gradient, and torch.export drops declared gradients: the exported program would "
            "train on another one; export the encoder without the loss, or use torch.compile"
        )
    if ask.negatives and ask.impl != "reference" and row.A.requires_grad:
        raise RuntimeError(
            f"torch.export drops the backward pass of the kernel that impl={ask.impl!r} takes; "
            f"give impl='reference', or export under torch.no_grad()"
        )


def _plain_value(b: Tensor, A: Tensor, beta: float) -> Tensor:
    """-b + beta * logaddexp(b, A), without the cancellation where the positive dominates."""
    value = softplus(A - b, threshold=40.0)  # beyond it, x itself to the last bit of a float64
    return value if beta == 1.0 else beta * value - (1.0 - beta) * b


class _Declared(torch.autograd.Function):
    """A row's value whose derivatives with respect to b and A are given, not derived."""

    generate_vmap_rule = True

    @staticmethod
    def forward(b: Tensor, A: Tensor, beta: float, db: Tensor, dA: Tensor) -> Tensor:
        return _plain_value(b, A, beta)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        b, A, _, db, dA = inputs
        ctx.save_for_backward(b, A, db, dA)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        b, A, db, dA = ctx.saved_tensors
        return once(grads[0] * db, _WHY, b, A), once(grads[0] * dA, _WHY, b, A), None, None, None


def slope(row: Row, effect: Effect) -> Tensor:
    """Theorem 4.1, first factor: tau times the derivative of the positive's logit with respect to its cosine."""
    along = -row.cos / row.sin.clamp(min=torch.finfo(row.sin.dtype).eps)
    found: Any = torch.func.vjp(lambda cos, sin: effect.logit(row._replace(cos=cos, sin=sin)), row.cos, row.sin)
    logit, back = found
    by_cos, by_sin = back(torch.ones_like(logit))  # rows do not mix
    turned: Tensor = by_cos + along * by_sin
    return turned / row.scale


def _reduce(value: Tensor, reduction: str) -> Tensor:
    return value.mean() if reduction == "mean" else value
