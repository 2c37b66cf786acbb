"""Images on disk as plain arrays: memory-mapped uint8 (n, 3, h, w) and labels, whole or not there at all.

A store is a folder `ROOT/NAME` with `SPLIT-images.npy`, `SPLIT-labels.npy` and `store.json`. It is written under
another name and renamed when complete. So a reader never sees half a store, and two writers cannot mix.
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

from marginlens.data.disk import FORMAT, Facts, array, check_ours, moving, partial, publish, record, save_record
from marginlens.errors import DataError
from marginlens.files import expanded, flush, reason

DOWNLOADS = "downloads"
"""Folder of archives beside the stores. No store may have this name."""
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
NO_LABEL = -1
_TRIES, _PAUSE = 6, 0.01
_PATIENCE = 2.0
"""Seconds that a reader waits for a writer between its two renames, which are an instant apart."""

T = TypeVar("T")


class Batch(NamedTuple):
    """A piece of a split to store: images (n, 3, h, w) and labels (n,), with NO_LABEL for missing ones."""

    images: Images
    labels: Labels


@dataclass(frozen=True)
class Split:
    """One split of a store: arrays that are read from disk as they are used."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labelled(self) -> bool:
        return bool((self.labels != NO_LABEL).all())

    def to(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return images (uint8) and labels as tensors on a device. Small data sets stay there for a whole run."""
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
        """Return a split by name, or several joined: `train+unlabeled`."""
        parts = self._parts(name)
        if len(parts) == 1:
            return parts[0]
        return Split(np.concatenate([part.images for part in parts]), self.labels(name))

    def labels(self, name: str) -> Labels:
        """Return the labels of a split, or of several joined, without reading their images."""
        return np.concatenate([part.labels for part in self._parts(name)])

    def _parts(self, name: str) -> list[Split]:
        parts = [self.splits[part] for part in name.split("+") if part in self.splits]
        if len(parts) != len(name.split("+")):
            raise DataError(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        return parts


def root() -> Path:
    """Return the folder of stores: MARGINLENS_DATA, or one in the user's cache."""
    if named := os.environ.get("MARGINLENS_DATA"):
        return expanded(named)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # raised for users without a home, as in containers
        raise DataError("there is no home folder to keep data in; set MARGINLENS_DATA to a folder") from None
    return cache / "marginlens" / "data"


def read(name: str, folder: Path | None = None) -> Store:
    """Return the store `name`, checked against its record. `verify` also checks the content of its arrays."""
    path = (folder or root()) / name
    return steady(path, name, lambda facts: _read(path, name, facts))


def steady(path: Path, name: str, opened: Callable[[Facts], T]) -> T:
    """Return `opened(facts)` for a record that did not change meanwhile, because another process may replace the store.

    Failures are retried, because files are missing for a moment during a replacement.
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


def _read(path: Path, name: str, facts: Facts) -> Store:
    if facts.kind:
        raise DataError(f"{name} is a folder of images, which are read as they are needed, not a store of arrays")
    splits = {}
    for split, shapes in facts.splits.items():
        images, labels = _shapes(path, shapes)
        splits[split] = Split(
            array(path / f"{split}-images.npy", images, "|u1", mapped=True),
            array(path / f"{split}-labels.npy", labels, "<i8", mapped=True),
        )
        if len(_of_no_class(splits[split].labels, len(facts.classes))):
            raise DataError(f"{path / split}-labels.npy is damaged: it has labels of no class; prepare {name} again")
    numbers = (tuple(facts.mean), tuple(facts.std))
    return Store(facts.name, splits, tuple(facts.classes), *numbers, facts.fingerprint)


def _shapes(path: Path, shapes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of images and labels in a record."""
    try:
        (count, channels, height, width), (labels,) = shapes["images"], shapes["labels"]
        whole = [int(x) for x in (count, channels, height, width, labels)]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DataError(
            f"{path / 'store.json'} is damaged: it states no shapes; remove {path} and prepare again"
        ) from None
    if channels != 3 or count != labels or min(whole) < 1:
        raise DataError(f"{path / 'store.json'} is damaged: its shapes are {shapes}; remove {path} and prepare again")
    return tuple(whole[:4]), (whole[4],)


def verify(store: Store) -> Store:
    """Hash all images and labels (0.1 s for CIFAR), and return the store. Raise if its content has changed."""
    digest = hashlib.sha256(json.dumps(store.classes).encode())
    for split in store.splits.values():
        digest.update(np.ascontiguousarray(split.images).data)
        digest.update(np.ascontiguousarray(split.labels).data)
    if digest.hexdigest() != store.fingerprint:
        raise DataError(
            f"the data set {store.name} is damaged: its images or labels have changed since it was prepared; "
            f"prepare it again"
        )
    return store


def exists(name: str, folder: Path | None = None) -> bool:
    """True if a finished store of this name exists. Waits for a writer that is replacing it."""
    path, end = (folder or root()) / name, time.monotonic() + _PATIENCE
    while not os.path.isfile(path / "store.json"):
        if not moving(path) or time.monotonic() > end:
            return os.path.isfile(path / "store.json")
        time.sleep(_PAUSE)
    return True


def names(folder: Path | None = None) -> list[str]:
    """Return the names of the finished stores."""
    where = folder or root()
    try:
        found = [name for name in os.listdir(where) if not name.startswith(".")]
    except OSError:
        return []
    return sorted(name for name in found if os.path.isfile(where / name / "store.json"))


def own(path: Path, kind: str = "") -> set[str]:
    """Return the names of our files in a store. Raise if the folder is not a store of this kind."""
    if not os.path.lexists(path / "store.json"):
        raise DataError(
            f"{path} is not a data set that marginlens wrote (it has no store.json), and is never replaced; "
            f"move it away, give another name with --as, or set MARGINLENS_DATA to another folder"
        )
    facts = record(path, path.name)
    if facts.kind != kind:
        what = "an index of a folder of images" if facts.kind else "a data set of arrays"
        raise DataError(f"{path} is {what}, and is not replaced by another kind; give another name, or remove it")
    return facts.files


def check_target(name: str, source: Path | None, folder: Path | None = None, kind: str = "") -> None:
    """Raise, before reading anything, if the store would replace files that are not ours or overlap with its source."""
    target = (folder or root()) / name
    if name == DOWNLOADS:
        raise DataError(f"{name!r} is where archives are downloaded to; give another name with --as NAME")
    if source is not None:
        at, real = (Path(os.path.realpath(path)) for path in (source, target))
        if at == real or at in real.parents or real in at.parents:
            raise DataError(
                f"{source} and the data set's own folder, {target}, overlap; "
                f"give another name with --as, --from the files alone, or set MARGINLENS_DATA to a folder outside"
            )
    try:
        check_ours(target, lambda path: own(path, kind))
    except OSError as error:
        raise DataError(f"{target} cannot be read ({reason(error)})") from None


def write(
    name: str,
    splits: dict[str, Iterable[Batch]],
    classes: Iterable[str],
    folder: Path | None = None,
    version: int = 1,
) -> Store:
    """Write a store from pieces of each split, and return it. It becomes visible only when complete."""
    where = folder or root()
    check_target(name, None, where)
    with partial(where, name, own) as folder:
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
        save_record(folder, facts_of_all)
        publish(folder, where / name, own)
    return read(name, where)


def _write_split(
    folder: Path, split: str, batches: Iterable[Batch], classes: int, digest: Any
) -> tuple[dict[str, Any], NDArray[np.float64], int]:
    """Stream a split to its two files.

    Sum pixels of all splits but test, unlabelled ones included, for mean and std.
    """
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
    """Write NumPy's own header, padded to a fixed length, so that it can be overwritten when the count is known.

    The file is not memory-mapped, because a full disk would then be a SIGBUS rather than an error.
    """
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n")


def _of_no_class(labels: Labels, classes: int) -> Labels:
    return labels[(labels < NO_LABEL) | (labels >= classes)]


def _checked(split: str, images: Any, labels: Any, count: int) -> Batch:
    """Return a piece with the dtypes of a store. Its bytes are written unchanged, so they must mean the same on
    reading.
    """
    pixels, classes = np.asarray(images), np.asarray(labels)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
        raise DataError(f"{split}: images are {pixels.dtype} {pixels.shape}; they must be uint8 (n, 3, height, width)")
    if classes.shape != (len(pixels),) or classes.dtype.kind not in "iu":
        raise DataError(
            f"{split}: {len(pixels)} images with labels {classes.dtype} {classes.shape}; "
            f"each image must have a whole number, or {NO_LABEL} for no label"
        )
    _check_labels(split, classes, count)
    return Batch(pixels, classes.astype(np.int64))


def _check_labels(split: str, labels: Labels, classes: int) -> None:
    bad = _of_no_class(labels, classes)
    if len(bad):
        raise DataError(f"{split}: label {bad[0]} is out of range; there are {classes} classes")
