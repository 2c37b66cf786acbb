"""A literal transcription of the paper's Algorithms 1-6, differentiated by autograd.

Two things are added: `keepdim` where the pseudo-code reduces over the last axis, and a guard where it divides 0 by 0.
`stop_gradient` is `detach`. Composition follows Eq. 9: every algorithm's scales multiply, and act on the logits of
Alg. 2 if there is a margin.
"""

import math

import torch

from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio
from marginlens.effects import Product


def alg1(theta, tau):
    return theta.cos() / tau


def alg2(theta, tau, p, m1, m2):
    return ((theta + p * m1).cos() - p * m2) / tau


def alg3_scales(theta, s, c):
    if math.isinf(c):
        return torch.full_like(theta, s)
    return s * (1 - (theta / math.pi) ** c) ** (1 / c)


def alg4_ratio(theta, tau, p, m1):
    logits = theta.cos() / tau
    new_logits = (theta + p * m1).cos() / tau
    return logits.exp().sum(-1, keepdim=True) / new_logits.exp().sum(-1, keepdim=True)


def alg5_scales(theta, tau, p, alpha):
    q = torch.softmax(theta.cos() / tau, dim=-1)
    return torch.where(p > 0, p / (p - alpha * q), 0.0).sum(-1, keepdim=True)


def alg6_scales(theta, tau, p, alpha):
    q = torch.softmax(theta.cos() / tau, dim=-1)
    return torch.where(p > 0, 1 / (p - alpha * q), 1.0)


def scales(effect, theta, tau, p):
    """What the effect multiplies each logit's gradient by, (n, m)."""
    ones = torch.ones_like(theta)
    if isinstance(effect, Emphasis):
        return (1 - p) + p * alg3_scales(theta, effect.s, effect.c)
    if isinstance(effect, Ratio):
        ratio = alg4_ratio(theta, tau, p, effect.m1) * ones
        return ratio if effect.scope == "row" else (1 - p) + p * ratio
    if isinstance(effect, Attenuation):
        if effect.kind == "I":
            return alg5_scales(theta, tau, p, effect.alpha) * ones
        return (1 - p) + p * alg6_scales(theta, tau, p, effect.alpha)
    if not isinstance(effect, Plain | Margin):
        raise NotImplementedError(f"no oracle for {effect}: write here what it multiplies gradients by")
    return ones


def loss(theta, p, tau, beta, effect):
    """Eq. 5's right-hand side per row, over the logits of the algorithms: theta and p are (n, m)."""
    factors = effect.factors if isinstance(effect, Product) else (effect,)
    margin = next((f for f in factors if isinstance(f, Margin)), None)
    logits = alg2(theta, tau, p, margin.m1, margin.m2) if margin else alg1(theta, tau)
    weight = torch.ones_like(theta)
    for factor in factors:
        weight = weight * scales(factor, theta, tau, p).detach()
    logits = (1 - weight) * logits.detach() + weight * logits
    return -(p * logits).sum(-1) + beta * (p * logits.logsumexp(-1, keepdim=True)).sum(-1)


def cosines(a, b):
    return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T


def info_nce(q, k, tau, beta, effect, positives=None, queue=None):
    keys = k if queue is None else torch.cat([k, queue])
    index = torch.arange(len(q)) if positives is None else positives
    p = torch.nn.functional.one_hot(index, len(keys)).to(q.dtype)
    return loss(cosines(q, keys).arccos(), p, tau, beta, effect).mean()


def nt_xent(z1, z2, tau, beta, effect):
    z = torch.cat([z1, z2])
    n = len(z)
    others = torch.stack([torch.cat([torch.arange(i), torch.arange(i + 1, n)]) for i in range(n)])
    partner = torch.arange(n).roll(n // 2)
    p = (others == partner[:, None]).to(z.dtype)
    return loss(cosines(z, z).gather(1, others).arccos(), p, tau, beta, effect).mean()


def positive_only(p, z, tau, effect):
    cos = (torch.nn.functional.normalize(p, dim=-1) * torch.nn.functional.normalize(z, dim=-1)).sum(-1, keepdim=True)
    return loss(cos.arccos(), torch.ones_like(cos), tau, 0.0, effect).mean()
