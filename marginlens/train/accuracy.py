"""How good scores are, and when a probe's accuracy says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10, "tinyimagenet": 200, "shapes": 10}
"""Of the data sets that are known by name, where a record does not say it: the first did not."""


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
