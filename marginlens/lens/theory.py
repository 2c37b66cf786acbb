"""The paper's gradient analysis: Theorem 4.1, Lemmas 4.2 to 4.4, and the maps of its figures.

A row is described as in the figures: by the positive's angle `theta` in radians, and by its probability `q` without
margins (the paper's q with a tilde). Both may be numbers, which are computed in float64, or tensors, which broadcast.
Gradients have the paper's sign: they are taken with respect to theta, so the gradient of a positive is at least 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from marginlens.checks import EffectLike, as_effect
from marginlens.effects import LogWeights, Row
from marginlens.parameters import Number


def gradient(theta: Number, q: Number, p: float = 1.0, tau: float = 0.25, beta: float = 1.0) -> Tensor:
    """Fig. 1, Eq. 3: the gradient `(p - beta q) sin(theta) / tau` of the loss without margins.

    Args:
        theta: Angle in radians.
        q: Probability, without margins.
        p: Target: 1 for the positive, 0 for a negative.
        tau: Temperature.
        beta: Weight of the denominator.
    """
    return (p - beta * _tensor(q)) * _tensor(theta).sin() / tau


def angular_factor(theta: Number, m1: Number) -> Tensor:
    """Theorem 4.1, Eq. 6, first factor: `sin(theta + m1) / sin(theta)`, which acts on the positive alone."""
    theta = _tensor(theta)
    return (theta + m1).sin() / theta.sin()


def eta(theta: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Lemma 4.3's proof: `exp((cos(theta + m1) - cos(theta) - m2) / tau)`, the factor that margins put on e^logit."""
    return _log_eta(theta, m1, m2, tau).exp()


def probability(theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Eq. 4: the positive's probability with margins, computed from q, the one without."""
    return torch.sigmoid(torch.logit(_tensor(q)) + _log_eta(theta, m1, m2, tau))


def ratio(
    theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25, beta: float = 1.0, p: float = 1.0
) -> Tensor:
    """Theorem 4.1, Eq. 6, second factor: `(p - beta q) / (p - beta q~)`, q with margins and q~ without.

    For a negative (p = 0) the factor is the same for every negative, and beta cancels.

    Args:
        theta: The positive's angle in radians.
        q: The positive's probability without margins, the q~ of the formula.
        m1: Angular margin in radians.
        m2: Subtractive margin.
        tau: Temperature.
        beta: Weight of the denominator.
        p: Target: 1 for the positive, 0 for a negative.
    """
    if p == 0.0:
        return sum_ratio(theta, q, m1, m2, tau)
    q = _tensor(q)
    moved = torch.logit(q) + _log_eta(theta, m1, m2, tau)
    return _remainder(p, beta, torch.sigmoid(moved), torch.sigmoid(-moved)) / _remainder(p, beta, q, 1.0 - q)


def sum_ratio(theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Lemma 4.2: the sum of exponentiated logits without margins, over the sum with margins."""
    q = _tensor(q)
    with_margins = torch.logaddexp(torch.log1p(-q), q.log() + _log_eta(theta, m1, m2, tau))
    return torch.exp(-with_margins)


def attenuation(theta: Number, q: Number, m1: Number, m2: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.3, Eq. 7: `1 / (1 - alpha q)`, the factor of a margin on the whole row; alpha is `attenuation_alpha`.

    If 1 - alpha overflows, the result is the limit 0; at q = 0 it is 1.
    """
    q = _tensor(q)
    return torch.where(q == 0.0, 1.0, 1.0 / (1.0 - attenuation_alpha(theta, m1, m2, tau) * q))


def attenuation_alpha(theta: Number, m1: Number, m2: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.3: each row's alpha at which attenuation I equals the margins' ratio; it may be negative."""
    return 1.0 - eta(theta, m1, m2, tau)


def margin_gradient(
    theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25, beta: float = 1.0
) -> Tensor:
    """Theorem 4.1, Eq. 6: the positive's gradient with margins: the plain gradient times both factors."""
    factors = angular_factor(theta, m1) * ratio(theta, q, m1, m2, tau, beta)
    return gradient(theta, q, 1.0, tau, beta) * factors


def limit_gradient(theta: Number, m1: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.4: the limit `sin(theta + m1) / tau` of the positive's gradient as m2 goes to infinity, at beta = 1."""
    return (_tensor(theta) + m1).sin() / tau


def peak_angle(m1: Number) -> Tensor:
    """Sec. 4.1: the angle `(pi - m1) / 2` at which the ratio is largest, for any q and tau."""
    return (math.pi - _tensor(m1)) / 2.0


def emphasised_share(m1: Number) -> Tensor:
    """Appendix B: the share `1 - m1 / (2 pi)` of angles at which the ratio exceeds 1; it shrinks as m1 grows."""
    return 1.0 - _tensor(m1) / (2.0 * math.pi)


class Multipliers(NamedTuple):
    """Factors by which an effect multiplies the plain gradients with respect to theta."""

    positive: Tensor
    """Factor of the positive's gradient."""
    negative: Tensor
    """Factor of each negative's gradient."""


def multipliers(effect: EffectLike, theta: Number, q: Number, tau: float = 0.25, beta: float = 1.0) -> Multipliers:
    """Theorem 4.1 for any effect: its factors on the gradients of a row at (theta, q), from the code that trains.

    Args:
        effect: An effect, or its string form.
        theta: The positive's angle in radians.
        q: The positive's probability without margins.
        tau: Temperature.
        beta: Weight of the denominator.

    Example:
        >>> from marginlens.lens import theory
        >>> theory.multipliers("emphasis(s=20)", 1.0, 0.5).positive.round()
        tensor(20., dtype=torch.float64)
    """
    effect = as_effect(effect)
    angle, plain_q = (x.contiguous() for x in torch.broadcast_tensors(_tensor(theta), _tensor(q)))
    scale = torch.tensor(1.0 / tau, dtype=angle.dtype)
    row = Row(angle.cos(), angle.sin(), scale * angle.cos() - torch.logit(plain_q), scale)
    w = effect.log_weights(row) or LogWeights()
    positive, negative = (torch.zeros_like(angle) + x for x in (w.positive + w.row, w.row))
    if not effect.moves_logit:
        return Multipliers(positive.exp(), negative.exp())
    b = effect.logit(row)
    turn = torch.func.jvp(
        lambda x: effect.logit(row._replace(cos=x.cos(), sin=x.sin())), (angle,), (torch.ones_like(angle),)
    )[1]
    rest = _remainder(1.0, beta, torch.sigmoid(b - row.A), torch.sigmoid(row.A - b))
    moved = -turn * rest / gradient(angle, plain_q, 1.0, tau, beta)
    return Multipliers(
        positive=moved * positive.exp(), negative=torch.sigmoid(row.A - b) / (1.0 - plain_q) * negative.exp()
    )


class Map(NamedTuple):
    """Values of a figure on a grid."""

    theta: Tensor
    """Angles in radians, (steps, 1)."""
    q: Tensor
    """Probabilities without margins, (1, steps)."""
    value: Tensor
    """Values, (steps, steps)."""


def figure_1(tau: float = 0.25, beta: float = 1.0, steps: int = 101) -> tuple[Map, Map]:
    """Fig. 1: magnitudes of the plain gradient of a positive, and of a negative, by angle and probability."""
    theta, q = _grid(steps)
    positive = gradient(theta, q, 1.0, tau, beta).abs()
    negative = gradient(theta, q, 0.0, tau, beta).abs()
    return Map(theta, q, positive), Map(theta, q, negative)


def figure_2(m1: float = 0.4, tau: float = 0.25, beta: float = 1.0, steps: int = 101) -> tuple[Map, Map]:
    """Fig. 2: both factors of Theorem 4.1: the first acts on positives alone, the second on the whole row."""
    theta, q = _grid(steps)
    left = angular_factor(theta, m1).expand(steps, steps)
    return Map(theta, q, left), Map(theta, q, ratio(theta, q, m1, 0.0, tau, beta))


def figure_ratio(m1: float, tau: float = 0.25, steps: int = 101) -> Map:
    """Appendix B's figure: the ratio of Lemma 4.2, by the positive's angle and probability."""
    theta, q = _grid(steps)
    return Map(theta, q, sum_ratio(theta, q, m1, 0.0, tau))


def _grid(steps: int) -> tuple[Tensor, Tensor]:
    """Return cell centres of (0, pi) x (0, 1), because the factors are singular on the border."""
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    centres = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    return math.pi * centres[:, None], centres[None, :]


def _remainder(p: float, beta: float, q: Tensor, rest: Tensor) -> Tensor:
    """Return p - beta * q; `rest` is 1 - q, which keeps the digits where q is close to 1."""
    return torch.where(q > 0.5, (p - beta) + beta * rest, p - beta * q)


def _log_eta(theta: Number, m1: Number, m2: Number, tau: float) -> Tensor:
    theta = _tensor(theta)
    return ((theta + m1).cos() - theta.cos() - m2) / tau


def _tensor(x: Number) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
