"""What the networks' kernels take: matrices whose rows are pixels, or samples, and whose columns are channels.

A channels-last tensor (n, c, h, w) is a matrix of n * h * w rows and c contiguous columns, as a 2-D one is.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dense(x: Tensor) -> bool:
    """Whether x is a matrix of rows of channels: channels-last, or contiguous if it is not an image."""
    return x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous()


def like(g: Tensor, x: Tensor) -> Tensor:
    """The gradient in the layout of x: that of a mean over pixels arrives expanded."""
    form = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return g.to(x.dtype).contiguous(memory_format=form)


def power(c: int, most: int) -> int:
    """The largest power of two that divides c, up to `most`."""
    return min(c & -c, most)
