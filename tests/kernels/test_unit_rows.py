"""Triton's rows of length one against their slow twin, in the interpreter. A whole loss takes few launches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import marginlens as ml
from marginlens.layouts import _cosine, _sine, _unit
from tests.catalogue import close, gradients, random
from tests.test_transforms import compiles, twice

pytest.importorskip("triton")

from marginlens.kernels import lse as host
from marginlens.kernels import lse_tiles as tiles
from marginlens.kernels import unit_rows as rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
    pytest.mark.skipif(not tiles.INTERPRET.value, reason="the interpreter is off"),
]

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Stated: norm-wise relative difference of a gradient, which comes in the embeddings' type. Rows are float32."""


def twin(x, y, together):
    u, v = (_unit(z, torch.float64) for z in (x, y))
    cos, sin = _cosine(u, v), _sine(u, v)
    return (torch.cat([u, v]), None, cos.repeat(2), sin.repeat(2)) if together else (u, v, cos, sin)


def found(x, y, together=False):
    """What `twin` returns."""
    units = rows.units(x, y, together, sines=True)
    return units.u, None if together else units.v, units.cos, units.sin


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 37), (33, 128), (3, 300)])
def test_the_slow_twin(n, d, together, dtype):
    x, y = (random(n, d, seed=i).to(dtype) for i in range(2))
    total = 2 * n if together else n
    weights = [random(total, d, seed=2), random(total, d, seed=3), random(total, seed=4), random(total, seed=5)]

    def loss(all):
        return sum((a * w).sum() for a, w in zip(all, weights, strict=True) if a is not None)

    for got, want in zip(found(x, y, together), twin(x.double(), y.double(), together), strict=True):
        if want is not None:
            assert got.dtype == torch.float32
            assert (got - want).norm() <= 2e-7 * max(1.0, want.norm())
    _, want = gradients(lambda x, y: loss(twin(x, y, together)), x.double(), y.double())
    _, got = gradients(lambda x, y: loss(found(x, y, together)), x, y)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        if d > 1:  # one number of length one has no gradient but what rounding leaves
            close(a, b, TOLERANCE[dtype])


@pytest.mark.parametrize("together", [False, True])
def test_sines_of_angles_near_zero_and_pi(together):
    """Where 1 - cos^2 has no digits left; and where a sine has no slope, none is made up."""
    x, away = random(6, 20, seed=0), random(6, 20, seed=1)
    y = torch.tensor([1.0, -1.0, 2.0, -3.0, 1.0, -1.0])[:, None] * x
    y[:4] += torch.tensor([1e-3, 1e-3, 1e-5, 1e-5])[:, None] * away[:4]
    x, y = x.float(), y.float()
    want, got = twin(x.double(), y.double(), together)[3], found(x, y, together)[3]
    assert (got - want).abs().max() <= 1e-7
    slope = lambda f, *z: gradients(lambda x, y: f(x, y, together)[3].sum(), *z)[1]
    for a, b in zip(slope(found, x, y), slope(twin, x.double(), y.double()), strict=True):
        close(a[:2], b[:2], 1e-3)
        assert (a[4:] == 0).all()


def test_whom_to_drop():
    x, y = (random(5, 16, seed=i, dtype=torch.float32) for i in range(2))
    own = torch.arange(10)
    assert torch.equal(rows.units(x, y).drop, own[:5, None])
    assert torch.equal(rows.units(x, y, True).drop, torch.stack([own, own.roll(5)], 1))
    assert rows.units(x).drop.shape == (5, 0)


def test_one_side_alone():
    x, w = random(7, 20, seed=0), random(7, 20, seed=1)
    u, v, cos, s, t, *_ = rows.units(x.float())
    assert v.shape == (0, 20)
    assert len(cos) == 0
    assert (s.shape, t.shape) == ((3, 7, 32), (3, 0, 32))
    close(u, _unit(x, torch.float64), 2e-7)
    _, want = gradients(lambda x: (_unit(x, torch.float64) * w).sum(), x)
    _, got = gradients(lambda x: (rows.units(x)[0] * w).sum(), x.float())
    close(got[0], want[0], 1e-6)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 2), (1, 2), (0, 1), (1, 3), (2, 3)], ids=str)
def test_some_cotangents_and_some_sides(which):
    x, y, weights = random(9, 16, seed=0), random(9, 16, seed=1), [random(9, 16, seed=2)] * 2 + [random(9, seed=3)] * 2
    for learns in ((True, False), (False, True), (True, True)):
        sides = lambda x, y: (z if w else z.detach() for z, w in zip((x, y), learns, strict=True))
        call = lambda f: lambda x, y: sum((f(*sides(x, y))[i] * weights[i]).sum() for i in which) + 0 * (x + y).sum()
        _, want = gradients(call(lambda x, y: twin(x, y, False)), x, y)
        _, got = gradients(call(found), x.float(), y.float())
        for a, b in zip(got, want, strict=True):
            assert (a == 0).all() if (b == 0).all() else close(a, b, 1e-6) is None


def test_a_side_that_does_not_learn_asks_nothing_of_the_kernels():
    x, y = (random(5, 16, seed=i, dtype=torch.float32) for i in range(2))
    for learns in ((True, False), (False, True), (True, True)):
        x.requires_grad_(learns[0]), y.requires_grad_(learns[1])
        u, v, cos, s, t, *_ = rows.units(x, y)
        assert (u.requires_grad, v.requires_grad, cos.requires_grad) == (*learns, True)
        assert not s.requires_grad
        assert not t.requires_grad


@pytest.mark.parametrize("together", [False, True])
def test_rows_at_the_edges(together):
    """Large, small, subnormal and zero rows; NaN and infinity, which spoil their own row and no other."""
    x, y = random(9, 20, seed=0).float(), random(9, 20, seed=1).float()
    x[1], x[2], x[3] = 1e30 * x[1], 1e-30 * x[2], 1e-40 * x[3]
    x[4], x[5, 3], x[6, 2] = 0.0, torch.nan, -torch.inf
    x[7], x[7, 0] = 0.0, torch.nan
    y[8] = 0.0
    units = found(x, y, together)
    for got, want in zip(units, twin(x, y, together), strict=True):
        if want is not None:
            assert torch.equal(got.isnan(), want.isnan())
            close(got.double().nan_to_num(), want.nan_to_num(), 1e-6)
    assert (units[0][4] == 0).all()

    def grads(f, *given):
        leaves = [z.clone().requires_grad_() for z in given]
        u, _, cos, sin = f(*leaves)
        fine = torch.tensor([0, 1, 2, 4, 8])
        value = cos[fine].sum() + sin[fine].sum() + (u[fine] * random(5, 20, seed=2)).sum()
        return [g[fine] for g in torch.autograd.grad(value, leaves)]

    got = grads(lambda x, y: found(x, y, together), x, y)
    want = grads(lambda x, y: twin(x, y, together), x.double(), y.double())
    for side, (a, b) in enumerate(zip(got, want, strict=True)):
        for i in range(5):
            if (side, i) in ((0, 3), (1, 4)):
                assert (a[i] == 0).all()
            elif (side, i) == (1, 3):  # beside a zero row, its own gradient is but what rounding leaves
                assert a[i].norm() <= 1e-6
            else:
                close(a[i], b[i], 1e-5)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_tiles_add_up(parts):
    x, y = random(5, 20, seed=0).float(), random(5, 20, seed=1).float()
    u, v, _, s, t, *_ = rows.units(x, y, False, parts)
    z, _, _, both, *_ = rows.units(x, y, True, parts)
    assert s.dtype == t.dtype == torch.bfloat16
    assert s.shape == (parts, 5, 32)
    for row, tile in ((u, s), (v, t), (z, both)):
        assert (tile[:, :, 20:] == 0).all()
        assert ((tile.double().sum(0)[:, :20] - row).abs() <= 2.0 ** (-8 * parts + 1) * row.abs()).all()
        close(tile.double().sum(0), host.operand(row, parts).double().sum(0), 2.0 ** (-8 * parts + 1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("together", [False, True])
def test_transforms(together):
    x, y = (random(5, 16, seed=i, dtype=torch.float32) for i in range(2))
    call = lambda x, y: sum(z.square().sum() + z.sum() for z in found(x, y, together) if z is not None)
    _, want = gradients(call, x, y)
    for got, wanted in zip(torch.func.grad(call, argnums=(0, 1))(x, y), want, strict=True):
        close(got, wanted, 1e-6)
    stacked = torch.stack([x, x + y])
    close(torch.func.vmap(call, (0, None))(stacked, y), torch.stack([call(z, y) for z in stacked]), 1e-6)
    with pytest.raises(RuntimeError, match="use impl='reference'"):
        twice(lambda x: call(x, y), x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="use impl='reference'"):
        torch.func.grad(lambda x: torch.func.grad(call)(x, y).square().sum())(x)


@pytest.mark.parametrize("together", [False, True])
def test_operators_are_well_formed(together):
    x, y = random(5, 20, seed=0).bfloat16(), random(5, 20, seed=1).float()
    torch.library.opcheck(rows._forward, (x, None, False, 2, False))
    torch.library.opcheck(rows._forward, (x, y, together, 1, True))
    g = random(10 if together else 5, 20, seed=2).float()
    torch.library.opcheck(rows._backward, (g, None, g[:, 0], g[:, 1], x, y, together, True, True))
    torch.library.opcheck(rows._backward, (g, None, None, None, x, y, together, True, False))


@compiles
@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_a_compiled_loss_follows_the_precision(loss):
    torch._dynamo.reset()
    x, y = (random(8, 20, seed=i, dtype=torch.float32) for i in range(2))
    compiled = torch.compile(lambda x, y: loss(x, y, impl="triton"), fullgraph=True, backend="aot_eager")
    _, want = gradients(lambda x, y: loss(x, y, impl="reference"), x.double(), y.double())
    try:
        for precision, least, most in (("highest", 0.0, 1e-6), ("high", 2e-6, 1e-4), ("highest", 0.0, 1e-6)):
            torch.set_float32_matmul_precision(precision)
            _, got = gradients(compiled, x, y)
            assert least <= (got[0] - want[0]).norm() / want[0].norm() <= most
    finally:
        torch.set_float32_matmul_precision("highest")


class Ops(TorchDispatchMode):
    """The operators that launch something on a GPU; ours launch one kernel each, and `neg_lse`'s gradient two."""

    FREE = ("detach", "promote_types", "expand", "unsqueeze", "slice", "view", "select", "alias", "t")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.seen += [name] * (2 if name == "neg_lse_triton_backward" else 1)
        return func(*args, **(kwargs or {}))


def launches(loss, **settings):
    x, y = (random(8, 16, seed=i).bfloat16().requires_grad_() for i in range(2))
    with Ops() as ops:
        loss(x, y, impl="triton", **settings).backward()
    return ops.seen


def test_few_launches():
    """In a captured training step of a few hundred rows, launches are what a loss costs."""
    seen = {
        "detached": launches(lambda q, k, **s: ml.info_nce(q, k.detach(), **s)),
        "both": launches(ml.info_nce),
        "set": launches(ml.nt_xent),
        "margin": launches(ml.nt_xent, effect=ml.Margin(m1=0.4, m2=0.2)),
    }
    counts = {name: len(ops) for name, ops in seen.items()}
    assert counts == {"detached": 14, "both": 16, "set": 15, "margin": 22}, seen


def test_a_few_hundred_rows_are_not_split(monkeypatch):
    monkeypatch.setattr(host, "_processors", lambda device: 132)
    split = {}
    for (which, parts), sizes in host.TILES.items():
        for n in (256, 65536):
            split[n, which, parts] = host._splits(n, n, 1, sizes[128], torch.device("cpu"))[0]
    assert {count for (n, *_), count in split.items() if n == 256} == {1}
    few = host._splits(256, 65536, 1, host.Tiles(64, 128, 4, 3), torch.device("cpu"))
    assert few == (64, 8)
