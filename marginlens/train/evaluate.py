"""Which images an evaluation learns from and is tested on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from marginlens.data import draw
from marginlens.train.feed import Feed, all_labelled

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
