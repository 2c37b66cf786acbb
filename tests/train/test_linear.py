"""The probe's linear layer against torch.optim.SGD."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from marginlens.evals.linear import Linear
from marginlens.evals.probe import Probe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("more", [{}, {"momentum": 0.0}, {"weight_decay": 0.01}, {"batch": 7}], ids=str)
def test_epochs_are_those_of_sgd(more):
    settings = Probe(**({"batch": 16, "lr": 0.5} | more))
    torch.manual_seed(0)
    x, y = torch.randn(100, 12, device=DEVICE), torch.randint(5, (100,), device=DEVICE)
    ours = Linear(12, 5, settings, DEVICE)
    layer = torch.nn.Linear(12, 5, device=DEVICE)
    layer.load_state_dict(ours.layer.state_dict())
    sgd = torch.optim.SGD(
        layer.parameters(), 1.0, settings.momentum, 0, settings.weight_decay, nesterov=settings.momentum > 0
    )
    steps = -(-100 // settings.batch)
    for epoch in range(3):
        order = torch.randperm(100, device=DEVICE)
        rates = [0.5 / (1 + epoch * steps + i) for i in range(steps)]
        found = ours.epoch(x[order], y[order], rates)
        for i, some in enumerate(order.split(settings.batch)):
            sgd.param_groups[0]["lr"] = rates[i]
            loss = cross_entropy(layer(x[some]), y[some])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            torch.testing.assert_close(found[i], loss.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.layer.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_beginning_is_the_seeds():
    one, two, other = (Linear(12, 5, Probe(seed=seed), DEVICE).layer for seed in (1, 1, 2))
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(one.weight, other.weight)
    assert not one.bias.any()
    assert 0.005 < float(one.weight.detach().std()) < 0.02


@pytest.mark.parametrize("k", [0.25, 4.0])
def test_larger_features_are_a_higher_rate(k):
    """Without bias and from the same scores, features k times as large learn as at k squared times the rate."""
    torch.manual_seed(0)
    x, y = torch.randn(100, 12, device=DEVICE), torch.randint(5, (100,), device=DEVICE)
    small, large = (Linear(12, 5, Probe(batch=16), DEVICE) for _ in range(2))
    large.layer.weight.data.div_(k)
    for linear in (small, large):
        linear.learning, linear.momenta = linear.learning[:1], linear.momenta[:1]
    rates = [0.1 / (1 + i) for i in range(7)]
    found = small.epoch(x, y, [rate * k * k for rate in rates])
    torch.testing.assert_close(large.epoch(k * x, y, rates), found, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k * large.layer.weight, small.layer.weight, rtol=1e-4, atol=1e-5)
