"""Measure an encoder by running it once: features, parameters, FLOPs.

A FLOP is one addition or one multiplication, so a multiply-add is two, as in torch's FlopCounterMode. Papers and
torchvision's model pages that print "1.8 GFLOPs" for ResNet-18 count multiply-adds: half of our number. We count
convolutions and matrix products. We do not count batch norm, ReLU and pooling, which are small.
"""

from __future__ import annotations

import json as jsons
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from marginlens import output
from marginlens.nets.resnet import ENCODERS, check_size, default_stem, encoder

SIZES = (32, 64, 224)
_BATCH = 2


@dataclass(frozen=True)
class Facts:
    """Numbers of one encoder at one image size. `flops` is for one forward pass of one image."""

    name: str
    stem: str
    size: int
    features: int
    parameters: int
    flops: int


def feature_dim(module: nn.Module, size: int) -> int:
    """Return d for a module that maps images (n, 3, size, size) to features (n, d). Any such module can be an encoder.

    A dry run in eval mode finds d. It leaves parameters, buffers, training flags and random generators unchanged.
    """
    return _dry_run(module, size).shape[1]


def parameters(module: nn.Module) -> int:
    """Return the number of parameters. Buffers, such as batch norm's statistics, do not count."""
    return sum(p.numel() for p in module.parameters())


def flops(module: nn.Module, size: int) -> int:
    """Return the FLOPs (two per multiply-add) of one forward pass of one image of size x size pixels."""
    with FlopCounterMode(display=False) as counter:
        _dry_run(module, size)
    return int(counter.get_total_flops()) // _BATCH


def facts(name: str, size: int, stem: str | None = None) -> Facts:
    """Return the facts of a named encoder without allocating it. `stem` None means the default for this size."""
    stem = default_stem(name, size) if stem is None else stem
    with torch.device("meta"):
        model = encoder(name, stem=stem)
    return Facts(name, stem, size, model.features, parameters(model), flops(model, size))


def table(sizes: Iterable[int] = SIZES) -> list[Facts]:
    """Return the facts of every encoder at every size, each with the default stem for the size."""
    sizes = tuple(sizes)
    return [facts(name, size) for name in ENCODERS for size in sizes]


def markdown(rows: Iterable[Facts]) -> str:
    """Return the table of `docs/reference/encoders.md`."""
    lines = ["| encoder | image | stem | features | parameters | forward, GFLOP |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.name} | {r.size} px | {r.stem} | {r.features} | {r.parameters:,} | {r.flops / 1e9:.3f} |" for r in rows
    ]
    return "\n".join(lines)


def _dry_run(module: nn.Module, size: int) -> Tensor:
    """Return features of black images, (2, d), and leave the module unchanged."""
    check_size(size)
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_lazy(x) for x in tensors):
        raise ValueError("the encoder has lazy parameters: run one batch of images through it first")
    floating = [x for x in tensors if x.is_floating_point()]
    like = floating[0] if floating else torch.empty(0)
    images = torch.zeros(_BATCH, 3, size, size, dtype=like.dtype, device=like.device)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    flags = [(part, part.training) for part in module.modules()]
    cuda = [like.device] if like.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            features = torch.func.functional_call(module.eval(), buffers, (images,))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the encoder cannot read images of shape {tuple(images.shape)}: {reason}") from error
    finally:
        for part, training in flags:
            part.training = training
    return _checked(features)


class NoTensor(ValueError):  # noqa: N818  it is a finding about a backbone
    """Report an encoder that returns something else than a tensor."""


def tensor_of(features: object) -> Tensor:
    """Return what an encoder returns; raise, with a wrapper to copy, unless it is a tensor."""
    if isinstance(features, Tensor):
        return features
    line = f"the encoder returns a {type(features).__name__}; it must return a tensor of features (n, d)"
    where = _where(features)
    raise NoTensor(
        f"{line}; wrap it:\n\n{_WRAPPER.format(where)}" if where else f"{line}; wrap it in a module that does"
    )


_WRAPPER = """\
class Features(torch.nn.Module):
    def __init__(self, model): super().__init__(); self.model = model
    def forward(self, images): return self.model(images){}

backbone = Features(backbone)
"""


def _where(output: Any) -> str:
    """Return code that takes features (n, d) out of a dict, a tuple or an object such as a ModelOutput; "" if none."""
    if isinstance(output, Mapping):
        parts = {f"[{name!r}]": x for name, x in output.items()}
    elif isinstance(output, Sequence):
        parts = {f"[{i}]": x for i, x in enumerate(output)}
    else:
        parts = {f".{name}": x for name, x in getattr(output, "__dict__", {}).items()}
    pooling = {2: "", 3: ".mean(1)", 4: ".mean((2, 3))"}  # over tokens, over pixels
    usable = [
        name for name, x in parts.items() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() in pooling
    ]
    usable.sort(key=lambda name: "pool" not in name)
    return usable[0] + pooling[parts[usable[0]].dim()] if usable else ""


def _checked(features: object) -> Tensor:
    features = tensor_of(features)
    if features.dim() != 2 or len(features) != _BATCH or features.shape[1] == 0:
        raise ValueError(
            f"the encoder maps {_BATCH} images to shape {tuple(features.shape)}; it must be ({_BATCH}, d): "
            f"pool and flatten, as in nn.Sequential(encoder, nn.AdaptiveAvgPool2d(1), nn.Flatten())"
        )
    return features


def encoders(*, json: bool = False) -> None:
    """List the encoders: stem, features, parameters and FLOPs per image (two for each multiply-add).

    Args:
        json: Print JSON instead of a table.
    """
    rows = [asdict(row) for row in table()]
    if json:
        output.say_json(jsons.dumps(rows, indent=1))
        return
    from rich.table import Table

    sheet = Table("encoder", "stem", "pixels", "features", "parameters", "MFLOP per image")
    for row in rows:
        name, stem, size, features = (str(row[key]) for key in ("name", "stem", "size", "features"))
        sheet.add_row(name, stem, size, features, f"{row['parameters']:,}", f"{row['flops'] / 1e6:,.0f}")
    output.show(sheet)
