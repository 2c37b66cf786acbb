"""The teacher: which tensors are averaged, which are not, and the momentum's schedules against their closed form."""

import math

import pytest
import torch
from torch import nn

from marginlens.nets import MOMENTA, constant_momentum, cosine_momentum, ema_update, encoder, projector, teacher_of

MOMENTUM_KINDS = {"number": float, "float32": torch.tensor, "float64": lambda m: torch.tensor(m, dtype=torch.float64)}


def student():
    torch.manual_seed(0)
    return nn.Sequential(encoder("tiny"), projector(128, hidden=32, out=8))


def moved(module):
    """The same module, each parameter somewhere else."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))
    return module


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def test_a_teacher_is_equal_apart_and_without_gradient():
    one = student()
    two = teacher_of(one)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert not any(p.requires_grad for p in two.parameters())
    assert all(p.requires_grad for p in one.parameters())
    assert two.training
    before = values(two)
    moved(one)
    assert all(torch.equal(a, b) for a, b in zip(before, two.parameters(), strict=True))


@pytest.mark.parametrize("kind", MOMENTUM_KINDS)
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.99, 0.996, 1.0])
def test_parameters_are_averaged(momentum, kind):
    one = student().double()
    two = teacher_of(one)
    moved(one)
    old, new = values(two), values(one)
    ema_update(two, one, MOMENTUM_KINDS[kind](momentum))
    for t, s, got, kept in zip(old, new, two.parameters(), one.parameters(), strict=True):
        error = (got - (momentum * t + (1 - momentum) * s)).abs().max()
        assert error < (1e-6 if kind == "float32" else 1e-14)
        assert torch.equal(kept, s)
        assert momentum != 1.0 or torch.equal(got, t)


@pytest.mark.parametrize("kind", MOMENTUM_KINDS)
def test_equal_stays_equal_bit_for_bit(kind):
    one = moved(student())
    two = teacher_of(one)
    ema_update(two, one, MOMENTUM_KINDS[kind](0.99))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_many_updates_are_a_geometric_sum():
    one, two = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    start, end = values(two), values(one)
    for _ in range(50):
        ema_update(two, one, 0.9)
    for a, b, got in zip(start, end, two.parameters(), strict=True):
        assert (got - (0.9**50 * a + (1 - 0.9**50) * b)).abs().max() < 1e-13


@pytest.mark.parametrize("momentum", [0.5, torch.tensor(0.5)])
def test_buffers_are_the_teachers_own(momentum):
    """Batch norm statistics come from the views that each of them has seen, and from nowhere else."""
    one = student()
    two = teacher_of(one)
    torch.manual_seed(1)
    one(torch.randn(8, 3, 32, 32))
    two(torch.randn(8, 3, 32, 32) * 2 + 1)
    before = {name: b.clone() for name, b in two.named_buffers()}
    assert not torch.equal(before["0.bn1.running_mean"], one[0].bn1.running_mean)
    ema_update(two, one, momentum)
    assert all(torch.equal(b, before[name]) for name, b in two.named_buffers())


def test_no_gradient_is_recorded_and_the_memory_format_stays():
    one = student().to(memory_format=torch.channels_last)
    two = teacher_of(one)
    moved(one)
    places = [p.data_ptr() for p in two.parameters()]
    ema_update(two, one, torch.tensor(0.9))
    assert [p.data_ptr() for p in two.parameters()] == places
    assert two[0].layer2[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(p.grad_fn is None and not p.requires_grad for p in two.parameters())


def test_a_tensor_is_read_at_each_replay():
    """What a captured graph needs: one graph, whatever number the tensor holds."""
    torch._dynamo.reset()
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    twin = teacher_of(two)
    update = torch.compile(ema_update, fullgraph=True, backend="eager")
    momentum = torch.tensor(0.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in (0.9, 0.5, 0.99):
            momentum.fill_(number)
            update(two, one, momentum)
            ema_update(twin, one, number)
    for a, b in zip(two.parameters(), twin.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-6


@pytest.mark.parametrize("base", [0.0, 0.9, 0.99, 0.996, 1.0])
def test_schedules_against_their_closed_form(base):
    total = 200
    path = [cosine_momentum(base, step, total) for step in range(total + 1)]
    # the half-angle form of the same curve, (cos x + 1) / 2 = cos^2(x / 2)
    for step, value in enumerate(path):
        assert value == pytest.approx(1 - (1 - base) * math.cos(math.pi * step / (2 * total)) ** 2, abs=1e-15)
        assert constant_momentum(base, step, total) == base
    assert path[0] == pytest.approx(base, abs=1e-15)
    assert path[total // 2] == pytest.approx((1 + base) / 2, abs=1e-15)
    assert path[-1] == 1.0
    assert path == sorted(path)
    assert MOMENTA == {"constant": constant_momentum, "cosine": cosine_momentum}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ema_update(teacher_of(m), m, 1.5), "momentum is 1.5; it must be in [0, 1]"),
        (lambda m: ema_update(teacher_of(m), m, math.nan), "momentum is nan; it must be in [0, 1]"),
        (lambda m: ema_update(teacher_of(m), m, torch.tensor(-0.1)), "momentum is -0.1; it must be in [0, 1]"),
        (lambda m: ema_update(teacher_of(m), m, torch.ones(1)), "momentum is torch.float32 of shape (1,)"),
        (lambda m: ema_update(teacher_of(m), m, torch.tensor(1)), "momentum is torch.int64 of shape ()"),
        (lambda m: ema_update(m, m, 0.9), "teacher and student share weight; make the teacher with teacher_of"),
        (lambda m: ema_update(nn.Linear(3, 2, bias=False), m, 0.9), "teacher and student differ in bias (1 names"),
        (lambda m: ema_update(nn.Linear(4, 2), m, 0.9), "weight is (2, 4) in the teacher, (2, 3) in the student"),
        (lambda m: cosine_momentum(0.99, 11, 10), "step is 11 of 10"),
        (lambda m: cosine_momentum(0.99, 0, 0), "step is 0 of 0"),
        (lambda m: constant_momentum(-1.0, 0, 10), "momentum is -1; it must be in [0, 1]"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call(nn.Linear(3, 2))
    assert message in str(caught.value)
