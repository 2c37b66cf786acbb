"""Log-sum-exp in tiles on a GPU, like flash attention: logits stay in registers. Memory O(n + m).

The slow twin is `reference.neg_lse`. No atomics: equal inputs give equal bits. The kernels are in `lse_tiles.py`;
`unit_rows.py` makes rows from embeddings. Products over all pairs, for value and gradient:

| case | products |
|---|---|
| detached keys | 2 |
| a set against itself | 3 |
| both sides learn | 4 |
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from marginlens.autodiff import apply, full_precision, once
from marginlens.kernels import unit_rows as rows
from marginlens.kernels.launch import ceil, launch, operator, power_of_2
from marginlens.kernels.lse_tiles import backward_kernel, forward_kernel, join_kernel, prepare_kernel

Pair = tuple[Tensor | None, Tensor | None]


class Tiles(NamedTuple):
    """Size of a pass: `rows` x `cols` logits at a time, over whole vectors, or `chunk` dimensions if that is not 0."""

    rows: int
    cols: int
    warps: int
    stages: int
    chunk: int = 0

    @property
    def slow(self) -> int:
        """Stages of a loop with masks, because masks need registers, too."""
        return max(1, self.stages - 1)


ANY = 2**31
TILES = {
    ("value", 1): {128: Tiles(64, 128, 4, 3), 256: Tiles(128, 64, 8, 3), ANY: Tiles(128, 64, 8, 3, 64)},
    ("slope", 1): {128: Tiles(64, 128, 4, 3), 256: Tiles(128, 64, 8, 2), ANY: Tiles(128, 64, 8, 3, 64)},
    ("set", 1): {128: Tiles(64, 128, 4, 3), 256: Tiles(128, 32, 8, 3), ANY: Tiles(128, 64, 8, 3, 64)},
    ("keys", 1): {128: Tiles(64, 128, 4, 3), 256: Tiles(128, 64, 8, 2), ANY: Tiles(128, 64, 8, 3, 64)},
    ("value", 2): {128: Tiles(128, 64, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("slope", 2): {128: Tiles(128, 64, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("set", 2): {128: Tiles(128, 64, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("keys", 2): {128: Tiles(128, 64, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("value", 3): {128: Tiles(128, 64, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("slope", 3): {128: Tiles(128, 32, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("set", 3): {128: Tiles(128, 32, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
    ("keys", 3): {128: Tiles(128, 32, 8, 2), ANY: Tiles(128, 32, 8, 2, 32)},
}
"""By pass, parts per number, and largest dimension. Passes: "value" is A alone, "slope" is A and dA/dq, "set" and
"keys" are gradients. Tiles hold whole vectors while registers and shared memory suffice."""

LEAST = 8
"""A split needs at least this number of tiles to be worth the launch that joins the splits."""


def parts(half: bool) -> int:
    """Return how many bf16 numbers represent one number of a row: 1 for 16-bit embeddings, which lose little.

    Other embeddings follow `torch.get_float32_matmul_precision()`:

    | setting | parts | products | precision |
    |---|---|---|---|
    | "highest" | 3 | 6 | float32 |
    | lower | 2 | 3 | 16 bits |

    TF32, the other meaning of "high", has 11 bits and is no faster: 14.0 against 15.1 ms on an H200, for 65,536 rows of
    128 against 65,536.
    """
    if half:
        return 1
    return 3 if _precision() == "highest" else 2


@torch.compiler.assume_constant_result  # because Dynamo guards this setting but cannot trace reading it
def _precision() -> str:
    return torch.get_float32_matmul_precision()


def operand(x: Tensor, parts: int) -> Tensor:
    """Return x (n, d) as a sum of parts in the tiles' dtype, (parts, n, D). D is d rounded up to a multiple of 16."""
    x = pad(x.detach(), (0, -x.shape[1] % 16))
    found = []
    for _ in range(parts):
        found.append(x.to(rows.KIND))
        x = x - found[-1]
    return torch.stack(found)


def neg_lse(
    q: Tensor,
    keys: Tensor | None,
    scale: Tensor,
    drop: Tensor,
    tiles: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the log-sum-exp of scale * q.k over the keys that a row does not drop. Memory O(n + m).

    `tiles` are those of q and keys, from `rows.units`. Without them, float32 tiles are made here.
    """
    both = keys is None or keys.requires_grad
    slope = torch.is_grad_enabled() and keys is not None and (q.requires_grad or (scale.requires_grad and not both))
    x, y = tiles
    if x is None:
        x, y = operand(q, parts(False)), None if keys is None else operand(keys, parts(False))
    A: Tensor = apply(_NegLse, q, keys, scale, drop, x, y, slope)[0]
    return A


class _NegLse(torch.autograd.Function):
    """One pass computes A and dA/dq. For a set against itself, one backward pass covers both of its roles.

    Whether to compute dA/dq is guessed from `requires_grad`. A wrong guess costs only time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor, x: Tensor, y: Tensor | None, slope: bool
    ) -> tuple[Tensor, Tensor]:
        A, kept = _forward(x, y, scale, drop, q.shape[1], slope)
        return A, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.slope = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # because the slope's unused gradient would become a matrix of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        q, keys, scale, drop, x, y, A, slope = ctx.saved_tensors
        g, d = grads[0], q.shape[1]
        if g is None:
            return (None,) * 7
        want_q, want_keys, want_scale = ctx.needs_input_grad[:3]
        dq = dkeys = dscale = None
        # no_grad, because `once` refuses a second derivative, and operators have no autograd under torch.func
        with torch.no_grad(), full_precision(q):
            if keys is None:
                dq = _backward(g, x, None, scale, drop, A, d)
                dscale = (q * dq).sum() / (2.0 * scale) if want_scale else None
            else:
                dkeys = _backward(g, x, y, scale, drop, A, d) if want_keys else None
                if not ctx.slope and (want_q or not want_keys):
                    slope = _forward(x, y, scale, drop, d, True)[1]
                if want_q:
                    dq = g[:, None] * slope
                if want_scale and (want_q or dkeys is None):
                    dscale = torch.dot(g, (q * slope).sum(-1)) / scale
                elif want_scale:
                    dscale = (keys * dkeys).sum() / scale
        inputs = (g, q, scale) if keys is None else (g, q, keys, scale)
        found = (None if x is None else once(x, rows.WHY, *inputs) for x in (dq, dkeys, dscale))
        return *found, None, None, None, None


def _forward_room(
    x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, d: int, slope: bool
) -> tuple[Tensor, Tensor]:
    return scale.new_empty(x.shape[1]), scale.new_empty((x.shape[1], d) if slope else (0,))


@operator("marginlens::neg_lse_triton", _forward_room)
def _forward(x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, d: int, slope: bool) -> tuple[Tensor, Tensor]:
    """Return A (n,), and its slope dA/dq (n, d) or an empty tensor."""
    return run_forward(x, y, scale, drop, d, slope)


def _backward_room(g: Tensor, x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, A: Tensor, d: int) -> Tensor:
    return scale.new_empty((x if y is None else y).shape[1], d)


@operator("marginlens::neg_lse_triton_backward", _backward_room)
def _backward(g: Tensor, x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, A: Tensor, d: int) -> Tensor:
    """Return the keys' gradient (m, d) for cotangent g. Without keys, return q's gradient in both of its roles."""
    return run_backward(g, x, y, scale, drop, A, d)


def run_forward(
    x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, d: int, slope: bool, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Do `_forward` with given tiles."""
    y = x if y is None else y
    (count, n, D), m, r = x.shape, y.shape[1], drop.shape[1]
    tiles = tiles or _tiles("slope" if slope else "value", count, D)
    chunk, out, pieces = _pieces(D, tiles)
    pieces = pieces if slope else 1
    splits, each = _splits(n, m, pieces, tiles, x.device)
    A, kept = _room(scale, splits, n, D, slope)
    launch(
        forward_kernel, (ceil(n, tiles.rows), splits, pieces), (x, y, scale, drop.contiguous(), A, kept), (n, m, each),
        (D, r, slope, count, tiles.rows, tiles.cols, chunk, out, tiles.slow), tiles.warps, tiles.stages,
    )  # fmt: skip
    if splits > 1:
        each_A, each_kept = A, kept
        A, kept = _room(scale, 1, n, D, slope)
        block = min(128, power_of_2(D))
        grid = ceil(n, 32), ceil(D, block) if slope else 1, 1
        launch(join_kernel, grid, (each_A, each_kept, A, kept), (n, splits), (D, slope, 32, block))
    return A, kept if d == D or not slope else kept[:, :d].contiguous()


def _room(like: Tensor, splits: int, n: int, D: int, slope: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors for A and its slope, for each split if there are several."""
    several = (splits,) if splits > 1 else ()
    return like.new_empty((*several, n)), like.new_empty((*several, n, D) if slope else 0)


def run_backward(
    g: Tensor, x: Tensor, y: Tensor | None, scale: Tensor, drop: Tensor, A: Tensor, d: int,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Do `_backward` with given tiles."""
    keys, own = (x, True) if y is None else (y, False)
    (count, n, D), m, r = keys.shape, x.shape[1], drop.shape[1]
    tiles = tiles or _tiles("set" if own else "keys", count, D)
    chunk, out, pieces = _pieces(D, tiles)
    splits, each = _splits(n, m, pieces, tiles, x.device)
    blocks, drop, g = ceil(n, tiles.rows), drop.contiguous(), g.contiguous()
    a, spans = A.new_empty(m), drop.new_empty(4 * blocks, dtype=torch.int32)
    grads = scale.new_empty((splits, n, D) if splits > 1 else (n, D))
    launch(
        prepare_kernel, (max(blocks, ceil(m, tiles.rows)), 1, 1), (g, A, scale, drop, a, spans), (n, m),
        (r, own, tiles.rows, 1024),
    )  # fmt: skip
    launch(
        backward_kernel, (blocks, splits, pieces), (keys, x, scale, drop, g, A, a, spans, grads), (n, m, each),
        (D, r, own, count, tiles.rows, tiles.cols, chunk, out, tiles.slow), tiles.warps, tiles.stages,
    )  # fmt: skip
    grads = grads if splits == 1 else grads.sum(0)
    return grads if d == D else grads[:, :d].contiguous()


def _tiles(which: str, count: int, D: int) -> Tiles:
    return next(tiles for most, tiles in TILES[which, count].items() if most >= D)


def _pieces(D: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return the first product's dimensions at a time, the second's per program, and the programs over those."""
    if tiles.chunk == 0:
        return power_of_2(D), power_of_2(D), 1
    return tiles.chunk, 128, ceil(D, 128)


def _splits(n: int, m: int, pieces: int, tiles: Tiles, device: torch.device) -> tuple[int, int]:
    """Return how many splits of the keys keep the multiprocessors busiest, and the tiles in each."""
    programs, count = ceil(n, tiles.rows) * pieces, ceil(m, tiles.cols)
    slots = _processors(device) * max(1, 8 // tiles.warps)  # a multiprocessor holds two programs of 4 warps
    return _best(programs, count, slots, min(count // LEAST, 4 * slots // programs))


@cache
def _best(programs: int, count: int, slots: int, most: int) -> tuple[int, int]:
    """Return splits and tiles per split, for `programs` programs of `count` tiles each on `slots` slots."""

    def worth(splits: int) -> float:
        waves = ceil(programs * splits, slots)
        return float(programs * splits / (waves * slots) - 0.001 * splits)

    each = ceil(count, max(range(1, 1 + max(1, most)), key=worth))
    return ceil(count, each), each


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
