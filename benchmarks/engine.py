"""Time the captured training step on a GPU, with and without each of its parts, and profile it.

    python benchmarks/engine.py [--only steps parts profile together probe large] [--out results/engine_gpu.json]

A MoCo v3, SimCLR and BYOL step of ResNet-18 at batch 256, bf16, on random images of CIFAR-10's number and size: replays
timed by events, whole epochs by the clock. `parts` leaves out one part at a time; `profile` sums kernels by kind;
`together` replays two runs at once; `probe` trains a linear probe for a hundred epochs; `large` uses 64 px.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import machine
import numpy as np
import step_gpu
import torch
from torch.profiler import ProfilerActivity, profile

from marginlens.data.feed import Arrays
from marginlens.data.store import Split, Store
from marginlens.devices import placed
from marginlens.evals import Task
from marginlens.evals.probe import Probe, measure
from marginlens.nets.resnet import encoder
from marginlens.output import Display
from marginlens.train import engine
from marginlens.train.trainer import Trainer

PARTS = ("steps", "parts", "profile", "together", "probe", "large")
KINDS = {
    "convolutions": ("fprop", "dgrad", "wgrad", "implicit_gemm", "cutlass", "cask"),
    "biases of the heads": ("_column_sums",),
    "batch norm, addition, ReLU": (
        "stats_kernel",
        "normalise_kernel",
        "sums_kernel",
        "input_gradient_kernel",
        "whole_",
    ),
    "stem": ("_stem",),
    "SGD, EMA, copies": ("_sgd_ema",),
    "views": ("views_kernel",),
    "heads": ("nvjet", "gemm", "_pool"),
}
"""What a kernel's name says of it, the first that fits; the rest is the loss and small things."""


def trainer_of(held: Store, method: str, **more: Any) -> Trainer:
    return step_gpu.make_trainer(method, held, "cuda", **more)


def timed(held: Store, method: str, **more: Any) -> dict[str, Any]:
    """Return milliseconds of a replay and seconds of an epoch."""
    beside = more.pop("beside", True)
    trainer = trainer_of(held, method, **more)
    begin = time.perf_counter()
    graph = engine.Graph(trainer, beside=beside)
    torch.cuda.synchronize()
    start = time.perf_counter() - begin
    graph.begin(0, 0)

    def replay() -> None:
        graph.position.zero_()
        assert graph.graph is not None
        graph.graph.replay()

    ms = gpu.median(replay, "cuda", 30)
    epochs = []
    for _ in range(3):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in graph.steps(trainer):
            pass
        torch.cuda.synchronize()
        epochs.append(time.perf_counter() - before)
    return {"method": method, "start_s": start, "replay_ms": ms, "epoch_s": sorted(epochs)[1]}


@contextmanager
def without(name: str, value: Any) -> Iterator[None]:
    """Build the engine with one of its names replaced."""
    kept = getattr(engine, name)
    setattr(engine, name, value)
    try:
        yield
    finally:
        setattr(engine, name, kept)


def parts(held: Store) -> Iterator[dict[str, Any]]:
    """Time a step without one part at a time."""
    yield {"what": "one stream", **timed(held, "mocov3", beside=False)}
    with without("Side", lambda stream: None):
        yield {"what": "weight gradients in line", **timed(held, "mocov3")}
        with without("fast", lambda *_: nullcontext()):
            yield {"what": "torch's batch norms and stem", **timed(held, "mocov3")}
    with without("fastest_convolutions", lambda **_: nullcontext()):
        yield {"what": "cuDNN's own choice of algorithms", **timed(held, "mocov3")}


def kinds(held: Store, method: str) -> dict[str, Any]:
    """Return microseconds of a replay by kind of kernel, all on one stream."""
    graph = engine.Graph(trainer_of(held, method), beside=False)
    graph.begin(0, 0)
    assert graph.graph is not None
    for _ in range(3):
        graph.graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            graph.graph.replay()
        torch.cuda.synchronize()
    total, launches = Counter[str](), 0
    for event in found.events():
        if event.device_time:
            kind = next((k for k, names in KINDS.items() if any(n in event.name for n in names)), "loss and the rest")
            total[kind] += event.device_time / 3
            launches += 1
    return {"method": method, "launches": launches / 3, "us": dict(total.most_common())}


def together(held: Store, count: int = 2, steps: int = 40) -> dict[str, Any]:
    """Return milliseconds per step of several runs, one after another and at once."""
    graphs = [engine.Graph(trainer_of(held, "mocov3", seed=seed)) for seed in range(count)]
    streams = [torch.cuda.Stream() for _ in graphs]

    def run(used: list[torch.cuda.Stream]) -> float:
        for graph in graphs:
            graph.begin(0, 0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            for graph, stream in zip(graphs, used, strict=True):
                assert graph.graph is not None
                with torch.cuda.stream(stream):
                    graph.graph.replay()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / steps / count

    run(streams)
    return {"runs": count, "one after another_ms": run([streams[0]] * count), "at once_ms": run(streams)}


def probe(held: Store) -> dict[str, Any]:
    """Return seconds of a linear probe's hundred epochs of fresh crops. The backbone's weights do not matter."""
    train = held.splits["train"]
    with_test = replace(held, splits={"train": train, "test": Split(train.images[:10_000], train.labels[:10_000])})
    feed = Arrays(with_test, torch.device("cuda"))
    net = placed(encoder("resnet18"), feed.device)
    taken = {}
    for epochs in (1, 100):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        measure(Task(net, feed, 32, torch.bfloat16, Display("", quiet=True)), [Probe(epochs=epochs)])
        torch.cuda.synchronize()
        taken[epochs] = time.perf_counter() - begin
    return {"first_epoch_s": taken[1], "hundred_epochs_s": taken[100]}


def large(images: int = 20_480) -> Iterator[dict[str, Any]]:
    """Time 64 px with the pooled stem."""
    draws = np.random.default_rng(0)
    split = Split(draws.integers(0, 256, (images, 3, 64, 64), dtype=np.uint8), draws.integers(0, 10, images))
    held = Store("cifar10", {"train": split}, tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3, "random")
    for method in ("mocov3", "simclr"):
        yield {"size": 64, "images": images, **timed(held, method, size=64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path("results/engine_gpu.json"))
    asked = parser.parse_args()
    held, what = step_gpu.data(50_000)
    content: dict[str, Any] = {"facts": machine.facts("cuda", data=what)}
    work: dict[str, Callable[[], Any]] = {
        "steps": lambda: [timed(held, method) for method in ("mocov3", "simclr", "byol")],
        "parts": lambda: list(parts(held)),
        "profile": lambda: [kinds(held, method) for method in ("mocov3", "simclr")],
        "together": lambda: together(held),
        "probe": lambda: probe(held),
        "large": lambda: list(large()),
    }
    for name in asked.only:
        try:
            content[name] = work[name]()
        except Exception as problem:
            content[name] = {"why": gpu.said(problem)}
        print(name, content[name], flush=True)
        machine.save(asked.out, content)


if __name__ == "__main__":
    main()
