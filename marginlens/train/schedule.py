"""What changes from step to step, as closed forms of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, base: float, warmup: int = 0) -> float:
    """Linear from 0 at step 0 to `base` at step `warmup`, then half a cosine, to 0 at step `total`."""
    if not 0 <= step <= total or not 0 <= warmup < total:
        raise ValueError(f"step is {step} of {total} with a warm-up of {warmup}; it must be within the run")
    if step < warmup:
        return base * step / warmup
    return base * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2.0
