"""Ten thousand steps do not leak memory or open files."""

import os
import statistics
from pathlib import Path

import numpy as np
import pytest

import marginlens as ml
from marginlens.data import store
from marginlens.train import engine
from tests.train.conftest import settings

STEPS, EVERY = 10_000, 100


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_and_open_files_are_flat(tmp_path, monkeypatch):
    def train_step(trainer, views):
        honest(trainer, views)
        if trainer.step % EVERY == 0:
            memory.append(resident())
            files.append(len(os.listdir("/proc/self/fd")))

    memory, files, honest = [], [], engine.train_step
    monkeypatch.setattr(engine, "train_step", train_step)
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    images = np.random.default_rng(0).integers(0, 256, (160, 3, 8, 8), dtype=np.uint8)
    store.write("noise", {"train": [store.Batch(images, np.arange(160) % 4)]}, ["a", "b", "c", "d"])
    chosen = settings(data="noise", batch=8, limit=0, epochs=STEPS // 20)
    run = ml.pretrain(chosen, runs=tmp_path / "runs", checkpoint_seconds=2, quiet=True)
    assert run.result["steps"] == STEPS
    fifth = len(memory) // 5
    early, late = (statistics.median(memory[i * fifth : (i + 1) * fifth]) for i in (1, 4))
    print(f"resident: {early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB ({late / early - 1:+.2%})")
    print(f"open files: {min(files)} to {max(files)}")
    assert late < 1.05 * early
    assert max(files[4 * fifth :]) <= max(files[fifth : 2 * fifth])
