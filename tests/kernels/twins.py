"""Shared data and tolerances for tests of the networks' kernels."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter cuts to bfloat16 where a GPU rounds: a whole unit in the last place
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}


def tensor(shape, dtype, mean=0.5, std=2.0):
    form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return (torch.randn(shape, device=DEVICE) * std + mean).to(dtype).contiguous(memory_format=form)


def leaf(x, dtype=None):
    return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_()


def assert_near(found, expected, tolerance):
    """Near in units of the largest value: a gradient is a sum over rows."""
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0)
