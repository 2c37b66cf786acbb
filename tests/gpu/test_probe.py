"""The probe on a GPU: its captured step, and features of a folded backbone."""

import pytest
import torch

from marginlens.nets.folded import folded
from marginlens.nets.resnet import encoder
from tests.train import test_linear


@pytest.mark.parametrize("more", [{}, {"momentum": 0.0}, {"weight_decay": 0.01}, {"batch": 7}], ids=str)
def test_replayed_epochs_are_those_of_sgd(more):
    test_linear.test_epochs_are_those_of_sgd(more)


@pytest.mark.parametrize(("name", "stem"), [("tiny", "small-pool"), ("resnet18", "small"), ("resnet50", "imagenet")])
def test_folded_features_are_as_near_as_autocast(name, stem):
    torch.manual_seed(0)
    net = encoder(name, stem=stem).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(3):
            net(x + torch.randn_like(x))
        net.eval()
        exact = net.double()(x.double())
        net.float()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            half = net(x).double()
        ours = folded(net, torch.bfloat16)(x).double()
    error = lambda y: float((y - exact).norm() / exact.norm())
    assert error(ours) < 1.5 * error(half) < 0.1
