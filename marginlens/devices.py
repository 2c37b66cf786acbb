"""Choose device and precision, and draw random numbers from a seed of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device) -> M:
    """Move a module to the device, in the channels-last layout, which is faster on CPUs and GPUs."""
    module.to(device)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def choose_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"there is no device {name!r}; there are auto, cpu, cuda and cuda:0, cuda:1, ...")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} cannot be used: {torch.cuda.device_count()} CUDA devices are here; try auto")
    if ":" in name:
        torch.cuda.set_device(name)  # because streams, graphs and kernels are made on the current device
    return torch.device(name)


def choose_precision(amp: str, device: torch.device) -> torch.dtype:
    """Return the dtype of convolutions; the loss and the weights are always float32."""
    if device.type != "cuda":
        if amp in ("bf16", "fp16"):
            raise ValueError(f"amp is {amp!r}, which is for CUDA; on a {device.type} leave it out")
        return torch.float32
    if amp == "auto":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]


def autocast(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return a context that computes in half precision if it was chosen."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def fastest_convolutions(limit: int = 10) -> AbstractContextManager[None]:
    """Let cuDNN try up to `limit` algorithms once per shape; 0 tries all, which takes twice as long."""
    cudnn = torch.backends.cudnn
    if not cudnn.is_available():
        return nullcontext()
    kept = {"deterministic": cudnn.deterministic, "allow_tf32": cudnn.allow_tf32}
    return cudnn.flags(enabled=True, benchmark=True, benchmark_limit=limit, **kept)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, and restore its state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed ^ (seed >> 32) * 0x9E3779B1 % (1 << 32))  # because it uses 32 bits
        yield
