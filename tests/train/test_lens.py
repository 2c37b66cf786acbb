"""A lens on a run: it changes nothing, survives a resume, and its lines are checked when they are read."""

import json

import pytest
import torch

import marginlens as ml
from marginlens.train.lens import Recorder, scalars
from tests.train.conftest import settings, words


@pytest.mark.parametrize("method", ["mocov3", "simclr", "byol"])
def test_a_run_with_a_lens_is_the_same_run(tmp_path, method):
    plain, seen = (
        ml.pretrain(settings(method=method), runs=tmp_path / name, device="cpu", quiet=True, lens=every)
        for name, every in (("plain", 0), ("seen", 2))
    )
    assert plain.id == seen.id
    assert (plain.path / "metrics.jsonl").read_bytes() == (seen.path / "metrics.jsonl").read_bytes()
    ours, theirs = (run.checkpoint().tensors for run in (plain, seen))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert plain.looks == []
    assert [look.epoch for look in seen.looks] == [1, 2]
    one = seen.looks[0]
    assert one.samples == 1
    assert one.rows == 8 * (2 if method == "simclr" else 1)
    assert one.features["dimension"] == 128
    assert ("probability" in one) == (method != "byol")


def test_its_rows_are_those_of_the_method(tmp_path):
    """The lens records the numbers that `method.rows` gives for the same weights and views."""
    from marginlens.runs.model import make_method

    method = make_method(settings(effect="margin(m1=0.4)"))
    views = [torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    recorder = Recorder(method, every=1)
    recorder.look(1, views, torch.float32)
    found, rows = recorder.read(), method.rows(views)
    assert found["angle"] == pytest.approx(float(rows.theta.double().mean()), rel=1e-5)
    assert found["effect"] == "margin(m1=0.4)"
    assert recorder.read() == {}
    assert {"lens/alignment", "lens/features/rank", "lens/pull/positive", "lens/times/negative"} <= set(scalars(found))


def test_a_resumed_run_keeps_its_lines(tmp_path):
    whole = ml.pretrain(settings(epochs=3), runs=tmp_path, device="cpu", quiet=True, lens=2)
    lines = (whole.path / "lens.jsonl").read_bytes()
    names = sorted(whole.path.glob("checkpoints/*.safetensors"))
    names[-1].unlink()  # the end is made again from the checkpoint before it
    again = ml.pretrain(settings(epochs=3), runs=tmp_path, device="cpu", quiet=True, lens=2, resume=True)
    assert (again.path / "lens.jsonl").read_bytes() == lines


@pytest.mark.parametrize("damage", ['{"epoch": 1}', "[]", "{", '{"epoch": 1, "step": 4, "rows": 1, "joint": {}}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    run = ml.pretrain(settings(epochs=1), runs=tmp_path, device="cpu", quiet=True, lens=2)
    with (run.path / "lens.jsonl").open("a") as file:
        file.write(damage + "\n")
    with pytest.raises(ValueError, match=r"lens[.]jsonl") as error:
        run.looks  # noqa: B018
    assert "line 2" in str(error.value)


@pytest.mark.parametrize("lens", [-1, True, 0.5, "x"])
def test_lens_must_be_a_number_of_steps(tmp_path, lens):
    with pytest.raises(ValueError, match="lens is"):
        ml.pretrain(settings(), runs=tmp_path, lens=lens)
    assert not list(tmp_path.iterdir())


def test_the_command_takes_it(tmp_path, capsys):
    from marginlens.cli import main

    main([*words(runs=tmp_path, lens=1, json=True), "--device", "cpu"])
    run = ml.open_run(json.loads(capsys.readouterr().out)["run"])
    assert run.looks[0].samples == 3


def test_a_lens_that_cannot_read_ends_no_run(tmp_path, monkeypatch, capsys):
    def read(self):
        raise ValueError("the features hold NaN")

    monkeypatch.setattr("marginlens.lens.live.Lens.read", read)
    run = ml.pretrain(settings(), runs=tmp_path, device="cpu", lens=2)
    assert run.complete
    assert run.looks == []
    assert "the lens has no record of epoch 1: the features hold NaN" in capsys.readouterr().err


def test_a_run_whose_lens_is_gone_can_be_resumed(tmp_path):
    run = ml.pretrain(settings(epochs=3), runs=tmp_path, device="cpu", quiet=True, lens=2)
    names = sorted(run.path.glob("checkpoints/*.safetensors"))
    names[-1].unlink()
    (run.path / "lens.jsonl").unlink()
    assert ml.pretrain(settings(epochs=3), runs=tmp_path, device="cpu", quiet=True, lens=2, resume=True).complete


@pytest.mark.parametrize("line", ["garbage", '{"step": 1, "joint": {}}', '{"step": 1, "features": "x"}'])
def test_a_store_says_which_lens_is_damaged(tmp_path, line):
    from marginlens.runs.run import examine

    run = ml.pretrain(settings(), runs=tmp_path, device="cpu", quiet=True)
    (run.path / "lens.jsonl").write_text(line + "\n")
    found = examine(run.path)
    assert found.state == "unreadable"
    assert "lens.jsonl" in found.why
