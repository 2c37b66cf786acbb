"""Choose images, compute a frozen backbone's features for them, and score predictions."""

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
"""Seed that chooses held-out images. It is the same for every run, so settings are compared on the same images."""


class Parts(NamedTuple):
    """Samples to learn from, of split `train`, and samples to test on, of split `tested`."""

    train: Tensor
    labels: Tensor
    tested: str
    test: Tensor
    test_labels: Tensor


def parts(feed: Feed, holdout: int) -> Parts:
    """Return the training and test set. With `holdout`, a random part of the training set replaces the test set."""
    labels = feed.labels("train")
    if not all_labelled(labels):
        raise ValueError(f"{feed.name} has no labels, so accuracy cannot be measured; marginlens embed needs no labels")
    if holdout:
        if not holdout < len(labels):
            raise ValueError(f"holdout is {holdout}; it must be less than the {len(labels):,} training images")
        order = draw.order(len(labels), _HOLDOUT, 0)
        held, rest = order[:holdout].sort().values, order[holdout:].sort().values
        return Parts(rest, labels[rest], "train", held, labels[held])
    if "test" not in feed.splits:
        raise ValueError(f"{feed.name} has no test split; give --holdout, the number of training images to test on")
    test = feed.labels("test")
    return Parts(torch.arange(len(labels)), labels, "test", torch.arange(len(test)), test)


CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "tinyimagenet": 200, "shapes": 10}
"""Number of classes of data sets known by name, for early records that do not have it."""


def accuracy(scores: Tensor, labels: Tensor, top: int = 1) -> float:
    """Return the share of rows whose label is among the `top` highest scores, in percent."""
    best = scores.topk(min(top, scores.shape[1]), dim=1).indices
    return 100.0 * int((best == labels.to(best.device)[:, None]).any(1).sum()) / len(labels)


def worse_than_guessing(loss: float, classes: int) -> bool:
    """True if a layer's loss is more than twice that of guessing, so its training diverged."""
    return loss > 2 * math.log(classes) > 0


BATCH = 512


@contextmanager
def frozen(backbone: nn.Module) -> Iterator[nn.Module]:
    """Put the backbone in eval mode without gradients, and restore every module's mode afterwards."""
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()
    try:
        with torch.no_grad():
            yield backbone
    finally:
        for module, mode in modes.items():
            module.training = mode


def features(backbone: nn.Module, batches: Iterable[Tensor], precision: torch.dtype) -> Tensor:
    """Return features (n, d), float32, of batches of normalised images."""
    found = []
    with frozen(backbone), fastest_convolutions():
        forward = _forward(backbone, precision)
        for x in batches:
            with autocast(precision, x.device):
                found.append(forward(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x).float())
    return torch.cat(found)


def _forward(backbone: nn.Module, precision: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Fold batch norms into convolutions if rounding is half precision's anyway."""
    if isinstance(backbone, ResNet) and precision != torch.float32:
        return folded(backbone, precision)
    return backbone


def plain_images(
    feed: Feed, split: str, chosen: Tensor, size: int, resize: int = 0, moments: tuple[Triple, Triple] | None = None
) -> Iterator[Tensor]:
    """Yield batches of test images, normalised."""
    if resize and resize < size:
        raise ValueError(f"resize is {resize}, smaller than the crop of {size} px; raise --resize to at least {size}")
    mean, std = moments or (feed.mean, feed.std)
    for part in feed.plain(split, chosen, size, resize, BATCH):
        yield pixels.normalise(part.float().mul_(1.0 / 255.0), mean, std)


def spread(found: Tensor) -> float:
    """Return the mean std of unit features, times the square root of their number.

    1 means that features fill the sphere evenly. Near 0 means that the representation collapsed to one point.
    """
    unit = nn.functional.normalize(found.double(), dim=1)
    return float(unit.std(0).mean() * found.shape[1] ** 0.5)
