"""The gradient analysis: the paper's claims that hold, and those that do not."""

import math

import pytest
import torch

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio, effects, layouts, loss
from marginlens.lens import theory
from tests.catalogue import EFFECTS, close, random

GRID = torch.linspace(0.01, math.pi - 0.01, 2001, dtype=torch.float64)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_multipliers_are_those_of_the_loss(effect, beta):
    """Theory at a row's (theta, q) equals what autograd gives that row, over what it gives without the effect."""
    tau, n = 0.3, 7
    q, k = random(1, 3, seed=0), random(n, 3, seed=1)
    u, v = (torch.nn.functional.normalize(x, dim=1) for x in (q, k))
    cos = (u @ v.T)[0]

    def of_angles(theta, effect):
        """The loss as a function of the angles to the keys, through one row and a basis made for each."""
        c = theta.cos()
        row = effects.Row(
            c[:1], theta[:1].sin(), (c[1:] / tau).logsumexp(0)[None], torch.tensor(1 / tau, dtype=torch.float64)
        )
        ask = layouts.Settings(tau, beta, effect, "auto", False, True, True)
        return loss._value(row, ask)[0]

    angles = cos.arccos()
    with_effect, plain = (
        torch.autograd.grad(of_angles(a := angles.clone().requires_grad_(), e), a)[0] for e in (effect, Plain())
    )
    probability = torch.softmax(cos / tau, 0)[0]
    got = theory.multipliers(effect, angles[0], probability, tau, beta)
    close(got.positive, with_effect[0] / plain[0], 1e-9)
    close(got.negative.expand(n - 1), with_effect[1:] / plain[1:], 1e-9)


def test_theorem_4_1_at_any_beta():
    theta, q = GRID[::40, None], torch.linspace(0.01, 0.99, 21, dtype=torch.float64)[None]
    for m1, m2, beta in ((0.4, 0.0, 1.0), (0.4, 0.3, 0.5), (1.6, -0.2, 0.3), (0.0, 0.5, 1.0)):
        got = theory.multipliers(Margin(m1, m2), theta, q, 0.25, beta)
        factor = theory.angular_factor(theta, m1)
        close(got.positive, factor * theory.ratio(theta, q, m1, m2, 0.25, beta), 1e-10)
        close(got.negative, theory.ratio(theta, q, m1, m2, 0.25, beta, p=0.0).expand_as(got.negative), 1e-10)
        plain = theory.gradient(theta, q, 1.0, 0.25, beta)
        close(theory.margin_gradient(theta, q, m1, m2, 0.25, beta), plain * got.positive, 1e-10)


def test_lemma_4_2():
    theta, q = GRID[::40, None], torch.linspace(0.01, 0.99, 21, dtype=torch.float64)[None]
    for m1, m2 in ((0.4, 0.0), (1.6, 0.3)):
        ratio = theory.sum_ratio(theta, q, m1, m2)
        close(theory.ratio(theta, q, m1, m2), ratio, 1e-10)
        # the closed form of the lemma, with q~ where its statement writes q and its proof q~
        plain, moved = (theta.cos() / 0.25).exp(), (((theta + m1).cos() - m2) / 0.25).exp()
        close((plain / q) / (moved + plain * (1 / q - 1)), ratio, 1e-10)
        # with q itself, as the statement is printed, it is false
        printed = theory.probability(theta, q, m1, m2)
        wrong = (plain / printed) / (moved + plain * (1 / printed - 1))
        assert ((wrong - ratio).abs() / ratio).max() > 0.1
    assert not torch.allclose(theory.ratio(1.0, 0.5, 0.4, beta=0.5), theory.sum_ratio(1.0, 0.5, 0.4))


def test_lemma_4_3():
    theta, q = GRID[::40, None], torch.linspace(0.01, 0.99, 21, dtype=torch.float64)[None]
    for m1, m2 in ((0.4, 0.3), (0.0, 0.5), (1.6, 0.0)):
        close(theory.attenuation(theta, q, m1, m2), theory.sum_ratio(theta, q, m1, m2), 1e-12)
    alpha = float(theory.attenuation_alpha(1.0, 0.0, 0.5))
    assert alpha == pytest.approx(1 - math.exp(-0.5 / 0.25))
    got = theory.multipliers(Attenuation(alpha), 1.0, q)
    close(got.positive, theory.attenuation(1.0, q, 0.0, 0.5), 1e-12)
    assert theory.attenuation_alpha(3.0, 0.5, 0.0) < 0


def test_lemma_4_4():
    q = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    far = theory.margin_gradient(1.1, q, 0.4, 1e3, 0.25)
    close(far, theory.limit_gradient(1.1, 0.4, 0.25).expand(3), 1e-12)


@pytest.mark.parametrize("m1", [0.2, 0.4, 0.8, 1.6, 3.1])
def test_true_the_ratio_peaks_half_way(m1):
    for q in (0.1, 0.9):
        for tau in (0.07, 0.25):
            ratio = theory.sum_ratio(GRID, q, m1, 0.0, tau)
            assert ratio.max() <= theory.sum_ratio(theory.peak_angle(m1), q, m1, 0.0, tau) * (1 + 1e-14)
            if tau == 0.25:  # where float64 tells the neighbours of the peak apart
                assert abs(float(GRID[ratio.argmax()]) - float(theory.peak_angle(m1))) < 2e-3


def test_true_the_ratio_grows_with_q_where_it_exceeds_one():
    q = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    assert (theory.sum_ratio(1.0, q, 0.4).diff() > 0).all()


def test_false_that_the_attenuation_factor_always_grows_with_q():
    """Lemma 4.3's remark: beyond theta = pi - m1 / 2, with m2 = 0, it falls."""
    q = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    border = math.pi - 0.4 / 2
    assert (theory.attenuation(border - 0.01, q, 0.4, 0.0).diff() > 0).all()
    assert (theory.attenuation(border + 0.01, q, 0.4, 0.0).diff() < 0).all()
    assert (theory.attenuation(border + 0.01, q, 0.4, 0.1).diff() > 0).all()


def test_false_that_the_emphasised_area_broadens_with_m1():
    shares = []
    for m1 in (0.2, 0.4, 0.8, 1.6, 3.1):
        share = float((theory.sum_ratio(GRID, 0.5, m1) > 1).double().mean())
        assert share == pytest.approx(float(theory.emphasised_share(m1)), abs=5e-3)
        shares.append(share)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.97, abs=0.01)
    assert shares[-1] == pytest.approx(0.51, abs=0.01)


def test_false_that_emphasis_turns_moco_into_byol():
    """As s grows, every row of MoCo keeps its factor 1 - q, which BYOL does not have."""
    p, z = random(5, 4, seed=0).requires_grad_(), random(5, 4, seed=1)
    s = 1e6
    (moco,) = torch.autograd.grad(ml.info_nce(p, z, tau=0.5, effect=Emphasis(s=s)), p)
    (byol,) = torch.autograd.grad(ml.positive_only(p, z, tau=0.5), p)
    kept = 1 - ml.rows(p, z, tau=0.5).q
    close(moco / s, kept[:, None] * byol, 1e-5)
    assert (moco / s - byol).norm() / byol.norm() > 0.1


def test_figures():
    positive, negative = theory.figure_1(steps=11)
    for chart in (positive, negative):
        assert chart.value.shape == (11, 11)
        assert torch.isfinite(chart.value).all()
        assert (chart.value > 0).all()
    close(positive.value, (1 - positive.q) * positive.theta.sin() / 0.25, 1e-14)
    close(negative.value, negative.q * negative.theta.sin() / 0.25, 1e-14)
    left, right = theory.figure_2(steps=11)
    got = theory.multipliers(Margin(m1=0.4), left.theta, left.q)
    close(left.value * right.value, got.positive, 1e-10)
    close(right.value, got.negative, 1e-10)
    one = theory.figure_ratio(m1=0.4, steps=11)
    close(one.value, theory.multipliers(Ratio(m1=0.4, scope="row"), one.theta, one.q).negative, 1e-10)
    with pytest.raises(ValueError, match="steps is 0"):
        theory.figure_1(steps=0)


@pytest.mark.parametrize("tau", [0.07, 0.05, 0.04])
def test_no_digit_is_lost_where_the_margin_leaves_little(tau):
    """The ratio is down to 1e-22 there, and 1 - q would round to 0."""
    theta, q = torch.tensor([2.5, 3.0, 3.1], dtype=torch.float64), 0.5
    close(theory.ratio(theta, q, 3.1, tau=tau), theory.sum_ratio(theta, q, 3.1, tau=tau), 1e-12)
    got = theory.multipliers(Margin(m1=3.1), theta, q, tau)
    close(got.positive, theory.angular_factor(theta, 3.1) * got.negative, 1e-12)


def test_finite_at_the_edges():
    theta = torch.tensor([3.0, 1.0])
    close(theory.probability(theta, 0.5, 3.1, tau=0.01), torch.tensor([1.0, 0.0]), 1e-6)
    close(theory.ratio(theta, 0.5, 3.1, tau=0.01), torch.tensor([0.0, 2.0]), 1e-6)
    assert theory.margin_gradient(3.0, 0.5, 3.1, tau=0.002) == 0
    assert (theory.attenuation(theta, 0.0, 3.1, 0.0, tau=0.01) == 1).all()
    assert theory.sum_ratio(1.0, 0.0, 0.4) == 1
    at_zero = theory.multipliers("emphasis(s=2, c=2.5)", 0.0, 0.5)
    assert at_zero == (2, 1)
