"""Time training by the step and by the epoch.

    python benchmarks/step.py                     the demo's step on a CPU, by parts -> results/step_cpu.json
    python benchmarks/step.py --device cuda       epochs of CIFAR-10's size on a GPU, beside lightly's examples
                                                  -> results/step_gpu.json

The second needs lightly and torchvision, and a folder with simclr.py and moco.py of lightly's examples/pytorch
(`--examples`). Without them it measures only our side.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, help="cpu: for the parts, 60; cuda: for each of ours, 6")
    parser.add_argument("--peer-seconds", type=float, default=120.0, help="for lightly's examples together")
    parser.add_argument("--examples", type=Path, default=Path("examples"), help="folder with lightly's examples")
    parser.add_argument("--compiled", action="store_true", help="also our eager step with its loss compiled by torch")
    parser.add_argument("--only", choices=("ours", "peers"), help="one side; the other's rows are kept")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    # so that a run that is told to end takes along what it started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if asked.device == "cpu":
        import step_cpu

        step_cpu.measure(asked.seconds or 60.0, asked.out or Path("results/step_cpu.json"))
        return
    import step_gpu

    out = asked.out or Path("results/step_gpu.json")
    sides = (asked.only,) if asked.only else ("ours", "peers")
    seconds = {"ours": asked.seconds or 6.0, "peers": asked.peer_seconds}
    step_gpu.measure("cuda", sides, seconds, asked.examples, asked.images, asked.compiled, out)


if __name__ == "__main__":
    main()
