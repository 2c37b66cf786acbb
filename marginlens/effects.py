"""The paper's effects, and the home of its equations.

Each row of a contrastive loss has one positive. Every effect in the paper depends on two numbers of a row: the cosine
`c` of the positive's angle, and the log-sum-exp `A` of the negatives' logits. An effect gives two things for a row:

- the positive's logit, which only `Margin` changes;
- the logarithms of two weights: one for the positive's gradient, one for the gradient of the whole row.

The loss owns the derivative and adds the logarithms. So effects compose by addition, and factors that would overflow
alone cancel first.

A new effect is one class here: a frozen dataclass that inherits from `Composes`, implements `Effect`, and is listed in
`EFFECTS`.
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
"""Allowed ranges, as errors print them."""


class Row(NamedTuple):
    """Everything that an effect may read about the rows of a batch."""

    cos: Tensor
    """c, the cosine of the positive's angle theta, (n,)."""
    sin: Tensor
    """Sine of theta, (n,), accurate near 0 and pi, unlike sqrt(1 - c^2); a single NaN if no effect needs it."""
    A: Tensor
    """Log-sum-exp of the negatives' logits, (n,); -inf if there are no negatives."""
    scale: Tensor
    """1 / tau, of shape ()."""

    @property
    def theta(self) -> Tensor:
        """Eq. 2: the positive's angle in [0, pi], by atan2 because the slope of arccos is infinite at 0 and pi."""
        return torch.atan2(self.sin, self.cos)


class LogWeights(NamedTuple):
    """Logarithms of an effect's two weights."""

    positive: Number = 0.0
    """Weight of the positive's gradient."""
    row: Number = 0.0
    """Weight of the gradient of the whole row: the positive and its negatives."""


class Effect(Protocol):
    """Facts and functions that make a class an effect."""

    @property
    def angular(self) -> bool:
        """True if the effect reads `Row.sin` or `Row.theta`; they are computed only then."""

    @property
    def moves_logit(self) -> bool:
        """True if `logit` differs from the plain one, so that the value of the loss changes too."""

    @property
    def unbounded(self) -> bool:
        """True if the weights have no upper bound for beta < 1."""

    @property
    def part(self) -> PartName:
        """Which part of a gradient its weights are: of the angle alone, the ratio, or an attenuation."""

    @property
    def idle(self) -> bool:
        """True if the effect has parameters and all are at values that change nothing."""

    @property
    def needs_negatives(self) -> str:
        """The parameter that acts through the negatives, or "" if none does."""

    def logit(self, row: Row) -> Tensor:
        """Return the positive's logit, (n,)."""

    def log_weights(self, row: Row) -> LogWeights | None:
        """Return the weights of each row; None if the gradient is the derivative of the value."""

    def __mul__(self, other: Effect) -> Product:
        """Return the product of two effects; see `Composes`."""


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
    """Lemma 4.2, Alg. 4: log of the sum of exponentiated logits without the margin m1, over the sum with it."""
    a, b = plain_logit(row), margin_logit(row, m1, 0.0)
    return logsigmoid(row.A - b) - logsigmoid(row.A - a)


def log_one_minus(weight: Number, x: Tensor) -> Tensor:
    """Return log(1 - weight * sigmoid(x)) for a weight in [0, 1], finite wherever the exact value is."""
    return torch.logaddexp(logsigmoid(-x), log(1.0 - like(weight, x)) + logsigmoid(x))


class Composes:
    """Base of all effects: `a * b` composes them, `str` gives the string form, equal effects hash alike."""

    unbounded = False
    """True if the weights have no upper bound for beta < 1."""
    part: ClassVar[PartName] = "attenuation"
    """Which part of a gradient the weights are, for `marginlens.lens.decompose`."""

    @property
    def idle(self) -> bool:
        """True if the effect has parameters and all are at values that change nothing."""
        return False

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Composes.__hash__  # type: ignore[method-assign]  # or a dataclass would make its own

    def __mul__(self: Effect, other: Effect) -> Product:
        """Return the product of two effects: their weights multiply, and at most one may change the logit."""
        if isinstance(other, str):
            raise TypeError(f"{other!r} is a string; write * marginlens.effect({other!r})")
        if isinstance(other, type) or not hasattr(other, "log_weights"):
            return NotImplemented
        return Product((*factors(self), *factors(other)))

    def __str__(self) -> str:
        """Return the string form, which `marginlens.effect` reads back exactly. Defaults are left out."""
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
        """Return a hash of type and parameters; raise a TypeError for a tensor, because its value may change."""
        values = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        if any(isinstance(value, Tensor) for value in values):
            raise TypeError(f"{self} holds a tensor, whose value may change: it cannot be a key")
        return hash((type(self), values))


@dataclass(frozen=True)
class Plain(Composes):
    """Eq. 3: generalized InfoNCE without any effect; the default of every loss."""

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

    The positive's logit becomes `(cos(theta + m1) - m2) / tau`: the positive must beat the negatives by a margin. This
    changes the value of the loss and its gradient. Both parameters may be 0-d tensors, also ones that learn; a learned
    margin shrinks below 0, so clamp it.

    Where `theta + m1` exceeds pi, the positive is repelled. ArcFace has a fallback there, the paper has none, and
    neither does this class. `marginlens.rows(...).f` is negative for those rows.

    Args:
        m1: Angular margin in radians, from 0 to pi. It is added to the positive's angle.
        m2: Subtractive margin, from -1e6 to 1e6. It is subtracted from the positive's cosine. It acts through the
            negatives, so losses without negatives refuse it.

    Example:
        >>> str(ml.Margin(m1=0.4, m2=0.2))
        'margin(m1=0.4, m2=0.2)'
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
    """Eqs. 8, 9, 11, Alg. 3: multiply the positive's gradient by `s * gamma(theta / pi, c)`.

    `gamma(x, c) = (1 - x^c)^(1/c)` falls from 1 at angle 0 to 0 at angle pi. The negatives' gradients stay as they are.
    The returned value stays that of the plain loss; only the gradient changes.

    Args:
        s: Scale of the positive's gradient, from 0 to 1e6. Above 1, positives pull harder than the loss asks. The paper
            uses 20 to 40 for MoCo v3 and 1.06 to 1.13 for SimCLR, both without a curvature. In a product of effects,
            the product of all s is at most 1e6.
        c: Curvature, from 1e-9 to 1e9, or infinity. Infinity, the default, weighs all angles alike. At 1 the weight
            falls on a straight line. A larger c keeps the weight near 1 up to larger angles; a smaller c lowers it
            sooner. The paper uses 0.7 to 2.5 for MoCo v3, and 1 to 5 for BYOL.

    Example:
        >>> str(ml.Emphasis(s=20) * ml.Ratio(m1=0.4))
        'emphasis(s=20) * ratio(m1=0.4)'
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
    """Sec. 5.4, Alg. 4: multiply gradients by the ratio of Lemma 4.2 for an angular margin m1.

    The ratio is `(e^a + e^A) / (e^b + e^A)`, where `a` is the positive's logit without the margin and `b` the logit
    with it. A margin multiplies the gradient by two factors (Theorem 4.1): an angular one, and this ratio. The returned
    value stays that of the plain loss.

    Args:
        m1: Angular margin in radians, from 0 to pi. At 0 the ratio is 1.
        scope: "positive" multiplies the positive's gradient, as the paper's pseudo-code does. "row" multiplies the
            negatives' gradients too, as the paper's text and Theorem 4.1 do. The paper does not say which one its
            tables used.

    Example:
        >>> str(ml.Ratio(m1=0.4, scope="row"))
        'ratio(m1=0.4, scope=row)'
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
    """Eq. 12, Algs. 5, 6: multiply gradients by `1 / (1 - alpha * q)`, q the positive's probability without margins.

    InfoNCE's gradient fades as a row becomes easy, because q goes to 1; this effect takes part of that fading away. At
    `alpha=1` with type I and beta = 1 the gradient is that of decoupled contrastive learning (DCL). For beta < 1 the
    weight at `alpha=1` has no upper bound. The returned value stays that of the plain loss.

    Args:
        alpha: Strength, from 0 to 1. 0 changes nothing; 1 removes the fading completely.
        kind: "I" multiplies the gradients of the positive and the negatives, "II" the positive's alone.

    Example:
        >>> str(ml.Attenuation(alpha=1))
        'attenuation(alpha=1)'
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
    """Eq. 9: several effects at once, as `a * b` makes them.

    Weights multiply. If one factor is a margin, the weights multiply its gradient. Every weight is computed from the
    logits without margins, as the paper defines it.

    Args:
        factors: The single effects, at most one of which changes the logit.
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
    """Return the single effects of a product, or the effect itself in a tuple."""
    return effect.factors if isinstance(effect, Product) else (effect,)
