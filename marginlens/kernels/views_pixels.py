"""Triton twins of `pixels.py`, and the kernel that makes a whole view. `fused.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from marginlens.data import pixels
from marginlens.kernels.views_draw import (
    BLUR,
    COLUMNS,
    FLIP,
    GREY,
    JITTER,
    LANES,
    MEAN,
    NUMBERS,
    ORDERS,
    RADIUS,
    SCALARS,
    SCALE,
    SIGMA,
    SOLARISE,
    between,
    box,
    jitter_factors,
    moment,
    order_of,
    round_even,
    uniforms,
)

_RED, _GREEN, _BLUE = (tl.constexpr(x) for x in pixels.GREY)


@triton.jit
def _tap(i, t, start, length, step, reach, SIZE: tl.constexpr, SOURCE: tl.constexpr, TAPS: tl.constexpr):
    """Return weight and position of the t-th source pixel under pixel i; twin of `pixels._triangles` before it
    normalises.
    """
    centre = (i.to(tl.float32) + 0.5) * step
    j = tl.floor(centre - reach - 0.5).to(tl.int32) + 1 + t
    at = j.to(tl.float32) + 0.5
    if TAPS > 2:  # with 2 taps nothing shrinks, and the triangle's reach is one pixel
        at = tl.div_rn(at, reach)
        centre = tl.div_rn(centre, reach)
    weight = tl.maximum(1.0 - tl.abs(at - centre), 0.0)
    place = j + start
    inside = (i >= 0) & (i < SIZE) & (j >= 0) & (j < length) & (place >= 0) & (place < SOURCE)
    # clamped, because an address must be valid even if its weight is zero
    return tl.where(inside, weight, 0.0), tl.minimum(tl.maximum(place, 0), SOURCE - 1)


@triton.jit
def _axis(i, start, length, SIZE: tl.constexpr, SOURCE: tl.constexpr, TAPS: tl.constexpr, UNROLL: tl.constexpr):
    """Return step, reach, number of taps and normalising factor for `_tap` along one axis."""
    step = tl.div_rn(length.to(tl.float32), SIZE * 1.0)
    reach = tl.maximum(step, 1.0)
    taps = TAPS
    if TAPS > 2:
        taps = tl.ceil(2.0 * reach).to(tl.int32)
    total = i.to(tl.float32) * 0.0
    for t in tl.range(0, taps, loop_unroll_factor=UNROLL):
        weight, _ = _tap(i, t, start, length, step, reach, SIZE, SOURCE, TAPS)
        total += weight
    return step, reach, taps, tl.div_rn(1.0, tl.maximum(total, 1e-3))


@triton.jit
def _crop(
    image, i, j, top, left, h, w,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Twin of `pixels.crop` for one image: its channels at rows i (B, 1) and columns j (1, B), in [0, 1]."""
    down, reach_down, rows, scale_down = _axis(i, top, h, SIZE, HEIGHT, TAPS, UNROLL)
    along, reach_along, columns, scale_along = _axis(j, left, w, SIZE, WIDTH, TAPS, UNROLL)
    red = (i + j).to(tl.float32) * 0.0
    green = red
    blue = red
    for s in tl.range(0, rows, loop_unroll_factor=UNROLL):
        weight, y = _tap(i, s, top, h, down, reach_down, SIZE, HEIGHT, TAPS)
        weight *= scale_down
        for t in tl.range(0, columns, loop_unroll_factor=UNROLL):
            share, x = _tap(j, t, left, w, along, reach_along, SIZE, WIDTH, TAPS)
            both = weight * (share * scale_along)
            place = image + (y * WIDTH + x)
            red += both * tl.load(place).to(tl.float32)
            green += both * tl.load(place + HEIGHT * WIDTH).to(tl.float32)
            blue += both * tl.load(place + 2 * HEIGHT * WIDTH).to(tl.float32)
    return red * (1.0 / 255.0), green * (1.0 / 255.0), blue * (1.0 / 255.0)


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _grey(red, green, blue):
    return red * _RED + green * _GREEN + blue * _BLUE


@triton.jit
def _hue(red, green, blue, shift):
    """Twin of `pixels.hue`, which explains the formula."""
    low = tl.minimum(tl.minimum(red, green), blue)
    chroma = tl.maximum(tl.maximum(red, green), blue) - low
    t = tl.abs((red - green - blue + low) / tl.maximum(chroma, 1e-9) + 2.0)
    t = tl.where(blue < green, -t, t) + 6.0 * shift
    t = t - 6.0 * round_even(t * (1.0 / 6.0))
    red = _clamp(tl.abs(t) - 1.0) * chroma + low
    green = _clamp(2.0 - tl.abs(t + 1.0)) * chroma + low
    blue = _clamp(2.0 - tl.abs(t - 1.0)) * chroma + low
    return _clamp(red), _clamp(green), _clamp(blue)


@triton.jit
def _jitter(red, green, blue, brightness, contrast, saturation, shift, order, SIZE: tl.constexpr):
    """Twin of `pixels.jitter`. The numbers of its four operations are pairs of bits in `order`."""
    for k in range(4):
        operation = (order >> (2 * k)) & 3
        if operation == 3:
            red, green, blue = _hue(red, green, blue, shift)
        else:
            factor = tl.where(operation == 0, brightness, tl.where(operation == 1, contrast, saturation))
            other = red * 0.0
            if operation == 1:
                # the sum needs no mask: pixels beyond the view stay zero until contrast, which comes only once
                mean = tl.sum(tl.sum(_grey(red, green, blue), axis=1), axis=0) * (1.0 / (SIZE * SIZE))
                other += (1.0 - factor) * mean
            elif operation == 2:
                other = (1.0 - factor) * _grey(red, green, blue)
            red = _clamp(factor * red + other)
            green = _clamp(factor * green + other)
            blue = _clamp(factor * blue + other)
    return red, green, blue


@triton.jit
def _weigh(distance, sigma, radius):
    ratio = distance.to(tl.float32) / sigma
    weight = tl.exp(-0.5 * ratio * ratio)
    return tl.where((distance <= radius) & (weight > 1e-12), weight, 0.0)


@triton.jit
def _blurs(i, j, sigma, radius, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the matrix of `pixels.blur` along one axis: the weight of pixel j in pixel i, with both mirror images."""
    inside = (i < SIZE) & (j < SIZE)
    total = 2.0 * tl.sum(_weigh(tl.arange(0, BLOCK), sigma, radius), axis=0) - 1.0
    matrix = _weigh(tl.abs(i - j), sigma, radius)
    matrix += tl.where(j > 0, _weigh(i + j, sigma, radius), 0.0)
    matrix += tl.where(j < SIZE - 1, _weigh(2 * (SIZE - 1) - i - j, sigma, radius), 0.0)
    return tl.where(inside, matrix / total, 0.0)


@triton.jit
def _product(a, b, INTERPRET: tl.constexpr):
    """Multiply float32 matrices in [0, 1]. Each is a sum of two float16; the product of the two remainders is dropped.

    The sum leaves an error of 2^-24, as float32 does.
    """
    if INTERPRET:
        return tl.dot(a, b)
    a_most, b_most = a.to(tl.float16), b.to(tl.float16)
    a_rest, b_rest = (a - a_most.to(tl.float32)).to(tl.float16), (b - b_most.to(tl.float32)).to(tl.float16)
    return tl.dot(a_most, b_most, tl.dot(a_rest, b_most, tl.dot(a_most, b_rest)))


@triton.jit
def _finish(place, here, table, red, green, blue, solarised):
    """Solarise, normalise and store; twins: `pixels.solarise` and `pixels.normalise`."""
    if solarised:
        red = tl.where(red >= 0.5, 1.0 - red, red)
        green = tl.where(green >= 0.5, 1.0 - green, green)
        blue = tl.where(blue >= 0.5, 1.0 - blue, blue)
    red = (red - tl.load(table + MEAN)) * tl.load(table + SCALE)
    green = (green - tl.load(table + MEAN + 1)) * tl.load(table + SCALE + 1)
    blue = (blue - tl.load(table + MEAN + 2)) * tl.load(table + SCALE + 2)
    kind = place.dtype.element_ty
    tl.store(place, red.to(kind), mask=here)
    tl.store(place + 1, green.to(kind), mask=here)
    tl.store(place + 2, blue.to(kind), mask=here)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["rows", *SCALARS])
def views_kernel(
    out, images, rows, indices, tables, seeds, epochs, seed_low, seed_high, epoch_low, first,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
    UNROLL: tl.constexpr, CHANNELS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Make view v of sample k in program (k, v). Slow twin: `views.make_view`."""
    sample, view = tl.program_id(0), tl.program_id(1)
    table = tables + view * COLUMNS
    number = first + view
    index = tl.load(indices + sample)
    row = sample.to(tl.int64) if rows is None else tl.load(rows + sample)
    seed, epoch = moment(seeds, epochs, seed_low, seed_high, epoch_low)
    u_top, u_left, u_flip, u_jitter = uniforms(seed, index, epoch, number, 0)
    u_order, u_grey, u_blur, u_sigma = uniforms(seed, index, epoch, number, 2)

    lane = tl.arange(0, LANES)
    top, left, h, w = box(table, seed, index, lane, epoch, number, u_top, u_left, SIZE, HEIGHT, WIDTH, 0)
    # images are transposed, because Triton lays threads along the first axis by default
    j, i = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    mirrored = tl.where(u_flip < tl.load(table + FLIP), SIZE - 1 - j, j)
    image = images + row * (3 * HEIGHT * WIDTH)
    red, green, blue = _crop(image, i, mirrored, top, left, h, w, SIZE, HEIGHT, WIDTH, TAPS, UNROLL)

    if u_jitter < tl.load(table + JITTER):
        brightness, contrast, saturation, shift = jitter_factors(table, seed, index, epoch, number)
        order = tl.load(table + ORDERS + order_of(u_order)).to(tl.int32)
        red, green, blue = _jitter(red, green, blue, brightness, contrast, saturation, shift, order, SIZE)
    if u_grey < tl.load(table + GREY):
        red = _grey(red, green, blue)
        green = red
        blue = red
    place = out + (view * tl.num_programs(0) + sample).to(tl.int64) * (3 * SIZE * SIZE) + (i * SIZE + j) * 3
    here = (i < SIZE) & (j < SIZE)
    solarised = uniforms(seed, index, epoch, number, 3)[0] < tl.load(table + SOLARISE)
    if u_blur < tl.load(table + BLUR):
        sigma = between(table, SIGMA, u_sigma)
        matrix = _blurs(j, i, sigma, tl.load(table + RADIUS).to(tl.int32), SIZE, BLOCK)  # j goes down the tile
        turned = tl.trans(matrix)
        for _ in tl.range(0, 3, loop_unroll_factor=CHANNELS):  # one channel at a time: large views need the registers
            red, green, blue = green, blue, _product(_product(matrix, red, INTERPRET), turned, INTERPRET)
        _finish(place, here, table, red, green, blue, solarised)
    else:  # repeated, because code after the branch would force the matrix product's layout on all views
        _finish(place, here, table, red, green, blue, solarised)
