"""The teacher of MoCo v3 and BYOL: a copy of the student whose parameters trail the student's.

    teacher <- momentum * teacher + (1 - momentum) * student

Parameters only. The teacher's batch norms gather their own statistics, because the teacher runs in train mode on its
own views, as in MoCo v3; averaging the student's into them would mix two distributions of images. So buffers stay the
teacher's. (At evaluation it is the student's encoder that is used.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def teacher_of(student: M) -> M:
    """A copy of the student, equal value for value, that takes no gradient."""
    return copy.deepcopy(student).requires_grad_(False)


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float | Tensor) -> None:
    """Moves the teacher's parameters towards the student's, in place.

    `momentum` is a number in [0, 1] or a 0-d tensor, which a captured CUDA graph reads anew at each replay. Written as
    t + (1 - momentum) * (s - t), so that a teacher equal to its student stays so, bit for bit.
    """
    _check_momentum(momentum)
    old, new = _pairs(teacher, student)
    if isinstance(momentum, Tensor):
        # no foreach lerp takes its weight from a device; this one never makes the host wait
        step = torch._foreach_sub(new, old)
        torch._foreach_mul_(step, 1.0 - momentum)
        torch._foreach_add_(old, step)
    else:
        torch._foreach_lerp_(old, new, 1.0 - momentum)


def constant_momentum(base: float, step: int, total: int) -> float:
    """`base` at every step: the recipe of the small-image runs (0.99 for CIFAR, 0.996 for 64 px images)."""
    _check_schedule(base, step, total)
    return base


def cosine_momentum(base: float, step: int, total: int) -> float:
    """1 - (1 - base) * (cos(pi * step / total) + 1) / 2: from `base` at step 0 to 1 at step `total` (BYOL, MoCo v3)."""
    _check_schedule(base, step, total)
    return 1.0 - (1.0 - base) * (math.cos(math.pi * step / total) + 1.0) / 2.0


MOMENTA: dict[str, Callable[[float, int, int], float]] = {"constant": constant_momentum, "cosine": cosine_momentum}


def _pairs(teacher: nn.Module, student: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    old, new = dict(teacher.named_parameters()), dict(student.named_parameters())
    if odd := sorted(old.keys() ^ new.keys()):
        raise ValueError(f"teacher and student differ in {odd[0]} ({len(odd)} names in all); use teacher_of(student)")
    for name, parameter in old.items():
        if parameter is new[name]:
            raise ValueError(f"teacher and student share {name}; make the teacher with teacher_of(student)")
        if parameter.shape != new[name].shape:
            raise ValueError(
                f"{name} is {tuple(parameter.shape)} in the teacher, {tuple(new[name].shape)} in the student"
            )
    return list(old.values()), [new[name] for name in old]


def _check_momentum(momentum: float | Tensor) -> None:
    """A number is always looked at; a tensor only where that costs no waiting for a device."""
    if isinstance(momentum, Tensor):
        if momentum.dim() != 0 or not momentum.is_floating_point():
            raise ValueError(
                f"momentum is {momentum.dtype} of shape {tuple(momentum.shape)}; it must be a floating 0-d one"
            )
        if momentum.device.type != "cpu" or torch.compiler.is_compiling():
            return
        momentum = float(momentum)
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(f"momentum is {momentum:g}; it must be in [0, 1]")


def _check_schedule(base: float, step: int, total: int) -> None:
    _check_momentum(base)
    if not 0 <= step <= total or total < 1:
        raise ValueError(f"step is {step} of {total}; it must be from 0 to a total of at least 1")


def learning_rate(step: int, total: int, base: float, warmup: int = 0) -> float:
    """Linear from 0 at step 0 to `base` at step `warmup`, then half a cosine, to 0 at step `total`."""
    if not 0 <= step <= total or not 0 <= warmup < total:
        raise ValueError(f"step is {step} of {total} with a warm-up of {warmup}; it must be within the run")
    if step < warmup:
        return base * step / warmup
    return base * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2.0
