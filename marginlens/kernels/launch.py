"""Keep the host's share of a kernel small: operators without autograd layers, launches without Triton's search.

Small losses take less time on the GPU than on the host that launches them, so this overhead is their time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

_compiled: dict[Any, Any] = {}


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors as an operator without its own autograd, which `torch.compile` sees as one node.

    `fake` returns empty tensors of the output's shapes. `torch.library.custom_op` does the same with layers for
    autograd and aliases, which take longer than a launch. We need neither: our operators are called by an
    `autograd.Function`, and return new tensors.
    """

    def register(body: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(body, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", torch._disable_dynamo(body))  # type: ignore[attr-defined]
        torch.library.register_fake(name, fake)
        namespace, short = name.split("::")
        return getattr(getattr(torch.ops, namespace), short).default

    return register


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Run a jitted kernel. Its arguments are tensors, then numbers that it does not specialize, then constants.

    Triton binds, inspects and formats every argument at every launch to look up the compiled kernel. This function
    looks it up by the things that can differ: the constants, and each tensor's dtype and 16-byte alignment.
    """
    first = tensors[0]
    at = [x.data_ptr() for x in tensors]
    key = (
        kernel.fn, first.get_device(), constants, warps, stages,
        *[x.dtype for x in tensors], *[a % 16 == 0 for a in at],
    )  # fmt: skip
    found = _compiled.get(key)
    with torch.cuda.device_of(first):
        if found is None:  # this call compiles and launches; the interpreter returns None
            found = kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
            if found is not None:
                _compiled[key] = found
        else:
            found[grid](*at, *numbers, *constants)


def ceil(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` is slower, because it also serves kernels."""
    return -(-a // b)


@cache
def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dense(x: Tensor) -> bool:
    """True if x is a matrix of rows of channels: channels-last for images, contiguous otherwise."""
    return x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous()


def like(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient in x's layout, because the gradient of a mean over pixels arrives expanded."""
    form = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return g.to(x.dtype).contiguous(memory_format=form)


def power(c: int, most: int) -> int:
    """Return the largest power of two that divides c, up to `most`."""
    return min(c & -c, most)


T = TypeVar("T")


def capture(
    step: Callable[[], T], warm: int, reset: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a CUDA graph of one `step` and that step's output: tensors that every replay overwrites.

    First the step runs `warm` times, each after `reset`, to compile kernels and let libraries choose algorithms. That
    happens on the capture's stream, because libraries keep a workspace for each stream. The captured step itself is not
    executed. The caller must undo the effects of the warm-up.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            if reset is not None:
                reset()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    return graph, found
