"""Time epochs of CIFAR-10's size on a GPU: ours with each engine, lightly's examples; run by `benchmarks/step.py`."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import gpu
import lightly_epochs
import machine
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from marginlens.data import store
from marginlens.data.feed import Arrays
from marginlens.data.store import Split, Store
from marginlens.nets import encoder
from marginlens.options import build
from marginlens.runs.config import Pretrain
from marginlens.runs.run import Run
from marginlens.train.pretrain import start
from marginlens.train.trainer import Trainer

METHODS = ("mocov3", "simclr")
WARM = 20
"""Steps before the clock starts: kernels are compiled, algorithms tried."""
MOST = 8
"""Epochs timed at most."""


def data(images: int) -> tuple[Store, str]:
    """Return CIFAR-10 if it is prepared here, else random images of its size: no time depends on the pixels."""
    if store.exists("cifar10") and images == 50_000:
        return store.read("cifar10"), "CIFAR-10"
    draws = np.random.default_rng(0)
    split = Split(draws.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8), draws.integers(0, 10, images))
    classes = tuple(f"class {i}" for i in range(10))
    return Store("cifar10", {"train": split}, classes, (0.5,) * 3, (0.25,) * 3, "random"), "random images"


def make_trainer(method: str, held: Store, device: str, **settings: Any) -> Trainer:
    """Return a run at its start that writes nothing."""
    feed = Arrays(held, torch.device(device))
    whole = {"bn_splits": 1}  # as floor.py has it, and what was measured before
    asked: Pretrain = build(Pretrain, {"method": method, "data": "cifar10", "epochs": MOST + 4, **whole, **settings})
    run = Run(Path(tempfile.gettempdir()) / "marginlens-benchmark", asked, "", held.fingerprint, feed.mean, feed.std)
    return start(run, feed, len(held.labels("train")))


def choose_engine(name: str, trainer: Trainer) -> Any:
    """Return an engine, whose `steps(trainer)` takes the rest of an epoch."""
    from marginlens.train import engine

    if name == "eager, loss compiled":
        trainer.method.loss = torch.compile(trainer.method.loss)  # type: ignore[method-assign]
        return engine.choose("eager", trainer)
    engine.check(name, trainer.feed, trainer.precision)  # type: ignore[arg-type]
    return engine.choose(name, trainer)  # type: ignore[arg-type]


def ours(method: str, name: str, held: Store, device: str, seconds: float, **settings: Any) -> dict[str, Any]:
    """Time whole epochs after a first one."""
    trainer = make_trainer(method, held, device, **settings)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # before a capture, whose memory replays use without allocating it
    begin = time.perf_counter()
    engine = choose_engine(name, trainer)
    steps = engine.steps(trainer)
    for _ in islice(steps, WARM):
        pass
    gpu.synchronize(device)
    ready = time.perf_counter()
    for _ in steps:
        pass
    gpu.synchronize(device)
    taken: list[float] = []
    while len(taken) < MOST and (not taken or sum(taken) < seconds):
        before = time.perf_counter()
        for _ in engine.steps(trainer):
            pass
        gpu.synchronize(device)
        taken.append(time.perf_counter() - before)
    epoch = statistics.median(taken)
    batch = trainer.settings.batch
    row = {"who": f"ours, {name}", "method": method, "batch": batch, "workers": 0, "stem": "small"}
    row |= {"precision": str(trainer.precision).removeprefix("torch."), "about": engine.about}
    row |= {"seconds_per_epoch": epoch, "images_per_s": trainer.per_epoch * batch / epoch}
    row |= {"ms_per_step": 1e3 * epoch / trainer.per_epoch, "epochs_timed": len(taken), "start": ready - begin}
    row["loss"] = float(trainer.losses.mean())
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def gflop_per_image() -> dict[str, float]:
    """Return GFLOP of ResNet-18's forward pass at 32 px with either stem: the cost of the networks that we compare."""
    found = {}
    for stem in ("small", "imagenet"):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            encoder("resnet18", stem=stem).eval()(torch.zeros(1, 3, 32, 32))
        found[stem] = counter.get_total_flops() / 1e9
    return found


def measure(
    device: str,
    sides: tuple[str, ...],
    seconds: dict[str, float],
    examples: Path,
    images: int,
    compiled: bool,
    out: Path,
    **settings: Any,
) -> None:
    held, what = data(images)
    facts = machine.facts(device, images=images, data=what, gflop_per_image=gflop_per_image())
    facts |= machine.versions("lightly", "torchvision")
    before = json.loads(out.read_text())["rows"] if out.exists() and len(sides) == 1 else []
    rows = [row for row in before if row["side"] not in sides]

    def add(side: str, row: dict[str, Any]) -> None:
        rows.append({"side": side, **row})
        machine.save(out, {"facts": facts, "rows": rows})
        said = row.get("why") or f"{row['seconds_per_epoch']:8.3f} s/epoch {row['images_per_s']:12,.0f} images/s"
        stem, workers = row.get("stem", ""), row.get("workers", "")
        print(f"{row['who']:24} {row['method']:7} workers {workers!s:3} stem {stem:9} {said}", flush=True)

    if "ours" in sides:
        for name in ("graph", "eager", *(["eager, loss compiled"] if compiled else [])):
            for method in METHODS:
                try:
                    add("ours", ours(method, name, held, device, seconds["ours"], **settings))
                except Exception as problem:
                    add("ours", {"who": f"ours, {name}", "method": method, "why": gpu.said(problem)})
    if "peers" in sides:
        peers(add, examples, held, seconds["peers"])


def peers(add: Any, examples: Path, held: Store, seconds: float) -> None:
    split = held.split("train")
    pixels: NDArray[np.uint8] = np.array(split.images)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in lightly_epochs.measure(examples, Path(folder), pixels, np.array(split.labels), seconds):
                add("peers", row)
        except OSError as problem:
            add("peers", {"who": "lightly's example", "method": "all", "why": gpu.said(problem)})
