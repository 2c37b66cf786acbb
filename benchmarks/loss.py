"""Compare value and gradient of plain InfoNCE on this machine: ours and other implementations, in one run.

    python benchmarks/loss.py [--sizes 256 1024 4096 8192] [--out results/loss_cpu.json]
    python benchmarks/loss.py --device cuda                  the same on a GPU (loss_gpu.py) -> results/loss_gpu.json

Times are medians of rounds in which every contestant runs once, so that a slow spell affects all alike. Read the ratio.
Peak memory is measured in a fresh process each: the growth of its resident set during the call.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import machine
import torch
from losses import PML_LIMIT, TAU, on_cpu

D = 128
LAYOUTS = on_cpu()


def batch(layout, n):
    torch.manual_seed(0)
    q = torch.randn(n, D, requires_grad=True)
    k = torch.randn(n, D, requires_grad="detached" not in layout)
    return q, k


def step(loss, q, k):
    q.grad = k.grad = None
    loss(q, k).backward()


def contestants(layout, n):
    return {name: loss for name, loss in LAYOUTS[layout].items() if name != "pytorch-metric-learning" or n <= PML_LIMIT}


def times(layout, n, seconds):
    """Return median milliseconds of each contestant over interleaved rounds."""
    q, k = batch(layout, n)
    taken = {name: [] for name in contestants(layout, n)}
    for loss in contestants(layout, n).values():
        step(loss, q, k)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(taken["chunked"]) < 3:
        for name, loss in contestants(layout, n).items():
            before = time.perf_counter()
            step(loss, q, k)
            taken[name].append(1e3 * (time.perf_counter() - before))
    return {name: statistics.median(x) for name, x in taken.items()}


def peak_memory(layout, name, n):
    """Return the MiB that one call adds to the resident set, in a process of its own."""
    command = [sys.executable, __file__, "--child", layout, name, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def child(layout, name, n):
    """Print how far the resident set grew. A small call first loads all code."""
    loss = LAYOUTS[layout][name]
    step(loss, *batch(layout, 32))
    q, k = batch(layout, n)
    q.grad, k.grad = torch.zeros_like(q), torch.zeros_like(k)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step(loss, q, k)
    print(max(0.0, status("VmHWM") - before) / 1024)


def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows; cpu: 256 to 8,192, cuda: 256 to 262,144")
    parser.add_argument("--seconds", type=float, help="per layout and size, at least three rounds; cpu 5, cuda 0.3")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds in all, cuda only")
    parser.add_argument("--out", type=Path, help="results/loss_cpu.json or results/loss_gpu.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        layout, name, n = arguments.child
        child(layout, name, int(n))
    elif arguments.device == "cuda":
        import loss_gpu

        sizes, out = arguments.sizes or loss_gpu.SIZES, arguments.out or Path("results/loss_gpu.json")
        loss_gpu.measure("cuda", sizes, arguments.seconds or 0.3, arguments.limit, out)
    else:
        sizes, out = arguments.sizes or [256, 1024, 4096, 8192], arguments.out or Path("results/loss_cpu.json")
        on_the_cpu(sizes, arguments.seconds or 5.0, out)


def on_the_cpu(sizes, seconds, out):
    rows = []
    print(f"{'layout':20} {'N':>5}  {'loss':32} {'ms':>9} {'time ratio':>10} {'MiB':>8} {'memory ratio':>12}")
    for layout in LAYOUTS:
        for n in sizes:
            taken = times(layout, n, seconds)
            memory = {name: peak_memory(layout, name, n) for name in taken}
            for name in taken:
                row = {
                    "layout": layout,
                    "n": n,
                    "loss": name,
                    "ms": taken[name],
                    "time_ratio": taken[name] / taken["F.cross_entropy"],
                    "peak_mib": memory[name],
                    "memory_ratio": memory[name] / memory["F.cross_entropy"],
                }
                rows.append(row)
                print(
                    f"{layout:20} {n:5}  {name:32} {row['ms']:9.2f} {row['time_ratio']:10.2f} "
                    f"{row['peak_mib']:8.1f} {row['memory_ratio']:12.3f}",
                    flush=True,
                )
    machine.save(out, {"facts": machine.facts(d=D, tau=TAU), "rows": rows})


if __name__ == "__main__":
    main()
