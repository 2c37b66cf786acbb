"""Nearest neighbours: what a representation knows without any training on top."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

ROWS = 512
CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "tinyimagenet": 200, "shapes": 10}
"""Of the data sets that are known by name, where a record does not say it: the first did not."""


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


def accuracy(scores: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of rows whose label is among the `top` highest scores, in percent."""
    best = scores.topk(min(top, scores.shape[1]), dim=1).indices
    return 100.0 * int((best == labels.to(best.device)[:, None]).any(1).sum()) / len(labels)


def worse_than_guessing(loss: float, classes: int) -> bool:
    """Whether a layer's loss is more than twice that of a guess among the classes: it diverged."""
    return loss > 2 * math.log(classes) > 0


def diverged(one: Mapping[str, Any]) -> bool:
    """Whether a recorded probe ended worse than guessing: its accuracy then says nothing of the backbone."""
    classes = one.get("classes", CLASSES.get(one["data"], 1))
    return one["kind"] != "knn" and worse_than_guessing(one.get("loss", 0.0), classes)
