"""Build a method and its views from settings, and load a run's trained weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from marginlens.data.feed import Feed
from marginlens.data.views import View, strong, weak
from marginlens.devices import seeded
from marginlens.files import expanded, opened, reason
from marginlens.methods import METHODS
from marginlens.methods.protocol import Method, module_of
from marginlens.nets.resnet import ResNet, default_stem, encoder, load_backbone
from marginlens.runs import checkpoint
from marginlens.runs.config import METHOD_SETTINGS, Pretrain, takes
from marginlens.runs.run import Run


def make_encoder(settings: Pretrain) -> ResNet:
    """Return the encoder that a run with these settings starts from."""
    with seeded(settings.seed):
        return _encoder(settings)


def make_method(settings: Pretrain) -> Method:
    """Return the method that a run with these settings starts from. It depends on the settings alone."""
    with seeded(settings.seed):
        found: Method = METHODS[settings.method](_encoder(settings), **_arguments(settings))
    return found


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
    """Return the strong and the weak view."""
    scale, size = settings.crop_scale, settings.size
    return (
        replace(strong(size, feed.mean, feed.std), scale=scale, blur=settings.blur),
        replace(weak(size, feed.mean, feed.std, crop=settings.weak_crop), scale=scale),
    )


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file."""
    try:
        opened(path).close()  # raises for a pipe or a device, which would never end
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give --weights a safetensors file") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({reason(error)})") from None


def load_backbone_of(run: Run) -> ResNet:
    """Return the trained backbone, in eval mode."""
    backbone = make_encoder(_from_scratch(run))
    _load(backbone, run, "method.student.backbone.")
    backbone.eval()
    return backbone


def load_method_of(run: Run, saved: checkpoint.Checkpoint | None = None) -> Method:
    """Return the trained method, heads and teacher included, in eval mode; `saved` None is its last checkpoint."""
    method = make_method(_from_scratch(run))
    _load(module_of(method), run, "method.", saved)
    module_of(method).eval()
    return method


def fingerprint(module: nn.Module) -> str:
    """Return a SHA-256 over every parameter and buffer, batch norm's statistics included."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _from_scratch(run: Run) -> Pretrain:
    """Return the run's settings without its initial weights, which may be gone and are replaced anyway."""
    return run.settings.model_copy(update={"weights": ""})


def _load(module: nn.Module, run: Run, prefix: str, saved: checkpoint.Checkpoint | None = None) -> None:
    """Copy the part of a checkpoint whose names begin with `prefix` into a module."""
    found = saved or run.checkpoint()
    part = {name: tensor for name, tensor in found.tensors.items() if name.startswith(prefix)}
    own = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    checkpoint.fill(own, found._replace(tensors=part))
