"""Measure a GPU's best rates: matrix products, copies and exponentials, each alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gpu import median

ROUNDS, BLOCK = 4096, 2048


@triton.jit
def _exponentials(out, rounds, BLOCK: tl.constexpr):
    """Compute rounds * BLOCK exponentials per program, each of a bounded number that depends on the one before."""
    columns = tl.arange(0, BLOCK)
    x = columns.to(tl.float32) * -0.001
    for _ in range(rounds):
        x = tl.exp2(x) - 1.5
    tl.store(out + tl.program_id(0) * BLOCK + columns, x)


def exponentials_per_second() -> float:
    """Measure exp2 in float32, as in a loss's kernel. The limit is 16 per clock and multiprocessor."""
    programs = 8 * torch.cuda.get_device_properties("cuda").multi_processor_count
    out = torch.empty(programs * BLOCK, device="cuda")
    ms = median(lambda: _exponentials[(programs,)](out, ROUNDS, BLOCK=BLOCK, num_warps=8), "cuda", 7)
    return 1e3 * programs * BLOCK * ROUNDS / ms


def product_tflops(dtype: torch.dtype, n: int = 8192) -> float:
    """Measure a large square product."""
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * n**3 / median(lambda: a @ b, "cuda", 10) / 1e9


def copy_gb_per_s() -> float:
    x = torch.randint(0, 256, (2**30,), device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * 2**30 / median(lambda: y.copy_(x), "cuda", 10) / 1e6


def measured() -> dict[str, Any]:
    return {
        "bf16_tflops": product_tflops(torch.bfloat16),
        "float32_tflops": product_tflops(torch.float32, 4096),
        "copy_gb_per_s": copy_gb_per_s(),
        "exponentials_per_s": exponentials_per_second(),
    }
