"""Any folder of images as a data set: an index on disk, pixels decoded as they are needed.

Two trees are understood: `train/<class>/*` with `val/<class>/*` or `test/<class>/*` beside it (ImageNet's layout), and
any other folder, flat or nested, whose images have no labels and no split, which is enough to pre-train and to embed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial as bind
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from marginlens.data import store
from marginlens.data.disk import FORMAT, Facts, array, partial, publish, save_record
from marginlens.data.images import (
    MOST_BYTES,
    SUFFIXES,
    as_rgb,
    decode,
    open_image,
    pixels,
    shrunk,
    undecodable,
    unwarned,
)
from marginlens.data.store import NO_LABEL, Images, Labels
from marginlens.data.workers import end_with_parent, without_main
from marginlens.errors import DataError
from marginlens.files import MIB, expanded, flush, read, reason, save

TEST_NAMES = ("val", "test")
KIND = "folder"
_CHUNK = 64
"""Images that a process decodes at a time. For no more than these none is started: that takes seconds."""


@dataclass(frozen=True)
class FileSplit:
    """Files of one split, their labels, heights and widths once upright, and lengths in bytes."""

    files: tuple[str, ...]
    labels: Labels
    sizes: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    """None in an index of an older version."""
    digests: NDArray[np.uint8] | None = None
    """SHA-256 of each file, (n, 32); None in an index of an older version."""

    def __len__(self) -> int:
        return len(self.files)

    def known(self, i: int) -> tuple[int | bytes, ...]:
        """Return what a file must still be: its image's height and width, its length, and its SHA-256."""
        height, width = self.sizes[i].tolist()
        if self.lengths is None:
            return height, width
        known = height, width, int(self.lengths[i])
        return known if self.digests is None else (*known, self.digests[i].tobytes())


@dataclass(frozen=True)
class FolderIndex:
    """A prepared folder: what is in it, not its pixels."""

    name: str
    path: Path
    splits: dict[str, FileSplit]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    given: tuple[Any, Any] = (None, None)
    """Mean and std as the user gave them, which are then a part of the fingerprint."""


class _Seen(NamedTuple):
    """What was learned by decoding one file; `error` says why it could not be."""

    file: str
    size: tuple[int, int] = (0, 0)
    length: int = 0
    sums: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    digest: str = ""
    error: str = ""


def prepare_folder(path: Path, name: str, *, root: Path | None = None, **how: Any) -> tuple[FolderIndex, list[str]]:
    """Write the index `name` of the images below a folder; return it, and what was skipped.

    `how` is what `index_folder` takes: skip_bad, mean, std, workers.
    """
    store.check_target(name, expanded(path), root, KIND)
    index, bad = index_folder(path, name, **how)
    _write(index, root or store.root())
    return index, bad


def index_folder(
    path: Path,
    name: str,
    *,
    skip_bad: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    workers: int = 2,
) -> tuple[FolderIndex, list[str]]:
    """Decode every image below `path` once; return the index, and what was skipped.

    Images that cannot be decoded are listed, and refused unless `skip_bad`. `workers`: processes that decode, 0: this.
    """
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be a number of processes, or 0 for none but this one")
    for what, given, low in (("mean", mean, 0.0), ("std", std, 1e-6)):
        if given is not None and not all(low <= x <= 1.0 for x in given):
            raise ValueError(f"{what} is {given}; it must be numbers from {low:g} to 1, as of pixels in [0, 1]")
    path = Path(os.path.realpath(expanded(path)))
    found, classes = _walk(path)
    seen = {split: _look_at(path, [file for file, _ in files], workers) for split, files in found.items()}
    bad = [f"{s.file} ({s.error})" for part in seen.values() for s in part if s.error]
    if bad and not skip_bad:
        listed = "; ".join(bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise DataError(f"{len(bad)} images below {path} cannot be decoded: {listed}. Repair them, or use --skip-bad")
    kept = {
        split: [(s, label) for s, (_, label) in zip(seen[split], files, strict=True) if not s.error]
        for split, files in found.items()
    }
    for split, files in kept.items():
        left = {label for _, label in files}
        if lost := [name for label, name in enumerate(classes) if label not in left]:
            raise DataError(f"{path / split}: no image of the class {lost[0]!r} can be decoded")
        if not files:
            raise DataError(f"{path}: no image of {split} can be decoded")
    own_mean, own_std = _moments([s for split, part in kept.items() if split != "test" for s, _ in part])
    splits = {split: _file_split(part) for split, part in kept.items()}
    digest = _fingerprint(splits, classes, (mean, std))
    return FolderIndex(name, path, splits, classes, mean or own_mean, std or own_std, digest, (mean, std)), bad


def read_folder(name: str, root: Path | None = None) -> FolderIndex:
    """Return the index `name`, as prepared."""
    path = (root or store.root()) / name
    return store.steady(path, name, lambda record: _read(path, name, record))


def verify_index(index: FolderIndex) -> FolderIndex:
    """Return the index if it is what was prepared: names, labels and digests of files are hashed, and not the files.

    Each file is compared with its digest when it is decoded. An index of an older version has no digests: its files
    are then known by their lengths and sizes alone.
    """
    if all(part.digests is not None for part in index.splits.values()):
        digest = _fingerprint(index.splits, index.classes, index.given)
        if digest != index.fingerprint:
            raise DataError(
                f"the index of {index.name} is damaged: it has changed since it was written; prepare it again"
            )
    return index


def _read(path: Path, name: str, record: Facts) -> FolderIndex:
    if record.kind != KIND:
        raise DataError(f"{name} is not a folder but a data set of arrays")
    splits = {}
    for split, count in record.splits.items():
        if type(count) is not int or not 0 < count <= _MOST_FILES:
            raise DataError(f"{path} is damaged: {split} has {count!r} files; remove it and prepare {name} again")
        try:
            files = tuple(read(path / f"{split}-files.txt", _LIST_BYTES).decode().split("\n"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path / split}-files.txt cannot be read ({reason(error)}); prepare it again") from None
        if len(files) != count:
            raise DataError(f"{path} is damaged: {split} should have {count} files; prepare it again")
        if odd := next((file for file in files if _leaves(file)), None):
            raise DataError(f"{path / split}-files.txt names {odd!r}, which is outside of its folder; prepare it again")
        labels = array(path / f"{split}-labels.npy", (count,), "<i8")
        if ((labels < NO_LABEL) | (labels >= max(1, len(record.classes)))).any():
            raise DataError(f"{path / split}-labels.npy is damaged: it has labels of no class; prepare it again")
        sizes = array(path / f"{split}-sizes.npy", (count, 2), "<i8")
        if (sizes < 1).any() or (sizes > MOST_BYTES).any():
            raise DataError(f"{path / split}-sizes.npy is damaged: it has impossible sizes; prepare it again")
        lengths, digests = (
            array(at, shape, dtype) if (at := path / f"{split}-{kind}.npy").exists() else None
            for kind, shape, dtype in (("lengths", (count,), "<i8"), ("digests", (count, 32), "|u1"))
        )
        if record.checksum and (lengths is None or digests is None):
            raise DataError(f"{path} is damaged: {split} has lost its lengths or digests; prepare {name} again")
        splits[split] = FileSplit(files, labels, sizes, lengths, digests)
    given = (record.model_extra or {}).get("given") or (None, None)
    numbers = (tuple(record.mean), tuple(record.std), record.fingerprint)
    return FolderIndex(name, Path(record.path), splits, tuple(record.classes), *numbers, tuple(given))


_MOST_FILES = 100_000_000
_LIST_BYTES = 4096 * MIB


def _leaves(file: str) -> bool:
    """Return True if the name of a file leads out of the folder that it is in."""
    return not file or file.startswith("/") or ".." in file.split("/") or "\0" in file


def crop_file(path: Path, box: Iterable[int], size: int, known: Iterable[int | bytes] = ()) -> Images:
    """Return the crop (top, left, height, width) of an image file, size x size.

    `known`: the image's height and width, the file's length and SHA-256, if they must be what they were.
    """
    before = tuple(known)
    return crop(path, read_file(path, before), box, size, before)


def read_file(path: Path, known: tuple[int | bytes, ...] = ()) -> bytes:
    """Return the content of an image file, which must be what it was when its folder was prepared."""
    try:
        content = read(path, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} is gone; prepare its folder again") from None
    except OSError as error:
        raise undecodable(path, error) from None
    if known[3:] and known[3] != hashlib.sha256(content).digest():
        raise DataError(f"{path} has changed since its folder was prepared; prepare it again")
    return content


def crop(path: Path, content: bytes, box: Iterable[int], size: int, before: tuple[int | bytes, ...]) -> Images:
    """Return a crop of an image whose file has this content.

    JPEGs are decoded at 1/2, 1/4 or 1/8 where the crop still has `size` pixels a side; the box is in upright pixels.
    """
    top, left, height, width = (int(x) for x in box)
    try:
        with unwarned(), open_image(content) as image:
            turn, whole = image.getexif().get(ExifTags.Base.Orientation), image.size
            factor = shrunk(image, min(height, width) / size)
            image.load()
            upright = as_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # Pillow's parsers fail in many ways on bytes that a stranger wrote
        raise undecodable(path, error) from None
    wide, high = whole[::-1] if turn in (5, 6, 7, 8) else whole
    if before[:3] != (high, wide, len(content))[: len(before)]:
        raise DataError(f"{path} has changed since its folder was prepared; prepare it again")
    # the decoder's last pixel may reach beyond the image, and turned or mirrored it is the first
    left += upright.width * factor - wide if turn in (2, 3, 6, 7) else 0
    top += upright.height * factor - high if turn in (3, 4, 7, 8) else 0
    area = (left / factor, top / factor, (left + width) / factor, (top + height) / factor)
    x, y = math.floor(area[0]), math.floor(area[1])
    right, bottom = min(math.ceil(area[2]), upright.width), min(math.ceil(area[3]), upright.height)
    # cut first: Pillow's filter would look across the border of a box, and a crop has nothing there
    cut = upright.crop((x, y, right, bottom))
    inner = (area[0] - x, area[1] - y, min(area[2] - x, cut.width), min(area[3] - y, cut.height))
    return pixels(cut.resize((size, size), Image.Resampling.BILINEAR, box=inner))


def _walk(path: Path) -> tuple[dict[str, list[tuple[str, int]]], tuple[str, ...]]:
    """Files and labels of each split, in order of their names, and the classes."""
    if not os.path.isdir(path):
        raise DataError(f"{path} is not a folder; give one with images, or with train/<class>/ in it")
    train = path / "train"
    if not train.is_dir():
        files = list(_images(path, path))
        if not files:
            raise DataError(f"{path} has no images; {', '.join(SUFFIXES)} are read")
        return {"train": [(f, NO_LABEL) for f in files]}, ()
    classes = tuple(sorted(p.name for p in _inside(train) if _is_class(p)))
    if len(classes) < 2:
        what = f"has one class, {classes[0]!r}" if classes else "has no class folders"
        raise DataError(f"{train} {what}; give the folder of images itself to use it without labels")
    held = next((n for n in TEST_NAMES if (path / n).is_dir()), None)
    found = {"train": _labelled(path, "train", classes)}
    if held:
        found["test"] = _labelled(path, held, classes)
    return found, classes


def _labelled(path: Path, split: str, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    known = {name: i for i, name in enumerate(classes)}
    strangers = sorted(p.name for p in _inside(path / split) if _is_class(p) and p.name not in known)
    if strangers:
        raise DataError(f"{path / split} has a class {strangers[0]!r} that {path / 'train'} has not")
    found = []
    for name in classes:
        files = list(_images(path / split / name, path)) if (path / split / name).is_dir() else []
        if not files:
            raise DataError(f"{path / split / name} has no images; {', '.join(SUFFIXES)} are read")
        found += [(f, known[name]) for f in files]
    return found


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _images(folder: Path, root: Path) -> Iterator[str]:
    """Of a folder and those below, in order of their names; links are followed, what is hidden is left alone."""
    for file in sorted(_files(folder, {folder.resolve()})):
        name = file.relative_to(root).as_posix()
        _check_name(name, file)
        yield name


def _check_name(name: str, file: Path) -> None:
    if "\n" in name or name != name.encode(errors="ignore").decode():
        raise DataError(f"{str(file)!r} has a name that cannot be kept in a list of names; rename it")


def _files(folder: Path, above: set[Path]) -> Iterator[Path]:
    for path in _inside(folder):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            real = path.resolve()
            if real in above:
                raise DataError(f"{path} is a link to a folder that it is in; remove it")
            yield from _files(path, above | {real})
        elif path.suffix.lower() in SUFFIXES and path.is_file():
            yield path


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        if folder.name == "lost+found":  # which a disk has at its root, for its administrator alone
            return []
        raise DataError(f"{folder} cannot be read ({reason(error)}); move it away, or change its permissions") from None


def _look_at(path: Path, files: list[str], workers: int) -> list[_Seen]:
    look = bind(_look, path)
    if not workers or len(files) <= _CHUNK:
        return list(map(look, files))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
    try:
        with without_main():
            seen = pool.map(look, files, chunksize=_CHUNK)
        return list(seen)
    except BrokenProcessPool:
        raise DataError(f"a process that decodes {path} was killed, perhaps for want of memory; try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _look(root: Path, file: str) -> _Seen:
    """Decode one file, in a worker process."""
    try:
        content = read(root / file, MOST_BYTES)
        image = decode(content, file)
    except (DataError, OSError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error).split("(", 1)[-1].removesuffix(")")
        return _Seen(file, error=said)
    sums = (tuple(image.mean((1, 2)).tolist()), tuple(_squares(image)))
    return _Seen(file, (image.shape[1], image.shape[2]), len(content), sums, hashlib.sha256(content).hexdigest())


def _squares(image: Images) -> list[float]:
    """Return the mean square of each channel, some rows at a time: as float64 an image takes eight times its room."""
    rows = max(1, (1 << 20) // image.shape[2])
    parts = (image[:, at : at + rows].astype(np.float64) for at in range(0, image.shape[1], rows))
    total: NDArray[np.float64] = sum(np.square(part).sum((1, 2)) for part in parts)
    return [float(x) for x in total / (image.shape[1] * image.shape[2])]


def _moments(seen: list[_Seen]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std per channel, every image counting alike whatever its size."""
    mean, square = np.mean([s.sums for s in seen], axis=0) / np.array([[255.0], [255.0**2]])
    return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(square - mean**2, 0)).tolist())


def _file_split(part: list[tuple[_Seen, int]]) -> FileSplit:
    return FileSplit(
        tuple(s.file for s, _ in part),
        np.array([label for _, label in part], dtype=np.int64),
        np.array([s.size for s, _ in part], dtype=np.int64),
        np.array([s.length for s, _ in part], dtype=np.int64),
        np.frombuffer(bytes.fromhex("".join(s.digest for s, _ in part)), dtype=np.uint8).reshape(-1, 32),
    )


def _fingerprint(splits: dict[str, FileSplit], classes: tuple[str, ...], given: tuple[Any, Any]) -> str:
    """SHA-256 over classes, every file's name, label and content, and mean and std where they were given."""
    digest = hashlib.sha256(json.dumps(classes).encode())
    if any(given):
        digest.update(json.dumps(given).encode())
    for split, part in splits.items():
        assert part.digests is not None
        content = bytes(part.digests.data).hex()
        hashes = (content[64 * i : 64 * (i + 1)] for i in range(len(part)))
        digest.update(json.dumps([split, list(zip(part.files, hashes, part.labels.tolist(), strict=True))]).encode())
    return digest.hexdigest()


def _write(index: FolderIndex, root: Path) -> None:
    with partial(root, index.name, _own) as folder:
        for split, part in index.splits.items():
            save(folder / f"{split}-files.txt", "\n".join(part.files).encode())
            arrays = {"labels": part.labels, "sizes": part.sizes, "lengths": part.lengths, "digests": part.digests}
            for kind, held in arrays.items():
                if held is not None:
                    with (folder / f"{split}-{kind}.npy").open("wb") as file:
                        np.save(file, held, allow_pickle=False)
                        flush(file)
        record: dict[str, Any] = {
            "format": FORMAT,
            "kind": KIND,
            "name": index.name,
            "path": str(index.path),
            "splits": {split: len(part) for split, part in index.splits.items()},
            "classes": list(index.classes),
            "mean": list(index.mean),
            "std": list(index.std),
            "given": [part and list(part) for part in index.given],
            "fingerprint": index.fingerprint,
        }
        save_record(folder, record)
        publish(folder, root / index.name, _own)


def _own(path: Path) -> set[str]:
    """Return the names of the files of an index; raise if the folder is not one."""
    return store.own(path, KIND)
