"""Triton kernels around a network's matrix products: batch norm with addition and ReLU, pooling, a bias's gradient.

A channels-last tensor (n, c, h, w) is a matrix of n * h * w rows and c contiguous columns, as a 2-D one is. Every sum
is made in a fixed order, so that results repeat bit for bit. Importing this module needs triton; ask `supported`,
`pool_supported` and `linear_supported` first: what they refuse is for plain torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from marginlens.nets.stem import INTERPRET, dense, like, stem_conv, stem_supported

__all__ = [
    "linear",
    "linear_supported",
    "norm_act",
    "pool",
    "pool_supported",
    "stem_conv",
    "stem_supported",
    "supported",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_TILE = 512
"""Up to so many rows of a group, a program holds all rows of its channels, and one kernel does everything."""
MANY = 32768
"""From so many rows a group on, bytes decide, and below it how long one thing takes after another."""
TUNING: dict[str, Any] = {
    # of the kernels that sum: programs in one wave of an H200's 132 multiprocessors, by rows
    "programs": (128, 256),
    "warps": (8, 8),
    # 16-byte loads that a thread has under way at once, of each tensor
    "forward_unroll": (8, 4),
    "backward_unroll": (4, 2),
    # tiles that are under way at once, in shared memory; 1: one, in registers
    "stages": (1, 3),
    "tile": 4096,  # elements of an elementwise tile
    "tile_width": 64,  # channels of it
    "tile_warps": 4,
}
_COUNTERS: WeakKeyDictionary[nn.Module, dict[tuple[torch.device, int], Tensor]] = WeakKeyDictionary()

# The compiler must not know that the signs are aligned. It would give a thread several of their bytes to load or store
# at once, and those are not of the channels that the thread has: all would go through shared memory.
_jit_bits = triton.jit(do_not_specialize_on_alignment=["bits"])


@triton.jit
def _pack(keep, R: tl.constexpr, C: tl.constexpr):
    """Truth values of eight neighbouring channels as a byte: (R, C) to (R, C // 8)."""
    bits = tl.reshape(keep.to(tl.int32), [R, C // 8, 8]) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, 2).to(tl.uint8)


@triton.jit
def _unpack(bits, R: tl.constexpr, C: tl.constexpr):
    """What `_pack` packed."""
    return tl.reshape((bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [R, C]) != 0


@triton.jit
def _dead(value, DTYPE: tl.constexpr):
    """Where a value is not positive once rounded to DTYPE: half the least positive number becomes 0. NaN stays."""
    if DTYPE.is_fp16():
        return value <= 2.0**-25
    if DTYPE.is_bf16():
        return value <= 2.0**-134
    return value <= 0.0


@triton.jit
def _load(where, valid, EVEN: tl.constexpr):
    """A tile, zero beyond its valid rows; if tiles are EVEN, all are."""
    if EVEN:
        return tl.load(where)
    return tl.load(where, valid[:, None], 0)


@triton.jit
def _store(where, value, valid, EVEN: tl.constexpr):
    if EVEN:
        tl.store(where, value)
    else:
        tl.store(where, value, valid[:, None])


@triton.jit
def _affine(far, scale, shift):
    """The norm's value. Forward and backward pass both compute it here, and so agree on its sign to the last bit."""
    return tl.fma(far, scale[None, :], shift[None, :])


@triton.jit
def _scale_shift(rstd, weight, bias, columns, AFFINE: tl.constexpr):
    shift = tl.zeros_like(rstd)
    if AFFINE:
        rstd *= tl.load(weight + columns)
        shift = tl.load(bias + columns)
    return rstd, shift


@triton.jit
def _pivot(x, columns, rows, CH: tl.constexpr):
    """The median of three rows: within k deviations of the mean but for 3 in k^4 columns, of whatever distribution."""
    a = tl.load(x + columns).to(tl.float32)
    b = tl.load(x + rows // 2 * CH + columns).to(tl.float32)
    c = tl.load(x + (rows - 1) * CH + columns).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _both(first, second, C: tl.constexpr):
    """Sums of two (R, C) over the rows in one reduction, interleaved: (2 * C,)."""
    return tl.reshape(tl.sum(tl.join(first, second), 0), [2 * C])


@triton.jit
def _moments(sums, pivot, rows, C: tl.constexpr):
    """Mean and variance from the sums of distances to the pivot, and of their squares."""
    total, square = tl.split(tl.reshape(sums, [C, 2]))
    n = rows.to(tl.float32)
    return pivot + total / n, tl.maximum((square - total * (total / n)) / n, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _last(counter, SPLITS: tl.constexpr):
    """Whether every other program of this counter has stored what it had to; the last one sets it to 0 again."""
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _shares(partial, share, block, CH: tl.constexpr, C: tl.constexpr):
    """Where a program's sums are, or those of several: (2 * C,) each."""
    return partial + share * (2 * CH) + block * (2 * C) + tl.arange(0, 2 * C)


@triton.jit
def _blend(running_mean, running_var, mean, var, rows, momentum):
    """nn.BatchNorm's running statistics after one more batch."""
    n = rows.to(tl.float32)
    running_mean = (1.0 - momentum) * running_mean + momentum * mean
    return running_mean, (1.0 - momentum) * running_var + momentum * (var * (n / (n - 1.0)))


@triton.jit
def _output(x, added, y, bits, where, bits_where, valid, EVEN, mean, scale, shift, ADD, RELU, BITS, R, C):
    """Normalises a tile, adds, applies ReLU and stores. A NaN stays one."""
    value = _affine(x.to(tl.float32) - mean[None, :], scale, shift)
    if ADD:
        value += added.to(tl.float32)
    dead = _dead(value, y.dtype.element_ty)
    if BITS:
        _store(bits + bits_where, _pack(~dead, R, C), valid, EVEN)
    if RELU:
        value = tl.where(dead, 0.0, value)
    _store(y + where, value.to(y.dtype.element_ty), valid, EVEN)


@triton.jit
def _gradient(g, dy2, signs, where, far, valid, EVEN, scale, shift, MODE, FORK, R, C):
    """The gradient behind the ReLU: MODE 0 has none, 1 finds its sign again, 2 has it in the signs."""
    dtype: tl.constexpr = g.dtype
    if FORK:
        g = (g.to(tl.float32) + _load(dy2 + where, valid, EVEN).to(tl.float32)).to(dtype)
    if MODE == 1:
        g = tl.where(_dead(_affine(far, scale, shift), dtype), tl.zeros_like(g), g)
    if MODE == 2:
        g = tl.where(_unpack(signs, R, C), g, tl.zeros_like(g))
    return g


@triton.jit
def _stats(
    x, partial, counter, stats, rows, eps, CH: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Mean, 1 / deviation and variance of each column of each group, (groups, 3, c); slow twin: nn.BatchNorm.

    Distances are measured from a pivot of the column, so that a large mean costs no digits; k deviations from the mean
    it costs those of k * k. The last program of a group and block to finish adds up what all have found, in order.
    Tiles are taken from the last one down, which is what the convolution wrote last, and `_normalise` goes up: both
    find the L2 cache warm.
    """
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * C + tl.arange(0, C)
    x += group * rows * CH
    row = tl.arange(0, UNROLL * R)
    where = row[:, None] * CH + columns[None, :]
    tiles = tl.cdiv(rows, UNROLL * R)
    pivot = _pivot(x, columns, rows, CH)
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for now in tl.range(split, tiles, SPLITS, num_stages=STAGES):
        at = tiles - 1 - now
        tile = _load(x + at * (UNROLL * R * CH) + where, row < rows - at * (UNROLL * R), EVEN)
        far = tile.to(tl.float32) - pivot[None, :]
        if not EVEN:
            far = tl.where((row < rows - at * (UNROLL * R))[:, None], far, 0.0)
        far = tl.reshape(far, [UNROLL, R, C])
        total += tl.sum(far, 0)
        square += tl.sum(far * far, 0)
    share = _both(total, square, C)
    tl.store(_shares(partial, group * SPLITS + split, block, CH, C), share)
    if _last(counter + group * tl.num_programs(1) + block, SPLITS):
        every = group * SPLITS + tl.arange(0, SPLITS)[:, None]
        shares = tl.load(_shares(partial, every, block, CH, C), cache_modifier=".cg")
        mean, var = _moments(tl.sum(shares, 0), pivot, rows, C)
        own = stats + group * 3 * CH + columns
        tl.store(own, mean)
        tl.store(own + CH, 1.0 / tl.sqrt_rn(var + eps))
        tl.store(own + 2 * CH, var)


@_jit_bits
def _normalise(
    x, add, y, bits, stats, weight, bias, running_mean, running_var, tracked, rows, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BITS: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) * scale + bias + add), and running statistics; slow twin: nn.BatchNorm, addition, relu."""
    block, at, group = tl.program_id(0) % (CH // C), tl.program_id(0) // (CH // C), tl.program_id(1)
    columns, row = block * C + tl.arange(0, C), tl.arange(0, R)
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    valid, start = row < rows - at * R, (group * rows + at * R) * CH
    tile = _load(x + start + where, valid, EVEN)
    added = tile
    if ADD:
        added = _load(add + start + where, valid, EVEN)
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = _scale_shift(rstd, weight, bias, columns, AFFINE)
    _output(
        tile, added, y + start, bits + start // 8, where, bits_where, valid, EVEN, mean, scale, shift,
        ADD, RELU, BITS, R, C,
    )  # fmt: skip
    if (at == 0) & (group == 0):
        slow_mean, slow_var = tl.load(running_mean + columns), tl.load(running_var + columns)
        for one in range(tl.num_programs(1)):
            mean, var = tl.load(stats + one * 3 * CH + columns), tl.load(stats + (one * 3 + 2) * CH + columns)
            slow_mean, slow_var = _blend(slow_mean, slow_var, mean, var, rows, momentum)
        tl.store(running_mean + columns, slow_mean)
        tl.store(running_var + columns, slow_var)
        if block == 0:
            tl.store(tracked, tl.load(tracked) + tl.num_programs(1))


@_jit_bits
def _sums(
    dy, dy2, x, bits, masked, stats, weight, bias, partial, counter, sums, rows, MODE: tl.constexpr,
    FORK: tl.constexpr, WRITE: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias by group, (groups, 2, c), and of what was added; slow twin: autograd."""
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * C + tl.arange(0, C)
    row = tl.arange(0, UNROLL * R)
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    tiles = tl.cdiv(rows, UNROLL * R)
    at = tiles - 1 - split
    signs = row[:, None]
    if MODE == 2:  # too narrow for the compiler to load ahead of their use, so done here
        signs = _load(
            bits + (group * rows + at * (UNROLL * R)) * (CH // 8) + bits_where, row < rows - at * (UNROLL * R), EVEN
        )
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = _scale_shift(rstd, weight, bias, columns, AFFINE)
    plain, product = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for now in tl.range(split, tiles, SPLITS, num_stages=STAGES):
        at = tiles - 1 - now
        valid, start = row < rows - at * (UNROLL * R), (group * rows + at * (UNROLL * R)) * CH
        tile, g = _load(x + start + where, valid, EVEN), _load(dy + start + where, valid, EVEN)
        far = tile.to(tl.float32) - mean[None, :]
        g = _gradient(g, dy2 + start, signs, where, far, valid, EVEN, scale, shift, MODE, FORK, UNROLL * R, C)
        if MODE == 2:
            ahead = at - SPLITS  # negative if there is no further tile
            there = row < tl.where(ahead < 0, 0, rows - ahead * (UNROLL * R))
            signs = _load(bits + (group * rows + ahead * (UNROLL * R)) * (CH // 8) + bits_where, there, False)
        if WRITE:
            _store(masked + start + where, g, valid, EVEN)
        g = g.to(tl.float32)
        plain += tl.sum(tl.reshape(g, [UNROLL, R, C]), 0)
        product += tl.sum(tl.reshape(g * far, [UNROLL, R, C]), 0)
    share = _both(product, plain, C)
    tl.store(_shares(partial, group * SPLITS + split, block, CH, C), share)
    if _last(counter + group * tl.num_programs(1) + block, SPLITS):
        every = group * SPLITS + tl.arange(0, SPLITS)[:, None]
        shares = tl.load(_shares(partial, every, block, CH, C), cache_modifier=".cg")
        products, plains = tl.split(tl.reshape(tl.sum(shares, 0), [C, 2]))
        tl.store(sums + group * 2 * CH + columns, products * rstd)
        tl.store(sums + (group * 2 + 1) * CH + columns, plains)


@triton.jit
def _input_gradient(
    dy, x, dx, stats, weight, bias, sums, total, rows, MODE: tl.constexpr, AFFINE: tl.constexpr, LATE: tl.constexpr,
    CH: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx from dy, x and the sums over a group's rows, and the groups' total; slow twin: autograd of nn.BatchNorm."""
    block, at, group = tl.program_id(0) % (CH // C), tl.program_id(0) // (CH // C), tl.program_id(1)
    columns, row = block * C + tl.arange(0, C), tl.arange(0, R)
    where = row[:, None] * CH + columns[None, :]
    valid, start = row < rows - at * R, (group * rows + at * R) * CH
    tile = _load(x + start + where, valid, EVEN)
    g = tile
    if not LATE:
        g = _load(dy + start + where, valid, EVEN)
    if LATE:  # written by `_sums`
        g = _load(dy + start + where, valid, EVEN)
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = _scale_shift(rstd, weight, bias, columns, AFFINE)
    slope = -scale * rstd * tl.load(sums + group * 2 * CH + columns) / rows.to(tl.float32)
    level = -scale * tl.load(sums + (group * 2 + 1) * CH + columns) / rows.to(tl.float32)
    far = tile.to(tl.float32) - mean[None, :]
    g = _gradient(g, dy, g, where, far, valid, EVEN, scale, shift, MODE, False, R, C).to(tl.float32)
    value = tl.fma(far, slope[None, :], tl.fma(g, scale[None, :], level[None, :]))
    _store(dx + start + where, value.to(dx.dtype.element_ty), valid, EVEN)
    if (at == 0) & (group == 0) & (tl.num_programs(1) > 1):
        product, plain = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for one in range(tl.num_programs(1)):
            product += tl.load(sums + one * 2 * CH + columns)
            plain += tl.load(sums + (one * 2 + 1) * CH + columns)
        tl.store(total + columns, product)
        tl.store(total + CH + columns, plain)


@_jit_bits
def _whole_forward(
    x, add, y, bits, stats, weight, bias, running_mean, running_var, tracked, rows, groups, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BITS: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`_stats` and `_normalise` of so few rows that one program holds a group's; slow twin: the same."""
    block, row = tl.program_id(0), tl.arange(0, R)
    columns = block * C + tl.arange(0, C)
    valid = row < rows
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    slow_mean, slow_var = tl.load(running_mean + columns), tl.load(running_var + columns)
    for group in range(groups):
        start = group * rows * CH
        tile = _load(x + start + where, valid, False)
        added = tile
        if ADD:
            added = _load(add + start + where, valid, False)
        pivot = _pivot(x + start, columns, rows, CH)
        far = tl.where(valid[:, None], tile.to(tl.float32) - pivot[None, :], 0.0)
        mean, var = _moments(_both(far, far * far, C), pivot, rows, C)
        rstd = 1.0 / tl.sqrt_rn(var + eps)
        tl.store(stats + group * 3 * CH + columns, mean)
        tl.store(stats + (group * 3 + 1) * CH + columns, rstd)
        slow_mean, slow_var = _blend(slow_mean, slow_var, mean, var, rows, momentum)
        scale, shift = _scale_shift(rstd, weight, bias, columns, AFFINE)
        _output(
            tile, added, y + start, bits + start // 8, where, bits_where, valid, False, mean, scale, shift,
            ADD, RELU, BITS, R, C,
        )  # fmt: skip
    tl.store(running_mean + columns, slow_mean)
    tl.store(running_var + columns, slow_var)
    if block == 0:
        tl.store(tracked, tl.load(tracked) + groups)


@_jit_bits
def _whole_backward(
    dy, dy2, x, bits, masked, dx, stats, weight, bias, total, rows, groups, MODE: tl.constexpr,
    FORK: tl.constexpr, WRITE: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`_sums` and `_input_gradient` of so few rows that one program holds a group's; slow twin: the same."""
    block, row = tl.program_id(0), tl.arange(0, R)
    columns = block * C + tl.arange(0, C)
    valid = row < rows
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    products, plains = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for group in range(groups):
        start = group * rows * CH
        tile, g = _load(x + start + where, valid, False), _load(dy + start + where, valid, False)
        signs = row[:, None]
        if MODE == 2:
            signs = _load(bits + start // 8 + bits_where, valid, False)
        mean = tl.load(stats + group * 3 * CH + columns)
        rstd = tl.load(stats + (group * 3 + 1) * CH + columns)
        scale, shift = _scale_shift(rstd, weight, bias, columns, AFFINE)
        far = tile.to(tl.float32) - mean[None, :]
        g = _gradient(g, dy2 + start, signs, where, far, valid, False, scale, shift, MODE, FORK, R, C)
        if WRITE:
            _store(masked + start + where, g, valid, False)
        g = g.to(tl.float32)
        product, plain = tl.split(tl.reshape(_both(g * far, g, C), [C, 2]))
        product *= rstd
        products += product
        plains += plain
        slope, level = -scale * rstd * product / rows.to(tl.float32), -scale * plain / rows.to(tl.float32)
        value = tl.fma(far, slope[None, :], tl.fma(g, scale[None, :], level[None, :]))
        _store(dx + start + where, value.to(dx.dtype.element_ty), valid, False)
    tl.store(total + columns, products)
    tl.store(total + CH + columns, plains)


@triton.jit
def _pool_backward(g, dx, rows, P: tl.constexpr, CH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Every pixel's share of its mean's gradient; slow twin: autograd of x.mean((2, 3))."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    columns, valid = tl.program_id(1) * C + tl.arange(0, C)[None, :], row < rows
    value = tl.load(g + row // P * CH + columns, valid, 0.0).to(tl.float32)
    tl.store(dx + row * CH + columns, (value / P).to(dx.dtype.element_ty), valid)


@triton.jit
def _column_sums(g, out, rows, c, R: tl.constexpr, C: tl.constexpr):
    """Sums over the rows in float32, rounded once; slow twin: g.sum(0)."""
    row, columns = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, rows, R):
        total += tl.load(g + (start + row) * c + columns[None, :], start + row < rows, 0.0).to(tl.float32)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty))


def supported(x: Tensor, bn: nn.Module, add: Tensor | None = None, groups: int = 1) -> bool:
    """Whether `norm_act` takes these: CUDA, training mode, channels-last or 2-D, channels a multiple of 16.

    The groups must be equal, of two rows or more.
    """
    return (
        type(bn) in (nn.BatchNorm1d, nn.BatchNorm2d)
        and bn.training
        and bn.running_mean is not None
        and bn.momentum is not None
        and x.dim() in (2, 4)
        and (x.is_cuda or INTERPRET)
        and x.dtype in DTYPES
        and x.shape[1] == bn.num_features
        and x.shape[1] % 16 == 0
        and groups >= 1
        and x.shape[0] % groups == 0
        and 2 * groups * x.shape[1] <= x.numel() < 2**31
        and dense(x)
        and all(t is None or t.dtype == torch.float32 for t in (bn.weight, bn.running_mean))
        and (add is None or (add.shape == x.shape and add.dtype == x.dtype and dense(add)))
    )


def norm_act(
    x: Tensor, bn: nn.Module, add: Tensor | None = None, relu: bool = True, fork: bool = False, groups: int = 1
) -> Tensor | tuple[Tensor, Tensor]:
    """relu(bn(x) + add) in training mode, with its running statistics; slow twin: just that, in torch.

    x is (n, c, h, w) channels-last or (n, c); what `supported` refuses must not come here. Sums are float32. With
    `groups`, x is that many batches one after the other, each normalised by itself, and running statistics take one
    after the other: bn(x) is torch.cat([bn(part) for part in x.chunk(groups)]). With `fork` the result comes twice, in
    the same memory, for the two branches of a block: their gradients are then added where they are used, and autograd
    does not do it beforehand. Not differentiable twice. Calls of one and the same `bn` must follow one another on the
    device.
    """
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, add, bn.weight, bn.bias))
    found = _NormAct.apply(x, add, bn.weight, bn.bias, bn, relu, fork, learns, groups)
    return (found[0], found[1]) if fork else found[0]


def _counters(bn: _BatchNorm, device: torch.device, groups: int) -> Tensor:
    """(2, groups * c // 16) zeros: how many programs are through, in the forward and the backward pass."""
    held = _COUNTERS.setdefault(bn, {})
    if (device, groups) not in held:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("norm_act meets this batch norm for the first time in a capture; run it once before")
        held[device, groups] = torch.zeros(2, groups * bn.num_features // 16, dtype=torch.int32, device=device)
    return held[device, groups]


def _power(c: int, most: int) -> int:
    """The largest power of two that divides c, up to `most`."""
    return min(c & -c, most)


def _whole_shape(rows: int) -> dict[str, int]:
    """Tile and warps of the kernels where a program holds all rows."""
    height = max(triton.next_power_of_2(rows), 16)
    return {"R": height, "C": 16, "num_warps": min(max(height // 64, 4), 16)}


def _sum_shape(x: Tensor, rows: int, c: int, groups: int, way: str) -> dict[str, int]:
    """Tile and splits of the kernels that sum: all programs in one wave, and no more loads than there are rows."""
    programs, warps, unroll, stages = (
        TUNING[name][rows >= MANY] for name in ("programs", "warps", f"{way}_unroll", "stages")
    )
    width = _power(c, 64)
    high = max(warps * 512 // x.element_size() // width, 1)
    most = min(max(programs // (c // width * groups), 1), triton.cdiv(rows, high))
    splits = 1 << (most.bit_length() - 1)
    unroll = min(unroll, triton.next_power_of_2(triton.cdiv(rows, splits * high)))
    tiles = triton.cdiv(rows, unroll * high)
    splits = min(splits, 1 << (tiles.bit_length() - 1))
    return {
        "CH": c,
        "EVEN": rows % (unroll * high) == 0,
        "SPLITS": splits,
        "UNROLL": unroll,
        "STAGES": stages if tiles > splits else 1,
        "R": high,
        "C": width,
        "num_warps": warps,
    }


def _tile_shape(rows: int, c: int, groups: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of the elementwise kernels."""
    width = _power(c, TUNING["tile_width"])
    high = TUNING["tile"] // width
    shape = {"CH": c, "EVEN": rows % high == 0, "R": high, "C": width, "num_warps": TUNING["tile_warps"]}
    return (triton.cdiv(rows, high) * (c // width), groups), shape


class _NormAct(torch.autograd.Function):
    """Outputs: y, y again or None, statistics (groups, 3, c), signs (rows, c // 8) or None."""

    @staticmethod
    def forward(x, add, weight, bias, bn, relu, fork, learns, groups):
        c, rows = x.shape[1], x.numel() // x.shape[1] // groups
        y, stats = torch.empty_like(x), torch.empty(groups, 3, c, dtype=torch.float32, device=x.device)
        bits = None
        if relu and add is not None and learns:
            bits = torch.empty(groups * rows, c // 8, dtype=torch.uint8, device=x.device)
        flags = {"ADD": add is not None, "RELU": relu, "BITS": bits is not None, "AFFINE": weight is not None}
        tensors = (x, x if add is None else add, y, stats if bits is None else bits, stats)
        affine = (stats, stats) if weight is None else (weight, bias)
        running = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
        if rows <= ONE_TILE:
            shape = _whole_shape(rows)
            _whole_forward[(c // shape["C"],)](
                *tensors, *affine, *running, rows, groups, bn.eps, bn.momentum, **flags, CH=c, **shape
            )
        else:
            shape = _sum_shape(x, rows, c, groups, "forward")
            partial = torch.empty(groups, shape["SPLITS"], c, 2, dtype=torch.float32, device=x.device)
            counter = _counters(bn, x.device, groups)[0]
            _stats[(shape["SPLITS"], c // shape["C"], groups)](x, partial, counter, stats, rows, bn.eps, **shape)
            grid, shape = _tile_shape(rows, c, groups)
            _normalise[grid](*tensors, *affine, *running, rows, bn.momentum, **flags, **shape)
        # the same memory without being a view, for autograd tells views of outputs from outputs
        twin = y.new_empty(0).set_(y.untyped_storage(), 0, y.shape, y.stride()) if fork else None
        return y, twin, stats, bits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, add, weight, bias, bn, relu, *_ = inputs
        _, _, stats, bits = output
        ctx.mark_non_differentiable(*(t for t in (stats, bits) if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, stats, bits)
        ctx.bn, ctx.mode, ctx.added = bn, 2 if bits is not None else int(relu and add is None), add is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, stats, bits = ctx.saved_tensors
        given = [like(g, x) for g in grads[:2] if g is not None]
        if not given:
            return (None,) * 9
        groups = len(stats)
        c, rows = x.shape[1], x.numel() // x.shape[1] // groups
        fork = len(given) == 2
        write = fork or (ctx.added and ctx.mode == 2)
        dx, masked = torch.empty_like(x), torch.empty_like(x) if write else None
        total = torch.empty(2, c, dtype=torch.float32, device=x.device)
        affine = (stats, stats) if weight is None else (weight, bias)
        flags = {"MODE": ctx.mode, "FORK": fork, "WRITE": write, "AFFINE": weight is not None}
        tensors = (given[0], given[-1], x, stats if bits is None else bits, given[0] if masked is None else masked)
        if rows <= ONE_TILE:
            shape = _whole_shape(rows)
            _whole_backward[(c // shape["C"],)](
                *tensors, dx, stats, *affine, total, rows, groups, **flags, CH=c, **shape
            )
        else:
            shape = _sum_shape(x, rows, c, groups, "backward")
            partial = torch.empty(groups, shape["SPLITS"], c, 2, dtype=torch.float32, device=x.device)
            counter = _counters(ctx.bn, x.device, groups)[1]
            sums = total if groups == 1 else torch.empty(groups, 2, c, dtype=torch.float32, device=x.device)
            _sums[(shape["SPLITS"], c // shape["C"], groups)](
                *tensors, stats, *affine, partial, counter, sums, rows, **flags, **shape
            )
            grid, shape = _tile_shape(rows, c, groups)
            g, mode = (given[0], ctx.mode) if masked is None else (masked, 0)
            flags = {"MODE": mode, "AFFINE": weight is not None, "LATE": masked is not None}
            _input_gradient[grid](g, x, dx, stats, *affine, sums, total, rows, **flags, **shape)
        dadd = (given[0] if masked is None else masked) if ctx.added else None
        return dx, dadd, *((None, None) if weight is None else (total[0], total[1])), None, None, None, None, None


def pool_supported(x: Tensor) -> bool:
    """Whether `pool` takes x: CUDA, channels-last, channels a multiple of 16."""
    return (
        (x.is_cuda or INTERPRET)
        and x.dim() == 4
        and x.dtype in DTYPES
        and x.shape[1] % 16 == 0
        and 0 < x.numel() < 2**31
        and dense(x)
    )


def pool(x: Tensor) -> Tensor:
    """Means over the pixels of (n, c, h, w), (n, c), whose gradient is one kernel; slow twin: x.mean((2, 3))."""
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
        rows, width = n * high * wide, _power(c, 128)
        tile = 4096 // width
        _pool_backward[(triton.cdiv(rows, tile), c // width)](
            grad, dx, rows, P=high * wide, CH=c, R=tile, C=width, num_warps=8
        )
        return dx


def linear_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` takes these: CUDA, 2-D, one dtype, outputs a multiple of 16, and no autocast."""
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
    """x @ weight.T + bias, whose bias has its gradient from one kernel; slow twin: torch.nn.functional.linear.

    With a `side` (`fast.Side`), gradients of weight and bias are computed there.
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
