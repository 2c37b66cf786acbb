"""The parts of a gradient multiply to the gradient that the loss gives, for every effect."""

import math

import pytest
import torch

import marginlens as ml
from marginlens.effects import Row
from marginlens.layouts import settings
from marginlens.lens import parts
from marginlens.loss import _value
from tests.catalogue import BETAS, EFFECTS, close, random, without_negatives

TAUS = (0.05, 0.25, 1.0)


def some_rows(tau=0.25, beta=1.0, n=40, d=6):
    """Rows of random and of nearly aligned pairs: angles from 0.05 to 3 radians."""
    q = random(n, d, seed=0)
    mix = torch.linspace(0.02, 1.0, n, dtype=torch.float64)[:, None]
    k = (1 - mix) * q + mix * 3 * random(n, d, seed=1)
    return ml.rows(q, k, tau=tau, beta=beta)


def true_gradient(effect, rows, tau, beta):
    """dL/dc and dL/dA by autograd through the loss itself, with the sine as a function of the cosine."""
    c, A = rows.c.clone().requires_grad_(), rows.A.clone().requires_grad_()
    row = Row(c, (1.0 - c * c).sqrt(), A, torch.tensor(1.0 / tau, dtype=torch.float64))
    ask = settings(tau, beta, effect, "none", "auto", False, every_row_fact=True)
    value = _value(row, ask)
    return torch.autograd.grad(value.sum(), (c, A), materialize_grads=True)


@pytest.mark.parametrize("beta", BETAS[1:])
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_the_parts_multiply_to_the_gradient(effect, tau, beta):
    rows = some_rows(tau, beta)
    plain = parts.plain_gradient(rows)
    product = ml.lens.decompose(effect, rows).product
    wanted = true_gradient(effect, rows, tau, beta)
    found = plain.positive * product.positive, plain.negative * product.negative
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, 1e-12)
    for ours, theirs in zip(parts.gradient(effect, rows), wanted, strict=True):
        close(ours, theirs, 1e-12)


@pytest.mark.parametrize("effect", [e for e in EFFECTS if without_negatives(e)], ids=str)
def test_without_negatives_too(effect):
    p, z = random(20, 5, seed=2), random(20, 5, seed=3)
    rows = ml.rows(p, z, layout="positive_only", tau=0.5)
    plain, product = parts.plain_gradient(rows), ml.lens.decompose(effect, rows).product
    by_c, by_a = true_gradient(effect, rows, 0.5, 0.0)
    close(plain.positive * product.positive, by_c, 1e-12)
    assert (plain.negative * product.negative == 0).all()
    assert (by_a == 0).all()


def row_of(c, A, tau, beta=1.0):
    """Rows with a given cosine and log-sum-exp."""
    c, A = torch.as_tensor([c], dtype=torch.float64), torch.as_tensor([A], dtype=torch.float64)
    nothing = torch.full_like(c, torch.nan)
    return ml.Rows(
        c, c.acos(), A, nothing, nothing, nothing, nothing, nothing, torch.full_like(c, tau), torch.full_like(c, beta)
    )


def test_where_the_plain_gradient_vanishes_logarithms_are_compared():
    """At tau = 0.001 a row has 1 - q~ = e^-1900, which is 0 in float64; full attenuation undoes just that."""
    rows = row_of(0.9, -1000.0, 0.001)
    assert parts.plain_gradient(rows).positive == 0.0
    product = ml.lens.decompose("attenuation(alpha=1)", rows).product
    assert abs(product.log_positive - 1900.0) < 1e-10
    assert parts.gradient("attenuation(alpha=1)", rows).positive == pytest.approx(-1000.0, rel=1e-12)
    m2 = ml.lens.decompose("margin(m2=0.5)", rows).attenuation
    assert m2.log_negative == pytest.approx(500.0, rel=1e-12)  # Lemma 4.3: e^(m2 / tau) while q~ is 1


def test_emphasis_is_the_weight_at_the_median_angle():
    rows = some_rows()
    found = ml.lens.decompose(ml.Margin(m1=0.4), rows)
    middle = rows.theta.median()
    assert found.emphasis.positive == pytest.approx(float((middle + 0.4).sin() / middle.sin()), rel=1e-12)
    at = (rows.theta == middle).nonzero()[0]
    assert found.curvature.positive[at] == pytest.approx(1.0, rel=1e-12)
    found = ml.lens.decompose("emphasis(s=20)", rows)
    assert found.emphasis.positive == pytest.approx(20.0)
    assert (found.curvature.positive == 1.0).all()


def test_only_what_an_effect_does_is_in_its_parts():
    rows = some_rows()
    names = ("emphasis", "curvature", "ratio", "attenuation")
    for effect, active in {
        "plain": (),
        "margin(m2=0.3)": ("attenuation",),
        "margin(m1=0.4)": ("emphasis", "curvature", "ratio"),
        "emphasis(s=5)": ("emphasis",),
        "emphasis(c=1)": ("emphasis", "curvature"),
        "ratio(m1=0.4)": ("ratio",),
        "attenuation(alpha=1)": ("attenuation",),
    }.items():
        found = ml.lens.decompose(effect, rows)
        assert tuple(n for n in names if bool((getattr(found, n).log_positive.abs() > 1e-12).any())) == active


def test_ratio_and_attenuation_of_a_margin_are_lemma_43():
    """At beta = 1 both together are 1 / (1 - alpha q~), on the positive and on the negatives."""
    rows = some_rows()
    found = ml.lens.decompose(ml.Margin(0.4, 0.3), rows)
    plain_q = torch.sigmoid(rows.c / 0.25 - rows.A)
    wanted = ml.lens.theory.attenuation(rows.theta, plain_q, 0.4, 0.3)
    close(found.ratio.positive * found.attenuation.positive, wanted, 1e-12)
    close(found.ratio.negative * found.attenuation.negative, wanted, 1e-12)


def test_a_repelled_positive_has_a_sign():
    rows = row_of(math.cos(2.0), 1.0, 0.25)
    assert ml.lens.decompose("margin(m1=1.5)", rows).product.positive < 0
    assert ml.lens.decompose("margin(m1=1.0)", rows).product.positive > 0


def test_equivalents_have_the_same_mean_weight():
    rows = some_rows()
    cosines = (
        torch.nn.functional.normalize(random(40, 6, seed=0)) @ torch.nn.functional.normalize(random(30, 6, seed=4)).T
    )
    A = (cosines / 0.25).logsumexp(1)
    rows = rows._replace(A=A)
    found = ml.lens.equivalent("ratio(m1=0.4)", rows, cosines)
    weight = (parts.gradient("ratio(m1=0.4)", rows).positive / parts.plain_gradient(rows).positive).mean()
    assert found.weight == pytest.approx(float(weight), rel=1e-12)
    assert found.s == found.weight
    for same in (ml.Emphasis(found.s), ml.Margin(m2=found.m2)):
        assert ml.lens.equivalent(same, rows).weight == pytest.approx(found.weight, rel=1e-9)
    other = rows._replace(A=(cosines / found.tau).logsumexp(1), tau=rows.tau * found.tau / 0.25)
    mean = (parts.plain_gradient(other).positive / parts.plain_gradient(rows).positive).mean()
    assert float(mean) == pytest.approx(found.weight, rel=1e-9)


def test_no_equivalent_is_none():
    rows = some_rows()
    found = ml.lens.equivalent("emphasis(s=1000)", rows)
    assert found.s == pytest.approx(1000.0)
    assert (found.m2, found.tau) == (None, None)  # because m2 gives at most the mean of 1 / (1 - q~)
    assert ml.lens.equivalent("plain", rows).m2 == pytest.approx(0.0, abs=1e-9)
    alone = ml.rows(random(8, 4, seed=0), random(8, 4, seed=1), layout="positive_only")
    assert ml.lens.equivalent("margin(m1=0.4)", alone).m2 is None
    repelled = row_of(math.cos(2.5), 1.0, 0.25)
    assert ml.lens.equivalent("margin(m1=1.5)", repelled).s is None


def test_bad_rows_are_one_line():
    rows = some_rows()
    with pytest.raises(ValueError, match="1 of 40"):
        ml.lens.decompose("plain", rows._replace(c=rows.c.index_fill(0, torch.tensor([3]), torch.nan)))
    alone = ml.rows(random(8, 4, seed=0), random(8, 4, seed=1), layout="positive_only")
    with pytest.raises(ValueError, match="ratio"):
        ml.lens.decompose("ratio(m1=0.4)", alone)
    with pytest.raises(ValueError, match="cosines"):
        ml.lens.equivalent("plain", rows, torch.zeros(3, 4))
