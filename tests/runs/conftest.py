"""Run folders with records like those of real runs, without training."""

import json
import shutil
from pathlib import Path

import pytest

import marginlens as ml
from marginlens.cli import main
from marginlens.runs.config import facts, identify, run_name
from tests.train.conftest import data_root, interrupted, prepared, whole  # noqa: F401

DATA = "ab" * 32
SMALL = {"data": "shapes", "epochs": 2}


def settings(**more):
    return ml.Pretrain(**(SMALL | more))


def records(chosen, *, done=2, complete=True, probe=None, failure=None, images=DATA):
    """The files of a run, as bytes by name."""
    known = {"format": 1, "id": identify(chosen, images), "settings": chosen.model_dump(mode="json"), "data": images}
    known |= {"mean": [0.5] * 3, "std": [0.2] * 3, "identity": facts(chosen, images)}
    metrics = [{"epoch": e, "step": 8 * e, "loss": 4.0 / e + chosen.seed, "spread": 0.5} for e in range(1, done + 1)]
    files = {"config.json": known}
    lines = {"metrics.jsonl": metrics}
    lines["environment.jsonl"] = [{"time": "2026-01-02T03:04:05Z", "device": "CPU, 2 threads", "step": 0}]
    lines["speed.jsonl"] = [{"epoch": m["epoch"], "seconds": 0.5, "images_per_second": 1e3} for m in metrics]
    if complete:
        ended = {"epochs": done, "steps": 8 * done, "images": 512, "loss": metrics[-1]["loss"]}
        files["result.json"] = ended | {"seconds": 1.0}
    if failure:
        files["failure.json"] = {"time": "2026-01-02T03:05:05Z", "line": failure, "code": 1, "step": 5}
    if probe is not None:
        files["evaluations/probe-shapes-0123456789.json"] = evaluation("probe", probe, images, known["id"])
    found = {name: json.dumps(content).encode() for name, content in files.items()}
    return found | {name: b"".join(json.dumps(x).encode() + b"\n" for x in content) for name, content in lines.items()}


def evaluation(kind, top1, data=DATA, run=None, **more):
    """The record of an evaluation; without a run, of the one that has nothing but the defaults."""
    asked = {"epochs": 20, "batch": 16, "lr": 0.5, "momentum": 0.9, "crop_scale": [0.5, 1.0], "seed": 0}
    asked = {"k": 200, "temperature": 0.1} if kind == "knn" else asked
    found = {"kind": kind, "run": run or identify(settings(), data), "data": "shapes", "data_fingerprint": data}
    found |= {"settings": asked | more, "top1": top1, "seconds": 2.0, "train_images": 512, "test_images": 64}
    return found | {"environment": {"time": "2026-01-02T03:06:07Z", "device": "CPU, 2 threads"}}


def write(folder, content):
    for name, held in content.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)
    return Path(folder)


def put(store, seed=0, effect="plain", **more):
    """A run in a store."""
    asked = {k: more.pop(k) for k in list(more) if k in ml.Pretrain.model_fields}
    chosen = settings(seed=seed, effect=effect, **asked)
    return write(store / run_name(chosen, more.get("images", DATA)), records(chosen, **more))


def content(folder):
    """Every file's bytes, and every link's target, hidden ones included."""
    found = sorted(Path(folder).rglob("*"))
    return {str(p.relative_to(folder)): p.readlink() if p.is_symlink() else p.read_bytes() for p in found if is_leaf(p)}


def is_leaf(path):
    return path.is_symlink() or path.is_file()


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def trained(whole, store):  # noqa: F811
    """A copy of a run with weights, in a store."""
    return ml.open_run(shutil.copytree(whole.path, store / whole.path.name))


@pytest.fixture
def ask(capsys):
    """Gives a command, and returns its exit code, its output and what it says besides."""

    def give(*words):
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return give
