"""Measure the cost of a lens beside a training step: one look in 50 steps of the laboratory's `tiny` MoCo, on a CPU.

    python benchmarks/lens.py

A look at embeddings (N, 128) and features is timed alternately with a step at the same N, and so is a look of
`pretrain --lens`, which embeds the batch again. The shares are of the time of 50 steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import facts, save

import marginlens as ml
from marginlens.nets import encoder
from marginlens.train.lens import Recorder

SIZES = (256, 512, 1024, 2048, 4096)
EVERY, ROUNDS = 50, 5
OUT = Path(__file__).parents[1] / "results" / "lens_cpu.json"


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(n: int) -> dict[str, float]:
    """Return the medians of a step and of a look, in seconds, and the share that a lens adds."""
    method = ml.MoCoV3(encoder("tiny"), hidden=256, out=128, bn_splits=1)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.01)
    views = [torch.randn(n, 3, 32, 32) for _ in range(2)]
    lens = ml.Lens(every=1)
    q, k, features = torch.randn(n, 128), torch.randn(n, 128), torch.randn(n, 128)

    def step() -> None:
        optimizer.zero_grad()
        method.loss(views).backward()
        optimizer.step()
        method.after_step()

    recorder = Recorder(method, every=1)
    steps, looks, again = [], [], []
    for _ in range(ROUNDS + 1):
        steps.append(timed(step))
        looks.append(timed(lambda: lens.observe(q, k, features)))
        again.append(timed(lambda: recorder.look(1, views, torch.float32)))
    a, b, c = (statistics.median(times[1:]) for times in (steps, looks, again))
    shares = {"percent": 100.0 * b / (EVERY * a), "percent_embedding": 100.0 * c / (EVERY * a)}
    return {"n": n, "step_s": a, "look_s": b, "embedding_look_s": c, **shares}


def main() -> None:
    """Print a line for each size, and write them."""
    rows = [measure(n) for n in SIZES]
    for row in rows:
        print(
            f"N = {row['n']:5}: step {row['step_s']:.3f} s, look {row['look_s']:.4f} s, {row['percent']:.2f} %, "
            f"embedding again {row['embedding_look_s']:.3f} s, {row['percent_embedding']:.2f} %"
        )
    save(OUT, {"machine": facts(), "every": EVERY, "rows": rows})


if __name__ == "__main__":
    main()
