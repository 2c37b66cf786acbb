"""The lens on a live model: its formulas against their sources, and what it promises of cost and bad input."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import marginlens as ml
from marginlens.lens import live
from tests.catalogue import random


def seen(q, k, features=None, **settings):
    """Return the numbers of a lens after one look."""
    lens = ml.Lens(**settings)
    lens.observe(q, k, features)
    return lens.read()


def test_alignment_and_uniformity_are_those_of_wang_and_isola():
    """E |x - y|^2 over positive pairs, and log E exp(-2 |x - y|^2) over other pairs (arXiv 2005.10242)."""
    q, k = random(30, 5, seed=0), random(30, 5, seed=1)
    x, y = (torch.nn.functional.normalize(z) for z in (q, k))
    found = seen(q, k)
    assert found["alignment"] == pytest.approx(float((x - y).square().sum(1).mean()), rel=1e-6)
    wanted = torch.pdist(x).pow(2).mul(-2).exp().mean().log()  # the code in the paper's appendix
    assert found["uniformity"] == pytest.approx(float(wanted), rel=1e-5)


def test_uniformity_of_a_square():
    """Corners of a square have two neighbours at a squared distance of 2 and one at 4."""
    corners = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    found = seen(corners, corners)
    assert found["uniformity"] == pytest.approx(math.log((2 * math.exp(-4) + math.exp(-8)) / 3), rel=1e-5)
    assert found["alignment"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_rank_is_rankme(rank):
    """Features with `rank` equal singular values have that effective rank (arXiv 2210.02885)."""
    features = torch.eye(8)[:rank].repeat(4, 1) * 3.0
    found = seen(random(8, 4, seed=0), random(8, 4, seed=1), features)["features"]
    assert found["rank"] == pytest.approx(rank, rel=1e-4)
    assert found["norm"] == pytest.approx(3.0)
    assert found["dimension"] == 8


def test_rank_of_any_features():
    z = random(40, 6, seed=3)
    values = torch.linalg.svdvals(z)
    share = values / values.sum() + 1e-7
    wanted = float(torch.exp(-(share * share.log()).sum()))
    assert live.rank_of(z.T @ z) == pytest.approx(wanted, rel=1e-9)


def test_effective_negatives():
    """Negatives all at one angle count in full; one far nearer than the others counts alone."""
    q, k = torch.eye(6), torch.eye(6)
    assert seen(q, k)["effective_negatives"] == pytest.approx(5.0, rel=1e-5)
    k = torch.eye(6).roll(1, 0)  # each row's positive is another axis, and its own axis is one of its negatives
    assert seen(q, k, tau=0.05)["effective_negatives"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("layout", ["info_nce", "nt_xent"])
@pytest.mark.parametrize("effect", ["plain", "margin(m1=0.4, m2=0.2)", "emphasis(s=20)", "attenuation(alpha=1)"])
def test_who_pulls_a_row_is_what_autograd_says(effect, layout):
    """The gradient of an anchor on the sphere, with the positive or the negatives held still."""
    n, tau = 12, 0.25
    q, k = (torch.nn.functional.normalize(random(n, 5, seed=s)) for s in (4, 5))
    rows, keys = (q, k) if layout == "info_nce" else (torch.cat([q, k]), torch.cat([q, k]))
    partner = torch.arange(n) if layout == "info_nce" else torch.arange(2 * n).roll(n)

    def pulls(side):
        anchor = rows.clone().requires_grad_()
        still = rows.detach()
        c = ((anchor if side == "positive" else still) * keys[partner]).sum(1)
        logits = (anchor if side == "negative" else still) @ keys.T / tau
        drop = torch.zeros_like(logits, dtype=torch.bool)
        drop[torch.arange(len(rows)), partner] = True
        if layout == "nt_xent":
            drop.fill_diagonal_(True)
        A = logits.masked_fill(drop, -math.inf).logsumexp(1)
        seen_rows = ml.rows(q, k, tau=tau, layout=layout, effect=effect)
        by = ml.lens.parts.gradient(effect, seen_rows)
        total = (by.positive * c).sum() + (by.negative * A).sum()
        (grad,) = torch.autograd.grad(total, anchor)
        tangent = grad - (grad * rows).sum(1, keepdim=True) * rows
        return float(tangent.norm(dim=1).sum())

    wanted = {side: pulls(side) for side in ("positive", "negative")}
    found = seen(q, k, effect=effect, tau=tau, layout=layout)["pull"]
    assert found["positive"] == pytest.approx(wanted["positive"] / sum(wanted.values()), rel=1e-5)
    assert found["positive"] + found["negative"] == pytest.approx(1.0)


def test_what_each_effect_would_do_is_the_gradient_it_declares():
    q, k = random(25, 6, seed=6), random(25, 6, seed=7)
    found = seen(q, k, effect="emphasis(s=20)")
    rows = ml.rows(q, k)
    plain = ml.lens.parts.plain_gradient(rows)
    for name, times in {**found["others"], "emphasis(s=20)": found["times"]}.items():
        by = ml.lens.parts.gradient(name, rows)
        for side in ("positive", "negative"):
            size = rows.theta.sin() if side == "positive" else 1.0  # by the angle, as in the paper
            wanted = (getattr(by, side).abs() * size).sum() / (getattr(plain, side).abs() * size).sum()
            assert times[side] == pytest.approx(float(wanted), rel=1e-5), (name, side)


def test_the_share_of_repelled_rows():
    angles = torch.tensor([0.5, 1.5, 2.5, 3.0])
    q = torch.tensor([[1.0, 0.0, 0.0]]).repeat(4, 1)
    k = torch.stack([angles.cos(), angles.sin(), torch.zeros(4)], 1)
    found = seen(q, k, effect="margin(m1=1.0)")
    assert found["repelled"] == 0.5
    assert found["others"]["margin(m1=0.4)"]["repelled"] == 0.25


def test_the_distributions_have_every_row_and_pair():
    q, k = random(50, 4, seed=8), random(50, 4, seed=9)
    found = seen(q, k)
    rows = ml.rows(q, k)
    counts = torch.tensor(found["joint"]["counts"])
    assert counts.sum() == found["rows"] == 50
    edges = torch.tensor(found["joint"]["theta"], dtype=torch.float64)
    assert counts.sum(1).tolist() == torch.histogram(rows.theta, edges).hist.tolist()
    edges = torch.tensor(found["joint"]["q"], dtype=torch.float64)
    assert counts.sum(0).tolist() == torch.histogram(rows.q, edges).hist.tolist()
    assert sum(found["negatives"]["counts"]) == 50 * 49


def test_lenses_merge_as_if_one_had_seen_all():
    batches = [(random(20, 4, seed=s), random(20, 4, seed=s + 50), random(20, 7, seed=s + 90)) for s in range(4)]
    whole, left, right = (ml.Lens(every=1) for _ in range(3))
    for number, batch in enumerate(batches):
        whole.observe(*batch)
        (left, right)[number % 2].observe(*batch)
    left.merge(right)
    ours, theirs = left.read(), whole.read()
    assert ours["joint"] == theirs["joint"]
    for name in ("angle", "uniformity", "effective_negatives", "alignment"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-12)
    assert ours["features"] == pytest.approx(theirs["features"], rel=1e-9)
    with pytest.raises(ValueError, match=r"0[.]5"):
        left.merge(ml.Lens(tau=0.5))


def test_it_is_plain_json_and_memory_does_not_grow():
    lens = ml.Lens(every=1)
    sizes = []
    for seed in range(3):
        lens.observe(random(30, 4, seed=seed), random(30, 4, seed=seed + 9), random(30, 5, seed=seed))
        sizes.append(sum(total.numel() for total in lens.sums.values()))
    assert sizes[0] == sizes[2] < 1000
    found = lens.read()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["samples"] == 3
    lens.reset()
    with pytest.raises(ValueError, match="nothing"):
        lens.read()


def test_it_looks_at_every_fourth_call():
    lens = ml.Lens(every=4)
    for seed in range(9):
        lens.observe(random(5, 3, seed=seed), random(5, 3, seed=seed + 1))
    assert lens.read()["samples"] == 3


def test_large_batches_are_thinned_out(monkeypatch):
    monkeypatch.setattr(live, "MOST", 10)
    found = seen(random(40, 4, seed=0), random(40, 4, seed=1))
    assert found["rows"] == 10
    assert sum(found["negatives"]["counts"]) == 10 * 39


class NoWaiting(TorchDispatchMode):
    """Fails where a tensor's value is read, which waits for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert "lift_fresh" not in name, "a number is copied from the host, which waits for a device"
        assert not any(word in name for word in ("_local_scalar_dense", "item", "nonzero", "bincount", "equal")), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["info_nce", "nt_xent", "positive_only"])
def test_nothing_is_read_before_it_is_asked_for(layout):
    q, k, f = random(12, 4, seed=0), random(12, 4, seed=1), random(12, 6, seed=2)
    lens = ml.Lens("emphasis(c=2)", layout=layout)
    with NoWaiting():
        lens.observe(q, k, f)
    assert lens.read()["rows"] == (24 if layout == "nt_xent" else 12)


def test_rows_alone_and_rows_without_negatives():
    q, k = random(12, 4, seed=0), random(12, 4, seed=1)
    lens = ml.Lens("margin(m1=0.4)")
    lens.observe_rows(ml.rows(q, k, effect="margin(m1=0.4)"))
    found, whole = lens.read(), seen(q, k, effect="margin(m1=0.4)")
    assert found["joint"] == whole["joint"]
    assert found["times"]["positive"] == pytest.approx(whole["times"]["positive"], rel=1e-5)
    assert "uniformity" not in found
    alone = seen(q, k, layout="positive_only", effect="margin(m1=0.4)")
    assert "probability" not in alone
    assert set(alone["others"]) == {"margin(m1=0.4)", "emphasis(s=20)", "emphasis(c=1)"}
    assert alone["times"]["negative"] is None


def test_bad_input_is_one_line():
    q, k = random(6, 4, seed=0), random(6, 4, seed=1)
    lens = ml.Lens()
    lens.observe(q, k.index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(ValueError, match="6 of 6"):  # because a key with NaN is in every row
        lens.read()
    lens = ml.Lens(layout="positive_only")
    lens.observe(q, k.index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(ValueError, match="1 of 6"):
        lens.read()
    for wrong, word in (
        (lambda: ml.Lens().observe(q[:1], k[:1]), "two rows"),
        (lambda: ml.Lens().observe(q, k[:, :3]), "dimension"),
        (lambda: ml.Lens().observe(q, k[:4]), "pair up"),
        (lambda: ml.Lens(layout="nt_xent").observe(q, k[:4]), "pair up"),
        (lambda: ml.Lens().observe(q, k, torch.zeros(6)), "features"),
        (lambda: ml.Lens("ratio(m1=0.4)", layout="positive_only"), "negatives"),
        (lambda: ml.Lens(every=0), "every"),
        (lambda: ml.Lens(layout="clip"), "layout"),
        (lambda: ml.Lens(beta=0.5, layout="positive_only"), "beta"),
        (lambda: ml.Lens(tau=-1.0), "tau"),
    ):
        with pytest.raises(ValueError, match=word):
            wrong()


def test_the_cost_is_what_the_guide_says():
    """Measured by benchmarks/lens.py: one look in 50 steps, for each size of a batch."""
    root = Path(__file__).parents[2]
    found = json.loads((root / "results" / "lens_cpu.json").read_text())
    assert found["every"] == 50
    assert [row["n"] for row in found["rows"]] == [256, 512, 1024, 2048, 4096]
    assert max(row["percent"] for row in found["rows"]) < 0.1
    assert max(row["percent_embedding"] for row in found["rows"]) < 2.0
    guide = " ".join((root / "docs" / "guides" / "lens.md").read_text().split())
    assert "less than 0.1 %" in guide
    assert "less than 2 %" in guide


def test_rows_at_0_and_at_pi_are_numbers():
    """Float32's pi is larger than pi, and two equal rows have a sine of 0: neither may become a huge weight or NaN."""
    q = random(8, 16, seed=0, dtype=torch.float32)
    k = random(8, 16, seed=1, dtype=torch.float32)
    k[0], k[1] = -q[0], q[1]
    rows = ml.rows(q, k, effect="emphasis(c=1)")
    product = ml.lens.decompose("emphasis(c=1)", rows).product
    assert torch.allclose(product.positive, rows.w_pos.double(), atol=1e-6)
    assert ml.lens.equivalent("emphasis(c=1)", rows).weight == pytest.approx(float(rows.w_pos.mean()), rel=1e-5)
    lens = ml.Lens("margin(m1=0.4)", every=1)
    lens.observe_rows(rows)
    found, whole = lens.read(), seen(q, k, effect="margin(m1=0.4)")
    assert found["angle"] == pytest.approx(whole["angle"], rel=1e-5)
    assert found["joint"] == whole["joint"]
    assert sum(found["joint"]["counts"][-1]) == 1
    assert 0.5 < found["times"]["positive"] < 5.0
    f = ml.rows(q, k, effect="margin(m1=0.4)").f[1]
    assert ml.lens.decompose("margin(m1=0.4)", rows).emphasis.positive[1] < 5.0 < f < 1e7


def test_collapsed_and_broken_features():
    q, k = random(8, 4, seed=0), random(8, 4, seed=1)
    assert seen(q, k, torch.zeros(8, 5))["features"]["norm"] == 0.0
    json.dumps(seen(q, k, torch.zeros(8, 5)), allow_nan=False)
    for bad in (math.nan, math.inf, 1e200):
        lens = ml.Lens()
        lens.observe(q, k, torch.full((8, 5), bad, dtype=torch.float64))
        with pytest.raises(ValueError, match="features"):
            lens.read()


def test_what_no_number_holds_is_none():
    """At a tiny tau the plain gradient underflows, and what an effect makes of it is no number."""
    q = torch.eye(16)
    found = seen(q, q + 0.001 * random(16, 16, seed=0, dtype=torch.float32), tau=0.0014)
    json.dumps(found, allow_nan=False)


def test_rows_without_negatives_and_effects_that_need_them():
    q, k = random(6, 4, seed=0), random(6, 4, seed=1)
    lens = ml.Lens("ratio(m1=0.4)", every=1)
    lens.observe_rows(ml.rows(q, k, layout="positive_only"))
    with pytest.raises(ValueError, match="6 of 6 rows have none"):
        lens.read()
    lens = ml.Lens(beta=0.0)
    lens.observe(q[:1], k[:1])
    assert set(lens.read()["others"]) == {"margin(m1=0.4)", "emphasis(s=20)", "emphasis(c=1)"}


def test_large_float64_embeddings():
    q, k = random(6, 4, seed=0), random(6, 4, seed=1)
    assert seen(q * 1e60, k * 1e-60)["angle"] == pytest.approx(seen(q, k)["angle"], rel=1e-5)
