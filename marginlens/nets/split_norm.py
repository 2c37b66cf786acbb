"""Batch norms that see a batch in parts, as on several GPUs: the split batch norm of MoCo's code for CIFAR.

A batch norm over eighths of a batch is another network than one over the whole batch: more noise, other running
statistics. Two networks must not normalise the same images in the same company, because the batch's statistics would
give the pairs away. MoCo therefore shuffles one side. Here one side's parts are neighbours, and the other's parts take
every k-th image (`apart`). With k parts of n / k images, two parts then share n / k^2 images, as by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from marginlens.checks import whole
from marginlens.nets.count import tensor_of
from marginlens.nets.fast import each


def divides(parts: int, images: int) -> bool:
    """True if images can be cut into `parts` equal parts of at least two; one part may have any size."""
    return parts == 1 or (images % parts == 0 and images >= 2 * parts)


def part_size(images: int, parts: int) -> int:
    """Return the number of images in a part."""
    if not divides(parts, images):
        raise ValueError(f"there are {images} images; bn_splits={parts} must cut them into equal parts of two or more")
    return images // parts


def in_parts(net: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """Return `net` of x, with batch norms that see `size` neighbours at a time."""
    return net(x) if len(x) == size else torch.cat(each(net, x.split(size)))


def apart(x: Tensor, parts: int) -> Tensor:
    """Reorder x so that each part takes every k-th image, for the network on the other side."""
    if parts == 1:
        return x
    moved: Tensor = x.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 1)
    return moved.contiguous(memory_format=torch.channels_last) if _last(x) else moved


def together(y: Tensor, parts: int) -> Tensor:
    """Undo `apart`."""
    if parts == 1:
        return y
    moved: Tensor = y.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1)
    return moved


def embed(
    backbone: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    views: Sequence[Tensor],
    parts: int,
    moved: Sequence[bool] = (),
) -> list[Tensor]:
    """Return head(backbone(x)) of each view.

    A view's parts are neighbours, or spread over the batch if it is `moved`.
    """
    size = part_size(len(views[0]), parts)
    moved = moved or [False] * len(views)
    seen = [apart(x, parts) if away else x for x, away in zip(views, moved, strict=True)]
    found = each(lambda x: head(in_parts(lambda part: tensor_of(backbone(part)), x, size)), seen)
    return [together(y, parts) if away else y for y, away in zip(found, moved, strict=True)]


def count_once(backbone: nn.Module, parts: int) -> None:
    """Divide the norms' momentum by `parts`, so that a batch moves running statistics as far as without parts."""
    whole("bn_splits", parts)
    for norm in backbone.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is not None and (parts > 1 or hasattr(norm, "_divided")):
            divided, before = getattr(norm, "_divided", (0.0, 0.0))
            momentum = float(before if norm.momentum == divided else norm.momentum)  # else two methods divide it twice
            norm.momentum = momentum / parts
            vars(norm)["_divided"] = norm.momentum, momentum


def _last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
