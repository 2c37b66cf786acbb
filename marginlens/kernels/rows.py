"""Rows of length one, their tiles and the positives' cosines, in one pass over the embeddings; the gradient in another.

The slow twin is `layouts._unit`, and (u * v).sum(-1) for the cosines. Everything is computed anew from the embeddings
in the backward pass: reading 16 bits again costs less than keeping 32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from marginlens.autodiff import once

KIND = torch.bfloat16
"""What tiles are made of."""

WHY = (
    "impl='triton' computes its gradient by hand and has no second derivative; "
    "use impl='reference' where you differentiate twice"
)


@triton.jit
def _unit(x_ptr, rows, n, D: tl.constexpr, COLS: tl.constexpr):
    """Rows of length one, and the two numbers that each was divided by: infinity for a zero row, which stays zero."""
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
    """Writes rows, and the sum of parts that they are in the tiles' type, zero in the columns beyond D."""
    col, at = tl.arange(0, COLS), rows.to(tl.int64)[:, None]
    tl.store(u_ptr + at * D + col[None, :], u, mask=(rows[:, None] < n) & (col[None, :] < D))
    for part in tl.static_range(PARTS):
        piece = u.to(tiles_ptr.dtype.element_ty)
        where = tiles_ptr + (part * total.to(tl.int64) + at) * WIDTH + col[None, :]
        tl.store(where, piece, mask=(rows[:, None] < n) & (col[None, :] < WIDTH))
        u -= piece.to(tl.float32)


@triton.jit(do_not_specialize=["n", "total"])
def _forward_kernel(
    x_ptr, y_ptr, u_ptr, v_ptr, cos_ptr, s_ptr, t_ptr, n, total,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PAIR: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Twin: `layouts._unit` of one side or, for a pair, of both, with the cosines of row and row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    u, _, _ = _unit(x_ptr, rows, n, D, COLS)
    _save(u, u_ptr, s_ptr, rows, n, total, D, WIDTH, PARTS, COLS)
    if PAIR:
        v, _, _ = _unit(y_ptr, rows, n, D, COLS)
        _save(v, v_ptr, t_ptr, rows, n, total, D, WIDTH, PARTS, COLS)
        cos = tl.sum(u * v, 1)
        tl.store(cos_ptr + rows, cos, mask=rows < n)
        if TOGETHER:
            tl.store(cos_ptr + n + rows, cos, mask=rows < n)


@triton.jit
def _project(g_ptr, along, u, peak, length, dx_ptr, rows, n, D: tl.constexpr, COLS: tl.constexpr, GIVEN: tl.constexpr):
    """dx = (g - (g.u) u) / |x| for the cotangent g of u: `along` and, where one is given, what g_ptr holds."""
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


@triton.jit(do_not_specialize=["n"])
def _backward_kernel(
    gu_ptr, gv_ptr, gc_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, n,
    D: tl.constexpr, GU: tl.constexpr, GV: tl.constexpr, GC: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradients DX, DY of the embeddings from those GU, GV of the rows and GC of the cosines, where they are."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    u = tl.zeros((ROWS, COLS), tl.float32)
    v = tl.zeros((ROWS, COLS), tl.float32)
    a = tl.zeros((ROWS,), tl.float32)
    b = tl.zeros((ROWS,), tl.float32)
    if DX or GC:
        u, a, b = _unit(x_ptr, rows, n, D, COLS)
    c, d = a, b
    if DY or GC:
        v, c, d = _unit(y_ptr, rows, n, D, COLS)
    gc = tl.zeros((ROWS,), tl.float32)
    if GC:
        gc = tl.load(gc_ptr + rows, mask=rows < n, other=0.0)
        if TOGETHER:
            gc += tl.load(gc_ptr + n + rows, mask=rows < n, other=0.0)
    if DX:
        _project(gu_ptr, gc[:, None] * v, u, a, b, dx_ptr, rows, n, D, COLS, GU)
    if DY:
        _project(gv_ptr, gc[:, None] * u, v, c, d, dy_ptr, rows, n, D, COLS, GV)


def units(
    x: Tensor, y: Tensor | None = None, together: bool = False, parts: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of length one of x (n, d) and, for a pair, of y (n, d), in float32: u, v, cosines of row and row, tiles.

    Tiles are the rows as sums of `parts` of type `KIND`, (parts, n, d rounded up to 16), and have no gradient. With
    `together`, u and its tiles hold the rows of x and then those of y, cosines come twice, and v is empty.
    """
    u, v, cos, s, t = _Units.apply(x, y, together, parts)
    if y is not None and not together:  # a Function's outputs all require a gradient when one of its inputs does
        u, v = u if x.requires_grad else u.detach(), v if y.requires_grad else v.detach()
    return u, v, cos, s, t


class _Units(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, y: Tensor | None, together: bool, parts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        u, v, cos, s, t = _forward(x, y, together, parts)
        return u, v, cos, s, t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, y, ctx.together, _ = inputs
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        given = [g for g in grads[:3] if g is not None]
        if not given:
            return None, None, None, None
        gu, gv, gc = grads[:3]
        want_x, want_y = ctx.needs_input_grad[:2]
        with torch.no_grad():  # `once` speaks for the graph; under torch.func an operator has none
            if y is None:
                gv = gc = None
            dx, dy = _backward(gu, gv, gc, x, y, ctx.together, want_x, want_y)
        inputs = (*given, x) if y is None else (*given, x, y)
        dx, dy = (once(g, WHY, *inputs) if w else None for g, w in ((dx, want_x), (dy, want_y)))
        return dx, dy, None, None


def _shapes(n: int, d: int, paired: bool, together: bool, parts: int) -> tuple[tuple[int, ...], ...]:
    """Of u, v, the cosines, and both sides' tiles."""
    total, other, width = 2 * n if together else n, n if paired and not together else 0, (d + 15) // 16 * 16
    return (total, d), (other, d), (total if paired else 0,), (parts, total, width), (parts, other, width)


@torch.library.custom_op("marginlens::units_triton", mutates_args=())
def _forward(x: Tensor, y: Tensor | None, together: bool, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, d = x.shape
    shapes = _shapes(n, d, y is not None, together, parts)
    u, v, cos = (x.new_empty(shape, dtype=torch.float32) for shape in shapes[:3])
    s, t = (x.new_empty(shape, dtype=KIND) for shape in shapes[3:])
    x, y = x.contiguous(), x if y is None else y.contiguous()
    side = (u[n:], s[:, n:]) if together else (v, t)
    rows, cut = _cut(d)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(n, rows),)](
            x, y, u, side[0], cos, s, side[1], n, len(u),
            D=d, WIDTH=s.shape[2], PARTS=parts, PAIR=len(cos) > 0, TOGETHER=together, **cut,
        )  # fmt: skip
    return u, v, cos, s, t


@_forward.register_fake
def _(x: Tensor, y: Tensor | None, together: bool, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u, v, cos, s, t = _shapes(x.shape[0], x.shape[1], y is not None, together, parts)
    a, b, c = (x.new_empty(shape, dtype=torch.float32) for shape in (u, v, cos))
    return a, b, c, x.new_empty(s, dtype=KIND), x.new_empty(t, dtype=KIND)


@torch.library.custom_op("marginlens::units_triton_backward", mutates_args=())
def _backward(
    gu: Tensor | None, gv: Tensor | None, gc: Tensor | None, x: Tensor, y: Tensor | None, together: bool,
    want_x: bool, want_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients that are wanted; one that is not is empty."""
    n, d = x.shape
    dx, dy = _room(x, want_x), _room(x if y is None else y, want_y)
    if together and gu is not None:
        gu = gu.contiguous()
        gu, gv = gu[:n], gu[n:]
    x, y = x.contiguous(), x if y is None else y.contiguous()
    gu, gv, gc = (None if g is None else g.contiguous() for g in (gu, gv, gc))
    rows, cut = _cut(d)
    with torch.cuda.device_of(x):
        _backward_kernel[(triton.cdiv(n, rows),)](
            *(x if g is None else g for g in (gu, gv, gc)), x, y, dx, dy, n,
            D=d, GU=gu is not None, GV=gv is not None, GC=gc is not None, DX=want_x, DY=want_y, TOGETHER=together,
            **cut,
        )  # fmt: skip
    return dx, dy


@_backward.register_fake
def _(
    gu: Tensor | None, gv: Tensor | None, gc: Tensor | None, x: Tensor, y: Tensor | None, together: bool,
    want_x: bool, want_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _room(x, want_x), _room(x if y is None else y, want_y)


def _room(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape) if wanted else x.new_empty(0)


def _cut(d: int) -> tuple[int, dict[str, int]]:
    """Rows in a program, and how it is cut: 8 numbers a thread while rows are short enough."""
    cols = max(16, triton.next_power_of_2(d))
    rows, warps = max(1, 1024 // cols), min(16, max(4, cols // 256))
    return rows, {"ROWS": rows, "COLS": cols, "num_warps": warps}
