"""What we ask of autograd and of autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    """The first argument, which depends on the others in a way that cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, why: str, *inputs: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.why)


def once(grad: Tensor, why: str, *inputs: Tensor) -> Tensor:
    """`grad`, a gradient computed by hand from `inputs`; differentiating it again raises RuntimeError(why).

    Not inside `torch.compile`, which traces a backward pass as if it were never differentiated: docs/effects.md.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grad
    guarded: Tensor = _Once.apply(grad, why, *inputs)  # type: ignore[no-untyped-call]
    return guarded


def full_precision(x: Tensor) -> torch.autocast:
    """Autocast off on x's device: a loss is computed in float32 or better. (The meta device has none to turn off.)"""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
