"""A frozen encoder without batch norms: each is folded into the convolution before it.

In eval mode a batch norm is a fixed scale and shift per channel, so w' = scale * w and b' = shift give the same result.
A convolution with bias, addition and ReLU is then one cuDNN kernel. Slow twin: `ResNet.forward` in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from marginlens.nets.resnet import BasicBlock, Bottleneck, ResNet

Layer = Callable[[Tensor], Tensor]


def folded(net: ResNet, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the encoder's current state in eval mode and `dtype`, as a function from images (n, 3, h, w) to (n, d)."""
    stem = _layer(net.conv1, net.bn1, dtype)
    blocks = [_block(block, dtype) for block in net.blocks]

    @torch.no_grad()
    def features(x: Tensor) -> Tensor:
        x = net.maxpool(stem(x.to(dtype, memory_format=torch.channels_last)))
        for block in blocks:
            x = block(x)
        return x.mean((2, 3))

    return features


def _block(block: BasicBlock | Bottleneck, dtype: torch.dtype) -> Layer:
    *inner, last = block.pairs
    first = [_layer(conv, norm, dtype) for conv, norm in inner]
    close = _Convolution(*last, dtype)
    side = None
    if block.downsample is not None:
        conv, norm = block.downsample
        side = _Convolution(conv, norm, dtype)  # type: ignore[arg-type]

    def forward(x: Tensor) -> Tensor:
        y = x
        for layer in first:
            y = layer(y)
        return close.add_relu(y, x if side is None else side.plain(x))

    return forward


def _layer(conv: nn.Conv2d, norm: nn.BatchNorm2d, dtype: torch.dtype) -> Layer:
    return _Convolution(conv, norm, dtype).relu


class _Convolution:
    """A convolution with its batch norm folded in."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, dtype: torch.dtype) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        weight = conv.weight.detach() * scale[:, None, None, None]
        self.weight = weight.to(dtype, memory_format=torch.channels_last)
        self.bias = (norm.bias.detach() - norm.running_mean * scale).to(dtype)
        self.stride, self.padding = list(conv.stride), list(map(int, conv.padding))
        half = dtype in (torch.float16, torch.bfloat16)
        self.joined = weight.device.type == "cuda" and half and torch.backends.cudnn.is_available()

    def plain(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, self.bias, self.stride, self.padding)

    def relu(self, x: Tensor) -> Tensor:
        if not self.joined:
            return relu(self.plain(x))
        return torch.cudnn_convolution_relu(x, self.weight, self.bias, self.stride, self.padding, [1, 1], 1)

    def add_relu(self, x: Tensor, add: Tensor) -> Tensor:
        if not self.joined:
            return relu(self.plain(x) + add)
        where = (self.stride, self.padding, [1, 1], 1)
        return torch.cudnn_convolution_add_relu(x, self.weight, add, 1.0, self.bias, *where)
