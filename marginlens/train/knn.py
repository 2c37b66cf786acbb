"""Nearest neighbours: what a representation knows without any training on top."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from marginlens.train.accuracy import accuracy
from marginlens.train.config import Knn
from marginlens.train.evaluate import parts
from marginlens.train.features import features, plain_images
from marginlens.train.feed import Feed, all_labelled

ROWS = 512


def vote(bank: Tensor, labels: Tensor, asked: Tensor, classes: int, k: int, temperature: float) -> Tensor:
    """Scores (m, classes) of `asked` (m, d): the k nearest of `bank` (n, d) by cosine vote with exp(cos / temperature).

    InstDisc's weighted vote (Wu et al. 2018), which MoCo, lightly and solo-learn also use.
    """
    k = min(k, len(bank))
    bank, labels = normalize(bank, dim=1), labels.to(bank.device)
    scores = []
    for part in normalize(asked, dim=1).split(ROWS):
        cos, nearest = (part @ bank.T).topk(k, dim=1)
        votes = ((cos - cos[:, :1]) / temperature).exp()  # the nearest votes 1: nothing overflows
        scores.append(votes.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], votes))
    return torch.cat(scores)


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
