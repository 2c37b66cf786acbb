"""Time the demo's training step on a CPU by its parts, and their limits; run by `python benchmarks/step.py`.

Each round times every part and a whole step. The table has medians and minima; on a busy machine the minimum is closer
to the true cost. A profile splits loss and gradient by operation. Their arithmetic rate stands beside the rate of a
matrix product, measured in the same rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import machine
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from marginlens.data import draw
from marginlens.data.feed import open_feed
from marginlens.demo import EPOCHS
from marginlens.nets.ema import MOMENTA
from marginlens.options import build
from marginlens.runs.config import Pretrain
from marginlens.runs.run import Run
from marginlens.train.pretrain import start
from marginlens.train.trainer import Trainer, check_data

PRODUCT = 1024
"""Side of the square product whose rate is the roof."""
KINDS = {
    "convolutions": ("conv", "mkldnn_convolution"),
    "batch norm": ("batch_norm",),
    "linear layers": ("addmm", "aten::mm", "aten::bmm", "linear"),
    "ReLU, additions, pooling": ("threshold", "clamp", "relu", "aten::add", "pool", "mean"),
    "copies and fills": ("copy", "fill", "zero", "empty", "clone"),
}


class Step:
    """The demo's step in parts that can be timed. Each part prepares the next one."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.number = trainer, 0
        order = draw.order(trainer.samples, 0, 0)
        batch = trainer.settings.batch
        self.batches = order[: trainer.per_epoch * batch].split(batch)
        self.made = self.views()

    def views(self) -> list[torch.Tensor]:
        trainer, chosen = self.trainer, self.batches[self.number % len(self.batches)]
        self.number += 1
        asked = (trainer.settings.split, chosen, trainer.views, trainer.settings.seed, 0, len(chosen))
        made = next(iter(trainer.feed.views(*asked)))
        self.made = [view.contiguous(memory_format=torch.channels_last) for view in made]
        return self.made

    def forward(self) -> None:
        self.loss = self.trainer.method.loss(self.made)

    def backward(self) -> None:
        self.trainer.optimizer.zero_grad()
        self.loss.backward()

    def optimiser(self) -> None:
        self.trainer.optimizer.step()

    def teacher(self) -> None:
        settings = self.trainer.settings
        self.trainer.method.after_step(MOMENTA[settings.ema_schedule](settings.ema, 0, self.trainer.total))

    def parts(self) -> dict[str, Any]:
        return {
            "views": self.views,
            "forward": self.forward,
            "backward": self.backward,
            "SGD": self.optimiser,
            "EMA": self.teacher,
        }


def make_step() -> Step:
    settings: Pretrain = build(Pretrain, {"method": "mocov3", "data": "shapes", "effect": "plain", "epochs": EPOCHS})
    feed = open_feed("shapes", torch.device("cpu"))
    run = Run(Path(tempfile.gettempdir()) / "marginlens-benchmark", settings, "", "", feed.mean, feed.std)
    return Step(start(run, feed, check_data(settings, feed)))


def spent(step: Step, rounds: int) -> dict[str, float]:
    """Return shares of the forward and backward time by kind of operation, from a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(rounds):
            step.forward()
            step.backward()
    found: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        kind = next((k for k, marks in KINDS.items() if any(mark in event.key for mark in marks)), "the rest")
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: value / total for kind, value in sorted(found.items(), key=lambda item: -item[1])}


def arithmetic(step: Step) -> dict[str, float]:
    """Count GFLOP of forward and backward: convolutions, and other matrix products."""
    counter = FlopCounterMode(display=False)
    with counter:
        step.forward()
        step.backward()
    counts = counter.get_flop_counts()["Global"]
    convolutions = sum(value for key, value in counts.items() if "conv" in str(key))
    total = counter.get_total_flops()
    return {"gflop": total / 1e9, "convolutions_gflop": convolutions / 1e9}


def measure(seconds: float, out: Path) -> None:
    step = make_step()
    a, b = (torch.randn(PRODUCT, PRODUCT) for _ in range(2))
    calls = step.parts() | {"product": lambda: a @ b}
    for _ in range(3):
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(taken["views"]) < 10:
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - before))
    counted = arithmetic(step)
    rows = [
        {"part": name, "median_ms": statistics.median(found), "least_ms": min(found)}
        for name, found in taken.items()
        if name != "product"
    ]
    roof = 2 * PRODUCT**3 / 1e6
    settings = step.trainer.settings
    facts = machine.facts(rounds=len(taken["views"]), encoder=settings.encoder, batch=settings.batch)
    shares, bound = spent(step, 20), {}
    for which, pick in (("median", statistics.median), ("least", min)):
        learning = pick(taken["forward"]) + pick(taken["backward"])
        reached, best = counted["gflop"] / learning * 1e3, roof / pick(taken["product"])
        alone = counted["convolutions_gflop"] / (shares["convolutions"] * learning) * 1e3
        bound[which] = {"gflops": reached, "convolutions_gflops": alone, "product_gflops": best}
    content = {"facts": facts, "rows": rows, **counted, "rates": bound, "spent": shares}
    machine.save(out, content)
    show(content)


def show(content: dict[str, Any]) -> None:
    for which in ("median_ms", "least_ms"):
        whole = sum(row[which] for row in content["rows"])
        parts = ", ".join(f"{row['part']} {row[which]:.2f} ({row[which] / whole:.0%})" for row in content["rows"])
        print(f"{which}: {whole:.2f}: {parts}")
    print("loss and gradient:", {kind: f"{share:.0%}" for kind, share in content["spent"].items()})
    print(f"{content['gflop']:.2f} GFLOP, {content['convolutions_gflop']:.2f} of it in convolutions")
    for which, rate in content["rates"].items():
        of = f"of a product's {rate['product_gflops']:.0f} GFLOP/s"
        print(f"{which}: {rate['gflops']:.0f}, convolutions alone {rate['convolutions_gflops']:.0f}, {of}")
