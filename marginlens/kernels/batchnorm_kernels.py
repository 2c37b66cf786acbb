"""Triton kernels of batch norm with addition and ReLU, forward and backward; `batchnorm.py` launches them.

Many programs sum a large group and then walk over its rows again. A small group is held by one program. Every sum has a
fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from marginlens.kernels.batchnorm_tiles import (
    blend,
    both,
    gradient,
    is_last,
    load,
    load_last,
    moments,
    output,
    pivot_of,
    scale_shift,
    share_at,
    store,
)

# The compiler must not know that the signs are aligned. It would give each thread several of their bytes at once, which
# belong to channels of other threads, and move everything through shared memory.
_jit_bits = triton.jit(do_not_specialize_on_alignment=["bits"])


@triton.jit
def stats_kernel(
    x, partial, counter, stats, rows, eps, CH: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute mean, 1 / deviation and variance of each column of each group, (groups, 3, c); slow twin: nn.BatchNorm.

    Distances are measured from a pivot in the column, so a large mean costs no digits. A pivot that is k deviations
    from the mean costs the digits of k * k. The last program of a group and block to finish adds up all shares, in
    order.

    Tiles are taken from the last one down, because the convolution wrote that one last. `normalise_kernel` goes up
    again. So both find their first tiles in the L2 cache.
    """
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * C + tl.arange(0, C)
    x += group * rows * CH
    row = tl.arange(0, UNROLL * R)
    where = row[:, None] * CH + columns[None, :]
    tiles = tl.cdiv(rows, UNROLL * R)
    pivot = pivot_of(x, columns, rows, CH)
    total, square = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for now in tl.range(split, tiles, SPLITS, num_stages=STAGES):
        at = tiles - 1 - now
        tile = load(x + at * (UNROLL * R * CH) + where, row < rows - at * (UNROLL * R), EVEN)
        far = tile.to(tl.float32) - pivot[None, :]
        if not EVEN:
            far = tl.where((row < rows - at * (UNROLL * R))[:, None], far, 0.0)
        far = tl.reshape(far, [UNROLL, R, C])
        total += tl.sum(far, 0)
        square += tl.sum(far * far, 0)
    share = both(total, square, C)
    tl.store(share_at(partial, group * SPLITS + split, block, CH, C), share)
    if is_last(counter + group * tl.num_programs(1) + block, SPLITS):
        every = group * SPLITS + tl.arange(0, SPLITS)[:, None]
        shares = tl.load(share_at(partial, every, block, CH, C), cache_modifier=".cg")
        mean, var = moments(tl.sum(shares, 0), pivot, rows, C)
        own = stats + group * 3 * CH + columns
        tl.store(own, mean)
        tl.store(own + CH, 1.0 / tl.sqrt_rn(var + eps))
        tl.store(own + 2 * CH, var)


@_jit_bits
def normalise_kernel(
    x, add, y, bits, stats, weight, bias, running_mean, running_var, tracked, rows, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BITS: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute y = relu((x - mean) * scale + bias + add) and running statistics; slow twin: nn.BatchNorm, addition,
    relu.
    """
    block, at, group = tl.program_id(0) % (CH // C), tl.program_id(0) // (CH // C), tl.program_id(1)
    columns, row = block * C + tl.arange(0, C), tl.arange(0, R)
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    valid, start = row < rows - at * R, (group * rows + at * R) * CH
    tile = load_last(x + start + where, valid, EVEN)
    added = tile
    if ADD:
        added = load_last(add + start + where, valid, EVEN)
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = scale_shift(rstd, weight, bias, columns, AFFINE)
    output(
        tile, added, y + start, bits + start // 8, where, bits_where, valid, EVEN, mean, scale, shift,
        ADD, RELU, BITS, R, C,
    )  # fmt: skip
    if (at == 0) & (group == 0):
        slow_mean, slow_var = tl.load(running_mean + columns), tl.load(running_var + columns)
        for one in range(tl.num_programs(1)):
            mean, var = tl.load(stats + one * 3 * CH + columns), tl.load(stats + (one * 3 + 2) * CH + columns)
            slow_mean, slow_var = blend(slow_mean, slow_var, mean, var, rows, momentum)
        tl.store(running_mean + columns, slow_mean)
        tl.store(running_var + columns, slow_var)
        if block == 0:
            tl.store(tracked, tl.load(tracked) + tl.num_programs(1))


@_jit_bits
def sums_kernel(
    dy, dy2, x, bits, masked, stats, weight, bias, partial, counter, sums, rows, MODE: tl.constexpr,
    FORK: tl.constexpr, WRITE: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr, EVEN: tl.constexpr,
    SPLITS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute gradients of weight and bias by group, (groups, 2, c), and of `add`; slow twin: autograd."""
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * C + tl.arange(0, C)
    row = tl.arange(0, UNROLL * R)
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    tiles = tl.cdiv(rows, UNROLL * R)
    at = tiles - 1 - split
    signs = row[:, None]
    if MODE == 2:  # loaded ahead by hand, because the compiler does not do that for loads as narrow as these
        signs = load(
            bits + (group * rows + at * (UNROLL * R)) * (CH // 8) + bits_where, row < rows - at * (UNROLL * R), EVEN
        )
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = scale_shift(rstd, weight, bias, columns, AFFINE)
    plain, product = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for now in tl.range(split, tiles, SPLITS, num_stages=STAGES):
        at = tiles - 1 - now
        valid, start = row < rows - at * (UNROLL * R), (group * rows + at * (UNROLL * R)) * CH
        tile = load(x + start + where, valid, EVEN)
        # if masked is written, the next pass reads it in place of dy
        g = load_last(dy + start + where, valid, EVEN) if WRITE else load(dy + start + where, valid, EVEN)
        far = tile.to(tl.float32) - mean[None, :]
        g = gradient(g, dy2 + start, signs, where, far, valid, EVEN, scale, shift, MODE, FORK, UNROLL * R, C)
        if MODE == 2:
            ahead = at - SPLITS  # negative if there is no further tile
            there = row < tl.where(ahead < 0, 0, rows - ahead * (UNROLL * R))
            signs = load(bits + (group * rows + ahead * (UNROLL * R)) * (CH // 8) + bits_where, there, False)
        if WRITE:
            store(masked + start + where, g, valid, EVEN)
        g = g.to(tl.float32)
        plain += tl.sum(tl.reshape(g, [UNROLL, R, C]), 0)
        product += tl.sum(tl.reshape(g * far, [UNROLL, R, C]), 0)
    share = both(product, plain, C)
    tl.store(share_at(partial, group * SPLITS + split, block, CH, C), share)
    if is_last(counter + group * tl.num_programs(1) + block, SPLITS):
        every = group * SPLITS + tl.arange(0, SPLITS)[:, None]
        shares = tl.load(share_at(partial, every, block, CH, C), cache_modifier=".cg")
        products, plains = tl.split(tl.reshape(tl.sum(shares, 0), [C, 2]))
        tl.store(sums + group * 2 * CH + columns, products * rstd)
        tl.store(sums + (group * 2 + 1) * CH + columns, plains)


@triton.jit
def input_gradient_kernel(
    dy, x, dx, stats, weight, bias, sums, total, rows, MODE: tl.constexpr, AFFINE: tl.constexpr, LATE: tl.constexpr,
    CH: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute dx from dy, x and a group's sums, and add up the groups' sums; slow twin: autograd of nn.BatchNorm."""
    block, at, group = tl.program_id(0) % (CH // C), tl.program_id(0) // (CH // C), tl.program_id(1)
    columns, row = block * C + tl.arange(0, C), tl.arange(0, R)
    where = row[:, None] * CH + columns[None, :]
    valid, start = row < rows - at * R, (group * rows + at * R) * CH
    tile = load_last(x + start + where, valid, EVEN)
    g = tile
    if not LATE:
        g = load_last(dy + start + where, valid, EVEN)
    if LATE:  # written by `sums_kernel`
        g = load(dy + start + where, valid, EVEN)
    own = stats + group * 3 * CH + columns
    mean, rstd = tl.load(own), tl.load(own + CH)
    scale, shift = scale_shift(rstd, weight, bias, columns, AFFINE)
    slope = -scale * rstd * tl.load(sums + group * 2 * CH + columns) / rows.to(tl.float32)
    level = -scale * tl.load(sums + (group * 2 + 1) * CH + columns) / rows.to(tl.float32)
    far = tile.to(tl.float32) - mean[None, :]
    g = gradient(g, dy, g, where, far, valid, EVEN, scale, shift, MODE, False, R, C).to(tl.float32)
    value = tl.fma(far, slope[None, :], tl.fma(g, scale[None, :], level[None, :]))
    store(dx + start + where, value.to(dx.dtype.element_ty), valid, EVEN)
    if (at == 0) & (group == 0) & (tl.num_programs(1) > 1):
        product, plain = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for one in range(tl.num_programs(1)):
            product += tl.load(sums + one * 2 * CH + columns)
            plain += tl.load(sums + (one * 2 + 1) * CH + columns)
        tl.store(total + columns, product)
        tl.store(total + CH + columns, plain)


@_jit_bits
def whole_forward_kernel(
    x, add, y, bits, stats, weight, bias, running_mean, running_var, tracked, rows, groups, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BITS: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`stats_kernel` and `normalise_kernel` for groups that fit into one program; slow twin: the same."""
    block, row = tl.program_id(0), tl.arange(0, R)
    columns = block * C + tl.arange(0, C)
    valid = row < rows
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    slow_mean, slow_var = tl.load(running_mean + columns), tl.load(running_var + columns)
    for group in range(groups):
        start = group * rows * CH
        tile = load(x + start + where, valid, False)
        added = tile
        if ADD:
            added = load(add + start + where, valid, False)
        pivot = pivot_of(x + start, columns, rows, CH)
        far = tl.where(valid[:, None], tile.to(tl.float32) - pivot[None, :], 0.0)
        mean, var = moments(both(far, far * far, C), pivot, rows, C)
        rstd = 1.0 / tl.sqrt_rn(var + eps)
        tl.store(stats + group * 3 * CH + columns, mean)
        tl.store(stats + (group * 3 + 1) * CH + columns, rstd)
        slow_mean, slow_var = blend(slow_mean, slow_var, mean, var, rows, momentum)
        scale, shift = scale_shift(rstd, weight, bias, columns, AFFINE)
        output(
            tile, added, y + start, bits + start // 8, where, bits_where, valid, False, mean, scale, shift,
            ADD, RELU, BITS, R, C,
        )  # fmt: skip
    tl.store(running_mean + columns, slow_mean)
    tl.store(running_var + columns, slow_var)
    if block == 0:
        tl.store(tracked, tl.load(tracked) + groups)


@_jit_bits
def whole_backward_kernel(
    dy, dy2, x, bits, masked, dx, stats, weight, bias, total, rows, groups, MODE: tl.constexpr,
    FORK: tl.constexpr, WRITE: tl.constexpr, AFFINE: tl.constexpr, CH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`sums_kernel` and `input_gradient_kernel` for groups that fit into one program; slow twin: the same."""
    block, row = tl.program_id(0), tl.arange(0, R)
    columns = block * C + tl.arange(0, C)
    valid = row < rows
    where = row[:, None] * CH + columns[None, :]
    bits_where = row[:, None] * (CH // 8) + (block * (C // 8) + tl.arange(0, C // 8))[None, :]
    products, plains = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for group in range(groups):
        start = group * rows * CH
        tile, g = load(x + start + where, valid, False), load(dy + start + where, valid, False)
        signs = row[:, None]
        if MODE == 2:
            signs = load(bits + start // 8 + bits_where, valid, False)
        mean = tl.load(stats + group * 3 * CH + columns)
        rstd = tl.load(stats + (group * 3 + 1) * CH + columns)
        scale, shift = scale_shift(rstd, weight, bias, columns, AFFINE)
        far = tile.to(tl.float32) - mean[None, :]
        g = gradient(g, dy2 + start, signs, where, far, valid, False, scale, shift, MODE, FORK, R, C)
        if WRITE:
            store(masked + start + where, g, valid, False)
        g = g.to(tl.float32)
        product, plain = tl.split(tl.reshape(both(g * far, g, C), [C, 2]))
        product *= rstd
        products += product
        plains += plain
        slope, level = -scale * rstd * product / rows.to(tl.float32), -scale * plain / rows.to(tl.float32)
        value = tl.fma(far, slope[None, :], tl.fma(g, scale[None, :], level[None, :]))
        store(dx + start + where, value.to(dx.dtype.element_ty), valid, False)
    tl.store(total + columns, products)
    tl.store(total + CH + columns, plains)
