"""From settings to what trains: method, views, optimiser, precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from marginlens.data.views import View, strong, weak
from marginlens.files import opened, reason
from marginlens.methods import BYOL, METHODS, MoCoV3, SimCLR
from marginlens.nets.resnet import ResNet, default_stem, encoder, load_backbone
from marginlens.paths import expanded
from marginlens.train.config import METHOD_SETTINGS, Pretrain, takes
from marginlens.train.feed import Feed

M = TypeVar("M", bound=nn.Module)


def make_encoder(settings: Pretrain) -> ResNet:
    """The encoder that a run with these settings starts from."""
    with seeded(settings.seed):
        return _encoder(settings)


def make_method(settings: Pretrain) -> MoCoV3 | SimCLR | BYOL:
    """The method that a run with these settings starts from: a function of the settings alone."""
    with seeded(settings.seed):
        found: MoCoV3 | SimCLR | BYOL = METHODS[settings.method](_encoder(settings), **_arguments(settings))
    return found


def placed(module: M, device: torch.device) -> M:
    """The module on the device, its convolutions channels-last, the faster layout on a CPU and on a GPU."""
    module.to(device)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _encoder(settings: Pretrain) -> ResNet:
    stem = default_stem(settings.encoder, settings.size) if settings.stem == "auto" else settings.stem
    backbone = encoder(settings.encoder, stem=stem)
    if settings.weights:
        load_backbone(backbone, read_weights(expanded(settings.weights)))
    return backbone


def _arguments(settings: Pretrain) -> dict[str, Any]:
    names = [name for name in METHOD_SETTINGS if name != "ema_schedule" and takes(settings.method, name)]
    return {METHOD_SETTINGS[name]: getattr(settings, name) for name in names}


def make_views(settings: Pretrain, feed: Feed) -> tuple[View, View]:
    """The strong and the weak view."""
    scale, size = settings.crop_scale, settings.size
    return (
        replace(strong(size, feed.mean, feed.std), scale=scale, blur=settings.blur),
        replace(weak(size, feed.mean, feed.std, crop=settings.weak_crop), scale=scale),
    )


def make_optimizer(settings: Pretrain, method: nn.Module) -> torch.optim.SGD:
    """SGD over what learns; norms and biases decay with the rest, or not at all."""
    learning = {name: p for name, p in method.named_parameters() if p.requires_grad}
    flat = [] if settings.decay_all else [p for p in learning.values() if p.dim() <= 1]
    spared = {id(p) for p in flat}
    groups: list[dict[str, Any]] = [{"params": [p for p in learning.values() if id(p) not in spared]}]
    if flat:
        groups.append({"params": flat, "weight_decay": 0.0})
    return torch.optim.SGD(groups, settings.lr, settings.momentum, weight_decay=settings.weight_decay)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file."""
    try:
        opened(path).close()  # a pipe or a device would never end
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give --weights a safetensors file") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({reason(error)})") from None


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
