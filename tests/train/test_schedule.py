"""Learning rate and EMA momentum at every step: against their closed form in another shape, and against torch's."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marginlens.nets.ema import MOMENTA, learning_rate

SHAPES = [(1, 0), (2, 1), (10, 0), (10, 3), (10, 9), (97, 0), (97, 20), (400, 10)]
BASES = [0.06, 1.0]
quick = settings(deadline=None, max_examples=40)


def path(total, base, warmup):
    return [learning_rate(step, total, base, warmup) for step in range(total + 1)]


def steps(scheduler, optimizer, count):
    """What a scheduler of torch's makes of the learning rate, step by step."""
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@st.composite
def schedules(draw):
    total = draw(st.integers(2, 3000))
    return total, draw(st.integers(0, total - 1)), draw(st.floats(1e-4, 10.0))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("total", "warmup"), SHAPES)
def test_every_step_against_the_half_angle_form(total, warmup, base):
    """(1 + cos x) / 2 = cos^2(x / 2)"""
    found = path(total, base, warmup)
    for step, lr in enumerate(found):
        if step < warmup:
            assert lr == pytest.approx(base * step / warmup, rel=1e-14)
        else:
            want = base * math.cos(math.pi / 2 * (step - warmup) / (total - warmup)) ** 2
            assert lr == pytest.approx(want, rel=1e-9, abs=1e-15 * base)
    assert found[warmup] == base
    assert found[total] == 0.0
    assert warmup == 0 or found[0] == 0.0


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("total", "warmup"), SHAPES)
def test_every_step_against_torch(total, warmup, base):
    """torch's recursion loses digits as the cosine nears 0, and its warm-up cannot start at 0: absolute, to 1e-9."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup)
    ours = path(total, base, warmup)
    assert steps(scheduler, optimizer, total - warmup + 1) == pytest.approx(ours[warmup:], abs=1e-9 * base)
    if warmup:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-12, total_iters=warmup)
        assert steps(linear, optimizer, warmup + 1) == pytest.approx(ours[: warmup + 1], abs=1e-9 * base)


@quick
@given(schedules())
def test_up_then_down_without_a_jump(asked):
    total, warmup, base = asked
    found = path(total, base, warmup)
    assert found[warmup] == max(found) == base
    assert found[: warmup + 1] == sorted(found[: warmup + 1])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    # no step is steeper than the line's slope, or the cosine's steepest, pi / 2 over its length
    steepest = max(1 / warmup if warmup else 0.0, math.pi / 2 / (total - warmup))
    assert max(abs(b - a) for a, b in itertools.pairwise(found)) <= base * steepest * (1 + 1e-9)


@quick
@given(schedules(), st.floats(0.0, 1.0))
def test_the_two_halves_of_a_cosine_mirror_each_other(asked, place):
    total, warmup, base = asked
    away = round(place * (total - warmup))
    both = learning_rate(warmup + away, total, base, warmup) + learning_rate(total - away, total, base, warmup)
    assert both == pytest.approx(base, rel=1e-12)


@quick
@given(schedules(), st.floats(1.0, 100.0))
def test_it_is_proportional_to_its_base(asked, factor):
    total, warmup, base = asked
    for step in range(0, total + 1, max(1, total // 10)):
        one, other = (learning_rate(step, total, b, warmup) for b in (base, base * factor))
        assert other == pytest.approx(one * factor, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "total", "warmup"), [(-1, 10, 0), (11, 10, 0), (0, 10, 10), (0, 10, 11), (3, 10, -1), (1, 0, 0), (0, 0, 0)]
)
def test_refused(step, total, warmup):
    with pytest.raises(ValueError, match=f"step is {step} of {total} with a warm-up of {warmup}"):
        learning_rate(step, total, 0.1, warmup)


@pytest.mark.parametrize("base", [0.0, 0.9, 0.99, 0.996, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7, 100, 1001])
def test_momenta_at_every_step(total, base):
    """The cosine's distance from 1 is a learning rate without warm-up: (1 - base) down to 0."""
    for step in range(total + 1):
        assert MOMENTA["constant"](base, step, total) == base
        rising = MOMENTA["cosine"](base, step, total)
        assert rising == pytest.approx(1 - (1 - base) * math.cos(math.pi / 2 * step / total) ** 2, abs=1e-14)
        assert 1 - rising == pytest.approx(learning_rate(step, total, 1 - base), abs=1e-14)
    assert MOMENTA["cosine"](base, 0, total) == pytest.approx(base, abs=1e-15)
    assert MOMENTA["cosine"](base, total, total) == 1.0


@quick
@given(st.floats(0.0, 1.0), st.integers(1, 2000))
def test_momenta_stay_between_base_and_one(base, total):
    found = [MOMENTA["cosine"](base, step, total) for step in range(total + 1)]
    assert found == sorted(found)
    assert base - 1e-15 <= found[0]
    assert found[-1] <= 1.0


@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize(
    ("base", "step", "total", "said"),
    [
        (0.99, -1, 10, "step is -1 of 10"),
        (0.99, 11, 10, "step is 11 of 10"),
        (0.99, 0, 0, "step is 0 of 0"),
        (1.01, 0, 10, "momentum is 1.01"),
        (-0.01, 0, 10, "momentum is -0.01"),
        (math.nan, 0, 10, "momentum is nan"),
    ],
)
def test_momenta_refused(kind, base, step, total, said):
    with pytest.raises(ValueError, match=said):
        MOMENTA[kind](base, step, total)
