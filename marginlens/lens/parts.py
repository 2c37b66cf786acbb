"""A row's gradient, taken apart: Theorem 4.1 for any effect, on the rows that a loss saw.

An effect multiplies the plain gradient of a row. `decompose` splits that factor into the paper's four parts, each a
pair: on the positive, and on the negatives.

| part | on the positive | on the negatives |
|---|---|---|
| emphasis | the part that depends on the angle alone, at the median angle of the rows | 1 |
| curvature | the same over its value at the median angle | 1 |
| ratio | (1 - beta q1) / (1 - beta q~), q1 with m1 alone; or the weight of `Ratio` | (1 - q1) / (1 - q~) |
| attenuation | (1 - beta q) / (1 - beta q1); or the weight of `Attenuation` | (1 - q) / (1 - q1) |

Two conventions are in there. For a margin the part that depends on the angle alone is f = sin(theta + m1) / sin(theta);
the paper leaves open how f splits, and we split it at the median. At beta = 1 ratio and attenuation of a margin are one
factor (Lemma 4.3); we call m1's share the ratio and m2's the attenuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marginlens.checks import EffectLike, as_effect
from marginlens.effects import Effect, LogWeights, Margin, Row, factors, log_one_minus, plain_logit
from marginlens.loss import Rows, slope
from marginlens.parameters import SCALES, SHIFTS


class Part(NamedTuple):
    """The factors of a part on gradients, (n,) each, as logarithms so that nothing overflows."""

    log_positive: Tensor
    """Logarithm of the size of the factor on the positive's gradient."""
    log_negative: Tensor
    """Logarithm of the factor on each negative's gradient."""
    sign: Tensor
    """-1 where the positive is repelled, else 1."""

    @property
    def positive(self) -> Tensor:
        """The factor on the positive's gradient, (n,)."""
        return self.sign * self.log_positive.exp()

    @property
    def negative(self) -> Tensor:
        """The factor on each negative's gradient, (n,)."""
        return self.log_negative.exp()


class Parts(NamedTuple):
    """The four parts of an effect on given rows. Their product is the effect's gradient over the plain one."""

    emphasis: Part
    curvature: Part
    ratio: Part
    attenuation: Part

    @property
    def product(self) -> Part:
        """All four together: how the effect multiplies the plain gradient."""
        logs = (sum(part[i] for part in self) for i in (0, 1))
        positive, negative = (torch.as_tensor(x) for x in logs)
        return Part(positive, negative, self.emphasis.sign * self.curvature.sign)


class Gradient(NamedTuple):
    """A row's gradient, (n,) each."""

    positive: Tensor
    """dL/dc, with respect to the positive's cosine."""
    negative: Tensor
    """dL/dA, with respect to the negatives' log-sum-exp."""


class Equivalent(NamedTuple):
    """Simple settings with the same mean weight on the positives of given rows; None where there is no such setting."""

    weight: float
    """The mean weight on the positives."""
    s: float | None
    """Of `Emphasis(s)`."""
    m2: float | None
    """Of `Margin(m2)`."""
    tau: float | None
    """The temperature of the plain loss nearest to the rows' own; None also where `cosines` is not given."""


def plain_gradient(rows: Rows) -> Gradient:
    """Eq. 3: the gradient of the loss without an effect on the same rows."""
    row, beta = row_of(rows)
    log_positive, log_negative = plain_logs(row, beta)
    return Gradient(-log_positive.exp(), log_negative.exp())


def gradient(effect: EffectLike, rows: Rows) -> Gradient:
    """Eq. 9: the gradient that an effect declares on given rows, whichever effect they were made with."""
    effect, (row, beta) = as_effect(effect), row_of(rows)
    check_negatives(effect, rows)
    part = multiplier(effect, row, beta)
    log_positive, log_negative = plain_logs(row, beta)
    return Gradient(
        -part.sign * (log_positive + part.log_positive).exp(),
        torch.where(row.A.isneginf(), 0.0, (log_negative + part.log_negative).exp()),
    )


def multiplier(effect: Effect, row: Row, beta: Tensor) -> Part:
    """Theorem 4.1: how an effect multiplies the plain gradient of each row, all parts together."""
    w = effect.log_weights(row) or LogWeights()
    zeros = torch.zeros_like(row.cos)
    log_positive, log_negative, sign = zeros + w.positive + w.row, zeros + w.row, zeros + 1.0
    if effect.moves_logit:
        f = slope(row, effect)
        a, b = plain_logit(row), effect.logit(row)
        log_positive = log_positive + f.abs().log() + _rest(b, row, beta) - _rest(a, row, beta)
        log_negative = log_negative + _negatives(b, row) - _negatives(a, row)
        sign = _sign(f)
    return Part(log_positive, log_negative, sign)


def decompose(effect: EffectLike, rows: Rows) -> Parts:
    """Split an effect's gradient on given rows into emphasis, curvature over the angle, ratio and attenuation.

    The rows may have been made with any effect: `marginlens.rows(q, k)` gives them. The product of the four parts is
    the effect's gradient over the plain one.
    """
    effect, (row, beta) = as_effect(effect), row_of(rows)
    check_negatives(effect, rows)
    middle = row.theta.median()
    at = row._replace(cos=middle.cos().expand_as(row.cos), sin=middle.sin().expand_as(row.cos))
    zeros, ones = torch.zeros_like(row.cos), torch.ones_like(row.cos)
    logs = {name: [zeros, zeros] for name in ("angle", "ratio", "attenuation")}
    angle_at_middle, signs = zeros, (ones, ones)
    for factor in factors(effect):
        w = factor.log_weights(row) or LogWeights()
        logs[factor.part][0] = logs[factor.part][0] + w.positive + w.row
        logs[factor.part][1] = logs[factor.part][1] + w.row
        if factor.part == "angle":
            angle_at_middle = angle_at_middle + (factor.log_weights(at) or LogWeights()).positive
        if factor.moves_logit:
            f, f_at_middle = slope(row, factor), slope(at, factor)
            logs["angle"][0] = logs["angle"][0] + f.abs().log()
            angle_at_middle = angle_at_middle + f_at_middle.abs().log()
            signs = _sign(f_at_middle), _sign(f) * _sign(f_at_middle)
            turned = replace(factor, m2=0.0) if isinstance(factor, Margin) else factor
            a, b1, b = plain_logit(row), turned.logit(row), factor.logit(row)
            for name, high, low in (("ratio", b1, a), ("attenuation", b, b1)):
                logs[name][0] = logs[name][0] + _rest(high, row, beta) - _rest(low, row, beta)
                logs[name][1] = logs[name][1] + _negatives(high, row) - _negatives(low, row)
    curve = logs["angle"][0] - angle_at_middle
    if bool(angle_at_middle.isneginf().all()):  # because a factor of 0 cannot be divided by: s = 0, or theta + m1 = pi
        never = bool(logs["angle"][0].isneginf().all())
        angle_at_middle, curve = (angle_at_middle, zeros) if never else (zeros, logs["angle"][0])
    return Parts(
        emphasis=Part(angle_at_middle + zeros, zeros, signs[0]),
        curvature=Part(curve, zeros, signs[1]),
        ratio=Part(logs["ratio"][0], logs["ratio"][1], ones),
        attenuation=Part(logs["attenuation"][0], logs["attenuation"][1], ones),
    )


def equivalent(effect: EffectLike, rows: Rows, cosines: Tensor | None = None) -> Equivalent:
    """Return the s, the m2 and the temperature that give the same mean weight on the positives of given rows.

    Answers which s is like a margin. `cosines` (n, m) are those of each row's negatives; only the temperature needs
    them. The weight of a temperature is its plain gradient dL/dc over that at the rows' own temperature.
    """
    effect, (row, beta) = as_effect(effect), row_of(rows)
    check_negatives(effect, rows)
    weight = float(multiplier(effect, row, beta).positive.mean())
    if not math.isfinite(weight):
        raise ValueError(f"{effect} has the mean weight {weight} on these rows; no other setting has the same")
    s = weight if SCALES[0] <= weight <= SCALES[1] else None
    return Equivalent(weight, s, _shift(weight, row, beta), _tau(weight, rows, cosines))


def check_negatives(effect: Effect, rows: Rows) -> None:
    """Raise if an effect acts through negatives and the rows have none, or if the rows are not finite."""
    bad = int((~rows.c.isfinite() | rows.A.isnan()).sum())
    if bad or not len(rows.c):
        raise ValueError(f"{bad} of {len(rows.c)} rows are not finite; look at rows(..., check=True)")
    if effect.needs_negatives and bool(rows.A.isneginf().any()):
        raise ValueError(f"{effect}: {effect.needs_negatives} acts through negatives, and these rows have none")


def row_of(rows: Rows) -> tuple[Row, Tensor]:
    """Return the rows as an effect knows them, in float64, and each row's beta.

    A sine is at least the resolution of the rows' own type, as in the loss: at 0 and pi it would be a rounding error,
    negative or far too small to divide by.
    """
    c, theta, A, tau, beta = (x.double() for x in (rows.c, rows.theta, rows.A, rows.tau, rows.beta))
    return Row(c, theta.sin().clamp(min=torch.finfo(rows.theta.dtype).eps), A, 1.0 / tau), beta


def plain_logs(row: Row, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return log |dL/dc| and log dL/dA of the plain loss."""
    a = plain_logit(row)
    return _rest(a, row, beta) + row.scale.log(), beta.log() + _negatives(a, row)


def _rest(logit: Tensor, row: Row, beta: Tensor) -> Tensor:
    """Return log(1 - beta q) of the positive's logit."""
    return log_one_minus(beta, logit - row.A)


def _negatives(logit: Tensor, row: Row) -> Tensor:
    """Return log(1 - q), the share of the negatives; 0 where there are none, because nothing is then multiplied."""
    return torch.where(row.A.isneginf(), 0.0, logsigmoid(row.A - logit))


def _sign(f: Tensor) -> Tensor:
    """Return 1 or -1."""
    return torch.where(f < 0.0, -1.0, torch.ones_like(f))


def _shift(weight: float, row: Row, beta: Tensor) -> float | None:
    """Return the m2 whose mean weight on the positives is this, by bisection; it grows with m2."""
    most = min(1e3 / float(row.scale.min()), SHIFTS[1])

    def mean(m2: float) -> float:
        return float(multiplier(Margin(m2=m2), row, beta).positive.mean())

    if bool((beta == 0.0).all()) or not mean(-most) < weight < mean(most):
        return 0.0 if weight == 1.0 else None
    return _root(mean, weight, -most, most)


def _tau(weight: float, rows: Rows, cosines: Tensor | None) -> float | None:
    """Return the temperature nearest to the rows' own whose plain gradient on positives has this mean weight."""
    if cosines is None or not len(cosines):
        return None
    if cosines.shape[:1] != rows.c.shape or cosines.dim() != 2:
        shape = tuple(cosines.shape)
        raise ValueError(f"cosines has shape {shape}; it must be ({len(rows.c)}, m), the negatives of each row")
    (row, beta), near = row_of(rows), cosines.double()
    own, here = float(1.0 / row.scale[0]), plain_logs(row, beta)[0]

    def mean(tau: float) -> float:
        other = Row(row.cos, row.sin, torch.logsumexp(near / tau, 1), torch.full_like(row.scale, 1.0 / tau))
        return float((plain_logs(other, beta)[0] - here).exp().mean())

    steps = [own * 2.0 ** (i / 8) for i in range(65)]
    for low, high in pairwise(steps):
        for first, second in ((low, high), (own * own / high, own * own / low)):
            if (mean(first) - weight) * (mean(second) - weight) <= 0.0:
                return _root(mean, weight, first, second)
    return None


def _root(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Return where a continuous function takes a value, to the last bits."""
    rising = function(low) <= function(high)
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if (function(middle) < value) == rising else (low, middle)
    return (low + high) / 2.0
