"""Any folder of images as a data set: an index on disk, pixels decoded as they are needed.

Two trees are understood: `train/<class>/*` with `val/<class>/*` or `test/<class>/*` beside it (ImageNet's layout), and
any other folder, flat or nested, whose images have no labels and no split, which is enough to pre-train and to embed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from multiprocessing import get_context, spawn
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from marginlens.data import store
from marginlens.data.atomic import DataError, flush, partial, publish, save
from marginlens.data.images import SUFFIXES, as_rgb, decode, pixels, shrunk
from marginlens.data.store import NO_LABEL, Images, Labels
from marginlens.paths import expanded

TEST_NAMES = ("val", "test")
_spawning = threading.Lock()
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

    def __len__(self) -> int:
        return len(self.files)

    def known(self, i: int) -> tuple[int, ...]:
        """What a file must still be: its image's height and width, and its length."""
        height, width = self.sizes[i].tolist()
        return (height, width) if self.lengths is None else (height, width, int(self.lengths[i]))


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


class _Seen(NamedTuple):
    """What was learned by decoding one file; `error` says why it could not be."""

    file: str
    size: tuple[int, int] = (0, 0)
    length: int = 0
    sums: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    digest: str = ""
    error: str = ""


def prepare_folder(
    path: Path,
    name: str,
    *,
    skip_bad: bool = False,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    workers: int = 2,
    root: Path | None = None,
) -> tuple[FolderIndex, list[str]]:
    """Decodes every image below `path` once, and writes the index `name`; returns it and what was skipped.

    Images that cannot be decoded are listed, and refused unless `skip_bad`. `workers`: processes that decode, 0: this.
    """
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be a number of processes, or 0 for none but this one")
    for what, given, low in (("mean", mean, 0.0), ("std", std, 1e-6)):
        if given is not None and not all(low <= x <= 1.0 for x in given):
            raise ValueError(f"{what} is {given}; it must be numbers from {low:g} to 1, as of pixels in [0, 1]")
    path = expanded(path).resolve()
    found, classes = _walk(path)
    seen = {split: _look_at(path, [file for file, _ in files], workers) for split, files in found.items()}
    bad = [f"{s.file} ({s.error})" for part in seen.values() for s in part if s.error]
    if bad and not skip_bad:
        listed = "; ".join(bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise DataError(f"{len(bad)} images below {path} cannot be decoded: {listed}. Mend them, or use --skip-bad")
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
    index = FolderIndex(
        name,
        path,
        {split: _file_split(part) for split, part in kept.items()},
        classes,
        mean or own_mean,
        std or own_std,
        _fingerprint(kept, classes, (mean, std)),
    )
    _write(index, root or store.root())
    return index, bad


def read_folder(name: str, root: Path | None = None) -> FolderIndex:
    """The index `name`, as prepared."""
    path = (root or store.root()) / name
    return store.steady(path, name, lambda record: _read(path, name, record))


def _read(path: Path, name: str, record: dict[str, Any]) -> FolderIndex:
    if record.get("kind") != KIND:
        raise DataError(f"{name} is not a folder but a data set of arrays")
    splits = {}
    for split, count in record["splits"].items():
        try:
            files = tuple((path / f"{split}-files.txt").read_bytes().decode().split("\n"))
            labels, sizes, lengths = (_load(path / f"{split}-{kind}.npy") for kind in ("labels", "sizes", "lengths"))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}); prepare it again") from None
        if labels is None or sizes is None or {len(files), len(labels), len(sizes)} != {count}:
            raise DataError(f"{path} is damaged: {split} should have {count} files; prepare it again")
        splits[split] = FileSplit(files, labels, sizes, lengths)
    numbers = (tuple(record["mean"]), tuple(record["std"]), record["fingerprint"])
    return FolderIndex(name, Path(record["path"]), splits, tuple(record["classes"]), *numbers)


def _load(path: Path) -> NDArray[np.int64] | None:
    found: NDArray[np.int64] | None = np.load(path, allow_pickle=False) if path.exists() else None
    return found


def crop_file(path: Path, box: Iterable[int], size: int, known: Iterable[int] = ()) -> Images:
    """The crop (top, left, height, width) of an image file, size x size: decoded no larger than it needs to be.

    `known`: the image's height and width, and the file's length, if they must not be others by now. JPEGs are decoded
    at 1/2, 1/4 or 1/8 where the crop still has `size` pixels a side; the box is in upright pixels.
    """
    top, left, height, width = (int(x) for x in box)
    before = tuple(known)
    try:
        length = path.stat().st_size
        with Image.open(path) as image:
            if image.format != "JPEG":
                image.load()  # a TIFF is turned only then
            turn, whole = image.getexif().get(ExifTags.Base.Orientation), image.size
            factor = shrunk(image, min(height, width) / size)
            image.load()
            upright = as_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise DataError(f"{path} is gone; prepare its folder again") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be decoded ({error})") from None
    wide, high = whole[::-1] if turn in (5, 6, 7, 8) else whole
    if before and before != (high, wide, length)[: len(before)]:
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
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give one with images, or with train/<class>/ in it")
    train = path / "train"
    if not train.is_dir():
        files = list(_images(path, path))
        if not files:
            raise DataError(f"{path} has no images; {', '.join(SUFFIXES)} are read")
        return {"train": [(f, NO_LABEL) for f in files]}, ()
    classes = tuple(sorted(p.name for p in train.iterdir() if _is_class(p)))
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
    strangers = sorted(p.name for p in (path / split).iterdir() if _is_class(p) and p.name not in known)
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
        if "\n" in name or name != name.encode(errors="ignore").decode():
            raise DataError(f"{str(file)!r} has a name that cannot be kept in a list of names; rename it")
        yield name


def _files(folder: Path, above: set[Path]) -> Iterator[Path]:
    try:
        inside = list(folder.iterdir())
    except PermissionError:  # a disk's lost+found, say
        inside = []
    for path in inside:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            real = path.resolve()
            if real in above:
                raise DataError(f"{path} is a link to a folder that it is in; remove it")
            yield from _files(path, above | {real})
        elif path.suffix.lower() in SUFFIXES and path.is_file():
            yield path


def _look_at(path: Path, files: list[str], workers: int) -> list[_Seen]:
    look = bind(_look, path)
    if not workers or len(files) <= _CHUNK:
        return list(map(look, files))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        with without_main():
            seen = pool.map(look, files, chunksize=_CHUNK)
        return list(seen)


@contextmanager
def without_main() -> Iterator[None]:
    """Within, a process that this thread starts does not run the program again, if it would.

    Spawned processes import the main module: a script that calls this and is not under `if __name__ == "__main__"`
    would begin anew in each of them.
    """
    if not _begins_anew():
        yield
        return
    with _spawning:
        usual, thread = spawn.get_preparation_data, threading.get_ident()

        def prepared(name: str) -> dict[str, object]:
            found: dict[str, object] = usual(name)
            main = ("init_main_from_path", "init_main_from_name") if threading.get_ident() == thread else ()
            return {key: value for key, value in found.items() if key not in main}

        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = usual


def _begins_anew() -> bool:
    """Whether the program is a script that does not ask for its own name."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return False
    try:
        return "__name__" not in Path(path).read_text(errors="replace")
    except OSError:
        return True


def _look(root: Path, file: str) -> _Seen:
    """Decodes one file, in a worker process."""
    try:
        content = (root / file).read_bytes()
        image = decode(root / file, file).astype(np.float64)
    except (DataError, OSError) as error:
        return _Seen(file, error=str(error).split("(", 1)[-1].rstrip(")"))
    sums = (tuple(image.mean((1, 2)).tolist()), tuple((image**2).mean((1, 2)).tolist()))
    return _Seen(file, (image.shape[1], image.shape[2]), len(content), sums, hashlib.sha256(content).hexdigest())


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
    )


def _fingerprint(
    kept: dict[str, list[tuple[_Seen, int]]], classes: tuple[str, ...], given: tuple[tuple[float, ...] | None, ...]
) -> str:
    """SHA-256 over classes, every file's name, label and content, and mean and std where they were given."""
    digest = hashlib.sha256(json.dumps(classes).encode())
    if any(given):
        digest.update(json.dumps(given).encode())
    for split, part in kept.items():
        digest.update(json.dumps([split, [(s.file, s.digest, label) for s, label in part]]).encode())
    return digest.hexdigest()


def _write(index: FolderIndex, root: Path) -> None:
    with partial(root, index.name) as folder:
        for split, part in index.splits.items():
            save(folder / f"{split}-files.txt", "\n".join(part.files).encode())
            for kind, array in (("labels", part.labels), ("sizes", part.sizes), ("lengths", part.lengths)):
                if array is not None:
                    with (folder / f"{split}-{kind}.npy").open("wb") as file:
                        np.save(file, array, allow_pickle=False)
                        flush(file)
        record: dict[str, Any] = {
            "format": store.FORMAT,
            "kind": KIND,
            "name": index.name,
            "path": str(index.path),
            "splits": {split: len(part) for split, part in index.splits.items()},
            "classes": list(index.classes),
            "mean": list(index.mean),
            "std": list(index.std),
            "fingerprint": index.fingerprint,
        }
        save(folder / "store.json", json.dumps(record, indent=1).encode())
        publish(folder, root / index.name)
