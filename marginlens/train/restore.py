"""What a complete run has learned: its backbone, or the whole method, out of its last checkpoint."""

from __future__ import annotations

import hashlib

from torch import Tensor, nn

from marginlens.methods import BYOL, MoCoV3, SimCLR
from marginlens.nets.resnet import ResNet
from marginlens.train.config import Pretrain
from marginlens.train.model import make_encoder, make_method
from marginlens.train.record import Run


def load_backbone_of(run: Run) -> ResNet:
    """The trained backbone, in eval mode."""
    backbone = make_encoder(_from_scratch(run))
    backbone.load_state_dict(_part(run, "method.student.backbone."))
    backbone.eval()
    return backbone


def load_method_of(run: Run) -> MoCoV3 | SimCLR | BYOL:
    """The trained method, heads and teacher included, in eval mode."""
    method = make_method(_from_scratch(run))
    method.load_state_dict(_part(run, "method."))
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


def _part(run: Run, prefix: str) -> dict[str, Tensor]:
    tensors = run.checkpoint().tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
