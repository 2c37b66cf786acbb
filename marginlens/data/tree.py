"""How a folder of images is read: the class of each image, and the images that are kept back for tests.

Symlinks are followed, hidden files and folders are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from marginlens.data.images import SUFFIXES
from marginlens.data.store import NO_LABEL
from marginlens.errors import DataError
from marginlens.files import reason

TEST_NAMES = ("val", "test")
TEST_SHARE = 0.2
"""Share of each class that is kept back where a folder has classes and no test images of its own."""


class Tree(NamedTuple):
    """The files of each split with their labels, and the classes."""

    splits: dict[str, list[tuple[str, int]]]
    classes: tuple[str, ...] = ()
    share: float = 0.0
    """The share of test images to keep back, unless another is asked for."""
    notes: tuple[str, ...] = ()
    """How the folder was read, for its owner."""


def read_tree(path: Path) -> Tree:
    """Read the names in a folder of images.

    | in the folder | what it becomes |
    |---|---|
    | `train/<class>/`, perhaps `val/<class>/` or `test/<class>/` | these classes and splits |
    | images in two folders or more, none beside them | a class for each folder, deeper folders included |
    | anything else | images without labels |
    """
    if not os.path.isdir(path):
        raise DataError(f"{path} is not a folder; give one with images, or with train/<class>/ in it")
    return _of_splits(path) if _is_split(path) else _of_folders(path)


def _is_split(path: Path) -> bool:
    """Return True if the folder has a folder train/ that is a split; among other classes it may be one of them."""
    if not (path / "train").is_dir():
        return False
    others = {p.name for p in _inside(path) if _is_class(p)} - {"train", *TEST_NAMES}
    return not others or any(_is_class(p) for p in _inside(path / "train"))


def _of_splits(path: Path) -> Tree:
    train = path / "train"
    classes = tuple(sorted(p.name for p in _inside(train) if _is_class(p)))
    if len(classes) < 2:
        what = f"has one class, {classes[0]!r}" if classes else "has no class folders"
        raise DataError(f"{train} {what}; give the folder of images itself to use it without labels")
    held = next((n for n in TEST_NAMES if (path / n).is_dir()), None)
    splits = {"train": _labelled(path, "train", classes)}
    if held:
        splits["test"] = _labelled(path, held, classes)
    return Tree(splits, classes)


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


def _of_folders(path: Path) -> Tree:
    files = list(_images(path, path))
    if not files:
        raise DataError(f"{path} has no images; {', '.join(SUFFIXES)} are read")
    beside = [file for file in files if "/" not in file]
    classes = tuple(sorted({file.partition("/")[0] for file in files if "/" in file}))
    if beside or len(classes) < 2:
        unlabelled = {"train": [(file, NO_LABEL) for file in files]}
        return Tree(unlabelled, notes=(f"without labels: {_why_unlabelled(path, beside, classes)}",))
    known = {name: i for i, name in enumerate(classes)}
    notes = [f"{len(classes)} classes, one for each folder: {_few(classes)}"]
    if empty := sorted(p.name for p in _inside(path) if _is_class(p) and p.name not in known):
        notes.append(f"skipped, without an image: {_few(empty)}")
    if deeper := sorted({file.rpartition("/")[0] for file in files if file.count("/") > 1}):
        notes.append(f"deeper folders belong to the class that they are in: {_few(deeper)}")
    labelled = [(file, known[file.partition("/")[0]]) for file in files]
    return Tree({"train": labelled}, classes, TEST_SHARE, tuple(notes))


def _why_unlabelled(path: Path, beside: Sequence[str], classes: Sequence[str]) -> str:
    """Return why a folder has no classes, and what would give it some."""
    if beside and classes:
        return f"there are images beside the folders ({_few(beside)}); move them into folders to get classes"
    if beside:
        return "all images are in one folder; put each class into a folder of its own to get classes"
    inner = path / classes[0]
    if (inner / "train").is_dir() or sum(_is_class(p) for p in _inside(inner)) > 1:
        return f"all images are in {classes[0]}; give {inner} itself to get classes"
    return f"all images are in one folder, {classes[0]}; a second class needs a folder beside it"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def held_back(contents: Sequence[str], labels: Sequence[int], share: float) -> set[str]:
    """Return which contents become test images: a share of each class, at least one, and never all.

    `contents`: the SHA-256 of each file, by whose order they are drawn. So the choice depends neither on names nor on
    the order of files, and copies of an image are never on both sides.
    """
    held: set[str] = set()
    for label in sorted(set(labels)):
        own = sorted({content for content, other in zip(contents, labels, strict=True) if other == label})
        held.update(own[: min(max(1, round(share * len(own))), len(own) - 1)])
    return held


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _images(folder: Path, root: Path) -> Iterator[str]:
    """Names of the images in a folder and those below, in order; symlinks are followed, hidden files are skipped."""
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
