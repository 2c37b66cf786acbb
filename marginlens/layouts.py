"""From embeddings to rows: who is whose positive, and who is a negative. A new layout is one function here."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from marginlens import checks
from marginlens.autodiff import full_precision
from marginlens.checks import EffectLike
from marginlens.effects import Effect, Row
from marginlens.kernels import neg_lse
from marginlens.parameters import Number


class Settings(NamedTuple):
    """A loss's arguments, checked, and what of a row they call for: sines of angles, negatives."""

    tau: Number
    beta: float
    effect: Effect
    impl: str
    check: bool
    sines: bool
    negatives: bool


def settings(
    tau: Number,
    beta: float,
    effect: EffectLike,
    reduction: str,
    impl: str,
    check: bool,
    every_row_fact: bool = False,
) -> Settings:
    """Checks the arguments that all layouts share."""
    checks.options(reduction, impl)
    effect, beta = checks.as_effect(effect), checks.share(beta)
    sines = every_row_fact or effect.angular
    negatives = every_row_fact or beta > 0.0 or bool(effect.needs_negatives)
    return Settings(tau, beta, effect, impl, check, sines, negatives)


def moco(q: Tensor, k: Tensor, positives: Tensor | None, queue: Tensor | None, in_batch: bool, ask: Settings) -> Row:
    """Rows of q against rows of k and of the queue; without `in_batch`, k holds positives alone."""
    dtype = checks.embeddings(ask.check, q=q, k=k, queue=queue)
    checks.temperature(ask.tau, ask.check, q)
    checks.parameters(ask.effect, q, ask.check)
    checks.positives(positives, q, k, ask.check)
    others = len(k) - 1 if in_batch else 0
    spare = 0 if queue is None else len(queue)
    more = "give a larger k, or a queue=" if in_batch else "without in_batch, give a queue="
    checks.negatives(others + spare, ask.beta, ask.effect, more)
    with full_precision(q):
        scale = _scale(ask.tau, q, dtype)
        u, v = _unit(q, dtype), _unit(k, dtype)
        index = torch.arange(len(q), device=q.device) if positives is None else positives.long()
        cos, sin = _angle(u, v[: len(q)] if positives is None else v[index], ask.sines)
        parts = []
        if ask.negatives and others:
            parts.append(neg_lse(u, v, scale, index[:, None], ask.impl))
        if ask.negatives and queue is not None and spare:
            parts.append(neg_lse(u, _unit(queue, dtype), scale, index.new_empty(len(q), 0), ask.impl))
        return Row(cos, sin, _join(parts, cos), scale)


def simclr(z1: Tensor, z2: Tensor, ask: Settings) -> Row:
    """All 2n embeddings against each other, themselves left out; the rows of z1 first."""
    dtype = checks.embeddings(ask.check, z1=z1, z2=z2)
    checks.temperature(ask.tau, ask.check, z1)
    checks.parameters(ask.effect, z1, ask.check)
    checks.same_shape(z1=z1, z2=z2)
    n = len(z1)
    checks.negatives(n - 1, ask.beta, ask.effect, "nt_xent needs two samples or more")
    with full_precision(z1):
        scale = _scale(ask.tau, z1, dtype)
        u, v = _unit(z1, dtype), _unit(z2, dtype)
        cos, sin = (torch.cat([x, x]) for x in _angle(u, v, ask.sines))
        parts = []
        if ask.negatives and n > 1:
            itself = torch.arange(2 * n, device=z1.device)
            drop = torch.stack([itself, itself.roll(n)], dim=1)
            parts.append(neg_lse(torch.cat([u, v]), None, scale, drop, ask.impl))
        return Row(cos, sin, _join(parts, cos), scale)


def byol(p: Tensor, z: Tensor, ask: Settings) -> Row:
    """Positives alone."""
    dtype = checks.embeddings(ask.check, p=p, z=z)
    checks.temperature(ask.tau, ask.check, p)
    checks.parameters(ask.effect, p, ask.check)
    checks.same_shape(p=p, z=z)
    checks.negatives(0, ask.beta, ask.effect, "positive_only has none by definition")
    with full_precision(p):
        cos, sin = _angle(_unit(p, dtype), _unit(z, dtype), ask.sines)
        return Row(cos, sin, _join([], cos), _scale(ask.tau, p, dtype))


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of length one, however long or short they were; a zero row stays zero and gets no gradient."""
    x = x.to(dtype)
    peak = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)
    x = x / peak.masked_fill(peak == 0, torch.inf)  # or the squares of large and of small rows leave the floats
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    safe: Tensor = length.masked_fill(length == 0, torch.inf)
    return x / safe


def _angle(u: Tensor, v: Tensor, with_sin: bool) -> tuple[Tensor, Tensor]:
    """Eq. 2: cosine and sine of the angles between unit rows; the sine by Kahan's formula, exact at small angles."""
    cos = (u * v).sum(-1)
    if not with_sin:
        return cos, torch.full_like(cos, torch.nan)
    return cos, torch.linalg.vector_norm(u - v, dim=-1) * torch.linalg.vector_norm(u + v, dim=-1) / 2


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    """The log-sum-exp over all parts of the negatives; -inf where there are none."""
    if not parts:
        return torch.full_like(like, -math.inf)
    A = parts[0]
    for part in parts[1:]:
        A = torch.logaddexp(A, part)
    return A


def _scale(tau: Number, like: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tau, Tensor):
        return 1.0 / tau.reshape(()).to(device=like.device, dtype=dtype)
    return torch.full((), 1.0 / tau, dtype=dtype, device=like.device)
