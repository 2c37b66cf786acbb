"""Any folder of images as a data set: an index on disk, pixels decoded as they are needed.

`tree.read_tree` says which folders have classes. Images without labels are enough to pre-train and to embed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial as bind
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from marginlens.data import store
from marginlens.data.disk import FORMAT, Facts, array, partial, publish, save_record
from marginlens.data.images import (
    MOST_BYTES,
    as_rgb,
    decode,
    open_image,
    pixels,
    shrunk,
    undecodable,
    unwarned,
)
from marginlens.data.store import NO_LABEL, Images, Labels
from marginlens.data.tree import TEST_NAMES, Tree, held_back, read_tree
from marginlens.data.workers import end_with_parent, without_main
from marginlens.errors import DataError
from marginlens.files import MIB, expanded, flush, read, reason, save
from marginlens.output import counted
from marginlens.parameters import quoted

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
    test_share: float = 0.0
    """Share of each class that was kept back as test images."""
    skipped: tuple[str, ...] = ()
    """Files that cannot be decoded."""
    notes: tuple[str, ...] = ()
    """How the folder was read, for its owner; not kept on disk."""


class _Seen(NamedTuple):
    """Facts of one decoded file; `error` says why it could not be decoded."""

    file: str
    size: tuple[int, int] = (0, 0)
    length: int = 0
    sums: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    digest: str = ""
    error: str = ""


def prepare_folder(path: Path, name: str, *, root: Path | None = None, **how: Any) -> tuple[FolderIndex, list[str]]:
    """Write the index `name` of the images below a folder; return it, and the files that were skipped.

    `how` is what `index_folder` takes: skip_bad, mean, std, test_share, workers.
    """
    store.check_target(name, expanded(path), root, KIND)
    index, bad = index_folder(path, name, **how)
    write_folder(index, root)
    return index, bad


def index_folder(
    path: Path,
    name: str,
    *,
    skip_bad: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    test_share: float | None = None,
    workers: int = 2,
) -> tuple[FolderIndex, list[str]]:
    """Decode every image below `path` once; return the index, and the files that were skipped.

    Images that cannot be decoded are listed, and refused unless `skip_bad`. `test_share`: share of each class to keep
    back as test images; not given, a fifth where each folder is a class. `workers`: processes that decode, 0: this.
    """
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be a number of processes, or 0 for none but this one")
    for what, given, low in (("mean", mean, 0.0), ("std", std, 1e-6)):
        if given is not None and not all(low <= x <= 1.0 for x in given):
            raise ValueError(f"{what} is {given}; it must be numbers from {low:g} to 1, as of pixels in [0, 1]")
    path = Path(os.path.realpath(expanded(path)))
    tree = read_tree(path)
    share = _share(path, tree, test_share)
    seen = {split: _look_at(path, [file for file, _ in files], workers) for split, files in tree.splits.items()}
    bad = [s for part in seen.values() for s in part if s.error]
    if bad and not skip_bad:
        _refuse(path, bad)
    kept = {
        split: [(s, label) for s, (_, label) in zip(seen[split], files, strict=True) if not s.error]
        for split, files in tree.splits.items()
    }
    for split, files in kept.items():
        left = {label for _, label in files}
        if lost := [name for label, name in enumerate(tree.classes) if label not in left]:
            where = path if tree.share else path / split
            raise DataError(f"{where}: no image of the class {lost[0]!r} can be decoded")
        if not files:
            raise DataError(f"{path}: no image of {split} can be decoded")
    notes = list(tree.notes)
    if share:
        kept, said = _with_tests(kept["train"], tree.classes, share)
        notes += said
    own_mean, own_std = _moments([s for split, part in kept.items() if split != "test" for s, _ in part])
    splits = {split: _file_split(part) for split, part in kept.items()}
    digest = _fingerprint(splits, tree.classes, (mean, std))
    index = FolderIndex(name, path, splits, tree.classes, mean or own_mean, std or own_std, digest, (mean, std))
    index = replace(index, test_share=share, skipped=tuple(s.file for s in bad), notes=tuple(notes))
    return index, [f"{s.file} ({s.error})" for s in bad]


def _share(path: Path, tree: Tree, asked: float | None) -> float:
    """Return the share of test images to keep back; raise for one that makes no sense for this folder."""
    if asked is None:
        return tree.share
    if not 0.0 <= asked < 1.0:
        raise ValueError(f"test_share is {asked:g}; it must be at least 0, for no test images, and below 1")
    if asked and "test" in tree.splits:
        held = next(name for name in TEST_NAMES if (path / name).is_dir())
        raise DataError(f"test_share is {asked:g}, and {path} has test images of its own in {held}/; leave it out")
    if asked and not tree.classes:
        raise DataError(f"test_share is {asked:g}, and {path} is {tree.notes[0]}; or leave test_share out")
    return float(asked)


def _refuse(path: Path, bad: Sequence[_Seen]) -> NoReturn:
    listed = "; ".join(f"{s.file} ({s.error})" for s in bad[:5]) + (f"; and {len(bad) - 5} more" if bad[5:] else "")
    many = counted(len(bad), "image")
    raise DataError(
        f"{many} below {path} cannot be decoded: {listed}. Repair them, or skip them: "
        f"marginlens data prepare folder --from {shlex.quote(str(path))} --skip-bad"
    )


def _with_tests(
    files: list[tuple[_Seen, int]], classes: Sequence[str], share: float
) -> tuple[dict[str, list[tuple[_Seen, int]]], list[str]]:
    """Return the files to learn from and to test on, and what to say of it."""
    held = held_back([s.digest for s, _ in files], [label for _, label in files], share)
    test = [(s, label) for s, label in files if s.digest in held]
    train = [(s, label) for s, label in files if s.digest not in held]
    tested, learned = ({label for _, label in part} for part in (test, train))
    if lost := [name for label, name in enumerate(classes) if label not in learned]:
        raise DataError(f"every image of the class {lost[0]!r} is also in another class; remove the copies")
    notes = [f"kept back as test images: {len(test)} of {len(files)}, a share of {share:g} of each class"]
    if few := [name for label, name in enumerate(classes) if label not in tested]:
        notes.append(f"only one image, so none to test on: {', '.join(few[:5])}{', ...' if few[5:] else ''}")
    return ({"train": train, "test": test} if test else {"train": train}), notes


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
    numbers = (tuple(record.mean), tuple(record.std), record.fingerprint)
    index = FolderIndex(name, Path(record.path), splits, tuple(record.classes), *numbers, _given(path, record))
    return replace(index, test_share=record.test_share, skipped=tuple(record.skipped))


def _given(path: Path, record: Facts) -> tuple[Any, Any]:
    """Return mean and std as they were given; an older version did not record them."""
    given = (record.model_extra or {}).get("given") or [None, None]
    parts = given if isinstance(given, list) else []
    fine = [p is None or (isinstance(p, list) and len(p) == 3 and {*map(type, p)} <= {int, float}) for p in parts]
    if fine != [True, True]:
        raise DataError(f"{path / 'store.json'} is damaged: mean and std were given as {quoted(given)}; prepare again")
    return tuple(parts[0] or ()) or None, tuple(parts[1] or ()) or None


def unchanged(index: FolderIndex) -> bool:
    """Return True if the folder still holds the files that were indexed, at their lengths.

    Their content is compared when they are decoded.
    """
    if any(part.lengths is None for part in index.splits.values()):
        return False
    known = {
        file: int(length)
        for part in index.splits.values()
        for file, length in zip(part.files, part.lengths if part.lengths is not None else (), strict=True)
    }
    files = {file for part in read_tree(index.path).splits.values() for file, _ in part} - {*index.skipped}
    try:
        return files == known.keys() and all((index.path / file).stat().st_size == known[file] for file in files)
    except OSError:
        return False


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


def write_folder(index: FolderIndex, root: Path | None = None) -> None:
    """Write an index under its name, in place of one of that name."""
    store.check_target(index.name, index.path, root, KIND)
    root = root or store.root()
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
            "test_share": index.test_share,
            "skipped": list(index.skipped),
            "fingerprint": index.fingerprint,
        }
        save_record(folder, record)
        publish(folder, root / index.name, _own)


def _own(path: Path) -> set[str]:
    """Return the names of the files of an index; raise if the folder is not one."""
    return store.own(path, KIND)
