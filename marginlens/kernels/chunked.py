"""Blocks of rows, on any device: never more logits at a time than `BLOCK`, or 16 rows of them.

The slow twin is `reference.neg_lse`. The work sits in two operators without autograd of their own, so that
`torch.compile` sees each as one node, however many blocks it has; the `autograd.Function` around them is what
`torch.func` and `torch.autograd` differentiate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from marginlens.autodiff import apply, full_precision, once
from marginlens.kernels.launch import operator

BLOCK = 2**20

_WHY = (
    "impl='chunked' computes its gradient by hand and has no second derivative; "
    "use impl='reference' where you differentiate twice, which plain and margin alone can be"
)


def neg_lse(q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor) -> Tensor:
    """log-sum-exp of scale * q.k over the keys that a row does not drop. Memory O(n + m)."""
    one_side = keys is not None and not keys.requires_grad
    keep = "nothing"
    if torch.is_grad_enabled() and not (one_side and not q.requires_grad and not scale.requires_grad):
        if one_side:
            keep = "mean"
        elif len(q) * len(q if keys is None else keys) <= BLOCK:
            keep = "weights"
    A: Tensor = apply(_NegLse, q, keys, scale, drop, keep)[0]
    return A


class _NegLse(torch.autograd.Function):
    """What the forward pass keeps decides how little the backward pass has to do over again.

    The softmax-weighted mean of the keys is dA/dq / scale, all there is to know when the keys are detached; the
    weights themselves, when they fit into one block, serve both sides; keeping nothing is always right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor, keep: str) -> tuple[Tensor, Tensor]:
        A, kept = _forward(q, q if keys is None else keys, scale, drop, keep)
        return A, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, keys, scale, drop, ctx.keep = inputs
        ctx.save_for_backward(q, keys, scale, drop, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or a matrix of zeros would be made for what is kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        q, keys, scale, drop, A, kept = ctx.saved_tensors
        g = grads[0]
        if g is None:
            return (None,) * 5
        both = keys is None or ctx.needs_input_grad[1]
        with torch.no_grad(), full_precision(q):  # `once` speaks for the graph; under torch.func an operator has none
            if ctx.keep == "weights":
                mean = kept @ (q if keys is None else keys)
                dkeys = kept.T @ ((scale * g)[:, None] * q) if both else None
            elif ctx.keep == "mean" and not both:
                mean, dkeys = kept, None
            else:
                mean, dkeys = _backward(g, q, q if keys is None else keys, scale, drop, A, both)
            dq = (scale * g)[:, None] * mean
            dscale = torch.dot(g, (q * mean).sum(-1)) if ctx.needs_input_grad[2] else None
            if keys is None:
                dq, dkeys = dq + dkeys, None
        inputs = (g, q, scale) if keys is None else (g, q, keys, scale)
        found = (dq, dkeys if both else None, dscale)
        return *(None if x is None else once(x, _WHY, *inputs) for x in found), None, None


def _forward_room(q: Tensor, keys: Tensor, scale: Tensor, drop: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    # sizes by .shape: len() would fix a symbolic size, and each batch size would compile anew
    shape = {"mean": q.shape, "weights": (q.shape[0], keys.shape[0]), "nothing": (0,)}[keep]
    return q.new_empty(q.shape[0]), q.new_empty(shape)


def run_forward(q: Tensor, keys: Tensor, scale: Tensor, drop: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    """A (n,), and what to keep: each row's softmax weights (n, m), their mean of the keys (n, d), or nothing."""
    A = q.new_empty(len(q))
    kept = torch.empty_like(q) if keep == "mean" else q.new_empty(0)
    with full_precision(q):
        for rows, logits in _blocks(q, keys):
            torch.mm(scale * q[rows], keys.T, out=logits)
            logits.scatter_(1, drop[rows], -torch.inf)
            top = logits.amax(1, keepdim=True)
            weights = logits.sub_(top).exp_()
            total = weights.sum(1, keepdim=True)
            A[rows] = (top + total.log())[:, 0]
            if keep == "mean":
                kept[rows] = (weights @ keys).div_(total)
            elif keep == "weights":
                kept = weights.div_(total)
    return A, kept


_forward = operator("marginlens::neg_lse", _forward_room)(run_forward)


def _backward_room(
    g: Tensor, q: Tensor, keys: Tensor, scale: Tensor, drop: Tensor, A: Tensor, want_keys: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), keys.new_empty(keys.shape[0] if want_keys else 0, keys.shape[1])


def run_backward(
    g: Tensor, q: Tensor, keys: Tensor, scale: Tensor, drop: Tensor, A: Tensor, want_keys: bool
) -> tuple[Tensor, Tensor]:
    """Each row's softmax-weighted mean of the keys (n, d), and the gradient of the keys (m, d) for cotangent g."""
    mean = torch.empty_like(q)
    dkeys = keys.new_zeros(len(keys) if want_keys else 0, keys.shape[1])
    with full_precision(q):
        for rows, logits in _blocks(q, keys):
            block = scale * q[rows]
            torch.mm(block, keys.T, out=logits)
            weights = logits.sub_(A[rows, None]).exp_().scatter_(1, drop[rows], 0.0)
            torch.mm(weights, keys, out=mean[rows])
            if want_keys:
                dkeys.addmm_(weights.T, block.mul_(g[rows, None]))
    return mean, dkeys


_backward = operator("marginlens::neg_lse_backward", _backward_room)(run_backward)


def _blocks(q: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of q's rows, each with room for its logits: one buffer for all, since fresh pages cost a pass."""
    n, m = len(q), len(keys)
    step = min(n, max(16, BLOCK // m))
    buffer = q.new_empty(step, m)
    return ((slice(i, i + step), buffer[: min(step, n - i)]) for i in range(0, n, step))
