"""Make several views in one Triton kernel on a GPU: `make_views` does the same as `views.make_view` for each.

One program makes one view of one sample, from the image's bytes to normalised values. It draws its own parameters, bit
for bit those of `views.parameters`. So a captured CUDA graph makes new views on each replay, if epoch, seed or samples
on the device have changed. Pixels equal those of `pixels.py` to about 1e-5 of their range, because sums have another
order.

Views differ by a row of a small table on the device, and each program branches on its row. This file has the host's
part. In `kernels/`, `views_draw.py` draws, and `views_pixels.py` does the rest.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from marginlens.data import draw, pixels
from marginlens.data.views import Parameters, View
from marginlens.kernels.views_draw import COLUMNS, DRAWN, parameters_kernel
from marginlens.kernels.views_pixels import views_kernel

LARGEST_SIZE, LARGEST_SIDE = 128, 256
"""Largest view, whose three channels must fit into a program's registers, and largest side of an image."""


class Launch(NamedTuple):
    """Settings of a launch. They do not change the result."""

    warps: int
    taps: int
    """Taps of a crop that are processed at a time, along each axis."""
    channels: int
    """Channels that are blurred at a time: 1 or 3."""
    registers: int | None
    """Limit of registers per thread. Fewer let more programs run side by side."""


LAUNCH = {
    16: Launch(4, 2, 3, None),
    32: Launch(4, 2, 3, 128),
    64: Launch(4, 1, 1, None),
    128: Launch(16, 1, 1, None),
}
"""By the size of a view, rounded up to a power of two."""

_INTERPRET = bool(triton.knobs.runtime.interpret)


def make_views(
    images: Tensor,
    chosen: Tensor | None,
    views: tuple[View, ...],
    seed: int | Tensor,
    epoch: int | Tensor,
    first: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    indices: Tensor | None = None,
) -> list[Tensor]:
    """Make views `first`, `first + 1`, ... of samples `chosen` (n,) of `images` (N, 3, height, width), in one launch.

    Each is (n, 3, size, size) of `dtype`, channels last. The first call with some views prepares a table, so it must
    not be captured in a graph.

    Args:
        images: The images, uint8.
        chosen: Rows of `images`; None takes all.
        views: The views to make.
        seed: The seed; a 0-d int64 tensor is read by the kernel, never by the host.
        epoch: The epoch; likewise.
        first: Number of the first view.
        dtype: bfloat16 or float32.
        out: Output from `empty_views`; None allocates one.
        indices: Indices (n,) of the samples in their data set, if these are not `chosen`.
    """
    reason = supported(images, views)
    if reason is not None:
        raise ValueError(reason)
    indices = chosen if indices is None else indices
    n = _check(images, chosen, indices, dtype)
    assert indices is not None
    _check_moment(indices, seed, epoch, first, len(views))
    size, height, width = views[0].size, images.shape[2], images.shape[3]
    out = empty_views(n, views, dtype, images.device) if out is None else out
    _check_out(out, (len(views), n, 3, size, size), dtype, images.device)
    block = max(16, triton.next_power_of_2(size))
    launch = LAUNCH[block]
    resized = any(view.crop == "resized" for view in views)
    taps = math.ceil(2.0 * max(1.0, max(height, width) / size)) if resized else 2
    if n:
        table = _table(views, height, width, images.device)
        with torch.cuda.device_of(images):
            views_kernel[(n, len(views))](
                out, images, chosen, indices, table, *_moments(seed, epoch), first,
                SIZE=size, HEIGHT=height, WIDTH=width, BLOCK=block, TAPS=taps, UNROLL=launch.taps,
                CHANNELS=launch.channels, INTERPRET=_INTERPRET,
                num_warps=launch.warps, maxnreg=launch.registers, enable_fp_fusion=False,
            )  # fmt: skip
    return list(out.unbind(0))


def empty_views(n: int, views: tuple[View, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty output for n samples: (views, n, 3, size, size), channels last; flatten(0, 1) is one batch."""
    size = views[0].size
    return torch.empty(len(views), n, size, size, 3, dtype=dtype, device=device).permute(0, 1, 4, 2, 3)


def draw_parameters(
    indices: Tensor,
    height: int,
    width: int,
    views: tuple[View, ...],
    seed: int | Tensor,
    epoch: int | Tensor,
    first: int = 0,
) -> list[Parameters]:
    """Return the parameters that `make_views` draws for samples `indices` (n,), by view; twin: `views.parameters`."""
    n = len(indices)
    if len({view.size for view in views}) != 1 or max(height, width) > LARGEST_SIDE:
        raise ValueError(
            f"images are {height} x {width}; sides of {LARGEST_SIDE} are the largest, and the views must be of one size"
        )
    _check_samples(n, None, indices, indices.device)
    _check_moment(indices, seed, epoch, first, len(views))
    out = torch.zeros(len(views), n, DRAWN.value, device=indices.device)
    table = _table(views, height, width, indices.device)
    rows = 4096 if _INTERPRET else 128  # because the interpreter takes as long for one row as for many
    with torch.cuda.device_of(indices):
        parameters_kernel[(triton.cdiv(n, rows), len(views))](
            out, indices, table, *_moments(seed, epoch), first, n,
            SIZE=views[0].size, HEIGHT=height, WIDTH=width, ROWS=rows, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    found = []
    for x in out:
        flip, jittered, order, grey, blur, sigma, solarise = x[:, 8:15].unbind(1)
        found.append(
            Parameters(
                boxes=x[:, :4].long(),
                flip=flip.bool(),
                jittered=jittered.bool(),
                factors=x[:, 4:8],
                order=order.long(),
                grey=grey.bool(),
                blur=blur.bool(),
                sigma=sigma,
                solarise=solarise.bool(),
            )
        )
    return found


def supported(images: Tensor, views: tuple[View, ...]) -> str | None:
    """Return why `make_views` cannot make these views of these images, or None if it can."""
    sizes = sorted({view.size for view in views})
    if len(sizes) != 1:
        return f"the views have sizes {sizes}; views of one launch must have one size"
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        shape = tuple(images.shape)
        return f"images are {images.dtype} of shape {shape}; they must be torch.uint8 of shape (n, 3, height, width)"
    if not images.is_contiguous():
        return f"images have strides {images.stride()}; they must be contiguous"
    if images.device.type != "cuda" and not _INTERPRET:
        return f"images are on the device {images.device}; the kernel needs a CUDA device"
    height, width = images.shape[2:]
    if sizes[0] > LARGEST_SIZE or max(height, width) > LARGEST_SIDE:
        return (
            f"views of {sizes[0]} pixels from images of {height} x {width} are too large for the kernel; it makes "
            f"views of up to {LARGEST_SIZE} from images of up to {LARGEST_SIDE}"
        )
    return None


@cache  # without a limit, because a captured graph keeps reading its table
def _table(views: tuple[View, ...], height: int, width: int, device: torch.device) -> Tensor:
    """Return (views, columns) float32: constants computed in float64 and rounded once, as in `draw`."""
    return torch.tensor([_row(view, height, width) for view in views], dtype=torch.float32, device=device)


def _row(view: View, height: int, width: int) -> list[float]:
    padded = view.crop == "padded"
    if padded:
        draw.padded_boxes(torch.zeros(0, 2), height, width, view.size, view.padding)  # raises if there is no room
    low, high = (math.log(x) for x in view.ratio)
    middle = draw.middle(height, width, view.ratio)
    row = [float(padded), view.scale[1] - view.scale[0], view.scale[0], high - low, low, *middle, view.padding]
    row += [view.flip, view.jitter_p]
    for x in view.jitter[:3]:
        least = max(0.0, 1.0 - x)
        row += [1.0 + x - least, least]
    row += [view.jitter[3] - -view.jitter[3], -view.jitter[3], view.grey, view.blur]
    row += [view.sigma[1] - view.sigma[0], view.sigma[0], pixels.blur_radius(view.sigma[1], view.size), view.solarise]
    row += [*view.mean, *(1.0 / x for x in view.std)]
    row += [sum(operation << 2 * k for k, operation in enumerate(order)) for order in pixels.ORDERS]
    return row + [0.0] * (COLUMNS.value - len(row))


def _moments(seed: int | Tensor, epoch: int | Tensor) -> tuple[Tensor | None, Tensor | None, int, int, int]:
    """Return seed and epoch for the kernels: signed 32-bit words, so that all values have one type."""
    low, high = (0, 0) if isinstance(seed, Tensor) else (_signed(seed), _signed(seed >> 32))
    seeds, epochs = (x if isinstance(x, Tensor) else None for x in (seed, epoch))
    return seeds, epochs, low, high, 0 if isinstance(epoch, Tensor) else _signed(epoch)


def _signed(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _check(images: Tensor, chosen: Tensor | None, indices: Tensor | None, dtype: torch.dtype) -> int:
    """Return the number of samples. Raise if an argument is invalid."""
    if indices is None:
        raise ValueError("chosen and indices are both None; one of them must say which samples the images are")
    n = len(images) if chosen is None else len(chosen)
    _check_samples(n, chosen, indices, images.device)
    if chosen is not None and chosen.device.type == "cpu" and n and not 0 <= chosen.min() <= chosen.max() < len(images):
        raise ValueError(f"chosen goes from {chosen.min()} to {chosen.max()}, but there are {len(images)} images")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {dtype}; it must be torch.bfloat16 or torch.float32")
    return n


def _check_samples(n: int, chosen: Tensor | None, indices: Tensor, device: torch.device) -> None:
    """Raise unless indices are contiguous int64, because the kernels read 64-bit numbers side by side."""
    for name, x in (("chosen", chosen), ("indices", indices)):
        if x is not None and (x.dtype != torch.int64 or x.shape != (n,) or not x.is_contiguous()):
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be contiguous torch.int64 of shape ({n},)"
            )
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device} and the images are on {device}; move one to the other")


def _check_moment(indices: Tensor, seed: int | Tensor, epoch: int | Tensor, first: int, views: int) -> None:
    for name, x in (("seed", seed), ("epoch", epoch)):
        if not isinstance(x, Tensor):
            continue
        if x.dtype != torch.int64 or x.dim() != 0:
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; a tensor must be torch.int64 and hold one number"
            )
        if x.device != indices.device:
            raise ValueError(f"{name} is on {x.device} and the samples are on {indices.device}; move one to the other")
    draw.check(indices, 0 if isinstance(seed, Tensor) else seed, epoch, first)
    draw.check(indices[:0], 0, 0, first + views - 1)


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if out.shape != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; it must be {dtype} of shape {shape} on "
            f"{device}"
        )
    if not out.permute(0, 1, 3, 4, 2).is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; it must be channels last, as empty_views makes it")
