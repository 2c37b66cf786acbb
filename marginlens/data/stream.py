"""Views of a folder's images as they are needed: cropped while they are decoded, in worker processes, then coloured in
batches on the device.

The same parameters as everywhere: a function of (seed, epoch, sample, view) alone, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from marginlens.autodiff import full_precision
from marginlens.data.atomic import DataError
from marginlens.data.folder import FolderIndex, crop_file
from marginlens.data.views import View, colour, parameters


class Views(NamedTuple):
    """A batch: which samples, and each view of them (n, 3, size, size)."""

    indices: Tensor
    views: list[Tensor]


class _Crops(Dataset[tuple[int, list[Tensor]]]):
    """The crop of each view of a sample, uint8, mirrored where it was drawn so."""

    def __init__(self, index: FolderIndex, split: str, views: Sequence[View], seed: int, epoch: int) -> None:
        self.index, self.split, self.views, self.seed, self.epoch = index, split, views, seed, epoch

    def __len__(self) -> int:
        return len(self.index.splits[self.split])

    def __getitem__(self, i: int) -> tuple[int, list[Tensor]]:
        part = self.index.splits[self.split]
        height, width = (int(side) for side in part.sizes[i])
        crops = []
        for number, view in enumerate(self.views):
            drawn = parameters(torch.tensor([i]), height, width, view, self.seed, self.epoch, number)
            crop = torch.from_numpy(crop_file(self.index.path / part.files[i], drawn.boxes[0].tolist(), view.size))
            crops.append(crop.flip(2) if bool(drawn.flip[0]) else crop)
        return i, crops


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
) -> Iterator[Views]:
    """One pass over a split in `order` (as stored, if none is given): batches of views on a device.

    A last batch that is not full is given too.
    """
    if split not in index.splits:
        raise DataError(f"{index.name} has no split {split!r}; it has {', '.join(index.splits)}")
    if any(view.crop != "resized" for view in views):
        raise DataError("a folder's images have many sizes: only the resized crop can be streamed, not the padded one")
    crops = _Crops(index, split, tuple(views), seed, epoch)
    loader = DataLoader(
        crops,
        batch_size=batch,
        sampler=range(len(crops)) if order is None else order,
        num_workers=workers,
        pin_memory=torch.device(device).type == "cuda",
        multiprocessing_context="spawn" if workers else None,
    )
    for indices, cut in loader:
        yield Views(
            indices,
            [
                _colour(x.to(device), indices, v, seed, epoch, i)
                for i, (x, v) in enumerate(zip(cut, views, strict=True))
            ],
        )


def _colour(crops: Tensor, indices: Tensor, view: View, seed: int, epoch: int, number: int) -> Tensor:
    with torch.no_grad(), full_precision(crops):
        drawn = parameters(indices.to(crops.device), view.size, view.size, view, seed, epoch, number)
        return colour(crops.float().mul_(1.0 / 255.0), drawn, view)
