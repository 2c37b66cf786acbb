"""Autocast, torch.compile, torch.func, and second derivatives."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio
from tests.catalogue import DECLARED, EFFECTS, close, gradients, random

IMPLS = ("reference", "chunked")
compiles = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("effect", [Plain(), Emphasis(s=3, c=2.5), Margin(0.3, 0.1)], ids=str)
def test_autocast_does_not_lower_the_precision(effect, impl):
    q, k = random(9, 5, seed=0, dtype=torch.float32), random(9, 5, seed=1, dtype=torch.float32)
    for loss in (ml.info_nce, ml.nt_xent):
        want, grads = gradients(lambda q, k: loss(q, k, effect=effect, impl=impl), q, k)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, inside = gradients(lambda q, k: loss(q, k, effect=effect, impl=impl), q, k)
        assert value.dtype == torch.float32
        assert torch.equal(value, want)
        if impl == "chunked":
            assert all(torch.equal(a, b) for a, b in zip(inside, grads, strict=True))


def test_autocast_around_a_model():
    net = torch.nn.Linear(6, 4)
    x = random(8, 6, seed=0, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = net(x)
        assert z.dtype == torch.bfloat16
        loss = ml.nt_xent(z, net(x + 0.1), effect=Emphasis(s=2))
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(net.weight.grad).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_torch_func_grad(effect, impl):
    q, k = random(7, 4, seed=0), random(7, 4, seed=1)
    tau = torch.tensor(0.25, dtype=torch.float64)
    for loss in (ml.info_nce, ml.nt_xent):
        call = lambda q, k, t: loss(q, k, tau=t, effect=effect, impl=impl)
        _, want = gradients(call, q, k, tau)
        got = torch.func.grad(call, argnums=(0, 1, 2))(q, k, tau)
        for g, w in zip(got, want, strict=True):
            close(g, w, 1e-13)
        close(torch.func.grad(call)(q, k, tau), want[0], 1e-13)
        close(torch.func.grad(call, argnums=1)(q, k, tau), want[1], 1e-13)


def twice(loss, x):
    (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


@pytest.mark.parametrize("effect", DECLARED, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_declared_gradient_refuses_a_second_derivative(effect, impl):
    q, k = random(5, 3, seed=0).requires_grad_(), random(5, 3, seed=1)
    call = lambda q: ml.info_nce(q, k, effect=effect, impl=impl)
    with pytest.raises(RuntimeError, match=r"no second derivative"):
        twice(call, q)
    with pytest.raises(RuntimeError, match=r"no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(call)(q).square().sum())(q.detach())


@pytest.mark.parametrize("layout", [ml.info_nce, ml.nt_xent])
def test_the_chunked_kernel_refuses_a_second_derivative(layout):
    q, k = random(5, 3, seed=0).requires_grad_(), random(5, 3, seed=1)
    for keys in (k, k.clone().requires_grad_()):
        call = lambda q: layout(q, keys, impl="chunked")
        with pytest.raises(RuntimeError, match="use impl='reference'"):
            twice(call, q)
        with pytest.raises(RuntimeError, match="use impl='reference'"):
            torch.func.grad(lambda q: torch.func.grad(call)(q).square().sum())(q.detach())


@pytest.mark.parametrize("layout", [ml.info_nce, ml.nt_xent])
@pytest.mark.parametrize("effect", [Plain(), Margin(0.3, 0.1)], ids=str)
def test_forward_mode_is_the_reference_kernels_alone(layout, effect):
    """And so is torch.func.hessian, which goes forward over reverse: the same as reverse over reverse."""
    q, k, along = (random(5, 3, seed=seed) for seed in range(3))
    call = lambda q: layout(q, k, effect=effect, impl="reference")
    grad, second = torch.func.grad(call)(q), torch.func.jacrev(torch.func.grad(call))(q)
    close(torch.func.jvp(call, (q,), (along,))[1], (grad * along).sum(), 1e-12)
    close(torch.func.hessian(call)(q), second, 1e-12)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda q: layout(q, k, effect=effect, impl="chunked"), (q,), (along,))


@pytest.mark.parametrize("effect", DECLARED, ids=str)
def test_a_declared_gradient_has_no_forward_mode(effect):
    q, k, along = (random(5, 3, seed=seed) for seed in range(3))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda q: ml.info_nce(q, k, effect=effect, impl="reference"), (q,), (along,))


@compiles
@pytest.mark.parametrize(
    ("impl", "backend"),
    [
        ("chunked", "aot_eager"),
        pytest.param("chunked", "inductor", marks=pytest.mark.slow),
        pytest.param("reference", "inductor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("loss", [ml.info_nce, ml.nt_xent])
def test_compile_without_a_graph_break_or_a_recompilation(loss, impl, backend):
    """One graph per effect, whatever the number in its 0-d tensor; built inside or outside of the graph."""
    q, k = random(19, 8, seed=0, dtype=torch.float32), random(19, 8, seed=1, dtype=torch.float32)
    make = {
        "emphasis": lambda x: Emphasis(s=x, c=2.5),
        "curve": lambda x: Emphasis(c=x) * Margin(m1=0.2),
        "margin": lambda x: Margin(m1=x, m2=x),
        "ratio": lambda x: Ratio(m1=x, scope="row"),
        "attenuation": lambda x: Attenuation(alpha=x),
    }
    for build in make.values():
        torch._dynamo.reset()
        counters.clear()
        asked = {"fullgraph": True, "backend": backend}
        inside = torch.compile(lambda q, k, x: loss(q, k, effect=build(x), impl=impl), **asked)
        outside = torch.compile(lambda q, k, e: loss(q, k, effect=e, impl=impl), **asked)
        for number in (0.3, 0.6, 0.9):
            x = torch.tensor(number)
            want, grads = gradients(lambda q, k: loss(q, k, effect=build(x), impl=impl), q, k)
            for compiled, argument in ((inside, x), (outside, build(x))):
                value, got = gradients(lambda q, k: compiled(q, k, argument), q, k)
                close(value, want, 1e-6)
                for g, w in zip(got, grads, strict=True):
                    close(g, w, 1e-5)
        assert counters["stats"]["unique_graphs"] == 2


@compiles
def test_compiled_modules_positives_queue_and_a_learnable_temperature():
    torch._dynamo.reset()
    module = ml.InfoNCE(tau=torch.nn.Parameter(torch.tensor(0.3)), effect="emphasis(s=3) * ratio(m1=0.4)")
    compiled = torch.compile(module, fullgraph=True)
    q, k, queue = (random(9, 5, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    positives = torch.arange(9).roll(1)
    value = compiled(q, k, positives=positives, queue=queue)
    value.backward()
    got = [x.grad.clone() for x in (q, k, queue, module.tau)]
    for x in (q, k, queue, module.tau):
        x.grad = None
    want = module(q, k, positives=positives, queue=queue)
    want.backward()
    close(value.detach(), want.detach(), 1e-6)
    for g, x in zip(got, (q, k, queue, module.tau), strict=True):
        close(g, x.grad, 1e-5)


@compiles
def test_compile_with_dynamic_sizes():
    torch._dynamo.reset()
    effect = Emphasis(s=3)
    compiled = torch.compile(lambda q, k: ml.info_nce(q, k, effect=effect), fullgraph=True, dynamic=True)
    counters.clear()
    for n in (5, 9, 33, 41, 47):
        q, k = random(n, 8, seed=0, dtype=torch.float32), random(n, 8, seed=1, dtype=torch.float32)
        want, grads = gradients(lambda q, k: ml.info_nce(q, k, effect=effect), q, k)
        value, got = gradients(compiled, q, k)
        close(value, want, 1e-6)
        for g, w in zip(got, grads, strict=True):
            close(g, w, 1e-5)

    assert counters["stats"]["unique_graphs"] == 1


@compiles
def test_numbers_may_change_inside_a_graph_too():
    torch._dynamo.reset()
    q, k = random(5, 4, seed=0), random(5, 4, seed=1)
    compiled = torch.compile(
        lambda q, k, x: ml.info_nce(q, k, effect=Emphasis(s=x) * Margin(m1=x, m2=x)), backend="eager"
    )
    for x in (0.1, 0.2, 0.3):
        close(compiled(q, k, x), ml.info_nce(q, k, effect=Margin(m1=x, m2=x)), 1e-12)


@compiles
def test_a_compiled_loss_refuses_a_second_derivative():
    torch._dynamo.reset()
    q, k = random(5, 4, seed=0).requires_grad_(), random(5, 4, seed=1)
    compiled = torch.compile(lambda q: ml.info_nce(q, k), backend="aot_eager")
    with pytest.raises(RuntimeError):  # PyTorch's own words, which differ from case to case
        twice(compiled, q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_vmap_and_jacrev(effect, impl):
    q, k = random(4, 3, seed=0), random(4, 3, seed=1)
    for loss in (ml.info_nce, ml.nt_xent):
        call = lambda q: loss(q, k, effect=effect, impl=impl, reduction="none")
        each = [torch.autograd.grad(call(x := q.clone().requires_grad_())[i], x)[0] for i in range(len(call(q)))]
        close(torch.func.jacrev(call)(q), torch.stack(each), 1e-12)
        stacked = torch.stack([q, 2 * k, q + k])
        close(torch.func.vmap(call)(stacked), torch.stack([call(x) for x in stacked]), 1e-12)
    taus = torch.tensor([0.1, 0.2], dtype=torch.float64)
    scan = torch.func.vmap(lambda t: ml.info_nce(q, k, tau=t, effect=effect, impl=impl))(taus)
    close(scan, torch.stack([ml.info_nce(q, k, tau=t, effect=effect) for t in taus]), 1e-12)


@compiles
def test_a_string_inside_a_graph_is_refused_in_words():
    torch._dynamo.reset()
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    compiled = torch.compile(lambda q, k: ml.info_nce(q, k, effect="emphasis(s=3)"), fullgraph=True)
    with pytest.raises(Exception, match=r"inside torch\.compile, give effect an object"):
        compiled(q, k)
    torch._dynamo.reset()
    plain = torch.compile(ml.info_nce, fullgraph=True)
    close(plain(q, k), ml.info_nce(q, k), 1e-12)


def test_what_has_leaked_out_of_torch_func_is_a_tensor():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    call = lambda q: ml.info_nce(q, k, impl="chunked")
    leaked = []
    torch.func.grad(lambda q: leaked.append(q) or call(q))(q)
    close(call(leaked[0]), call(q), 0.0)


@pytest.mark.parametrize(
    "build", [lambda x: Emphasis(s=2) * Margin(m1=x), lambda x: Margin(m1=torch.tensor(0.3), m2=x)]
)
def test_a_margin_inside_of_transforms(build):
    """Its numbers are not asked for: not in a product, and not where one of them could be read and another not."""
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    call = lambda x: ml.info_nce(q, k, effect=build(x), impl="reference")
    numbers = torch.tensor([0.2, 0.5], dtype=torch.float64)
    close(torch.func.vmap(call)(numbers), torch.stack([call(x) for x in numbers]), 1e-12)
    each = torch.stack([torch.func.grad(call)(x) for x in numbers])
    close(torch.func.vmap(torch.func.grad(call))(numbers), each, 1e-12)
    ml.info_nce(q.to("meta"), k.to("meta"), effect=build(numbers[0].to("meta")))
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for x in numbers:
        close(compiled(x), call(x), 1e-12)


def test_gradients_of_many_temperatures_at_once():
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    slope = torch.func.grad(lambda t: ml.info_nce(q, k, tau=t, impl="reference"))
    taus = torch.tensor([0.1, 0.2, 0.5], dtype=torch.float64)
    close(torch.func.vmap(slope)(taus), torch.stack([slope(t) for t in taus]), 1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_over_positives(impl):
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    call = lambda p: ml.info_nce(q, k, positives=p, impl=impl)
    positives = torch.stack([torch.arange(5).roll(i) for i in range(3)])
    close(torch.func.vmap(call)(positives), torch.stack([call(p) for p in positives]), 1e-12)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_every_effect_compiles_with_dynamic_sizes(effect):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k: ml.info_nce(q, k, effect=effect), fullgraph=True, dynamic=True, backend="eager"
    )
    for n in (5, 9):
        q, k = random(n, 4, seed=0), random(n, 4, seed=1)
        close(compiled(q, k), ml.info_nce(q, k, effect=effect), 1e-12)


def test_a_compiled_module_with_numbers_that_learn():
    torch._dynamo.reset()
    q, k = random(5, 3, seed=0), random(5, 3, seed=1)
    tau, m1 = (torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (0.25, 0.3))
    module = ml.InfoNCE(tau=tau, effect=Emphasis(s=2, c=0.7) * Margin(m1=m1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    want, wanted = gradients(lambda tau, m1: ml.info_nce(q, k, tau=tau, effect=Emphasis(2, 0.7) * Margin(m1)), tau, m1)
    value = compiled(q, k)
    value.backward()
    close(value.detach(), want, 1e-12)
    close(torch.stack([tau.grad, m1.grad]), torch.stack(wanted), 1e-12)
    with torch.no_grad():
        tau.neg_()
    assert compiled(q, k).isnan()  # inverted, it would fall and say nothing


def test_rows_warn_of_nothing():
    """Forward-mode derivatives would, of torch.jit, the first time in a process."""
    code = "import torch, marginlens as ml\nml.rows(torch.randn(4, 3), torch.randn(4, 3), effect=ml.Margin(m1=0.4))"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", code], check=True)


class Exported(torch.nn.Module):
    """A loss as a module that torch.export takes."""

    def __init__(self, loss, **given):
        super().__init__()
        self.loss, self.given = loss, given

    def forward(self, q, k):
        return self.loss(q, k, **self.given)


def example(**asked):
    return tuple(random(6, 5, seed=seed).requires_grad_(**asked) for seed in range(2))


STRICT = pytest.mark.parametrize("strict", [False, True])
LOSSES = {"info_nce": ml.info_nce, "nt_xent": ml.nt_xent, "positive_only": ml.positive_only}


@STRICT
@pytest.mark.parametrize("effect", [Plain(), Margin(m1=0.3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_an_exported_loss_has_the_gradient(name, effect, strict):
    """Where the value's own derivative is the gradient, and the kernel is plain tensor code."""
    module = Exported(LOSSES[name], effect=effect, impl="reference")
    program = torch.export.export(module, example(), strict=strict).module()
    q, k = example(requires_grad=False)
    want, grads = gradients(module, q, k)
    value, got = gradients(program, q, k)
    close(value, want, 1e-12)
    for a, b in zip(got, grads, strict=True):
        close(a, b, 1e-12)


@STRICT
@pytest.mark.parametrize("effect", [Emphasis(s=3, c=2.5), Ratio(m1=0.4, scope="row") * Margin(m1=0.2)], ids=str)
@pytest.mark.parametrize("learns", [True, False])
def test_a_declared_gradient_is_not_exported(effect, strict, learns):
    """The program would differentiate the value instead, without a word."""
    for impl in IMPLS:
        module = Exported(ml.info_nce, effect=effect, impl=impl)
        with pytest.raises(RuntimeError, match=r"torch\.export drops declared gradients.*export the encoder without"):
            torch.export.export(module, example(requires_grad=learns), strict=strict)
    with pytest.raises(RuntimeError, match=r"torch\.export drops declared gradients"):
        torch.export.export(Exported(ml.positive_only, effect=Emphasis(c=2.5)), example(), strict=strict)


@STRICT
@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_a_kernel_s_backward_pass_is_not_exported(impl, strict):
    """The value alone is."""
    module = Exported(ml.nt_xent, impl=impl)
    with pytest.raises(RuntimeError, match=rf"torch\.export drops the backward pass .* impl=\W+{impl}.*no_grad"):
        torch.export.export(module, example(), strict=strict)
    q, k = example(requires_grad=False)
    with torch.no_grad():
        program = torch.export.export(module, (q, k), strict=strict).module()
        close(program(q, k), module(q, k), 1e-12)
