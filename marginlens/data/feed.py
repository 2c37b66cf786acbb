"""Sources of images: arrays on the device, or files that are decoded as needed.

Both feeds have the same methods, so the rest of the code treats them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from marginlens.data import pixels
from marginlens.data.folder import FolderIndex
from marginlens.data.prepare import verified
from marginlens.data.sources import SOURCES
from marginlens.data.store import NO_LABEL, Store
from marginlens.data.stream import kept_workers, middles, stream
from marginlens.data.views import Triple, View, make_view
from marginlens.kernels import no_triton


class Feed(Protocol):
    """A data set as training and evaluation use it."""

    name: str
    fingerprint: str
    classes: tuple[str, ...]
    mean: Triple
    std: Triple
    splits: tuple[str, ...]
    size: tuple[int, int] | None
    """Height and width if all images have the same size, else None."""
    device: torch.device

    def labels(self, split: str) -> Tensor:
        """Return labels, int64 (n,) on the CPU; -1 means no label."""

    def views(
        self, split: str, order: Tensor, views: Sequence[View], seed: int, epoch: int, batch: int, first: int = 0
    ) -> Iterator[list[Tensor]]:
        """Yield views of the samples in `order`, batch by batch. `first` is the number of the first view."""

    def kept(self) -> AbstractContextManager[None]:
        """Keep the decoding workers until the end of the context, rather than for one pass."""

    def plain(self, split: str, chosen: Tensor, size: int, resize: int, batch: int) -> Iterator[Tensor]:
        """Yield test images of the chosen samples: resized, central crop; uint8 (n, 3, size, size)."""


class Arrays:
    """A store whose images are copied to the device once."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self.name, self.fingerprint, self.classes = store.name, store.fingerprint, store.classes
        self.mean, self.std = recipe_moments(store)
        self.splits = tuple(store.splits)
        self.size: tuple[int, int] | None = store.size
        self.fused = True  # views by one kernel on a GPU; otherwise by the reference
        self._held: dict[str, Tensor] = {}

    def labels(self, split: str) -> Tensor:
        return torch.from_numpy(self.store.labels(split))

    def views(
        self, split: str, order: Tensor, views: Sequence[View], seed: int, epoch: int, batch: int, first: int = 0
    ) -> Iterator[list[Tensor]]:
        images = self.images(split)
        order = order.to(self.device)
        one_kernel = self.fused and images.device.type == "cuda" and not unfused(images, views)
        for chosen in order.split(batch):
            if one_kernel:
                from marginlens.data import fused

                yield fused.make_views(images, chosen, tuple(views), seed, epoch, first, torch.float32)
                continue
            some = images[chosen]
            yield [make_view(some, chosen, view, seed, epoch, first + i) for i, view in enumerate(views)]

    def plain(self, split: str, chosen: Tensor, size: int, resize: int, batch: int) -> Iterator[Tensor]:
        images = self.images(split)
        for some in chosen.to(self.device).split(batch):
            yield middle(images[some], size, resize)

    def kept(self) -> AbstractContextManager[None]:
        return nullcontext()

    def images(self, split: str) -> Tensor:
        """Return all images of a split on the device, uint8 (n, 3, height, width)."""
        if split not in self._held:
            self._held[split] = self.store.split(split).to(self.device)[0]
        return self._held[split]


class Files:
    """A folder's index, with worker processes that decode its images."""

    def __init__(self, index: FolderIndex, device: torch.device, workers: int) -> None:
        self.index, self.device, self.workers = index, device, workers
        self.name, self.fingerprint, self.classes = index.name, index.fingerprint, index.classes
        self.mean, self.std = recipe_moments(index)
        self.splits = tuple(index.splits)
        self.size: tuple[int, int] | None = None

    def labels(self, split: str) -> Tensor:
        if split not in self.index.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        return torch.from_numpy(self.index.splits[split].labels)

    def views(
        self, split: str, order: Tensor, views: Sequence[View], seed: int, epoch: int, batch: int, first: int = 0
    ) -> Iterator[list[Tensor]]:
        asked = {"order": order.tolist(), "workers": self.workers, "device": self.device, "first": first}
        for found in stream(self.index, split, views, seed=seed, epoch=epoch, batch=batch, **asked):  # type: ignore[arg-type]
            yield found.views

    def kept(self) -> AbstractContextManager[None]:
        return kept_workers()

    def plain(self, split: str, chosen: Tensor, size: int, resize: int, batch: int) -> Iterator[Tensor]:
        few = len(chosen) <= batch  # no workers, because starting one takes longer
        asked = {"size": size, "resize": resize or size, "batch": batch, "workers": 0 if few else self.workers}
        yield from middles(self.index, split, chosen.tolist(), device=self.device, **asked)


def open_feed(name: str, device: torch.device, workers: int = 2) -> Feed:
    """Return the prepared data set of this name, after verifying its content."""
    found = verified(name)
    return Arrays(found, device) if isinstance(found, Store) else Files(found, device, workers)


def recipe_moments(data: Store | FolderIndex) -> tuple[Triple, Triple]:
    """Return the mean and std for normalising images: the recipe's if it has them, else the data's own."""
    source = SOURCES.get(data.name)
    mean, std = (source.mean, source.std) if source and source.mean and source.std else (data.mean, data.std)
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def middle(images: Tensor, size: int, resize: int) -> Tensor:
    """Return the central size x size of uint8 images, after resizing their shorter side to `resize` (0: to size)."""
    height, width = images.shape[2:]
    resize = resize or size
    if (height, width) == (size, size) and resize == size:
        return images
    side = min(height, width)
    box = torch.tensor([(height - side) // 2, (width - side) // 2, side, side], device=images.device)
    flat = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    squares = pixels.crop(images.float(), box.expand(len(images), 4), resize, flat)
    start = (resize - size) // 2
    cut = squares[:, :, start : start + size, start : start + size]
    return cut.round().clamp(0, 255).to(torch.uint8)


def unfused(images: Tensor, views: Sequence[View]) -> str:
    """Return why one kernel cannot make these views, or ""."""
    if why := no_triton(images.device):
        return why
    from marginlens.data import fused

    return fused.supported(images, tuple(views)) or ""


def all_labelled(labels: Tensor) -> bool:
    """True if every sample has a label."""
    return bool((labels != NO_LABEL).all())
