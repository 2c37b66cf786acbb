"""A folded encoder against the module it was made from."""

import pytest
import torch

from marginlens.nets.folded import folded
from marginlens.nets.resnet import encoder


def trained(name, stem):
    """An encoder whose batch norms have seen something, and whose affine parameters are not 1 and 0."""
    torch.manual_seed(0)
    net = encoder(name, stem=stem).double()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(4, 3, 32, 32, dtype=torch.float64))
    return net.eval()


@pytest.mark.parametrize(("name", "stem"), [("tiny", "small-pool"), ("resnet18", "small"), ("resnet50", "imagenet")])
def test_folding_changes_nothing_but_rounding(name, stem):
    net = trained(name, stem)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(folded(net, torch.float64)(x), expected, rtol=1e-11, atol=1e-11)


def test_later_training_is_not_seen():
    net = trained("tiny", None)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    found = folded(net, torch.float64)
    before = found(x)
    with torch.no_grad():
        net.conv1.weight.mul_(2.0)
        net.bn1.running_mean.add_(1.0)
    assert torch.equal(found(x), before)
    assert not found(x).requires_grad


def test_bfloat16_is_as_near_as_autocast():
    net = trained("tiny", None)
    x = torch.randn(16, 3, 32, 32)
    with torch.no_grad():
        exact = net(x.double())
        net.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = net(x).double()
    ours = folded(net, torch.bfloat16)(x).double()
    error = lambda y: float((y - exact).norm() / exact.norm())
    assert error(ours) < 1.5 * error(half) < 0.05
