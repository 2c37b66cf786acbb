"""The random numbers of every view, computed from one counter-based generator without any state.

A view's parameter is a pure function of (seed, epoch, sample index, view number, slot). So it is the same in any batch
order, batch size, rank or resumed run, and a GPU kernel can compute the same bits.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which is also
Triton's `tl.philox`. One call takes a counter of four 32-bit words and a key of two, and gives four words:

    key     = (seed low, seed high)                           0 <= seed < 2^64; tl.philox takes it whole
    counter = (index low, index high, epoch, number * 256 + block)
    words   = slots 4 * block ... 4 * block + 3               `Slot` names them
    uniform = (word >> 8) * 2^-24                             in [0, 1), exact in float32

The rest is float32 arithmetic. Every multiplication, addition, division and square root rounds to nearest, one by one.
Constants are computed in float64 and rounded once. No function is used that devices round differently: `exp` is ours. A
kernel that does the same must forbid fused multiply-adds (`enable_fp_fusion=False`) and use `tl.sqrt_rn` and
`tl.div_rn`.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

ATTEMPTS = 10
"""Number of times that torchvision tries to fit a crop before it takes the middle of the image."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ORDER = 0xFFFFFF  # view number for the order of an epoch; no view has this number


class Slot(IntEnum):
    """Position of each parameter's uniform. Part of the format: resuming a run needs the same slots."""

    TOP = 0
    LEFT = 1
    FLIP = 2
    JITTER = 3
    FACTOR = 4  # four: brightness, contrast, saturation, hue
    ORDER = 8
    GREY = 9
    BLUR = 10
    SIGMA = 11
    SOLARISE = 12  # three spare ones follow
    ATTEMPT = 16  # pairs: area and log ratio of each attempt at a crop


BLOCKS = (Slot.ATTEMPT + 2 * ATTEMPTS) // 4
BLOCKS_WITHOUT_ATTEMPTS = Slot.ATTEMPT // 4


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four Philox4x32-10 words. The counter is four int64 tensors of 32-bit words, which broadcast."""
    a, b, c, d = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # signed works, because the low 64 bits equal the unsigned product's, and masks remove the sign
        p, q = a * _M0, c * _M1
        a = (q >> 32).bitwise_and_(_WORD).bitwise_xor_(b).bitwise_xor_(k0)
        c = (p >> 32).bitwise_and_(_WORD).bitwise_xor_(d).bitwise_xor_(k1)
        b, d = q.bitwise_and_(_WORD), p.bitwise_and_(_WORD)
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return a, b, c, d


def uniforms(indices: Tensor, seed: int, epoch: int | Tensor, number: int, blocks: int = BLOCKS) -> Tensor:
    """Return the uniforms of view `number` for samples `indices` (n,): float32 (n, 4 * blocks), a column per slot.

    `epoch` may be a 0-d int64 tensor on the indices' device, so that a CUDA graph can be replayed for another epoch.
    """
    check(indices, seed, epoch, number)
    index = indices.long()[:, None]
    block = torch.arange(blocks, device=index.device)
    moment = epoch.long() & _WORD if isinstance(epoch, Tensor) else torch.full((), epoch, device=index.device)
    counter = (index & _WORD, index >> 32 & _WORD, moment, block + 256 * number)
    words = torch.stack(philox(counter, (seed & _WORD, seed >> 32)), dim=2)
    return words.bitwise_right_shift_(8).float().mul_(2.0**-24).flatten(1)


def order(count: int, seed: int, epoch: int, device: torch.device | None = None) -> Tensor:
    """Return a permutation of `count` samples, int64, the same on any device: samples sorted by 48 random bits each."""
    u = uniforms(torch.arange(count, device=device), seed, epoch, _ORDER, blocks=1).double()
    return torch.argsort(u[:, 0] + u[:, 1] * 2.0**-24, stable=True)


def between(u: Tensor, low: float, high: float) -> Tensor:
    """Map uniforms to [low, high]."""
    return u * (high - low) + low


def below(u: Tensor, n: Tensor | int) -> Tensor:
    """Map uniforms to integers in [0, n), n < 2^24. floor(u * n) never rounds up to n, as u is a multiple of 2^-24."""
    return (u * n).floor().long()


def exp(x: Tensor) -> Tensor:
    """Return e^x for |x| < 5, to a few parts in a million, with the same bits on all devices.

    Only multiplications and additions: Taylor's polynomial of degree 8 at x / 8 (relative error under 1e-7), squared
    three times.
    """
    y = x * 0.125
    total = torch.ones_like(y)
    for n in range(8, 0, -1):
        total = total * y * (1.0 / n) + 1.0
    for _ in range(3):
        total = total * total
    return total


def resized_boxes(u: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """Return boxes of torchvision's RandomResizedCrop in height x width images: int64 (n, 4), top, left, height, width.

    Each box is the first of `ATTEMPTS` boxes that fits. They have uniform area and log-uniform ratio, rounded to whole
    pixels. If none fits, it is the largest central box with a ratio within the bounds. Its place is uniform.
    """
    pairs = u[:, Slot.ATTEMPT : Slot.ATTEMPT + 2 * ATTEMPTS]
    area = between(pairs[:, 0::2], *scale) * float(height * width)
    aspect = exp(between(pairs[:, 1::2], math.log(ratio[0]), math.log(ratio[1])))
    w = (area * aspect).sqrt().round().long()
    h = (area / aspect).sqrt().round().long()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)  # (n, attempts)
    first = fits.byte().argmax(dim=1, keepdim=True)
    found = fits.any(dim=1)
    middle_h, middle_w = middle(height, width, ratio)
    h = torch.where(found, h.gather(1, first)[:, 0], middle_h)
    w = torch.where(found, w.gather(1, first)[:, 0], middle_w)
    top = torch.where(found, below(u[:, Slot.TOP], height - h + 1), (height - middle_h) // 2)
    left = torch.where(found, below(u[:, Slot.LEFT], width - w + 1), (width - middle_w) // 2)
    return torch.stack([top, left, h, w], dim=1)


def padded_boxes(u: Tensor, height: int, width: int, size: int, padding: int) -> Tensor:
    """Return boxes of torchvision's RandomCrop(size, padding), relative to the unpadded image, so maybe negative."""
    if min(height, width) + 2 * padding < size:
        raise ValueError(
            f"images are {height} x {width}, even with a padding of {padding} smaller than the crop of {size}; "
            f"use a smaller size, or crop='resized'"
        )
    top = below(u[:, Slot.TOP], height + 2 * padding - size + 1) - padding
    left = below(u[:, Slot.LEFT], width + 2 * padding - size + 1) - padding
    return torch.stack([top, left, torch.full_like(top, size), torch.full_like(top, size)], dim=1)


def jitter_factors(u: Tensor, strength: tuple[float, float, float, float]) -> Tensor:
    """Return (n, 4): factors of brightness, contrast, saturation in [max(0, 1 - x), 1 + x]; hue's shift in [-x, x]."""
    columns = [between(u[:, Slot.FACTOR + i], max(0.0, 1.0 - x), 1.0 + x) for i, x in enumerate(strength[:3])]
    return torch.stack([*columns, between(u[:, Slot.FACTOR + 3], -strength[3], strength[3])], dim=1)


def middle(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Return height and width of torchvision's fallback box."""
    if width / height < ratio[0]:
        return min(height, max(1, round(width / ratio[0]))), width
    if width / height > ratio[1]:
        return height, min(width, max(1, round(height * ratio[1])))
    return height, width


def check(indices: Tensor, seed: int, epoch: int | Tensor, number: int) -> None:
    """Raise unless `uniforms` accepts these arguments."""
    if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
        raise ValueError(
            f"indices must be a vector of integers, one per image, not {indices.dtype} of shape {tuple(indices.shape)}"
        )
    for name, value, bits in (("seed", seed, 64), ("epoch", epoch, 32), ("number", number, 24)):
        if isinstance(value, Tensor):
            if name != "epoch" or value.dim() != 0 or value.is_floating_point():
                raise ValueError(f"{name} must be an integer, not a {value.dtype} tensor of shape {tuple(value.shape)}")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value!r}; it must be an integer from 0 to 2^{bits} - 1")
    if indices.device.type == "cpu" and bool((indices < 0).any()):
        raise ValueError(f"the smallest index is {int(indices.min())}; indices must be at least 0")
