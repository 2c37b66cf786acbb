"""The door: what the losses accept, and one clear line for everything else.

What would make the host wait for a device (values inside a CUDA tensor) is looked at on request only: `check=True`.
"""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from marginlens.effects import Effect, factors
from marginlens.kernels import IMPLS
from marginlens.notation import effect as parse
from marginlens.parameters import as_float, readable

EffectLike: TypeAlias = Effect | str
REDUCTIONS = ("mean", "none")
_NAMED = 5
"""So many rows are named; of more, the first."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def embeddings(check: bool, **tensors: Tensor | None) -> torch.dtype:
    """Checks embeddings (rows, d) that go together; returns the dtype to compute in."""
    dtype, first, head = torch.float32, "", None
    for name, x in tensors.items():
        if x is None and name == "queue":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        first, head = (name, x) if head is None else (first, head)
        if x.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (rows, dim)")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; embeddings must be floating, 16 bits or more: use .float()")
        if x.device != head.device:
            raise ValueError(f"{name} is on {x.device} and {first} on {head.device}; move one with .to(...)")
        if x.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: its rows have no dimension")
        if x.shape[1] != head.shape[1]:
            raise ValueError(f"{name} has dimension {x.shape[1]} and {first} {head.shape[1]}; they must be equal")
        if len(x) == 0 and name != "queue":
            raise ValueError(f"{name} is an empty batch, of shape {tuple(x.shape)}; it needs at least one row")
        if check and not bool(torch.isfinite(x).all()):
            bad = (~torch.isfinite(x)).any(1).nonzero().flatten().tolist()
            more = ", ..." if len(bad) > _NAMED else ""
            rows = ", ".join(map(str, bad[:_NAMED])) + more
            raise ValueError(f"{name} has NaN or infinity in {len(bad)} of {len(x)} rows: {rows}")
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def same_shape(**tensors: Tensor) -> None:
    """Checks that two batches pair up row by row."""
    (a, x), (b, y) = tensors.items()
    if x.shape != y.shape:
        raise ValueError(f"{a} has shape {tuple(x.shape)} and {b} {tuple(y.shape)}; they must pair up row by row")


def positives(index: Tensor | None, q: Tensor, k: Tensor, check: bool) -> None:
    """Checks the index of each row's positive among the rows of k."""
    if index is None:
        if len(k) < len(q):
            raise ValueError(
                f"q has {len(q)} rows and k only {len(k)}: without positives=, the positive of row i is row i of k; "
                f"give positives=, an index per row"
            )
        return
    if not isinstance(index, Tensor):
        raise TypeError(f"positives must be a tensor of indices, not {type(index).__name__}")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"positives has dtype {index.dtype}; it must hold integers")
    if index.shape != (len(q),):
        raise ValueError(f"positives has shape {tuple(index.shape)}; it must be ({len(q)},), an index per row of q")
    if index.device != q.device:
        raise ValueError(f"positives is on {index.device} and q on {q.device}; move it with .to(...)")
    if check or readable(index):
        low, high = (int(x) for x in torch.aminmax(index.long()))
        if low < 0 or high >= len(k):
            raise ValueError(f"positives goes from {low} to {high}; indices of k's rows go from 0 to {len(k) - 1}")


def parameters(effect: Effect, q: Tensor, check: bool) -> None:
    """Checks the tensors in an effect where it is used: their device, and on request the values they have now."""
    for factor in factors(effect):
        values = {field.name: getattr(factor, field.name) for field in fields(factor)}  # type: ignore[arg-type]
        for name, value in values.items():
            if isinstance(value, Tensor):
                _same_device(f"{type(factor).__name__}: {name}", value, q)
        if check:
            type(factor)(**{name: v if isinstance(v, str) else as_float(v) for name, v in values.items()})


def _same_device(name: str, value: Tensor, q: Tensor) -> None:
    """A number may live on the CPU, or beside the embeddings."""
    if value.device.type != "cpu" and value.device != q.device:
        raise ValueError(f"{name} is on {value.device} and the embeddings on {q.device}; move it with .to(...)")


def temperature(tau: float | Tensor, check: bool, q: Tensor | None = None) -> None:
    """Checks tau: a positive number, or a tensor of one that may learn."""
    if isinstance(tau, Tensor):
        if tau.numel() != 1 or not tau.is_floating_point():
            raise TypeError(
                f"tau must be a number or a floating tensor of one element, not {tau.dtype} of shape {tuple(tau.shape)}"
            )
        if q is not None:
            _same_device("tau", tau, q)
        if not check and not readable(tau):
            return
        value = as_float(tau)
    elif isinstance(tau, Real) and not isinstance(tau, bool):
        value = float(tau)
    else:
        raise TypeError(f"tau must be a number or a floating tensor of one element, not {tau!r}")
    if not 0.0 < value < math.inf:
        raise ValueError(f"tau is {value:g}; it must be above 0 and finite")


def share(beta: float) -> float:
    """Checks beta, the weight of the denominator."""
    if isinstance(beta, bool) or not isinstance(beta, Real):
        raise TypeError(f"beta must be a number, not {beta!r}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {float(beta):g}; it must be in [0, 1]")
    return float(beta)


def whole(what: str, value: int) -> int:
    """Checks a count."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}; it must be a whole number, at least 1")
    return value


def as_effect(value: EffectLike) -> Effect:
    """An effect, from an effect or its string form."""
    if isinstance(value, str):
        if torch.compiler.is_compiling():
            raise TypeError(f"inside torch.compile, give effect an object: read {value!r} once, outside the graph")
        return parse(value)
    if isinstance(value, type) or not hasattr(value, "log_weights"):
        raise TypeError(f"effect must be an effect such as Emphasis(s=20) or its string form, not {value!r}")
    return value


def switch(name: str, value: bool) -> None:
    """Checks what is on or off: "no" would be on."""
    if isinstance(value, str):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Checks a choice."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def options(reduction: str, impl: str) -> None:
    """Checks what all losses share."""
    one_of("reduction", reduction, REDUCTIONS)
    one_of("impl", impl, IMPLS)


def negatives(count: int, beta: float, effect: Effect, layout: str) -> None:
    """Checks that whatever acts through negatives has some."""
    if count > 0:
        return
    if beta > 0.0:
        raise ValueError(f"beta is {beta:g} but no row has a negative; {layout}")
    if effect.needs_negatives:
        raise ValueError(f"{effect}: {effect.needs_negatives} acts through negatives, and no row has one; {layout}")
