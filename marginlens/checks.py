"""Check the arguments of the losses, and raise one clear line for an invalid one.

Values inside a CUDA tensor are checked only with `check=True`, because reading them makes the host wait for the device.
"""

from __future__ import annotations

from dataclasses import fields
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from marginlens.effects import Effect, Product, factors
from marginlens.kernels import IMPLS
from marginlens.notation import effect as parse
from marginlens.parameters import (
    DTYPES,
    TAUS,
    Number,
    check_dense,
    check_range,
    check_values,
    form,
    is_fake,
    plain_number,
    quoted,
    readable,
    span,
)

EffectLike: TypeAlias = Effect | str
REDUCTIONS = ("mean", "none")
INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Dtypes of indices."""
_TAUS = f"above 0, {span(TAUS)}"
_LEARNED = f"{_TAUS}; learn its logarithm instead, which stays in range: tau=log_tau.exp()"
_NAMED = 5
"""Number of rows that an error names."""


def embeddings(check: bool, **tensors: Tensor | None) -> torch.dtype:
    """Return the dtype to compute in; raise unless the tensors are embeddings (rows, d) of one device and dimension."""
    dtype, first, head = torch.float32, "", None
    for name, x in tensors.items():
        if x is None and name == "queue":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        check_dense(name, x)
        first, head = (name, x) if head is None else (first, head)
        if x.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (rows, dim)")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; embeddings must be floating, 16 bits or more: use .float()")
        if x.device != head.device:
            raise ValueError(f"{name} is on {x.device} and {first} on {head.device}; move one with .to(...)")
        _same_kind(name, x, first, head)
        if x.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: its rows have no dimension")
        if x.shape[1] != head.shape[1]:
            raise ValueError(f"{name} has dimension {x.shape[1]} and {first} {head.shape[1]}; they must be equal")
        if len(x) == 0 and name != "queue":
            raise ValueError(f"{name} is an empty batch, of shape {tuple(x.shape)}; it needs at least one row")
        if check:
            _check_rows(name, x)
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _check_rows(name: str, x: Tensor) -> None:
    """Raise a ValueError that names the rows with NaN or infinity, or too short for a finite gradient."""
    check_values(name, x)
    peak = x.detach().abs().amax(1)
    if not bool(torch.isfinite(peak).all()):
        raise ValueError(f"{name} has NaN or infinity in {_rows(~torch.isfinite(peak))}")
    floats = torch.finfo(torch.promote_types(x.dtype, torch.float32))
    least = floats.tiny / floats.eps
    short = (peak > 0) & (peak < least)
    if bool(short.any()):
        raise ValueError(f"{name} has no entry above {least:.0e} in {_rows(short)}; no gradient is finite there")


def _rows(bad: Tensor) -> str:
    """Return the number of bad rows and the first of them, for an error."""
    rows = bad.nonzero().flatten().tolist()
    more = ", ..." if len(rows) > _NAMED else ""
    return f"{len(rows)} of {len(bad)} rows: {', '.join(map(str, rows[:_NAMED]))}{more}"


def _same_kind(name: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise a TypeError if a FakeTensor meets a real one, or is used outside of its mode: torch would mix the two."""
    if torch.compiler.is_compiling() or not (is_fake(x) or is_fake(y)):
        return
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        fake = name if is_fake(x) else other
        raise TypeError(f"{fake} is a FakeTensor outside of its FakeTensorMode; call the loss inside `with mode:`")
    if is_fake(x) != is_fake(y) and not mode.allow_non_fake_inputs:
        raise TypeError(f"of {name} and {other} one is a FakeTensor; pass the other through FakeTensorMode.from_tensor")


def same_shape(**tensors: Tensor) -> None:
    """Raise a ValueError unless two batches pair up row by row."""
    (a, x), (b, y) = tensors.items()
    if x.shape != y.shape:
        raise ValueError(f"{a} has shape {tuple(x.shape)} and {b} {tuple(y.shape)}; they must pair up row by row")


def positives(index: Tensor | None, q: Tensor, k: Tensor, check: bool) -> None:
    """Raise unless `index` holds each row's positive among the rows of k; None is the diagonal."""
    if index is None:
        if len(k) < len(q):
            raise ValueError(
                f"q has {len(q)} rows and k only {len(k)}: without positives=, the positive of row i is row i of k; "
                f"give positives=, an index per row"
            )
        return
    if not isinstance(index, Tensor):
        raise TypeError(f"positives must be a tensor of indices, not {type(index).__name__}")
    check_dense("positives", index)
    if index.dim() > 1:
        raise ValueError(
            f"positives has shape {tuple(index.shape)} and dtype {index.dtype}; it takes one index per row of q, so "
            f"({len(q)},) integers: info_nce supports one positive per row, neither a mask nor several indices"
        )
    if index.dtype not in INTEGERS:
        raise TypeError(f"positives has dtype {index.dtype}; it must hold integers, one index per row of q")
    if index.shape != (len(q),):
        raise ValueError(f"positives has shape {tuple(index.shape)}; it must be ({len(q)},), an index per row of q")
    if index.device != q.device:
        raise ValueError(f"positives is on {index.device} and q on {q.device}; move it with .to(...)")
    _same_kind("positives", index, "q", q)
    if check:
        check_values("positives", index)
    if check or readable(index):
        low, high = (int(x) for x in torch.aminmax(index.long()))
        if low < 0 or high >= len(k):
            wrapped = ", read as int64," if index.dtype == torch.uint64 and low < 0 else ""
            raise ValueError(
                f"positives goes{wrapped} from {low} to {high}; indices of k's rows go from 0 to {len(k) - 1}, "
                f"and class labels are not such indices"
            )


def parameters(tau: Number, effect: Effect, q: Tensor, check: bool) -> None:
    """Raise if tau or a number of the effect is a tensor that does not fit q, or that has left its range since."""
    if isinstance(tau, Tensor):
        _beside("tau", tau, q)
    changed, made = False, []
    for factor in factors(effect):
        values = {field.name: getattr(factor, field.name) for field in fields(factor)}  # type: ignore[arg-type]
        for name, value in values.items():
            if isinstance(value, Tensor):
                where = f"{type(factor).__name__}: {name}"
                _beside(where, value, q)
                if check:
                    check_values(where, value)
                    values[name] = value.detach().cpu()
                changed = changed or check or readable(value)
        made.append((type(factor), values))
    if changed:
        again = [kind(**values) for kind, values in made]
        if len(again) > 1:
            Product(tuple(again))


def _beside(name: str, value: Tensor, q: Tensor) -> None:
    """Raise unless a tensor of one number is on the CPU or on the device of the embeddings."""
    if value.device != q.device:
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device} and the embeddings on {q.device}; move it with .to(...)")
        if value.requires_grad and q.device.type == "meta":
            raise ValueError(f"{name} is on cpu and learns, but the embeddings are on meta; move it with .to(...)")
    _same_kind(name, value, "the embeddings", q)


def temperature(tau: Number, check: bool) -> Number:
    """Return tau as a float, or as the tensor that it is; raise if it is out of range."""
    if isinstance(tau, Tensor):
        check_dense("tau", tau)
        if tau.numel() != 1 or tau.dtype not in DTYPES:
            raise TypeError(f"tau must be a number or a floating tensor of one element, not a {form(tau)}")
        if check:
            check_values("tau", tau)
        if not check and not readable(tau):
            return tau
    elif isinstance(tau, Real) and not isinstance(tau, bool):
        tau = plain_number("tau", tau, _TAUS)
    else:
        raise TypeError(f"tau must be a number or a floating tensor of one element, not {quoted(tau)}")
    learned = isinstance(tau, Tensor) and tau.requires_grad and tau.is_leaf
    check_range("tau", tau, TAUS, _LEARNED if learned else _TAUS)
    return tau


def share(beta: float) -> float:
    """Return beta, the weight of the denominator, as a float; raise unless it is in [0, 1]."""
    if isinstance(beta, bool) or not isinstance(beta, Real):
        raise TypeError(f"beta must be a number, not {quoted(beta)}")
    beta = plain_number("beta", beta, "in [0, 1]")
    check_range("beta", beta, (0.0, 1.0), "in [0, 1]")
    return beta


def whole(what: str, value: int) -> int:
    """Return a count; raise a ValueError unless it is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {quoted(value)}; it must be a whole number, at least 1")
    return value


def as_effect(value: EffectLike) -> Effect:
    """Return an effect, given as itself or as its string form."""
    if isinstance(value, str):
        if torch.compiler.is_compiling():
            raise TypeError(f"inside torch.compile, give effect an object: read {value!r} once, outside the graph")
        return parse(value)
    if isinstance(value, type) or not hasattr(value, "log_weights"):
        raise TypeError(f"effect must be an effect such as Emphasis(s=20) or its string form, not {quoted(value)}")
    return value


def switch(name: str, value: bool) -> None:
    """Raise a TypeError unless a setting is True or False, because "no" would count as True."""
    if isinstance(value, int) and value in (0, 1):
        return
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's
        raise TypeError(f"{name} must be True or False, not {quoted(value)}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError unless a setting is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {quoted(value)}; it must be one of {', '.join(map(repr, allowed))}")


def options(reduction: str, impl: str, check: bool = False) -> None:
    """Raise if an option that all losses share has no such value."""
    one_of("reduction", reduction, REDUCTIONS)
    one_of("impl", impl, IMPLS)
    switch("check", check)


def negatives(count: int, beta: float, effect: Effect, layout: str) -> None:
    """Raise a ValueError if there are no negatives, but beta or the effect needs them."""
    if count > 0:
        return
    if beta > 0.0:
        raise ValueError(f"beta is {beta:g} but no row has a negative; {layout}")
    if effect.needs_negatives:
        raise ValueError(f"{effect}: {effect.needs_negatives} acts through negatives, and no row has one; {layout}")
