"""Value and gradient of plain InfoNCE on this machine: ours beside what people use, in one run.

    python benchmarks/loss.py [--sizes 256 1024 4096 8192] [--out results/loss_cpu.json]

Times are medians of rounds in which every contestant runs once, so that a slow spell of the machine hits all alike; the
column to read is the ratio. Peak memory is measured in a fresh process each: the most that its resident set grew beyond
what it held before the call.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import marginlens as ml

D, TAU = 128, 0.25
PML_LIMIT = 256


def cross_entropy(q, k):
    """What everybody writes."""
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / TAU
    return F.cross_entropy(logits, torch.arange(len(q), device=q.device))


def cross_entropy_2n(z1, z2):
    """What everybody writes for SimCLR."""
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (z @ z.T / TAU).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


def metric_learning(z1, z2):
    """pytorch-metric-learning; its memory is cubic in the batch."""
    from pytorch_metric_learning import losses

    return losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=TAU))(z1, z2)


def ours(loss, **options):
    return lambda a, b: loss(a, b, tau=TAU, **options)


LAYOUTS = {
    "MoCo, keys detached": {
        "F.cross_entropy": cross_entropy,
        "reference": ours(ml.info_nce, impl="reference"),
        "chunked": ours(ml.info_nce, impl="chunked"),
        "chunked, emphasis(s=20, c=2.5)": ours(ml.info_nce, impl="chunked", effect=ml.Emphasis(s=20, c=2.5)),
    },
    "MoCo, both sides": {
        "F.cross_entropy": cross_entropy,
        "reference": ours(ml.info_nce, impl="reference"),
        "chunked": ours(ml.info_nce, impl="chunked"),
        "chunked, emphasis(s=20, c=2.5)": ours(ml.info_nce, impl="chunked", effect=ml.Emphasis(s=20, c=2.5)),
    },
    "SimCLR": {
        "F.cross_entropy": cross_entropy_2n,
        "reference": ours(ml.nt_xent, impl="reference"),
        "chunked": ours(ml.nt_xent, impl="chunked"),
        "pytorch-metric-learning": metric_learning,
    },
}


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
    """Median milliseconds of each contestant over interleaved rounds."""
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
    """MiB that one call adds to the resident set, in a process of its own."""
    command = [sys.executable, __file__, "--child", layout, name, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def child(layout, name, n):
    """Prints how far the resident set rose above where it stood; a small call first brings in all code."""
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


def facts():
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "marginlens": ml.__version__,
        "d": D,
        "tau": TAU,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--seconds", type=float, default=5.0, help="per layout and size, at least three rounds")
    parser.add_argument("--out", type=Path, default=Path("results/loss_cpu.json"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        layout, name, n = arguments.child
        child(layout, name, int(n))
        return
    rows = []
    print(f"{'layout':20} {'N':>5}  {'loss':32} {'ms':>9} {'time ratio':>10} {'MiB':>8} {'memory ratio':>12}")
    for layout in LAYOUTS:
        for n in arguments.sizes:
            taken = times(layout, n, arguments.seconds)
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
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"facts": facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
