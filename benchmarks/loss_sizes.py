"""Compare our kernels by size on a GPU with compiled cross-entropy: the evidence behind `impl="auto"`.

    python benchmarks/loss_sizes.py [--out results/loss_sizes_gpu.json]

Value and gradient of plain InfoNCE, d = 128, tau = 0.1. Milliseconds of an eager call, host included; up to 4,096 rows
also microseconds of a replayed CUDA graph, the GPU alone. At 65,536 rows, whole calls beside the time of their matrix
products alone, at the rate of a large product measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu
import machine
import rates
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import marginlens as ml

D, TAU = 128, 0.1
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REPLAYED = 4096
MATERIALISED = 16384
LARGE = 65536
PRODUCTS = {"detached": 2, "both": 4, "set": 3}


def plain(q: Tensor, k: Tensor) -> Tensor:
    """The usual implementation, to be compiled. Products are in the embeddings' precision."""
    q, k = normalize(q), normalize(k)
    return cross_entropy((q @ k.T).float() / TAU, torch.arange(len(q), device=q.device))


def calls(n: int, dtype: torch.dtype, layout: str, compiled: Callable[..., Tensor]) -> Iterator[tuple[str, gpu.Call]]:
    """Return every way to value and gradient of n rows. "set" has half of them in each view."""
    q, k = (torch.randn(n, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    if layout == "set":
        q, k = (x.detach()[: n // 2].clone().requires_grad_() for x in (q, k))
    wrt = (q,) if layout == "detached" else (q, k)
    other = k.detach() if layout == "detached" else k
    mine = ml.nt_xent if layout == "set" else ml.info_nce
    for impl in ("triton", "chunked", "reference"):
        if impl != "reference" or n <= MATERIALISED:
            yield impl, lambda impl=impl: torch.autograd.grad(mine(q, other, tau=TAU, impl=impl), wrt)  # type: ignore[misc]
    if layout != "set":
        yield "compiled", lambda: torch.autograd.grad(compiled(q, other), wrt)


def by_size() -> Iterator[dict[str, Any]]:
    compiled = {(d, m): torch.compile(plain, dynamic=True) for d in ("bf16", "float32") for m in PRODUCTS}
    for n in SIZES:
        for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
            for layout in PRODUCTS:
                row: dict[str, Any] = {"n": n, "dtype": name, "layout": layout}
                for impl, call in calls(n, dtype, layout, compiled[name, layout]):
                    row[f"{impl}_ms"] = gpu.median(call, "cuda", 11 if n < 8192 else 3)
                    if n <= REPLAYED:
                        row[f"{impl}_us"] = 1e3 * gpu.captured(call)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                yield row


def large(tflops: float) -> Iterator[dict[str, Any]]:
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        for layout, products in PRODUCTS.items():
            _, call = next(calls(LARGE, dtype, layout, plain))
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ms = gpu.median(call, "cuda", 5)
            alone = products * 2 * LARGE**2 * D / tflops / 1e9
            row = {"n": LARGE, "dtype": name, "layout": layout, "ms": ms, "products_ms": alone, "ratio": ms / alone}
            row["extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/loss_sizes_gpu.json"))
    out = parser.parse_args().out
    roofs = rates.measured()
    content: dict[str, Any] = {"facts": machine.facts("cuda", d=D, tau=TAU), "roofs": roofs}
    content["large"] = list(large(roofs["bf16_tflops"]))
    machine.save(out, content)
    content["rows"] = []
    for row in by_size():
        content["rows"].append(row)
        machine.save(out, content)


if __name__ == "__main__":
    main()
