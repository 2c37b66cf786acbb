"""The one operation that touches all pairs, and the one place that chooses how it is computed.

    neg_lse(q, keys, scale, drop) = log sum over j not in drop[i] of exp(scale * q_i . k_j)        (n,)

`q` (n, d) and `keys` (m, d) have rows of length one; `keys=None` means q itself. `scale` is 1/tau, of shape (). `drop`
(n, r) holds column indices, r may be 0; every row must keep a key. Gradients flow to q, keys and scale. Results for
parts of the keys combine by `logaddexp`. A kernel knows no effect; a new one is one file with this function, and a line
in `KERNELS`.

Triton's also has a fast way from embeddings to rows, `units`, which makes the tiles that its `neg_lse` then need not.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marginlens.kernels import chunked, reference

if TYPE_CHECKING:
    from marginlens.kernels.unit_rows import Units

HAS_TRITON = find_spec("triton") is not None
Pair = tuple[Tensor | None, Tensor | None]
"""Of q and of keys; None where a kernel has none, or should make them."""
KERNELS = {"reference": reference.neg_lse, "chunked": chunked.neg_lse}
IMPLS = ("auto", *KERNELS, "triton")


def choose(impl: str, q: Tensor, dtype: torch.dtype, negatives: bool = True) -> str:
    """The kernel that `impl` stands for, for embeddings like q, computed in `dtype`, with or without negatives.

    "auto" is "triton" in float32 on a GPU, the fastest there at every size (docs/developing/performance.md), and
    else "chunked".
    """
    if impl == "triton":
        _can_use_triton(q, dtype)
    if impl != "auto":
        return impl
    fits = negatives and q.is_cuda and dtype == torch.float32
    return "triton" if fits and not no_triton(q.device) else "chunked"


def no_triton(device: torch.device) -> str:
    """Why Triton cannot be used on a device, or nothing: on a CPU only its interpreter is left."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"triton needs a GPU of compute capability 8.0, and {torch.cuda.get_device_name(device)} is older"
    return ""


no_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what Dynamo cannot trace, it may ask once
"""As torch.compiler.assume_constant_result has it, which imports Dynamo: half of what importing this package took."""


def _can_use_triton(q: Tensor, dtype: torch.dtype) -> None:
    if not HAS_TRITON:
        raise ValueError("impl is 'triton', which is not installed: pip install triton, or use impl='auto'")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl is 'triton', which needs a GPU: the embeddings are on {q.device}; use impl='auto'")
    if why := no_triton(q.device):
        raise ValueError(f"impl is 'triton', and {why}; use impl='auto'")
    if dtype != torch.float32:
        raise ValueError(f"impl is 'triton', which has no tiles for {dtype}; use impl='auto', or .float() embeddings")


def neg_lse(
    q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor, impl: str = "auto", tiles: Pair = (None, None)
) -> Tensor:
    """log-sum-exp of the negatives' logits, (n,), by the kernel that `impl` names; `tiles` are what `units` made."""
    name = choose(impl, q, q.dtype) if impl == "auto" else impl
    if name != "triton":
        return KERNELS[name](q, keys, scale, drop)
    from marginlens.kernels import (
        lse as triton,  # a CPU needs no Triton, and importing the package should not pay for it
    )

    return triton.neg_lse(q, keys, scale, drop, tiles)


def units(x: Tensor, y: Tensor | None, together: bool, half: bool, sines: bool = False) -> Units:
    """Rows of length one by Triton, of one side or two, in the precision that `half` embeddings call for."""
    from marginlens.kernels import lse as triton
    from marginlens.kernels import unit_rows as rows

    return rows.units(x, y, together, triton.parts(half), sines)
