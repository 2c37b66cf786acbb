"""Numbers that an effect is made of: floats, or 0-d tensors that a schedule may change between steps.

Also how a number, a tensor, a choice or a name is checked, and what an error says of it.
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
"""Of embeddings, and of tensors that stand for a number."""
TAUS = (1e-6, 1e6)
"""Smallest and largest tau: below, rounding errors of float32 logits are larger than 1."""
SCALES = (0.0, 1e6)
"""Smallest and largest s, also of the product of all s in a composition: s / tau is at most 1e12, far from 1e38."""
SHIFTS = (-1e6, 1e6)
"""Smallest and largest m2: |m2| / tau is at most 1e12."""
CURVES = (1e-9, 1e9)
"""Smallest and largest c, but for infinity: log(gamma) divides by c, and log(theta / pi) is multiplied by it."""
_LONGEST = 80
"""An error quotes at most this many characters of a value."""


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
    """Return True if reading x is possible and costs no wait: not on a device, compiled, batched, traced or fake."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not _is_batched(x)
        and not torch._C._len_torch_dispatch_stack()
        and not is_fake(x)
    )


def _is_batched(x: Tensor) -> bool:
    """Also under a transform that takes its gradient."""
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
    """Return why x has no value to read, or ""."""
    if torch.compiler.is_compiling():
        return ""  # the compiler breaks its graph to read one
    if x.device.type == "meta":
        return "is on the meta device"
    if _is_batched(x):
        return "is batched by torch.vmap"
    if is_fake(x):
        return "is a FakeTensor"
    inside = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return "is inside of a FakeTensorMode" if inside else ""


def check_values(name: str, x: Tensor) -> None:
    """Raise a ValueError if `check=True` asks for values that x does not have."""
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
    """Return a value as an error quotes it: one short line, whatever the value is."""
    try:
        text = f"a {form(value)}" if isinstance(value, Tensor) else " ".join(repr(value).split())
    except Exception:  # it is a stranger's object, and its type says enough
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def form(x: Tensor) -> str:
    """Return dtype and shape of a tensor as an error names them."""
    return f"{x.dtype} tensor of shape {tuple(x.shape)}"


def plain_number(name: str, value: Real, allowed: str) -> float:
    """Return a number that is no tensor as a float; raise a ValueError if it is beyond all floats."""
    if isinstance(value, float):
        return float(value)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {quoted(value)}, beyond the largest float; it must be {allowed}") from None


def check_range(name: str, value: Number, bounds: tuple[float, float], allowed: str) -> None:
    """Raise a ValueError unless a number is within its bounds; a tensor's rounding to its dtype is forgiven."""
    number, (low, high) = as_float(value), bounds
    if isinstance(value, Tensor):
        low, high = _reach(low, -1, value.dtype), _reach(high, 1, value.dtype)
    if low <= number <= high:
        return
    text = f"{number:g}"
    raise ValueError(f"{name} is {number if low <= float(text) <= high else text}; it must be {allowed}")


def span(bounds: tuple[float, float]) -> str:
    """Return bounds as an error names them."""
    return f"from {bounds[0]:g} to {bounds[1]:g}"


def _reach(bound: float, sign: int, dtype: torch.dtype) -> float:
    """Return where a bound may be rounded to: pi in float32 is larger than pi. Whole numbers stay as they are."""
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
    """Raise unless a parameter is a number within its bounds, or infinity if `endless`; make a plain number a float.

    A 0-d tensor stays, and its value is checked where that is free.
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
    """The name that was probably meant, or all there are."""
    close = get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


def check_choice(effect: object, name: str, allowed: tuple[str, ...]) -> None:
    """Raise unless a parameter is one of the allowed words."""
    value = getattr(effect, name)
    if not isinstance(value, str) or value not in allowed:
        choices = " or ".join(repr(a) for a in allowed)
        raise ValueError(f"{type(effect).__name__}: {name} is {quoted(value)}; it must be {choices}")
