"""Compute log-sum-exp in blocks of rows, on any device. A block has at most `BLOCK` logits, or 16 rows of them.

The slow twin is `reference.neg_lse`. The work is in two operators without their own autograd, so `torch.compile` sees
each as one node for any number of blocks. `torch.func` and `torch.autograd` differentiate the `autograd.Function`
around them.
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
    """Return the log-sum-exp of scale * q.k over the keys that a row does not drop. Memory O(n + m)."""
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
    """The forward pass keeps one of three things; keeping more saves work in the backward pass.

    - "mean": the softmax-weighted mean of the keys, which is dA/dq / scale. That suffices if the keys are detached.
    - "weights": the softmax weights, if they fit into one block. They serve both sides.
    - "nothing": always correct.
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
        ctx.set_materialize_grads(False)  # because the unused gradient would become a matrix of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        q, keys, scale, drop, A, kept = ctx.saved_tensors
        g = grads[0]
        if g is None:
            return (None,) * 5
        both = keys is None or ctx.needs_input_grad[1]
        # no_grad, because `once` refuses a second derivative, and operators have no autograd under torch.func
        with torch.no_grad(), full_precision(q):
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
    # .shape, because len() fixes a symbolic size and every batch size would compile again
    shape = {"mean": q.shape, "weights": (q.shape[0], keys.shape[0]), "nothing": (0,)}[keep]
    return q.new_empty(q.shape[0]), q.new_empty(shape)


def run_forward(q: Tensor, keys: Tensor, scale: Tensor, drop: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    """Return A (n,), and each row's softmax weights (n, m), their mean of the keys (n, d), or an empty tensor."""
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
    """Return each row's softmax-weighted mean of the keys (n, d), and the keys' gradient (m, d) for cotangent g."""
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
    """Yield slices of q's rows with a buffer for their logits. The buffer is reused: fresh pages cost a pass over
    memory.
    """
    n, m = len(q), len(keys)
    step = min(n, max(16, BLOCK // m))
    buffer = q.new_empty(step, m)
    return ((slice(i, i + step), buffer[: min(step, n - i)]) for i in range(0, n, step))
