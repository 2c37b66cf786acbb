"""Small files in the official formats of each data set."""

import io
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from marginlens.data import sources


@pytest.fixture(autouse=True)
def data_root(tmp_path_factory, monkeypatch):
    """Give every test a cache folder of its own, which does not overlap with its sources."""
    folder = tmp_path_factory.mktemp("stores") / "cache"
    monkeypatch.setenv("MARGINLENS_DATA", str(folder))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Official formats with fewer records."""
    monkeypatch.setattr(sources, "CIFAR_RECORDS", 100)
    monkeypatch.setattr(sources, "STL10_RECORDS", {"train": 20, "unlabeled": 30, "test": 10})
    monkeypatch.setattr(sources, "CHUNK", 7)


def records(count, classes, label_bytes, seed):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes).astype(np.uint8)
    pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    columns = [labels[:, None]] if label_bytes == 1 else [(labels // 5)[:, None], labels[:, None]]
    return np.concatenate([*columns, pixels], axis=1), labels, pixels.reshape(count, 3, 32, 32)


@pytest.fixture
def cifar10(tmp_path, small):
    """The extracted folder, and what is in it."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    train, labels, images = records(500, 10, 1, 0)
    for i in range(5):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(train[100 * i : 100 * (i + 1)].tobytes())
    test, test_labels, test_images = records(100, 10, 1, 1)
    (folder / "test_batch.bin").write_bytes(test.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(sources.CIFAR10_CLASSES) + "\n\n")
    return folder, {"train": (images, labels), "test": (test_images, test_labels)}


@pytest.fixture
def cifar100(tmp_path, small):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    train, labels, images = records(500, 100, 2, 2)
    test, test_labels, test_images = records(100, 100, 2, 3)
    (folder / "train.bin").write_bytes(train.tobytes())
    (folder / "test.bin").write_bytes(test.tobytes())
    (folder / "fine_label_names.txt").write_text("".join(f"thing {i}\n" for i in range(100)))
    return folder, {"train": (images, labels), "test": (test_images, test_labels)}


@pytest.fixture
def stl10(tmp_path, small):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    rng = np.random.default_rng(4)
    content = {}
    for split, count in sources.STL10_RECORDS.items():
        images = rng.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)
        # the official files hold each plane column by column
        (folder / f"{split}_X.bin").write_bytes(images.transpose(0, 1, 3, 2).tobytes())
        labels = np.full(count, -1)
        if split != "unlabeled":
            labels = np.arange(count) % 10
            (folder / f"{split}_y.bin").write_bytes((labels + 1).astype(np.uint8).tobytes())
        content[split] = (images, labels)
    (folder / "class_names.txt").write_text("".join(f"animal {i}\n" for i in range(10)))
    return folder, content


@pytest.fixture
def tinyimagenet(tmp_path, small):
    folder = tmp_path / "tiny-imagenet-200"
    wnids = ["n02", "n01", "n03"]
    rng = np.random.default_rng(5)
    for wnid in wnids:
        for i in range(3):
            jpeg(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", rng)
    lines = []
    for i in range(4):
        jpeg(folder / "val" / "images" / f"val_{i}.JPEG", rng, grey=i == 0)
        lines.append(f"val_{i}.JPEG\t{wnids[i % 3]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("n01\tgoldfish, carp\nn02\teel\nn09\tother\n")
    return folder, wnids


def jpeg(path, rng, size=(64, 64), grey=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC)
    (image.convert("L") if grey else image).save(path, "JPEG", quality=95)


def tar_of(folder, path, extra=()):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
        for name, content in extra:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def zip_of(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{folder.name}/{file.relative_to(folder).as_posix()}")
    return path


def tree_of_jpegs(folder):
    """A small train/val tree of two classes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", 1)):
        for name in ("cat", "dog"):
            for i in range(count):
                jpeg(folder / split / name / f"{i}.jpg", rng)
