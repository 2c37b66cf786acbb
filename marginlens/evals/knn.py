"""Classify test images by a run's nearest training images: a first look, without training.

Each of the k nearest votes for its class with weight exp(cosine / temperature). For example:

    marginlens knn RUN --k 20
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from marginlens.data.feed import Feed, all_labelled
from marginlens.evals import Evaluation, Task
from marginlens.evals.features import accuracy, features, parts, plain_images
from marginlens.settings import Settings, Size


class Knn(Settings):
    """Nearest neighbours among training images, by cosine, weighted exp(cos / temperature)."""

    neutral = {"holdout": 0, "resize": 0, "size": 0}

    k: int = Field(200, ge=1, description="Neighbours that vote.")
    temperature: float = Field(0.1, ge=1e-3, description="How fast a neighbour's vote fades with its distance.")
    holdout: int = Field(0, ge=0, description="Test on this many training images, kept back, not on the test set.")
    resize: int = Field(0, ge=0, description="Resize images to this before the central crop; 0: to the crop.")
    size: Size = Field(0, description="Side of the images in pixels; 0: as in pre-training.")


ROWS = 512


def vote(bank: Tensor, labels: Tensor, asked: Tensor, classes: int, k: int, temperature: float) -> Tensor:
    """Return scores (m, classes) of `asked` (m, d): the k nearest in `bank` (n, d) vote with exp(cos / temperature).

    This is InstDisc's weighted vote (Wu et al. 2018), as in MoCo, lightly and solo-learn.
    """
    k = min(k, len(bank))
    bank, labels = normalize(bank, dim=1), labels.to(bank.device)
    scores = []
    for part in normalize(asked, dim=1).split(ROWS):
        cos, nearest = (part @ bank.T).topk(k, dim=1)
        votes = ((cos - cos[:, :1]) / temperature).exp()  # relative to the nearest, so that nothing overflows
        scores.append(votes.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], votes))
    return torch.cat(scores)


def knn_accuracy(backbone: nn.Module, feed: Feed, settings: Knn, size: int, precision: torch.dtype) -> float | None:
    """Return top-1 in percent, or None for data without labels or a test split."""
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


def measure(task: Task, several: Sequence[Knn]) -> dict[Knn, dict[str, Any]]:
    """Return accuracy and number of voting neighbours for each of the settings."""
    found = {}
    for settings in several:
        learned = len(parts(task.feed, settings.holdout).train)
        top = knn_accuracy(task.backbone, task.feed, settings, task.size, task.precision)
        found[settings] = {"top1": top, "neighbours": min(settings.k, learned)}
    return found


def _remark(record: Any) -> str:
    voted = int(record.neighbours or record.settings.k)
    return f"there are only {voted:,} training images, so all of them vote" if voted < record.settings.k else ""


EVALUATION = Evaluation(
    Knn, measure, title="kNN", how=lambda record: f"k = {record.neighbours or record.settings.k:g}", remark=_remark
)
