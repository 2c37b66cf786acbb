"""A view: a random augmentation of an image. `View` describes it, `make_view` makes a batch.

    batch = make_view(images, indices, strong(32, mean, std), seed=0, epoch=3, number=0)

The randomness of sample i is a function of (seed, epoch, indices[i], number) alone (`draw.py`). The operations are, in
this order: crop and flip, jitter, grey, blur, solarise, normalise (`pixels.py`). Torchvision's recipes flip after the
blur, which gives the same result: mirroring commutes with all of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marginlens.autodiff import full_precision
from marginlens.data import draw, pixels
from marginlens.data.draw import Slot

Crop = Literal["resized", "padded"]
Triple = tuple[float, float, float]

_WIDEST_RATIO = 100.0
_VALUES = 1 << 24  # pixel values at a time: 64 MiB for each of a few temporary tensors


@dataclass(frozen=True)
class View:
    """A random augmentation. Parameters mean the same as in torchvision; a probability of 0 skips a step."""

    size: int = 32
    crop: Crop = "resized"
    scale: tuple[float, float] = (0.2, 1.0)
    """Share of the image's area in a resized crop."""
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)
    """Width over height of a resized crop."""
    padding: int = 4
    """Black border around the image that a padded crop may include."""
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """Brightness, contrast, saturation, hue."""
    jitter_p: float = 0.8
    grey: float = 0.2
    blur: float = 0.5
    sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("flip", "jitter_p", "grey", "blur", "solarise"):
            _check_number(name, getattr(self, name), 0.0, 1.0)
        _check_whole("size", self.size, 1)
        _check_whole("padding", self.padding, 0)
        if self.crop not in ("resized", "padded"):
            raise ValueError(f"View: crop is {self.crop!r}; it must be 'resized' or 'padded'")
        _check_range("scale", self.scale, 1e-6, 1.0)
        _check_range("ratio", self.ratio, 1.0 / _WIDEST_RATIO, _WIDEST_RATIO)
        _check_range("sigma", self.sigma, 1e-3, 100.0)
        for name, count, low, high in (("jitter", 4, 0.0, 10.0), ("mean", 3, -1e3, 1e3), ("std", 3, 1e-6, 1e3)):
            _check_count(name, getattr(self, name), count)
            for value in getattr(self, name):
                _check_number(name, value, low, high)
        _check_number("jitter's hue", self.jitter[3], 0.0, 0.5)


def strong(size: int, mean: Triple, std: Triple) -> View:
    """Return ReSSL's strong view, which the student sees."""
    return View(size=size, mean=mean, std=std)


def weak(size: int, mean: Triple, std: Triple, crop: Crop = "resized") -> View:
    """Return ReSSL's weak view, which the teacher sees: crop and flip. The paper's words also fit a padded crop."""
    return View(size=size, crop=crop, jitter_p=0.0, grey=0.0, blur=0.0, mean=mean, std=std)


class Parameters(NamedTuple):
    """Parameters drawn for each of n samples."""

    boxes: Tensor
    """(n, 4): top, left, height, width; whole pixels."""
    flip: Tensor
    jittered: Tensor
    factors: Tensor
    """(n, 4): factors of brightness, contrast and saturation, and the hue's shift."""
    order: Tensor
    """Index into `pixels.ORDERS`."""
    grey: Tensor
    blur: Tensor
    sigma: Tensor
    solarise: Tensor


def parameters(
    indices: Tensor, height: int, width: int, view: View, seed: int, epoch: int | Tensor, number: int
) -> Parameters:
    """Return the parameters of view `number` of samples `indices` (n,), whose images are height x width."""
    resized = view.crop == "resized"
    u = draw.uniforms(indices, seed, epoch, number, draw.BLOCKS if resized else draw.BLOCKS_WITHOUT_ATTEMPTS)
    if resized:
        boxes = draw.resized_boxes(u, height, width, view.scale, view.ratio)
    else:
        boxes = draw.padded_boxes(u, height, width, view.size, view.padding)
    return Parameters(
        boxes=boxes,
        flip=u[:, Slot.FLIP] < view.flip,
        jittered=u[:, Slot.JITTER] < view.jitter_p,
        factors=draw.jitter_factors(u, view.jitter),
        order=draw.below(u[:, Slot.ORDER], len(pixels.ORDERS)),
        grey=u[:, Slot.GREY] < view.grey,
        blur=u[:, Slot.BLUR] < view.blur,
        sigma=draw.between(u[:, Slot.SIGMA], *view.sigma),
        solarise=u[:, Slot.SOLARISE] < view.solarise,
    )


def make_view(
    images: Tensor,
    indices: Tensor,
    view: View,
    seed: int,
    epoch: int | Tensor,
    number: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Make view `number` of a batch: uint8 (n, 3, height, width) to (n, 3, size, size) of `dtype`.

    Row i of images is sample `indices[i]` of its data set. Computed in float32, even under autocast, and in parts, so
    that temporary memory is bounded.
    """
    _check_images(images, indices)
    n, _, height, width = images.shape
    out = torch.empty(n, 3, view.size, view.size, dtype=dtype, device=images.device)
    with torch.no_grad(), full_precision(images):
        drawn = parameters(indices.to(images.device), height, width, view, seed, epoch, number)
        values = 3 * max(height * width, view.size * max(height, width, view.size))
        part = max(1, _VALUES // values)
        for start in range(0, n, part):
            some = slice(start, start + part)
            out[some] = render(images[some], Parameters(*(p[some] for p in drawn)), view)
    return out


def render(images: Tensor, drawn: Parameters, view: View) -> Tensor:
    """Return the view with the parameters `drawn`: float32 (n, 3, size, size)."""
    return colour(pixels.crop(images.float().mul_(1.0 / 255.0), drawn.boxes, view.size, drawn.flip), drawn, view)


def colour(x: Tensor, drawn: Parameters, view: View) -> Tensor:
    """Apply everything after the crop to images in [0, 1]."""
    if view.jitter_p > 0.0:
        x = _chosen(x, drawn.jittered, pixels.jitter, drawn.factors, drawn.order)
    if view.grey > 0.0:
        x = _chosen(x, drawn.grey, pixels.grey)
    if view.blur > 0.0:
        radius = pixels.blur_radius(view.sigma[1], view.size)
        x = _chosen(x, drawn.blur, lambda y, sigma: pixels.blur(y, sigma, radius), drawn.sigma)
    if view.solarise > 0.0:
        x = _chosen(x, drawn.solarise, pixels.solarise)
    return pixels.normalise(x, view.mean, view.std)


def _chosen(x: Tensor, chosen: Tensor, operation: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Apply `operation` to the chosen samples of x, which may be overwritten."""
    if not _lookup_is_free(chosen):
        return torch.where(chosen[:, None, None, None], operation(x, *arguments), x)
    index = chosen.nonzero()[:, 0]
    if len(index):
        x[index] = operation(x[index], *(a[index] for a in arguments))
    return x


def _lookup_is_free(chosen: Tensor) -> bool:
    """True if a look at the chosen samples is free. Off the CPU it would stall, and break a captured graph."""
    return chosen.device.type == "cpu"


def _check_images(images: Tensor, indices: Tensor) -> None:
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise ValueError(
            f"images are {images.dtype} of shape {tuple(images.shape)}; they must be torch.uint8 of shape "
            f"(n, 3, height, width)"
        )
    if len(indices) != len(images):
        raise ValueError(f"there are {len(images)} images but {len(indices)} indices; each image needs its own")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= float(value) <= high:
        raise ValueError(f"View: {name} is {value!r}; it must be a number from {low:g} to {high:g}")


def _check_whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 1 << 14:
        raise ValueError(f"View: {name} is {value!r}; it must be a whole number from {low} to {1 << 14}")


def _check_count(name: str, values: object, count: int) -> None:
    if not isinstance(values, tuple) or len(values) != count:
        raise ValueError(f"View: {name} is {values!r}; it must be a tuple of {count} numbers")


def _check_range(name: str, values: tuple[float, float], low: float, high: float) -> None:
    _check_count(name, values, 2)
    for value in values:
        _check_number(name, value, low, high)
    if values[0] > values[1]:
        raise ValueError(f"View: {name} is {values!r}; the smaller number must come first")
