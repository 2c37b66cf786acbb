"""The oracle: the whole matrix of logits in plain tensor code, differentiable any number of times."""

from __future__ import annotations

import torch
from torch import Tensor


def neg_lse(q: Tensor, keys: Tensor | None, scale: Tensor, drop: Tensor) -> Tensor:
    """Return the log-sum-exp of scale * q.k over the keys that a row does not drop. Memory O(n m)."""
    logits = (scale * q) @ (q if keys is None else keys).T
    return torch.logsumexp(logits.scatter(1, drop, -torch.inf), dim=1)
