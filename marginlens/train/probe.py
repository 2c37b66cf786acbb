"""What a run is worth: a linear probe, nearest neighbours, and the same on other data.

The backbone is frozen: eval mode, no gradients, and its checksum is compared before and after. The headline is the
last epoch's accuracy, never the best one's: choosing an epoch by its test accuracy is training on the test set.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marginlens.data import draw
from marginlens.data.views import View
from marginlens.train import record
from marginlens.train.config import PROBE_RECIPES, Knn, Pretrain, Probe, Settings
from marginlens.train.evaluate import Parts, knn_accuracy, parts
from marginlens.train.features import BATCH, features, plain_images
from marginlens.train.feed import Feed, open_feed
from marginlens.train.identity import evaluation_name
from marginlens.train.knn import accuracy
from marginlens.train.linear import Linear
from marginlens.train.model import choose_device, choose_precision, placed
from marginlens.train.progress import Display
from marginlens.train.record import Run, open_run
from marginlens.train.restore import fingerprint, load_backbone_of
from marginlens.train.schedule import learning_rate
from marginlens.train.stop import Stopped, disk, memory

LOWER = "--size, or take --device cpu"
_VIEW = 2
"""The number of a probe's view: pre-training has views 0 and 1."""


def probe(
    run: Run | str | Path,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Linear probe of a run on the data it learned from; the result is kept in its folder, and found there again."""
    run = open_run(run)
    settings = settings or Probe(**PROBE_RECIPES.get(run.settings.data, {}))
    return _evaluate("probe", run, run.settings.data, settings, device, workers, again, quiet)


def transfer(
    run: Run | str | Path,
    to: str,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Linear probe of a run on other data, which are normalised by their own mean and std."""
    run = open_run(run)
    settings = settings or Probe(**PROBE_RECIPES.get(to, {}))
    return _evaluate("transfer", run, to, settings, device, workers, again, quiet)


def knn(
    run: Run | str | Path,
    settings: Knn | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Nearest neighbours of a run on the data it learned from."""
    run = open_run(run)
    return _evaluate("knn", run, run.settings.data, settings or Knn(), device, workers, again, quiet)


def linear_probe(
    backbone: nn.Module, feed: Feed, settings: Probe, size: int, precision: torch.dtype, display: Display
) -> dict[str, Any]:
    """Trains a linear layer on features of fresh crops; top-1 and top-5 of the last epoch, in percent."""
    chosen = parts(feed, settings.holdout)
    test = features(
        backbone, plain_images(feed, chosen.tested, chosen.test, settings.size or size, settings.resize), precision
    )
    linear = Linear(test.shape[1], len(feed.classes), settings, feed.device)
    per_epoch = -(-len(chosen.train) // settings.batch)
    begin, total = time.monotonic(), settings.epochs * per_epoch
    for epoch in range(settings.epochs):
        x, y = _fresh(backbone, feed, chosen, settings, size, epoch, precision)
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        mean = float(linear.epoch(x, y, [learning_rate(i, total, settings.lr) for i in steps]).mean())
        if not math.isfinite(mean):
            raise Stopped(f"the probe's loss became {mean} in epoch {epoch + 1}; lower --lr ({settings.lr:g})")
        rate = (epoch + 1) * len(chosen.train) / (time.monotonic() - begin)
        display.step(epoch + 1, lambda m=mean: m, lambda r=rate: r)  # type: ignore[misc]
        display.epoch(epoch + 1, epoch + 1, {"loss": mean}, rate)
    if mean > 2 * (guess := math.log(len(feed.classes))) > 0:
        display.say(
            f"warning: the probe's loss ended at {mean:.1f}, and guessing has {guess:.1f}: it diverged, and its "
            f"accuracy says nothing of the backbone; lower --lr ({settings.lr:g}) or give it more epochs"
        )
    with torch.no_grad():
        scores = linear.layer(test)
    found = {f"top{k}": accuracy(scores, chosen.test_labels, k) for k in (1, 5)}
    return found | {"loss": mean, "train_images": len(chosen.train), "test_images": len(chosen.test)}


def _fresh(
    backbone: nn.Module, feed: Feed, chosen: Parts, settings: Probe, size: int, epoch: int, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Features and labels of new crops of the training images, in a new order."""
    order = draw.order(len(chosen.train), settings.seed, epoch)
    view = View(size, scale=settings.crop_scale, jitter_p=0.0, grey=0.0, blur=0.0, mean=feed.mean, std=feed.std)
    crops = feed.views("train", chosen.train[order], [view], settings.seed, epoch, BATCH, first=_VIEW)
    return features(backbone, (views[0] for views in crops), precision), chosen.labels[order].to(feed.device)


def _evaluate(
    kind: str, run: Run, data: str, settings: Settings, device: str, workers: int, again: bool, quiet: bool
) -> dict[str, Any]:
    """Measures, unless the same was measured before, and keeps the record in the run's folder."""
    where = choose_device(device)
    feed = open_feed(data, where, workers)
    if kind != "transfer" and feed.fingerprint != run.data:
        raise ValueError(
            f"{data} is not what {run.path} learned from: its content has changed since; "
            f"prepare it as it was, or use marginlens transfer --to {data}"
        )
    path = run.path / "evaluations" / evaluation_name(kind, data, feed.fingerprint, settings)
    display = Display(kind, epochs := getattr(settings, "epochs", 1), epochs, quiet)
    if found := _before(path, again, display):
        return found
    # nobody removes the weights meanwhile, nor measures the same
    with record.locked(run):
        if found := _before(path, again, display):  # by whoever held it until now
            return found
        facts = {"kind": kind, "run": run.id, "data": data, "data_fingerprint": feed.fingerprint}
        found = facts | _measured(run, feed, settings, path, display)
        with disk(path, f"top-1 is {found['top1']:.2f} %, and could not be kept", then="measure again"):
            record.save_json(path, found)
    return found


def _before(path: Path, again: bool, display: Display) -> dict[str, Any] | None:
    """The record of an evaluation that was made before, unless it is to be made again."""
    if again or not path.exists():
        return None
    display.say(f"measured before: {path}")
    return record.read_json(path)


def _measured(run: Run, feed: Feed, settings: Settings, path: Path, display: Display) -> dict[str, Any]:
    """What an evaluation finds, how long it took and where; the backbone must come out of it as it went in."""
    backbone = placed(load_backbone_of(run), feed.device)
    with disk(path, "nothing was measured yet", then="measure again"):
        path.parent.mkdir(exist_ok=True)
    before, begin = fingerprint(backbone), time.monotonic()
    with memory(LOWER), display:
        found = _measure(backbone, feed, run.settings, settings, display)
    if fingerprint(backbone) != before:
        raise RuntimeError("the evaluation changed the backbone; this is a bug, and its result is not recorded")
    facts = {"settings": settings.model_dump(mode="json"), "backbone_sha256": before}
    return facts | found | {"seconds": time.monotonic() - begin, "environment": record.environment(feed.device)}


def _measure(
    backbone: nn.Module, feed: Feed, trained: Pretrain, settings: Settings, display: Display
) -> dict[str, Any]:
    precision = choose_precision(trained.amp if feed.device.type == "cuda" else "off", feed.device)
    if isinstance(settings, Probe):
        return linear_probe(backbone, feed, settings, trained.size, precision, display)
    assert isinstance(settings, Knn)
    chosen = parts(feed, settings.holdout)
    found = {"top1": knn_accuracy(backbone, feed, settings, trained.size, precision)}
    return found | {"neighbours": min(settings.k, len(chosen.train))}
