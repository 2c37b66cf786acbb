"""Parameters of an effect: floats, or 0-d tensors that a schedule may change between steps.

Also the checks of numbers, tensors, choices and names, and how an error quotes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

Number: TypeAlias = float | Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Allowed for embeddings, and for tensors in place of a number."""
TAUS = (1e-6, 1e6)
"""Smallest and largest tau: below the smallest, rounding errors of float32 logits exceed 1."""
SCALES = (0.0, 1e6)
"""Smallest and largest s, also of the product of all s in a composition: s / tau is at most 1e12, far from 1e38."""
SHIFTS = (-1e6, 1e6)
"""Smallest and largest m2: |m2| / tau is at most 1e12."""
CURVES = (1e-9, 1e9)
"""Smallest and largest finite c: log(gamma) is divided by c, and log(theta / pi) multiplied by it."""
_LONGEST = 80
"""An error quotes at most this many characters of a value."""


def like(x: Number, row: Tensor) -> Number:
    """Return the parameter in the dtype of the rows, because log 20 in bfloat16 is wrong in the third digit."""
    return x.to(row.dtype) if isinstance(x, Tensor) else x


def log(x: Number) -> Number:
    """Return the natural logarithm of a parameter; -inf for 0."""
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0.0 else -math.inf


def cos(x: Number) -> Number:
    """Return the cosine of a parameter."""
    return x.cos() if isinstance(x, Tensor) else math.cos(x)


def sin(x: Number) -> Number:
    """Return the sine of a parameter."""
    return x.sin() if isinstance(x, Tensor) else math.sin(x)


def as_float(x: Number) -> float:
    """Return the present value of a parameter; for a tensor on a device, wait for the device."""
    return float(x.detach()) if isinstance(x, Tensor) else x


def readable(x: Tensor) -> bool:
    """Return True if x can be read without a wait: on the CPU, and neither compiled, batched, traced nor fake."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not _is_batched(x)
        and not torch._C._len_torch_dispatch_stack()
        and not is_fake(x)
    )


def _is_batched(x: Tensor) -> bool:
    """Return True if x is batched by vmap, also inside a transform that takes gradients."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return bool(functorch.is_batchedtensor(x))


def is_fake(x: Tensor) -> bool:
    """Return True if x is a FakeTensor, which has a shape and no values."""
    if type(x) in (Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack():
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and bool(module.is_fake(x))


def valueless(x: Tensor) -> str:
    """Return why x has no value to read, or "" if it has one."""
    if torch.compiler.is_compiling():
        return ""  # because the compiler breaks its graph to read a value
    if x.device.type == "meta":
        return "is on the meta device"
    if _is_batched(x):
        return "is batched by torch.vmap"
    if is_fake(x):
        return "is a FakeTensor"
    inside = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return "is inside of a FakeTensorMode" if inside else ""


def check_values(name: str, x: Tensor) -> None:
    """Raise a ValueError if x has no values for `check=True` to look at."""
    if why := valueless(x):
        raise ValueError(f"{name} {why}, so check=True has no values to look at; leave check=True out")


def check_dense(name: str, x: Tensor) -> None:
    """Raise a TypeError unless x is a plain tensor: not sparse, nested, MKL-DNN, quantized or uninitialized."""
    if isinstance(x, UninitializedParameter | UninitializedBuffer):
        raise TypeError(f"{name} is uninitialized, as a lazy module's are; run that module on a batch first")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; it must be dense: use .to_padded_tensor(0.0), or stack its parts")
    if x.is_quantized:
        raise TypeError(f"{name} is a quantized tensor of dtype {x.dtype}; it must be dense: use .dequantize()")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; it must be dense: use .to_dense()")


def shortest(x: Number) -> str:
    """Return the shortest text that reads back as x; "?" for a tensor without a value."""
    return "?" if isinstance(x, Tensor) and valueless(x) else repr(as_float(x)).removesuffix(".0")


def quoted(value: object) -> str:
    """Return a value as one short line for an error."""
    try:
        text = f"a {form(value)}" if isinstance(value, Tensor) else " ".join(repr(value).split())
    except Exception:  # because the repr of a foreign object may raise anything
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def form(x: Tensor) -> str:
    """Return dtype and shape of a tensor for an error."""
    return f"{x.dtype} tensor of shape {tuple(x.shape)}"


def plain_number(name: str, value: Real, allowed: str) -> float:
    """Return a plain number as a float; raise a ValueError if it exceeds the largest float."""
    if isinstance(value, float):
        return float(value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {quoted(value)}, beyond the largest float; it must be {allowed}") from None


def check_range(name: str, value: Number, bounds: tuple[float, float], allowed: str) -> None:
    """Raise a ValueError unless a number is within its bounds; a tensor may exceed them by its rounding error."""
    number, (low, high) = as_float(value), bounds
    if isinstance(value, Tensor):
        low, high = _reach(low, -1, value.dtype), _reach(high, 1, value.dtype)
    if low <= number <= high:
        return
    text = f"{number:g}"
    raise ValueError(f"{name} is {number if low <= float(text) <= high else text}; it must be {allowed}")


def span(bounds: tuple[float, float]) -> str:
    """Return bounds for an error."""
    return f"from {bounds[0]:g} to {bounds[1]:g}"


def _reach(bound: float, sign: int, dtype: torch.dtype) -> float:
    """Return a bound after rounding to a dtype, because pi in float32 exceeds pi; whole numbers stay exact."""
    return bound if bound == round(bound) else bound + sign * abs(bound) * torch.finfo(dtype).eps


def check_number(
    effect: object,
    name: str,
    bounds: tuple[float, float],
    allowed: str,
    *,
    endless: bool = False,
    learns: bool = False,
) -> None:
    """Raise unless a parameter is a number within its bounds; convert a plain number to a float.

    A 0-d tensor stays a tensor. Its value is checked only if that costs no wait.

    Args:
        effect: The effect that has the parameter.
        name: The parameter's name.
        bounds: Smallest and largest value.
        allowed: The bounds in words, for errors.
        endless: True if infinity is allowed too.
        learns: True if a tensor that requires a gradient is allowed.
    """
    value = getattr(effect, name)
    where = f"{type(effect).__name__}: {name}"
    if isinstance(value, Tensor):
        check_dense(where, value)
        if value.dim() != 0 or value.dtype not in DTYPES:
            raise TypeError(f"{where} must be a number or a 0-d floating tensor, not a {form(value)}")
        if value.requires_grad and not learns:
            raise ValueError(f"{where} requires a gradient, and a declared weight has none; pass {name}.detach()")
        if not readable(value):
            return
    elif isinstance(value, Real) and not isinstance(value, bool):
        value = plain_number(where, value, allowed)
        object.__setattr__(effect, name, value)
    else:
        raise TypeError(f"{where} must be a number or a 0-d floating tensor, not {quoted(value)}")
    if not (endless and as_float(value) == math.inf):
        check_range(where, value, bounds, allowed)


def hint(name: str, names: Iterable[str]) -> str:
    """Return a hint that names the closest match, or all names if none is close."""
    close = get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


def check_choice(effect: object, name: str, allowed: tuple[str, ...]) -> None:
    """Raise unless a parameter is one of the allowed words."""
    value = getattr(effect, name)
    if not isinstance(value, str) or value not in allowed:
        choices = " or ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(effect).__name__}: {name} is {quoted(value)}; it must be {choices}")
