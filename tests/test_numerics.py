"""Finite everywhere, and at least as accurate as the usual cross-entropy."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio
from marginlens.effects import log_gamma
from tests import oracle_mpmath, oracle_torch
from tests.catalogue import EFFECTS, SINGLE, aligned, close, gradients, random, without_negatives

IMPLS = ("reference", "chunked")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def hard_cases(dtype):
    """Pairs of batches (4, 3) at the edges: theta = 0 and pi, duplicates, zero vectors."""
    q = random(4, 3, seed=0)
    zeroed = q.clone()
    zeroed[1] = 0
    one = q[:1].expand(4, 3)
    axis = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 1]]
    cases = {
        "identical": (q, q),
        "opposite": (q, -q),
        "duplicated": (one, one),
        "duplicated, opposite": (one, -one),
        "on the axes": (axis, axis),
        "against the axes": (axis, -axis),
        "orthogonal": (axis, axis.roll(2, 0)),
        "a zero row": (zeroed, q),
        "zero rows": (zeroed, zeroed),
        "all zero": (0 * q, 0 * q),
        "small": (0.1 * q, 0.1 * q),
    }
    return {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in cases.items()}


@pytest.mark.parametrize(("dtype", "impl"), [*((d, "chunked") for d in DTYPES), (torch.float32, "reference")])
@pytest.mark.parametrize("tau", [0.01, 0.25])
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_finite_at_the_edges(effect, tau, dtype, impl):
    for name, (q, k) in hard_cases(dtype).items():
        for loss in (ml.info_nce, ml.nt_xent):
            value, grads = gradients(lambda q, k: loss(q, k, tau=tau, effect=effect, impl=impl), q, k)
            assert torch.isfinite(value), name
            for g in grads:
                assert torch.isfinite(g).all(), name
                assert g.dtype == dtype
        if without_negatives(effect):
            value, grads = gradients(lambda q, k: ml.positive_only(q, k, tau=tau, effect=effect), q, k)
            assert torch.isfinite(value), name
            assert all(torch.isfinite(g).all() for g in grads), name


@pytest.mark.parametrize("tau", [1e-6, 0.25, 1e6])
@pytest.mark.parametrize("s", [0.0, 1e-45, 1.0, 1e6])
@pytest.mark.parametrize("c", [1e-9, 0.7, 1e9, math.inf])
def test_finite_in_float32_at_the_bounds_of_every_number(c, s, tau):
    """Values, and gradients of embeddings, of the temperature and of margins; also with two emphases."""
    cases = hard_cases(torch.float32)
    pairs = [cases[name] for name in ("identical", "opposite", "a zero row", "orthogonal")]
    pairs.append((1e-12 * random(4, 3, seed=0).float(), 1e12 * random(4, 3, seed=1).float()))
    for m1, m2 in itertools.product((0.0, math.pi), (-1e6, 0.0, 1e6)):
        numbers = torch.tensor(tau), torch.tensor(m1), torch.tensor(m2)
        for other in (Plain(), Emphasis(s=min(1.0, s), c=2.5)):
            for q, k in pairs:
                for loss in (ml.info_nce, ml.nt_xent):
                    call = lambda q, k, t, a, b: loss(q, k, tau=t, effect=other * Emphasis(s, c) * Margin(a, b))
                    value, grads = gradients(call, q, k, *numbers)
                    assert torch.isfinite(value)
                    assert all(torch.isfinite(g).all() for g in grads)
    for q, k in pairs:
        call = lambda q, k, t: ml.positive_only(q, k, tau=t, effect=Emphasis(s, c) * Margin(math.pi))
        value, grads = gradients(call, q, k, numbers[0])
        assert torch.isfinite(value)
        assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("tau", [1e-6, 1e6])
@pytest.mark.parametrize("effect", [e for e in SINGLE if isinstance(e, Ratio | Attenuation)], ids=str)
def test_a_bounded_weight_stays_finite_at_every_temperature(effect, tau):
    """At beta = 1 the ratio and the attenuation vanish where their weights grow, with a large emphasis too."""
    for q, k in hard_cases(torch.float32).values():
        for loss in (ml.info_nce, ml.nt_xent):
            call = lambda q, k, t: loss(q, k, tau=t, effect=effect * Emphasis(s=1e6, c=0.5))
            value, grads = gradients(call, q, k, torch.tensor(tau))
            assert torch.isfinite(value)
            assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_zero_vectors_get_no_gradient(effect):
    q, k = random(5, 4, seed=0), random(5, 4, seed=1)
    q[2] = 0
    k[4] = 0
    for loss in (ml.info_nce, ml.nt_xent):
        _, (dq, dk) = gradients(lambda q, k: loss(q, k, effect=effect), q, k)
        assert (dq[2] == 0).all()
        assert (dk[4] == 0).all()
        assert (dq[0] != 0).any()


def test_values_are_float32_or_better():
    for dtype in DTYPES:
        q, k = random(5, 4, seed=0, dtype=dtype), random(5, 4, seed=1, dtype=dtype)
        want = torch.promote_types(dtype, torch.float32)
        assert ml.info_nce(q, k).dtype == want
        assert ml.nt_xent(q, k).dtype == want
        assert ml.positive_only(q, k).dtype == want
    wide = random(5, 4, seed=1)
    for loss in (ml.info_nce, ml.nt_xent, ml.positive_only):
        for a, b in ((q, wide), (wide, q)):
            assert loss(a, b).dtype == torch.float64
            close(loss(a, b), loss(a.double(), b.double()), 1e-14)
    assert ml.info_nce(q, q, queue=wide).dtype == torch.float64
    assert ml.info_nce(q, q, tau=torch.tensor(0.2, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_is_made_on_another_device(impl):
    """On the meta device, where a stray CPU tensor is an error: what a CUDA device would see."""
    q, k, queue = (torch.randn(5, 4, device="meta", requires_grad=True) for _ in range(3))
    positives = torch.arange(5, device="meta")
    for value in (
        ml.info_nce(q, k, queue=queue, effect=Emphasis(s=2, c=2) * Margin(m1=0.2), impl=impl),
        ml.info_nce(q, k, positives=positives, tau=torch.tensor(0.2), impl=impl),
        ml.nt_xent(q, k, effect=Ratio(m1=0.3), impl=impl),
        ml.positive_only(q, k, effect=Emphasis(c=2)),
    ):
        assert value.device.type == "meta"
        value.backward()


def test_attenuation_keeps_the_gradient_of_a_solved_row():
    """notes: in float32 the algebra 1 / (1 - q) gives 0 where the exact gradient is -14.3 (tau 0.07, a - A = 17.6)."""
    tau = 0.07
    q = torch.tensor([[1.0, 0.0]])
    turned = math.acos(1.0 - 17.6 * tau)
    queue = torch.tensor([[math.cos(turned), math.sin(turned)]])
    k = torch.tensor([[math.cos(1e-3), -math.sin(1e-3)]])
    row = ml.rows(q, k, tau=tau, queue=queue, effect=Attenuation(1))
    _, (dk,) = gradients(lambda k: ml.info_nce(q, k, tau=tau, queue=queue, effect=Attenuation(1)), k)
    assert row.w_pos > 1e7
    assert abs(float(dk[0, 0] * math.sin(1e-3) + dk[0, 1] * math.cos(1e-3))) == pytest.approx(1e-3 / tau, rel=1e-3)


def eager(q, k, tau=0.1):
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / tau
    return F.cross_entropy(logits, torch.arange(len(q)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("angle", [None, 0.3, 0.03])
@pytest.mark.parametrize("tau", [0.05, 0.25])
def test_errors_at_most_twice_those_of_cross_entropy(tau, angle, dtype, impl):
    n, d = 130, 64
    q, k = (random(n, d, seed=1), random(n, d, seed=2)) if angle is None else aligned(n, d, 1, angle)
    q, k = q.to(dtype), k.to(dtype)
    exact_value, exact = gradients(lambda q, k: eager(q, k, tau), q.double(), k.double())
    their_value, theirs = gradients(lambda q, k: eager(q, k, tau), q, k)
    our_value, ours = gradients(lambda q, k: ml.info_nce(q, k, tau=tau, impl=impl), q, k)
    # a gradient in half precision cannot beat the rounding of its own dtype
    floor = 0.5 * torch.finfo(dtype).eps
    for e, t, o in zip((exact_value, *exact), (their_value, *theirs), (our_value, *ours), strict=True):
        their_error, our_error = ((x.double() - e).norm() / e.norm() for x in (t, o))
        assert our_error <= 2 * max(their_error, floor)


@pytest.mark.parametrize("effect", SINGLE, ids=str)
@pytest.mark.parametrize("angle", [0.3, 0.03])
def test_every_effect_is_accurate_in_float32(effect, angle):
    """Nearly aligned pairs, where sqrt(1 - c^2) would lose half the digits."""
    q, k = aligned(40, 8, 3, angle, dtype=torch.float32)
    for tau in (0.1, 0.25):
        _, exact = gradients(lambda q, k: ml.info_nce(q, k, tau=tau, effect=effect), q.double(), k.double())
        _, ours = gradients(lambda q, k: ml.info_nce(q, k, tau=tau, effect=effect), q, k)
        for e, o in zip(exact, ours, strict=True):
            assert (o.double() - e).norm() / e.norm() < 3e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e18, 1e30])
def test_length_does_not_matter_at_any_length(size, dtype):
    q, k = random(5, 4, seed=0, dtype=dtype), random(5, 4, seed=1, dtype=dtype)
    want, (dq, _) = gradients(lambda q, k: ml.info_nce(q, k, effect=Margin(0.3)), q, k)
    got, (long, _) = gradients(lambda q, k: ml.info_nce(q, k, effect=Margin(0.3)), q * size, k)
    close(got, want, 1e-6)
    close(long.double() * size, dq, 1e-5)


def test_small_angles_keep_their_digits():
    """At 1e-6 radians 1 - c^2 has four digits left; the gradient of a margin has ten here."""
    q, k = aligned(3, 4, 0, angle=1e-6)
    effect = Margin(m1=0.4, m2=0.1)
    _, dl, _ = oracle_mpmath.gradients(q.tolist(), k.tolist(), [(range(3), i) for i in range(3)], 0.25, 1.0, effect)
    exact = torch.tensor([[float(x) for x in row] for row in dl], dtype=torch.float64)
    _, (dq, _) = gradients(lambda q, k: ml.info_nce(q, k, effect=effect), q, k)
    close(dq, exact, 1e-9)


def test_the_curve_keeps_its_digits_at_both_ends():
    """Near theta = pi, 1 - x^c cancels; at c = infinity, as a tensor too, there is no curve, theta = pi included."""
    x = torch.tensor([1e-7, 0.3, 1 - 2**-20, 1 - 2**-24])
    for c in (1 / 3, 1.0, 2.5):
        exact = [oracle_mpmath.mp.log(1 - oracle_mpmath.mp.mpf(float(v)) ** c) / c for v in x]
        torch.testing.assert_close(log_gamma(x, c), torch.tensor([float(e) for e in exact]), rtol=3e-6, atol=0)
    q = random(4, 3, seed=0)
    endless = Emphasis(s=2, c=torch.tensor(math.inf))
    _, (want, _) = gradients(lambda q, k: ml.info_nce(q, k, effect=Emphasis(s=2)), q, -q)
    _, (got, _) = gradients(lambda q, k: ml.info_nce(q, k, effect=endless), q, -q)
    assert torch.equal(got, want)


def test_unbounded_weights_overflow_no_earlier_than_they_must():
    """At beta < 1 the ratio and full attenuation really grow like e^(2/tau); float64 holds that at tau = 0.01."""
    q = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[1.0, 0.01], [-1.0, 0.01]], dtype=torch.float64)
    for effect in (Ratio(m1=3.1), Ratio(m1=3.1, scope="row"), Attenuation(1), Attenuation(1, kind="II")):
        _, grads = gradients(lambda q, k: ml.info_nce(q, k, tau=0.01, beta=0.3, effect=effect), q, k)
        assert all(torch.isfinite(g).all() for g in grads)
        assert max(float(g.norm()) for g in grads) > 1e80


def test_a_repelled_positive_is_visible():
    q = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[-0.8, 0.6], [0.8, 0.6]], dtype=torch.float64)
    row = ml.rows(q, k, effect=Margin(m1=1.0))
    assert row.theta[0] + 1.0 > math.pi
    assert row.f[0] < 0 < row.f[1]
    # at beta = 0 nothing but the positive pulls: the second is drawn in, the first pushed away
    _, (dk,) = gradients(lambda k: ml.positive_only(q, k, effect=Margin(m1=1.0)), k)
    closer = -(dk * q).sum(1)
    assert closer[0] < 0 < closer[1]


def test_non_finite_embeddings_are_not_hidden():
    q, k = random(4, 3, seed=0), random(4, 3, seed=1)
    q[1, 1] = math.nan
    assert torch.isnan(ml.info_nce(q, k))
    q[1, 1] = math.inf
    assert torch.isnan(ml.nt_xent(q, k))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_expanded_and_aliased_inputs(impl):
    base, other = random(6, 10, seed=0), random(10, 6, seed=1)
    q, k = base[:, ::2], other[::2].T[:, :5]
    for loss in (ml.info_nce, ml.nt_xent):
        v, grads = gradients(lambda q, k: loss(q, k, impl=impl), q.contiguous(), k.contiguous())
        a, b = base.clone().requires_grad_(), other.clone().requires_grad_()
        strided = loss(a[:, ::2], b[::2].T[:, :5], impl=impl)
        strided.backward()
        close(strided.detach(), v, 1e-14)
        close(a.grad[:, ::2], grads[0], 1e-14)
        close(b.grad[::2].T[:, :5], grads[1], 1e-14)
    one = random(1, 5, seed=2).requires_grad_()
    _, (dk, done) = gradients(lambda k, one: ml.info_nce(one.expand(6, 5), k, impl=impl), k, one)
    _, (dk2, dfull) = gradients(lambda k, q: ml.info_nce(q, k, impl=impl), k, one.detach().expand(6, 5).clone())
    close(dk, dk2, 1e-14)
    close(done, dfull.sum(0, keepdim=True), 1e-13)
    z = random(6, 5, seed=3)
    _, (aliased,) = gradients(lambda z: ml.nt_xent(z, z, effect=Margin(m2=0.2), impl=impl), z)
    _, (d1, d2) = gradients(lambda a, b: ml.nt_xent(a, b, effect=Margin(m2=0.2), impl=impl), z, z)
    close(aliased, d1 + d2, 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_one_side_alone_gets_the_same_gradient(effect, impl):
    q, k = random(9, 5, seed=0), random(9, 5, seed=1)
    for loss in (ml.info_nce, ml.nt_xent):
        _, (dq, dk) = gradients(lambda q, k: loss(q, k, effect=effect, impl=impl), q, k)
        _, (left,) = gradients(lambda q: loss(q, k, effect=effect, impl=impl), q)
        _, (right,) = gradients(lambda k: loss(q, k, effect=effect, impl=impl), k)
        close(left, dq, 1e-13)
        close(right, dk, 1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_inference_mode_and_no_grad(impl):
    q, k = random(4, 3, seed=0).requires_grad_(), random(4, 3, seed=1)
    want = ml.info_nce(q, k, effect=Emphasis(s=3), impl=impl)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            got = ml.info_nce(q, k, effect=Emphasis(s=3), impl=impl)
            assert not got.requires_grad
            assert torch.equal(got, want.detach())
            ml.rows(q, k)


def test_reductions():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    for loss, n in ((ml.info_nce, 5), (ml.nt_xent, 10), (ml.positive_only, 5)):
        rows = loss(q, k, reduction="none")
        assert rows.shape == (n,)
        close(loss(q, k), rows.mean(), 1e-15)
    close(ml.nt_xent(q, k, reduction="none")[:5], ml.nt_xent(k, q, reduction="none")[5:], 1e-14)


def test_rows_say_what_the_loss_saw():
    q, k, queue = random(5, 3, seed=0), random(8, 3, seed=1), random(4, 3, seed=2)
    effect = Emphasis(s=3, c=2.5) * Margin(m1=0.3, m2=0.1) * Ratio(m1=0.5, scope="row")
    row = ml.rows(q, k, tau=0.2, effect=effect, queue=queue)
    cos = oracle_torch.cosines(q, torch.cat([k, queue]))
    close(row.c, cos.diagonal(), 1e-14)
    close(row.theta, cos.diagonal().arccos(), 1e-14)
    close(row.A, (cos / 0.2).masked_fill(torch.eye(5, 12, dtype=torch.bool), -math.inf).logsumexp(1), 1e-14)
    b = ((row.theta + 0.3).cos() - 0.1) / 0.2
    close(row.q, 1 / (1 + (row.A - b).exp()), 1e-13)
    close(row.f, (row.theta + 0.3).sin() / row.theta.sin(), 1e-13)
    p = torch.eye(5, 12, dtype=torch.float64)
    scales = torch.ones_like(cos)
    for factor in effect.factors:
        scales = scales * oracle_torch.scales(factor, cos.arccos(), 0.2, p)
    close(row.w_pos, scales.diagonal(), 1e-13)
    close(row.w_neg, scales[:, -1], 1e-13)
    close(row.loss, ml.info_nce(q, k, tau=0.2, effect=effect, queue=queue, reduction="none"), 1e-15)
    assert not any(x.requires_grad for x in ml.rows(q.requires_grad_(), k))


def test_rows_of_the_other_layouts():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    two = ml.rows(q, k, layout="nt_xent", effect=Emphasis(s=2))
    assert all(x.shape == (10,) for x in two)
    close(two.loss, ml.nt_xent(q, k, reduction="none"), 1e-15)
    alone = ml.rows(q, k, layout="positive_only", effect=Margin(m1=0.2))
    close(alone.loss, ml.positive_only(q, k, effect=Margin(m1=0.2), reduction="none"), 1e-15)
    assert (alone.A == -math.inf).all()
    assert (alone.q == 1).all()
    quiet = ml.rows(q, k, beta=0.0)
    assert torch.isfinite(quiet.A).all()


def test_byol_is_two_plus_the_value():
    p, z = random(5, 3, seed=0), random(5, 3, seed=1)
    close(2 + ml.positive_only(p, z), (2 - 2 * F.cosine_similarity(p, z)).mean(), 1e-15)


def test_modules_are_the_functions():
    q, k, queue = random(5, 3, seed=0), random(5, 3, seed=1), random(4, 3, seed=2)
    index = torch.tensor([1, 0, 2, 4, 3])
    options = {"tau": 0.2, "beta": 0.5, "effect": "emphasis(s=3) * margin(m1=0.2)"}
    ours = ml.InfoNCE(**options)(q, k, positives=index, queue=queue)
    assert torch.equal(ours, ml.info_nce(q, k, positives=index, queue=queue, **options))
    assert torch.equal(ml.NTXent(**options, reduction="none")(q, k), ml.nt_xent(q, k, **options, reduction="none"))
    learner = ml.NTXent(tau=torch.nn.Parameter(torch.tensor(0.3)))
    learner(q, k).backward()
    assert learner.tau.grad is not None
    assert [name for name, _ in learner.named_parameters()] == ["tau"]
    moving = ml.InfoNCE(tau=torch.tensor(0.3))
    assert "tau" in moving.state_dict()
    assert (
        repr(moving)
        == "InfoNCE(tau=0.3, beta=1.0, effect=plain, reduction=mean, impl=auto, check=False, in_batch=True)"
    )


def test_a_margin_that_learns_belongs_to_its_module():
    m1 = torch.nn.Parameter(torch.tensor(0.3))
    module = ml.InfoNCE(effect=Emphasis(s=2) * Margin(m1=m1))
    assert dict(module.named_parameters()) == {"effect_m1": m1}
    plain = ml.NTXent(effect=Margin(m1=m1)).double()
    assert plain.effect_m1 is m1
    plain(random(4, 3, seed=0), random(4, 3, seed=1)).backward()
    assert m1.grad != 0
    repr(plain), repr(ml.NTXent(tau=m1))


def test_effects_take_tensors_that_a_schedule_changes():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)
    for numbers, tensors in (
        (Emphasis(s=3, c=2.5), Emphasis(s=tensor(3.0), c=tensor(2.5))),
        (Emphasis(s=3), Emphasis(s=tensor(3.0), c=tensor(math.inf))),
        (Emphasis(s=0), Emphasis(s=tensor(0.0))),
        (Margin(m1=0.3, m2=0.1), Margin(m1=tensor(0.3), m2=tensor(0.1))),
        (Ratio(m1=0.3), Ratio(m1=tensor(0.3))),
        (Attenuation(alpha=1), Attenuation(alpha=tensor(1.0))),
        (Attenuation(alpha=0.3, kind="II"), Attenuation(alpha=tensor(0.3), kind="II")),
    ):
        (v, want), (u, got) = (gradients(lambda q, k: ml.info_nce(q, k, effect=e), q, k) for e in (numbers, tensors))
        close(u, v, 1e-14)
        for g, w in zip(got, want, strict=True):
            close(g, w, 1e-13)
        assert str(tensors) == str(numbers)
    for coarse in (torch.bfloat16, torch.float16, torch.float32):
        for numbers, tensors in (
            (Emphasis(s=20, c=2.5), Emphasis(s=tensor(20.0).to(coarse), c=tensor(2.5).to(coarse))),
            (Margin(m1=0.5), Margin(m1=tensor(0.5).to(coarse))),
            (Attenuation(0.75), Attenuation(tensor(0.75).to(coarse))),
        ):
            want, got = (gradients(lambda q: ml.info_nce(q, k, effect=e), q)[1][0] for e in (numbers, tensors))
            close(got, want, 1e-14)
    s = tensor(1.0)
    effect = Emphasis(s=s)
    before = gradients(lambda q: ml.info_nce(q, k, effect=effect), q)[1][0]
    s.fill_(2.0)
    assert not torch.equal(before, gradients(lambda q: ml.info_nce(q, k, effect=effect), q)[1][0])


def test_a_margin_can_learn():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    m1 = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    m2 = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: ml.info_nce(q, k, effect=Margin(a, b)), (m1, m2))


def test_the_default_is_plain():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    close(ml.info_nce(q, k), eager(q, k, tau=0.25), 1e-14)
    assert torch.equal(ml.info_nce(q, k), ml.info_nce(q, k, effect=Plain(), tau=0.25, beta=1.0))
