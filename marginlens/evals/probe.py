"""Train a linear layer on a run's frozen backbone, and report the accuracy after the last epoch.

The best epoch is never picked, because choosing an epoch by its test accuracy is training on the test set. To choose
settings, use --holdout, which leaves the test set alone. For example:

    marginlens probe runs/mocov3-shapes-tiny-plain-seed0-1a2b3c4d5e

    marginlens probe RUN --holdout 1000

    marginlens probe RUN --beside 0.1 0.3 3 10
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from marginlens.data import draw
from marginlens.data.sources import recipes
from marginlens.data.views import View
from marginlens.errors import Stopped
from marginlens.evals import Evaluation, Task
from marginlens.evals.features import BATCH, Parts, accuracy, features, parts, plain_images, worse_than_guessing
from marginlens.evals.linear import Linear
from marginlens.nets.ema import learning_rate
from marginlens.output import Display
from marginlens.settings import Scale, Settings, Size


class Probe(Settings):
    """A linear layer on a frozen backbone: the paper's evaluation."""

    neutral = {"weight_decay": 0.0, "holdout": 0, "resize": 0, "size": 0}
    recipes = recipes("probe")

    epochs: int = Field(100, ge=1, description="Passes over the training images, each with fresh crops.")
    batch: int = Field(256, ge=1, description="Images in a batch.")
    lr: float = Field(1.0, ge=0, description="Learning rate; a cosine takes it to 0.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum (Nesterov's).")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of the layer.")
    crop_scale: Scale = Field((0.08, 1.0), description="Share of the area in a training crop.")
    holdout: int = Field(0, ge=0, description="Test on this many training images, kept back, not on the test set.")
    resize: int = Field(0, ge=0, description="Resize test images to this before the central crop; 0: to the crop.")
    size: Size = Field(0, description="Side of test images in pixels; 0: as in pre-training.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of the layer, order and crops.")


_VIEW = 2
"""Number of the probe's view; pre-training uses views 0 and 1."""


def measure(task: Task, several: Sequence[Probe]) -> dict[Probe, dict[str, Any]]:
    """Train one layer per learning rate, all on the same features.

    Each layer gets the result that it would get alone. A layer whose loss becomes NaN is left out; if none is left,
    stop.
    """
    backbone, feed, size, precision, display = task
    settings = several[0]
    chosen = parts(feed, settings.holdout)
    plain = plain_images(feed, chosen.tested, chosen.test, settings.size or size, settings.resize)
    test = features(backbone, plain, precision)
    layers = {one: Linear(test.shape[1], len(feed.classes), one, feed.device) for one in several}
    per_epoch = -(-len(chosen.train) // settings.batch)
    begin, total = time.monotonic(), settings.epochs * per_epoch
    for epoch in range(settings.epochs):
        x, y = _fresh(task, chosen, settings, epoch)
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        means = {
            one: float(layer.epoch(x, y, [learning_rate(i, total, one.lr) for i in steps]).mean())
            for one, layer in layers.items()
        }
        for one in [one for one, mean in means.items() if not math.isfinite(mean)]:
            lost = (
                f"the probe diverged: its loss became {means.pop(one)} in epoch {epoch + 1}; "
                f"lower its learning rate ({one.lr:g})"
            )
            del layers[one]
            if not layers:
                raise Stopped(lost)
            display.say(f"warning: {lost}")
        mean, rate = next(iter(means.values())), (epoch + 1) * len(chosen.train) / (time.monotonic() - begin)
        display.step(epoch + 1, lambda m=mean: m, lambda r=rate: r)  # type: ignore[misc]
        display.epoch(epoch + 1, epoch + 1, {"loss": mean}, rate)
    known: dict[str, float] = {"feature_norm": float(test.norm(dim=1).mean())}
    known |= {"train_images": len(chosen.train), "test_images": len(chosen.test), "classes": len(feed.classes)}
    return {
        one: _worth(layer, means[one], test, chosen.test_labels, len(feed.classes), display) | known
        for one, layer in layers.items()
    }


def _worth(linear: Linear, loss: float, test: Tensor, labels: Tensor, classes: int, display: Display) -> dict[str, Any]:
    """Return a layer's accuracy on the test images, and its last training loss."""
    if worse_than_guessing(loss, classes):
        display.say(
            f"warning: the probe diverged: its loss ended at {loss:.1f}, and guessing gives {math.log(classes):.1f}. "
            f"Its accuracy says nothing about the backbone; lower its learning rate ({linear.settings.lr:g}) or train "
            f"it for more epochs"
        )
    with torch.no_grad():
        scores = linear.layer(test)
    return {f"top{k}": accuracy(scores, labels, k) for k in (1, 5)} | {"loss": loss}


def _fresh(task: Task, chosen: Parts, settings: Probe, epoch: int) -> tuple[Tensor, Tensor]:
    """Return features and labels of new crops of the training images, in a new order."""
    feed, order = task.feed, draw.order(len(chosen.train), settings.seed, epoch)
    view = View(task.size, scale=settings.crop_scale, jitter_p=0.0, grey=0.0, blur=0.0, mean=feed.mean, std=feed.std)
    crops = feed.views("train", chosen.train[order], [view], settings.seed, epoch, BATCH, first=_VIEW)
    made = features(task.backbone, (views[0] for views in crops), task.precision)
    return made, chosen.labels[order].to(feed.device)


def _how(record: Any) -> str:
    asked = record.settings
    return f"{asked.epochs} epoch{'s' * (asked.epochs != 1)} at learning rate {asked.lr:g}"


EVALUATION = Evaluation(Probe, measure, needs=("train_images", "test_images"), how=_how)
