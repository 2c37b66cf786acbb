"""The networks' kernels and the flat step on a GPU: against float64, between guard bands, repeated, and captured."""

import copy
import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from marginlens.kernels.batchnorm import norm_act, supported
from marginlens.kernels.launch import capture
from marginlens.kernels.linear import linear
from marginlens.kernels.pool import pool
from marginlens.kernels.sgd_ema import BLOCK, Flat
from marginlens.kernels.stem import stem_conv, stem_supported
from marginlens.nets import ema_update

BF16 = torch.bfloat16
PAD = 4096
RESNET18 = [(256, 64, 32, 32), (256, 128, 16, 16), (256, 256, 8, 8), (256, 512, 4, 4), (256, 2048), (256, 128)]
RAGGED = [(7, 96, 13, 11), (33, 16, 17, 19), (300, 512), (5001, 48), (5, 16)]


@pytest.fixture(autouse=True)
def stream():
    """All on a stream other than the default one, which would hide that something does not wait."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.manual_seed(0)
        yield
        torch.cuda.synchronize()


class Bands:
    """Memory full of NaN with windows in it; what lies between the windows must stay as it is."""

    def __init__(self, monkeypatch):
        self.plain, self.held = torch.empty, []
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x: self.window(x.shape, x.stride(), x.dtype))

    def empty(self, *shape, dtype, device, **form):
        like = self.plain(*shape, dtype=dtype, device="meta", **form)
        return self.window(like.shape, like.stride(), dtype)

    def window(self, shape, stride, dtype):
        flat = self.plain(math.prod(shape) + 2 * PAD, dtype=dtype, device="cuda")
        flat.view(torch.uint8).fill_(255)
        self.held.append(flat)
        return flat.new_empty(0).set_(flat.untyped_storage(), PAD, shape, stride)

    def put(self, x):
        return self.window(x.shape, x.stride(), x.dtype).copy_(x)

    def check(self):
        assert len(self.held) > 1
        for flat in self.held:
            assert (flat[:PAD].view(torch.uint8) == 255).all()
            assert (flat[-PAD:].view(torch.uint8) == 255).all()


@pytest.fixture
def bands(monkeypatch):
    return Bands(monkeypatch)


def data(shape, dtype=BF16, mean=0.3):
    x = (torch.randn(shape, device="cuda") * 1.5 + mean).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def norm(shape):
    bn = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], device="cuda")
    nn.init.normal_(bn.weight, 1, 0.2)
    nn.init.normal_(bn.bias, 0, 0.2)
    return bn


def assert_near(found, expected, tolerance):
    """Near in units of the largest value; a NaN is not."""
    error = (found.detach().double() - expected.detach().double()).abs().max()
    assert error <= tolerance * expected.detach().abs().max(), float(error)


def compare(bands, shape, dtype, added, fork, groups):
    bn = norm(shape)
    twin = copy.deepcopy(bn).double()
    x = data(shape, dtype)
    x *= torch.linspace(1, 2, groups, device="cuda").repeat_interleave(len(x) // groups).view(-1, *[1] * (x.dim() - 1))
    x, grads = bands.put(x).requires_grad_(), [bands.put(data(shape, dtype, 0.0)) for _ in range(1 + fork)]
    add = bands.put(data(shape, dtype)).requires_grad_() if added else None
    assert supported(x, bn, add, groups)
    found = norm_act(x, bn, add, True, fork, groups)
    found = found if fork else (found,)
    torch.autograd.backward(found, grads)
    y, other = found[0].detach(), x.detach().double().requires_grad_()
    g = torch.where(
        y > 0, sum(g.float() for g in grads).to(dtype), 0.0
    ).double()  # its sign is the forward pass's to say
    expected = torch.cat([twin(part) for part in other.chunk(groups)])
    expected = expected if add is None else expected + add.detach().double()
    expected.backward(g)
    unit = 1e-5 if dtype == torch.float32 else 2**-8
    assert_near(y, expected.relu(), unit)
    assert_near(x.grad, other.grad, 2 * unit)
    assert_near(bn.weight.grad, twin.weight.grad, 2e-5)
    assert_near(bn.bias.grad, twin.bias.grad, 2e-5)
    assert_near(bn.running_mean, twin.running_mean, 1e-5)
    assert_near(bn.running_var, twin.running_var, 1e-5)
    assert bn.num_batches_tracked == groups
    if added:
        assert torch.equal(add.grad.double(), g)
    bands.check()


@pytest.mark.parametrize("shape", RESNET18)
@pytest.mark.parametrize(("added", "fork"), [(False, False), (True, True)])
def test_the_shapes_of_a_resnet18(bands, shape, added, fork):
    compare(bands, shape, BF16, added, fork, groups=1)


@pytest.mark.parametrize("shape", RESNET18)
def test_two_views_at_once(bands, shape):
    compare(bands, (2 * shape[0], *shape[1:]), BF16, len(shape) == 4, False, groups=2)


@pytest.mark.parametrize(("number", "shape"), list(enumerate(RAGGED)))
def test_ragged_shapes(bands, number, shape):
    compare(bands, shape, (BF16, torch.float32)[number % 2], number % 3 > 0, number % 3 > 1, groups=1)


def test_ragged_groups(bands):
    compare(bands, (9, 96, 13, 11), BF16, True, False, groups=3)
    compare(bands, (4098, 64), torch.float32, True, True, groups=2)


def once(x, add, bn, g, groups):
    y = norm_act(x, bn, add, groups=groups)
    return [y.detach(), *torch.autograd.grad(y, [x, add, bn.weight, bn.bias], g)]


@pytest.mark.parametrize(("shape", "groups"), [(RESNET18[0], 1), (RESNET18[2], 2), (RESNET18[3], 1), (RAGGED[0], 1)])
def test_repeats_bit_for_bit_also_when_captured(shape, groups):
    x, add, g, bn = data(shape).requires_grad_(), data(shape).requires_grad_(), data(shape), norm(shape)
    first, same = once(x, add, bn, g, groups), torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, once(x, add, bn, g, groups), strict=True):
            same &= (a == b).all()
    assert same
    graph, held = capture(lambda: once(x, add, bn, g, groups), 1)
    tracked = int(bn.num_batches_tracked)
    for _ in range(100):
        for t in held:
            t.fill_(float("nan"))
        graph.replay()
        for a, b in zip(first, held, strict=True):
            same &= (a == b).all()
    assert same
    assert bn.num_batches_tracked == tracked + 100 * groups


@pytest.mark.parametrize(("shape", "out"), [((256, 3, 32, 32), 64), ((5, 3, 17, 9), 16), ((9, 3, 64, 64), 128)])
def test_stem(bands, shape, out):
    x = bands.put(data(shape))
    weight = (torch.randn(out, 3, 3, 3, device="cuda") * 0.2).to(BF16).float().contiguous(
        memory_format=torch.channels_last
    )  # fmt: skip
    weight.requires_grad_()
    assert stem_supported(x, weight)
    y = stem_conv(x, weight)
    g = bands.put(data(y.shape, mean=0.0))
    (dw,) = torch.autograd.grad(y, weight, g)
    other = weight.detach().double().requires_grad_()
    expected = torch.conv2d(x.double(), other, padding=1)
    expected.backward(g.double())
    assert_near(y, expected, 2**-8)
    assert_near(dw, other.grad, 1e-5)
    bands.check()


def test_stem_repeats_bit_for_bit_also_when_captured():
    x, weight = data((256, 3, 32, 32)), torch.randn(64, 3, 3, 3, device="cuda", dtype=BF16).requires_grad_()
    g = data((256, 64, 32, 32))

    def step():
        y = stem_conv(x, weight)
        return [y.detach(), *torch.autograd.grad(y, weight, g)]

    first, same = step(), torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, step(), strict=True):
            same &= (a == b).all()
    graph, held = capture(step, 1)
    for t in held:
        t.fill_(float("nan"))
    graph.replay()
    for a, b in zip(first, held, strict=True):
        same &= (a == b).all()
    assert same


@pytest.mark.parametrize("shape", [(256, 512, 4, 4), (7, 48, 13, 11), (3, 16, 1, 1)])
def test_pool(bands, shape):
    x, g = bands.put(data(shape)).requires_grad_(), data(shape[:2])
    y = pool(x)
    (dx,) = torch.autograd.grad(y, x, g)
    assert_near(y, x.detach().double().mean((2, 3)), 2**-8)
    assert_near(dx, (g.double() / (shape[2] * shape[3]))[:, :, None, None].expand(shape), 2**-8)
    bands.check()


def test_linear():
    x, weight, bias = (data(shape).requires_grad_() for shape in ((300, 512), (2048, 512), (2048,)))
    g = data((300, 2048), mean=0.0)
    found = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), g)
    others = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(nn.functional.linear(*others), others, g.double())
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 2**-8)


class Small(nn.Module):
    """Sizes below, at and beyond a block, and not multiples of a load's."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Linear(101, 4 * BLOCK // 101 + 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(32, BLOCK // 32)


def test_flat_step():
    """Against torch's SGD and the EMA; captured, and run again from the same state, to the same bits."""
    twin = Small().cuda()
    method = copy.deepcopy(twin)
    slow, fast = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.05, 0.9, weight_decay=1e-2)
        for m in (twin, method)
    )
    flat, lr, share = Flat(method, fast, BF16), torch.tensor(0.05, device="cuda"), torch.tensor(0.1, device="cuda")
    named = dict(method.named_parameters())
    grads = [torch.randn_like(named[n]).to((BF16, torch.float32)[i % 2]).detach() for i, n in enumerate(flat.names)]
    flat.step(lr, share, grads)
    start = [t.clone() for t in (flat._parameters, flat._momenta, flat._teacher, *flat._halves)]
    graph, _ = capture(lambda: flat.step(lr, share, grads), 1)
    ends = []
    for replay in (False, True, True):
        for t, before in zip((flat._parameters, flat._momenta, flat._teacher, *flat._halves), start, strict=True):
            t.copy_(before)
        for _ in range(10):
            graph.replay() if replay else flat.step(lr, share)
        ends.append([t.clone() for t in (flat._parameters, flat._momenta, flat._teacher, *flat._halves)])
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], end, strict=True))
    for _ in range(11):
        for p, g in zip([p for p in twin.parameters() if p.requires_grad], grads, strict=True):
            p.grad = g.float()
        slow.step()
        ema_update(twin.teacher, twin.student, 0.9)
    for (name, p), other in zip(method.named_parameters(), twin.parameters(), strict=True):
        assert_near(p, other, 1e-5)
        if name in flat.half:
            assert torch.equal(flat.half[name], p.detach().to(BF16))
    used = sum(p.numel() for p in named.values() if p.requires_grad)
    assert int((flat._momenta != 0).sum()) <= used  # the padding stays zero
