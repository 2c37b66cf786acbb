"""What the kernels of batch norm do with one tile: load and store it, sum it, normalise it, and take it back.

`norm_kernels.py` has the kernels that walk over all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(keep, R: tl.constexpr, C: tl.constexpr):
    """Truth values of eight neighbouring channels as a byte: (R, C) to (R, C // 8)."""
    bits = tl.reshape(keep.to(tl.int32), [R, C // 8, 8]) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, 2).to(tl.uint8)


@triton.jit
def unpack(bits, R: tl.constexpr, C: tl.constexpr):
    """What `pack` packed."""
    return tl.reshape((bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [R, C]) != 0


@triton.jit
def is_dead(value, DTYPE: tl.constexpr):
    """Where a value is not positive once rounded to DTYPE: half the least positive number becomes 0. NaN stays."""
    if DTYPE.is_fp16():
        return value <= 2.0**-25
    if DTYPE.is_bf16():
        return value <= 2.0**-134
    return value <= 0.0


@triton.jit
def load(where, valid, EVEN: tl.constexpr):
    """A tile, zero beyond its valid rows; if tiles are EVEN, all are."""
    if EVEN:
        return tl.load(where)
    return tl.load(where, valid[:, None], 0)


@triton.jit
def load_last(where, valid, EVEN: tl.constexpr):
    """As `load`, of what is read for the last time in this pass: the cache may give it up before anything else."""
    if EVEN:
        return tl.load(where, eviction_policy="evict_first")
    return tl.load(where, valid[:, None], 0, eviction_policy="evict_first")


@triton.jit
def store(where, value, valid, EVEN: tl.constexpr):
    if EVEN:
        tl.store(where, value)
    else:
        tl.store(where, value, valid[:, None])


@triton.jit
def affine(far, scale, shift):
    """The norm's value. Forward and backward pass both compute it here, and so agree on its sign to the last bit."""
    return tl.fma(far, scale[None, :], shift[None, :])


@triton.jit
def scale_shift(rstd, weight, bias, columns, AFFINE: tl.constexpr):
    shift = tl.zeros_like(rstd)
    if AFFINE:
        rstd *= tl.load(weight + columns)
        shift = tl.load(bias + columns)
    return rstd, shift


@triton.jit
def pivot_of(x, columns, rows, CH: tl.constexpr):
    """The median of three rows: within k deviations of the mean but for 3 in k^4 columns, of whatever distribution."""
    a = tl.load(x + columns).to(tl.float32)
    b = tl.load(x + rows // 2 * CH + columns).to(tl.float32)
    c = tl.load(x + (rows - 1) * CH + columns).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def both(first, second, C: tl.constexpr):
    """Sums of two (R, C) over the rows in one reduction, interleaved: (2 * C,)."""
    return tl.reshape(tl.sum(tl.join(first, second), 0), [2 * C])


@triton.jit
def moments(sums, pivot, rows, C: tl.constexpr):
    """Mean and variance from the sums of distances to the pivot, and of their squares."""
    total, square = tl.split(tl.reshape(sums, [C, 2]))
    n = rows.to(tl.float32)
    return pivot + total / n, tl.maximum((square - total * (total / n)) / n, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_last(counter, SPLITS: tl.constexpr):
    """Whether every other program of this counter has stored what it had to; the last one sets it to 0 again."""
    tl.debug_barrier()  # all threads of this program have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def share_at(partial, share, block, CH: tl.constexpr, C: tl.constexpr):
    """Where a program's sums are, or those of several: (2 * C,) each."""
    return partial + share * (2 * CH) + block * (2 * C) + tl.arange(0, 2 * C)


@triton.jit
def blend(running_mean, running_var, mean, var, rows, momentum):
    """nn.BatchNorm's running statistics after one more batch."""
    n = rows.to(tl.float32)
    running_mean = (1.0 - momentum) * running_mean + momentum * mean
    return running_mean, (1.0 - momentum) * running_var + momentum * (var * (n / (n - 1.0)))


@triton.jit
def output(x, added, y, bits, where, bits_where, valid, EVEN, mean, scale, shift, ADD, RELU, BITS, R, C):
    """Normalises a tile, adds, applies ReLU and stores. A NaN stays one."""
    value = affine(x.to(tl.float32) - mean[None, :], scale, shift)
    if ADD:
        value += added.to(tl.float32)
    dead = is_dead(value, y.dtype.element_ty)
    if BITS:
        store(bits + bits_where, pack(~dead, R, C), valid, EVEN)
    if RELU:
        value = tl.where(dead, 0.0, value)
    store(y + where, value.to(y.dtype.element_ty), valid, EVEN)


@triton.jit
def gradient(g, dy2, signs, where, far, valid, EVEN, scale, shift, MODE, FORK, R, C):
    """The gradient behind the ReLU: MODE 0 has none, 1 finds its sign again, 2 has it in the signs."""
    dtype: tl.constexpr = g.dtype
    if FORK:
        g = (g.to(tl.float32) + load_last(dy2 + where, valid, EVEN).to(tl.float32)).to(dtype)
    if MODE == 1:
        g = tl.where(is_dead(affine(far, scale, shift), dtype), tl.zeros_like(g), g)
    if MODE == 2:
        g = tl.where(unpack(signs, R, C), g, tl.zeros_like(g))
    return g
