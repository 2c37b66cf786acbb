"""The stem's convolution against torch in float64."""

import pytest
import torch

pytest.importorskip("triton")

from marginlens.kernels import stem
from marginlens.kernels.stem import stem_conv, stem_supported
from tests.kernels.twins import DEVICE, TOLERANCE, assert_near, leaf, tensor


@pytest.fixture(params=[128, 32])
def rows(request, monkeypatch):
    """Of a tile: all pixels in one, or many tiles for few programs, the last one ragged."""
    monkeypatch.setattr(stem, "TUNING", stem.TUNING | {"rows": request.param, "programs": 2})


@pytest.mark.parametrize(("shape", "out"), [((2, 3, 9, 7), 16), ((3, 3, 4, 4), 64), ((1, 3, 1, 1), 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stem(rows, shape, out, dtype):
    torch.manual_seed(0)
    x = tensor(shape, torch.bfloat16)
    weight = torch.randn(out, 3, 3, 3, device=DEVICE).bfloat16().to(dtype, memory_format=torch.channels_last)
    weight.requires_grad_()
    assert stem_supported(x, weight)
    y = stem_conv(x, weight)
    grad = torch.randn_like(y)
    y.backward(grad)
    other = weight.detach().double().requires_grad_()
    expected = torch.conv2d(x.double(), other, padding=1)
    expected.backward(grad.double())
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert weight.grad.dtype == dtype
    assert weight.grad.stride() == weight.stride()
    assert_near(y, expected, 2**-7)
    assert_near(weight.grad, other.grad, TOLERANCE[dtype])


def test_stem_gives_images_no_gradient():
    x, weight = leaf(tensor((2, 3, 4, 4), torch.bfloat16)), torch.randn(16, 3, 3, 3, device=DEVICE)
    assert not stem_supported(x, weight)
    with pytest.raises(ValueError, match="no gradient"):
        stem_conv(x, weight)
    assert not stem_supported(x.detach().float(), weight)
    assert not stem_supported(x.detach(), torch.randn(48, 3, 3, 3))
