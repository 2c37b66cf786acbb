"""What a run is worth: a linear probe, nearest neighbours, and the same on other data.

The backbone is frozen: eval mode, no gradients, and its checksum is compared before and after. The headline is the
last epoch's accuracy, never the best one's: choosing an epoch by its test accuracy is training on the test set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from marginlens.data import draw
from marginlens.data.stream import kept_workers
from marginlens.data.views import View
from marginlens.train import files, record
from marginlens.train.accuracy import accuracy, diverged, worse_than_guessing
from marginlens.train.config import PROBE_RECIPES, Knn, Pretrain, Probe, Settings, build
from marginlens.train.evaluate import Parts, parts
from marginlens.train.features import BATCH, features, plain_images
from marginlens.train.feed import Feed, open_feed
from marginlens.train.identity import evaluation_name
from marginlens.train.knn import knn_accuracy
from marginlens.train.linear import Linear
from marginlens.train.model import choose_device, choose_precision, placed
from marginlens.train.progress import Display
from marginlens.train.record import Run, open_run
from marginlens.train.restore import fingerprint, load_backbone_of
from marginlens.train.schedule import learning_rate
from marginlens.train.stop import Stopped, disk, memory

S = TypeVar("S", bound=Settings)
_VIEW = 2
"""The number of a probe's view: pre-training has views 0 and 1."""


def probe(
    run: Run | str | Path,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    beside: Sequence[float] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Linear probe of a run on the data it learned from; the result is kept in its folder, and found there again.

    What the settings leave open is as the recipe of the data has it. `beside`: learning rates at which further layers
    learn from the same crops, for little more time. Each is kept as the probe that it is, and the result has their
    top-1 by rate under "beside", and under "beside_diverged" the rates whose top-1 says nothing.
    """
    run = open_run(run)
    settings = _by_recipe(settings, run.settings.data)
    return _evaluate("probe", run, run.settings.data, settings, device, workers, again, quiet, beside)


def transfer(
    run: Run | str | Path,
    to: str,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    beside: Sequence[float] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Linear probe of a run on other data, which are normalised by their own mean and std."""
    run = open_run(run)
    return _evaluate("transfer", run, to, _by_recipe(settings, to), device, workers, again, quiet, beside)


def _by_recipe(given: Probe | None, data: str) -> Probe:
    chosen: Probe = build(Probe, PROBE_RECIPES.get(data, {}) | (given.model_dump(exclude_unset=True) if given else {}))
    return chosen


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
    return linear_probes(backbone, feed, [settings], size, precision, display)[settings]


def linear_probes(
    backbone: nn.Module, feed: Feed, several: Sequence[Probe], size: int, precision: torch.dtype, display: Display
) -> dict[Probe, dict[str, Any]]:
    """The same for settings that differ in the learning rate alone: all see the same features, which are made once.

    Each finds what it would find by itself; one whose loss is no number is left out, and the last one stops it all.
    """
    settings = several[0]
    chosen = parts(feed, settings.holdout)
    test = features(
        backbone, plain_images(feed, chosen.tested, chosen.test, settings.size or size, settings.resize), precision
    )
    layers = {one: Linear(test.shape[1], len(feed.classes), one, feed.device) for one in several}
    per_epoch = -(-len(chosen.train) // settings.batch)
    begin, total = time.monotonic(), settings.epochs * per_epoch
    for epoch in range(settings.epochs):
        x, y = _fresh(backbone, feed, chosen, settings, size, epoch, precision)
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        means = {
            one: float(layer.epoch(x, y, [learning_rate(i, total, one.lr) for i in steps]).mean())
            for one, layer in layers.items()
        }
        for one in [one for one, mean in means.items() if not math.isfinite(mean)]:
            lost = (
                f"the probe's loss became {means.pop(one)} in epoch {epoch + 1}; lower its learning rate ({one.lr:g})"
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
    """Accuracy of a layer on the test images, and the loss that its training ended with."""
    if worse_than_guessing(loss, classes):
        display.say(
            f"warning: the probe's loss ended at {loss:.1f}, and guessing has {math.log(classes):.1f}: it diverged, "
            f"and its accuracy says nothing of the backbone; lower its learning rate ({linear.settings.lr:g}) or give "
            f"it more epochs"
        )
    with torch.no_grad():
        scores = linear.layer(test)
    return {f"top{k}": accuracy(scores, labels, k) for k in (1, 5)} | {"loss": loss}


def _fresh(
    backbone: nn.Module, feed: Feed, chosen: Parts, settings: Probe, size: int, epoch: int, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Features and labels of new crops of the training images, in a new order."""
    order = draw.order(len(chosen.train), settings.seed, epoch)
    view = View(size, scale=settings.crop_scale, jitter_p=0.0, grey=0.0, blur=0.0, mean=feed.mean, std=feed.std)
    crops = feed.views("train", chosen.train[order], [view], settings.seed, epoch, BATCH, first=_VIEW)
    return features(backbone, (views[0] for views in crops), precision), chosen.labels[order].to(feed.device)


def _evaluate(
    kind: str,
    run: Run,
    data: str,
    settings: Settings,
    device: str,
    workers: int,
    again: bool,
    quiet: bool,
    beside: Sequence[float] = (),
) -> dict[str, Any]:
    """Measures what was not measured before, and keeps each record in the run's folder; returns that of `settings`."""
    where = choose_device(device)
    feed = open_feed(data, where, workers)
    if kind != "transfer" and feed.fingerprint != run.data:
        raise ValueError(
            f"{data} is not what {run.path} learned from: its content has changed since; "
            f"prepare it as it was, or use marginlens transfer --to {data}"
        )
    asked = {evaluation_name(kind, data, feed.fingerprint, one): one for one in at_rates(settings, beside)}
    folder = run.path / "evaluations"
    display = Display(kind, epochs := getattr(settings, "epochs", 1), epochs, quiet)

    def missing() -> dict[Path, Settings]:
        """What is not kept, but for rates at which a layer was lost beside one that is."""
        kept = {} if again else {name: run.evaluation(folder / name) for name in asked if (folder / name).exists()}
        lost = lost_rates(kept.values())
        return {
            folder / name: one
            for name, one in asked.items()
            if name not in kept and getattr(one, "lr", None) not in lost
        }

    if missing():
        # nobody removes the weights meanwhile, nor measures the same
        with record.locked(run) as hold, _still_there(hold):
            wanted = missing()  # without what was measured by whoever held it until now
            facts = {"kind": kind, "run": run.id, "data": data, "data_fingerprint": feed.fingerprint}
            for path, found in _measured(run, feed, wanted, display).items():
                hold.check()
                with disk(path, f"top-1 is {found['top1']:.2f} %, and could not be kept", then="measure again"):
                    files.save_json(path, facts | found)
    else:
        display.say(f"measured before: {folder / next(iter(asked))}")
    first, *rest = [folder / name for name in asked]
    if not first.exists():
        raise Stopped("the probe's loss was no number, though that of one beside it was; lower its learning rate")
    found = run.evaluation(first)
    others = {f"{one['settings']['lr']:g}": one for one in (run.evaluation(path) for path in rest if path.exists())}
    if rest:
        found["beside"] = {rate: one["top1"] for rate, one in others.items()}
    if bad := [rate for rate, one in others.items() if diverged(one)]:
        found["beside_diverged"] = bad
    return found


@contextmanager
def _still_there(hold: record.Hold | None) -> Iterator[None]:
    """Report that the run's folder was moved, if it was, in place of whatever else went wrong then."""
    try:
        yield
    finally:
        if hold is not None:
            hold.check()


def to_lower(device: torch.device) -> str:
    """Return what to change where memory runs out."""
    return "--size, or take --device cpu" if device.type != "cpu" else "--size, or close other programs"


def at_rates(settings: S, beside: Sequence[float]) -> list[S]:
    """An evaluation, and the same at other learning rates."""
    return [settings, *(build(type(settings), settings.model_dump() | {"lr": rate}) for rate in beside)]


def lost_rates(kept: Iterable[Mapping[str, Any]]) -> set[float]:
    """Rates at which a layer was lost beside those of these records."""
    return {rate for one in kept for rate in one.get("lost", ())}


def _measured(run: Run, feed: Feed, wanted: Mapping[Path, Settings], display: Display) -> dict[Path, dict[str, Any]]:
    """What evaluations find, how long they took and where; the backbone must come out of it as it went in."""
    if not wanted:
        return {}
    backbone = placed(load_backbone_of(run), feed.device)
    folder = next(iter(wanted)).parent
    with disk(folder, "nothing was measured yet", then="measure again"):
        folder.mkdir(exist_ok=True)
    before, begin = fingerprint(backbone), time.monotonic()
    with memory(to_lower(feed.device)), display, kept_workers():
        found = _measure(backbone, feed, run.settings, list(wanted.values()), display)
    if fingerprint(backbone) != before:
        raise RuntimeError("the evaluation changed the backbone; this is a bug, and its result is not recorded")
    last = {"seconds": time.monotonic() - begin, "environment": record.environment(feed.device)}
    if lost := [one.lr for one in wanted.values() if isinstance(one, Probe) and one not in found]:
        last["lost"] = lost  # nobody has to try them again
    return {
        path: {"settings": one.model_dump(mode="json"), "backbone_sha256": before} | found[one] | last
        for path, one in wanted.items()
        if one in found
    }


def _measure(
    backbone: nn.Module, feed: Feed, trained: Pretrain, several: Sequence[Settings], display: Display
) -> dict[Any, dict[str, Any]]:
    """What each of several probes finds, or nearest neighbours, by its settings."""
    precision = choose_precision(trained.amp if feed.device.type == "cuda" else "off", feed.device)
    probes = [one for one in several if isinstance(one, Probe)]
    if probes:
        return linear_probes(backbone, feed, probes, trained.size, precision, display)
    (settings,) = several
    assert isinstance(settings, Knn)
    chosen = parts(feed, settings.holdout)
    top = {"top1": knn_accuracy(backbone, feed, settings, trained.size, precision)}
    return {settings: top | {"neighbours": min(settings.k, len(chosen.train))}}
