"""The same algorithms in 150-digit arithmetic, with the chain rule written out.

The oracle where float64 is not enough.
"""

import mpmath as mp

from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio
from marginlens.effects import Product

mp.mp.dps = 150


def _dot(a, b):
    return mp.fsum(x * y for x, y in zip(a, b, strict=True))


def _weights(effect, cos, theta, positive, tau):
    """What an effect multiplies the gradient of each logit by (Algs. 3-6)."""
    n = len(cos)
    only = [mp.mpf(j == positive) for j in range(n)]
    plain = [mp.exp(c / tau) for c in cos]
    if isinstance(effect, Emphasis):
        x, c = theta[positive] / mp.pi, mp.mpf(effect.c)
        gamma = mp.mpf(1) if mp.isinf(c) else abs((1 - x**c) ** (1 / c))
        return [1 + p * (effect.s * gamma - 1) for p in only]
    if isinstance(effect, Ratio):
        moved = list(plain)
        moved[positive] = mp.exp(mp.cos(theta[positive] + effect.m1) / tau)
        ratio = mp.fsum(plain) / mp.fsum(moved)
        return [ratio if effect.scope == "row" else 1 + p * (ratio - 1) for p in only]
    if isinstance(effect, Attenuation):
        w = 1 / (1 - mp.mpf(effect.alpha) * plain[positive] / mp.fsum(plain))
        return [w if effect.kind == "I" else 1 + p * (w - 1) for p in only]
    if not isinstance(effect, Plain | Margin):
        raise NotImplementedError(f"no oracle for {effect}: write here what it multiplies gradients by")
    return [mp.mpf(1)] * n


def row(cos, positive, tau, beta, effect):
    """A row's value, and its gradient with respect to each cosine."""
    factors = effect.factors if isinstance(effect, Product) else (effect,)
    margin = next((f for f in factors if isinstance(f, Margin)), Margin())
    theta = [mp.acos(c) for c in cos]
    logits = [c / tau for c in cos]
    slope = [1 / tau] * len(cos)
    logits[positive] = (mp.cos(theta[positive] + margin.m1) - margin.m2) / tau
    slope[positive] = mp.sin(theta[positive] + margin.m1) / mp.sin(theta[positive]) / tau
    total = mp.fsum(mp.exp(x) for x in logits)
    weight = [mp.mpf(1)] * len(cos)
    for factor in factors:
        weight = [a * b for a, b in zip(weight, _weights(factor, cos, theta, positive, tau), strict=True)]
    value = -logits[positive] + beta * mp.log(total)
    grads = [
        (beta * mp.exp(x) / total - (j == positive)) * w * f
        for j, (x, w, f) in enumerate(zip(logits, weight, slope, strict=True))
    ]
    return value, grads


def gradients(left, right, pairs, tau, beta, effect):
    """The mean loss and its gradients with respect to `left` and `right`, lists of vectors.

    `pairs[i]` is (columns of `right` that row i sees, position of the positive among them).
    """
    tau, beta = mp.mpf(tau), mp.mpf(beta)
    left, right = ([[mp.mpf(x) for x in v] for v in vs] for vs in (left, right))
    norms = [[mp.sqrt(_dot(v, v)) for v in vs] for vs in (left, right)]
    dl, dr = ([[mp.mpf(0)] * len(v) for v in vs] for vs in (left, right))
    mean = mp.mpf(0)
    n = len(pairs)
    for i, (columns, positive) in enumerate(pairs):
        u = [x / norms[0][i] for x in left[i]]
        vs = [[x / norms[1][j] for x in right[j]] for j in columns]
        cos = [_dot(u, v) for v in vs]
        value, grads = row(cos, positive, tau, beta, effect)
        mean += value / n
        for j, v, c, g in zip(columns, vs, cos, grads, strict=True):
            for d in range(len(u)):
                dl[i][d] += g * (v[d] - c * u[d]) / norms[0][i] / n
                dr[j][d] += g * (u[d] - c * v[d]) / norms[1][j] / n
    return mean, dl, dr
