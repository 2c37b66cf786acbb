"""A linear layer whose bias gradient is one Triton kernel, and whose parameter gradients may run on a side stream.

Importing this module needs triton. Ask `linear_supported` first, and use plain torch where it returns False.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from marginlens.kernels.launch import DTYPES, INTERPRET


@triton.jit
def _column_sums(g, out, rows, c, R: tl.constexpr, C: tl.constexpr):
    """Sum over the rows in float32 and round once; slow twin: g.sum(0)."""
    row, columns = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, rows, R):
        total += tl.load(g + (start + row) * c + columns[None, :], start + row < rows, 0.0).to(tl.float32)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty))


def linear_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if `linear` takes these: CUDA, 2-D, one dtype, outputs a multiple of 16, and no autocast."""
    return (
        (x.is_cuda or INTERPRET)
        and bias is not None
        and x.dim() == 2
        and x.dtype in DTYPES
        and x.dtype == weight.dtype == bias.dtype
        and len(bias) % 16 == 0
        and 0 < len(x) * len(bias) < 2**31
        and not torch.is_autocast_enabled(x.device.type)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor, side: Any = None) -> Tensor:
    """Return x @ weight.T + bias. One kernel computes the bias's gradient; slow twin: torch.nn.functional.linear.

    With a `side` (`fast.Side`), the gradients of weight and bias are computed there.
    """
    found: Tensor = _Linear.apply(x, weight, bias, side)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, side: Any) -> Tensor:
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.side = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needs = grad.contiguous(), ctx.needs_input_grad
        dx = grad @ weight if needs[0] else None
        dw = db = None
        with nullcontext() if ctx.side is None else ctx.side.beside(grad, x):
            if needs[1]:
                dw = grad.t() @ x
            if needs[2]:
                rows, c = grad.shape
                db = grad.new_empty(c)
                _column_sums[(c // 16,)](grad, db, rows, c, R=256, C=16, num_warps=8)
        return dx, dw, db, None
