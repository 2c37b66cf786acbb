"""What a frozen backbone makes of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from marginlens.data import pixels
from marginlens.data.views import Triple
from marginlens.nets.folded import folded
from marginlens.nets.resnet import ResNet
from marginlens.train.feed import Feed
from marginlens.train.model import autocast, fastest_convolutions

BATCH = 512


@contextmanager
def frozen(backbone: nn.Module) -> Iterator[nn.Module]:
    """The backbone in eval mode without gradients; afterwards every module's mode is what it was."""
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()
    try:
        with torch.no_grad():
            yield backbone
    finally:
        for module, mode in modes.items():
            module.training = mode


def features(backbone: nn.Module, batches: Iterable[Tensor], precision: torch.dtype) -> Tensor:
    """Features (n, d), float32, of batches of normalised images."""
    found = []
    with frozen(backbone), fastest_convolutions():
        forward = _forward(backbone, precision)
        for x in batches:
            with autocast(precision, x.device):
                found.append(forward(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x).float())
    return torch.cat(found)


def _forward(backbone: nn.Module, precision: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Batch norms folded into convolutions where rounding is half precision's anyway."""
    if isinstance(backbone, ResNet) and precision != torch.float32:
        return folded(backbone, precision)
    return backbone


def plain_images(
    feed: Feed, split: str, chosen: Tensor, size: int, resize: int = 0, moments: tuple[Triple, Triple] | None = None
) -> Iterator[Tensor]:
    """Test images, normalised, in batches."""
    if resize and resize < size:
        raise ValueError(f"resize is {resize}, smaller than the crop of {size} px that is cut from it; raise --resize")
    mean, std = moments or (feed.mean, feed.std)
    for part in feed.plain(split, chosen, size, resize, BATCH):
        yield pixels.normalise(part.float().mul_(1.0 / 255.0), mean, std)


def spread(found: Tensor) -> float:
    """How far features lie apart: the std of unit features, averaged, times the square root of their number.

    1 when they fill the sphere evenly, towards 0 when the representation collapses to one point.
    """
    unit = nn.functional.normalize(found.double(), dim=1)
    return float(unit.std(0).mean() * found.shape[1] ** 0.5)
