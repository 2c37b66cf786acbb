"""Residual encoders: images (n, 3, h, w) to pooled features (n, d).

Parameters have torchvision's names and initialisation, which timm shares, so state dicts load in all three. There is no
`fc`, because a head belongs to a method and not to its encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from marginlens.nets import fast
from marginlens.parameters import hint

T = TypeVar("T")


@dataclass(frozen=True)
class Stem:
    """The first layer: one convolution, and whether a max-pool(3, 2, 1) follows."""

    kernel: int
    stride: int
    maxpool: bool

    @property
    def about(self) -> str:
        """In words."""
        pool = "and a max-pool" if self.maxpool else "no max-pool"
        return f"{self.kernel}x{self.kernel} at stride {self.stride} {pool}"


STEMS = {
    "small": Stem(kernel=3, stride=1, maxpool=False),
    "small-pool": Stem(kernel=3, stride=1, maxpool=True),
    "imagenet": Stem(kernel=7, stride=2, maxpool=True),
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. The first convolution has the stride."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    @property
    def pairs(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Convolutions with their batch norms."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu(y + (x if self.downsample is None else self.downsample(x)))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut. The 3x3 has the stride ("v1.5", as in torchvision)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    @property
    def pairs(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Convolutions with their batch norms."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(y + (x if self.downsample is None else self.downsample(x)))
        return out


Block = type[BasicBlock] | type[Bottleneck]


@dataclass(frozen=True)
class Architecture:
    """Blocks per stage, the first stage's width (each later stage doubles it), and the default stem."""

    block: Block
    depths: tuple[int, int, int, int]
    width: int
    stem: str


ENCODERS = {
    # for a CPU: ResNet-10 at a quarter of the width, with a pooled stem; 256 images of 32 px take one core about 0.2 s
    "tiny": Architecture(BasicBlock, (1, 1, 1, 1), width=16, stem="small-pool"),
    "resnet18": Architecture(BasicBlock, (2, 2, 2, 2), width=64, stem="small"),
    "resnet34": Architecture(BasicBlock, (3, 4, 6, 3), width=64, stem="small"),
    "resnet50": Architecture(Bottleneck, (3, 4, 6, 3), width=64, stem="imagenet"),
}


class ResNet(nn.Module):
    """A residual network up to its pooled features. `features` is their number, `stem` the stem's name."""

    def __init__(self, architecture: Architecture, stem: str, *, zero_init_residual: bool = False) -> None:
        super().__init__()
        entry, width = STEMS[stem], architecture.width
        self.stem = stem
        self.conv1 = _conv(3, width, entry.kernel, entry.stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if entry.maxpool else nn.Identity()
        block, (d1, d2, d3, d4) = architecture.block, architecture.depths
        self.layer1 = _stage(block, width, width, d1, stride=1)
        self.layer2 = _stage(block, width * block.expansion, 2 * width, d2, stride=2)
        self.layer3 = _stage(block, 2 * width * block.expansion, 4 * width, d3, stride=2)
        self.layer4 = _stage(block, 4 * width * block.expansion, 8 * width, d4, stride=2)
        self.features = 8 * width * block.expansion
        _initialise(self, zero_init_residual)

    @property
    def blocks(self) -> list[BasicBlock | Bottleneck]:
        """The residual blocks in order."""
        stages = (self.layer1, self.layer2, self.layer3, self.layer4)
        return [block for stage in stages for block in stage]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        if fast.on():
            return fast.resnet(self, x)
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))


def encoder(name: str, *, stem: str | None = None, zero_init_residual: bool = False) -> ResNet:
    """Return a new encoder by name: `tiny`, `resnet18`, `resnet34` or `resnet50`.

    Args:
        name: Name of the architecture.
        stem: "small" (3x3, stride 1), "small-pool" (the same, then a max-pool) or "imagenet" (7x7, stride 2, then a
            max-pool). None means the architecture's own; `default_stem` returns the one for an image size.
        zero_init_residual: Start every block as the identity (Goyal et al. 2017).

    The weights come from torch's global generator.
    """
    architecture = _known("encoder", name, ENCODERS)
    stem = architecture.stem if stem is None else stem
    _known("stem", stem, STEMS)
    return ResNet(architecture, stem, zero_init_residual=zero_init_residual)


def default_stem(name: str, size: int) -> str:
    """Return the stem for images of size x size pixels: ReSSL's recipe up to 64 px, torchvision's above 128 px.

    CIFAR (32 px) keeps full resolution; STL-10 (64 or 96 px) and Tiny ImageNet (64 px) pool once. `tiny` always pools,
    because a step at full resolution takes a CPU three times as long.
    """
    _known("encoder", name, ENCODERS)
    check_size(size)
    if name == "tiny":
        return "small-pool"
    return "small" if size <= 48 else "small-pool" if size <= 128 else "imagenet"


def check_size(size: int) -> None:
    """Raise unless the size is a whole number of pixels, at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size is {size!r}; it must be a number of pixels, at least 1")


def load_backbone(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load weights under torchvision's names. `fc.*` is skipped; everything else must fit exactly.

    Nothing is loaded unless everything fits. Files from before PyTorch 0.4.1, some of torchvision's among them, have no
    `num_batches_tracked` for batch norm. It then starts at 0, as in torch.
    """
    own = model.state_dict()
    given = {key: value for key, value in state_dict.items() if key in own or not key.startswith("fc.")}
    for key, value in own.items():
        if key.endswith(".num_batches_tracked") and key not in given:
            given[key] = torch.zeros_like(value)
    wrong = [f"{key} is {_shape(x)}, not {_shape(own[key])}" for key, x in given.items() if _misfit(own.get(key), x)]
    typed = [f"{key} is {x.dtype}" for key, x in given.items() if key in own and _other_type(own[key], x)]
    problems = [
        f"{what}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
        for what, keys in (
            ("missing", [key for key in own if key not in given]),
            ("unexpected", [key for key in given if key not in own]),
            ("wrong shape", wrong),
            ("not floating", typed),
        )
        if keys
    ]
    if problems:
        stem = any(line.startswith("conv1.weight ") for line in wrong)
        hint = f"; a stem fits its own weights only (known: {', '.join(STEMS)})" if stem else ""
        raise ValueError(f"the weights do not fit this encoder: {'; '.join(problems)}{hint}")
    model.load_state_dict(given)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _stage(block: Block, inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """Return `depth` blocks. The first one changes width and resolution."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return a projection if the block changes the shape, else None."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _initialise(model: nn.Module, zero_init_residual: bool) -> None:
    """Initialise as torchvision does; batch norm is already 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_init_residual and isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_((module.bn3 if isinstance(module, Bottleneck) else module.bn2).weight)


def _known(kind: str, name: str, table: Mapping[str, T]) -> T:
    if name in table:
        return table[name]
    raise ValueError(f"there is no {kind} {name!r}; {hint(name, table)}")


def _misfit(own: Tensor | None, given: object) -> bool:
    return own is not None and (not isinstance(given, Tensor) or given.shape != own.shape)


def _other_type(own: Tensor, given: object) -> bool:
    """True if numbers are not weights: quantised integers, say, mean something else."""
    return isinstance(given, Tensor) and own.is_floating_point() and not given.is_floating_point()


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
