"""Operations on batches of images, (n, 3, h, w) float32 in [0, 1], with parameters per sample.

They follow torchvision on float tensors. Pillow differs in one way: it rounds to 8 bits after every step. Nothing here
loops over samples or reads a value from a device. Linear operations are batched matrix products, because CPUs and GPUs
do small ones fast: along rows and columns for crops and blurs, across channels for colours.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

GREY = (0.2989, 0.587, 0.114)
"""Torchvision's weights of red, green and blue; they add up to 0.9999, so white turns a little grey."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = tuple(permutations(range(4)))
"""Orders of colour jitter's operations, by number."""


@cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a vector on a device, sent only once. Sending makes the host wait, and cannot be captured in a graph."""
    return torch.tensor(values, device=device)


def crop(x: Tensor, boxes: Tensor, size: int, flip: Tensor) -> Tensor:
    """Return each sample's box (top, left, height, width), resized to size x size, and mirrored where `flip` (n,) is
    True.

    Like Pillow and torchvision, it is bilinear when it enlarges and antialiased when it shrinks. The filter is a
    triangle whose half-width is one pixel of the coarser grid, cut off at the box's border and normalised. A box of
    `size` may reach outside the image, where it is black.
    """
    n, channels, height, width = x.shape
    top, left, h, w = boxes.unbind(1)
    rows = _triangles(top, h, height, size, torch.zeros_like(flip))
    columns = _triangles(left, w, width, size, flip)
    x = torch.bmm(x.reshape(n, channels * height, width), columns.transpose(1, 2))
    return torch.matmul(rows[:, None], x.view(n, channels, height, size))


def _triangles(start: Tensor, length: Tensor, source: int, size: int, flip: Tensor) -> Tensor:
    """Return weights (n, size, source) of source pixels in the `size` pixels that divide [start, start + length)."""
    step = length.float() / torch.full_like(length, size)
    reach = step.clamp(min=1.0)[:, None]
    i = torch.arange(size, device=start.device)
    i = torch.where(flip[:, None], size - 1 - i, i)
    centre = (i + 0.5) * step[:, None] / reach  # (n, size), in units of the triangle's half-width
    j = torch.arange(source, device=start.device) - start[:, None]
    at = torch.where((j >= 0) & (j < length[:, None]), (j + 0.5) / reach, math.inf)  # (n, source)
    weights = (at[:, None, :] - centre[:, :, None]).abs_().neg_().add_(1.0).clamp_(min=0.0)
    # clamped for rows of padding alone, which have sum 0 and stay black; other sums are at least 1/2
    return weights.div_(weights.sum(2, keepdim=True).clamp_(min=1e-3))


def grey(x: Tensor) -> Tensor:
    """Return each pixel's grey value in all three channels."""
    n, channels, height, width = x.shape
    weights = constant(GREY, x.device)
    return torch.matmul(weights, x.reshape(n, channels, -1)).view(n, 1, height, width).expand_as(x)


def adjust(x: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Change brightness, contrast or saturation by each sample's `operation` (n,). HUE leaves a sample unchanged.

    All three are `clamp(factor * x + (1 - factor) * other)`. The other image is black, the grey image's mean, or the
    grey image. So each is a matrix across channels and an offset.
    """
    pixels = x.flatten(2)
    weights = constant(GREY, x.device)
    factor = torch.where(operation == HUE, 1.0, factor)
    rest = 1.0 - factor
    to_grey = torch.where(operation == SATURATION, rest, 0.0)[:, None, None] * weights
    matrix = factor[:, None, None] * torch.eye(3, device=x.device) + to_grey
    mean = torch.matmul(pixels.mean(2), weights)
    offset = torch.where(operation == CONTRAST, rest * mean, 0.0)
    return torch.baddbmm(offset[:, None, None], matrix, pixels).clamp_(0.0, 1.0).view_as(x)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Move each sample's hue (of HSV) by its `shift` (n,), in turns.

    Value and saturation stay, so each pixel keeps its smallest channel and its chroma, largest less smallest. In
    between, a hue that is t sixths away from cyan, -3 <= t <= 3, puts red at |t| - 1, green at 2 - |t + 1| and blue at
    2 - |t - 1|, clipped to [0, 1]. The inverse needs no cases: |t| = 2 + (red - green - blue + smallest) / chroma, and
    t is negative on the green side.
    """
    red, green, blue = x.unbind(1)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = torch.maximum(torch.maximum(red, green), blue).sub_(low)
    t = (red - green).sub_(blue).add_(low)
    t = t.div_(chroma.clamp(min=1e-9)).add_(2.0).copysign_(blue - green)  # clamped, because grey pixels have no hue
    t = t.add_(6.0 * shift[:, None, None])
    t = t.sub_(t.mul(1.0 / 6.0).round_(), alpha=6.0)
    out = torch.empty_like(x)
    torch.abs(t, out=out[:, 0]).sub_(1.0)
    torch.add(t, 1.0, out=out[:, 1]).abs_().neg_().add_(2.0)
    torch.sub(t, 1.0, out=out[:, 2]).abs_().neg_().add_(2.0)
    return out.clamp_(0.0, 1.0).mul_(chroma[:, None]).add_(low[:, None]).clamp_(0.0, 1.0)


def jitter(x: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Apply colour jitter: each sample's four operations with its `factors` (n, 4), in `ORDERS[order]`.

    Hue costs more than the others together, so it runs once for the whole batch. At most three passes before it apply
    the operations that precede it in a sample's order; three after it apply the rest.
    """
    passes = _passes(x.device)[order]  # (n, 6): an operation, or HUE for none
    amounts = factors.gather(1, passes)
    for step in range(3):
        x = adjust(x, passes[:, step], amounts[:, step])
    x = hue(x, factors[:, HUE])
    for step in range(3, 6):
        x = adjust(x, passes[:, step], amounts[:, step])
    return x


@cache
def _passes(device: torch.device) -> Tensor:
    """Return, for each order, the operations of the three passes before hue and of the three after it."""
    table = []
    for order in ORDERS:
        k = order.index(HUE)
        table.append([*order[:k], *[HUE] * (3 - k), *order[k + 1 :], *[HUE] * k])
    return torch.tensor(table, device=device)


def blur_radius(sigma: float, size: int) -> int:
    """Return the kernel's half-width for the largest sigma: 3 sigma hold 99.7 %; reflection allows at most size - 1."""
    return min(math.ceil(3.0 * sigma), size - 1)


def blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Apply Gaussian blur with each sample's `sigma` (n,): 2 * radius + 1 normalised taps, reflected at the border."""
    n, channels, height, width = x.shape
    if radius >= min(height, width):
        raise ValueError(f"a blur of radius {radius} cannot be reflected in images of {height} x {width}")
    taps = (-0.5 * (torch.arange(radius + 1, device=x.device) / sigma[:, None]) ** 2).exp_()
    taps = torch.where(taps > 1e-12, taps, 0.0)  # because denormal numbers are slow, and these do not show
    taps = taps / (2.0 * taps.sum(1, keepdim=True) - 1.0)  # the middle tap, which is 1, counts once, the others twice
    columns = torch.mm(taps, _reflections(width, radius, x.device)).view(n, width, width)
    rows = columns
    if height != width:
        rows = torch.mm(taps, _reflections(height, radius, x.device)).view(n, height, height)
    x = torch.bmm(x.reshape(n, channels * height, width), columns.transpose(1, 2))
    return torch.matmul(rows[:, None], x.view(n, channels, height, width))


@cache  # without a limit, because a captured graph keeps reading it
def _reflections(size: int, radius: int, device: torch.device) -> Tensor:
    """Count (radius + 1, size * size) how often tap t of pixel i falls on pixel j, from both sides, reflected."""
    i = torch.arange(size, device=device)
    t = torch.arange(radius + 1, device=device)
    hits = torch.zeros(radius + 1, size, size, device=device)
    for sign in (1, -1):
        j = (i + sign * t[:, None]).abs()
        j = torch.where(j >= size, 2 * (size - 1) - j, j)
        hits += j[:, :, None] == i
    hits[0] /= 2.0  # tap 0 has one side only
    return hits.flatten(1)


def solarise(x: Tensor, threshold: float = 0.5) -> Tensor:
    """Invert values from the threshold on (0.5: 128 of 255)."""
    return torch.where(x >= threshold, 1.0 - x, x)


def normalise(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (x - mean) / std per channel."""
    centre, scale = constant(mean, x.device), constant(std, x.device)
    return (x - centre[:, None, None]) / scale[:, None, None]
