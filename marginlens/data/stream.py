"""Views of a folder's images on demand: worker processes decode and crop, the device does the rest in batches.

Parameters are those of every other path: a function of (seed, epoch, sample, view) alone, for any number of workers.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import resource_tracker
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from marginlens.autodiff import full_precision
from marginlens.data.folder import FolderIndex, crop, crop_file, read_file
from marginlens.data.views import View, colour, parameters
from marginlens.data.workers import end_with_parent, without_main
from marginlens.errors import DataError

_begun: WeakSet[Any] = WeakSet()
"""Iterators of loaders whose workers are still running."""
_waiting: ContextVar[dict[Any, Any] | None] = ContextVar("_waiting", default=None)
"""The last loader whose pass finished, by its arguments. None unless workers are to be kept."""


class Views(NamedTuple):
    """A batch: sample indices, and each view of them (n, 3, size, size)."""

    indices: Tensor
    views: list[Tensor]


class _Middles(Dataset[Tensor]):
    """The central square of each chosen sample, uint8."""

    def __init__(self, index: FolderIndex, split: str, chosen: Sequence[int], size: int, resize: int) -> None:
        self.index, self.part, self.chosen, self.size, self.resize = index, index.splits[split], chosen, size, resize

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> Tensor:
        file = self.chosen[i]
        height, width = self.part.sizes[file].tolist()
        side = max(1, round(min(height, width) * self.size / self.resize))
        box = ((height - side) // 2, (width - side) // 2, side, side)
        return torch.from_numpy(
            crop_file(self.index.path / self.part.files[file], box, self.size, self.part.known(file))
        )


class _Crops(Dataset[tuple[int, list[Tensor]]]):
    """The crop of each view of a sample, uint8, mirrored if drawn so."""

    def __init__(self, index: FolderIndex, split: str, views: Sequence[View], seed: int, first: int) -> None:
        self.index, self.split, self.views, self.seed, self.first = index, split, views, seed, first

    def __len__(self) -> int:
        return len(self.index.splits[self.split])

    def __getitem__(self, asked: tuple[int, int]) -> tuple[int, list[Tensor]]:
        (epoch, i), part = asked, self.index.splits[self.split]
        height, width = part.sizes[i].tolist()
        file, known, crops = self.index.path / part.files[i], part.known(i), []
        content = read_file(file, known)  # once for all views
        for number, view in enumerate(self.views, self.first):
            drawn = parameters(torch.tensor([i]), height, width, view, self.seed, epoch, number)
            cut = torch.from_numpy(crop(file, content, drawn.boxes[0].tolist(), view.size, known))
            crops.append(cut.flip(2) if bool(drawn.flip[0]) else cut)
        return i, crops


class _Pass(Sampler[tuple[int, int]]):
    """Epoch and number of each sample of a pass. The next pass replaces them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.asked)

    def __len__(self) -> int:
        return len(self.asked)


@contextmanager
def kept_workers() -> Iterator[None]:
    """Keep the workers of a pass for the next one, because starting them takes seconds, as long as many an epoch."""
    loaders: dict[Any, Any] = {}
    before = _waiting.set(loaders)
    try:
        yield
    finally:
        _waiting.reset(before)
        _dismiss(loaders)


def _dismiss(loaders: dict[Any, Any]) -> None:
    while loaders:
        loaders.popitem()[1]._iterator._shutdown_workers()


def stream(
    index: FolderIndex,
    split: str,
    views: Sequence[View],
    *,
    seed: int,
    epoch: int,
    batch: int,
    order: Sequence[int] | None = None,
    workers: int = 2,
    device: torch.device | str = "cpu",
    first: int = 0,
) -> Iterator[Views]:
    """Yield batches of views on a device, in one pass over a split in `order` (as stored, if None).

    A last partial batch is included. Views are numbered from `first`.
    """
    if split not in index.splits:
        raise DataError(f"{index.name} has no split {split!r}; it has {', '.join(index.splits)}")
    if any(view.crop != "resized" for view in views):
        raise DataError("a folder's images have many sizes: only the resized crop can be streamed, not the padded one")
    key = index.path, index.fingerprint, split, tuple(views), seed, batch, workers, torch.device(device).type, first
    crops = _Crops(index, split, tuple(views), seed, first)
    waiting = _waiting.get()
    loader: Any = waiting.pop(key, None) if waiting else None
    if loader is None:
        loader = DataLoader(
            crops,
            batch_size=batch,
            sampler=_Pass(),
            num_workers=workers,
            pin_memory=torch.device(device).type == "cuda",
            multiprocessing_context="spawn" if workers else None,
            persistent_workers=workers > 0 and waiting is not None,
            worker_init_fn=end_with_parent,
        )
    loader.sampler.asked = [(epoch, i) for i in (range(len(crops)) if order is None else order)]
    for indices, cut in _started(loader, key):
        yield Views(
            indices,
            [
                _colour(x.to(device), indices, v, seed, epoch, i)
                for i, (x, v) in enumerate(zip(cut, views, strict=True), first)
            ],
        )


def middles(
    index: FolderIndex,
    split: str,
    chosen: Sequence[int],
    *,
    size: int,
    resize: int,
    batch: int,
    workers: int = 2,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield test images, uint8 (n, 3, size, size): shorter side to `resize`, then the central size x size."""
    images = _Middles(index, split, chosen, size, resize)
    context = "spawn" if workers else None
    asked: dict[str, Any] = {"multiprocessing_context": context, "worker_init_fn": end_with_parent}
    loader = DataLoader(images, batch_size=batch, num_workers=workers, **asked)
    for part in _started(loader):
        yield part.to(device)


def _started(loader: DataLoader[Any], key: Any = None) -> Iterator[Any]:
    """Yield the loader's batches. An error about a bad file in a worker stays one line.

    Workers ignore Ctrl-C and SIGTERM, which terminals and schedulers send to every process. The main process decides
    what these mean; a worker that died of them would interrupt it in the middle of a step. So workers must be told to
    end, because multiprocessing would send SIGTERM and wait forever.
    """
    if loader.num_workers:
        resource_tracker.ensure_running()  # now, because its first start unblocks the two signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with without_main():
            batches: Any = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if loader.num_workers:
        _begun.add(batches)
    kept = False
    try:
        yield from batches
        if loader.persistent_workers and (waiting := _waiting.get()) is not None:
            _dismiss(waiting)
            kept, waiting[key] = True, loader
    except DataError as error:
        raise DataError(str(error).strip().splitlines()[-1].split("DataError: ")[-1]) from None
    finally:  # at once, because garbage collection may happen in a thread that it waits for
        if loader.num_workers and not kept:
            batches._shutdown_workers()


@atexit.register
def _end() -> None:
    """End workers before multiprocessing's own exit handler, which was registered earlier."""
    for batches in list(_begun):
        batches._shutdown_workers()


def _colour(crops: Tensor, indices: Tensor, view: View, seed: int, epoch: int, number: int) -> Tensor:
    with torch.no_grad(), full_precision(crops):
        drawn = parameters(indices.to(crops.device), view.size, view.size, view, seed, epoch, number)
        return colour(crops.float().mul_(1.0 / 255.0), drawn, view)
