"""A run's folder that version 0.1.0 wrote can be read, evaluated and recognised."""

import importlib.util
import json
import lzma
import shutil
from pathlib import Path

import pytest

import marginlens as ml
from marginlens.runs import store
from marginlens.runs.config import evaluation_name, identify, run_name
from marginlens.runs.model import fingerprint, load_backbone_of

HERE = Path(__file__).parents[1] / "fixtures" / "run-0.1"
NAME = "mocov3-shapes-tiny-emphasis-s2-seed0-87d3e35cfc"


@pytest.fixture
def old(tmp_path):
    """A copy of the folder, its checkpoint unpacked."""
    folder = shutil.copytree(HERE / NAME, tmp_path / "runs" / NAME)
    for packed in (folder / "checkpoints").glob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        packed.unlink()
    return ml.open_run(folder)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The images it learned from, drawn again."""
    spec = importlib.util.spec_from_file_location("make", HERE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    return module.draw(tmp_path / "data")


def test_it_is_in_a_store(old):
    (entry,) = store.scan(old.path.parent)
    assert (entry.name, entry.state, entry.why, entry.weights) == (NAME, "complete", "", True)
    assert (entry.epochs_done, entry.device, entry.started) == (2, "CPU, 2 threads", "2026-11-15T18:27:06Z")
    assert store.lookup([entry], old.settings) is entry


def test_its_numbers(old):
    assert [m["loss"] for m in old.metrics] == [3.016716420650482, 2.7443153858184814]
    assert old.metrics[1]["embedding_spread"] == 0.9508476698600082
    assert (old.result["epochs"], old.result["steps"], old.result["knn"]) == (2, 32, 8.0)
    assert {e["kind"]: (e["top1"], e["data"]) for e in old.evaluations} == {
        "knn": (21.0, "shapes"),
        "probe": (17.0, "shapes"),
        "transfer": (9.0, "shapes"),
    }
    given = {"data": "shapes", "hidden": 16, "out": 8, "limit": 256, "batch": 16, "lr": 0.05, "epochs": 2}
    assert old.settings == ml.Pretrain(**given, effect="emphasis(s=2)", encoder="tiny")


def test_its_id_is_still_the_hash_of_its_settings(old):
    assert identify(old.settings, old.data) == old.id == "87d3e35cfc"
    assert run_name(old.settings, old.data) == NAME


def test_its_evaluations_are_found_again(old):
    """By their settings, and under the names that they would be given now."""
    wanted = {"epochs": 2, "batch": 16, "lr": 0.1, "crop_scale": (0.5, 1.0)}
    assert store.evaluation(old, "probe", "shapes", ml.Probe(**wanted))["top1"] == 17.0
    assert store.evaluation(old, "transfer", "shapes", ml.Probe(**(wanted | {"epochs": 1})))["top1"] == 9.0
    assert store.evaluation(old, "knn", "shapes", ml.Knn(k=20))["top1"] == 21.0
    assert store.evaluation(old, "probe", "shapes", ml.Probe(**(wanted | {"lr": 0.2}))) is None
    for path in (old.path / "evaluations").iterdir():
        one = json.loads(path.read_text())
        model = ml.Knn if one["kind"] == "knn" else ml.Probe
        chosen = model(**(model.neutral | one["settings"]))
        assert path.name == evaluation_name(one["kind"], one["data"], one["data_fingerprint"], chosen)


def test_its_weights_are_what_was_evaluated(old):
    backbone = fingerprint(load_backbone_of(old))
    assert {e["backbone_sha256"] for e in old.evaluations} == {backbone}


def test_it_is_evaluated_again(old, drawn):
    assert drawn.fingerprint == old.data  # the same images on every machine
    found = ml.knn(old, ml.Knn(k=20), device="cpu", again=True, quiet=True)
    assert found["top1"] == pytest.approx(21.0, abs=2.0)  # of 100 images: sums in another order may turn two
