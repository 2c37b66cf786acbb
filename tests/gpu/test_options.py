"""The captured step against the plain one, with settings that differ from the recipe's."""

import math

import pytest
import torch
from torch import nn

from marginlens.data import draw
from marginlens.data.views import make_view
from marginlens.nets.resnet import BasicBlock, Bottleneck
from marginlens.train import engine
from marginlens.train.trainer import state
from tests.gpu.runs import assert_same_step, held, take, trainer_of

pytestmark = pytest.mark.usefixtures("shapes")

OPTIONS = {
    "symmetric MoCo v3": {"symmetric": True, "two_tau": True},
    "symmetric BYOL": {"method": "byol", "symmetric": True},
    "batch norms in parts": {"bn_splits": 8, "predictor_bn": True},
    "SimCLR in parts": {"method": "simclr", "bn_splits": 4},
    "clipped": {"clip": 0.1, "decay_all": False},
}
LARGE = {
    "views by the reference": {"size": 136, "batch": 32, "lr": 0.001},
    "ResNet-50": {"encoder": "resnet50", "batch": 32, "lr": 0.001},
    "ImageNet's stem": {"encoder": "resnet18", "stem": "imagenet", "size": 64, "lr": 0.001},
}


def calm(trainer):
    """Residual branches begin small. Otherwise 1e-6 of each pixel would be 6 % of a ResNet-50's gradient."""
    for module in trainer.method.modules():
        if isinstance(module, BasicBlock | Bottleneck):
            nn.init.constant_(module.pairs[-1][1].weight, 0.1)
    return trainer


def compare_step(plain, whole, share):
    before = held(plain)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        take(engine.Eager(), plain, 1)
        take(engine.Graph(whole), whole, 1)
    assert_same_step(plain, whole, before, share)


@pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS)
def test_one_step_is_the_plain_step(tmp_path, more):
    """In float32, views by the reference on the plain side."""
    plain, whole = (trainer_of(tmp_path / name, amp="off", **more) for name in ("a", "b"))
    plain.feed.fused = False
    compare_step(plain, whole, 1e-2)


@pytest.mark.parametrize("more", LARGE.values(), ids=LARGE)
def test_one_large_step_is_the_plain_step(tmp_path, more):
    """In float32, from the same views."""
    compare_step(*(calm(trainer_of(tmp_path / name, amp="off", **more)) for name in ("a", "b")), 5e-2)


def compare_losses(eager, graph, share):
    """The first three in bf16, to a share of the loss, or of its range where it is near 0: cosines over tau."""
    take(engine.Eager(), eager, 3)
    take(engine.Graph(graph), graph, 3)
    one, two, asked = eager.losses[:3], graph.losses[:3], eager.settings
    size = one.abs().clamp(min=(1 + asked.symmetric) / asked.tau)
    assert ((one - two).abs() <= share * size).all(), (one, two)


@pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS)
def test_first_losses_are_those_of_the_plain_loop(tmp_path, more):
    compare_losses(*(trainer_of(tmp_path / name, amp="bf16", **more) for name in ("a", "b")), 1e-2)


@pytest.mark.parametrize("more", LARGE.values(), ids=LARGE)
def test_first_losses_of_large_steps_are_those_of_the_plain_loop(tmp_path, more):
    compare_losses(*(calm(trainer_of(tmp_path / name, amp="bf16", **more)) for name in ("a", "b")), 2e-2)


def test_views_by_the_reference_are_new_at_every_replay(tmp_path):
    trainer = trainer_of(tmp_path, **LARGE["views by the reference"])
    whole, images, seen = engine.Graph(trainer), trainer.feed.images("train"), set()
    assert "views by the reference, because views of 136 pixels" in whole.about
    for _ in range(5):
        take(whole, trainer, 1)
        epoch, at = divmod(trainer.step - 1, trainer.per_epoch)
        chosen = draw.order(trainer.samples, trainer.settings.seed, epoch).view(trainer.per_epoch, -1)[at].cuda()
        for number, view in enumerate(trainer.views):
            expected = make_view(images[chosen], chosen, view, trainer.settings.seed, epoch, number)
            assert (whole.seen[number].float() - expected).abs().max() < 0.03  # bf16 of values up to 3
            seen.add(whole.seen[number].float().cpu().numpy().tobytes())
    assert len(seen) == 2 * 5


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_clipped_gradient_has_the_norm_that_was_asked_for(tmp_path, amp):
    """A first momentum is the gradient, where nothing decays."""
    trainer = trainer_of(tmp_path, clip=0.1, weight_decay=0.0, amp=amp)
    take(engine.Graph(trainer), trainer, 1)
    norms = [tensor.double().norm() for name, tensor in state(trainer).items() if name.startswith("optimizer.")]
    assert math.isclose(float(torch.stack(norms).norm()), 0.1, rel_tol=1e-3)
