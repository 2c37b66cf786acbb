"""What we ask of autograd and of autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    """The first argument, which depends on the others in a way that cannot be differentiated."""

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
    """`grad`, a gradient computed by hand from `inputs`; differentiating it again raises RuntimeError(why)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grad  # compiled graphs refuse on their own
    guarded: Tensor = _Once.apply(grad, why, *inputs)  # type: ignore[no-untyped-call]
    return guarded


def full_precision(x: Tensor) -> torch.autocast:
    """Autocast off on x's device: a loss is computed in float32 or better, and so is its gradient."""
    return torch.autocast(x.device.type, enabled=False)
