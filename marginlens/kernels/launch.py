"""What a kernel costs the host: operators that PyTorch calls without detours, launches without Triton's search.

Where a loss takes less time on the GPU than its caller needs to ask for it, this is the time that it takes.
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
    """A function of tensors as an operator without autograd of its own, one node to `torch.compile`.

    `fake` makes room for what it returns. As `torch.library.custom_op`, without its layers for autograd and aliases,
    which take longer than a launch: an `autograd.Function` calls our operators, and what they return is new.
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
    """Runs a jitted kernel whose arguments are tensors, then numbers that it does not specialize, then constants.

    Triton binds, inspects and spells out every argument at every launch to find the compiled kernel; here it is found
    by what can differ: the constants, and each tensor's type and whether its address is a multiple of 16.
    """
    first = tensors[0]
    at = [x.data_ptr() for x in tensors]
    key = (
        kernel.fn, first.get_device(), constants, warps, stages,
        *[x.dtype for x in tensors], *[a % 16 == 0 for a in at],
    )  # fmt: skip
    found = _compiled.get(key)
    with torch.cuda.device_of(first):
        if found is None:  # compiles and launches; the interpreter has nothing to return
            found = kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
            if found is not None:
                _compiled[key] = found
        else:
            found[grid](*at, *numbers, *constants)


def ceil(a: int, b: int) -> int:
    """a / b, rounded up: `triton.cdiv` serves kernels too, and takes its time to find out that it need not."""
    return -(-a // b)


@cache
def power_of_2(n: int) -> int:
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


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


T = TypeVar("T")


def capture(
    step: Callable[[], T], warm: int, reset: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of one `step`, and what that step returned: tensors that every replay writes anew.

    Before that the step is executed `warm` times, each after `reset`, so that kernels are compiled and libraries have
    chosen their algorithms: on the stream of the capture, for libraries have a workspace for each. The step that is
    captured is not executed. What warming up has changed is the caller's to take back.
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
