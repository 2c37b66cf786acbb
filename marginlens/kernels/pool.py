"""The mean over an image's pixels, with its gradient in one Triton kernel.

Importing this module needs triton. Ask `pool_supported` first, and use plain torch where it returns False.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from marginlens.kernels.launch import DTYPES, INTERPRET, dense, power


@triton.jit
def _pool_backward(g, dx, rows, P: tl.constexpr, CH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Give every pixel its share of the mean's gradient; slow twin: autograd of x.mean((2, 3))."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    columns, valid = tl.program_id(1) * C + tl.arange(0, C)[None, :], row < rows
    value = tl.load(g + row // P * CH + columns, valid, 0.0).to(tl.float32)
    tl.store(dx + row * CH + columns, (value / P).to(dx.dtype.element_ty), valid)


def pool_supported(x: Tensor) -> bool:
    """True if `pool` takes x: CUDA, channels-last, channels a multiple of 16."""
    return (
        (x.is_cuda or INTERPRET)
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.shape[1] % 16 == 0
        and 0 < x.numel() < 2**31
        and dense(x)
    )


def pool(x: Tensor) -> Tensor:
    """Return the means over the pixels of (n, c, h, w), (n, c).

    The gradient is one kernel; slow twin: x.mean((2, 3)).
    """
    found: Tensor = _Pool.apply(x)
    return found


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mean((2, 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        n, c, high, wide = ctx.shape
        grad = grad.contiguous()
        dx = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        rows, width = n * high * wide, power(c, 128)
        tile = 4096 // width
        _pool_backward[(triton.cdiv(rows, tile), c // width)](
            grad, dx, rows, P=high * wide, CH=c, R=tile, C=width, num_warps=8
        )
        return dx
