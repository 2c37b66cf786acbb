"""Projector and predictor, layer by layer, and the effect of a bias in front of a batch norm."""

import pytest
import torch
from torch import nn

from marginlens.nets import parameters, predictor, projector
from marginlens.nets.fast import fast
from marginlens.nets.heads import Head


def layers(head):
    return [type(layer).__name__ for layer in head]


def test_the_recipes_sizes():
    p = projector(512)
    assert layers(p) == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [tuple(x.shape) for x in (p[0].weight, p[1].weight, p[3].weight)] == [(2048, 512), (2048,), (128, 2048)]
    assert p[1].affine
    assert not p[4].affine
    assert p[4].track_running_stats
    assert parameters(p) == 512 * 2048 + 2048 + 2 * 2048 + 2048 * 128 + 128
    q = predictor()
    assert layers(q) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert [tuple(x.shape) for x in (q[0].weight, q[3].weight)] == [(2048, 128), (128, 2048)]
    assert layers(projector(512, last_bn=False)) == layers(q)


@pytest.mark.parametrize("make", [lambda b: projector(9, hidden=8, out=7, bias=b), lambda b: predictor(9, bias=b)])
@pytest.mark.parametrize("bias", [True, False])
def test_biases_are_all_or_none(make, bias):
    assert [m.bias is not None for m in make(bias) if isinstance(m, nn.Linear)] == [bias, bias]


def test_the_last_norm_standardises():
    torch.manual_seed(0)
    z = projector(10, hidden=32, out=6).double()(torch.randn(64, 10).double() * 5 + 3)
    assert z.mean(0).abs().max() < 1e-12
    assert (z.var(0, unbiased=False) - 1).abs().max() < 1e-3


def test_a_bias_before_a_norm_changes_nothing_and_learns_nothing():
    torch.manual_seed(0)
    head, x = projector(10, hidden=32, out=6).double(), torch.randn(16, 10).double()
    want = head(x)
    (want * torch.randn(16, 6).double()).sum().backward()
    for layer in (head[0], head[3]):
        assert layer.bias.grad.abs().max() < 1e-9 * layer.weight.grad.abs().max()
        nn.init.normal_(layer.bias)
    assert (head(x) - want).abs().max() < 1e-12


@pytest.mark.parametrize(
    "head", [projector(10, hidden=32, out=6, bias=False), projector(10, hidden=32, out=6, last_bn=False), predictor(10)]
)
def test_gradients_reach_every_parameter(head):
    torch.manual_seed(0)
    y = head(torch.randn(16, 10))
    (y * torch.randn_like(y)).sum().backward()
    for name, p in head.named_parameters():
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > (0 if name == "0.bias" else 1e-4), name


def test_eval_mode_treats_each_row_alone():
    head, x = projector(10, hidden=32, out=6).double().eval(), torch.randn(5, 10).double()
    assert (head(x) - torch.cat([head(row[None]) for row in x])).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: projector(0), "the head's input size is 0; it must be a whole number, at least 1"),
        (lambda: projector(8, hidden=-1), "the head's hidden size is -1"),
        (lambda: projector(8, out=1.5), "the head's output size is 1.5"),
        (lambda: predictor(True), "the head's input size is True"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_a_head_of_other_layers_has_no_fast_form():
    """It would be cut to the layers that the fast form knows."""
    three = Head(*projector(8, hidden=8, out=8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(16, 8)
    assert three(x).shape == (16, 4)
    for head in (three, Head(*projector(8)[:3]), Head(nn.Linear(8, 8), nn.Identity(), nn.GELU(), nn.Linear(8, 8))):
        with fast(), pytest.raises(ValueError, match=r"has no fast form; run its method with --engine eager"):
            head(x)


@pytest.mark.parametrize("end", [[], [nn.Identity()], [nn.LayerNorm(4)], [nn.BatchNorm1d(4)]])
@pytest.mark.parametrize("middle", [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Identity()])
def test_other_norms_keep_their_place_in_the_fast_form(middle, end):
    torch.manual_seed(0)
    head, x = Head(nn.Linear(8, 8), middle, nn.ReLU(), nn.Linear(8, 4), *end), torch.randn(16, 8)
    with fast():
        found = head(x)
    torch.testing.assert_close(found, head(x))
