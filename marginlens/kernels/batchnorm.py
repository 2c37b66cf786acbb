"""Batch norm with addition and ReLU in training mode, in one or two passes over memory each way.

Importing this module needs triton. Ask `supported` first, and use plain torch where it returns False. The kernels are
in `batchnorm_kernels.py`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from marginlens.kernels.batchnorm_kernels import (
    input_gradient_kernel,
    normalise_kernel,
    stats_kernel,
    sums_kernel,
    whole_backward_kernel,
    whole_forward_kernel,
)
from marginlens.kernels.launch import DTYPES, INTERPRET, dense, like, power

ONE_TILE = 512
"""Up to this number of rows in a group, one program holds all rows of its channels and one kernel does everything."""
MANY = 32768
"""From this number of rows in a group, memory bandwidth limits the kernels; below it, latency does."""
TUNING: dict[str, Any] = {
    # kernels that sum, below and from MANY rows: programs in one wave of an H200's 132 multiprocessors
    "programs": (128, 256),
    "warps": (8, 8),
    # 16-byte loads in flight per thread and tensor
    "forward_unroll": (8, 4),
    "backward_unroll": (4, 2),
    # tiles in flight in shared memory; 1: one tile, in registers
    "stages": (1, 3),
    "tile": 4096,  # elements of an elementwise tile
    "tile_width": 64,  # its channels
    "tile_warps": 4,
}
_COUNTERS: WeakKeyDictionary[nn.Module, dict[tuple[torch.device, int], Tensor]] = WeakKeyDictionary()


def supported(x: Tensor, bn: nn.Module, add: Tensor | None = None, groups: int = 1) -> bool:
    """True if `norm_act` takes these: CUDA, training mode, channels-last or 2-D, channels a multiple of 16.

    The groups must be equal, with at least two rows each.
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
    """Return relu(bn(x) + add) in training mode and update the running statistics; slow twin: the same in torch.

    x is (n, c, h, w) channels-last or (n, c), and must pass `supported`. Sums are float32. Not differentiable twice.
    Calls with the same `bn` must run one after another on the device.

    With `groups`, x holds that many batches, one after the other. Each is normalised on its own, and updates the
    running statistics in turn: bn(x) is torch.cat([bn(part) for part in x.chunk(groups)]).

    With `fork`, the result is returned twice, in the same memory, for the two branches of a block. The kernel then adds
    their gradients, so autograd does not need a pass of its own.
    """
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, add, bn.weight, bn.bias))
    found = _NormAct.apply(x, add, bn.weight, bn.bias, bn, relu, fork, learns, groups)
    return (found[0], found[1]) if fork else found[0]


def _counters(bn: _BatchNorm, device: torch.device, groups: int) -> Tensor:
    """Return (2, groups * c // 16) zeros: the number of finished programs in the forward and the backward pass."""
    held = _COUNTERS.setdefault(bn, {})
    if (device, groups) not in held:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("norm_act meets this batch norm for the first time in a capture; run it once before")
        held[device, groups] = torch.zeros(2, groups * bn.num_features // 16, dtype=torch.int32, device=device)
    return held[device, groups]


def _whole_shape(rows: int) -> dict[str, int]:
    """Return tile and warps of the kernels in which a program holds all rows."""
    height = max(triton.next_power_of_2(rows), 16)
    return {"R": height, "C": 16, "num_warps": min(max(height // 64, 4), 16)}


def _sum_shape(x: Tensor, rows: int, c: int, groups: int, way: str) -> dict[str, int]:
    """Return tile and splits of the kernels that sum: one wave of programs, and no more loads than rows."""
    programs, warps, unroll, stages = (
        TUNING[name][rows >= MANY] for name in ("programs", "warps", f"{way}_unroll", "stages")
    )
    width = power(c, 64)
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
    """Return grid and tile of the elementwise kernels."""
    width = power(c, TUNING["tile_width"])
    high = TUNING["tile"] // width
    shape = {"CH": c, "EVEN": rows % high == 0, "R": high, "C": width, "num_warps": TUNING["tile_warps"]}
    return (triton.cdiv(rows, high) * (c // width), groups), shape


class _NormAct(torch.autograd.Function):
    """Return y, y again or None, statistics (groups, 3, c), and signs (rows, c // 8) or None."""

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
            whole_forward_kernel[(c // shape["C"],)](
                *tensors, *affine, *running, rows, groups, bn.eps, bn.momentum, **flags, CH=c, **shape
            )
        else:
            shape = _sum_shape(x, rows, c, groups, "forward")
            partial = torch.empty(groups, shape["SPLITS"], c, 2, dtype=torch.float32, device=x.device)
            counter = _counters(bn, x.device, groups)[0]
            stats_kernel[(shape["SPLITS"], c // shape["C"], groups)](x, partial, counter, stats, rows, bn.eps, **shape)
            grid, shape = _tile_shape(rows, c, groups)
            normalise_kernel[grid](*tensors, *affine, *running, rows, bn.momentum, **flags, **shape)
        # the same memory but not a view, because autograd treats a view of an output differently
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
            whole_backward_kernel[(c // shape["C"],)](
                *tensors, dx, stats, *affine, total, rows, groups, **flags, CH=c, **shape
            )
        else:
            shape = _sum_shape(x, rows, c, groups, "backward")
            partial = torch.empty(groups, shape["SPLITS"], c, 2, dtype=torch.float32, device=x.device)
            counter = _counters(ctx.bn, x.device, groups)[1]
            sums = total if groups == 1 else torch.empty(groups, 2, c, dtype=torch.float32, device=x.device)
            sums_kernel[(shape["SPLITS"], c // shape["C"], groups)](
                *tensors, stats, *affine, partial, counter, sums, rows, **flags, **shape
            )
            grid, shape = _tile_shape(rows, c, groups)
            g, mode = (given[0], ctx.mode) if masked is None else (masked, 0)
            flags = {"MODE": mode, "AFFINE": weight is not None, "LATE": masked is not None}
            input_gradient_kernel[grid](g, x, dx, stats, *affine, sums, total, rows, **flags, **shape)
        dadd = (given[0] if masked is None else masked) if ctx.added else None
        return dx, dadd, *((None, None) if weight is None else (total[0], total[1])), None, None, None, None, None
