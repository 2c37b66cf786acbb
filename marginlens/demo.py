"""`marginlens demo`: the whole laboratory in a few minutes on a CPU, and a page that shows what came of it."""

from __future__ import annotations

import json as jsons
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import marginlens as ml
from marginlens import output
from marginlens.data.atomic import check_replaceable
from marginlens.methods import Method
from marginlens.report.demo import MARKS, maps, write_page, write_picture
from marginlens.train.config import Knn, Pretrain, Probe, build
from marginlens.train.features import features, frozen, plain_images
from marginlens.train.feed import Feed, open_feed
from marginlens.train.knn import knn_accuracy
from marginlens.train.model import make_method, make_views
from marginlens.train.pretrain import pretrain
from marginlens.train.probe import linear_probe, probe
from marginlens.train.progress import Display, errors
from marginlens.train.restore import load_method_of
from marginlens.train.stop import Stopped

EFFECTS = {"plain": "plain", "margin": "margin(m1=0.2, m2=0.1)", "emphasis": "emphasis(s=2)"}
EPOCHS = 10
KNN_EVERY = 2
PROBE = Probe(epochs=8, batch=16, lr=0.5, crop_scale=(0.5, 1.0))
"""Short, and in small batches: on 2 cores there is no time for the recipe's hundred epochs."""
BATCH = 250


@dataclass(frozen=True)
class Shown:
    """One line of the demo: a run, or the random encoder that all began from."""

    name: str
    effect: str
    probe: float
    knn: float
    seconds: float
    metrics: list[dict[str, Any]]
    """A dictionary per epoch; none for the random encoder."""
    features: Tensor
    """Of the test images, (n, d)."""
    angles: Tensor
    """Angles of the positives of the test images, in radians, (n,)."""


def demo(*, out: Path = Path("demo"), epochs: int = EPOCHS, json: bool = False) -> None:
    """Pre-trains MoCo v3 plain, with a margin and with emphasis on shapes, probes them, and writes a page.

    Three to four minutes on two CPU cores. Run again, it goes on where it was stopped. It shows what was measured,
    whichever wins.

    Args:
        out: The folder to write: report.html, report.png, and the runs.
        epochs: Epochs of each pre-training.
        json: Print the table as JSON.
    """
    begin, plain = time.monotonic(), _settings("plain", epochs)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {out} ({error.strerror}); give --out another folder") from None
    for kind in MARKS:
        check_replaceable(out / f"report.{kind}", MARKS[kind])
    feed = open_feed("shapes", torch.device("cpu"))
    console = errors()
    shown = [_random(feed, plain)]
    for name in EFFECTS:
        console.print(f"\n{name}: {EFFECTS[name]}", markup=False)
        shown.append(_trained(name, feed, _settings(EFFECTS[name], epochs), out / "runs"))
    places = maps(shown)
    write_picture(shown, places, feed, out / "report.png")
    write_page(shown, places, feed, plain, PROBE, out / "report.html")
    if json:
        output.say_json(_json(shown))
        return
    output.show(_table(shown))
    output.say(f"wrote {out / 'report.html'} and {out / 'report.png'} in {time.monotonic() - begin:.0f} s")


def _settings(effect: str, epochs: int) -> Pretrain:
    settings: Pretrain = build(Pretrain, {"method": "mocov3", "data": "shapes", "effect": effect, "epochs": epochs})
    return settings


def _random(feed: Feed, settings: Pretrain) -> Shown:
    """What the runs begin from: every probe needs its floor."""
    method = make_method(settings)
    display = Display("random", PROBE.epochs, PROBE.epochs, quiet=True)
    found = linear_probe(method.backbone, feed, PROBE, settings.size, torch.float32, display)
    near = knn_accuracy(method.backbone, feed, Knn(), settings.size, torch.float32)
    return Shown("random", "not trained", found["top1"], near or 0.0, 0.0, [], *_look(method, feed, settings))


def _trained(name: str, feed: Feed, settings: Pretrain, runs: Path) -> Shown:
    try:
        run = pretrain(settings, runs=runs, resume=True, device="cpu", knn_every=KNN_EVERY)
    except Stopped as end:  # here there is no --resume, for it always does
        raise Stopped(str(end).replace("Go on with --resume", "The same command goes on there"), end.code) from None
    found = probe(run, PROBE, device="cpu", quiet=True)
    looks = _look(load_method_of(run), feed, settings)
    result = run.result
    return Shown(name, settings.effect, found["top1"], result["knn"], result["seconds"], run.metrics, *looks)


def _look(method: Method, feed: Feed, settings: Pretrain) -> tuple[Tensor, Tensor]:
    """Features of the test images, and the angles between the two views of each as the loss would see them."""
    some = torch.arange(len(feed.labels("test")))
    found = features(method.backbone, plain_images(feed, "test", some, settings.size), torch.float32)
    assert isinstance(method, nn.Module)
    with frozen(method):
        views = feed.views("test", some, make_views(settings, feed), settings.seed, 0, BATCH)
        angles = torch.cat([method.rows(pair).theta for pair in views])
    return found, angles


def _table(shown: list[Shown]) -> Table:
    table = Table("", "effect", "probe", "kNN", "angle", "time", title="MoCo v3 on shapes: top-1, positive angle")
    for row in shown:
        angle = f"{row.angles.rad2deg().mean():.0f}°"
        taken = f"{row.seconds:.0f} s" if row.seconds else ""
        table.add_row(row.name, row.effect, f"{row.probe:.1f} %", f"{row.knn:.1f} %", angle, taken)
    return table


def _json(shown: list[Shown]) -> str:
    kept = ("name", "effect", "probe", "knn", "seconds")
    rows = [{k: asdict(row)[k] for k in kept} | {"angle": float(row.angles.mean())} for row in shown]
    return jsons.dumps({"version": ml.__version__, "rows": rows}, indent=1)
