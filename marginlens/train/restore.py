"""What a complete run has learned: its backbone, or the whole method, out of its last checkpoint."""

from __future__ import annotations

import hashlib

from torch import nn

from marginlens.methods import BYOL, MoCoV3, SimCLR
from marginlens.nets.resnet import ResNet
from marginlens.train import checkpoint
from marginlens.train.config import Pretrain
from marginlens.train.model import make_encoder, make_method
from marginlens.train.record import Run


def load_backbone_of(run: Run) -> ResNet:
    """Return the trained backbone, in eval mode."""
    backbone = make_encoder(_from_scratch(run))
    _load(backbone, run, "method.student.backbone.")
    backbone.eval()
    return backbone


def load_method_of(run: Run) -> MoCoV3 | SimCLR | BYOL:
    """Return the trained method, heads and teacher included, in eval mode."""
    method = make_method(_from_scratch(run))
    _load(method, run, "method.")
    method.eval()
    return method


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over every parameter and buffer, batch norm's statistics included."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _from_scratch(run: Run) -> Pretrain:
    """The run's settings without the weights it began from, which may be gone: all are replaced anyway."""
    return run.settings.model_copy(update={"weights": ""})


def _load(module: nn.Module, run: Run, prefix: str) -> None:
    """Copy the part of a run's last checkpoint whose names begin with `prefix` into a module."""
    found = run.checkpoint()
    part = {name: tensor for name, tensor in found.tensors.items() if name.startswith(prefix)}
    own = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    checkpoint.fill(own, found._replace(tensors=part))
