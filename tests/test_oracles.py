"""Every effect, layout, beta and tau, against the paper's pseudo-code in float64 and in 150 digits."""

import pytest
import torch

import marginlens as ml
from tests import oracle_mpmath, oracle_torch
from tests.catalogue import BETAS, EFFECTS, TAUS, aligned, close, gradients, random, without_negatives

IMPLS = ("reference", "chunked")


def embeddings(kind, n, d, seed):
    if kind == "random":
        return random(n, d, seed=seed), random(n, d, seed=seed + 1)
    return aligned(n, d, seed, angle=1e-3)


def exact(left, right, pairs, tau, beta, effect):
    value, dl, dr = oracle_mpmath.gradients(left.tolist(), right.tolist(), pairs, tau, beta, effect)
    as_tensor = lambda rows: torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
    return float(value), as_tensor(dl), as_tensor(dr)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize(("kind", "n"), [("random", 3), ("aligned", 2)])
def test_info_nce_in_many_digits(effect, beta, tau, kind, n):
    q, k = embeddings(kind, n, 3, seed=n)
    value, dq, dk = exact(q, k, [(range(n), i) for i in range(n)], tau, beta, effect)
    for impl in IMPLS:
        v, (gq, gk) = gradients(lambda q, k: ml.info_nce(q, k, tau=tau, beta=beta, effect=effect, impl=impl), q, k)
        close(v, value, 1e-10)
        close(gq, dq, 1e-10)
        close(gk, dk, 1e-10)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize(("kind", "n"), [("random", 3), ("aligned", 2)])
def test_nt_xent_in_many_digits(effect, beta, tau, kind, n):
    z1, z2 = embeddings(kind, n, 3, seed=10 + n)
    z = torch.cat([z1, z2])
    pairs = []
    for i in range(2 * n):
        columns = [j for j in range(2 * n) if j != i]
        pairs.append((columns, columns.index((i + n) % (2 * n))))
    value, dl, dr = exact(z, z, pairs, tau, beta, effect)
    d1, d2 = (dl + dr).split(n)
    for impl in IMPLS:
        v, (g1, g2) = gradients(lambda a, b: ml.nt_xent(a, b, tau=tau, beta=beta, effect=effect, impl=impl), z1, z2)
        close(v, value, 1e-10)
        close(g1, d1, 1e-10)
        close(g2, d2, 1e-10)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("effect", [e for e in EFFECTS if without_negatives(e)], ids=str)
@pytest.mark.parametrize("kind", ["random", "aligned"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_positive_only_in_many_digits(effect, tau, kind, n):
    p, z = embeddings(kind, n, 3, seed=20 + n)
    value, dp, dz = exact(p, z, [([i], 0) for i in range(n)], tau, 0.0, effect)
    v, (gp, gz) = gradients(lambda p, z: ml.positive_only(p, z, tau=tau, effect=effect), p, z)
    close(v, value, 1e-10)
    close(gp, dp, 1e-10)
    close(gz, dz, 1e-10)


# At these temperatures and angles the float64 transcription keeps its digits (checked against the above).
@pytest.mark.parametrize("tau", [0.25, 1.0])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("n", [2, 17, 67])
def test_the_pseudo_code(effect, beta, tau, n):
    q, k = random(n, 7, seed=30 + n), random(n, 7, seed=31 + n)
    for ours, theirs in ((ml.info_nce, oracle_torch.info_nce), (ml.nt_xent, oracle_torch.nt_xent)):
        value, want = gradients(lambda q, k: theirs(q, k, tau, beta, effect), q, k)
        for impl in IMPLS:
            v, got = gradients(lambda q, k: ours(q, k, tau=tau, beta=beta, effect=effect, impl=impl), q, k)
            close(v, value, 1e-10)
            for g, w in zip(got, want, strict=True):
                close(g, w, 1e-10)


@pytest.mark.parametrize("effect", [e for e in EFFECTS if without_negatives(e)], ids=str)
def test_the_pseudo_code_of_positives_alone(effect):
    p, z = random(33, 5, seed=3), random(33, 5, seed=4)
    value, want = gradients(lambda p, z: oracle_torch.positive_only(p, z, 0.5, effect), p, z)
    v, got = gradients(lambda p, z: ml.positive_only(p, z, effect=effect), p, z)
    close(v, value, 1e-12)
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-10)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("beta", BETAS)
def test_positives_anywhere_other_lengths_and_a_queue(effect, impl, beta):
    q, k, queue = random(19, 6, seed=5), random(11, 6, seed=6), random(23, 6, seed=7)
    positives = torch.randint(0, 11, (19,), generator=torch.Generator().manual_seed(8))
    value, want = gradients(lambda q, k, r: oracle_torch.info_nce(q, k, 0.25, beta, effect, positives, r), q, k, queue)
    v, got = gradients(
        lambda q, k, r: ml.info_nce(q, k, tau=0.25, beta=beta, effect=effect, positives=positives, queue=r, impl=impl),
        q,
        k,
        queue,
    )
    close(v, value, 1e-12)
    for g, w in zip(got[:2], want[:2], strict=True):
        close(g, w, 1e-10)
    if beta > 0:
        close(got[2], want[2], 1e-10)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_learnable_temperature_gets_the_gradient_of_the_pseudo_code(effect, impl):
    q, k = random(13, 6, seed=5), random(13, 6, seed=6)
    tau = torch.tensor(0.25, dtype=torch.float64)
    for ours, theirs in ((ml.info_nce, oracle_torch.info_nce), (ml.nt_xent, oracle_torch.nt_xent)):
        _, (want,) = gradients(lambda t: theirs(q, k, t, 1.0, effect), tau)
        _, (got,) = gradients(lambda t: ours(q, k, tau=t, effect=effect, impl=impl), tau)
        close(got, want, 1e-10)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_negatives_from_the_queue_alone(effect):
    """MoCo's first two versions: each row sees its own positive and the queue."""
    q, k, queue = random(5, 4, seed=1), random(5, 4, seed=2), random(9, 4, seed=3)

    def row_by_row(q, k, queue):
        rows = [oracle_torch.info_nce(q[i : i + 1], k[i : i + 1], 0.25, 1.0, effect, None, queue) for i in range(5)]
        return torch.stack(rows).mean()

    value, want = gradients(row_by_row, q, k, queue)
    v, got = gradients(lambda q, k, r: ml.info_nce(q, k, effect=effect, queue=r, in_batch=False), q, k, queue)
    close(v, value, 1e-12)
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-10)
