"""The mean over pixels against torch in float64."""

import pytest
import torch

pytest.importorskip("triton")

from marginlens.kernels.pool import pool, pool_supported
from tests.kernels.twins import TOLERANCE, assert_near, leaf, tensor


@pytest.mark.parametrize("shape", [(3, 64, 4, 4), (2, 48, 5, 7), (9, 16, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool(shape, dtype):
    torch.manual_seed(0)
    x = leaf(tensor(shape, dtype))
    assert pool_supported(x)
    y = pool(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert y.dtype == dtype
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, x.detach().double().mean((2, 3)), TOLERANCE[dtype])
    expected = (grad.double() / (shape[2] * shape[3]))[:, :, None, None].expand(shape)
    assert_near(x.grad, expected, TOLERANCE[dtype])


def test_what_pool_does_not_take():
    x = tensor((2, 32, 3, 3), torch.float32)
    assert pool_supported(x)
    assert not pool_supported(x.contiguous())
    assert not pool_supported(x[:, :24].contiguous(memory_format=torch.channels_last))
    assert not pool_supported(x.double())
