"""Compute the one operation that touches all pairs, and choose the kernel that computes it.

    neg_lse(q, keys, scale, drop) = log sum over j not in drop[i] of exp(scale * q_i . k_j)        (n,)

- `q` (n, d) and `keys` (m, d) have rows of length one. `keys=None` means q itself.
- `scale` is 1/tau, of shape ().
- `drop` (n, r) holds column indices. r may be 0, and every row must keep at least one key.

Gradients flow to q, keys and scale. Results for parts of the keys combine by `logaddexp`. A kernel knows no effect. To
add a kernel, write one file with this function and add a line to `KERNELS`.

Triton also has `units`, a fast path from embeddings to rows. It makes the tiles that Triton's `neg_lse` needs.
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
"""For q and for keys. None means that the kernel uses no tiles, or makes them itself."""
KERNELS = {"reference": reference.neg_lse, "chunked": chunked.neg_lse}
IMPLS = ("auto", *KERNELS, "triton")


def choose(impl: str, q: Tensor, dtype: torch.dtype, negatives: bool = True) -> str:
    """Return the name of the kernel to use for `impl`, embeddings like q and the dtype `dtype`.

    `negatives` is False if the loss has no negatives. "auto" means "triton" for float32 on a GPU, because that is the
    fastest there at every size (docs/developing/performance.md). Everywhere else it means "chunked".
    """
    if impl == "triton":
        _can_use_triton(q, dtype)
    if impl != "auto":
        return impl
    fits = negatives and q.is_cuda and dtype == torch.float32
    return "triton" if fits and not no_triton(q.device) else "chunked"


def no_triton(device: torch.device) -> str:
    """Return why Triton cannot be used on a device, or "" if it can. A CPU has Triton's interpreter alone."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"triton needs a GPU of compute capability 8.0, and {torch.cuda.get_device_name(device)} is older"
    return ""


no_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo cannot trace it
"""Set by hand: `torch.compiler.assume_constant_result` imports Dynamo, which would double our import time."""


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
    """Return the log-sum-exp of the negatives' logits, (n,), by the kernel `impl`. `tiles` come from `units`."""
    name = choose(impl, q, q.dtype) if impl == "auto" else impl
    if name != "triton":
        return KERNELS[name](q, keys, scale, drop)
    from marginlens.kernels import (
        lse as triton,  # imported late: a CPU needs no Triton, and `import marginlens` stays fast
    )

    return triton.neg_lse(q, keys, scale, drop, tiles)


def units(x: Tensor, y: Tensor | None, together: bool, half: bool, sines: bool = False) -> Units:
    """Return rows of length one by Triton, for one side or two. `half` says that the embeddings have 16 bits."""
    from marginlens.kernels import lse as triton
    from marginlens.kernels import unit_rows as rows

    return rows.units(x, y, together, triton.parts(half), sines)
