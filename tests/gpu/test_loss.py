"""Triton's kernels for the loss, on a GPU: against float64, at their memory's edges, repeated, captured, compiled."""

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch.nn.functional import normalize

import marginlens as ml
from marginlens import layouts
from marginlens.kernels import reference
from marginlens.kernels.launch import capture

CUDA = torch.device("cuda")

TOLERANCE = {1: 1e-2, 2: 1e-4, 3: 1e-5}
"""Stated, by the bf16 parts that a number has: norm-wise relative difference of a gradient to float64, and absolute
difference of A in units of the scale; for logits within +-40, beyond which it grows with them."""

CASES = [
    *itertools.product(("detached", "both"), [(1000, 1333)], [128], [1], [10.0], (1, 2, 3)),
    *itertools.product(("both",), [(300, 77), (1, 9)], [128], [1], [40.0, 100.0], (1, 2, 3)),
    *itertools.product(("set",), [(1000, 1000), (514, 514)], [128], [2], [10.0, 40.0, 100.0], (1, 2, 3)),
    *itertools.product(("both",), [(514, 200), (33, 4097)], [37], [0], [20.0, 100.0], (1,)),
    *itertools.product(("both",), [(129, 1030)], [300], [1], [5.0, 100.0], (1, 3)),
    *itertools.product(("set",), [(257, 257)], [300], [3], [20.0], (1,)),
]


def unit(n, d, seed):
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(CUDA)


def drops(layout, n, m, r):
    """A row's own column and its other view's, where there are any; else arbitrary ones."""
    own = torch.arange(n)
    if layout == "set" and r == 2 and n % 2 == 0:
        return torch.stack([own, own.roll(n // 2)], 1).to(CUDA)
    if r == 1 and m >= n:
        return own[:, None].to(CUDA)
    return torch.randint(0, m, (n, r), generator=torch.Generator().manual_seed(3)).to(CUDA)


def case(layout, size, d, r, scale, parts):
    """Errors of A, dq, dkeys and dscale, and whether all are finite."""
    from marginlens.kernels import lse as triton

    (n, m), g = size, torch.randn(size[0], generator=torch.Generator().manual_seed(2)).to(CUDA)
    q, k, drop = unit(n, d, 0), unit(m, d, 1), drops(layout, n, m, r)

    def run(neg_lse, dtype):
        x, y, s = (t.to(dtype, copy=True).requires_grad_() for t in (q, k, torch.tensor(scale, device=CUDA)))
        y = y if layout == "both" else y.detach()
        A = neg_lse(x, None if layout == "set" else y, s, drop)
        inputs = [x, s, y] if layout == "both" else [x, s]
        return [A.detach().double(), *(t.double() for t in torch.autograd.grad((A * g.to(dtype)).sum(), inputs))]

    def tiled(x, y, s, drop):
        tiles = triton.operand(x, parts), None if y is None else triton.operand(y, parts)
        return triton.neg_lse(x, y, s, drop, tiles)

    want, got = run(reference.neg_lse, torch.float64), run(tiled, torch.float32)
    sizes = [torch.tensor(scale), want[1].norm(), g.double().norm(), *(x.norm() for x in want[3:])]
    errors = [float((a - b).abs().max() / scale) for a, b in [(got[0], want[0])]]
    errors += [float((a - b).norm() / size) for a, b, size in zip(got[1:], want[1:], sizes[1:], strict=True)]
    return errors, all(bool(x.isfinite().all()) for x in got)


def compile_case(arguments):
    """In a process of its own, so that the compiler's cache on disk fills up in parallel."""
    try:
        case(*arguments)
    except Exception as error:  # the test itself will say it again
        return repr(error)
    return ""


@pytest.fixture(scope="module")
def compiled_cases():
    kinds = {(layout, d, r, parts): a for a in CASES for layout, _, d, r, _, parts in [a]}
    workers = min(len(kinds), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_case, kinds.values()))


@pytest.mark.usefixtures("compiled_cases")
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_float64_within_the_stated_tolerance(arguments):
    scale, parts = arguments[4:]
    torch.full((2**24,), torch.nan, device=CUDA)  # so that what a kernel forgets to write is NaN
    errors, finite = case(*arguments)
    assert finite
    assert max(errors) <= TOLERANCE[parts] * max(1.0, scale / 40), errors


def losses(q, k, tau, impl, reduction="mean"):
    ask = {"tau": tau, "impl": impl, "reduction": reduction}
    return (
        ml.info_nce(q, k.detach(), **ask),
        ml.info_nce(q, k, **ask),
        ml.nt_xent(q, k, **ask),
        ml.info_nce(q, k, queue=k.detach().flip(0), positives=torch.arange(len(q), device=q.device).flip(0), **ask),
    )


def embeddings(n, d, dtype, seed=0):
    found = (torch.randn(n, d, generator=torch.Generator().manual_seed(seed + i)) for i in range(2))
    return [x.to(CUDA, dtype).requires_grad_() for x in found]


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [(torch.bfloat16, "highest", 2e-2), (torch.float16, "highest", 1e-2), (torch.float32, "highest", 1e-5),
     (torch.float32, "high", 1e-4)],
    ids=str,
)  # fmt: skip
def test_whole_losses(dtype, precision, tolerance, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    q, k = embeddings(515, 128, dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    for ours, theirs in zip(losses(q, k, 0.1, "triton"), losses(*exact, 0.1, "reference"), strict=True):
        assert ours.dtype == torch.float32
        assert abs(ours.item() - theirs.item()) <= tolerance * theirs.item()
        got = torch.autograd.grad(ours, (q, k), allow_unused=True)
        want = torch.autograd.grad(theirs, exact, allow_unused=True)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                assert a.dtype == dtype
                assert float((a.double() - b).norm() / b.norm()) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_at_the_edges(dtype):
    """Rows of length one as the slow twin makes them: large, small, zero, and with a NaN or an infinity in them."""
    from marginlens.kernels import unit_rows as rows

    x, y = (t.detach() for t in embeddings(300, 100, dtype))
    x[1], x[2], x[3], x[4, 5], x[5, 6] = x[1] * 1e30, x[2] * 1e-30, 0.0, torch.nan, torch.inf
    x[6] *= 1e-38
    for together in (False, True):
        for parts in (1, 3):
            u, v, cos, s, *_ = rows.units(x, y, together, parts)
            a, b = (layouts._unit(t, torch.float32) for t in (x, y))
            for got, want in ((u[:300], a), (u[300:] if together else v, b), (cos[:300], (a * b).sum(-1))):
                assert torch.equal(got.isnan(), want.isnan())
                assert float((got - want).nan_to_num().abs().max()) <= 1e-6
            fine = ~u.isnan().any(1)
            summed = s.float().sum(0)[fine, :100]
            assert float((summed - u[fine]).abs().max()) <= 2.0 ** (-8 * parts - 1) + 1e-7
            if parts == 1:
                assert torch.equal(s[0][fine, :100], u[fine].bfloat16())
            assert (s[:, fine, 100:] == 0).all()


BAND = 4096


@pytest.fixture
def rooms(monkeypatch):
    """Every `new_empty` lies between bands that must stay as they are: NaN, or -7 where there is none."""
    made, honest = [], torch.Tensor.new_empty

    def new_empty(tensor, *shape, **options):
        like = honest(tensor, *shape, **options)
        filling = torch.nan if like.is_floating_point() else -7
        made.append(torch.full((like.numel() + 2 * BAND,), filling, dtype=like.dtype, device=like.device))
        return made[-1][BAND : BAND + like.numel()].view(like.shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return made


@pytest.mark.parametrize(("n", "d"), [(1000, 128), (77, 37), (1, 128), (130, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_number_is_written_and_none_beside(n, d, dtype, rooms):
    q, k = embeddings(n, d, dtype)
    queue = embeddings(40, d, dtype, seed=5)[0].detach()
    values = [ml.info_nce(q, k, queue=queue, impl="triton"), ml.info_nce(q, k.detach(), queue=queue, impl="triton")]
    if n > 1:
        values.append(ml.nt_xent(q, k, impl="triton"))
    for value in values:
        grads = torch.autograd.grad(value, (q, k), allow_unused=True)
        assert value.isfinite()
        assert all(bool(g.isfinite().all()) for g in grads if g is not None)
    assert len(rooms) > 20
    edges = [x for room in rooms for x in (room[:BAND], room[-BAND:])]
    assert all(bool((x.isnan() if x.is_floating_point() else x == -7).all()) for x in edges)


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_a_thousand_repeats_have_equal_bits(loss):
    q, k = embeddings(300, 128, torch.bfloat16)
    first = None
    for _ in range(1000):
        value = loss(q, k, tau=0.1, impl="triton")
        found = [value.detach(), *torch.autograd.grad(value, (q, k))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_splits_of_the_keys_have_equal_bits(loss):
    q, k = embeddings(4096, 128, torch.bfloat16)
    found = [torch.autograd.grad(loss(q, k, tau=0.1, impl="triton"), (q, k)) for _ in range(20)]
    assert all(torch.equal(a, b) for again in found for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_a_captured_graph_reads_the_temperature_anew(loss):
    """Across the scale where the constant shift gives way to a running maximum, too."""
    q, k = embeddings(700, 128, torch.float32)
    tau = torch.tensor(0.1, device=CUDA)
    call = lambda: torch.autograd.grad(loss(q, k, tau=tau, impl="triton"), (q, k))
    graph, grads = capture(call, 3)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    for number in (0.5, 0.1, 0.01):
        tau.fill_(number)
        graph.replay()
        found = [g.clone() for g in grads]
        assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True))
        for a, b in zip(found, torch.autograd.grad(loss(*exact, tau=number, impl="reference"), exact), strict=True):
            assert float((a.double() - b).norm() / b.norm()) <= 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_compiled_by_inductor_in_one_graph(loss):
    torch._dynamo.reset()
    q, k = embeddings(700, 128, torch.bfloat16)
    compiled = torch.compile(lambda q, k: loss(q, k, tau=0.1), fullgraph=True)
    want = torch.autograd.grad(loss(q, k, tau=0.1, impl="triton"), (q, k))
    got = torch.autograd.grad(compiled(q, k), (q, k))
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) <= 1e-2


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_torch_func(loss):
    q, k = embeddings(300, 128, torch.float32)
    tau = torch.tensor(0.1, device=CUDA, requires_grad=True)
    call = lambda q, k, tau: loss(q, k, tau=tau, impl="triton")
    want = torch.autograd.grad(call(q, k, tau), (q, k, tau))
    got = torch.func.grad(call, argnums=(0, 1, 2))(*(x.detach() for x in (q, k, tau)))
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) <= 1e-5


@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_memory_at_65536_rows(loss):
    """A matrix of logits would take 16 GiB; value and gradient take less than 1 GiB beyond the embeddings."""
    n = 65536 if loss is ml.info_nce else 32768
    q, k = embeddings(n, 128, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(q, k, tau=0.1).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**30
    assert q.grad.isfinite().all()


def test_auto_takes_what_choose_says(monkeypatch):
    taken = []
    honest = layouts.neg_lse
    monkeypatch.setattr(layouts, "neg_lse", lambda *a: taken.append(a[4]) or honest(*a))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        q, k = embeddings(20, 128, dtype)
        ml.info_nce(q, k)
        ml.info_nce(q, k.detach())
        ml.nt_xent(q, k)
    assert taken == ["triton"] * 6 + ["chunked"] * 3
