"""The one operation that touches all pairs, and the one place that chooses how it is computed.

    neg_lse(q, keys, scale, drop) = log sum over j not in drop[i] of exp(scale * q_i . k_j)        (n,)

`q` (n, d) and `keys` (m, d) have rows of length one; `keys=None` means q itself. `scale` is 1/tau, of shape (). `drop`
(n, r) holds column indices, r may be 0; every row must keep a key. Gradients flow to q, keys and scale. Results for
parts of the keys combine by `logaddexp`. A kernel knows no effect; a new one is one file with this function, and a
line in `KERNELS`.
"""

from __future__ import annotations

from torch import Tensor

from marginlens.kernels import chunked, reference

KERNELS = {"reference": reference.neg_lse, "chunked": chunked.neg_lse}
IMPLS = ("auto", *KERNELS)


def choose(impl: str) -> str:
    """The kernel that `impl` stands for: "auto" is "chunked"."""
    return "chunked" if impl == "auto" else impl


def neg_lse(q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor, impl: str = "auto") -> Tensor:
    """log-sum-exp of the negatives' logits, (n,), by the kernel that `impl` names."""
    return KERNELS[choose(impl)](q, keys, scale, drop)
