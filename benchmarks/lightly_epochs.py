"""Measure seconds per epoch of lightly's CIFAR-10 examples, from the lines that they print after each epoch."""

from __future__ import annotations

import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAUNCHER = Path(__file__).parent / "peers" / "launch.py"
BATCH = 256
"""What both examples have."""
WRITTEN = 8
"""The workers that both examples ask for."""
VARIANTS = [
    {"method": method, "workers": workers, "stem": stem}
    for workers, stem in ((0, "imagenet"), (os.cpu_count() or 1, "small"), (os.cpu_count() or 1, "imagenet"))
    for method in ("simclr", "moco")
]
"""As written; then with a worker on every core and with the network that we train; then with the workers alone."""


def write_cifar10(folder: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Write images (n, 3, 32, 32) as torchvision's CIFAR-10 training files."""
    where = folder / "datasets" / "cifar10" / "cifar-10-batches-py"
    where.mkdir(parents=True, exist_ok=True)
    parts = np.array_split(np.arange(len(images)), 5)
    files: dict[str, Any] = {
        f"data_batch_{i}": {"data": images[part].reshape(len(part), -1), "labels": labels[part].tolist()}
        for i, part in enumerate(parts, 1)
    }
    files["batches.meta"] = {"label_names": [f"class {i}" for i in range(10)]}
    for name, content in files.items():
        (where / name).write_bytes(pickle.dumps(content))


def run(
    script: Path, folder: Path, images: int, limit: float, epochs: int, workers: int, stem: str, method: str
) -> dict[str, Any]:
    """Run an example for a number of epochs, or until the time is up. The first epoch does not count."""
    command = [sys.executable, "-u", str(LAUNCHER), str(script), "--workers", str(workers), "--stem", stem]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(os.path.abspath(path) for path in given if path)  # the example runs in another folder
    # without the second, lightly would ask a server for its newest version
    environment = os.environ | {"PYTHONPATH": paths, "LIGHTLY_DID_VERSION_CHECK": "True"}
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    ends, last = [], ""
    try:
        for at, line in _lines(process, begin + limit):
            last = line.strip() or last
            if re.match(r"epoch: +\d+, loss", line):
                ends.append(at)
                if len(ends) == epochs:
                    break
    finally:
        # the example and the workers that it started are a session of their own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    row: dict[str, Any] = {"who": "lightly's example", "method": method, "batch": BATCH}
    row |= {"workers": workers or WRITTEN, "stem": stem, "precision": "float32 (convolutions in TF32)"}
    row |= {"as_written": not workers and stem == "imagenet", "epochs_timed": max(0, len(ends) - 1)}
    if len(ends) < 2:
        return row | {"why": f"{len(ends)} epochs in {time.monotonic() - begin:.0f} s; it said: {last}"[:300]}
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    return row | {
        "seconds_per_epoch": seconds,
        "first_epoch_and_start": ends[0] - begin,
        "images_per_s": images // BATCH * BATCH / seconds,
        "ms_per_step": 1e3 * seconds / (images // BATCH),
    }


def _lines(process: subprocess.Popen[str], until: float) -> Iterator[tuple[float, str]]:
    """Yield a process's output lines with their times, until it ends or the time is up."""
    found: queue.Queue[tuple[float, str | None]] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.put((time.monotonic(), line))
        found.put((time.monotonic(), None))

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            at, line = found.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return
        if line is None:
            return
        yield at, line


def measure(
    examples: Path, folder: Path, images: NDArray[np.uint8], labels: NDArray[np.int64], limit: float, epochs: int = 2
) -> Iterator[dict[str, Any]]:
    """Return a row per variant, as time allows."""
    if not (examples / "simclr.py").exists():
        raise FileNotFoundError(f"{examples} has no simclr.py and moco.py of lightly's examples/pytorch")
    write_cifar10(folder, images, labels)
    end = time.monotonic() + limit
    for variant in VARIANTS:
        left = end - time.monotonic()
        if left < 10:
            yield {"who": "lightly's example", **variant, "why": "the time for this part is used up"}
            continue
        script = (examples / f"{variant['method']}.py").resolve()
        yield run(script, folder, len(images), min(left, 60.0), epochs, **variant)  # type: ignore[arg-type]
