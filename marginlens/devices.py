"""Where a network is computed and in which precision; and random numbers that belong to a seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device) -> M:
    """The module on the device, its convolutions channels-last, the faster layout on a CPU and on a GPU."""
    module.to(device)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def choose_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:1` names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"there is no device {name!r}; there are auto, cpu, cuda and cuda:0, cuda:1, ...")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} cannot be used: {torch.cuda.device_count()} CUDA devices are here; try auto")
    if ":" in name:
        torch.cuda.set_device(name)  # streams, graphs and kernels are made on the current one
    return torch.device(name)


def choose_precision(amp: str, device: torch.device) -> torch.dtype:
    """What convolutions are computed in; the loss and the weights are float32 in any case."""
    if device.type != "cuda":
        if amp in ("bf16", "fp16"):
            raise ValueError(f"amp is {amp!r}, which is for CUDA; on a {device.type} leave it out")
        return torch.float32
    if amp == "auto":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Half precision where it was chosen."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def fastest_convolutions(limit: int = 10) -> AbstractContextManager[None]:
    """Lets cuDNN try so many algorithms for a shape, once; 0: all, which takes twice as long."""
    cudnn = torch.backends.cudnn
    if not cudnn.is_available():
        return nullcontext()
    kept = {"deterministic": cudnn.deterministic, "allow_tf32": cudnn.allow_tf32}
    return cudnn.flags(enabled=True, benchmark=True, benchmark_limit=limit, **kept)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from torch's generator of the CPU as from a new one with that seed, and leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed ^ (seed >> 32) * 0x9E3779B1 % (1 << 32))  # of which it takes 32 bits
        yield
