"""All effects that the laws run over, and small helpers for tests."""

import math

import torch

from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio

SINGLE = [
    Plain(),
    Margin(m1=0.4),
    Margin(m2=0.3),
    Margin(m1=0.5, m2=0.7),
    Margin(m1=3.1),
    Emphasis(s=20),
    Emphasis(s=0),
    Emphasis(c=1 / 3),
    Emphasis(s=5, c=2.5),
    Ratio(m1=0.4),
    Ratio(m1=1.6, scope="row"),
    Ratio(m1=3.1, scope="row"),
    Attenuation(alpha=0.25),
    Attenuation(alpha=1),
    Attenuation(alpha=0.25, kind="II"),
    Attenuation(alpha=1, kind="II"),
]
PRODUCTS = [
    Emphasis(s=20, c=2.5) * Ratio(m1=0.4),
    Emphasis(s=3, c=1) * Margin(m1=0.4, m2=0.2),
    Attenuation(alpha=0.5) * Emphasis(s=2) * Ratio(m1=0.8, scope="row"),
]
EFFECTS = SINGLE + PRODUCTS
DERIVATIVES = [e for e in EFFECTS if isinstance(e, Plain | Margin)]
DECLARED = [e for e in EFFECTS if e not in DERIVATIVES]
TAUS = (0.01, 0.05, 0.07, 0.25, 1.0)
BETAS = (0.0, 0.3, 1.0)


def without_negatives(effect):
    return not effect.needs_negatives


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def aligned(n, d, seed, angle, dtype=torch.float64):
    """Two batches whose rows pair up at about `angle` radians."""
    q = random(n, d, seed=seed)
    noise = random(n, d, seed=seed + 1) * q.norm(dim=1, keepdim=True) / math.sqrt(d)
    return q.to(dtype), (1.7 * (q + angle * noise)).to(dtype)


def gradients(loss, *tensors):
    """The loss and its gradients with respect to fresh leaves made of the tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)


def close(ours, theirs, tolerance):
    """Norm-wise relative difference at most `tolerance`."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    assert torch.isfinite(ours).all()
    error = (ours - theirs).norm() / theirs.norm().clamp(min=1e-300)
    assert error <= tolerance, f"relative error {error:.3g} above {tolerance:g}"
