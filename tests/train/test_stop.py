"""Every early end of a run gives one line that says what to do, and leaves a run that can be resumed."""

import errno
import json
import math
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import marginlens as ml
from marginlens import files as atomic
from marginlens import output
from marginlens.cli import main
from marginlens.data import draw
from marginlens.data.folder import prepare_folder
from marginlens.errors import Stopped, signals
from marginlens.methods import METHODS, MoCoV3
from marginlens.runs import checkpoint, records, work
from marginlens.runs.store import scan
from marginlens.train import engine
from marginlens.train import pretrain as training
from marginlens.train.trainer import causes
from tests.data.conftest import jpeg
from tests.train.conftest import (
    STEPS,
    checkpoints,
    launch,
    resume,
    same_end,
    settings,
    small_files,
    snapshot,
    wait_for,
    words,
)

LONG = {"limit": 8, "epochs": 40}
"""Forty epochs of one step: a few seconds in which to be interrupted."""


def only(folder):
    (path,) = Path(folder).iterdir()
    return ml.open_run(path)


def finite(run):
    """The newest checkpoint, which must hold numbers only."""
    found, damaged = checkpoint.newest(run.path / "checkpoints", run.id)
    assert damaged == []
    assert all(t.isfinite().all() for t in found.tensors.values() if t.is_floating_point())
    return found


def stopped(runs, **more):
    with pytest.raises(Stopped) as caught:
        ml.pretrain(settings(**more), runs=runs, checkpoint_seconds=0, quiet=True)
    assert caught.value.code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def one_line(err):
    """The one line that the command ends with."""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("marginlens: ")]
    assert err.endswith(f"{line}\n")
    return line


def at_work(tmp_path, **more):
    """A process of the command that has saved a step."""
    process = launch("-m", "marginlens", *words(runs=tmp_path, **LONG, **more))
    wait_for(lambda: list(tmp_path.glob("*/checkpoints/*.safetensors")), process)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_and_stops(tmp_path, number):
    process = at_work(tmp_path, json=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert out == ""
    line = one_line(err)
    run = only(tmp_path)
    newest = checkpoints(run)[-1]
    assert f"stopped by {number.name}; the last good checkpoint is {newest}" in line
    assert line.endswith("Go on with --resume")
    assert not run.complete
    finite(run)
    assert resume(run).result["steps"] == 40
    assert [entry["step"] for entry in run.metrics] == list(range(1, 41))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_saves_the_step_it_came_in(tmp_path, monkeypatch, whole, number):
    """With no checkpoint due: the state after that step is what is saved."""

    def train_step(trainer, views):
        honest(trainer, views)
        if trainer.step == 5:
            os.kill(os.getpid(), number)

    honest = engine.train_step
    held = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(engine, "train_step", train_step)
    with pytest.raises(Stopped) as caught:
        ml.pretrain(settings(), runs=tmp_path, quiet=True)
    assert caught.value.code == 128 + number
    assert held == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    run = only(tmp_path)
    assert finite(run).facts["step"] == 5
    same_end(resume(run), whole)


def test_a_signal_at_the_last_step_lets_it_end(tmp_path, monkeypatch, whole):
    def train_step(trainer, views):
        honest(trainer, views)
        if trainer.step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    honest = engine.train_step
    monkeypatch.setattr(engine, "train_step", train_step)
    same_end(ml.pretrain(settings(), runs=tmp_path, quiet=True), whole)


def test_a_second_signal_insists():
    with signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (asked.signal, asked.code) == ("SIGTERM", 143)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def spoil(monkeypatch, step, value):
    """The loss takes a value at a step."""

    def loss(self, views):
        calls.append(1)
        return honest(self, views) * (value if len(calls) == step + 1 else 1.0)

    calls, honest = [], MoCoV3.loss
    monkeypatch.setattr(MoCoV3, "loss", loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(tmp_path, monkeypatch, whole, value):
    with monkeypatch.context() as patch:
        spoil(patch, 4, value)
        line = stopped(tmp_path)
    run = only(tmp_path)
    assert f"the loss became {value} at step 4" in line
    assert f"the last good checkpoint is {checkpoints(run)[-1]}" in line
    assert "lr 0.06 is too high for plain at tau 0.25" in line
    assert "--clip" in line
    assert finite(run).facts["step"] == 4
    assert [entry["step"] for entry in run.metrics] == [3]
    same_end(resume(run), whole)


def test_a_loss_that_is_not_finite_at_once(tmp_path, monkeypatch):
    spoil(monkeypatch, 0, float("nan"))
    assert "the loss became nan at step 0; there is no checkpoint yet" in stopped(tmp_path)
    assert not (only(tmp_path).path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("effect", "beta", "unbounded"),
    [
        ("attenuation(alpha=1)", 0.5, True),
        ("ratio(m1=0.4)", 0.5, True),
        ("ratio(m1=0.4)", 1.0, False),
        ("emphasis(s=2)", 0.5, False),
    ],
)
def test_weights_without_a_bound_are_named_where_there_are_some(effect, beta, unbounded):
    trainer = SimpleNamespace(settings=settings(effect=effect, beta=beta), precision=torch.float32, kept="")
    assert ("the effect's weights are unbounded" in causes(trainer)) == unbounded


def test_a_learning_rate_that_is_far_too_high(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words(runs=tmp_path, lr=1e30))
    assert caught.value.code == 1
    assert "lr 1e+30 is too high" in one_line(capsys.readouterr().err)
    run = only(tmp_path)
    assert not run.complete
    for path in checkpoints(run) if (run.path / "checkpoints").exists() else []:
        found = checkpoint.read(path, run.id)
        assert all(t.isfinite().all() for t in found.tensors.values() if t.is_floating_point())


@pytest.mark.parametrize("where", ["student", "teacher", "optimizer", "buffer"])
def test_what_is_not_finite_is_never_saved(tmp_path, monkeypatch, whole, where):
    """Also where the loss of the step was still a number."""

    def train_step(trainer, views):
        honest(trainer, views)
        if trainer.step == 5:
            kinds = {
                "student": trainer.method.student["projector"][0].weight,
                "teacher": trainer.method.teacher["backbone"].conv1.weight,
                "optimizer": trainer.optimizer.state[trainer.method.predictor[0].weight]["momentum_buffer"],
                "buffer": trainer.method.student["backbone"].bn1.running_var,
            }
            with torch.no_grad():
                kinds[where][(0,) * kinds[where].dim()] = float("nan")

    honest = engine.train_step
    with monkeypatch.context() as patch:
        patch.setattr(engine, "train_step", train_step)
        line = stopped(tmp_path)
    assert "is no longer finite at step 5" in line
    run = only(tmp_path)
    assert f"the last good checkpoint is {checkpoints(run)[-1]}" in line
    assert finite(run).facts["step"] == 4
    same_end(resume(run), whole)


@pytest.mark.parametrize("part", ["backbone", "projector"])
@pytest.mark.parametrize("method", METHODS)
def test_a_collapse_is_warned_about(tmp_path, monkeypatch, capsys, method, part):
    def collapsed(chosen):
        made = honest(chosen)
        with torch.no_grad():
            for parameter in made.student[part].parameters():
                parameter.zero_()
        return made

    honest = training.make_method
    monkeypatch.setattr(training, "make_method", collapsed)
    run = ml.pretrain(settings(method=method, lr=0.0, epochs=2), runs=tmp_path)
    said = capsys.readouterr().err
    name = "features" if part == "backbone" else "embeddings"
    assert said.count(f"warning: the {name} have hardly any spread at epoch 1") == 1
    assert "at epoch 2" not in said
    assert run.metrics[0]["embedding_spread"] < training.COLLAPSED
    assert (run.metrics[0]["spread"] < training.COLLAPSED) == (part == "backbone")


def test_a_sound_run_is_not_warned_about(tmp_path, capsys):
    ml.pretrain(settings(epochs=1, lr=0.01), runs=tmp_path)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
def test_a_margin_that_repels_most_positives_is_noted_once(tmp_path, capsys, method):
    """In the words of the loss: by what it saw of the first batch."""
    run = ml.pretrain(settings(method=method, effect="margin(m1=3.1)", epochs=2), runs=tmp_path)
    said = capsys.readouterr().err
    assert said.count("margin(m1=3.1) repels ") == 1
    assert "of the positives after epoch 1: where theta + m1 is above pi" in said
    assert run.metrics[0]["repelled"] > 0.9
    assert "repelled" not in run.metrics[1]
    near = ml.pretrain(settings(method=method, effect="margin(m1=0.2)", epochs=1), runs=tmp_path)
    assert "margin(m1=0.2) repels" not in capsys.readouterr().err
    assert near.metrics[0]["repelled"] < 0.5


def test_the_look_at_repelled_positives_changes_nothing(tmp_path, monkeypatch):
    asked = settings(effect="margin(m1=3.1)", last_bn=True)
    looked = ml.pretrain(asked, runs=tmp_path / "looked", quiet=True)
    monkeypatch.setattr(training, "repelled", lambda trainer: looked.metrics[0]["repelled"])
    same_end(ml.pretrain(asked, runs=tmp_path / "not", quiet=True), looked)


@pytest.mark.parametrize("method", METHODS)
def test_the_share_of_repelled_positives_is_theirs(tmp_path, monkeypatch, method):
    """Against the angles of the same batch, computed from the embeddings."""
    seen = {}

    def look(trainer):
        seen["share"] = honest(trainer)
        order = draw.order(trainer.samples, 0, 0)[:8]
        (views,) = trainer.feed.views("train", order, trainer.views, 0, 0, 8)
        queries, keys = trainer.method.queries(views), trainer.method.keys(views)
        a, b = (queries[0], keys[0]) if keys else queries
        angles = torch.nn.functional.cosine_similarity(a.double(), b.double()).acos()
        seen["angles"] = float((angles + 1.5 > math.pi).double().mean())
        return seen["share"]

    honest = training.repelled
    monkeypatch.setattr(training, "repelled", look)
    ml.pretrain(settings(method=method, effect="margin(m1=1.5)", epochs=1), runs=tmp_path, quiet=True)
    assert seen["share"] == seen["angles"]


SHORTAGES = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "CPU": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_out_of_memory_names_what_to_lower(tmp_path, monkeypatch, kind):
    def loss(self, views):
        raise SHORTAGES[kind]

    with monkeypatch.context() as patch:
        patch.setattr(MoCoV3, "loss", loss)
        line = stopped(tmp_path)
    assert line.startswith(f"out of {'GPU' if kind == 'GPU' else 'main'} memory; lower --batch (8) first")
    assert resume(only(tmp_path)).complete


def test_other_errors_pass(tmp_path, monkeypatch):
    def loss(self, views):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(MoCoV3, "loss", loss)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ml.pretrain(settings(), runs=tmp_path, quiet=True)


def refuse(number, wanted):
    """A flush that the disk refuses where `wanted` says so."""

    def flush(file):
        if wanted(Path(file.name).name):
            raise OSError(number, os.strerror(number))

    return flush


WRITES = {
    "a checkpoint": (checkpoint, lambda name: name.startswith("step-00000004")),
    "the first checkpoint": (checkpoint, lambda name: name.startswith("step-00000001")),
    "metrics": (records, lambda name: name == "metrics.jsonl"),
    "speed": (records, lambda name: name == "speed.jsonl"),
    "the result": (atomic, lambda name: name.startswith(".result.json")),
    "the start": (records, lambda name: name == "environment.jsonl"),
}


@pytest.mark.parametrize(
    ("what", "number"),
    [*((what, errno.ENOSPC) for what in WRITES), ("a checkpoint", errno.EIO)],
    ids=[*WRITES, "a broken disk"],
)
def test_a_disk_that_refuses(tmp_path, monkeypatch, capsys, whole, what, number):
    module, wanted = WRITES[what]
    with monkeypatch.context() as patch:
        patch.setattr(module, "flush", refuse(number, wanted))
        with pytest.raises(SystemExit) as caught:
            main(words(runs=tmp_path))
    assert caught.value.code == 1
    line = one_line(capsys.readouterr().err)
    assert ("no space left to write" if number == errno.ENOSPC else "Input/output error") in line
    assert line.endswith("then go on with --resume")
    run = only(tmp_path)
    assert not run.complete
    assert not list(run.path.rglob("*.partial"))
    if found := sorted(run.path.glob("checkpoints/*")):
        assert str(found[-1]) in line
        finite(run)
    same_end(resume(run), whole)


def limited(capsys, size, **more):
    """The line that the command ends with where files cannot grow beyond `size` bytes."""
    with small_files(size), pytest.raises(SystemExit) as caught:
        main(words(**more))
    said = capsys.readouterr()
    assert caught.value.code in (1, 2)
    assert said.out == ""
    return one_line(said.err)


def test_a_file_that_the_system_cuts_short(interrupted, whole, capsys):
    run = interrupted(4)
    before = [path.name for path in checkpoints(run)]
    line = limited(capsys, 100_000, runs=run.path.parent, resume=True)
    assert f"no space left to write {run.path / 'checkpoints'}" in line
    assert before[-1] in line
    assert [path.name for path in checkpoints(run)] == before
    same_end(resume(run), whole)


def test_a_disk_without_room_for_curves(tmp_path, capsys):
    line = limited(capsys, 1_500, runs=tmp_path, checkpoint_seconds=60, epochs=8)
    assert "no space left to write" in line
    assert resume(only(tmp_path)).complete


def test_a_disk_without_room_for_the_lock(interrupted, capsys):
    run = interrupted(4)
    before = snapshot(run.path)
    limited(capsys, 5, runs=run.path.parent, resume=True)
    assert snapshot(run.path) == before


def test_a_disk_without_room_for_the_settings(tmp_path, capsys):
    assert "give --runs another folder" in limited(capsys, 5, runs=tmp_path)
    assert not list(tmp_path.iterdir())  # an empty folder would be a run that nobody can read


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as caught:
        main(words(runs=tmp_path / "file"))
    assert caught.value.code == 2
    assert "give --runs another folder" in one_line(capsys.readouterr().err)


def test_a_run_in_use_is_refused_and_free_when_its_holder_is_killed(tmp_path, capsys):
    process = at_work(tmp_path)
    run = only(tmp_path)
    process.send_signal(signal.SIGSTOP)
    before = snapshot(run.path)
    with pytest.raises(SystemExit) as caught:
        main(words(runs=tmp_path, resume=True, **LONG))
    assert caught.value.code == 2
    line = one_line(capsys.readouterr().err)
    assert re.search(rf"{re.escape(str(run.path))} is in use by process {process.pid} on \S+;", line)
    assert snapshot(run.path) == before
    process.kill()
    process.communicate()
    assert resume(run).complete


def test_a_run_in_use_within_one_process(interrupted):
    run = interrupted(2)
    with work.locked(run), pytest.raises(ValueError, match=f"is in use by process {os.getpid()} "):
        resume(run)
    assert resume(run).complete


def test_progress_off_a_terminal(tmp_path, capsys):
    main(words(runs=tmp_path, knn_every=1))
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("epoch")]
    number = r"\d[\d,]*"
    form = rf"epoch \d/2  loss \d+\.\d{{4}}  {number} images/s  ETA \d+:\d\d  kNN \d+\.\d % \(epoch \d\)"
    assert len(lines) == 2
    assert all(re.fullmatch(form, line) for line in lines)
    assert lines[-1].startswith("epoch 2/2")
    assert "ETA 0:00" in lines[-1]
    assert "\x1b" not in said.err
    assert f"next: marginlens probe {only(tmp_path).path}" in said.out


def test_the_eta_counts_from_where_it_went_on(interrupted, monkeypatch, capsys):
    """Ten seconds a step: after step 4 of 6, twenty are left."""

    def train_step(trainer, views):
        honest(trainer, views)
        clock.append(clock[-1] + 10.0)

    run = interrupted(3, limit=8, epochs=6)
    clock, honest = [0.0], engine.train_step
    monkeypatch.setattr(engine, "train_step", train_step)
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    resume(run, quiet=False)
    assert re.findall(r"epoch (\d)/6 .* ETA (\d+:\d\d)", capsys.readouterr().err) == [
        ("4", "0:20"),
        ("5", "0:10"),
        ("6", "0:00"),
    ]


def test_a_run_that_stops_leaves_no_thread_behind(tmp_path, monkeypatch):
    """As a sweep of runs of which some fail would gather them."""
    before = threading.active_count()
    spoil(monkeypatch, 1, float("nan"))
    stopped(tmp_path)
    assert threading.active_count() == before


def test_json_is_alone_on_standard_output(tmp_path, capsys):
    main(words(runs=tmp_path, json=True))
    found = json.loads(capsys.readouterr().out)
    run = only(tmp_path)
    assert found == {"run": str(run.path)} | run.result.plain()


def test_quiet_says_nothing(tmp_path, capsys):
    ml.pretrain(settings(epochs=1), runs=tmp_path, quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("delay", [0.0, 0.7, 2.1])
def test_a_signal_to_the_workers_too(tmp_path, number, delay):
    """A terminal's Ctrl-C, and a scheduler's SIGTERM, reach every process, those that decode images among them."""
    rng = np.random.default_rng(0)
    for i in range(12):
        jpeg(tmp_path / "many" / f"{i:02d}.jpg", rng, size=(16, 16))
    prepare_folder(tmp_path / "many", f"many{number}{delay}")
    asked = words(data=f"many{number}{delay}", limit=0, batch=4, epochs=200, workers=1, runs=tmp_path / "runs")
    process = launch("-m", "marginlens", *asked, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/*.safetensors")), process)
    time.sleep(delay)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name}" in one_line(err)
    finite(only(tmp_path / "runs"))


def test_a_run_whose_features_are_no_numbers_has_failed(tmp_path, monkeypatch, capsys):
    """Though its loss is one: in train mode, batch norms hide what a rate that is too high has done to the weights."""
    monkeypatch.setattr(training, "_spreads", lambda trainer: {"spread": math.nan, "embedding_spread": 0.5})
    with pytest.raises(SystemExit) as caught:
        main(words(runs=tmp_path))
    assert caught.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("marginlens: the spread is nan after epoch 1; ")
    assert "Likely: lr" in said
    (entry,) = scan(tmp_path)
    assert (entry.state, entry.why) == ("failed", said.removeprefix("marginlens: "))
