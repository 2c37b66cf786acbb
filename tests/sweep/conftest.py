"""A small `shapes`, fake runs, and commands in processes of their own."""

import json
import os
import subprocess
import sys

import pytest
import torch

from marginlens.data import shapes, store
from marginlens.data.feed import open_feed
from marginlens.runs import checkpoint, records, work
from marginlens.runs.config import Pretrain, evaluation_name
from marginlens.sweep.job import Job, wanted
from tests.train.conftest import REPOSITORY

DEVICE = "CPU, 1 threads"
TRAIN, TEST = 128, 32


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A data folder with `shapes`, of two steps an epoch."""
    folder = tmp_path_factory.mktemp("sweep-data")
    few = {split: [store.Batch(*shapes.draw(n, split))] for split, n in (("train", TRAIN), ("test", TEST))}
    store.write("shapes", few, shapes.CLASSES, folder)
    return folder


@pytest.fixture(autouse=True)
def data_root(prepared, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(prepared))
    return prepared


def small(**more):
    return Pretrain(**({"data": "shapes", "epochs": 2} | more))


def job(*transfers, probe=True, **more):
    """A job with a probe and transfers."""
    settings = small(**more)
    own = [wanted("probe", settings.data)] if probe else []
    return Job(settings=settings, evaluations=(*own, *(wanted("transfer", name) for name in transfers)))


def made(done, runs, *, epochs=None, complete=True, weights=True, rate=100.0, probe_seconds=2.0, device=DEVICE, **env):
    """The folder of a job as if it had been run: `epochs` of it, its evaluations, at so many images a second."""
    settings, feed = done.settings, open_feed("shapes", torch.device("cpu"))
    run = work.make_run(settings, feed, runs)
    epochs = settings.epochs if epochs is None else epochs
    now = {"time": "2026-01-01T00:00:00Z", "device": device, "engine": "eager"} | env
    if run.complete:
        epochs, weights = 0, False  # only its evaluations are missing
    else:
        records.append(run.path / "environment.jsonl", now)
    for epoch in range(1, epochs + 1):
        records.append(run.path / "metrics.jsonl", {"epoch": epoch, "step": 2 * epoch, "loss": 1.0})
        records.append(run.path / "speed.jsonl", {"epoch": epoch, "seconds": TRAIN / rate, "images_per_second": rate})
    if weights:
        tensors = {"losses": torch.zeros(2)}
        facts = {"run": run.id, "metrics": 0, "speed": 0, "seconds": 0.0, "counted": 0}
        checkpoint.write(run.path / "checkpoints", 2 * epochs, tensors, facts)
    if complete and not run.complete:
        records.save_json(
            run.path / "result.json",
            {"epochs": epochs, "steps": 2 * epochs, "images": TRAIN, "loss": 1.0, "seconds": 1.0},
        )
    if complete:
        (run.path / "evaluations").mkdir(exist_ok=True)
        for one, settings in [(e, settings) for e in done.evaluations for settings in e.several]:
            path = run.path / "evaluations" / evaluation_name(one.kind, one.data, feed.fingerprint, settings)
            facts = {"kind": one.kind, "run": run.id, "data": one.data, "data_fingerprint": feed.fingerprint}
            facts |= {"settings": settings.model_dump(mode="json"), "top1": 50.0, "seconds": probe_seconds}
            records.save_json(path, facts | {"train_images": TRAIN, "test_images": TEST, "environment": now})
    return run


def command(*words, **more):
    """`marginlens WORDS` in a process and a session of its own, on one core."""
    asked = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY} | more
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen([sys.executable, "-m", "marginlens", *map(str, words)], env=environment, **asked)


def starts(runs):
    """How often each run was begun or gone on with, by its folder."""
    records = sorted(runs.glob("*/environment.jsonl"))
    return {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in records}
