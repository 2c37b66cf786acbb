"""Numbers that an effect is made of: floats, or 0-d tensors that a schedule may change between steps."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor


def log(x: Number) -> Number:
    """Natural logarithm; that of 0 is -inf."""
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0.0 else -math.inf


def cos(x: Number) -> Number:
    return x.cos() if isinstance(x, Tensor) else math.cos(x)


def sin(x: Number) -> Number:
    return x.sin() if isinstance(x, Tensor) else math.sin(x)


def shortest(x: float) -> str:
    """The shortest text that reads back as x."""
    return repr(x).removesuffix(".0")


def check_number(
    effect: object, name: str, low: float, high: float, allowed: str, *, open_low: bool = False, finite: bool = False
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
        if torch.compiler.is_compiling() or value.device.type != "cpu":
            return
        number = float(value.detach())
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        object.__setattr__(effect, name, number)
    else:
        raise TypeError(f"{where} must be a number or a 0-d floating tensor, not {value!r}")
    fits = low < number <= high if open_low else low <= number <= high
    if not fits or (finite and math.isinf(number)):
        raise ValueError(f"{where} is {number:g}; it must be {allowed}")


def check_choice(effect: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(effect, name)
    if value not in allowed:
        choices = " or ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(effect).__name__}: {name} is {value!r}; it must be {choices}")
