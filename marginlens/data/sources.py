"""The data sets by name, and how each one's official files become a store. A new data set is one entry in `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from marginlens.data import images as decoding
from marginlens.data import shapes
from marginlens.data.archives import IMAGE_BYTES, TEXT_BYTES, Files, content
from marginlens.data.store import NO_LABEL, Batch, Labels
from marginlens.errors import DataError
from marginlens.parameters import hint

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_RECORDS = 10_000
STL10_RECORDS = {"train": 5_000, "unlabeled": 100_000, "test": 8_000}
CHUNK = 2_000
"""Images held at a time while a large split is written."""


@dataclass(frozen=True)
class Contents:
    """Splits and classes that a source gives a store."""

    splits: dict[str, Iterable[Batch]]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A data set: how to read it, where its archive is to be had, and how the recipe normalises it."""

    read: Callable[[Files], Contents]
    about: str
    url: str = ""
    """Where the official archive is; none for one that cannot be downloaded, and is read from a place that is named."""
    checksum: str = ""
    inner: str = ""
    """The folder that the archive unpacks to."""
    version: int = 1
    """Raised when the same source comes to mean other pixels: stores of an older one are not used."""
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    """The recipe's figures (ReSSL's code), which need not be the true ones; None: use the data's own."""
    drawn: bool = False
    """Made by a formula: it needs no files, and is made when it is first asked for."""
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that this data set asks for: of "pretrain", and of evaluations by their names."""


def read_shapes(files: Files) -> Contents:
    """Ten kinds of figure, drawn."""
    drawn = {split: [Batch(*shapes.draw(count, split))] for split, count in (("train", 5_000), ("test", 1_000))}
    return Contents(dict(drawn), shapes.CLASSES)


def read_cifar10(files: Files) -> Contents:
    """Five batches and a test batch: one label byte, then 3,072 bytes of red, green and blue planes."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    train = [_cifar(files, name, 1, CIFAR_RECORDS, 10) for name in names]
    test = _cifar(files, "test_batch.bin", 1, CIFAR_RECORDS, 10)
    _balanced(files, "data_batch_1.bin to data_batch_5.bin", np.concatenate([b.labels for b in train]), 10)
    _balanced(files, "test_batch.bin", test.labels, 10)
    return Contents({"train": train, "test": [test]}, _class_names(files, "batches.meta.txt", CIFAR10_CLASSES))


def read_cifar100(files: Files) -> Contents:
    """train.bin and test.bin: coarse and fine label bytes, then 3,072 bytes; the fine label counts."""
    train = _cifar(files, "train.bin", 2, 5 * CIFAR_RECORDS, 100)
    test = _cifar(files, "test.bin", 2, CIFAR_RECORDS, 100)
    _balanced(files, "train.bin", train.labels, 100)
    _balanced(files, "test.bin", test.labels, 100)
    classes = _class_names(files, "fine_label_names.txt", tuple(f"class {i}" for i in range(100)))
    return Contents({"train": [train], "test": [test]}, classes)


def read_stl10(files: Files) -> Contents:
    """96 px images stored column by column; labels from 1 to 10, none for `unlabeled`."""
    classes = _class_names(files, "class_names.txt", tuple(f"class {i}" for i in range(10)))
    sizes = {split: count * 3 * 96 * 96 for split, count in STL10_RECORDS.items()}
    for split in sizes:
        _sized(files, f"{split}_X.bin", sizes[split])
    labels = {split: _stl10_labels(files, split) for split in ("train", "test")}
    return Contents({split: _stl10(files, split, labels.get(split)) for split in STL10_RECORDS}, classes)


def read_tinyimagenet(files: Files) -> Contents:
    """200 classes of 64 px JPEGs; the validation set, whose labels are in a list, is the test split."""
    wnids = _lines(files, "wnids.txt")
    if len(set(wnids)) != len(wnids) or len(wnids) < 2:
        raise DataError(f"{files.where}: wnids.txt names {len(set(wnids))} classes in {len(wnids)} lines")
    number = {wnid: i for i, wnid in enumerate(wnids)}
    names = files.names()
    train = sorted(n for n in names if n.startswith("train/") and n.lower().endswith(".jpeg"))
    train_labels = [_wnid(files, n, n.split("/")[1], number) for n in train]
    listed = [line.split("\t")[:2] for line in _lines(files, "val/val_annotations.txt")]
    if any(len(entry) < 2 for entry in listed):
        raise DataError(f"{files.where}: val/val_annotations.txt has a line without a class")
    test = [f"val/images/{name}" for name, _ in listed]
    missing = sorted(set(test) - set(names))
    if missing or not train or not test:
        raise DataError(f"{files.where}: {missing[0] if missing else 'its images'} is missing; fetch the archive again")
    test_labels = [_wnid(files, n, wnid, number) for n, wnid in listed]
    words = dict(line.split("\t", 1) for line in _lines(files, "words.txt", optional=True) if "\t" in line)
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    return Contents({"train": _jpegs(files, train, train_labels), "test": _jpegs(files, test, test_labels)}, classes)


SOURCES = {
    "shapes": Source(
        read_shapes,
        "ten kinds of figure, drawn by a formula; 32 px, needs no files",
        version=shapes.VERSION,
        drawn=True,
        # what a CPU learns from in minutes (docs/guides/training.md has the measurements)
        recipes={
            "pretrain": {
                "encoder": "tiny",
                "batch": 64,
                "lr": 0.2,
                "ema": 0.9,
                "hidden": 256,
                "out": 64,
                "predictor_bn": False,
                "warmup": 1,
                "crop_scale": (0.5, 1.0),
            },
            "probe": {"epochs": 20, "batch": 16, "lr": 0.5, "crop_scale": (0.5, 1.0)},
        },
    ),
    "cifar10": Source(
        read_cifar10,
        "60,000 images of 10 classes, 32 px; the binary version",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "md5:c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Source(
        read_cifar100,
        "60,000 images of 100 classes, 32 px; the binary version",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "md5:03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    ),
    "stl10": Source(
        read_stl10,
        "13,000 images of 10 classes and 100,000 without labels, 96 px",
        "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
        "md5:91f7769df0f17e558f3565bffb0c7dfb",
        "stl10_binary",
        mean=(0.4408, 0.4279, 0.3867),
        std=(0.2682, 0.2610, 0.2686),
        recipes={"pretrain": {"split": "train+unlabeled", "size": 64, "ema": 0.996}},
    ),
    "tinyimagenet": Source(
        read_tinyimagenet,
        "110,000 images of 200 classes, 64 px",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "md5:90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2302, 0.2265, 0.2262),
        recipes={"pretrain": {"size": 64, "ema": 0.996}},
    ),
}


def recipes(what: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings that data sets ask for, of "pretrain" or of an evaluation, by the data set's name."""
    return {name: found.recipes[what] for name, found in SOURCES.items() if what in found.recipes}


def source(name: str) -> Source:
    """The data set of that name."""
    if name not in SOURCES:
        raise DataError(f"there is no data set {name!r}; {hint(name, SOURCES)}")
    return SOURCES[name]


def _cifar(files: Files, name: str, label_bytes: int, count: int, classes: int) -> Batch:
    width = label_bytes + 3072
    raw = np.frombuffer(_sized(files, name, count * width), dtype=np.uint8).reshape(count, width)
    labels = raw[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        at = int((labels >= classes).argmax())
        raise DataError(f"{files.where}: {name} is damaged: record {at} has label {labels[at]} of {classes} classes")
    return Batch(raw[:, label_bytes:].reshape(count, 3, 32, 32), labels)


def _balanced(files: Files, name: str, labels: Labels, classes: int) -> None:
    """Official splits have as many images of each class: one that has not is damaged, or swapped with another."""
    counts = np.bincount(labels, minlength=classes)
    if counts.min() != counts.max():
        raise DataError(
            f"{files.where}: {name} has {counts.min()} to {counts.max()} images a class where all should be equal; "
            f"files are swapped or damaged, fetch the archive again"
        )


def _stl10(files: Files, split: str, labels: Labels | None) -> Iterator[Batch]:
    count = STL10_RECORDS[split]
    with files.open(f"{split}_X.bin") as file:
        for start in range(0, count, CHUNK):
            n = min(CHUNK, count - start)
            raw = np.frombuffer(file.read(n * 27648), dtype=np.uint8).reshape(n, 3, 96, 96)
            part = np.full(n, NO_LABEL) if labels is None else labels[start : start + n]
            yield Batch(np.ascontiguousarray(raw.transpose(0, 1, 3, 2)), part.astype(np.int64))


def _stl10_labels(files: Files, split: str) -> Labels:
    name = f"{split}_y.bin"
    labels = np.frombuffer(_sized(files, name, STL10_RECORDS[split]), dtype=np.uint8).astype(np.int64) - 1
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{files.where}: {name} is damaged: labels go from {labels.min() + 1} to {labels.max() + 1}")
    return labels


def _jpegs(files: Files, names: list[str], labels: list[int]) -> Iterator[Batch]:
    for start in range(0, len(names), CHUNK):
        part = names[start : start + CHUNK]
        pixels = [decoding.decode(content(files, name, IMAGE_BYTES), f"{files.where}: {name}") for name in part]
        sizes = {p.shape for p in pixels}
        if sizes != {(3, 64, 64)}:
            odd = next(n for n, p in zip(part, pixels, strict=True) if p.shape != (3, 64, 64))
            raise DataError(f"{files.where}: {odd} is not 64 x 64; the official images all are")
        yield Batch(np.stack(pixels), np.array(labels[start : start + CHUNK], dtype=np.int64))


def _wnid(files: Files, name: str, wnid: str, number: dict[str, int]) -> int:
    if wnid not in number:
        raise DataError(f"{files.where}: {name} is of class {wnid!r}, which wnids.txt does not name")
    return number[wnid]


def _sized(files: Files, name: str, size: int) -> bytes:
    """A file's bytes, if there are as many as there should be. Files of gigabytes are only measured."""
    try:
        with files.open(name) as file:
            held = file.read(size + 1) if size < 2**30 else b""
            found = len(held) if held else _length(file, size)
    except KeyError:
        raise DataError(f"{files.where} has no {name}; give the official archive or its extracted folder") from None
    if found != size:
        what = "is longer than" if found > size else f"has {found:,} bytes of"
        raise DataError(f"{files.where}: {name} {what} the {size:,} it should have; fetch it again")
    return held


def _length(file: BinaryIO, most: int) -> int:
    """Return the length of a file; some length beyond `most`, if it is longer."""
    found = 0
    while found <= most and (block := file.read(2**24)):
        found += len(block)
    return found


def _lines(files: Files, name: str, optional: bool = False) -> list[str]:
    try:
        lines = content(files, name, TEXT_BYTES).decode("utf-8").splitlines()
        return [line for line in lines if line.strip()]
    except KeyError:
        if optional:
            return []
        raise DataError(f"{files.where} has no {name}; give the official archive or its extracted folder") from None
    except UnicodeDecodeError:
        raise DataError(f"{files.where}: {name} is damaged: it is not text") from None


def _class_names(files: Files, name: str, fallback: tuple[str, ...]) -> tuple[str, ...]:
    """Class names from the file beside the data; plain numbers where it was left behind."""
    names = tuple(_lines(files, name, optional=True))
    if names and len(names) != len(fallback):
        raise DataError(f"{files.where}: {name} names {len(names)} classes; there should be {len(fallback)}")
    return names or fallback
