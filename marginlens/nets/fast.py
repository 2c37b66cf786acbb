"""Run networks with fewer passes over memory: fused batch norm, addition and ReLU, and our own first convolution.

    with fast():
        loss = method.loss(views)

Inside, `ResNet` and the heads use the batch norm, stem, pool and linear kernels of `kernels/`. These apply in training,
on devices that Triton supports. Outside, nothing changes. The slow twin is the module's own `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu

if TYPE_CHECKING:
    from marginlens.nets.resnet import BasicBlock, Bottleneck, ResNet


@dataclass(frozen=True)
class Side:
    """A stream for the gradients of weights, which nothing waits for before the end of the step."""

    stream: torch.cuda.Stream
    held: list[Tensor] = field(default_factory=list)
    """Tensors that the stream reads, kept alive so that their memory is not reused."""

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """Run the body on the side stream, after all earlier work. `read` are the tensors that the body reads."""
        self.stream.wait_stream(torch.cuda.current_stream())
        self.held.extend(read)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait for the side stream."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@dataclass(frozen=True)
class _Mode:
    side: Side | None = None
    groups: int = 1


_mode: _Mode | None = None


def on() -> bool:
    """True inside `fast`."""
    return _mode is not None


@contextmanager
def fast(side: Side | None = None) -> Iterator[None]:
    """Use the fast form of networks inside. With a `side`, call its `join` after the gradients."""
    with _as(_Mode(side)):
        yield


def each(net: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
    """Return `net` of each batch. The fast form passes all batches at once, and its batch norms keep them apart."""
    if _mode is None or len(batches) == 1:
        return [net(x) for x in batches]
    with _as(replace(_mode, groups=len(batches))):
        return list(net(torch.cat(list(batches))).chunk(len(batches)))


@contextmanager
def _as(mode: _Mode) -> Iterator[None]:
    global _mode  # noqa: PLW0603
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def resnet(net: ResNet, x: Tensor) -> Tensor:
    """Return `ResNet.forward`, its slow twin, in the fast form.

    A block's input goes two ways; both gradients are added where they are used.
    """
    pooled = not isinstance(net.maxpool, nn.Identity)
    first, second = _norm(_stem(net.conv1, x), net.bn1, both=not pooled)
    if pooled:
        first = second = net.maxpool(first)
    for number, block in enumerate(net.blocks, start=1):
        first, second = _block(block, first, second, both=number < len(net.blocks))
    return _pool(first)


def head(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Return `nn.Sequential.forward`, its slow twin, of a head in the fast form.

    A head is linear, batch norm, ReLU, linear, and perhaps a batch norm.
    """
    linear, norm, _, last, *end = layers
    x = _linear(last, _norm(_linear(linear, x), norm)[0])
    return _norm(x, end[0], act=False)[0] if end else x


def _block(block: BasicBlock | Bottleneck, x: Tensor, skip: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """Run a residual block; `x` and `skip` are the same image."""
    if block.downsample is not None:
        conv, norm = block.downsample
        skip = _norm(_conv(conv, skip), norm, act=False)[0]  # type: ignore[arg-type]
    *inner, (conv, norm) = block.pairs
    for some, after in inner:
        x = _norm(_conv(some, x), after)[0]
    return _norm(_conv(conv, x), norm, skip, both=both)


def _norm(
    x: Tensor, norm: nn.Module, add: Tensor | None = None, act: bool = True, both: bool = False
) -> tuple[Tensor, Tensor]:
    """Run batch norm, addition and ReLU, and return the result twice. With `both`, each copy gets its own gradient."""
    from marginlens.kernels.batchnorm import norm_act, supported

    assert _mode is not None
    groups = _mode.groups
    if supported(x, norm, add, groups):
        found = norm_act(x, norm, add, act, both, groups)
        return found if isinstance(found, tuple) else (found, found)
    y = torch.cat([norm(part) for part in x.chunk(groups)]) if groups > 1 else norm(x)
    y = y if add is None else y + add
    y = relu(y) if act else y
    return y, y


def _stem(conv: nn.Conv2d, x: Tensor) -> Tensor:
    from marginlens.kernels.stem import stem_conv, stem_supported

    if conv.stride == (1, 1) and conv.padding == (1, 1) and stem_supported(x, conv.weight):
        return stem_conv(x, conv.weight)
    out: Tensor = conv(x)
    return out


def _pool(x: Tensor) -> Tensor:
    from marginlens.kernels.pool import pool, pool_supported

    return pool(x) if pool_supported(x) else x.mean((2, 3))


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    from marginlens.kernels.linear import linear, linear_supported

    assert _mode is not None
    assert isinstance(layer, nn.Linear)
    if linear_supported(x, layer.weight, layer.bias):
        return linear(x, layer.weight, layer.bias, _mode.side)
    out: Tensor = layer(x)
    return out


def _conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    assert _mode is not None
    if _mode.side is None or not torch.is_grad_enabled() or not conv.weight.requires_grad:
        out: Tensor = conv(x)
        return out
    found: Tensor = _Convolution.apply(x, conv.weight, conv.stride, conv.padding, _mode.side)  # type: ignore[no-untyped-call]
    return found


class _Convolution(torch.autograd.Function):
    """torch.conv2d that computes its weight's gradient on the side stream, beside the earlier layers' backward pass.

    That pass is often limited by memory, in batch norms, and would leave the tensor cores idle. Slow twin:
    torch.conv2d.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Any, padding: Any, side: Side) -> Tensor:
        return torch.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.stride, ctx.padding, ctx.side = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def gradient(*mask: bool) -> tuple[Tensor, ...]:
            where = (ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1)
            found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(grad, x, weight, None, *where, mask)
            return found

        dx = gradient(True, False, False)[0] if ctx.needs_input_grad[0] else None
        with ctx.side.beside(grad, x):
            dw = gradient(False, True, False)[1]
        return dx, dw, None, None, None
