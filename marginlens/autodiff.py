"""What we ask of autograd and of autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, without the signature that it reads and binds anew, for `torch.func`, at every call."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    args = torch._functorch.utils.unwrap_dead_wrappers(args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


class _Once(Function):
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

    Not inside `torch.compile`, which traces a backward pass as if it were never differentiated
    (docs/reference/effects.md).
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grad
    guarded: Tensor = apply(_Once, grad, why, *inputs)
    return guarded


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off on x's device: a loss is computed in float32 or better. (The meta device has none to turn off.)"""
    kind = "cpu" if x.device.type == "meta" else x.device.type
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
