"""The paper's gradient analysis: Theorem 4.1, Lemmas 4.2 to 4.4, and the maps of its figures.

A row is described as in the figures: by the positive's angle `theta` and its probability `q` without margins (the
paper's q with a tilde). Functions are vectorised and broadcast; numbers are taken too, and computed in float64. Signs
are the paper's: gradients are with respect to theta, so that of a positive is >= 0.
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
    """Fig. 1, Eq. 3: the gradient (p - beta q) sin(theta) / tau of the loss without margins; p = 0 for a negative."""
    return (p - beta * _tensor(q)) * _tensor(theta).sin() / tau


def angular_factor(theta: Number, m1: Number) -> Tensor:
    """Theorem 4.1, Eq. 6, first factor: sin(theta + m1) / sin(theta), on the positive alone."""
    theta = _tensor(theta)
    return (theta + m1).sin() / theta.sin()


def eta(theta: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Lemma 4.3's proof: exp((cos(theta + m1) - cos(theta) - m2) / tau), what margins multiply e^logit by."""
    return _log_eta(theta, m1, m2, tau).exp()


def probability(theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Eq. 4: the positive's probability with margins, from that without."""
    return torch.sigmoid(torch.logit(_tensor(q)) + _log_eta(theta, m1, m2, tau))


def ratio(
    theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25, beta: float = 1.0, p: float = 1.0
) -> Tensor:
    """Theorem 4.1, Eq. 6, second factor: (p - beta q) / (p - beta q~), q with margins and q~ without.

    For a negative (p = 0) the ratio of its probabilities is the same whichever negative it is, and beta cancels.
    """
    if p == 0.0:
        return sum_ratio(theta, q, m1, m2, tau)
    q = _tensor(q)
    moved = torch.logit(q) + _log_eta(theta, m1, m2, tau)
    return _remainder(p, beta, torch.sigmoid(moved), torch.sigmoid(-moved)) / _remainder(p, beta, q, 1.0 - q)


def sum_ratio(theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25) -> Tensor:
    """Lemma 4.2: the sum of exponentiated logits without margins over that with them."""
    q = _tensor(q)
    with_margins = torch.logaddexp(torch.log1p(-q), q.log() + _log_eta(theta, m1, m2, tau))
    return torch.exp(-with_margins)


def attenuation(theta: Number, q: Number, m1: Number, m2: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.3, Eq. 7: 1 / (1 - alpha q), the factor on the whole row that m2 brings; alpha of `attenuation_alpha`.

    Where 1 - alpha overflows, its limit 0 is reached, but at q = 0, where the factor is 1.
    """
    q = _tensor(q)
    return torch.where(q == 0.0, 1.0, 1.0 / (1.0 - attenuation_alpha(theta, m1, m2, tau) * q))


def attenuation_alpha(theta: Number, m1: Number, m2: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.3: the alpha, one per row, at which attenuation I does what the margins' ratio does; may be negative."""
    return 1.0 - eta(theta, m1, m2, tau)


def margin_gradient(
    theta: Number, q: Number, m1: Number, m2: Number = 0.0, tau: float = 0.25, beta: float = 1.0
) -> Tensor:
    """Theorem 4.1, Eq. 6: the positive's gradient with margins, as the plain one times both factors."""
    factors = angular_factor(theta, m1) * ratio(theta, q, m1, m2, tau, beta)
    return gradient(theta, q, 1.0, tau, beta) * factors


def limit_gradient(theta: Number, m1: Number, tau: float = 0.25) -> Tensor:
    """Lemma 4.4: the positive's gradient sin(theta + m1) / tau as m2 goes to infinity, at beta = 1."""
    return (_tensor(theta) + m1).sin() / tau


def peak_angle(m1: Number) -> Tensor:
    """Sec. 4.1: the angle (pi - m1) / 2 at which the ratio is largest, whatever q and tau."""
    return (math.pi - _tensor(m1)) / 2.0


def emphasised_share(m1: Number) -> Tensor:
    """Appendix B: the share of angles at which the ratio exceeds 1, which is 1 - m1 / (2 pi): it shrinks with m1."""
    return 1.0 - _tensor(m1) / (2.0 * math.pi)


class Multipliers(NamedTuple):
    """What an effect multiplies the plain gradient by, with respect to theta."""

    positive: Tensor
    negative: Tensor


def multipliers(effect: EffectLike, theta: Number, q: Number, tau: float = 0.25, beta: float = 1.0) -> Multipliers:
    """Theorem 4.1 for any effect, computed by the code that trains: what it makes of a row at (theta, q)."""
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
    """A figure's values over a grid: theta (steps, 1), q (1, steps), value (steps, steps)."""

    theta: Tensor
    q: Tensor
    value: Tensor


def figure_1(tau: float = 0.25, beta: float = 1.0, steps: int = 101) -> tuple[Map, Map]:
    """Fig. 1: magnitudes of the plain gradient, of a positive and of a negative at angle theta and probability q."""
    theta, q = _grid(steps)
    positive = gradient(theta, q, 1.0, tau, beta).abs()
    negative = gradient(theta, q, 0.0, tau, beta).abs()
    return Map(theta, q, positive), Map(theta, q, negative)


def figure_2(m1: float = 0.4, tau: float = 0.25, beta: float = 1.0, steps: int = 101) -> tuple[Map, Map]:
    """Fig. 2: both factors of Theorem 4.1; the first acts on positives alone, the second on the whole row."""
    theta, q = _grid(steps)
    left = angular_factor(theta, m1).expand(steps, steps)
    return Map(theta, q, left), Map(theta, q, ratio(theta, q, m1, 0.0, tau, beta))


def figure_ratio(m1: float, tau: float = 0.25, steps: int = 101) -> Map:
    """Appendix B's figure: the ratio of Lemma 4.2 over the positive's angle and probability."""
    theta, q = _grid(steps)
    return Map(theta, q, sum_ratio(theta, q, m1, 0.0, tau))


def _grid(steps: int) -> tuple[Tensor, Tensor]:
    """Cell centres of (0, pi) x (0, 1): the factors are singular on the border."""
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
