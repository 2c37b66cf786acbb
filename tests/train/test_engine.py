"""The captured step against the plain loop, here without the capture: its kernels run in Triton's interpreter.

What only a GPU can show (replays, streams, bf16) is in tests/gpu/test_engine.py.
"""

import copy
import re
from functools import partial

import pytest
import torch

import marginlens as ml
from marginlens import kernels
from marginlens.data import draw
from marginlens.data.feed import open_feed
from marginlens.data.views import make_view
from marginlens.errors import Stopped
from marginlens.methods import METHODS
from marginlens.methods.protocol import unmarked
from marginlens.nets.resnet import encoder
from marginlens.runs import work
from marginlens.train import engine
from marginlens.train.pretrain import start
from marginlens.train.trainer import check_data, state
from tests.records import json_lines
from tests.train.conftest import settings

SLOW = partial(pytest.param, marks=pytest.mark.slow)
CASES = [
    ("mocov3", {}),
    # slow in the interpreter; tests/gpu has the same on a GPU
    SLOW("mocov3", {"bn_splits": 2, "predictor_bn": True}),
    SLOW("byol", {"effect": "margin(m1=0.2)"}),
    SLOW("mocov3", {"clip": 0.3, "decay_all": False, "weight_decay": 0.05, "ema_schedule": "cosine"}),
    # a fifth of the others' rate, for its gradients are five times as large
    SLOW(
        "mocov3", {"effect": "emphasis(s=5, c=2.5) * ratio(m1=0.4)", "symmetric": True, "two_tau": True, "lr": 0.0002}
    ),
    SLOW("simclr", {"effect": "margin(m1=0.2, m2=0.1)", "bias": False, "momentum": 0.0}),
]


def named(value):
    return value if isinstance(value, str) else ", ".join(f"{k}={v}" for k, v in value.items()) or "recipe"


def trainer_of(runs, **more):
    # little steps on images that are not too small: otherwise a float32 rounding is a tenth of the way after two steps
    asked = settings(**({"lr": 0.001, "size": 16, "warmup": 0} | more))
    feed = open_feed("little", torch.device("cpu"))
    return start(work.make_run(asked, feed, runs), feed, check_data(asked, feed))


def take(which, trainer, count):
    left = count
    while left:
        for _ in which.steps(trainer):
            left -= 1
            if not left:
                break


def differences(runs, **more):
    """Tensors that two steps of both engines leave apart by more than float32's rounding."""
    plain, whole = (trainer_of(runs / name, limit=8, **more) for name in ("a", "b"))
    before = {name: tensor.clone() for name, tensor in state(plain).items()}
    take(engine.Eager(), plain, 2)  # two epochs of one step
    take(engine.Graph(whole, captured=False), whole, 2)
    found, wanted = state(whole), state(plain)
    assert found.keys() == wanted.keys()
    assert whole.step == plain.step == 2
    apart = []
    for name, tensor in wanted.items():
        if name.startswith("optimizer.") and plain.settings.momentum == 0.0:
            continue  # torch leaves the buffer alone, and nobody reads it
        moved = (tensor.double() - before[name].double()).norm()
        error = (found[name].double() - tensor.double()).norm()
        # float32 sums in another order; a bias in front of a batch norm has no gradient but rounding
        if not error <= 1e-4 * moved + 1e-6 * tensor.double().norm() + 1e-5:
            apart.append((name, float(error), float(moved)))
    return apart


@pytest.mark.parametrize(("method", "more"), CASES, ids=named)
def test_whole_step_is_the_plain_step(tmp_path, method, more):
    """Where rounding turns a ReLU over, a gradient jumps: that depends on the processor, and no seed has it always."""
    found = {}
    for seed in range(3):
        found[seed] = differences(tmp_path / str(seed), method=method, seed=seed, **more)
        if not found[seed]:
            return
    pytest.fail(f"apart: {found}")


@pytest.mark.slow
def test_every_step_sees_its_own_views(tmp_path):
    trainer = trainer_of(tmp_path, seed=7, limit=16, size=8)
    whole = engine.Graph(trainer, captured=False)
    images, seen = trainer.feed.images("train"), []
    for _ in range(2):
        for _ in whole.steps(trainer):
            epoch, at = divmod(trainer.step - 1, trainer.per_epoch)
            chosen = draw.order(trainer.samples, 7, epoch).view(-1, 8)[at]
            for number, view in enumerate(trainer.views):
                expected = make_view(images[chosen], chosen, view, 7, epoch, number)
                torch.testing.assert_close(whole.seen[number], expected, rtol=1e-4, atol=1e-4)
            seen.append(torch.stack(whole.seen).clone())
    assert len({x.numpy().tobytes() for x in seen}) == 4


@pytest.mark.slow
def test_effects_numbers_are_read_anew(tmp_path):
    trainer = trainer_of(tmp_path, effect="emphasis(s=2)", lr=0.0, ema=1.0)
    whole = engine.Graph(trainer, captured=False)
    assert set(whole.numbers) == {"emphasis.s"}
    whole.begin(0, 0)
    with engine.fast():
        loss = lambda: whole._loss(whole._views(whole.order[0]))
        one = torch.autograd.grad(loss(), whole.learning)
        whole.numbers["emphasis.s"].fill_(4.0)
        two = torch.autograd.grad(loss(), whole.learning)
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_teacher_near_one_keeps_its_share(tmp_path):
    """Formed before it is rounded: of 0.99999 itself float32 would leave 1.00136e-5."""
    trainer = trainer_of(tmp_path, ema=0.99999, limit=16, size=8)
    whole = engine.Graph(trainer, captured=False)
    whole.begin(0, 0)
    torch.testing.assert_close(whole.shares.double(), torch.full((2,), 1e-5).double(), rtol=1e-7, atol=0)


def test_nan_is_noticed(tmp_path):
    trainer = trainer_of(tmp_path, limit=16, size=8)
    whole = engine.Graph(trainer, captured=False)
    steps = whole.steps(trainer)
    next(steps)
    trainer.method.student["projector"][0].weight.data.fill_(float("nan"))
    with pytest.raises(Stopped, match=r"became nan at step 1"):
        list(steps)


def test_shadow_shares_everything_else():
    torch.manual_seed(0)
    method = METHODS["mocov3"](encoder("tiny"), hidden=8, out=8)
    halves = {n: p.detach().bfloat16() for n, p in method.named_parameters() if n.endswith("conv1.weight")}
    other, learning = engine.shadow(method, halves)
    theirs = dict(other.named_parameters())
    for name, own in method.named_parameters():
        assert theirs[name] is own or name in halves
        assert theirs[name].requires_grad == own.requires_grad
    assert all(theirs[name].data_ptr() == half.data_ptr() for name, half in halves.items())
    assert all(a is b for a, b in zip(method.buffers(), other.buffers(), strict=True))
    assert [id(p) for p in learning] == [id(p) for p in theirs.values() if p.requires_grad]


@pytest.mark.parametrize("text", ["plain", "emphasis(s=5, c=2.5)", "margin(m1=0.2) * attenuation(alpha=0.5)"])
def test_numbers_on_the_device_are_the_same_effect(text):
    effect = ml.effect(text)
    moved, numbers = engine.on_device(effect, torch.device("cpu"))
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 4, requires_grad=True)
    one, two = (torch.autograd.grad(ml.info_nce(q, k, effect=e), (q, k)) for e in (effect, moved))
    torch.testing.assert_close(one, two)
    assert str(copy.deepcopy(moved)) == str(moved)
    assert ("plain" in text) == (not numbers)


def test_graph_is_refused_where_there_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"engine is 'graph', and a cpu has no graphs"):
        ml.pretrain(settings(), runs=tmp_path, engine="graph", quiet=True)
    with pytest.raises(ValueError, match=r"there is no engine 'fast'"):
        ml.pretrain(settings(), runs=tmp_path, engine="fast", quiet=True)
    assert not list(tmp_path.iterdir())


def test_obstacles(monkeypatch):
    feed = open_feed("little", torch.device("cpu"))
    feed.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert engine.obstacle(feed, torch.bfloat16) == ""
    assert "fp16" in engine.obstacle(feed, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert "Tesla T4 is older" in engine.obstacle(feed, torch.bfloat16)
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert "triton is not installed" in engine.obstacle(feed, torch.bfloat16)


def test_what_was_chosen_is_said_and_recorded(capsys, tmp_path):
    run = ml.pretrain(settings(epochs=1), runs=tmp_path)
    assert "engine: eager (a cpu has no graphs)" in capsys.readouterr().err
    line = json_lines(run.path / "environment.jsonl")[0]
    assert (line["engine"], line["engine_about"]) == ("eager", "eager (a cpu has no graphs)")


class Own(METHODS["mocov3"]):
    """A hundred more, which a graph would not add."""

    def loss(self, views):
        return 100.0 + super().loss(views)


def test_what_a_graph_may_do_otherwise_is_not_replayed(monkeypatch, tmp_path, capsys):
    """A subclass may have anything of its own: its loss, a frozen teacher, a longer head, what it counts in compare."""
    said = unmarked(Own)
    assert said.startswith("Own is not marked by_graph")
    assert [unmarked(method) for method in METHODS.values()] == [""] * len(METHODS)
    monkeypatch.setitem(METHODS, "mocov3", Own)
    monkeypatch.setattr(engine, "obstacle", lambda *_: "")  # as on a GPU
    monkeypatch.setattr(engine, "Graph", None)
    run = ml.pretrain(settings(epochs=1), runs=tmp_path)
    assert f"engine: eager ({said})" in capsys.readouterr().err
    assert run.metrics[-1]["loss"] > 100
    with pytest.raises(ValueError, match=f"engine is 'graph', and {re.escape(said)}"):
        ml.pretrain(settings(epochs=2), runs=tmp_path, engine="graph", quiet=True)
