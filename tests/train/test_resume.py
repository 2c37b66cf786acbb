"""The law: a run that was killed at any moment and resumed has the same bits as one that was not.

Killed children are forked after the imports, so that a kill costs no start-up. `drive` and `inject` run in a process of
their own, which forks these children.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import marginlens as ml
from marginlens.cli import main
from marginlens.data import folder
from marginlens.methods import METHODS
from marginlens.runs import checkpoint, records, work
from marginlens.runs.store import drop_weights
from tests.data.conftest import jpeg
from tests.records import json_lines
from tests.train.conftest import STEPS, checkpoints, launch, resume, same_end, settings, snapshot, wait_for, words

KILLS = dict.fromkeys(METHODS, 3) | {"mocov3": 12}


def child(chosen, runs, arm=None):
    """A forked process that starts the run or goes on with it."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        if arm is not None:
            arm()
        ml.pretrain(chosen, runs=runs, resume=True, checkpoint_seconds=0, quiet=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid):
    """Waits for a child; whether it was killed, as opposed to complete."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def warm(chosen, runs):
    """The life of a whole run; what a first run imports is there before children are forked."""
    torch.set_num_threads(1)
    if "torch.utils.tensorboard" not in sys.modules:
        ml.pretrain(chosen, runs=runs / "warm", checkpoint_seconds=0, quiet=True)
    begin = time.monotonic()
    assert not ended(child(chosen, runs / "whole"))
    return time.monotonic() - begin


def drive(runs):
    """Kills runs at moments that are uniform over a run's life until there were enough kills; prints where."""
    rng, seen = random.Random(0), {}
    for method, kills in KILLS.items():
        chosen, place, seen[method], trial = settings(method=method), Path(runs) / method, [], 0
        life = warm(chosen, place)
        while len(seen[method]) < kills:
            while True:
                pid = child(chosen, place / f"trial{trial}")
                time.sleep(rng.uniform(0.0, life))
                os.kill(pid, signal.SIGKILL)  # a child that has ended is there until it is waited for
                if not ended(pid):
                    break
                found = sorted((place / f"trial{trial}").glob("*/checkpoints/*.safetensors"))
                seen[method].append(int(found[-1].name.split("-")[1]) if found else 0)
            trial += 1
    print(json.dumps(seen))


def outside(function, runs):
    """What a function of this file prints, which makes runs in a process of its own."""
    process = launch("-c", f"from tests.train.test_resume import {function}; {function}({str(runs)!r})")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def only(folder):
    (path,) = Path(folder).iterdir()
    return ml.open_run(path)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    seen = outside("drive", tmp_path)
    print("the step last saved, at each kill:", seen)
    for method, kills in KILLS.items():
        assert len(seen[method]) >= kills
        trials = sorted((tmp_path / method).glob("trial*"))
        assert trials
        for trial in trials:
            same_end(only(trial), only(tmp_path / method / "whole"))


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, wanted):
    """Dies in place of the call that `wanted` picks out."""

    def arm():
        honest = getattr(owner, name)
        setattr(owner, name, lambda *given, **more: die() if wanted(*given) else honest(*given, **more))

    return arm


def after(owner, name, wanted):
    """Dies when the call that `wanted` picks out has done its work."""

    def arm():
        honest = getattr(owner, name)

        def call(*given, **more):
            result = honest(*given, **more)
            return die() if wanted(*given) else result

        setattr(owner, name, call)

    return arm


def half_a_line():
    """Dies with half of the first epoch's metrics on the disk."""

    def append(path, line, *more):
        if line.get("epoch") == 1:
            with path.open("ab") as file:
                file.write(json.dumps(line).encode()[:40])
            die()
        return honest(path, line, *more)

    honest, records.append = records.append, append


def file_of(step, suffix):
    return lambda path, *_: path.name.startswith(f"step-{step:08d}-") and path.suffix == suffix


def metrics_of(epoch):
    return lambda path, line, *_: path.name == "metrics.jsonl" and line["epoch"] == epoch


def is_named(name):
    return lambda path, *_: path.name == name


POINTS = {
    "before the settings are there": before(Path, "rename", lambda path, to: to.name == "config.json"),
    "before the start is noted": before(records, "append", is_named("environment.jsonl")),
    "in writing a checkpoint": before(checkpoint, "flush", lambda file: "step-00000004" in file.name),
    "in writing the first checkpoint": before(checkpoint, "flush", lambda file: "step-00000001" in file.name),
    "before a checkpoint is named": before(Path, "rename", file_of(4, ".partial")),
    "after a checkpoint is named": after(Path, "rename", file_of(4, ".partial")),
    "before the oldest is removed": before(Path, "unlink", file_of(2, ".safetensors")),
    "after the oldest is removed": after(Path, "unlink", file_of(2, ".safetensors")),
    "with half a line of metrics": half_a_line,
    "between metrics and speed": after(records, "append", metrics_of(1)),
    "between metrics and checkpoint": before(checkpoint, "write", lambda folder, step, *_: step == 3),
    "after an epoch's checkpoint": after(checkpoint, "write", lambda folder, step, *_: step == 3),
    "before the last checkpoint": before(checkpoint, "write", lambda folder, step, *_: step == STEPS),
    "before the result": before(records, "save_json", is_named("result.json")),
    "before the result is named": before(Path, "rename", lambda path, to: to.name == "result.json"),
    "after the result": after(records, "save_json", is_named("result.json")),
}


def inject(runs):
    """Kills a run at each of the points, and goes on with it; prints whether it was killed."""
    chosen, runs, dead = settings(), Path(runs), {}
    warm(chosen, runs)
    for point, arm in POINTS.items():
        dead[point] = ended(child(chosen, runs / point, arm))
        assert not ended(child(chosen, runs / point))
    print(json.dumps(dead))


def test_killed_at_bad_moments(tmp_path):
    assert outside("inject", tmp_path) == dict.fromkeys(POINTS, True)
    for point in POINTS:
        print(point)
        run = only(tmp_path / point)
        same_end(run, only(tmp_path / "whole"))
        assert not list(run.path.rglob("*.partial"))
        assert len(checkpoints(run)) == 2
        assert run.result["checkpoint"] == checkpoints(run)[-1].name


@pytest.mark.parametrize("step", [1, 3, 4, STEPS - 1])
def test_resumed_at_any_step_of_an_epoch(interrupted, whole, step):
    run = interrupted(step)
    assert not run.complete
    same_end(resume(run), whole)
    assert [line["step"] for line in json_lines(run.path / "environment.jsonl")] == [0, step]


def test_resumed_again_and_again(interrupted, whole):
    for step in range(2, STEPS):
        run = interrupted(step, again=True)
    same_end(resume(run), whole)


MORE = {
    "byol": {"method": "byol", "symmetric": True, "ema_schedule": "cosine", "effect": "emphasis(c=2.5)"},
    "simclr": {"method": "simclr", "bn_splits": 2, "effect": "margin(m1=0.1)", "decay_all": False},
    "mocov3": {"two_tau": True, "last_bn": False, "bias": False, "warmup": 1, "clip": 1.0, "weak_crop": "padded"},
}


@pytest.mark.parametrize("method", MORE)
def test_every_setting_that_has_a_state_or_a_schedule(interrupted, tmp_path, method):
    more = {"size": 16, "warmup": 0} | MORE[method]
    other = ml.pretrain(settings(**more), runs=tmp_path / "whole", quiet=True)
    same_end(resume(interrupted(4, **more)), other)


def test_a_folder_of_images(interrupted, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(folder, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers))
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for kind in ("cat", "dog"):
            for i in range(count):
                jpeg(tmp_path / "pets" / split / kind / f"{i}.jpg", rng, size=(20 + i, 24))
    folder.prepare_folder(tmp_path / "pets", "pets")
    more = {"data": "pets", "batch": 4, "limit": 0}
    other = ml.pretrain(settings(**more), runs=tmp_path / "whole", workers=0, quiet=True)
    same_end(resume(interrupted(4, **more)), other)


def test_resumed_with_another_state_of_the_global_generator(interrupted, whole):
    run = interrupted(4)
    torch.manual_seed(7)
    same_end(resume(run), whole)


def test_the_global_generator_is_not_part_of_the_result(tmp_path, whole):
    """Torch seeds it anew in each process, so two runs of the same settings begin with two states of it."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    same_end(ml.pretrain(settings(), runs=tmp_path, quiet=True), whole)
    assert torch.equal(torch.get_rng_state(), before)


def test_looks_and_checkpoints_do_not_change_the_weights(whole, tmp_path):
    other = ml.pretrain(settings(), runs=tmp_path, knn_every=1, checkpoint_seconds=1e9, quiet=True)
    found, wanted = other.checkpoint().tensors, whole.checkpoint().tensors
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_damaged_newest_is_said_and_the_one_before_is_used(interrupted, whole, capsys):
    run = interrupted(5)
    newest = checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    resume(run, quiet=False)
    said = capsys.readouterr().err
    assert f"{newest} is damaged" in said
    assert "using the one before" in said
    assert f"at step 4 of {STEPS}" in said
    same_end(run, whole)


def test_all_damaged_is_refused_and_nothing_changes(interrupted, capsys):
    run = interrupted(5)
    for path in checkpoints(run):
        path.write_bytes(b"")
    before = snapshot(run.path)
    with pytest.raises(SystemExit) as caught:
        main(words(runs=run.path.parent, resume=True))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"remove {run.path} to start over" in said
    assert "Traceback" not in said
    assert snapshot(run.path) == before


def test_a_damaged_last_checkpoint_is_not_the_result(interrupted, whole):
    """A damaged file of the last step, whatever its name, is not what the result points to."""
    run = interrupted(STEPS - 1)
    spoilt = run.path / "checkpoints" / f"step-{STEPS:08d}-{'f' * 32}.safetensors"
    spoilt.write_bytes(b"")
    same_end(resume(run), whole)
    checkpoint.read(run.path / "checkpoints" / run.result["checkpoint"], run.id)


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_the_end_of_a_complete_run_is_made_again(interrupted, whole, gone):
    run = resume(interrupted(4))
    newest = checkpoints(run)[-1]
    newest.unlink() if gone else newest.write_bytes(b"")
    again = ml.pretrain(run.settings, runs=run.path.parent, quiet=True)
    with pytest.raises(ValueError, match=r"; to redo the end, run: .* --resume"):
        again.checkpoint()
    same_end(resume(run), whole)


def test_time_is_counted_across_a_resume(interrupted):
    run = interrupted(4)
    found = checkpoint.read(checkpoints(run)[-1])
    assert found.facts["seconds"] > 0
    assert found.facts["counted"] == 8  # one step of the second epoch
    path = resume(run).path / "speed.jsonl"
    second = json_lines(path)[1]
    assert second["seconds"] > found.facts["seconds"]
    assert second["seconds"] * second["images_per_second"] == pytest.approx(24)


def test_two_whole_checkpoints_while_catching_up_with_a_damaged_one(interrupted):
    run = interrupted(2)
    early = {path: path.read_bytes() for path in checkpoints(run)[-1:]}
    interrupted(5, again=True)
    *older, newest = checkpoints(run)
    newest.write_bytes(b"")
    for path in older:
        path.unlink()
    for path, content in early.items():
        path.write_bytes(content)
    interrupted(4, again=True)
    assert [int(p.name.split("-")[1]) for p in checkpoints(run) if p.stat().st_size] == [3, 4]


def test_refused_without_resume_and_nothing_changes(interrupted, capsys):
    run = interrupted(5)
    before = snapshot(run.path)
    with pytest.raises(SystemExit) as caught:
        main(words(runs=run.path.parent))
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{run.path} was interrupted at step 5 of {STEPS}; add --resume" in said.err
    assert "Traceback" not in said.err
    assert snapshot(run.path) == before


def test_a_complete_run_is_not_run_again(whole, capsys):
    before = snapshot(whole.path)
    for more in ({}, {"resume": True}):
        main(words(runs=whole.path.parent, json=True, **more))
        said = capsys.readouterr()
        assert json.loads(said.out)["steps"] == STEPS
        assert "is already complete" in said.err
    assert snapshot(whole.path) == before


def test_resume_starts_a_run_that_was_not_there(tmp_path, whole):
    same_end(ml.pretrain(settings(), runs=tmp_path, resume=True, quiet=True), whole)


def test_without_weights_it_begins_again_and_says_so(interrupted, whole, capsys):
    run = interrupted(5)
    for path in checkpoints(run):
        path.unlink()
    again = ml.pretrain(settings(), runs=run.path.parent, resume=True)
    assert "records of 1 of 2 epochs, but no checkpoint: starting over" in capsys.readouterr().err
    same_end(again, whole)


def test_lines_after_the_checkpoint_are_forgotten(interrupted, whole):
    run = interrupted(5)
    for name in ("metrics", "speed"):
        with (run.path / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"epoch": 2, "step": 6, "loss": 1.0}\n{"epoch": 3, "st')
    same_end(resume(run), whole)
    assert [line["epoch"] for line in json_lines(run.path / "speed.jsonl")] == [1, 2]


def test_a_half_written_line_is_not_there(interrupted):
    run = interrupted(5)
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 2, "st')
    assert [line["epoch"] for line in run.metrics] == [1]


def test_a_half_written_start_does_not_spoil_the_next(interrupted):
    """As a full disk leaves it."""
    run = interrupted(5)
    path = run.path / "environment.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    resume(run)
    assert json_lines(path)[-1]["step"] == 5


def test_metrics_that_lost_lines_are_refused(interrupted):
    """A checkpoint counts on the lines before it."""
    run = interrupted(5)
    (run.path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        resume(run)


def test_weights_to_start_from_may_move(interrupted, tmp_path, whole):
    first = tmp_path / "first.safetensors"
    ml.export(whole, first)
    run = interrupted(4, weights=str(first))
    moved = first.rename(tmp_path / "moved.safetensors")
    again = ml.pretrain(settings(weights=str(moved)), runs=run.path.parent, resume=True, quiet=True)
    assert (again.path, again.complete) == (run.path, True)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_processes_of_the_command(tmp_path, method):
    """Real processes: five kills each, uniform over the life of a run after its start."""
    rng, more = random.Random(1), {"method": method, "epochs": 16}
    command = ["-m", "marginlens", *words(runs=tmp_path / "whole", **more)]
    process = launch(*command)
    wait_for(lambda: list(tmp_path.glob("whole/*/environment.jsonl")), process)
    begin = time.monotonic()
    assert process.wait() == 0
    process.communicate()
    life, kills, trial = time.monotonic() - begin, 0, 0
    while kills < 5:
        trial += 1
        starts, code = 0, 1
        while code != 0:
            starts += 1
            process = launch("-m", "marginlens", *words(runs=tmp_path / f"{trial}", resume=True, **more))
            noted = lambda: [p for p in tmp_path.glob(f"{trial}/*/environment.jsonl") if len(json_lines(p)) >= starts]
            wait_for(lambda: noted() or process.poll() is not None)
            time.sleep(rng.uniform(0.0, life))
            process.kill()
            err = process.communicate()[1]
            code = process.returncode
            assert code in (0, -signal.SIGKILL), err
            kills += code != 0
        same_end(only(tmp_path / f"{trial}"), only(tmp_path / "whole"))


def test_an_end_that_is_made_again_keeps_only_the_evaluations_of_its_own_weights(tmp_path, capsys):
    """On a CPU these are the same bits, so the probe is still the run's; one of other weights is not."""
    run = ml.pretrain(settings(), runs=tmp_path, checkpoint_seconds=0, quiet=True)
    ml.probe(run, ml.Probe(epochs=1), quiet=True)
    ml.knn(run, quiet=True)
    own, other = sorted((run.path / "evaluations").iterdir(), reverse=True)
    records.save_json(other, records.read_json(other) | {"backbone_sha256": "0" * 64})
    for name, content in (("later", '{"kind": "retrieval"}'), ("spoilt", "{")):  # not for training to judge
        (own.parent / f"{name}.json").write_text(content)
    checkpoint.names(run.path / "checkpoints")[0].write_bytes(b"spoilt")
    ml.pretrain(settings(), runs=tmp_path, resume=True)
    assert (own.exists(), other.exists()) == (True, False)
    assert {path.name for path in own.parent.iterdir()} == {own.name, "later.json", "spoilt.json"}
    assert f"removed {other}, " in capsys.readouterr().err
    assert run.complete


def test_what_ends_while_somebody_waits_for_it_is_not_begun_again(tmp_path, monkeypatch):
    real, began = work.locked, []

    def late(run):
        """Whoever held it ends just now, and removes the weights."""
        monkeypatch.setattr(work, "locked", real)
        ml.pretrain(settings(), runs=tmp_path, quiet=True)
        began.append((run.path / "result.json").read_bytes())
        drop_weights(run)
        return real(run)

    monkeypatch.setattr(work, "locked", late)
    run = ml.pretrain(settings(), runs=tmp_path, resume=True, quiet=True)
    assert [(run.path / "result.json").read_bytes()] == began
    assert len(json_lines(run.path / "environment.jsonl")) == 1
