"""The teacher of MoCo v3 and BYOL: a copy of the student whose parameters follow the student's.

    teacher <- momentum * teacher + (1 - momentum) * student

Only parameters follow. The teacher keeps its own batch norm statistics, because it runs in train mode on its own views,
as in MoCo v3. Averaging the student's statistics into them would mix two distributions of images. Evaluations use the
student's encoder.
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
    """Return a copy of the student that gets no gradient."""
    return copy.deepcopy(student).requires_grad_(False)


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float | Tensor) -> None:
    """Move the teacher's parameters towards the student's, in place.

    `momentum` is a number in [0, 1], or a 0-d tensor that a captured CUDA graph reads again at each replay. The formula
    is t + (1 - momentum) * (s - t), so a teacher that equals its student stays equal, bit for bit.
    """
    _check_momentum(momentum)
    old, new = _pairs(teacher, student)
    if isinstance(momentum, Tensor):
        # by hand, because foreach lerp reads its weight on the host, which would wait for the device
        step = torch._foreach_sub(new, old)
        torch._foreach_mul_(step, 1.0 - momentum)
        torch._foreach_add_(old, step)
    else:
        torch._foreach_lerp_(old, new, 1.0 - momentum)


def constant_momentum(base: float, step: int, total: int) -> float:
    """Return `base` at every step: the recipe for small images (0.99 for CIFAR, 0.996 for 64 px images)."""
    _check_schedule(base, step, total)
    return base


def cosine_momentum(base: float, step: int, total: int) -> float:
    """Return a momentum that rises from `base` at step 0 to 1 at step `total`, as in BYOL and MoCo v3.

    It is 1 - (1 - base) * (cos(pi * step / total) + 1) / 2.
    """
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
    """Raise unless the momentum is in [0, 1]. A tensor's value is read only if the host need not wait for a device."""
    if isinstance(momentum, Tensor):
        if momentum.dim() != 0 or not momentum.is_floating_point():
            raise ValueError(
                f"momentum is {momentum.dtype} of shape {tuple(momentum.shape)}; "
                f"it must be a floating-point tensor of shape ()"
            )
        if momentum.device.type != "cpu" or torch.compiler.is_compiling():
            return
        momentum = float(momentum)
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(f"momentum is {momentum:g}; it must be in [0, 1]")


def _check_schedule(base: float, step: int, total: int) -> None:
    _check_momentum(base)
    if not 0 <= step <= total or total < 1:
        raise ValueError(f"step is {step} of {total}; it must be between 0 and the total, which is at least 1")


def learning_rate(step: int, total: int, base: float, warmup: int = 0) -> float:
    """Return a rate that rises linearly to `base` at step `warmup`, then falls by half a cosine to 0 at `total`."""
    if not 0 <= step <= total or not 0 <= warmup < total:
        raise ValueError(f"step is {step} of {total} with a warm-up of {warmup}; both must be within the run")
    if step < warmup:
        return base * step / warmup
    return base * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2.0
