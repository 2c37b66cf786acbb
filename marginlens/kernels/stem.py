"""The 3-channel convolution of a small-image ResNet's stem, as a matrix product of patches in Triton.

Every sum has a fixed order, so results repeat bit for bit. Importing this module needs triton. Ask `stem_supported`
first, and use plain torch where it returns False.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from marginlens.kernels.launch import INTERPRET, dense, like

TUNING = {"rows": 128, "warps": 4, "programs": 256}


@triton.jit
def _patches(x, rows, first, M: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """Return (M, 32): 3 x 3 x 3 values around each pixel from `first` on, in the weight's order, and zeros."""
    pixel = first + tl.arange(0, M)[:, None]
    k = tl.arange(0, 32)[None, :]
    up, left = k // 9 - 1, (k // 3) % 3 - 1
    py, px = (pixel // W) % H + up, pixel % W + left
    inside = (pixel < rows) & (k < 27) & (py >= 0) & (py < H) & (px >= 0) & (px < W)
    return tl.load(x + (pixel * 3 + (up * W + left) * 3 + k % 3), inside, 0.0)


@triton.jit
def _stem(
    x, weight, y, rows, H: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, INTERPRET: tl.constexpr
):
    """Convolve 3 channels, 3 x 3, as a matrix product of patches; slow twin: torch.conv2d."""
    first = tl.program_id(0) * M
    a = _patches(x, rows, first, M, H, W)
    k, channel = tl.arange(0, 32), tl.arange(0, C)
    w = tl.load(weight + channel[None, :] * 27 + k[:, None], (k < 27)[:, None], 0.0).to(x.dtype.element_ty)
    if INTERPRET:  # because the interpreter multiplies half precision wrongly
        a, w = a.to(tl.float32), w.to(tl.float32)
    value = tl.dot(a, w).to(y.dtype.element_ty)
    row = tl.arange(0, M)[:, None]
    tl.store(y + first.to(tl.int64) * C + row * C + channel[None, :], value, row < rows - first)


@triton.jit
def _stem_sums(
    dy, x, partial, rows, H: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, INTERPRET: tl.constexpr
):
    """Compute each program's share (C, 32) of the weight's gradient; slow twin: autograd of torch.conv2d."""
    total = tl.zeros([C, 32], tl.float32)
    row, channel = tl.arange(0, M)[:, None], tl.arange(0, C)
    for at in range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0)):
        a = _patches(x, rows, at * M, M, H, W)
        g = tl.load(dy + at * tl.full([], M * C, tl.int64) + row * C + channel[None, :], row < rows - at * M, 0.0)
        if INTERPRET:
            a, g = a.to(tl.float32), g.to(tl.float32)
        total = tl.dot(tl.trans(g), a, total)
    tl.store(partial + (tl.program_id(0) * C + channel[:, None]) * 32 + tl.arange(0, 32)[None, :], total)


@triton.jit
def _stem_total(partial, dw, programs, size, P: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the shares in order, without the padding of k; slow twin: torch.sum."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.arange(0, P)[:, None]
    value = tl.sum(tl.load(partial + share * size + where[None, :], share < programs, 0.0), 0)
    k = where % 32
    tl.store(dw + where // 32 * 27 + k, value.to(dw.dtype.element_ty), k < 27)


def stem_supported(x: Tensor, weight: Tensor) -> bool:
    """True if `stem_conv` takes these: half precision, channels-last, 3 channels to 16, 32, 64 or 128."""
    return (
        (x.is_cuda or INTERPRET)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dim() == 4
        and tuple(weight.shape[1:]) == (3, 3, 3)
        and weight.shape[0] in (16, 32, 64, 128)
        and x.shape[1] == 3
        and x.numel() < 2**31
        and not x.requires_grad
        and dense(x)
    )


def stem_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Return torch.conv2d(x, weight, padding=1) for images (n, 3, h, w) without a gradient; slow twin: torch.conv2d."""
    if x.requires_grad:
        raise ValueError("stem_conv gives its images no gradient, and these ask for one; use torch.conv2d")
    found: Tensor = _StemConv.apply(x, weight)
    return found


class _StemConv(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        n, _, high, wide = x.shape
        out, rows, m = weight.shape[0], n * high * wide, TUNING["rows"]
        y = torch.empty(n, out, high, wide, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        w = weight.contiguous(memory_format=torch.channels_last)
        _stem[(triton.cdiv(rows, m),)](
            x, w, y, rows, H=high, W=wide, M=m, C=out, INTERPRET=INTERPRET, num_warps=TUNING["warps"]
        )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x, weight = ctx.saved_tensors
        n, _, high, wide = x.shape
        out, rows, m = weight.shape[0], n * high * wide, TUNING["rows"]
        programs = min(TUNING["programs"], triton.cdiv(rows, m))
        partial = torch.empty(programs, out, 32, dtype=torch.float32, device=x.device)
        dw = torch.empty(weight.shape, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
        _stem_sums[(programs,)](
            like(grad, x), x, partial, rows, H=high, W=wide, M=m, C=out, INTERPRET=INTERPRET,
            num_warps=TUNING["warps"],
        )  # fmt: skip
        many, block = triton.next_power_of_2(programs), 16
        _stem_total[(out * 32 // block,)](partial, dw, programs, out * 32, P=many, BLOCK=block, num_warps=4)
        return None, dw if weight.is_contiguous(memory_format=torch.channels_last) else dw.contiguous()
