"""Helpers around autograd and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, faster: `apply` inspects its signature at every call, for `torch.func`."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    args = torch._functorch.utils.unwrap_dead_wrappers(args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


class _Once(Function):
    """Return the first argument, and raise when its dependence on the others is differentiated."""

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
    """Return `grad`, computed by hand from `inputs`, such that differentiating it again raises RuntimeError(why).

    Inside `torch.compile` nothing is raised, because the compiler traces a backward pass as if it were never
    differentiated (docs/reference/effects.md).
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return grad
    guarded: Tensor = apply(_Once, grad, why, *inputs)
    return guarded


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on x's device, so that a loss is computed in float32 or better."""
    kind = "cpu" if x.device.type == "meta" else x.device.type  # because autocast does not know the meta device
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
