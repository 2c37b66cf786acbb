"""Triton's kernels against their slow twin, in the interpreter: arithmetic and masks, but no GPU."""

import pytest
import torch
from torch.nn.functional import normalize

import marginlens as ml
from marginlens import kernels, layouts
from marginlens.kernels import reference
from tests.catalogue import close, gradients, random
from tests.test_transforms import compiles, twice

pytest.importorskip("triton")

from marginlens.kernels import lse as host
from marginlens.kernels import lse_tiles as tiles
from marginlens.kernels import unit_rows as rows

pytestmark = [
    # what a mask leaves out may overflow first, and a part of the keys may be empty
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
    pytest.mark.skipif(not tiles.INTERPRET.value, reason="the interpreter is off"),
]

EXACT = 3e-6
TOLERANCE = {3: 3e-6, 2: 1e-4, 1: 2e-2}
"""Stated, by parts: norm-wise relative difference to float64, for logits within +-40."""

LAYOUTS = ("detached", "two sides", "keys alone", "scale alone", "a set")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles of 32 x 16, in chunks of 32 beyond 64 dimensions, on two processors; of float32, one part of it."""
    cut(monkeypatch, 1)
    monkeypatch.setattr(rows, "KIND", torch.float32)
    monkeypatch.setattr(host, "LEAST", 1)


def cut(monkeypatch, parts):
    monkeypatch.setattr(rows, "KIND", torch.bfloat16)
    monkeypatch.setattr(host, "parts", lambda half: parts)
    for which in ("value", "slope", "set", "keys"):
        sizes = {64: host.Tiles(32, 16, 8, 2), host.ANY: host.Tiles(32, 16, 8, 2, 32)}
        monkeypatch.setitem(host.TILES, (which, parts), sizes)


def unit(n, d, seed):
    return normalize(random(n, d, seed=seed), dim=1)


def arbitrary(n, m, r, seed=3):
    """Arbitrary columns, some of them twice; every row keeps one, for r < m."""
    return torch.randint(0, m, (n, r), generator=torch.Generator().manual_seed(seed))


def compare(layout, q, keys, scale, drop, tolerance):
    """Value and gradients, in float32 here and in float64 there; dscale against the size of what it sums."""
    g = random(len(q), seed=2)
    learns = {
        "detached": (True, False, True), "two sides": (True, True, True), "keys alone": (False, True, True),
        "scale alone": (False, False, True), "a set": (True, False, True),
    }[layout]  # fmt: skip

    def run(neg_lse, dtype):
        inputs = [
            x.detach().to(dtype, copy=True).requires_grad_(w)
            for x, w in zip((q, keys, torch.tensor(scale)), learns, strict=True)
        ]
        A = neg_lse(inputs[0], None if layout == "a set" else inputs[1], inputs[2], drop)
        wanted = [x for x, w in zip(inputs, learns, strict=True) if w]
        return A.detach(), torch.autograd.grad((A * g.to(dtype)).sum(), wanted)

    want, wanted = run(reference.neg_lse, torch.float64)
    got, found = run(host.neg_lse, torch.float32)
    assert got.dtype == torch.float32
    assert (got.double() - want).abs().max() <= tolerance * max(1.0, scale)
    for a, b in zip(found[:-1], wanted[:-1], strict=True):
        close(a.double(), b, tolerance)
    assert (found[-1] - wanted[-1]).abs() <= tolerance * g.norm()


SHAPES = [(1, 5, 16, 1), (50, 70, 37, 2), (33, 7, 16, 0), (20, 33, 128, 1), (7, 20, 300, 2), (64, 64, 16, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "m", "d", "r"), SHAPES)
def test_the_slow_twin(n, m, d, r, layout):
    if layout == "a set":
        m = n
    if m <= r:
        pytest.skip("a row must keep a key")
    compare(layout, unit(n, d, 0), unit(m, d, 1), 4.0, arbitrary(n, m, r), EXACT)


@pytest.mark.parametrize("layout", ["detached", "two sides", "a set"])
@pytest.mark.parametrize(("scale", "r"), [(1.0, 0), (20.0, 1), (40.0, 2), (41.0, 1), (100.0, 0), (100.0, 2)])
def test_every_temperature(scale, r, layout):
    compare(layout, unit(40, 16, 0), unit(40, 16, 1), scale, arbitrary(40, 40, r), 4 * EXACT)


@pytest.mark.parametrize("layout", ["two sides", "a set"])
@pytest.mark.parametrize("parts", TOLERANCE)
@pytest.mark.parametrize("d", [16, 80])
def test_every_precision(d, parts, layout, monkeypatch):
    cut(monkeypatch, parts)
    compare(layout, unit(35, d, 0), unit(35, d, 1), 10.0, arbitrary(35, 35, 1), TOLERANCE[parts])


def test_the_precision_follows_the_embeddings_and_torch(monkeypatch):
    monkeypatch.undo()
    assert host.parts(True) == 1
    for setting, parts in (("highest", 3), ("high", 2), ("medium", 2)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
        assert host.parts(False) == parts
    seen = []
    monkeypatch.setattr(host, "parts", lambda half: seen.append(half) or 1)
    q, k = random(5, 16, seed=0, dtype=torch.float32), random(5, 16, seed=1, dtype=torch.float32)
    for a, b, queue in (
        (q, k, k),
        (q.half(), k.bfloat16(), k.half()),
        (q.half(), k.half(), k),
        (q, k.half(), q.half()),
    ):
        seen.clear()
        ml.info_nce(a, b, impl="triton")
        ml.nt_xent(a, b, impl="triton")
        assert set(seen) == {a.dtype.itemsize == b.dtype.itemsize == 2}
        seen.clear()
        ml.info_nce(a, b, queue=queue, impl="triton")
        assert set(seen) == {a.dtype.itemsize == b.dtype.itemsize == queue.dtype.itemsize == 2}


@pytest.mark.parametrize("processors", [1, 2, 40])
@pytest.mark.parametrize("layout", ["two sides", "a set"])
def test_splits_of_the_keys(layout, processors, monkeypatch):
    monkeypatch.setattr(host, "_processors", lambda device: processors)
    splits = host._splits(70, 70, 1, host.Tiles(32, 16, 8, 2), torch.device("cpu"))
    assert splits == {1: (1, 5), 2: (2, 3), 40: (5, 1)}[processors]
    compare(layout, unit(70, 16, 0), unit(70, 16, 1), 4.0, arbitrary(70, 70, 1), EXACT)


@pytest.mark.parametrize("scale", [40.0, 100.0])
def test_a_part_of_the_keys_that_a_row_drops_whole(scale, monkeypatch):
    monkeypatch.setattr(host, "_processors", lambda device: 40)
    q, drop = unit(20, 16, 0), torch.arange(16).expand(20, 16)  # the first of three tiles
    for layout in ("two sides", "a set"):
        m = 40 if layout == "two sides" else 20
        compare(layout, q, unit(m, 16, 1), scale, drop, 4 * EXACT)


@pytest.mark.parametrize("scale", [1.0, 40.0, 100.0])
def test_rows_near_minus_one_and_near_one(scale):
    """One row sees cosines near -1 alone, the others near 1: weights from e^-80 to e^0 in one product."""
    away = normalize(unit(1, 16, 0) + 0.01 * random(40, 16, seed=1), dim=1)
    away[7] = -normalize(away.mean(0), dim=0)
    keep = torch.arange(40)[:, None]
    for layout in ("two sides", "a set"):
        for drop in (keep, keep[:, :0]):
            compare(layout, away, away.clone(), scale, drop, 2e-5)


@pytest.mark.parametrize("factor", [2.0**16, 1e-12])
def test_large_and_small_cotangents(factor):
    """A loss scaled for half-precision training, and rows whose gradient an effect all but removes."""
    q = normalize(unit(1, 16, 0) + 0.1 * random(33, 16, seed=1), dim=1)
    q[3] = -q[4]
    drop, scale = torch.arange(33)[:, None], torch.tensor(40.0)
    for keys in (None, unit(20, 16, 5)):
        drop_ = drop % 20 if keys is not None else drop
        call = lambda f, dtype: lambda q: factor * f(q, None if keys is None else keys.to(dtype), scale, drop_).sum()
        _, (want,) = gradients(call(reference.neg_lse, torch.float64), q)
        _, (got,) = gradients(call(host.neg_lse, torch.float32), q.float())
        close(got.double(), want, 2e-5)


def covered(p, q, r, s, first, full, cols):
    """What `_runs`, `_masked` and `_plain` make of two ranges, by the kernels' own code."""
    t = lambda x: torch.tensor([x], dtype=torch.int32)
    out = torch.full((2, 64), -1, dtype=torch.int32)
    tables[(1,)](t(p), t(q), t(r), t(s), t(first), t(full), out, COLS=cols)
    return [[int(x) for x in row if x >= 0] for row in out]


if tiles.INTERPRET.value:
    import triton
    import triton.language as tl

    @triton.jit
    def tables(p, q, r, s, first, full, out, COLS: tl.constexpr):
        start, end = tl.load(first), tl.load(full)
        a, i, b, j = tiles._runs(tl.load(p), tl.load(q), tl.load(r), tl.load(s), start, end, COLS)
        for k in range(0, i + j):
            tl.store(out + k, tiles._masked(k, a, i, b, j, end))
        for k in range(start, end - i - j):
            tl.store(out + 64 + k, tiles._plain(k, a, i, b, j))


FAR = 2**31 - 1


@pytest.mark.parametrize("span", [(0, 160), (32, 96), (32, 32)], ids=str)
@pytest.mark.parametrize(
    "ranges",
    [
        (FAR, 0, FAR, 0), (0, 16, FAR, 0), (FAR, 0, 33, 50), (40, 41, 90, 99), (90, 99, 40, 41), (10, 60, 50, 90),
        (10, 90, 30, 40), (30, 40, 10, 90), (0, 160, 0, 160), (16, 32, 32, 48), (17, 18, 17, 18), (150, 160, 0, 3),
    ],
    ids=str,
)  # fmt: skip
def test_every_tile_is_visited_once_and_dropped_columns_with_a_mask(ranges, span):
    first, full = span[0] // 16, span[1] // 16
    masked, plain = covered(*ranges, first, full, 16)
    assert sorted(masked + plain) == list(range(first, full))
    p, q, r, s = ranges
    needed = {t for t in range(first, full) for x in range(16 * t, 16 * t + 16) if p <= x < q or r <= x < s}
    assert set(masked) == needed


def test_equal_bits_on_repeats():
    q, k = unit(33, 16, 0).float(), unit(33, 16, 1).float()
    for loss in (ml.info_nce, ml.nt_xent):
        call = lambda: gradients(lambda q, k: loss(q, k, impl="triton"), q, k)
        (value, grads), (again, twin) = call(), call()
        assert torch.equal(value, again)
        assert all(torch.equal(a, b) for a, b in zip(grads, twin, strict=True))


@pytest.mark.parametrize(
    "effect", [ml.Plain(), ml.Emphasis(s=3, c=2.5), ml.Margin(0.3, 0.1), ml.Attenuation(alpha=0.5)], ids=str
)
def test_whole_losses(effect):
    q, k = (random(20, 20, seed=i, dtype=torch.float32) for i in range(2))
    queue, tau = random(21, 20, seed=3, dtype=torch.float32), torch.tensor(0.2)
    positives = arbitrary(20, 20, 1)[:, 0]
    for loss in (
        lambda q, k, tau, impl: ml.info_nce(q, k, tau=tau, effect=effect, queue=queue, impl=impl),
        lambda q, k, tau, impl: ml.info_nce(q, k.detach(), tau=tau, effect=effect, positives=positives, impl=impl),
        lambda q, k, tau, impl: ml.nt_xent(q, k, tau=tau, effect=effect, impl=impl),
    ):
        want, wanted = gradients(lambda *x: loss(*x, "reference"), q, k, tau)
        got, found = gradients(lambda *x: loss(*x, "triton"), q, k, tau)
        close(got, want, 2e-6)
        for a, b in zip(found, wanted, strict=True):
            if b.abs().max() > 0:
                close(a, b, 1e-5)
            else:
                assert (a == 0).all()


def test_rows_without_gradient_want_no_slope(monkeypatch):
    asked = []
    run = host.run_forward
    monkeypatch.setattr(host, "run_forward", lambda *a: asked.append(a[5]) or run(*a))
    q, k = (random(9, 16, seed=i, dtype=torch.float32) for i in range(2))
    ml.rows(q, k, impl="triton")
    ml.info_nce(q, k, impl="triton")
    ml.nt_xent(q.requires_grad_(), k, impl="triton").backward()
    ml.info_nce(q.detach(), k.requires_grad_(), impl="triton").backward()
    assert asked == [False] * 4
    ml.info_nce(q, k, impl="triton").backward()
    ml.info_nce(q, k.detach(), impl="triton").backward()
    assert asked == [False] * 4 + [True] * 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func():
    q, k = (random(7, 16, seed=i, dtype=torch.float32) for i in range(2))
    tau = torch.tensor(0.25)
    for loss in (ml.info_nce, ml.nt_xent):
        call = lambda q, k, t: loss(q, k, tau=t, impl="triton")
        _, want = gradients(call, q, k, tau)
        for g, w in zip(torch.func.grad(call, argnums=(0, 1, 2))(q, k, tau), want, strict=True):
            close(g, w, 1e-6)
        for i in range(3):
            close(torch.func.grad(call, argnums=i)(q, k, tau), want[i], 1e-5)
        stacked = torch.stack([q, q + k])
        close(
            torch.func.vmap(call, (0, None, None))(stacked, k, tau),
            torch.stack([call(x, k, tau) for x in stacked]),
            1e-6,
        )
        rows = lambda q, impl: loss(q, k, impl=impl, reduction="none")
        close(
            torch.func.jacrev(lambda q: rows(q, "triton"))(q),
            torch.func.jacrev(lambda q: rows(q, "reference"))(q),
            1e-5,
        )


@pytest.mark.parametrize("layout", [ml.info_nce, ml.nt_xent])
def test_a_second_derivative_is_refused(layout):
    q, k = (random(5, 16, seed=i, dtype=torch.float32) for i in range(2))
    for keys in (k, k.clone().requires_grad_()):
        with pytest.raises(RuntimeError, match="use impl='reference'"):
            twice(lambda q: layout(q, keys, impl="triton"), q.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="use impl='reference'"):
            torch.func.grad(lambda q: torch.func.grad(lambda q: layout(q, keys, impl="triton"))(q).square().sum())(q)


@compiles
@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_compile_in_one_graph(loss):
    torch._dynamo.reset()
    q, k = (random(19, 16, seed=i, dtype=torch.float32) for i in range(2))
    compiled = torch.compile(lambda q, k, x: loss(q, k, tau=x, impl="triton"), fullgraph=True, backend="aot_eager")
    for tau in (0.1, 0.3):
        want, grads = gradients(lambda q, k, x: loss(q, k, tau=x, impl="triton"), q, k, torch.tensor(tau))
        value, got = gradients(compiled, q, k, torch.tensor(tau))
        close(value, want, 1e-6)
        for g, w in zip(got, grads, strict=True):
            close(g, w, 1e-5)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("slope", [True, False])
def test_operators_are_well_formed(keys, slope):
    x = host.operand(unit(9, 12, 0).float(), 1)
    y, scale = host.operand(unit(11, 12, 1).float(), 1) if keys else None, torch.tensor(4.0)
    drop = torch.arange(9)[:, None]
    torch.library.opcheck(host._forward, (x, y, scale, drop, 12, slope))
    A, _ = host._forward(x, y, scale, drop, 12, slope)
    torch.library.opcheck(host._backward, (torch.ones(9), x, y, scale, drop, A, 12))


def test_what_it_cannot_do_is_said(monkeypatch):
    q, k = random(5, 4, seed=0), random(5, 4, seed=1)
    with pytest.raises(ValueError, match=r"no tiles for torch\.float64; use impl='auto'"):
        ml.info_nce(q, k, impl="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"needs a GPU: the embeddings are on cpu; use impl='auto'"):
        ml.nt_xent(q.float(), k.float(), impl="triton")
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"not installed: pip install triton, or use impl='auto'"):
        ml.info_nce(q.float(), k.float(), impl="triton")


def test_what_auto_stands_for(monkeypatch):
    class Rows:
        device = torch.device("cuda")

        def __init__(self, cuda=True):
            self.is_cuda = cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels.choose("auto", Rows(), torch.float32) == "triton"
    assert kernels.choose("auto", Rows(), torch.float32, negatives=False) == "chunked"
    assert kernels.choose("auto", Rows(), torch.float64) == "chunked"
    assert kernels.choose("auto", Rows(cuda=False), torch.float32) == "chunked"
    assert kernels.choose("chunked", Rows(), torch.float32) == "chunked"
    with monkeypatch.context() as old:
        old.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        old.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
        assert kernels.choose("auto", Rows(), torch.float32) == "chunked"
        with pytest.raises(ValueError, match=r"Tesla T4 is older; use impl='auto'"):
            kernels.choose("triton", Rows(), torch.float32)
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert kernels.choose("auto", Rows(), torch.float32) == "chunked"


def test_layouts_say_what_they_need(monkeypatch):
    asked = []
    choose = kernels.choose
    monkeypatch.setattr(layouts, "choose", lambda impl, q, *rest: asked.append(rest) or choose(impl, q, *rest))
    q, k = (random(5, 16, seed=i, dtype=torch.float32) for i in range(2))
    ml.info_nce(q, k)
    ml.info_nce(q, k.clone().requires_grad_(), queue=random(7, 16, seed=2, dtype=torch.float32))
    ml.info_nce(q, k, queue=k.double(), in_batch=False)
    ml.info_nce(q, k, beta=0.0)
    ml.nt_xent(q, k)
    single, double = torch.float32, torch.float64
    assert asked == [(single, True), (single, True), (double, True), (single, False), (single, True)]
