"""What a kernel costs the host: operators that PyTorch calls without detours, launches without Triton's search.

Where a loss takes less time on the GPU than its caller needs to ask for it, this is the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

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
