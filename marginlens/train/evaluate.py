"""Which images an evaluation learns from and is tested on, and nearest neighbours on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from marginlens.data import draw
from marginlens.train.config import Knn
from marginlens.train.features import features, plain_images
from marginlens.train.feed import Feed, all_labelled
from marginlens.train.knn import accuracy, vote

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


def knn_accuracy(backbone: nn.Module, feed: Feed, settings: Knn, size: int, precision: torch.dtype) -> float | None:
    """Top-1 in percent; None for data without labels or a test split."""
    if not settings.holdout and ("test" not in feed.splits or not all_labelled(feed.labels("train"))):
        return None
    chosen = parts(feed, settings.holdout)
    size = settings.size or size
    bank, asked = (
        features(backbone, plain_images(feed, split, some, size, settings.resize), precision)
        for split, some in (("train", chosen.train), (chosen.tested, chosen.test))
    )
    scores = vote(bank, chosen.labels, asked, len(feed.classes), settings.k, settings.temperature)
    return accuracy(scores, chosen.test_labels)
