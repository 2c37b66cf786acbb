"""Jitted log-sum-exp over all pairs, tile by tile, and its gradients. `lse.py` launches these kernels.

Cosines are bounded. So up to a scale of `LIMIT`, half the scale replaces flash attention's running maximum. Weights
then stay within e^-60..e^20, which leaves as much room again for their factors. The tiles that need a mask, because
they hold a dropped column or the last one, are known before the loop. The other tiles carry no mask.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LIMIT = tl.constexpr(40.0)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _dot(a, b, acc):
    if INTERPRET:  # because the interpreter multiplies bf16 as if its bits were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _products(a0, a1, a2, b0, b1, b2, acc, PARTS: tl.constexpr):
    """Return acc + a b to the last part's precision. a and b are sums of parts, each 8 bits finer than the one
    before.
    """
    if PARTS == 3:
        acc = _dot(a2, b0, acc)
        acc = _dot(a0, b2, acc)
        acc = _dot(a1, b1, acc)
    if PARTS >= 2:
        acc = _dot(a1, b0, acc)
        acc = _dot(a0, b1, acc)
    return _dot(a0, b0, acc)


@triton.jit
def _weighted(w, v0, v1, v2, acc, PARTS: tl.constexpr):
    """Return acc + w v, with w cut into as many parts as v."""
    w0, w1, w2 = w.to(v0.dtype), w.to(v0.dtype), w.to(v0.dtype)
    if PARTS >= 2:
        w1 = (w - w0.to(tl.float32)).to(v0.dtype)
    if PARTS == 3:
        w2 = (w - w0.to(tl.float32) - w1.to(tl.float32)).to(v0.dtype)
    return _products(w0, w1, w2, v0, v1, v2, acc, PARTS)


@triton.jit
def _rows(
    ptr, part, start, count, first,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows from `start` and COLS columns from `first` of one part of a (parts, count, D) tensor."""
    row, col = tl.arange(0, ROWS), first + tl.arange(0, COLS)
    at = ptr + (part * count.to(tl.int64) + start) * D + (row[:, None] * D + col[None, :])
    if RAGGED:
        return tl.load(at, mask=(start + row[:, None] < count) & (col[None, :] < D), other=0.0)
    if D % COLS != 0:
        return tl.load(at, mask=col[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def _parts(
    ptr, start, count, first,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Load the same tile of every part. The first part stands in for missing parts."""
    x0 = _rows(ptr, 0, start, count, first, D, ROWS, COLS, RAGGED)
    x1, x2 = x0, x0
    if PARTS >= 2:
        x1 = _rows(ptr, 1, start, count, first, D, ROWS, COLS, RAGGED)
    if PARTS == 3:
        x2 = _rows(ptr, 2, start, count, first, D, ROWS, COLS, RAGGED)
    return x0, x1, x2


@triton.jit
def _tile(
    x0, x1, x2, x_ptr, y_ptr, row, n, col, m, piece,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, OUT: tl.constexpr,
    SECOND: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the cosines of a tile (ROWS, COLS), and the columns' vectors (COLS, OUT) for the second product."""
    s = tl.zeros((ROWS, COLS), tl.float32)
    if CHUNK >= D:
        v0, v1, v2 = _parts(y_ptr, col, m, 0, D, COLS, CHUNK, RAGGED, PARTS)
        s = _products(x0, x1, x2, tl.trans(v0), tl.trans(v1), tl.trans(v2), s, PARTS)
    else:
        for k in range(0, D, CHUNK):
            a0, a1, a2 = _parts(x_ptr, row, n, k, D, ROWS, CHUNK, True, PARTS)
            b0, b1, b2 = _parts(y_ptr, col, m, k, D, COLS, CHUNK, RAGGED, PARTS)
            s = _products(a0, a1, a2, tl.trans(b0), tl.trans(b1), tl.trans(b2), s, PARTS)
        if SECOND:
            v0, v1, v2 = _parts(y_ptr, col, m, piece * OUT, D, COLS, OUT, RAGGED, PARTS)
        else:
            v0, v1, v2 = s, s, s
    return s, v0, v1, v2


@triton.jit
def _span(drop_ptr, rows, n, R: tl.constexpr):
    """Return the dropped columns as two ranges [p, q), [r, s): one for each of two drops, or one for all."""
    p, q, r, s = FAR, 0, FAR, 0
    for c in tl.static_range(R):
        j = tl.load(drop_ptr + rows.to(tl.int64) * R + c, mask=rows < n, other=0).to(tl.int32)
        low = tl.min(tl.where(rows < n, j, FAR))
        high = tl.max(tl.where(rows < n, j + 1, 0))
        if R == 2 and c == 1:
            r, s = low, high
        else:
            p, q = tl.minimum(p, low), tl.maximum(q, high)
    return p, q, r, s


@triton.jit
def _runs(p, q, r, s, first, last, COLS: tl.constexpr):
    """Return two ranges of columns as two disjoint, ordered runs of tiles within [first, last): starts and lengths."""
    a, b = tl.maximum(p // COLS, first), tl.minimum((q + COLS - 1) // COLS, last)
    c, d = tl.maximum(r // COLS, first), tl.minimum((s + COLS - 1) // COLS, last)
    nothing = a >= b
    a, b = tl.where(nothing, c, a), tl.where(nothing, d, b)
    nothing = c >= d
    c, d = tl.where(nothing, a, c), tl.where(nothing, b, d)
    end = tl.maximum(b, d)
    b = tl.where(a <= c, b, d)  # the end of the run that starts first
    a, c = tl.minimum(a, c), tl.maximum(a, c)
    touch = c <= b
    b, c = tl.where(touch, end, b), tl.where(touch, end, c)
    return a, tl.maximum(b - a, 0), c, tl.maximum(end - c, 0)


@triton.jit
def _masked(k, a, i, b, j, full):
    """Return the k-th tile that needs a mask: run a (i tiles), run b (j tiles), then the tile that is not full."""
    return tl.where(k < i, a + k, tl.where(k < i + j, b + k - i, full))


@triton.jit
def _plain(k, a, i, b, j):
    """Return the k-th tile outside both runs."""
    k = tl.where(k >= a, k + i, k)
    return tl.where(k >= b, k + j, k)


@triton.jit
def _kept(drop_ptr, rows, n, cols, R: tl.constexpr):
    """True where a row keeps a column, (rows, cols); `drop` is indexed by rows."""
    keep = (rows[:, None] < n) | (cols[None, :] < 0)
    for c in tl.static_range(R):
        j = tl.load(drop_ptr + rows.to(tl.int64) * R + c, mask=rows < n, other=-1).to(tl.int32)
        keep = keep & (j[:, None] != cols[None, :])
    return keep


@triton.jit(do_not_specialize=["n", "m", "tiles"])
def forward_kernel(
    x_ptr, y_ptr, scale_ptr, drop_ptr, A_ptr, slope_ptr, n, m, tiles,
    D: tl.constexpr, R: tl.constexpr, SLOPE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, OUT: tl.constexpr, SLOW: tl.constexpr,
):  # fmt: skip
    """Compute A and its slope, scale * sum of w_j y_j with softmax weights w, over one split of the keys.

    Twin: `reference.neg_lse`, and its gradient.
    """
    start, split, piece = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    rows = start + tl.arange(0, ROWS)
    true_scale = tl.load(scale_ptr)
    scale = true_scale * LOG2E
    first = split * tiles
    last = tl.minimum(first + tiles, (m + COLS - 1) // COLS)
    full = tl.minimum(last, m // COLS)
    p, q, r, s = _span(drop_ptr, rows, n, R)
    a, i, b, j = _runs(p, q, r, s, first, full, COLS)
    x0, x1, x2 = _parts(x_ptr, start, n, 0, D, ROWS, CHUNK, True, PARTS)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, OUT), tl.float32)
    if scale <= LIMIT * LOG2E:
        top = tl.zeros((ROWS,), tl.float32) + 0.5 * scale
        for k in tl.range(0, i + j + last - full, num_stages=SLOW):
            col = _masked(k, a, i, b, j, full) * COLS
            cols = col + tl.arange(0, COLS)
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, SLOPE, True, PARTS)  # fmt: skip
            w = tl.exp2(logits * scale - 0.5 * scale)
            w = tl.where(_kept(drop_ptr, rows, n, cols, R) & (cols[None, :] < m), w, 0.0)
            total += tl.sum(w, 1)
            if SLOPE:
                acc = _weighted(w, v0, v1, v2, acc, PARTS)
        for k in range(first, full - i - j):
            col = _plain(k, a, i, b, j) * COLS
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, SLOPE, False, PARTS)  # fmt: skip
            w = tl.exp2(logits * scale - 0.5 * scale)
            total += tl.sum(w, 1)
            if SLOPE:
                acc = _weighted(w, v0, v1, v2, acc, PARTS)
    else:
        top = tl.full((ROWS,), -1e30, tl.float32)  # finite, because a fully dropped tile would give NaN
        for k in tl.range(first, last, num_stages=SLOW):
            col = k * COLS
            cols = col + tl.arange(0, COLS)
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, SLOPE, True, PARTS)  # fmt: skip
            keep = _kept(drop_ptr, rows, n, cols, R) & (cols[None, :] < m)
            logits = tl.where(keep, logits * scale, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            w = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(top - higher)
            top = higher
            total = total * shrink + tl.sum(w, 1)
            if SLOPE:
                acc = _weighted(w, v0, v1, v2, acc * shrink[:, None], PARTS)
    at = (split * n + rows).to(tl.int64)
    if piece == 0:
        tl.store(A_ptr + at, (top + tl.log2(total)) * LN2, mask=rows < n)
    if SLOPE:
        out = piece * OUT + tl.arange(0, OUT)
        slope = acc * (true_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        tl.store(slope_ptr + at[:, None] * D + out[None, :], slope, mask=(rows[:, None] < n) & (out[None, :] < D))


@triton.jit(do_not_specialize=["n", "splits"])
def join_kernel(
    parts_ptr, slopes_ptr, A_ptr, slope_ptr, n, splits,
    D: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Join splits of the keys in order: A = logsumexp of the parts, slope = their softmax-weighted mean."""
    rows, out = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * OUT + tl.arange(0, OUT)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    for k in range(splits):
        top = tl.maximum(top, tl.load(parts_ptr + k * n + rows, mask=rows < n, other=0.0))
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, OUT), tl.float32)
    inside = (rows[:, None] < n) & (out[None, :] < D)
    for k in range(splits):
        w = tl.exp2((tl.load(parts_ptr + k * n + rows, mask=rows < n, other=0.0) - top) * LOG2E)
        total += w
        if SLOPE:
            at = (k * n + rows).to(tl.int64)
            acc += w[:, None] * tl.load(slopes_ptr + at[:, None] * D + out[None, :], mask=inside, other=0.0)
    tl.store(A_ptr + rows, top + tl.log2(total) * LN2, mask=rows < n)
    if SLOPE:
        at = rows.to(tl.int64)
        slope = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(slope_ptr + at[:, None] * D + out[None, :], slope, mask=inside)


@triton.jit(do_not_specialize=["n", "m"])
def prepare_kernel(
    g_ptr, A_ptr, scale_ptr, drop_ptr, a_ptr, spans_ptr, n, m,
    R: tl.constexpr, SET: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Prepare the gradient: a = g e^(scale/2 - A), (m,), and for each block of rows the columns that need a mask.

    Those are the columns whose own drops are in the block. For a set against itself, add the columns that the block
    drops.
    """
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    half = tl.load(scale_ptr) * 0.5
    g = tl.load(g_ptr + rows, mask=rows < m, other=0.0)
    A = tl.load(A_ptr + rows, mask=rows < m, other=0.0)
    tl.store(a_ptr + rows, g * tl.exp2((half - A) * LOG2E), mask=rows < m)
    p, q, r, s = FAR, 0, FAR, 0
    if SET:
        p, q, r, s = _span(drop_ptr, rows, n, R)
    low, high = block * ROWS, block * ROWS + ROWS
    for c in tl.static_range(R):
        least, most = tl.full((STEP,), FAR, tl.int32), tl.zeros((STEP,), tl.int32)
        for start in range(0, m, STEP):
            cols = start + tl.arange(0, STEP)
            i = tl.load(drop_ptr + cols.to(tl.int64) * R + c, mask=cols < m, other=-1).to(tl.int32)
            hit = (i >= low) & (i < high)
            least = tl.minimum(least, tl.where(hit, cols, FAR))
            most = tl.maximum(most, tl.where(hit, cols + 1, 0))
        if R == 2 and c == 1:
            r, s = tl.minimum(r, tl.min(least)), tl.maximum(s, tl.max(most))
        else:
            p, q = tl.minimum(p, tl.min(least)), tl.maximum(q, tl.max(most))
    if R > 0 and low < n:
        tl.store(spans_ptr + block * 4, p)
        tl.store(spans_ptr + block * 4 + 1, q)
        tl.store(spans_ptr + block * 4 + 2, r)
        tl.store(spans_ptr + block * 4 + 3, s)


@triton.jit(do_not_specialize=["n", "m", "tiles"])
def backward_kernel(
    x_ptr, y_ptr, scale_ptr, drop_ptr, g_ptr, A_ptr, a_ptr, spans_ptr, out_ptr, n, m, tiles,
    D: tl.constexpr, R: tl.constexpr, SET: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, OUT: tl.constexpr, SLOW: tl.constexpr,
):  # fmt: skip
    """Compute x's gradient from one split of y: scale * sum over j of W_ij y_j. Here x_i is among the keys of A_j.

    W_ij = g_j e^(s_ij - A_j). For a set against itself (x is y), add g_i e^(s_ij - A_i), because y_j is then among the
    keys of A_i, too. Dropped pairs add nothing. Twin: the gradient of `reference.neg_lse`.
    """
    start, split, piece = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    rows = start + tl.arange(0, ROWS)
    true_scale = tl.load(scale_ptr)
    scale = true_scale * LOG2E
    first = split * tiles
    last = tl.minimum(first + tiles, (m + COLS - 1) // COLS)
    full = tl.minimum(last, m // COLS)
    p, q, r, s = FAR, 0, FAR, 0
    if R > 0:
        at = spans_ptr + tl.program_id(0) * 4
        p, q, r, s = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    a, i, b, j = _runs(p, q, r, s, first, full, COLS)
    x0, x1, x2 = _parts(x_ptr, start, n, 0, D, ROWS, CHUNK, True, PARTS)
    acc = tl.zeros((ROWS, OUT), tl.float32)
    if scale <= LIMIT * LOG2E:
        own = tl.zeros((ROWS,), tl.float32)
        if SET:
            own = tl.load(a_ptr + rows, mask=rows < n, other=0.0)
        for k in tl.range(0, i + j + last - full, num_stages=SLOW):
            col = _masked(k, a, i, b, j, full) * COLS
            cols = col + tl.arange(0, COLS)
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, True, True, PARTS)  # fmt: skip
            theirs = tl.load(a_ptr + cols, mask=cols < m, other=0.0)
            w = tl.where(tl.trans(_kept(drop_ptr, cols, m, rows, R)), theirs[None, :], 0.0)
            if SET:
                w += tl.where(_kept(drop_ptr, rows, n, cols, R) & (cols[None, :] < m), own[:, None], 0.0)
            w *= tl.exp2(logits * scale - 0.5 * scale)
            acc = _weighted(w, v0, v1, v2, acc, PARTS)
        for k in range(first, full - i - j):
            col = _plain(k, a, i, b, j) * COLS
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, True, False, PARTS)  # fmt: skip
            w = tl.load(a_ptr + col + tl.arange(0, COLS))[None, :]
            if SET:
                w = own[:, None] + w
            w = tl.exp2(logits * scale - 0.5 * scale) * w
            acc = _weighted(w, v0, v1, v2, acc, PARTS)
    else:
        for k in tl.range(first, last, num_stages=SLOW):
            col = k * COLS
            cols = col + tl.arange(0, COLS)
            logits, v0, v1, v2 = _tile(x0, x1, x2, x_ptr, y_ptr, start, n, col, m, piece, D, ROWS, COLS,
                                          CHUNK, OUT, True, True, PARTS)  # fmt: skip
            logits *= scale
            g = tl.load(g_ptr + cols, mask=cols < m, other=0.0)
            A = tl.load(A_ptr + cols, mask=cols < m, other=0.0) * LOG2E
            keep = tl.trans(_kept(drop_ptr, cols, m, rows, R))
            w = tl.where(keep, g[None, :] * tl.exp2(logits - A[None, :]), 0.0)
            if SET:
                g = tl.load(g_ptr + rows, mask=rows < n, other=0.0)
                A = tl.load(A_ptr + rows, mask=rows < n, other=0.0) * LOG2E
                keep = _kept(drop_ptr, rows, n, cols, R) & (cols[None, :] < m)
                w += tl.where(keep, g[:, None] * tl.exp2(logits - A[:, None]), 0.0)
            acc = _weighted(w, v0, v1, v2, acc, PARTS)
    out = piece * OUT + tl.arange(0, OUT)
    at = (split * n + rows).to(tl.int64)[:, None] * D + out[None, :]
    tl.store(out_ptr + at, acc * true_scale, mask=(rows[:, None] < n) & (out[None, :] < D))
