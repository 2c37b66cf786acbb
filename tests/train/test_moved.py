"""A run's folder is moved, removed, replaced or emptied during training: one line, and nothing is created again."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest

import marginlens as ml
from marginlens.errors import Stopped
from marginlens.evals import probe
from marginlens.runs import records
from marginlens.runs import work as record
from marginlens.train import engine
from tests.train.conftest import launch, resume, settings, snapshot, wait_for, words

LONG = {"epochs": 8}


def at_step(step, act, monkeypatch):
    """Have training meet an event right before a step."""
    honest = engine.train_step

    def train_step(trainer, views):
        if trainer.step == step:
            act(trainer.run.path)
        honest(trainer, views)

    monkeypatch.setattr(engine, "train_step", train_step)


def train(runs, every=0, **more):
    return ml.pretrain(settings(**LONG), runs=runs, quiet=True, checkpoint_seconds=every, **more)


def moved(path):
    path.rename(path.with_name("elsewhere"))


def replaced(path):
    moved(path)
    path.mkdir()
    (path / "mine.txt").write_text("mine")


EVENTS = {"moved": moved, "removed": shutil.rmtree, "replaced": replaced}


@pytest.mark.parametrize("every", [0, 1e9], ids=["every step saved", "the end saved"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_folder_that_is_gone(tmp_path, monkeypatch, event, every):
    at_step(10, EVENTS[event], monkeypatch)
    with pytest.raises(Stopped, match="was moved, removed or replaced meanwhile; nothing was written") as caught:
        train(tmp_path, every)
    assert caught.value.code == 1
    left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("elsewhere")}
    assert left == ({p.name for p in tmp_path.iterdir()} - {"elsewhere"} if event == "replaced" else set())
    if event == "replaced":
        (path,) = (p for p in tmp_path.iterdir() if p.name != "elsewhere")
        assert os.listdir(path) == ["mine.txt"]
    if event != "removed":
        run = ml.open_run(tmp_path / "elsewhere")
        assert not run.complete
        assert [line["epoch"] for line in run.metrics] == [1, 2, 3]


def test_a_folder_that_is_moved_back_goes_on(tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        at_step(4, moved, patch)
        with pytest.raises(Stopped, match="was moved"):
            ml.pretrain(settings(), runs=tmp_path, quiet=True, checkpoint_seconds=0)
    (tmp_path / "elsewhere").rename(tmp_path / whole.path.name)
    run = resume(ml.open_run(tmp_path / whole.path.name))
    assert (run.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["metrics.jsonl", "speed.jsonl"])
@pytest.mark.parametrize("how", ["removed", "emptied", "replaced", "longer"])
def test_records_that_are_lost_while_it_trains(tmp_path, monkeypatch, name, how):
    def rob(path):
        path /= name
        if how == "removed":
            path.unlink()
        else:
            path.write_bytes({"emptied": b"", "replaced": path.read_bytes()[:20]}.get(how, path.read_bytes() + b"{}\n"))

    at_step(10, rob, monkeypatch)
    with pytest.raises(Stopped, match=rf"{name}|it has \d+ bytes, and had \d+ when this run last wrote to it"):
        train(tmp_path)
    (path,) = tmp_path.iterdir()
    assert not (path / "result.json").exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_complete_run_whose_records_are_lost_is_not_called_complete(tmp_path, resumed, whole, capsys):
    run = ml.open_run(shutil.copytree(whole.path, tmp_path / whole.path.name))
    metrics = run.path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().partition(b"\n")[0] + b"\n")
    before = snapshot(run.path)
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 1 of 2 epochs: its lines were lost .* start over"):
        ml.pretrain(settings(), runs=tmp_path, resume=resumed)
    assert snapshot(run.path) == before
    assert "complete already" not in capsys.readouterr().err


def test_a_lock_that_is_removed_lets_nobody_in(tmp_path):
    """34 of 24 epochs were written so."""
    process = launch("-m", "marginlens", *words(runs=tmp_path, epochs=400))
    try:
        (path,) = wait_for(lambda: [p.parent for p in tmp_path.glob("*/metrics.jsonl")], process)
        run = ml.open_run(path)
        (path / "lock").unlink()
        for _ in range(2):  # the second time, the first one's lock file is there
            with pytest.raises(record.InUse, match="is in use by"):
                ml.pretrain(run.settings, runs=tmp_path, resume=True, quiet=True)
        from marginlens.runs.store import examine

        assert examine(path).state == "running"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    epochs = [line["epoch"] for line in run.metrics]
    assert epochs == list(range(1, len(epochs) + 1))


def test_a_lock_that_is_removed_where_folders_cannot_be_locked(tmp_path, monkeypatch):
    """As on NFS: whoever comes second gets in, and the first writes nothing more."""
    honest = record._lock
    monkeypatch.setattr(record, "_lock", lambda file: None if os.path.isdir(f"/proc/self/fd/{file}") else honest(file))
    at_step(10, lambda path: (path / "lock").unlink(), monkeypatch)
    with pytest.raises(Stopped, match=r"lock was removed meanwhile, and another process may work there; .* --resume"):
        train(tmp_path)
    (path,) = tmp_path.iterdir()
    assert len(ml.open_run(path).metrics) == 3


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "stranger"])
def test_a_lock_that_is_none(tmp_path, kind, whole):
    """Nothing is written through a link, and nothing waits for a pipe."""
    run = ml.open_run(shutil.copytree(whole.path, tmp_path / whole.path.name))
    lock, theirs = run.path / "lock", tmp_path / "thesis.txt"
    theirs.write_text("mine")
    lock.unlink()
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "link":
        lock.symlink_to(theirs)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.write_text("mine")
    with pytest.raises((ValueError, Stopped), match="lock"), record.locked(run):
        pass
    assert theirs.read_text() == "mine"
    assert kind != "stranger" or lock.read_text() == "mine"


def test_a_folder_that_is_gone_when_a_probe_ends(tmp_path, monkeypatch, whole):
    run = ml.open_run(shutil.copytree(whole.path, tmp_path / whole.path.name))
    shutil.rmtree(run.path / "evaluations", ignore_errors=True)

    def measure(task, several):
        moved(run.path)
        return probe.measure(task, several)

    monkeypatch.setattr(probe, "EVALUATION", replace(probe.EVALUATION, measure=measure))
    with pytest.raises(Stopped, match="was moved, removed or replaced meanwhile"):
        ml.probe(run, ml.Probe(epochs=1), quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]
    assert not list((tmp_path / "elsewhere" / "evaluations").iterdir())


def test_an_evaluation_of_a_stranger_is_not_removed(tmp_path, whole):
    """One that says that it is of other weights, and of another run."""
    run = ml.open_run(shutil.copytree(whole.path, tmp_path / whole.path.name))
    (run.path / "evaluations").mkdir(exist_ok=True)
    theirs = run.path / "evaluations" / "notes.json"
    theirs.write_text(json.dumps({"run": "mine", "backbone_sha256": "0"}))
    newest = sorted((run.path / "checkpoints").iterdir())[-1]
    newest.write_bytes(b"spoilt")
    resume(run)
    assert theirs.exists()


def test_files_of_lines_are_not_made_again(tmp_path):
    path = tmp_path / "x.jsonl"
    length = records.append(path, {"a": 1}, 0)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        records.append(path, {"a": 2}, length)
    assert not path.exists()


@pytest.mark.slow
def test_a_moved_folder_is_one_line_of_the_command(tmp_path):
    process = launch("-m", "marginlens", *words(runs=tmp_path, epochs=400))
    (path,) = wait_for(lambda: [p.parent for p in tmp_path.glob("*/metrics.jsonl")], process)
    path.rename(tmp_path / "elsewhere")
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith(f"marginlens: {path} was moved, removed or replaced")
    assert "Traceback" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["elsewhere"]
