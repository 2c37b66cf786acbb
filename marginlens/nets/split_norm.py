"""Batch norms that see a batch in parts, as they do on several GPUs: split batch norm, in MoCo's code for CIFAR.

A batch norm over the whole batch is another network than one over its eighths: less noise, and other running
statistics. What two networks make of the same images must not be normalised with the same companions, or the batch's
statistics give the pairs away; MoCo shuffles one side for that. Here one side has neighbours in a part, and the other
every k-th image (`apart`): with k parts of n / k images, two parts share n / k^2 of them, as they would by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from marginlens.checks import whole
from marginlens.nets.fast import each


def divides(parts: int, images: int) -> bool:
    """Whether images can be cut into so many equal parts of two or more; one part is all of them, however few."""
    return parts == 1 or (images % parts == 0 and images >= 2 * parts)


def part_size(images: int, parts: int) -> int:
    """How many images there are in a part."""
    if not divides(parts, images):
        raise ValueError(f"there are {images} images; bn_splits={parts} must cut them into equal parts of two or more")
    return images // parts


def in_parts(net: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """What `net` makes of x, its batch norms seeing `size` neighbours at a time."""
    return net(x) if len(x) == size else torch.cat(each(net, x.split(size)))


def apart(x: Tensor, parts: int) -> Tensor:
    """Another order of x, in which a part has every so-manyth image: for the network that is compared with."""
    if parts == 1:
        return x
    moved: Tensor = x.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 1)
    return moved.contiguous(memory_format=torch.channels_last) if _last(x) else moved


def together(y: Tensor, parts: int) -> Tensor:
    """The order before `apart`."""
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
    """Return head(backbone(x)) of each view, whose parts are neighbours or, where it is `moved`, come from all over."""
    size = part_size(len(views[0]), parts)
    moved = moved or [False] * len(views)
    seen = [apart(x, parts) if away else x for x, away in zip(views, moved, strict=True)]
    found = each(lambda x: head(in_parts(backbone, x, size)), seen)
    return [together(y, parts) if away else y for y, away in zip(found, moved, strict=True)]


def count_once(backbone: nn.Module, parts: int) -> None:
    """Lets the parts of a batch move running statistics as far, together, as the whole batch would."""
    whole("bn_splits", parts)
    for norm in backbone.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is not None and (parts > 1 or hasattr(norm, "_divided")):
            divided, before = getattr(norm, "_divided", (0.0, 0.0))
            momentum = float(before if norm.momentum == divided else norm.momentum)  # not twice, by two methods
            norm.momentum = momentum / parts
            vars(norm)["_divided"] = norm.momentum, momentum


def _last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
