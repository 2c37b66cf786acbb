"""Triton twins of `draw.py`: the numbers that `views_pixels.views_kernel` draws for a view, bit for bit the same.

Compile these kernels with `enable_fp_fusion=False`, so that products and sums round one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from marginlens.data import draw

# columns of the table of views; a uniform value takes two: the interval's length, then its lower end
PADDED, AREA, ASPECT, MIDDLE, PADDING = (tl.constexpr(i) for i in (0, 1, 3, 5, 7))
FLIP, JITTER, FACTOR, GREY, BLUR = (tl.constexpr(i) for i in (8, 9, 10, 18, 19))
SIGMA, RADIUS, SOLARISE, MEAN, SCALE = (tl.constexpr(i) for i in (20, 22, 23, 24, 27))
ORDERS, COLUMNS = tl.constexpr(30), tl.constexpr(64)
DRAWN = tl.constexpr(16)
"""Columns that `parameters_kernel` writes; the last one is spare."""
LANES = tl.constexpr(8)
"""Lanes for the attempts at a box, two attempts in each."""

# not specialised, because each value or address would compile another kernel
NUMBERS, SCALARS = ["seed_low", "seed_high", "epoch_low", "first"], ["indices", "tables", "seeds", "epochs"]

_ATTEMPTS = tl.constexpr(draw.ATTEMPTS)
_NONE = tl.constexpr(1 << 30)


@triton.jit
def uniforms(seed, index, epoch, number, block):
    """Return the four slots of a block; twin of `draw.uniforms`."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, epoch.to(tl.uint32), number * 256 + block)
    return _uniform(a), _uniform(b), _uniform(c), _uniform(d)


@triton.jit
def _uniform(word):
    return (word >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def between(table, column, u):
    return u * tl.load(table + column) + tl.load(table + column + 1)


@triton.jit
def _below(u, n):
    return (u * n.to(tl.float32)).to(tl.int32)


@triton.jit
def round_even(x):
    """Return `torch.round` of |x| < 2^22. At 1.5 * 2^23 float32 has no fractions, and ties go to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _exp(x):
    """Twin of `draw.exp`: the same bits on all devices."""
    y = x * 0.125
    total = y * 0.0 + 1.0
    for k in tl.static_range(8):
        total = total * y * (1.0 / (8 - k)) + 1.0
    for _ in tl.static_range(3):
        total = total * total
    return total


@triton.jit
def _attempt(table, u, v, attempt, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return one of `draw.resized_boxes`' boxes as one number, or _NONE. Earlier attempts give smaller numbers.

    Its bits are attempt, height and width.
    """
    area = between(table, AREA, u) * (HEIGHT * WIDTH * 1.0)
    aspect = _exp(between(table, ASPECT, v))
    w = round_even(tl.sqrt_rn(area * aspect)).to(tl.int32)
    h = round_even(tl.sqrt_rn(tl.div_rn(area, aspect))).to(tl.int32)
    fits = (attempt < _ATTEMPTS) & (w > 0) & (w <= WIDTH) & (h > 0) & (h <= HEIGHT)
    return tl.where(fits, (attempt << 20) + (h << 10) + w, _NONE)


@triton.jit
def box(
    table, seed, index, lane, epoch, number, u, v,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Return top, left, height and width; twin of `draw.resized_boxes` and `draw.padded_boxes`.

    All attempts are made at once, in lanes. `index` is a scalar, or has an axis of length 1 for the lanes. u and v give
    the box's position.
    """
    if tl.load(table + PADDED) != 0:
        padding = tl.load(table + PADDING).to(tl.int32)
        top = _below(u, HEIGHT + 2 * padding - SIZE + 1) - padding
        left = _below(v, WIDTH + 2 * padding - SIZE + 1) - padding
        h = top * 0 + SIZE
        w = top * 0 + SIZE
    else:
        a, b, c, d = uniforms(seed, index, epoch, number, lane + 4)
        even = _attempt(table, a, b, 2 * lane, HEIGHT, WIDTH)
        odd = _attempt(table, c, d, 2 * lane + 1, HEIGHT, WIDTH)
        first = tl.min(tl.minimum(even, odd), axis=AXIS)
        found = first < _NONE
        middle_h = tl.load(table + MIDDLE).to(tl.int32)
        middle_w = tl.load(table + MIDDLE + 1).to(tl.int32)
        h = tl.where(found, (first >> 10) & 1023, middle_h)
        w = tl.where(found, first & 1023, middle_w)
        top = tl.where(found, _below(u, HEIGHT - h + 1), (HEIGHT - middle_h) // 2)
        left = tl.where(found, _below(v, WIDTH - w + 1), (WIDTH - middle_w) // 2)
    return top, left, h, w


@triton.jit
def jitter_factors(table, seed, index, epoch, number):
    """Twin of `draw.jitter_factors`."""
    a, b, c, d = uniforms(seed, index, epoch, number, 1)
    return (
        between(table, FACTOR, a),
        between(table, FACTOR + 2, b),
        between(table, FACTOR + 4, c),
        between(table, FACTOR + 6, d),
    )


@triton.jit
def order_of(u):
    return (u * 24.0).to(tl.int32)


@triton.jit
def moment(seeds, epochs, seed_low, seed_high, epoch_low):
    """Return seed and epoch from tensors on the device, or from the bits of the numbers that were passed."""
    if seeds is None:
        low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
        seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    else:
        seed = tl.load(seeds).to(tl.uint64)
    epoch = epoch_low if epochs is None else tl.load(epochs)
    return seed, epoch


@triton.jit(do_not_specialize=[*NUMBERS, "n"], do_not_specialize_on_alignment=SCALARS)
def parameters_kernel(
    out, indices, tables, seeds, epochs, seed_low, seed_high, epoch_low, first, n,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the numbers that `views_kernel` draws, for ROWS samples a program. Slow twin: `views.parameters`."""
    view = tl.program_id(1)
    table = tables + view * COLUMNS
    number = first + view
    sample = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = sample < n
    index = tl.load(indices + sample, mask=here, other=0)
    seed, epoch = moment(seeds, epochs, seed_low, seed_high, epoch_low)
    u_top, u_left, u_flip, u_jitter = uniforms(seed, index, epoch, number, 0)
    u_order, u_grey, u_blur, u_sigma = uniforms(seed, index, epoch, number, 2)
    u_solarise, _, _, _ = uniforms(seed, index, epoch, number, 3)
    lane = tl.arange(0, LANES)[None, :]
    column = index[:, None]
    top, left, h, w = box(table, seed, column, lane, epoch, number, u_top, u_left, SIZE, HEIGHT, WIDTH, 1)
    brightness, contrast, saturation, shift = jitter_factors(table, seed, index, epoch, number)
    place = out + (view.to(tl.int64) * n + sample) * DRAWN
    tl.store(place, top.to(tl.float32), mask=here)
    tl.store(place + 1, left.to(tl.float32), mask=here)
    tl.store(place + 2, h.to(tl.float32), mask=here)
    tl.store(place + 3, w.to(tl.float32), mask=here)
    tl.store(place + 4, brightness, mask=here)
    tl.store(place + 5, contrast, mask=here)
    tl.store(place + 6, saturation, mask=here)
    tl.store(place + 7, shift, mask=here)
    tl.store(place + 8, (u_flip < tl.load(table + FLIP)).to(tl.float32), mask=here)
    tl.store(place + 9, (u_jitter < tl.load(table + JITTER)).to(tl.float32), mask=here)
    tl.store(place + 10, order_of(u_order).to(tl.float32), mask=here)
    tl.store(place + 11, (u_grey < tl.load(table + GREY)).to(tl.float32), mask=here)
    tl.store(place + 12, (u_blur < tl.load(table + BLUR)).to(tl.float32), mask=here)
    tl.store(place + 13, between(table, SIGMA, u_sigma), mask=here)
    tl.store(place + 14, (u_solarise < tl.load(table + SOLARISE)).to(tl.float32), mask=here)
