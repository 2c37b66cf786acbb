"""The captured step on a GPU: against the plain loop, replay by replay, through checkpoints, and with a NaN in it."""

import math

import pytest
import torch

import marginlens as ml
from marginlens.data import draw
from marginlens.data.views import make_view
from marginlens.errors import Stopped
from marginlens.runs import checkpoint
from marginlens.train import engine
from marginlens.train.pretrain import save
from marginlens.train.trainer import load, state
from tests.gpu.runs import assert_same_step, held, settings, take, trainer_of
from tests.records import json_lines

pytestmark = pytest.mark.usefixtures("shapes")


@pytest.mark.parametrize("method", ["mocov3", "simclr", "byol"])
def test_one_step_is_the_plain_step(tmp_path, method):
    """In float32, views by the kernel against views by the reference."""
    plain, whole = (trainer_of(tmp_path / name, method=method, amp="off") for name in ("a", "b"))
    plain.feed.fused = False
    before = held(plain)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        take(engine.Eager(), plain, 1)
        take(engine.Graph(whole), whole, 1)
    assert_same_step(plain, whole, before)


@pytest.mark.parametrize(("amp", "start", "whole"), [("off", 5e-3, 0.02), ("bf16", 1e-2, 0.03)])
@pytest.mark.parametrize("method", ["mocov3", "simclr", "byol"])
def test_trace_is_that_of_the_plain_loop(tmp_path, method, amp, start, whole):
    """The first losses one by one, and the mean of an epoch later on, when roundings have grown apart.

    Convolutions in float32 are TF32, as torch has them: three digits.
    """
    traces = []
    for name in ("eager", "graph"):
        trainer = trainer_of(tmp_path / name, method=method, amp=amp)
        chosen = engine.Graph(trainer) if name == "graph" else engine.Eager()
        taken = []
        for _ in range(3):
            take(chosen, trainer, trainer.per_epoch)
            taken.append(trainer.losses.clone())
        traces.append(torch.stack(taken))
    eager, graph = traces
    # of the loss, or of its range where it is near 0: cosines over tau
    size = eager.abs().clamp(min=1.0 / trainer.settings.tau)
    assert ((eager - graph)[0, :3].abs() <= start * size[0, :3]).all(), (eager[0], graph[0])
    assert ((eager.mean(1) - graph.mean(1)).abs() <= whole * size.mean(1)).all(), (eager, graph)


def test_no_replay_repeats_a_view(tmp_path):
    trainer = trainer_of(tmp_path, seed=2**40 + 3)
    whole, images, seen = engine.Graph(trainer), trainer.feed.images("train"), set()
    for _ in range(2):
        for _ in whole.steps(trainer):
            epoch, at = divmod(trainer.step - 1, trainer.per_epoch)
            order = draw.order(trainer.samples, trainer.settings.seed, epoch).cuda()
            chosen = order.view(trainer.per_epoch, -1)[at]
            for number, view in enumerate(trainer.views):
                expected = make_view(images[chosen], chosen, view, trainer.settings.seed, epoch, number)
                error = (whole.seen[number].float() - expected).abs().max()
                assert error < 0.03  # bf16 of values up to 3
                seen.add(whole.seen[number].float().cpu().numpy().tobytes())
    assert len(seen) == 2 * 2 * trainer.per_epoch


def test_capture_leaves_no_trace(tmp_path):
    trainer = trainer_of(tmp_path)
    before = held(trainer)
    whole = engine.Graph(trainer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(trainer).items())
    for name, half in whole.flat.half.items():
        own = dict(trainer.method.named_parameters())[name]
        assert torch.equal(half, own.detach().bfloat16())


def test_schedules_and_effects_are_read_anew(tmp_path):
    trainer = trainer_of(tmp_path, effect="emphasis(s=2)")
    whole = engine.Graph(trainer)
    whole.begin(0, 0)
    before = held(trainer)

    def moved(lr, s):
        for name, tensor in state(trainer).items():
            tensor.copy_(before[name])
        whole.flat.refresh()
        whole.begin(0, 0)
        whole.rates.fill_(lr)
        whole.numbers["emphasis.s"].fill_(s)
        whole.graph.replay()
        name = "method.predictor.3.weight"
        return float((state(trainer)[name] - before[name]).norm())

    assert moved(0.0, 2.0) == 0.0
    once = moved(0.01, 2.0)
    assert math.isclose(moved(0.02, 2.0), 2 * once, rel_tol=1e-3)
    assert moved(0.01, 20.0) > 2 * once


def test_nan_reaches_no_checkpoint(tmp_path, monkeypatch):
    honest = engine.Graph.steps

    def steps(self, trainer):
        for _ in honest(self, trainer):
            if trainer.step == 13:
                trainer.method.student["projector"][0].weight.data[0, 0] = float("nan")
                self.flat.refresh()
            yield

    monkeypatch.setattr(engine.Graph, "steps", steps)
    with pytest.raises(Stopped, match=r"became nan at step 13|no longer finite"):
        ml.pretrain(settings(), runs=tmp_path, engine="graph", checkpoint_seconds=0, quiet=True)
    (path,) = tmp_path.iterdir()
    found, damaged = checkpoint.newest(path / "checkpoints", ml.open_run(path).id)
    assert damaged == []
    assert found.facts["step"] == 12
    assert all(t.isfinite().all() for t in found.tensors.values() if t.is_floating_point())


@pytest.mark.parametrize(("first", "second"), [("graph", "graph"), ("graph", "eager"), ("eager", "graph")])
def test_resume_ends_where_an_uninterrupted_run_ends(tmp_path, monkeypatch, first, second):
    """A checkpoint is anyone's: taken up by either engine, the run ends as if nothing had happened."""
    whole = ml.pretrain(settings(), runs=tmp_path / "whole", engine=first, quiet=True)
    kind = {"eager": engine.Eager, "graph": engine.Graph}[first]
    honest = kind.steps

    def steps(self, trainer):
        for _ in honest(self, trainer):
            yield
            if trainer.step == 17:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "steps", steps)
        with pytest.raises(KeyboardInterrupt):
            ml.pretrain(settings(), runs=tmp_path / "cut", engine=first, checkpoint_seconds=0, quiet=True)
    again = ml.pretrain(settings(), runs=tmp_path / "cut", engine=second, resume=True, quiet=True)
    assert [line["engine"] for line in json_lines(again.path / "environment.jsonl")] == [first, second]
    for one, two in zip(whole.metrics, again.metrics, strict=True):
        assert math.isclose(one["loss"], two["loss"], rel_tol=0.02), (one, two)


@pytest.mark.parametrize(("first", "second"), [("graph", "eager"), ("eager", "graph")])
def test_a_step_from_the_others_checkpoint_is_ones_own(tmp_path, first, second):
    """In float32: three steps and a checkpoint by one engine, then a step by either."""
    one, two = (trainer_of(tmp_path / name, amp="off") for name in (first, second))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        own = engine.choose(first, one)
        take(own, one, 3)
        save(one)
        found, _ = checkpoint.newest(one.path / "checkpoints", one.id)
        load(two, found)
        before = held(one)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state(two).items())
        take(own, one, 1)
        other = engine.choose(second, two)
        take(other, two, 1)
    assert [own.name, other.name] == [first, second]
    assert one.step == two.step == 4
    assert_same_step(one, two, before)


def test_auto_takes_the_graph(tmp_path, capsys):
    run = ml.pretrain(settings(epochs=1), runs=tmp_path)
    assert "engine: graph (bfloat16, views in one kernel)" in capsys.readouterr().err
    assert json_lines(run.path / "environment.jsonl")[0]["engine"] == "graph"
    again = ml.pretrain(settings(epochs=1, amp="fp16"), runs=tmp_path)
    assert "fp16" in json_lines(again.path / "environment.jsonl")[0]["engine_about"]
