"""Generalized InfoNCE in three layouts: `info_nce` (MoCo), `nt_xent` (SimCLR), `positive_only` (BYOL).

A layout turns embeddings into a `Row` (`layouts.py`). `_value` then combines the row with an effect, the same way for
all layouts.

For every effect but `Plain` and `Margin`, the value is that of the plain loss, and the gradient is the one that the
paper declares instead of the value's derivative.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Eqs. 1, 3, 5: the loss of each row of q against the rows of k (MoCo's layout).

    The positive of row i of q is row i of k; all other rows of k are its negatives. Embeddings need not be normalised.
    Gradients flow to every tensor that requires them: detach the ones that should not learn.

    Half-precision inputs give a float32 value. On a GPU their matrix products use bfloat16, and those of float32 inputs
    follow `torch.set_float32_matmul_precision`; everything else is computed in float32.

    Args:
        q: Queries, (n, d).
        k: Keys, (m, d), with m >= n unless `positives` is given.
        tau: Temperature, from 1e-6 to 1e6. Logits are cosines divided by it. It may be a tensor of one element that
            learns; learn `log tau`, because a tau below 1e-6 is refused on a CPU and gives NaN on a GPU.
        beta: Weight of the denominator, from 0 to 1. 1 is InfoNCE; 0 leaves the positives alone.
        effect: An effect such as `Emphasis(s=20)`, or its string form `"emphasis(s=20)"`.
        positives: Row index in k of each row's positive, integers (n,). These are NOT class labels. With class labels,
            row `labels[i]` of k becomes the positive, whatever it shows: every image of class 3 is pulled towards row 3
            of k. That raises no error as long as all labels are below m. Each row has exactly one positive.
        queue: More negatives, (r, d), for all rows.
        in_batch: True if the other rows of k are negatives. With False, give a queue.
        reduction: "mean" of all rows, or "none": the loss of each row, (n,).
        impl: Kernel for the negatives. "auto" uses Triton on a GPU in float32, and "chunked" elsewhere: both need
            memory in proportion to n. "reference" builds the whole matrix, and supports second derivatives.
        check: True to also raise for NaN, infinity, rows without a finite gradient (no entry above 1e-31), and
            numbers or indices out of range on a GPU. The check waits for the device.

    Returns:
        The loss, a scalar; (n,) with `reduction="none"`.

    Example:
        >>> q, k = torch.eye(4), torch.eye(4)
        >>> ml.info_nce(q, k, tau=0.25)
        tensor(0.0535)
        >>> ml.info_nce(q, k[[3, 0, 1, 2]], tau=0.25, positives=torch.tensor([1, 2, 3, 0]))
        tensor(0.0535)
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
    """Eqs. 1, 3, 5: the loss of 2n embeddings against each other (SimCLR's layout).

    The positive of an embedding is the other view of its sample. Its negatives are the 2n - 2 embeddings of the other
    samples. Embeddings need not be normalised.

    Args:
        z1: One view of each sample, (n, d).
        z2: Another view of the same samples in the same order, (n, d).
        tau: Temperature, from 1e-6 to 1e6; see `info_nce`.
        beta: Weight of the denominator, from 0 to 1.
        effect: An effect, or its string form.
        reduction: "mean" of all rows, or "none": the loss of each row, (2n,), the rows of z1 first.
        impl: Kernel for the negatives; see `info_nce`.
        check: True to look for bad values, also on a GPU; see `info_nce`.

    Returns:
        The loss, a scalar; (2n,) with `reduction="none"`.

    Example:
        >>> ml.nt_xent(torch.eye(4), torch.eye(4), effect=ml.Emphasis(s=2))
        tensor(0.1043)
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
    """Eqs. 3, 5 at beta = 0: the loss of positives alone (BYOL's layout).

    Row i of p and row i of z are a pair. At tau = 0.5 the value is BYOL's `2 - 2 cos` minus 2, with the same gradient.
    There are no negatives, so effects that act through them are refused: `m2`, `Ratio` and `Attenuation`.

    Args:
        p: Predictions, (n, d).
        z: Targets, (n, d).
        tau: Temperature, from 1e-6 to 1e6; see `info_nce`.
        effect: An effect that needs no negatives, or its string form.
        reduction: "mean" of all rows, or "none": the loss of each row, (n,).
        impl: No kernel is needed here; the argument is accepted so that all losses take the same ones.
        check: True to look for bad values, also on a GPU; see `info_nce`.

    Returns:
        The loss, a scalar; (n,) with `reduction="none"`.

    Example:
        >>> ml.positive_only(torch.eye(4), torch.eye(4))
        tensor(-2.)
    """
    ask = settings(tau, 0.0, effect, reduction, impl, check)
    return _reduce(_value(byol(p, z, ask), ask), reduction)


class Rows(NamedTuple):
    """Facts about each row of a loss, as `rows` returns them: tensors (n,) without gradient."""

    c: Tensor
    """Cosine of the positive's angle."""
    theta: Tensor
    """The positive's angle in radians."""
    A: Tensor
    """Log-sum-exp of the negatives' logits; -inf if there are no negatives."""
    q: Tensor
    """Eq. 4: estimated probability of the positive, margins included."""
    f: Tensor
    """Theorem 4.1: sin(theta + m1) / sin(theta). 1 without a margin; the positive is repelled where it is negative."""
    w_pos: Tensor
    """Factor by which the effect multiplies the positive's gradient."""
    w_neg: Tensor
    """Factor by which the effect multiplies the gradient of each negative."""
    loss: Tensor
    """The row's loss."""
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
    """Return angles, probabilities and weights of each row, for logging.

    Args:
        q: Queries, or the first argument of the layout's loss, (n, d).
        k: Keys, or the second argument of the layout's loss, (m, d).
        layout: Name of the loss: "info_nce", "nt_xent" or "positive_only".
        tau: Temperature; None is the loss's own default.
        beta: Weight of the denominator; None is the loss's own default.
        effect: An effect, or its string form.
        positives: Row indices in k, not class labels; for "info_nce" alone.
        queue: More negatives; for "info_nce" alone.
        in_batch: True if the other rows of k are negatives; for "info_nce" alone.
        impl: Kernel for the negatives; see `info_nce`.
        check: True to look for bad values, also on a GPU; see `info_nce`.

    Returns:
        A `Rows`, whose tensors are (n,), or (2n,) for "nt_xent".

    Example:
        >>> ml.rows(torch.eye(4), torch.eye(4), effect=ml.Emphasis(s=20)).c
        tensor([1., 1., 1., 1.])
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


def joined(parts: Iterable[Rows]) -> Rows:
    """Return the rows of several batches as one."""
    return Rows(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


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
    """Return -b + beta * logaddexp(b, A) without cancellation where the positive dominates."""
    value = softplus(A - b, threshold=40.0)  # beyond 40 it is x itself, to the last bit of a float64
    return value if beta == 1.0 else beta * value - (1.0 - beta) * b


class _Declared(torch.autograd.Function):
    """Return a row's value with declared derivatives db and dA in place of its own."""

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
