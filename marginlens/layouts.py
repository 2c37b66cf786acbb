"""Layouts: they say which embedding is whose positive, and which are negatives. A new layout is one function here."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from marginlens import checks
from marginlens.autodiff import full_precision
from marginlens.checks import EffectLike
from marginlens.effects import Effect, Row
from marginlens.kernels import choose, neg_lse, units
from marginlens.parameters import TAUS, Number

NO_SINE = torch.tensor(torch.nan)
"""In place of sines that no effect needs; on the CPU, so that no device has to fill it."""


class Settings(NamedTuple):
    """The checked arguments of a loss, and which parts of a row they need."""

    tau: Number
    beta: float
    effect: Effect
    impl: str
    check: bool
    sines: bool
    """True if sines of angles are needed."""
    negatives: bool
    """True if the log-sum-exp of the negatives is needed."""


def settings(
    tau: Number,
    beta: float,
    effect: EffectLike,
    reduction: str,
    impl: str,
    check: bool,
    every_row_fact: bool = False,
) -> Settings:
    """Return the arguments that all layouts share, numbers as floats; raise for the first invalid one."""
    checks.options(reduction, impl, check)
    tau, effect, beta = checks.temperature(tau, check), checks.as_effect(effect), checks.share(beta)
    sines = every_row_fact or effect.angular
    negatives = every_row_fact or beta > 0.0 or bool(effect.needs_negatives)
    return Settings(tau, beta, effect, impl, check, sines, negatives)


def moco(q: Tensor, k: Tensor, positives: Tensor | None, queue: Tensor | None, in_batch: bool, ask: Settings) -> Row:
    """Return the rows of q against those of k and of the queue; without `in_batch`, k holds positives alone."""
    checks.switch("in_batch", in_batch)
    dtype = checks.embeddings(ask.check, q=q, k=k, queue=queue)
    checks.parameters(ask.tau, ask.effect, q, ask.check)
    checks.positives(positives, q, k, ask.check)
    others = len(k) - 1 if in_batch else 0
    spare = 0 if queue is None else len(queue)
    more = "give a larger k, or a queue=" if in_batch else "without in_batch, give a queue="
    checks.negatives(others + spare, ask.beta, ask.effect, more)
    impl = choose(ask.impl, q, dtype, ask.negatives)
    with full_precision(q):
        scale = _scale(ask.tau, q, dtype)
        half = _half(q, k, queue)
        if impl != "triton" or positives is not None or q.shape != k.shape:
            (u, s), (v, t) = _rows(q, dtype, impl, half), _rows(k, dtype, impl, half)
            index = torch.arange(len(q), device=q.device) if positives is None else positives.long()
            paired, drop = v[: len(q)] if positives is None else v[index], index[:, None]
            cos, sin = _cosine(u, paired), None
        else:
            u, v, cos, s, t, drop, sin = units(q, k, False, half, ask.sines)
            paired = v
        parts = []
        if ask.negatives and others:
            parts.append(neg_lse(u, v, scale, drop, impl, (s, t)))
        if ask.negatives and queue is not None and spare:
            w, t = _rows(queue, dtype, impl, half)
            parts.append(neg_lse(u, w, scale, drop[:, :0], impl, (s, t)))
        if ask.sines and sin is None:
            sin = _sine(u, paired)
        return _row(cos, sin if ask.sines else None, parts, scale)


def simclr(z1: Tensor, z2: Tensor, ask: Settings) -> Row:
    """Return the rows of all 2n embeddings against each other, without themselves; those of z1 come first."""
    dtype = checks.embeddings(ask.check, z1=z1, z2=z2)
    checks.parameters(ask.tau, ask.effect, z1, ask.check)
    checks.same_shape(z1=z1, z2=z2)
    n = len(z1)
    checks.negatives(n - 1, ask.beta, ask.effect, "nt_xent needs two samples or more")
    impl = choose(ask.impl, z1, dtype, ask.negatives)
    with full_precision(z1):
        scale = _scale(ask.tau, z1, dtype)
        if impl != "triton":
            u, v = _unit(z1, dtype), _unit(z2, dtype)
            z, cos, tiles = torch.cat([u, v]), _cosine(u, v).repeat(2), None
            sin = _sine(z[:n], z[n:]).repeat(2) if ask.sines else None
            itself = torch.arange(2 * n, device=z1.device)
            drop = torch.stack([itself, itself.roll(n)], dim=1)
        else:
            z, _, cos, tiles, _, drop, sin = units(z1, z2, True, _half(z1, z2), ask.sines)
        parts = [neg_lse(z, None, scale, drop, impl, (tiles, None))] if ask.negatives and n > 1 else []
        return _row(cos, sin if ask.sines else None, parts, scale)


def byol(p: Tensor, z: Tensor, ask: Settings) -> Row:
    """Return rows without negatives."""
    dtype = checks.embeddings(ask.check, p=p, z=z)
    checks.parameters(ask.tau, ask.effect, p, ask.check)
    checks.same_shape(p=p, z=z)
    checks.negatives(0, ask.beta, ask.effect, "positive_only has none by definition")
    with full_precision(p):
        u, v = _unit(p, dtype), _unit(z, dtype)
        return _row(_cosine(u, v), _sine(u, v) if ask.sines else None, [], _scale(ask.tau, p, dtype))


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of length one; a zero row stays zero and gets no gradient."""
    x = x.to(dtype)
    peak = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)
    x = x / peak.masked_fill(
        peak == 0, torch.inf
    )  # because the squares of very large or small entries overflow or vanish
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    safe: Tensor = length.masked_fill(length == 0, torch.inf)
    return x / safe


def _rows(x: Tensor, dtype: torch.dtype, impl: str, half: bool) -> tuple[Tensor, Tensor | None]:
    """Return rows of length one, and their tiles if the kernel uses tiles."""
    if impl != "triton":
        return _unit(x, dtype), None
    found = units(x, None, False, half)
    return found.u, found.s


def _half(*given: Tensor | None) -> bool:
    """True if all given tensors have 16-bit entries."""
    return all(x is None or x.element_size() == 2 for x in given)


def _cosine(u: Tensor, v: Tensor) -> Tensor:
    """Eq. 2: cosines of the angles between unit rows."""
    return (u * v).sum(-1)


def _sine(u: Tensor, v: Tensor) -> Tensor:
    """Return the sines of the angles between unit rows, by Kahan's formula, which is exact at small angles."""
    sine: Tensor = torch.linalg.vector_norm(u - v, dim=-1) * torch.linalg.vector_norm(u + v, dim=-1) / 2
    return sine


def _row(cos: Tensor, sin: Tensor | None, parts: list[Tensor], scale: Tensor) -> Row:
    """Return a row whose A joins the log-sum-exps of all parts of the negatives; -inf if there are no parts."""
    A = parts[0] if parts else torch.full_like(cos, -math.inf)
    for part in parts[1:]:
        A = torch.logaddexp(A, part)
    return Row(cos, NO_SINE if sin is None else sin, A, scale)


def _scale(tau: Number, like: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tau, Tensor):
        tau = tau.reshape(()).to(device=like.device, dtype=dtype)
        least = 0.99 * TAUS[0]  # because rounding to 16 bits may lower the smallest one
        return 1.0 / tau.where(
            tau >= least, torch.nan
        )  # because a learned tau <= 0 must give NaN, not an inverted loss
    return torch.full((), 1.0 / tau, dtype=dtype, device=like.device)
