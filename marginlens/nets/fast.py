"""The same networks with fewer passes over memory: batch norm, addition and ReLU in one, the first convolution ours.

    with fast():
        loss = method.loss(views)

Inside, `ResNet` and the heads take the kernels of `fused.py` wherever these apply: in training, on a device that Triton
knows. Outside nothing changes. The slow twin is the module's own `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import relu

if TYPE_CHECKING:
    from marginlens.nets.resnet import BasicBlock, Bottleneck, ResNet

_on = False


def on() -> bool:
    """Whether the fast form was asked for."""
    return _on


@contextmanager
def fast() -> Iterator[None]:
    """Networks take their fast form in here."""
    global _on  # noqa: PLW0603
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def resnet(net: ResNet, x: Tensor) -> Tensor:
    """Slow twin: `ResNet.forward`. A block's input goes two ways; both gradients are added where they are used."""
    first, second = _norm(_stem(net.conv1, x), net.bn1, both=True)
    if not isinstance(net.maxpool, nn.Identity):
        first = second = net.maxpool(first)
    blocks = [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage]
    for number, block in enumerate(blocks):
        first, second = _block(block, first, second, both=number + 1 < len(blocks))
    return first.mean((2, 3))


def head(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Slow twin: `nn.Sequential.forward` of a head: linear, batch norm, ReLU, linear, and maybe a batch norm."""
    linear, norm, _, last, *end = layers
    x = last(_norm(linear(x), norm)[0])
    return _norm(x, end[0], act=False)[0] if end else x


def _block(block: BasicBlock | Bottleneck, x: Tensor, skip: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """A residual block; `x` and `skip` are the same image."""
    if block.downsample is not None:
        conv, norm = block.downsample
        skip = _norm(conv(skip), norm, act=False)[0]
    y = _norm(block.conv1(x), block.bn1)[0]
    if block.expansion == 1:
        return _norm(block.conv2(y), block.bn2, skip, both=both)
    y = _norm(block.conv2(y), block.bn2)[0]
    return _norm(block.conv3(y), block.bn3, skip, both=both)  # type: ignore[union-attr]


def _norm(
    x: Tensor, norm: nn.Module, add: Tensor | None = None, act: bool = True, both: bool = False
) -> tuple[Tensor, Tensor]:
    """Batch norm, addition, ReLU. The result comes twice: with `both`, each with a gradient of its own."""
    from marginlens.nets import fused

    if fused.supported(x, norm, add):
        return fused.norm_act(x, norm, add, act, both)
    y = norm(x)
    y = y if add is None else y + add
    y = relu(y) if act else y
    return y, y


def _stem(conv: nn.Conv2d, x: Tensor) -> Tensor:
    from marginlens.nets import fused

    if fused.stem_supported(x, conv):
        return fused.stem_conv(x, conv.weight)
    out: Tensor = conv(x)
    return out
