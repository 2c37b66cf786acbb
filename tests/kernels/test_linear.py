"""The linear layer against torch in float64."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from marginlens.kernels.linear import linear, linear_supported
from tests.kernels.twins import DEVICE, assert_near, leaf, tensor


@pytest.mark.parametrize("n", [5, 300])
def test_linear(n):
    torch.manual_seed(0)
    x, weight, bias = (leaf(tensor(shape, torch.float32)) for shape in ((n, 24), (48, 24), (48,)))
    grad = torch.randn(n, 48, device=DEVICE)
    assert linear_supported(x, weight, bias)
    y = linear(x, weight, bias)
    y.backward(grad)
    others = [leaf(t, torch.float64) for t in (x, weight, bias)]
    expected = nn.functional.linear(*others)
    expected.backward(grad.double())
    assert_near(y, expected, 3e-6)
    for found, other in zip((x, weight, bias), others, strict=True):
        assert_near(found.grad, other.grad, 3e-6)


def test_linear_gives_only_what_is_asked_for():
    x, weight, bias = torch.randn(4, 8), leaf(torch.randn(16, 8)), torch.randn(16)
    linear(x.to(DEVICE), weight, bias.to(DEVICE)).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(16, 8))


def test_what_linear_does_not_take():
    x, weight, bias = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)
    assert linear_supported(x, weight, bias)
    assert not linear_supported(x, weight, None)
    assert not linear_supported(x, weight.bfloat16(), bias)
    assert not linear_supported(x, weight[:8], bias[:8])
    with torch.autocast("cpu", torch.bfloat16):
        assert not linear_supported(x, weight, bias)
