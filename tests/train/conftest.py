"""Small data, small runs, and ways to interrupt a run."""

import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import marginlens as ml
from marginlens.data import prepare, store
from marginlens.train import engine

SMALL = {"data": "little", "encoder": "tiny", "hidden": 8, "out": 8, "batch": 8, "size": 8, "limit": 24, "epochs": 2}
"""Two epochs of three steps, half a second."""
STEPS = 6
REPOSITORY = Path(__file__).parents[2]


def settings(**more):
    return ml.Pretrain(**(SMALL | more))


def words(**more):
    """The command line of the same settings; every step is saved."""
    options = SMALL | {"checkpoint_seconds": 0} | more
    flat = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return ["pretrain", *(str(part) for name, value in flat for part in ((name,) if value is True else (name, value)))]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A data folder with `little`: 32 + 16 images of 4 classes, 16 px; it is also where `shapes` is drawn once."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 156, (4, 3, 16, 16))
    splits = {}
    for split, count in (("train", 32), ("test", 16)):
        labels = np.arange(count) % 4
        images = (patterns[labels] + rng.integers(0, 100, (count, 3, 16, 16))).astype(np.uint8)
        splits[split] = [store.Batch(images, labels)]
    store.write("little", splits, ["a", "b", "c", "d"], folder)
    return folder


@pytest.fixture(autouse=True)
def data_root(prepared, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(prepared))
    return prepared


@pytest.fixture(scope="session")
def shapes(prepared):
    """The data set `shapes`, drawn once a session."""
    return prepare.load("shapes", prepared)


@pytest.fixture(scope="session")
def whole(prepared, tmp_path_factory):
    """A run that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARGINLENS_DATA", str(prepared))
        return ml.pretrain(settings(), runs=tmp_path_factory.mktemp("whole"), checkpoint_seconds=0, quiet=True)


class Cut(BaseException):
    """The end of a process that cannot be caught, as near as one process comes to it."""


@contextmanager
def ending_before(step, error):
    """Training in here meets the error in place of that step."""

    def train_step(trainer, views):
        if trainer.step == step:
            raise error
        honest(trainer, views)

    honest = engine.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "train_step", train_step)
        yield


@pytest.fixture
def interrupted(tmp_path):
    """Makes a run that ends abruptly before the given step, every step before it saved; or goes on with one."""

    def make(step, runs=tmp_path / "runs", again=False, **more):
        asked = {"resume": again, "workers": 0, "checkpoint_seconds": 0, "quiet": True}
        with ending_before(step, Cut()), pytest.raises(Cut):
            ml.pretrain(settings(**more), runs=runs, **asked)
        (path,) = Path(runs).iterdir()
        return ml.open_run(path)

    return make


def resume(run, **more):
    asked = {"resume": True, "workers": 0, "quiet": True} | more
    return ml.pretrain(run.settings, runs=run.path.parent, **asked)


def checkpoints(run):
    """The files, oldest first."""
    return sorted((run.path / "checkpoints").iterdir())


def snapshot(folder):
    """Every file's bytes, the lock's excepted."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def same_end(run, other):
    """Asserts that two complete runs ended alike: weights and state, metrics and probe, bit for bit."""
    found, wanted = run.checkpoint().tensors, other.checkpoint().tensors
    assert found.keys() == wanted.keys()
    odd = [n for n in found if found[n].numpy().tobytes() != wanted[n].numpy().tobytes()]
    lines, expected = ((r.path / "metrics.jsonl").read_bytes() for r in (run, other))
    odd += ["metrics.jsonl"] if lines != expected else []
    one, two = (ml.probe(r, ml.Probe(epochs=2, lr=0.01), workers=0, quiet=True) for r in (run, other))
    odd += [f"probe's {key}" for key in ("top1", "top5", "loss") if one[key] != two[key]]
    assert odd == []


def launch(*command, **more):
    """A process of its own in the repository, where `tests` can be imported."""
    asked = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY} | more
    return subprocess.Popen([sys.executable, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}, **asked)


@contextmanager
def small_files(size):
    """No file of this process can grow beyond `size` bytes, as on a full disk: half of a write may be there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wait_for(found, process=None, seconds=60.0):
    """Waits until `found()` is true, and returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.01)
    raise AssertionError(f"it did not happen{': ' + process.communicate()[1] if process is not None else ''}")
