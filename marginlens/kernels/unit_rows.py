"""Rows of length one, their tiles and the positives' cosines in one pass over the embeddings; gradients in another.

The slow twins are `layouts._unit`, and (u * v).sum(-1) for the cosines. The backward pass computes everything again
from the embeddings, because reading 16 bits twice costs less than keeping 32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from marginlens.autodiff import apply, once
from marginlens.kernels.launch import ceil, launch, operator, power_of_2

KIND = torch.bfloat16
"""The dtype of tiles."""

WHY = (
    "impl='triton' computes its gradient by hand and has no second derivative; "
    "use impl='reference' where you differentiate twice"
)


@triton.jit
def _unit(x_ptr, rows, n, D: tl.constexpr, COLS: tl.constexpr):
    """Return rows of length one and their two divisors. A zero row stays zero: its divisors are infinite."""
    col = tl.arange(0, COLS)
    inside = (rows[:, None] < n) & (col[None, :] < D)
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * D + col[None, :], mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 1)
    peak = tl.where(peak == 0.0, float("inf"), peak)
    x = tl.div_rn(x, tl.broadcast_to(peak[:, None], x.shape))
    length = tl.sqrt_rn(tl.sum(x * x, 1))
    length = tl.where(length == 0.0, float("inf"), length)
    return tl.div_rn(x, tl.broadcast_to(length[:, None], x.shape)), peak, length


@triton.jit
def _save(
    u, u_ptr, tiles_ptr, rows, n, total,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store rows, and the same rows as a sum of parts in the tiles' dtype, with zeros in the columns beyond D."""
    col, at = tl.arange(0, COLS), rows.to(tl.int64)[:, None]
    tl.store(u_ptr + at * D + col[None, :], u, mask=(rows[:, None] < n) & (col[None, :] < D))
    for part in tl.static_range(PARTS):
        piece = u.to(tiles_ptr.dtype.element_ty)
        where = tiles_ptr + (part * total.to(tl.int64) + at) * WIDTH + col[None, :]
        tl.store(where, piece, mask=(rows[:, None] < n) & (col[None, :] < WIDTH))
        u -= piece.to(tl.float32)


@triton.jit(do_not_specialize=["n", "total"])
def _forward_kernel(
    x_ptr, y_ptr, u_ptr, v_ptr, cos_ptr, s_ptr, t_ptr, drop_ptr, sin_ptr, n, total,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PAIR: tl.constexpr, TOGETHER: tl.constexpr,
    SINES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute rows, cosines, sines and drops. Twins: `layouts._unit` of one side or both, `_cosine` and `_sine`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    u, _, _ = _unit(x_ptr, rows, n, D, COLS)
    _save(u, u_ptr, s_ptr, rows, n, total, D, WIDTH, PARTS, COLS)
    if PAIR:
        v, _, _ = _unit(y_ptr, rows, n, D, COLS)
        _save(v, v_ptr, t_ptr, rows, n, total, D, WIDTH, PARTS, COLS)
        cos = tl.sum(u * v, 1)
        tl.store(cos_ptr + rows, cos, mask=rows < n)
        own, other = rows.to(tl.int64), rows.to(tl.int64) + n
        if TOGETHER:
            tl.store(cos_ptr + other, cos, mask=rows < n)
            tl.store(drop_ptr + 2 * own, own, mask=rows < n)
            tl.store(drop_ptr + 2 * own + 1, other, mask=rows < n)
            tl.store(drop_ptr + 2 * other, other, mask=rows < n)
            tl.store(drop_ptr + 2 * other + 1, own, mask=rows < n)
        else:
            tl.store(drop_ptr + own, own, mask=rows < n)
        if SINES:
            sin = tl.sqrt_rn(tl.sum((u - v) * (u - v), 1)) * tl.sqrt_rn(tl.sum((u + v) * (u + v), 1)) / 2
            tl.store(sin_ptr + rows, sin, mask=rows < n)
            if TOGETHER:
                tl.store(sin_ptr + other, sin, mask=rows < n)


@triton.jit
def _project(g_ptr, along, u, peak, length, dx_ptr, rows, n, D: tl.constexpr, COLS: tl.constexpr, GIVEN: tl.constexpr):
    """Compute dx = (g - (g.u) u) / |x|. The cotangent g of u is `along`, plus the tensor at g_ptr if GIVEN."""
    col = tl.arange(0, COLS)
    at = rows.to(tl.int64)[:, None] * D + col[None, :]
    inside = (rows[:, None] < n) & (col[None, :] < D)
    g = along
    if GIVEN:
        g += tl.load(g_ptr + at, mask=inside, other=0.0)
    g -= tl.sum(g * u, 1)[:, None] * u
    g = tl.div_rn(g, tl.broadcast_to(length[:, None], g.shape))
    g = tl.div_rn(g, tl.broadcast_to(peak[:, None], g.shape))
    tl.store(dx_ptr + at, g.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(gs_ptr, u, v, rows, n, TOGETHER: tl.constexpr):
    """Return the gradient of the sine |u - v| |u + v| / 2 along u + v and u - v, or 0 where that has no length."""
    gs = tl.load(gs_ptr + rows, mask=rows < n, other=0.0)
    if TOGETHER:
        gs += tl.load(gs_ptr + n + rows, mask=rows < n, other=0.0)
    minus = tl.sqrt_rn(tl.sum((u - v) * (u - v), 1))
    plus = tl.sqrt_rn(tl.sum((u + v) * (u + v), 1))
    along = tl.where(plus == 0.0, 0.0, 0.5 * gs * minus / tl.where(plus == 0.0, 1.0, plus))
    apart = tl.where(minus == 0.0, 0.0, 0.5 * gs * plus / tl.where(minus == 0.0, 1.0, minus))
    return along, apart


@triton.jit(do_not_specialize=["n"])
def _backward_kernel(
    gu_ptr, gv_ptr, gc_ptr, gs_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, n,
    D: tl.constexpr, GU: tl.constexpr, GV: tl.constexpr, GC: tl.constexpr, GS: tl.constexpr, DX: tl.constexpr,
    DY: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute gradients DX, DY of embeddings from those of rows (GU, GV), cosines (GC) and sines (GS)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    u = tl.zeros((ROWS, COLS), tl.float32)
    v = tl.zeros((ROWS, COLS), tl.float32)
    a = tl.zeros((ROWS,), tl.float32)
    b = tl.zeros((ROWS,), tl.float32)
    if DX or GC or GS:
        u, a, b = _unit(x_ptr, rows, n, D, COLS)
    c, d = a, b
    if DY or GC or GS:
        v, c, d = _unit(y_ptr, rows, n, D, COLS)
    gc = tl.zeros((ROWS,), tl.float32)
    if GC:
        gc = tl.load(gc_ptr + rows, mask=rows < n, other=0.0)
        if TOGETHER:
            gc += tl.load(gc_ptr + n + rows, mask=rows < n, other=0.0)
    gp = tl.zeros((ROWS,), tl.float32)
    gm = tl.zeros((ROWS,), tl.float32)
    if GS:
        gp, gm = _slopes(gs_ptr, u, v, rows, n, TOGETHER)
    if DX:
        along = gc[:, None] * v
        if GS:
            along += gp[:, None] * (u + v) + gm[:, None] * (u - v)
        _project(gu_ptr, along, u, a, b, dx_ptr, rows, n, D, COLS, GU)
    if DY:
        along = gc[:, None] * u
        if GS:
            along += gp[:, None] * (u + v) - gm[:, None] * (u - v)
        _project(gv_ptr, along, v, c, d, dy_ptr, rows, n, D, COLS, GV)


class Units(NamedTuple):
    """Rows of length one, of one side or two, in float32, and the tensors that `neg_lse` needs.

    | | u, s, drop | cos, sin | v, t |
    |---|---|---|---|
    | one side | x; nothing to drop | empty | empty |
    | a pair | x | one per row | y |
    | a pair, `together` | x, then y | twice | empty |

    s, t and `drop` have no gradient.
    """

    u: Tensor
    v: Tensor
    cos: Tensor
    """Of a row and its positive."""
    s: Tensor
    """Tiles: u as a sum of parts of dtype `KIND`, (parts, n, d rounded up to 16)."""
    t: Tensor
    """The same for v."""
    drop: Tensor
    """Columns that are not negatives: the row's positive, (n, 1). Together: the row itself and its positive, (2n,
    2)."""
    sin: Tensor
    """Of a row and its positive, on request; otherwise empty."""


def units(x: Tensor, y: Tensor | None = None, together: bool = False, parts: int = 3, sines: bool = False) -> Units:
    """Return rows of length one of x (n, d) and, for a pair, of y (n, d)."""
    u, v, *rest = apply(_Units, x, y, together, parts, sines)
    if y is not None and not together:  # because all outputs of a Function require a gradient if one input does
        u, v = u if x.requires_grad else u.detach(), v if y.requires_grad else v.detach()
    return Units(u, v, *rest)


class _Units(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor | None, together: bool, parts: int, sines: bool) -> tuple[Tensor, ...]:
        return tuple(_forward(x, y, together, parts, sines))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, y, ctx.together, _, ctx.sines = inputs
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(*output[3:6])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        gu, gv, gc, gs = *grads[:3], grads[6]
        gv, gc = None if y is None or ctx.together else gv, None if y is None else gc
        found = gu, gv, gc, gs if ctx.sines else None  # None, because an empty output may get an empty gradient
        given = [g for g in found if g is not None]
        if not given:
            return (None,) * 5
        want_x, want_y = ctx.needs_input_grad[:2]
        # no_grad, because `once` refuses a second derivative, and operators have no autograd under torch.func
        with torch.no_grad():
            dx, dy = _backward(*found, x, y, ctx.together, want_x, want_y)
        inputs = (*given, x) if y is None else (*given, x, y)
        return *(once(g, WHY, *inputs) if w else None for g, w in ((dx, want_x), (dy, want_y))), None, None, None


Room = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _forward_room(x: Tensor, y: Tensor | None, together: bool, parts: int, sines: bool) -> Room:
    (n, d), paired, width = x.shape, y is not None, (x.shape[1] + 15) // 16 * 16
    total, other, drops = 2 * n if together else n, n if paired and not together else 0, paired + together
    u, v = (x.new_empty((rows, d), dtype=torch.float32) for rows in (total, other))
    cos, sin = (x.new_empty(total if wanted else 0, dtype=torch.float32) for wanted in (paired, sines))
    s, t = (x.new_empty((parts, rows, width), dtype=KIND) for rows in (total, other))
    return u, v, cos, s, t, x.new_empty((total, drops), dtype=torch.int64), sin


@operator("marginlens::units_triton", _forward_room)
def _forward(x: Tensor, y: Tensor | None, together: bool, parts: int, sines: bool) -> Room:
    n, d = x.shape
    u, v, cos, s, t, drop, sin = _forward_room(x, y, together, parts, sines)
    side = (u[n:], s[:, n:]) if together else (v, t)
    x, other = x.contiguous(), x if y is None else y.contiguous()
    rows, cols, warps = _cut(d)
    launch(
        _forward_kernel, (ceil(n, rows), 1, 1), (x, other, u, side[0], cos, s, side[1], drop, sin), (n, u.shape[0]),
        (d, s.shape[2], parts, y is not None, together, sines, rows, cols), warps,
    )  # fmt: skip
    return u, v, cos, s, t, drop, sin


def _backward_room(
    gu: Tensor | None, gv: Tensor | None, gc: Tensor | None, gs: Tensor | None, x: Tensor, y: Tensor | None,
    together: bool, want_x: bool, want_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _like(x, want_x), _like(x if y is None else y, want_y)


@operator("marginlens::units_triton_backward", _backward_room)
def _backward(
    gu: Tensor | None, gv: Tensor | None, gc: Tensor | None, gs: Tensor | None, x: Tensor, y: Tensor | None,
    together: bool, want_x: bool, want_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the wanted gradients; the others are empty."""
    n, d = x.shape
    dx, dy = _like(x, want_x), _like(x if y is None else y, want_y)
    if together and gu is not None:
        gu = gu.contiguous()
        gu, gv = gu[:n], gu[n:]
    x, y = x.contiguous(), x if y is None else y.contiguous()
    given = [None if g is None else g.contiguous() for g in (gu, gv, gc, gs)]
    rows, cols, warps = _cut(d)
    launch(
        _backward_kernel, (ceil(n, rows), 1, 1), (*(x if g is None else g for g in given), x, y, dx, dy), (n,),
        (d, *(g is not None for g in given), want_x, want_y, together, rows, cols), warps,
    )  # fmt: skip
    return dx, dy


def _like(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape if wanted else 0)


@cache
def _cut(d: int) -> tuple[int, int, int]:
    """Return a program's rows, columns and warps: 8 numbers per thread if rows are short enough."""
    cols = max(16, power_of_2(d))
    return max(1, 1024 // cols), cols, min(16, max(4, cols // 256))
