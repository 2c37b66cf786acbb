"""Numbers that an effect is made of: floats, or 0-d tensors that a schedule may change between steps.

Also what is said of a number, a choice or a name that is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor


def like(x: Number, row: Tensor) -> Number:
    """The parameter in the dtype that rows are computed in: log 20 in bfloat16 is off in the third digit."""
    return x.to(row.dtype) if isinstance(x, Tensor) else x


def log(x: Number) -> Number:
    """Natural logarithm; that of 0 is -inf."""
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0.0 else -math.inf


def cos(x: Number) -> Number:
    """Cosine of a parameter."""
    return x.cos() if isinstance(x, Tensor) else math.cos(x)


def sin(x: Number) -> Number:
    """Sine of a parameter."""
    return x.sin() if isinstance(x, Tensor) else math.sin(x)


def as_float(x: Number) -> float:
    """The number as it is now; waits for the device if it is a tensor on one."""
    return float(x.detach()) if isinstance(x, Tensor) else x


def readable(x: Tensor) -> bool:
    """Whether looking at the tensor's values costs nothing and is possible: not on a device, compiled or batched."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_batched(x)


def _is_batched(x: Tensor) -> bool:
    """Also under a transform that takes its gradient."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return bool(functorch.is_batchedtensor(x))


def shortest(x: float) -> str:
    """The shortest text that reads back as x."""
    return repr(x).removesuffix(".0")


def check_number(
    effect: object,
    name: str,
    low: float,
    high: float,
    allowed: str,
    *,
    open_low: bool = False,
    finite: bool = False,
    learns: bool = False,
) -> None:
    """Checks a parameter and makes it a float; a 0-d tensor stays, and its value is checked where that is free."""
    value = getattr(effect, name)
    where = f"{type(effect).__name__}: {name}"
    if isinstance(value, Tensor):
        if value.dim() != 0 or not value.is_floating_point():
            raise TypeError(
                f"{where} must be a number or a 0-d floating tensor, not a {value.dtype} tensor of shape "
                f"{tuple(value.shape)}"
            )
        if value.requires_grad and not learns:
            raise ValueError(f"{where} requires a gradient, and a declared weight has none; pass {name}.detach()")
        if not readable(value):
            return
        number = as_float(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        object.__setattr__(effect, name, number)
    else:
        raise TypeError(f"{where} must be a number or a 0-d floating tensor, not {value!r}")
    fits = low < number <= high if open_low else low <= number <= high
    if not fits or (finite and abs(number) == math.inf):
        raise ValueError(f"{where} is {number:g}; it must be {allowed}")


def hint(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant, or all there are."""
    close = get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


def check_choice(effect: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(effect, name)
    if value not in allowed:
        choices = " or ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(effect).__name__}: {name} is {value!r}; it must be {choices}")
