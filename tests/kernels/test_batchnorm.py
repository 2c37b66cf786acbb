"""Batch norm with addition and ReLU against torch in float64."""

import copy
import gc

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from marginlens.kernels import batchnorm as module
from marginlens.kernels.batchnorm import norm_act, supported
from tests.kernels.twins import DEVICE, TOLERANCE, assert_near, leaf, tensor

SMALL = {"warps": (1, 1), "forward_unroll": (2, 2), "backward_unroll": (2, 2), "tile": 1024, "programs": (8, 8)}


@pytest.fixture(params=["one tile", "many tiles"])
def way(request, monkeypatch):
    """One program for all rows, or many: tiles so small that little data has many, the last one ragged."""
    monkeypatch.setattr(module, "ONE_TILE", 512 if request.param == "one tile" else 1)
    monkeypatch.setattr(module, "TUNING", module.TUNING | SMALL)
    return request.param


def norm(shape, affine=True):
    bn = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1], affine=affine, momentum=0.3, device=DEVICE)
    if affine:
        nn.init.normal_(bn.weight)
        nn.init.normal_(bn.bias)
    return bn


def twin(x, bn, add, relu, grad, groups=1):
    """Output, gradients and running statistics of plain torch in float64."""
    bn, x, add = copy.deepcopy(bn).double(), leaf(x, torch.float64), leaf(add, torch.float64)
    y = torch.cat([bn(part) for part in x.chunk(groups)])
    y = y if add is None else y + add
    y = y.relu() if relu else y
    y.backward(grad.double())
    return y.detach(), x.grad, add, bn


def check(shape, dtype=torch.float32, added=False, relu=True, affine=True, exact=3e-6, groups=1, **moments):
    torch.manual_seed(0)
    x, bn = leaf(tensor(shape, dtype, **moments)), norm(shape, affine)
    add = leaf(tensor(shape, dtype)) if added else None
    grad = tensor(shape, dtype, mean=0.0, std=1.0)
    with torch.no_grad():  # groups that differ
        x *= (
            torch.arange(1.0, groups + 1, device=DEVICE)
            .repeat_interleave(len(x) // groups)
            .view(-1, *[1] * (x.dim() - 1))
        )
    assert supported(x, bn, add, groups)
    ours = copy.deepcopy(bn)
    y = norm_act(x, ours, add, relu, groups=groups)
    y.backward(grad)
    tolerance = max(exact, TOLERANCE[dtype])
    if dtype != torch.float32 and relu:
        # a sign that rounding decides is the forward pass's to say, and the gradient's to follow
        grad = torch.where(y > 0, grad, 0.0)
        expected, _, _, _ = twin(x, bn, add, True, grad, groups)
        _, dx, dadd, after = twin(x, bn, add, False, grad, groups)
    else:
        expected, dx, dadd, after = twin(x, bn, add, relu, grad, groups)
    assert y.dtype == dtype
    assert y.stride() == x.stride()
    assert_near(y, expected, tolerance)
    assert_near(x.grad, dx, tolerance)
    if added:
        assert_near(add.grad, dadd.grad, tolerance)
    if affine:
        assert ours.weight.grad.dtype == torch.float32
        assert_near(ours.weight.grad, after.weight.grad, exact)
        assert_near(ours.bias.grad, after.bias.grad, exact)
    torch.testing.assert_close(ours.running_mean.double(), after.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.running_var.double(), after.running_var, rtol=1e-5, atol=1e-6)
    assert ours.num_batches_tracked == after.num_batches_tracked == groups


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_as_torch(way, added, relu):
    check((3, 64, 5, 7), added=added, relu=relu)


@pytest.mark.parametrize("shape", [(37, 128), (2, 16), (5, 96, 3, 4), (1, 32, 9, 9)])
def test_ragged_shapes(way, shape):
    check(shape)


def test_without_affine_parameters(way):
    check((37, 64), affine=False, relu=False)
    check((37, 64), affine=False, relu=True)


@pytest.mark.parametrize("added", [False, True])
def test_half_precision(way, added):
    check((3, 64, 5, 7), torch.bfloat16, added=added)


@pytest.mark.parametrize("shape", [(6, 64, 5, 7), (74, 32)])
@pytest.mark.parametrize(("groups", "added"), [(2, True), (2, False)])
def test_groups_are_batches_one_after_the_other(way, shape, groups, added):
    check(shape, added=added, groups=groups)
    check(shape, torch.bfloat16, added=added, groups=groups)


def test_three_groups_without_affine_parameters(way):
    check((6, 16, 3, 5), affine=False, groups=3)


def test_a_fork_of_groups(way):
    torch.manual_seed(0)
    shape = (4, 32, 5, 7)
    x, bn, grads = leaf(tensor(shape, torch.float32)), norm(shape), [tensor(shape, torch.float32) for _ in range(2)]
    ours = copy.deepcopy(bn)
    torch.autograd.backward(norm_act(x, ours, fork=True, groups=2), grads)
    _, dx, _, after = twin(x, bn, None, True, grads[0].double() + grads[1].double(), 2)
    assert_near(x.grad, dx, 3e-6)
    assert_near(ours.weight.grad, after.weight.grad, 3e-6)
    assert_near(ours.bias.grad, after.bias.grad, 3e-6)


def test_a_large_mean_costs_no_digits(way):
    """But those that a mean of 1000 itself lacks in float32, 3e-5, in every row of a sum."""
    check((3, 16, 8, 9), mean=1000.0, std=1.0, exact=3e-4)


@pytest.mark.parametrize("far", [0, 150, 300])
def test_a_row_far_off_costs_no_digits(way, far):
    """Of the three whose median is the pivot, one may be anything."""
    torch.manual_seed(0)
    x, bn = tensor((301, 16), torch.float32), norm((301, 16), affine=False)
    x[far] = 1e5
    y = norm_act(x, bn, relu=False)
    expected = (x.double() - x.double().mean(0)) / (x.double().var(0, unbiased=False) + bn.eps).sqrt()
    assert_near(y, expected, 3e-6)


def test_the_gradient_follows_the_output_to_the_last_bit(way):
    """Where rounding, or an addition, makes the output zero there is no gradient, and elsewhere there is one."""
    torch.manual_seed(0)
    shape = (3, 16, 5, 7)
    x, add, grad = tensor(shape, torch.bfloat16), leaf(tensor(shape, torch.bfloat16)), torch.ones(shape, device=DEVICE)
    bn = norm(shape)
    with torch.no_grad():
        for value in (x, add):
            value[value.abs() < 0.5] = 0.0
    y = norm_act(x, bn, add)
    y.backward(grad.bfloat16().contiguous(memory_format=torch.channels_last))
    assert torch.equal(add.grad, (y > 0).bfloat16())
    bn.bias.grad = None
    y = norm_act(x, bn)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(bn.bias.grad, (y > 0).float().sum((0, 2, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("added", [False, True])
def test_a_fork_adds_its_gradients(way, added):
    torch.manual_seed(0)
    shape = (3, 32, 5, 7)
    x, bn, grads = leaf(tensor(shape, torch.float32)), norm(shape), [tensor(shape, torch.float32) for _ in range(2)]
    add = leaf(tensor(shape, torch.float32)) if added else None
    ours = copy.deepcopy(bn)
    first, second = norm_act(x, ours, add, fork=True)
    assert first.data_ptr() == second.data_ptr()
    torch.autograd.backward((first, second), grads)
    expected, dx, dadd, after = twin(x, bn, add, True, grads[0].double() + grads[1].double())
    assert_near(second, expected, 3e-6)
    assert_near(x.grad, dx, 3e-6)
    assert_near(ours.weight.grad, after.weight.grad, 3e-6)
    if added:
        assert_near(add.grad, dadd.grad, 3e-6)
    x.grad = None
    first, second = norm_act(x, copy.deepcopy(bn), add, fork=True)
    second.backward(grads[1])
    assert_near(x.grad, twin(x, bn, add, True, grads[1])[1], 3e-6)


def test_repeats_bit_for_bit_and_statistics_run_on(way):
    torch.manual_seed(0)
    shape = (3, 64, 5, 7)
    x, grad, bn = leaf(tensor(shape, torch.bfloat16)), tensor(shape, torch.bfloat16), norm(shape)
    plain, seen = copy.deepcopy(bn), []
    for _ in range(3):
        x.grad = bn.weight.grad = None
        y = norm_act(x, bn)
        y.backward(grad)
        seen.append((y.detach(), x.grad, bn.weight.grad))
        plain(x.detach().float())
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    torch.testing.assert_close(bn.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bn.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    assert bn.num_batches_tracked == 3


def test_an_expanded_gradient(way):
    """What a mean over pixels hands back has stride 0."""
    torch.manual_seed(0)
    x, bn = leaf(tensor((3, 16, 4, 5), torch.float32)), norm((3, 16, 4, 5))
    ours = copy.deepcopy(bn)
    norm_act(x, ours).mean((2, 3)).square().sum().backward()
    other = leaf(x, torch.float64)
    bn.double()(other).relu().mean((2, 3)).square().sum().backward()
    assert_near(x.grad, other.grad, 3e-6)


def test_nan_stays(way):
    x = tensor((40, 16), torch.float32)
    x[3, 5] = float("nan")
    y = norm_act(x, norm((40, 16)))
    assert y[:, 5].isnan().all()
    assert not y[:, :5].isnan().any()


def test_counters_die_with_their_norm(monkeypatch):
    monkeypatch.setattr(module, "ONE_TILE", 1)
    bn = norm((40, 16))
    gc.collect()
    before = len(module._COUNTERS)
    norm_act(tensor((40, 16), torch.float32), bn)
    assert len(module._COUNTERS) == before + 1
    (held,) = module._COUNTERS[bn].values()
    assert not held.any()
    del bn
    gc.collect()
    assert len(module._COUNTERS) == before


def test_not_twice():
    x = leaf(tensor((20, 16), torch.float32))
    (dx,) = torch.autograd.grad(norm_act(x, norm((20, 16))).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_what_is_not_supported():
    x, bn = tensor((4, 32, 3, 3), torch.float32), norm((4, 32, 3, 3))
    assert supported(x, bn, x)
    assert not supported(x.contiguous(), bn)
    assert not supported(x, bn, x.contiguous())
    assert not supported(x, bn, x.bfloat16())
    assert not supported(x.double(), bn)
    assert not supported(x, nn.BatchNorm2d(32, momentum=None))
    assert not supported(x, nn.BatchNorm2d(32, track_running_stats=False))
    assert not supported(x, nn.BatchNorm2d(32).bfloat16())
    assert not supported(x, nn.SyncBatchNorm(32))
    assert not supported(x, bn.eval())
    assert not supported(tensor((4, 24), torch.float32), norm((4, 24)))
    assert not supported(tensor((1, 32), torch.float32), norm((1, 32)))
    assert supported(tensor((4, 32), torch.float32), norm((4, 32)), groups=2)
    assert not supported(tensor((4, 32), torch.float32), norm((4, 32)), groups=3)
    assert not supported(tensor((4, 32), torch.float32), norm((4, 32)), groups=4)
