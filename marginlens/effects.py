"""The paper's effects, and the home of its equations.

Each row of a contrastive loss has one positive, and everything the paper does to that row is a function of two
scalars: the cosine `c` of the positive's angle and the log-sum-exp `A` of the negatives' logits. An effect says two
things about a row: the positive's `logit` (only `Margin` changes it), and the logarithms of the weights that multiply
the positive's and the whole row's gradient. The loss owns the derivative, and adds the logarithms: effects compose by
addition, and factors that would overflow alone cancel first.

A new effect is one class here: a frozen dataclass that takes `Composes` and fills in `Effect`, listed in `EFFECTS`.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marginlens.parameters import (
    CURVES,
    SCALES,
    SHIFTS,
    Number,
    as_float,
    check_choice,
    check_number,
    cos,
    like,
    log,
    readable,
    shortest,
    sin,
    span,
)

Scope = Literal["positive", "row"]
Kind = Literal["I", "II"]
PartName = Literal["angle", "ratio", "attenuation"]
ANGLES, SHARES = (0.0, math.pi), (0.0, 1.0)
_ANGLES, _SHARES, _SCALES, _SHIFTS = "in [0, pi]", "in [0, 1]", span(SCALES), span(SHIFTS)
_CURVES = f"above 0, {span(CURVES)}, or inf: no curvature"
"""Allowed values, as errors name them."""


class Row(NamedTuple):
    """What an effect may know of its rows: three tensors of shape (n,), and the scale 1/tau of shape ()."""

    cos: Tensor
    """c, the cosine of the positive's angle theta."""
    sin: Tensor
    """Its sine, accurate near theta = 0 and pi, where sqrt(1 - c^2) is not; one NaN if no effect at hand is angular."""
    A: Tensor
    """log-sum-exp of the negatives' logits; -inf where there are none."""
    scale: Tensor

    @property
    def theta(self) -> Tensor:
        """Eq. 2: the positive's angle, in [0, pi], without the infinite slope of arccos."""
        return torch.atan2(self.sin, self.cos)


class LogWeights(NamedTuple):
    """Logarithms of what multiplies the positive's gradient, and the whole row's (the positive's too)."""

    positive: Number = 0.0
    row: Number = 0.0


class Effect(Protocol):
    """What the loss asks of an effect."""

    @property
    def angular(self) -> bool:
        """Whether it looks at the positive's angle beyond its cosine: only then is `Row.sin` computed."""

    @property
    def moves_logit(self) -> bool:
        """Whether `logit` is not the plain one: only then does the value of the loss change."""

    @property
    def unbounded(self) -> bool:
        """True if its weights have no bound where beta is below 1."""

    @property
    def part(self) -> PartName:
        """Which part of a gradient its weights are: of the angle alone, the ratio, or an attenuation."""

    @property
    def idle(self) -> bool:
        """True if it takes numbers, and was given none that do anything."""

    @property
    def needs_negatives(self) -> str:
        """The parameter that acts through the negatives and so means nothing without them; '' if none does."""

    def logit(self, row: Row) -> Tensor:
        """The positive's logit, (n,)."""

    def log_weights(self, row: Row) -> LogWeights | None:
        """The row's weights; None when the gradient is the derivative of the value."""

    def __mul__(self, other: Effect) -> Product:
        """Both, as `Composes` has it."""


def plain_logit(row: Row) -> Tensor:
    """Eq. 2, Alg. 1: the positive's logit cos(theta) / tau."""
    return row.scale * row.cos


def margin_logit(row: Row, m1: Number, m2: Number) -> Tensor:
    """Eq. 4, Alg. 2: the positive's logit (cos(theta + m1) - m2) / tau."""
    m1, m2 = like(m1, row.cos), like(m2, row.cos)
    return row.scale * (row.cos * cos(m1) - row.sin * sin(m1) - m2)


def log_gamma(x: Tensor, c: Number) -> Tensor:
    """Eq. 10: log of the curve gamma(x, c) = |(1 - x^c)^(1/c)|, for x in [0, 1]; 0 everywhere at c = infinity."""
    c = like(c, x)
    y = c * x.log()
    # log(1 - e^y), each form where it keeps its digits
    curve = torch.where(y > -math.log(2.0), torch.log(-torch.expm1(y)), torch.log1p(-torch.exp(y))) / c
    return torch.where(c.isinf(), 0.0, curve) if isinstance(c, Tensor) else curve


def log_ratio(row: Row, m1: Number) -> Tensor:
    """Lemma 4.2, Alg. 4: log of the sum of exponentiated logits without the margin m1 over that with it."""
    a, b = plain_logit(row), margin_logit(row, m1, 0.0)
    return logsigmoid(row.A - b) - logsigmoid(row.A - a)


def log_one_minus(weight: Number, x: Tensor) -> Tensor:
    """log(1 - weight * sigmoid(x)) for a weight in [0, 1]: finite wherever the result is, weight = 1 included."""
    return torch.logaddexp(logsigmoid(-x), log(1.0 - like(weight, x)) + logsigmoid(x))


class Composes:
    """What all effects share: they multiply, have a string form, and hash by their numbers."""

    unbounded = False
    """True if its weights have no bound where beta is below 1."""
    part: ClassVar[PartName] = "attenuation"
    """Which part of a gradient its weights are, for `marginlens.lens.decompose`."""

    @property
    def idle(self) -> bool:
        """True if it takes numbers, and was given none that do anything."""
        return False

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Composes.__hash__  # type: ignore[method-assign]  # or a dataclass would make its own

    def __mul__(self: Effect, other: Effect) -> Product:
        """Composition: weights multiply, and at most one factor may move the logit."""
        if isinstance(other, str):
            raise TypeError(f"{other!r} is a string; write * marginlens.effect({other!r})")
        if isinstance(other, type) or not hasattr(other, "log_weights"):
            return NotImplemented
        return Product((*factors(self), *factors(other)))

    def __str__(self) -> str:
        """The string form, which `marginlens.effect` reads back exactly; parameters at their default are left out."""
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            text = value if isinstance(value, str) else shortest(value)
            now = text if isinstance(value, str) or text == "?" else as_float(value)
            if field.default is MISSING or now != field.default:
                shown.append(f"{field.name}={text}")
        name = type(self).__name__.lower()
        return f"{name}({', '.join(shown)})" if shown else name

    def __hash__(self) -> int:
        """Equal effects hash alike; one that holds a tensor can change, and so has no hash."""
        values = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        if any(isinstance(value, Tensor) for value in values):
            raise TypeError(f"{self} holds a tensor, whose value may change: it cannot be a key")
        return hash((type(self), values))


@dataclass(frozen=True)
class Plain(Composes):
    """Eq. 3: generalized InfoNCE, no effect."""

    angular = False
    moves_logit = False
    needs_negatives = ""

    def logit(self, row: Row) -> Tensor:
        return plain_logit(row)

    def log_weights(self, row: Row) -> None:
        return None


@dataclass(frozen=True)
class Margin(Composes):
    """Eq. 5: generalized InfoNCE with an angular margin m1 and a subtractive margin m2 on the positive.

    m1 is in [0, pi], m2 from -1e6 to 1e6. Where theta + m1 > pi the positive is repelled: the paper has no fallback
    for it, and neither has this. `marginlens.rows(...).f` is negative there.
    """

    m1: Number = 0.0
    m2: Number = 0.0
    angular = True
    moves_logit = True

    def __post_init__(self) -> None:
        check_number(self, "m1", ANGLES, _ANGLES, learns=True)
        check_number(self, "m2", SHIFTS, _SHIFTS, learns=True)

    @property
    def idle(self) -> bool:
        return self == Margin()

    @property
    def needs_negatives(self) -> str:
        return "m2" if isinstance(self.m2, Tensor) or self.m2 != 0.0 else ""

    def logit(self, row: Row) -> Tensor:
        return margin_logit(row, self.m1, self.m2)

    def log_weights(self, row: Row) -> None:
        return None


@dataclass(frozen=True)
class Emphasis(Composes):
    """Eqs. 8, 9, 11, Alg. 3: the positive's gradient times s * gamma(theta / pi, c).

    s is from 0 to 1e6; so is the product of all s in a composition. c is from 1e-9 to 1e9, or infinity: no curvature.
    """

    s: Number = 1.0
    c: Number = math.inf
    part: ClassVar[PartName] = "angle"
    moves_logit = False
    needs_negatives = ""

    @property
    def idle(self) -> bool:
        return self == Emphasis()

    def __post_init__(self) -> None:
        check_number(self, "s", SCALES, _SCALES)
        check_number(self, "c", CURVES, _CURVES, endless=True)

    @property
    def angular(self) -> bool:
        return isinstance(self.c, Tensor) or self.c != math.inf

    def logit(self, row: Row) -> Tensor:
        return plain_logit(row)

    def log_weights(self, row: Row) -> LogWeights:
        if not self.angular:
            return LogWeights(positive=log(like(self.s, row.cos)))
        x = (row.theta / math.pi).clamp(max=1.0)
        return LogWeights(positive=log(like(self.s, row.cos)) + log_gamma(x, self.c))


@dataclass(frozen=True)
class Ratio(Composes):
    """Sec. 5.4, Alg. 4: gradients times the ratio of Lemma 4.2 for an angular margin m1.

    The pseudo-code scales the positive's gradient (`scope="positive"`); the text and Theorem 4.1 scale the whole
    row's (`scope="row"`). Which one the paper's tables used is not known. m1 is in [0, pi].
    """

    m1: Number
    scope: Scope = "positive"
    part: ClassVar[PartName] = "ratio"
    angular = True
    moves_logit = False
    needs_negatives = "m1"
    unbounded = True

    def __post_init__(self) -> None:
        check_number(self, "m1", ANGLES, _ANGLES)
        check_choice(self, "scope", get_args(Scope))

    def logit(self, row: Row) -> Tensor:
        return plain_logit(row)

    def log_weights(self, row: Row) -> LogWeights:
        w = log_ratio(row, self.m1)
        return LogWeights(row=w) if self.scope == "row" else LogWeights(positive=w)


@dataclass(frozen=True)
class Attenuation(Composes):
    """Eq. 12, Algs. 5, 6: gradients times 1 / (1 - alpha * q), q the positive's probability without margins.

    alpha is in [0, 1]. Type I scales the whole row's gradient, type II the positive's. At alpha = 1 and beta < 1 the
    weight is unbounded.
    """

    alpha: Number
    kind: Kind = "I"
    angular = False
    moves_logit = False
    needs_negatives = "alpha"
    unbounded = True

    def __post_init__(self) -> None:
        check_number(self, "alpha", SHARES, _SHARES)
        check_choice(self, "kind", get_args(Kind))

    def logit(self, row: Row) -> Tensor:
        return plain_logit(row)

    def log_weights(self, row: Row) -> LogWeights:
        w = -log_one_minus(self.alpha, plain_logit(row) - row.A)
        return LogWeights(row=w) if self.kind == "I" else LogWeights(positive=w)


@dataclass(frozen=True)
class Product(Composes):
    """Eq. 9: effects together. Their weights multiply; the weights multiply the margin's gradient if there is one.

    Every weight is computed from the logits without margins, as the paper defines each.
    """

    factors: tuple[Effect, ...]

    def __post_init__(self) -> None:
        movers = [f for f in self.factors if f.moves_logit]
        if len(movers) > 1:
            raise ValueError(
                f"{' * '.join(map(str, movers))}: both move the positive's logit, and a row has one; "
                f"write one margin(m1=..., m2=...) that says what you want"
            )
        together = 1.0
        for factor in self.factors:
            if isinstance(factor, Emphasis) and (not isinstance(factor.s, Tensor) or readable(factor.s)):
                together = together * as_float(factor.s)
        if together > SCALES[1]:
            raise ValueError(f"{self}: its s multiply to {together:g}; their product must be at most {SCALES[1]:g}")

    @property
    def angular(self) -> bool:
        return any(f.angular for f in self.factors)

    @property
    def moves_logit(self) -> bool:
        return any(f.moves_logit for f in self.factors)

    @property
    def unbounded(self) -> bool:  # type: ignore[override]
        return any(f.unbounded for f in self.factors)

    @property
    def needs_negatives(self) -> str:
        return next((f.needs_negatives for f in self.factors if f.needs_negatives), "")

    def logit(self, row: Row) -> Tensor:
        mover = next((f for f in self.factors if f.moves_logit), self.factors[0])
        return mover.logit(row)

    def log_weights(self, row: Row) -> LogWeights | None:
        weights = [w for f in self.factors if (w := f.log_weights(row)) is not None]
        if not weights:
            return None
        return LogWeights(
            positive=sum((w.positive for w in weights), start=0.0),
            row=sum((w.row for w in weights), start=0.0),
        )

    def __str__(self) -> str:
        return " * ".join(str(f) for f in self.factors)


PLAIN = Plain()
EFFECTS = {cls.__name__.lower(): cls for cls in (Plain, Margin, Emphasis, Ratio, Attenuation)}


def factors(effect: Effect) -> tuple[Effect, ...]:
    """The single effects that an effect is the product of."""
    return effect.factors if isinstance(effect, Product) else (effect,)
