"""Images on disk as plain arrays: memory-mapped uint8 (n, 3, h, w) and labels, whole or not there at all.

A store is a folder `ROOT/NAME` with `SPLIT-images.npy`, `SPLIT-labels.npy` and `store.json`. It is written under
another name and renamed when complete, so that a reader never meets half of one, and two writers cannot mix.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marginlens.data.atomic import DataError, flush, partial, publish, save
from marginlens.paths import expanded

FORMAT = 1
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
NO_LABEL = -1
_TRIES, _PAUSE = 6, 0.01

T = TypeVar("T")


class Batch(NamedTuple):
    """A piece of a split on its way into a store: images (n, 3, h, w) and labels (n,), NO_LABEL where there is none."""

    images: Images
    labels: Labels


@dataclass(frozen=True)
class Split:
    """One split of a store: arrays that are read from disk as they are touched."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> bool:
        return bool((self.labels != NO_LABEL).all())

    def to(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Images (uint8) and labels as tensors on a device: small data sets live there for a whole run."""
        return torch.from_numpy(np.array(self.images)).to(device), torch.from_numpy(np.array(self.labels)).to(device)


@dataclass(frozen=True)
class Store:
    """A prepared data set."""

    name: str
    splits: dict[str, Split]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    """SHA-256 of the content: images, labels, class names, in order."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = next(iter(self.splits.values())).images.shape[2:]
        return int(height), int(width)

    def split(self, name: str) -> Split:
        """A split by name, or several joined: `train+unlabeled`."""
        parts = self._parts(name)
        if len(parts) == 1:
            return parts[0]
        return Split(np.concatenate([part.images for part in parts]), self.labels(name))

    def labels(self, name: str) -> Labels:
        """The labels of a split, or of several joined, without touching their images."""
        return np.concatenate([part.labels for part in self._parts(name)])

    def _parts(self, name: str) -> list[Split]:
        parts = [self.splits[part] for part in name.split("+") if part in self.splits]
        if len(parts) != len(name.split("+")):
            raise DataError(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        return parts


def root() -> Path:
    """Where stores live: the folder that MARGINLENS_DATA names, or one in the user's cache."""
    if named := os.environ.get("MARGINLENS_DATA"):
        return expanded(named)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as containers have them
        raise DataError("there is no home folder to keep data in; set MARGINLENS_DATA to a folder") from None
    return cache / "marginlens" / "data"


def read(name: str, folder: Path | None = None) -> Store:
    """The store `name`, checked against what its record says of it."""
    path = (folder or root()) / name
    return steady(path, name, lambda facts: _read(path, name, facts))


def steady(path: Path, name: str, opened: Callable[[dict[str, Any]], T]) -> T:
    """What is opened by a record that stays the same meanwhile: it may be prepared anew, and no file is then another's.

    What fails is tried again, since files are gone for a moment when they are replaced.
    """
    for left in reversed(range(_TRIES)):
        try:
            facts = record(path, name)
            found = opened(facts)
            if record(path, name) == facts:
                return found
        except DataError:
            if not left:
                raise
        time.sleep(_PAUSE)
    raise DataError(f"{path} is replaced again and again; wait until nobody prepares {name}")


def _read(path: Path, name: str, facts: dict[str, Any]) -> Store:
    splits = {}
    for split, shapes in facts["splits"].items():
        if not isinstance(shapes, dict):
            raise DataError(f"{name} is a folder of images, which are read as they are needed, not a store of arrays")
        splits[split] = Split(*(_array(path / f"{split}-{kind}.npy", shapes[kind]) for kind in ("images", "labels")))
        if len(_of_no_class(splits[split].labels, len(facts["classes"]))):
            raise DataError(f"{path / split}-labels.npy is damaged: it has labels of no class; prepare {name} again")
    numbers = (tuple(facts["mean"]), tuple(facts["std"]))
    return Store(facts["name"], splits, tuple(facts["classes"]), *numbers, facts["fingerprint"])


def exists(name: str, folder: Path | None = None) -> bool:
    """Whether a finished store of that name is there."""
    return ((folder or root()) / name / "store.json").is_file()


def names(folder: Path | None = None) -> list[str]:
    """Of the finished stores that are there."""
    found = (folder or root()).glob("*/store.json") if (folder or root()).is_dir() else []
    return sorted(p.parent.name for p in found if not p.parent.name.startswith("."))


def write(
    name: str,
    splits: dict[str, Iterable[Batch]],
    classes: Iterable[str],
    folder: Path | None = None,
    version: int = 1,
) -> Store:
    """Writes a store from pieces of each split, and returns it. Nothing of it is seen before all of it is there."""
    where = folder or root()
    with partial(where, name) as folder:
        classes = tuple(classes)
        digest = hashlib.sha256(json.dumps(classes).encode())
        totals = np.zeros((2, 3))
        pixels = 0
        facts = {}
        for split, batches in splits.items():
            facts[split], sums, count = _write_split(folder, split, batches, len(classes), digest)
            totals, pixels = totals + sums, pixels + count
        mean = totals[0] / pixels / 255
        std = np.sqrt(np.maximum(totals[1] / pixels / 255**2 - mean**2, 0))
        facts_of_all = {
            "format": FORMAT,
            "name": name,
            "version": version,
            "splits": facts,
            "classes": list(classes),
            "mean": mean.tolist(),
            "std": std.tolist(),
            "fingerprint": digest.hexdigest(),
        }
        save(folder / "store.json", json.dumps(facts_of_all, indent=1).encode())
        publish(folder, where / name)
    return read(name, where)


def _write_split(
    folder: Path, split: str, batches: Iterable[Batch], classes: int, digest: Any
) -> tuple[dict[str, Any], NDArray[np.float64], int]:
    """Streams a split to its two files. Mean and std are of the training images, unlabelled ones included."""
    sums, pixels, labels = np.zeros((2, 3)), 0, []
    path = folder / f"{split}-images.npy"
    shape: tuple[int, ...] = ()
    with path.open("wb") as file:
        _header(file, (0, 3, 1, 1))
        for batch in batches:
            images, found = _checked(split, *batch, classes)
            if shape and images.shape[1:] != shape[1:]:
                raise DataError(f"{split}: images of {images.shape[2:]} among images of {shape[2:]}")
            shape = (shape[0] + len(images) if shape else len(images), *images.shape[1:])
            digest.update(images.tobytes())
            file.write(images.tobytes())
            labels.append(found)
            if split != "test":
                values = images.astype(np.float64)
                sums += np.stack([values.sum((0, 2, 3)), (values**2).sum((0, 2, 3))])
                pixels += images[:, 0].size
        if not shape:
            raise DataError(f"{split}: there are no images")
        file.seek(0)
        _header(file, shape)
        flush(file)
    joined = np.concatenate(labels)
    digest.update(joined.tobytes())
    with (folder / f"{split}-labels.npy").open("wb") as file:
        np.save(file, joined, allow_pickle=False)
        flush(file)
    return {"images": list(shape), "labels": list(joined.shape)}, sums, pixels


def _header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """NumPy's own header, padded to one length so that it can be written over when the count is known.

    Written as a file rather than through a memory map, because a full disk is then an error and not a SIGBUS.
    """
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n")


def _of_no_class(labels: Labels, classes: int) -> Labels:
    return labels[(labels < NO_LABEL) | (labels >= classes)]


def _checked(split: str, images: Any, labels: Any, count: int) -> Batch:
    """A piece as a store holds it: its bytes are written as they are, so they must mean what is read again."""
    pixels, classes = np.asarray(images), np.asarray(labels)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
        raise DataError(f"{split}: images are {pixels.dtype} {pixels.shape}; they must be uint8 (n, 3, height, width)")
    if classes.shape != (len(pixels),) or classes.dtype.kind not in "iu":
        raise DataError(
            f"{split}: {len(pixels)} images with labels {classes.dtype} {classes.shape}; "
            f"each must have a whole number, {NO_LABEL} where there is none"
        )
    _check_labels(split, classes, count)
    return Batch(pixels, classes.astype(np.int64))


def _check_labels(split: str, labels: Labels, classes: int) -> None:
    bad = _of_no_class(labels, classes)
    if len(bad):
        raise DataError(f"{split}: label {bad[0]} is out of range; there are {classes} classes")


def record(path: Path, name: str) -> dict[str, Any]:
    """What a finished store or folder index says of itself."""
    again = f"remove {path} and prepare {name} again"
    try:
        found = json.loads((path / "store.json").read_text())
    except FileNotFoundError:
        raise DataError(f"{name} is not prepared in {path.parent}; run: marginlens data prepare {name}") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        raise DataError(f"{path / 'store.json'} is damaged; {again}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} is a store of another version; {again}")
    return found


def _array(path: Path, shape: list[int]) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove {path.parent} and prepare again") from None
    if list(array.shape) != shape:
        raise DataError(f"{path} has shape {array.shape}, its record says {tuple(shape)}; prepare again")
    return array
