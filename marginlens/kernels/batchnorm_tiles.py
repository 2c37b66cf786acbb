"""Functions of one tile for batch norm: load, store, sum, normalise, and the gradient.

`batchnorm_kernels.py` has the kernels that walk over all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(keep, R: tl.constexpr, C: tl.constexpr):
    """Return eight neighbouring channels' truth values as one byte: (R, C) to (R, C // 8)."""
    bits = tl.reshape(keep.to(tl.int32), [R, C // 8, 8]) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, 2).to(tl.uint8)


@triton.jit
def unpack(bits, R: tl.constexpr, C: tl.constexpr):
    """Undo `pack`."""
    return tl.reshape((bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [R, C]) != 0


@triton.jit
def is_dead(value, DTYPE: tl.constexpr):
    """True where a value rounded to DTYPE is not positive: half the least positive number rounds to 0.

    NaN gives False.
    """
    if DTYPE.is_fp16():
        return value <= 2.0**-25
    if DTYPE.is_bf16():
        return value <= 2.0**-134
    return value <= 0.0


@triton.jit
def load(where, valid, EVEN: tl.constexpr):
    """Load a tile, with zeros beyond the valid rows. If EVEN, all rows are valid."""
    if EVEN:
        return tl.load(where)
    return tl.load(where, valid[:, None], 0)


@triton.jit
def load_last(where, valid, EVEN: tl.constexpr):
    """Load a tile that this pass does not read again, so the cache may evict it first."""
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
    """Return the norm's value. Forward and backward both call this, so they agree on its sign to the last bit."""
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
    """Return the median of three rows.

    For any distribution, at most 3 in k^4 columns have a pivot that is k deviations or more from the mean.
    """
    a = tl.load(x + columns).to(tl.float32)
    b = tl.load(x + rows // 2 * CH + columns).to(tl.float32)
    c = tl.load(x + (rows - 1) * CH + columns).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def both(first, second, C: tl.constexpr):
    """Sum two (R, C) tiles over the rows in one reduction, interleaved: (2 * C,)."""
    return tl.reshape(tl.sum(tl.join(first, second), 0), [2 * C])


@triton.jit
def moments(sums, pivot, rows, C: tl.constexpr):
    """Return mean and variance from the sums of distances to the pivot and of their squares."""
    total, square = tl.split(tl.reshape(sums, [C, 2]))
    n = rows.to(tl.float32)
    return pivot + total / n, tl.maximum((square - total * (total / n)) / n, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_last(counter, SPLITS: tl.constexpr):
    """True if every other program of this counter has stored its results. The last program resets the counter to 0."""
    tl.debug_barrier()  # until all threads of this program have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def share_at(partial, share, block, CH: tl.constexpr, C: tl.constexpr):
    """Return the addresses of one program's sums, or of several programs': (2 * C,) each."""
    return partial + share * (2 * CH) + block * (2 * C) + tl.arange(0, 2 * C)


@triton.jit
def blend(running_mean, running_var, mean, var, rows, momentum):
    """Return nn.BatchNorm's running statistics after one more batch."""
    n = rows.to(tl.float32)
    running_mean = (1.0 - momentum) * running_mean + momentum * mean
    return running_mean, (1.0 - momentum) * running_var + momentum * (var * (n / (n - 1.0)))


@triton.jit
def output(x, added, y, bits, where, bits_where, valid, EVEN, mean, scale, shift, ADD, RELU, BITS, R, C):
    """Normalise a tile, add, apply ReLU and store. NaN stays NaN."""
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
    """Return the gradient behind the ReLU.

    MODE 0: no ReLU. MODE 1: the sign is computed again. MODE 2: the sign is read from `signs`.
    """
    dtype: tl.constexpr = g.dtype
    if FORK:
        g = (g.to(tl.float32) + load_last(dy2 + where, valid, EVEN).to(tl.float32)).to(dtype)
    if MODE == 1:
        g = tl.where(is_dead(affine(far, scale, shift), dtype), tl.zeros_like(g), g)
    if MODE == 2:
        g = tl.where(unpack(signs, R, C), g, tl.zeros_like(g))
    return g
