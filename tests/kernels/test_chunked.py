"""The chunked kernel against its slow twin, and its memory."""

import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import marginlens as ml
from marginlens.kernels import chunked, neg_lse
from tests.catalogue import EFFECTS, close, gradients, random

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
"""Stated: norm-wise relative difference between the kernels."""


def unit(n, d, seed, dtype):
    return torch.nn.functional.normalize(random(n, d, seed=seed), dim=1).to(dtype)


@pytest.fixture(params=[2**20, 256, 16], ids=["one block", "some blocks", "many blocks"])
def block(request, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "m", "d"), [(1, 2, 1), (17, 17, 5), (33, 50, 16), (50, 7, 3), (100, 64, 128)])
@pytest.mark.parametrize("scale", [1.0, 4.0, 100.0])
@pytest.mark.parametrize("drops", [0, 1, 2])
def test_the_slow_twin(n, m, d, scale, drops, dtype):
    if m <= drops:
        pytest.skip("a row must keep a key")
    q, keys, scale = unit(n, d, 0, dtype), unit(m, d, 1, dtype), torch.tensor(scale, dtype=dtype)
    drop = torch.stack([(torch.arange(n) + j) % m for j in range(drops)], 1) if drops else torch.empty(n, 0).long()
    g = random(n, seed=2, dtype=dtype)
    for call in (
        lambda q, keys, scale, impl: neg_lse(q, keys, scale, drop, impl),
        lambda q, keys, scale, impl: neg_lse(q, keys.detach(), scale, drop, impl),
        lambda q, keys, scale, impl: neg_lse(q.detach(), keys, scale, drop, impl),
        lambda q, keys, scale, impl: neg_lse(q.detach(), keys.detach(), scale, drop, impl),
    ):
        want, wanted = gradients(lambda *x: (call(*x, "reference") * g).sum(), q, keys, scale)
        got, found = gradients(lambda *x: (call(*x, "chunked") * g).sum(), q, keys, scale)
        close(got, want, 10 * TOLERANCE[dtype])
        for a, b in zip(found, wanted, strict=True):
            if b.abs().max() > 0:
                close(a, b, 10 * TOLERANCE[dtype])
            else:
                assert (a == 0).all()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("n", [2, 17, 40])
def test_a_set_against_itself(n):
    z, scale = unit(2 * n, 6, 0, torch.float64), torch.tensor(4.0, dtype=torch.float64)
    itself = torch.arange(2 * n)
    drop = torch.stack([itself, itself.roll(n)], 1)
    g = random(2 * n, seed=2)
    want, wanted = gradients(lambda z, s: (neg_lse(z, None, s, drop, "reference") * g).sum(), z, scale)
    got, found = gradients(lambda z, s: (neg_lse(z, None, s, drop, "chunked") * g).sum(), z, scale)
    close(got, want, 1e-12)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-12)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_every_effect_over_blocks(effect):
    q, k = random(37, 5, seed=0), random(37, 5, seed=1)
    for loss in (ml.info_nce, ml.nt_xent):
        want, wanted = gradients(lambda q, k: loss(q, k, effect=effect, impl="reference"), q, k)
        got, found = gradients(lambda q, k: loss(q, k, effect=effect, impl="chunked"), q, k)
        close(got, want, 1e-12)
        for a, b in zip(found, wanted, strict=True):
            close(a, b, 1e-11)


def test_parts_of_the_keys_combine():
    q, keys, scale = unit(9, 4, 0, torch.float64), unit(20, 4, 1, torch.float64), torch.tensor(4.0).double()
    none = torch.empty(9, 0, dtype=torch.long)
    whole = neg_lse(q, keys, scale, none)
    parts = [neg_lse(q, part, scale, none) for part in keys.split(7)]
    close(torch.logaddexp(torch.logaddexp(parts[0], parts[1]), parts[2]), whole, 1e-14)


@pytest.mark.parametrize("keep", ["nothing", "mean", "weights"])
def test_operators_are_well_formed(keep):
    q, keys, scale = unit(9, 4, 0, torch.float32), unit(11, 4, 1, torch.float32), torch.tensor(4.0)
    drop = torch.arange(9)[:, None]
    torch.library.opcheck(chunked._forward, (q, keys, scale, drop, keep))
    A, _ = chunked._forward(q, keys, scale, drop, keep)
    for want in (True, False):
        torch.library.opcheck(chunked._backward, (torch.ones(9), q, keys, scale, drop, A, want))


class Ledger(TorchDispatchMode):
    """Counts the bytes of live tensors' storages, and remembers the most."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak, self.largest = set(), 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.live or size == 0:
            return
        self.live.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.live.discard(key)
        self.now -= size


def peak(n, d, impl, monkeypatch, block=2**14):
    """Bytes at the peak of value and gradient, the operators' insides included."""
    monkeypatch.setattr(chunked, "BLOCK", block)
    if impl == "chunked":  # the operators are opaque to a dispatch mode, so run what they run
        monkeypatch.setattr(chunked, "_forward", chunked.run_forward)
        monkeypatch.setattr(chunked, "_backward", chunked.run_backward)
    q, k = (random(n, d, seed=i, dtype=torch.float32).requires_grad_() for i in range(2))
    with Ledger() as ledger:
        ml.info_nce(q, k, effect="emphasis(s=3, c=2)", impl=impl).backward()
    monkeypatch.undo()
    return ledger


def test_memory_grows_linearly(monkeypatch):
    d, sizes = 4, (512, 1024, 2048)
    ours = [peak(n, d, "chunked", monkeypatch) for n in sizes]
    theirs = [peak(n, d, "reference", monkeypatch) for n in sizes]
    for n, ledger in zip(sizes, ours, strict=True):
        assert ledger.largest <= 4 * max(2**14, 16 * n, d * n)
    growth = [b.peak / a.peak for a, b in itertools.pairwise(ours)]
    assert max(growth) < 2.2
    # the ledger can tell: the twin holds the matrix, and grows by four
    assert all(t.largest >= 4 * n * n for n, t in zip(sizes, theirs, strict=True))
    assert theirs[2].peak / theirs[1].peak > 3.5
    assert ours[2].peak < theirs[2].peak / 10


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
@pytest.mark.usefixtures("block")
def test_torch_func_over_blocks(loss):
    """More pairs than a block holds, both sides learn: the backward pass then calls an operator of its own."""
    q, k, tau = random(37, 5, seed=0), random(37, 5, seed=1), torch.tensor(0.2, dtype=torch.float64)
    call = lambda q, k, tau: loss(q, k, tau=tau, impl="chunked")
    _, want = gradients(call, q, k, tau)
    for got, wanted in zip(torch.func.grad(call, argnums=(0, 1, 2))(q, k, tau), want, strict=True):
        close(got, wanted, 1e-13)
    with pytest.raises(RuntimeError, match="use impl='reference'"):
        torch.func.grad(lambda q: torch.func.grad(call)(q, k, tau).square().sum())(q)
