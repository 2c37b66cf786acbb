"""Compare value and gradient of plain InfoNCE on a GPU; run by `python benchmarks/loss.py --device cuda`.

A contestant is left out where memory does not suffice, or where it would take longer than `TOO_LONG`. No time includes
compilation. Two limits stand beside each time: the layout's matrix products at the rate of a large bf16 product, and
its exponentials at the rate of exp2. Both rates are measured in the same run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import losses
import machine
import torch
from losses import BOTH, DETACHED, SIMCLR, TAU, Loss
from torch import Tensor

D = 128
SIZES = [256, 1024, 4096, 16384, 65536, 262144]
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
CHECKED = 16384
"""Rows at which gradients are compared with those of F.cross_entropy in float64."""
CAPTURED = 16384
"""Rows up to which a captured step is timed as well: beyond, a launch costs nothing beside the work."""
TOO_LONG, SLOW = 2500.0, 250.0
"""Milliseconds beyond which a contestant is left out, and beyond which one timed call has to do."""
COMPILED = (4096, 16384, 65536)
"""Rows at which what is compiled anew for every size is compiled."""
COMPILE_SECONDS = 90.0
"""For all compilations together; what comes later is left out."""

PRODUCTS = {DETACHED: 2, BOTH: 4, SIMCLR: 3}
"""Products over all pairs that value and gradient take when no matrix of pairs is kept.

Keys detached: logits, and the queries' gradient in the same pass. Both sides: the same, then logits again and the keys'
gradient. SimCLR: logits, then logits again and one gradient.
"""
EXPONENTIALS = {DETACHED: 1, BOTH: 2, SIMCLR: 2}
"""Exponentials per pair, counted the same way."""


def batch(layout: str, dtype: torch.dtype, n: int, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    a, b = (torch.randn(n, D, device=device, dtype=dtype) for _ in range(2))
    return a.requires_grad_(), b.requires_grad_(layout != DETACHED)


def step(loss: Loss, a: Tensor, b: Tensor) -> None:
    a.grad = b.grad = None
    loss(a, b).backward()


class Bench:
    """One run: its measurements, the contestants left out, and facts about each contestant."""

    def __init__(self, device: str, seconds: float, limit: float, checked: int) -> None:
        self.device, self.seconds, self.checked = device, seconds, checked
        self.ends = time.monotonic() + limit
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.last: dict[tuple[str, str, str], tuple[int, float]] = {}
        self.general: dict[tuple[str, str, str], Loss] = {}
        self.compiling = 0.0
        self.roofs: dict[str, Any] = {}

    def skip(self, layout: str, kind: str, n: int, name: str, why: str) -> None:
        self.left_out.append({"layout": layout, "dtype": kind, "n": n, "loss": name, "why": why})
        print(f"{layout:20} {kind:8} {n:7}  {name:32} left out: {why}", flush=True)

    def cell(self, layout: str, kind: str, n: int) -> None:
        """Measure every contestant for one layout, dtype and size."""
        a, b = batch(layout, DTYPES[kind], n, self.device)
        contestants = losses.on_gpu(layout, DTYPES[kind], n)
        truth = exact(layout, a, b) if n == self.checked else None
        torch.cuda.empty_cache()
        ready: dict[str, gpu.Call] = {}
        found: dict[str, dict[str, Any]] = {}
        for name, loss in (contestants | self.compiled(layout, kind, n)).items():
            why = self.try_out(layout, kind, n, name, loss, a, b, truth, found)
            if why:
                self.skip(layout, kind, n, name, why)
                gc.collect()
                torch.cuda.empty_cache()
            elif found[name]["ms"] < SLOW:
                ready[name] = bound(loss, a, b)
        for name, ms in gpu.turns(ready, self.device, self.seconds).items():
            found[name]["ms"] = ms
        base = found.get("F.cross_entropy")
        for name, row in found.items():
            self.last[layout, kind, name] = n, row["ms"]
            self.rows.append(
                {"layout": layout, "dtype": kind, "n": n, "loss": name, **self.judged(layout, n, row, base)}
            )
            show(self.rows[-1])

    def compiled(self, layout: str, kind: str, n: int) -> dict[str, Loss]:
        """Return the compiled contestants, as the time for compilation allows."""
        found = {}
        for name, (loss, general) in losses.compiled(layout, DTYPES[kind]).items():
            if (layout, kind, name) in self.general:
                found[name] = self.general[layout, kind, name]
            elif n < 1024 or not (general or n in COMPILED):
                continue
            elif self.compiling > COMPILE_SECONDS:
                self.skip(layout, kind, n, name, "the time for compilations is used up")
            elif general:
                found[name] = self.general[layout, kind, name] = torch.compile(loss, dynamic=True)
            else:
                found[name] = torch.compile(loss, dynamic=False)
        return found

    def try_out(
        self,
        layout: str,
        kind: str,
        n: int,
        name: str,
        loss: Loss,
        a: Tensor,
        b: Tensor,
        truth: list[Tensor] | None,
        found: dict[str, dict[str, Any]],
    ) -> str:
        """Call a contestant twice: to compile, and for its time and memory. Return why that is not possible, or ""."""
        before, ms = self.last.get((layout, kind, name), (n, 0.0))
        if ms > 1.0 and ms * (n / before) ** 2 > TOO_LONG:
            return f"it would take {ms * (n / before) ** 2 / 1e3:.0f} s"
        call, begin = bound(loss, a, b), time.perf_counter()
        try:
            call()
            gpu.synchronize(self.device)
            error = None if truth is None else off(truth, a, b)
            # a first call has left gradients, which the next one frees: they are not counted as what it takes
            found[name] = dict(zip(("ms", "peak_mib"), gpu.cost(call, self.device), strict=True))
            if error is not None:
                found[name]["gradient_error"] = error
        except Exception as problem:  # out of memory, or whatever a package may raise: the others go on
            found.pop(name, None)
            a.grad = b.grad = None
            return gpu.said(problem)
        finally:
            if "compiled" in name:
                self.compiling += time.perf_counter() - begin
        return ""

    def judged(self, layout: str, n: int, row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
        """Return a row with its ratios to F.cross_entropy and to the limits."""
        rows = 2 * n if layout == SIMCLR else n
        extra: dict[str, Any] = {"time_ratio": row["ms"] / base["ms"] if base else None}
        if base and base["peak_mib"]:
            extra["memory_ratio"] = row["peak_mib"] / base["peak_mib"]
        if self.roofs:
            products = PRODUCTS[layout] * 2 * rows * rows * D / self.roofs["bf16_tflops"] / 1e9
            extra["products_ms"], extra["products_ratio"] = products, row["ms"] / products
            if rate := self.roofs.get("exponentials_per_s"):
                exponentials = 1e3 * EXPONENTIALS[layout] * rows * rows / rate
                extra["exponentials_ms"], extra["exponentials_ratio"] = exponentials, row["ms"] / exponentials
        return row | extra

    def captured(self, sizes: list[int]) -> None:
        """Measure the GPU's own time of small steps, without the host's launches. Last, because a failed capture may
        harm.
        """
        for row in self.rows:
            wanted = row["loss"] in ("F.cross_entropy", "triton") and row["dtype"] == "bf16"
            if not wanted or row["n"] > min(CAPTURED, max(sizes)) or time.monotonic() > self.ends:
                continue
            a, b = batch(row["layout"], DTYPES[row["dtype"]], row["n"], self.device)
            loss = losses.on_gpu(row["layout"], DTYPES[row["dtype"]], row["n"])[row["loss"]]
            try:
                row["graph_ms"] = gpu.captured(bound(loss, a, b))
            except Exception as problem:
                row["graph_ms"], row["graph_note"] = None, gpu.said(problem)
            print(f"{row['layout']:20} {row['n']:7}  {row['loss']:32} in a graph {row['graph_ms']} ms", flush=True)


def bound(loss: Loss, a: Tensor, b: Tensor) -> Callable[[], None]:
    return lambda: step(loss, a, b)


def exact(layout: str, a: Tensor, b: Tensor) -> list[Tensor] | None:
    """Return gradients of F.cross_entropy in float64 for the same numbers, or None if memory does not suffice."""
    p, q = (x.detach().double().requires_grad_(x.requires_grad) for x in (a, b))
    try:
        step(losses.cross_entropy_2n if layout == SIMCLR else losses.cross_entropy, p, q)
    except torch.cuda.OutOfMemoryError:
        return None
    return [x.grad for x in (p, q) if x.grad is not None]


def off(truth: list[Tensor], a: Tensor, b: Tensor) -> float:
    """Return the largest relative difference of a gradient, by norms."""
    found = [x.grad for x in (a, b) if x.grad is not None]
    pairs = zip(truth, found, strict=True)
    return max(float((mine.double() - right).norm() / right.norm()) for right, mine in pairs)


def show(row: dict[str, Any]) -> None:
    def number(key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else " " * 9

    print(
        f"{row['layout']:20} {row['dtype']:8} {row['n']:7}  {row['loss']:32} {row['ms']:10.3f} ms "
        f"{number('time_ratio', '9.3f')} {number('peak_mib', '9.1f')} MiB  products {number('products_ratio', '9.2f')}"
        f"  exp {number('exponentials_ratio', '9.2f')}  error {number('gradient_error', '9.1e')}",
        flush=True,
    )


def measure(device: str, sizes: list[int], seconds: float, limit: float, out: Path) -> None:
    # every size is a compilation of its own, and falling back to eager code unseen would be a lie
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 512)
    checked = max((n for n in sizes if n <= CHECKED), default=0)
    bench = Bench(device, seconds, limit, checked)
    packages = ("cut-cross-entropy", "pytorch-metric-learning", "lightly")
    facts = machine.facts(device, d=D, tau=TAU, checked=checked, **machine.versions(*packages))
    if device == "cuda":
        try:
            import rates

            bench.roofs = rates.measured()
            print({name: f"{value:.4g}" for name, value in bench.roofs.items()}, flush=True)
        except Exception as problem:
            print("no roofs:", gpu.said(problem), flush=True)

    def save() -> None:
        content = {"facts": facts, "roofs": bench.roofs, "compile_seconds": bench.compiling}
        machine.save(out, content | {"rows": bench.rows, "left_out": bench.left_out})

    for n in sizes:
        for kind in DTYPES:
            for layout in PRODUCTS:
                if time.monotonic() > bench.ends:
                    bench.skip(layout, kind, n, "all", "the time for the whole run is used up")
                    continue
                try:
                    bench.cell(layout, kind, n)
                except Exception as problem:
                    bench.skip(layout, kind, n, "all", gpu.said(problem))
        save()
    if device == "cuda":
        bench.captured(sizes)
    save()
