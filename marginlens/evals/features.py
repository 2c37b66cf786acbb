"""What a frozen backbone makes of images: which images, their features, and how good scores are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from marginlens.data import draw, pixels
from marginlens.data.feed import Feed, all_labelled
from marginlens.data.views import Triple
from marginlens.devices import autocast, fastest_convolutions
from marginlens.nets.folded import folded
from marginlens.nets.resnet import ResNet

_HOLDOUT = 0x48454C44
"""The seed that chooses held-out images: the same ones for every run, so that settings are compared on equal terms."""


class Parts(NamedTuple):
    """Samples to learn from, of split `train`, and samples to test on, of split `tested`."""

    train: Tensor
    labels: Tensor
    tested: str
    test: Tensor
    test_labels: Tensor


def parts(feed: Feed, holdout: int) -> Parts:
    """Train and test set; or, with `holdout`, a random part of the training set in place of the test set."""
    labels = feed.labels("train")
    if not all_labelled(labels):
        raise ValueError(f"{feed.name} has no labels, so no accuracy can be measured on it; embed works without")
    if holdout:
        if not holdout < len(labels):
            raise ValueError(f"holdout is {holdout}, and there are only {len(labels):,} training images to keep back")
        order = draw.order(len(labels), _HOLDOUT, 0)
        held, rest = order[:holdout].sort().values, order[holdout:].sort().values
        return Parts(rest, labels[rest], "train", held, labels[held])
    if "test" not in feed.splits:
        raise ValueError(f"{feed.name} has no test split; give --holdout, a number of training images to test on")
    test = feed.labels("test")
    return Parts(torch.arange(len(labels)), labels, "test", torch.arange(len(test)), test)


CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "tinyimagenet": 200, "shapes": 10}
"""Of the data sets that are known by name, where a record does not say it: the first did not."""


def accuracy(scores: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of rows whose label is among the `top` highest scores, in percent."""
    best = scores.topk(min(top, scores.shape[1]), dim=1).indices
    return 100.0 * int((best == labels.to(best.device)[:, None]).any(1).sum()) / len(labels)


def worse_than_guessing(loss: float, classes: int) -> bool:
    """Whether a layer's loss is more than twice that of a guess among the classes: it diverged."""
    return loss > 2 * math.log(classes) > 0


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
