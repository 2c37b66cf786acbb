"""Laws of every effect, for random parameters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio, effects
from marginlens.lens import theory
from tests.catalogue import DECLARED, DERIVATIVES, EFFECTS, SINGLE, close, gradients, random

angles = st.floats(0.0, math.pi)
scales = st.floats(0.0, 100.0)
curves = st.floats(0.3, 10.0) | st.just(math.inf)
shares = st.floats(0.0, 1.0)
taus = st.floats(0.05, 1.0)
single = st.one_of(
    st.builds(Plain),
    st.builds(Margin, m1=angles, m2=st.floats(-2.0, 2.0)),
    st.builds(Emphasis, s=scales, c=curves),
    st.builds(Ratio, m1=angles, scope=st.sampled_from(["positive", "row"])),
    st.builds(Attenuation, alpha=shares, kind=st.sampled_from(["I", "II"])),
)
seeds = st.integers(0, 2**31)
fast = settings(max_examples=60, deadline=None, derandomize=True)


def field(effect, seed, tau=0.25, beta=1.0, loss=ml.info_nce):
    """The gradient that an effect gives to random embeddings."""
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    return torch.cat(gradients(lambda q, k: loss(q, k, tau=tau, beta=beta, effect=effect), q, k)[1])


def test_the_catalogue_has_every_effect():
    """So that every law, and both oracles, are asked of it."""
    assert {type(effect) for effect in SINGLE} == set(effects.EFFECTS.values())


@fast
@given(seed=seeds, tau=taus, beta=shares)
def test_neutral_effects_are_plain(seed, tau, beta):
    plain = field(Plain(), seed, tau, beta)
    neutral = [Emphasis(s=1, c=math.inf), Margin(0, 0), Ratio(0), Ratio(0, scope="row")]
    neutral += [Attenuation(0), Attenuation(0, kind="II"), Plain() * Plain()]
    for effect in neutral:
        close(field(effect, seed, tau, beta), plain, 1e-11)


@fast
@given(seed=seeds, tau=taus, m1=angles, m2=st.floats(-1.0, 1.0))
def test_theorem_4_1(seed, tau, m1, m2):
    """A margin is f on the positive times the ratio on the whole row, at beta = 1."""
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    row = ml.rows(q, k, tau=tau, effect=Margin(m1, m2))
    plain = ml.rows(q, k, tau=tau)
    assert torch.equal(row.theta, plain.theta)
    close(row.f, theory.angular_factor(plain.theta, m1), 1e-10)
    want = theory.margin_gradient(plain.theta, plain.q, m1, m2, tau)
    got = torch.sin(plain.theta) * row.f * (1 - row.q) / tau
    close(got, want, 1e-7)  # the theorem's own form divides by 1 - q
    ratio = theory.sum_ratio(plain.theta, plain.q, m1, m2, tau)
    close((1 - row.q) / (1 - plain.q), ratio, 1e-7)


@fast
@given(seed=seeds, tau=taus, m1=angles)
def test_a_ratio_over_the_whole_row_is_the_margin_without_its_angular_factor(seed, tau, m1):
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    row = ml.rows(q, k, tau=tau, effect=Ratio(m1, scope="row"))
    close(row.w_neg, theory.sum_ratio(row.theta, row.q, m1, 0.0, tau), 1e-9)
    assert torch.equal(row.w_neg, row.w_pos)


@fast
@given(seed=seeds, tau=taus, alpha=st.floats(0.0, 0.999))
def test_attenuation_one_is_a_subtractive_margin(seed, tau, alpha):
    """Lemma 4.3 at m1 = 0: alpha = 1 - exp(-m2 / tau), gradient for gradient."""
    margin = Margin(m2=-tau * math.log1p(-alpha))
    for loss in (ml.info_nce, ml.nt_xent):
        close(field(Attenuation(alpha), seed, tau, loss=loss), field(margin, seed, tau, loss=loss), 1e-9)


@fast
@given(seed=seeds, tau=taus, m1=st.floats(0.0, 3.0), m2=st.floats(-1.0, 1.0))
def test_lemma_4_3_row_by_row(seed, tau, m1, m2):
    """The alpha of a margin differs per row and may be negative, so this is the formula, not the class."""
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    plain = ml.rows(q, k, tau=tau)
    margin = ml.rows(q, k, tau=tau, effect=Margin(m1, m2))
    close(theory.attenuation(plain.theta, plain.q, m1, m2, tau), (1 - margin.q) / (1 - plain.q), 1e-7)


@fast
@given(seed=seeds, tau=taus, m1=st.floats(0.0, 3.0))
def test_lemma_4_4_a_large_m2_frees_the_positive_from_its_negatives(seed, tau, m1):
    p, z = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    far = gradients(lambda c: _of_cosines(c, tau, Margin(m1, m2=1e3 * tau + 4)), _cos(p, z))[1][0]
    theta = _cos(p, z).arccos()
    close(-far * theta.sin() * len(p), theory.limit_gradient(theta, m1, tau), 1e-9)


def _cos(p, z):
    return torch.nn.functional.cosine_similarity(p, z).detach()


def _of_cosines(c, tau, effect):
    """The loss of rows with given positive cosines, negatives held fixed: vectors in a plane, the positive turned."""
    q = torch.stack([torch.ones_like(c), torch.zeros_like(c), torch.zeros_like(c)], 1)
    k = torch.stack([c, (1 - c * c).sqrt(), torch.zeros_like(c)], 1)
    queue = random(5, 3, seed=0)
    rows = [ml.info_nce(q[i : i + 1], k[i : i + 1], tau=tau, effect=effect, queue=queue) for i in range(len(c))]
    return torch.stack(rows).mean()


@fast
@given(seed=seeds, a=single, b=single)
def test_products_multiply_weights(seed, a, b):
    if isinstance(a, Margin) and isinstance(b, Margin):
        with pytest.raises(ValueError, match="both move"):
            a * b
        return
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    one, other, both = (ml.rows(q, k, effect=e) for e in (a, b, a * b))
    close(both.w_pos, one.w_pos * other.w_pos, 1e-9)
    close(both.w_neg, one.w_neg * other.w_neg, 1e-9)
    close(both.f, one.f * other.f, 1e-12)
    close(field(a * b, seed), field(b * a, seed), 1e-12)


@fast
@given(seed=seeds, effect=single, tau=taus, beta=shares)
def test_only_a_margin_moves_the_value(seed, effect, tau, beta):
    q, k = random(6, 4, seed=seed), random(6, 4, seed=seed + 1)
    for loss in (ml.info_nce, ml.nt_xent):
        value = loss(q, k, tau=tau, beta=beta, effect=effect, reduction="none")
        plain = loss(q, k, tau=tau, beta=beta, reduction="none")
        assert torch.equal(value, plain) or isinstance(effect, Margin)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_scale_rotation_and_order_do_not_matter(effect):
    q, k = random(9, 5, seed=1), random(9, 5, seed=2)
    turn = torch.linalg.qr(random(5, 5, seed=3))[0]
    shuffle = torch.randperm(9, generator=torch.Generator().manual_seed(4))
    for loss in (ml.info_nce, ml.nt_xent):
        want, (dq, dk) = gradients(lambda q, k: loss(q, k, effect=effect), q, k)
        for seen_q, seen_k, back in (
            (3.0 * q, 0.2 * k, lambda dq, dk: (3.0 * dq, 0.2 * dk)),
            (q @ turn, k @ turn, lambda dq, dk: (dq @ turn.T, dk @ turn.T)),
            (q[shuffle], k[shuffle], lambda dq, dk: (dq[shuffle.argsort()], dk[shuffle.argsort()])),
        ):
            value, grads = gradients(lambda q, k: loss(q, k, effect=effect), seen_q, seen_k)
            close(value, want, 1e-12)
            for g, w in zip(back(*grads), (dq, dk), strict=True):
                close(g, w, 1e-9)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_gradients_are_tangent_to_the_sphere(effect):
    q, k = random(9, 5, seed=1), random(9, 5, seed=2)
    _, (dq, dk) = gradients(lambda q, k: ml.info_nce(q, k, effect=effect), q, k)
    assert (q * dq).sum(1).abs().max() < 1e-13 * max(1.0, float(dq.norm()))
    assert (k * dk).sum(1).abs().max() < 1e-13 * max(1.0, float(dk.norm()))


@pytest.mark.parametrize("effect", DERIVATIVES, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gradcheck_where_the_gradient_is_a_derivative(effect, beta, impl):
    q, k = random(5, 3, seed=1).requires_grad_(), random(7, 3, seed=2).requires_grad_()
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    options = {"beta": beta, "effect": effect, "impl": impl}
    assert torch.autograd.gradcheck(lambda q, k, t: ml.info_nce(q, k, tau=t, **options), (q, k, tau))
    assert torch.autograd.gradcheck(lambda q, t: ml.nt_xent(q, 2 * q + k[:5], tau=t, **options), (q, tau))
    if beta == 0.0 and not effect.needs_negatives:
        assert torch.autograd.gradcheck(lambda q: ml.positive_only(q, k[:5], effect=effect), (q,))


@pytest.mark.parametrize("effect", DECLARED, ids=str)
def test_a_declared_gradient_is_not_the_derivative(effect):
    """What the docs say: gradcheck fails for these, as it must."""
    q, k = random(5, 3, seed=1).requires_grad_(), random(5, 3, seed=2)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda q: ml.info_nce(q, k, effect=effect), (q,))


@pytest.mark.parametrize("effect", DERIVATIVES, ids=str)
def test_second_derivatives_of_the_reference_are_right(effect):
    q, k = random(4, 3, seed=1).requires_grad_(), random(4, 3, seed=2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q, k: ml.info_nce(q, k, effect=effect, impl="reference"), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: ml.nt_xent(q, k, effect=effect, impl="reference"), (q, k))
