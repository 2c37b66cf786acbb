"""Official formats are read right; everything else is refused with its name and the reason."""

import http.server
import shutil
import tarfile
import threading
import zipfile
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from marginlens.data import sources, store
from marginlens.data.archives import open_files
from marginlens.data.prepare import load, prepare
from marginlens.errors import DataError
from tests.data.conftest import tar_of, zip_of


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test_binary_formats(name, request, tmp_path):
    folder, content = request.getfixturevalue(name)
    stores = [prepare(name, path) for path in (folder, folder.parent, tar_of(folder, tmp_path / f"{name}.tar.gz"))]
    for found in stores:
        assert set(found.splits) == set(content)
        for split, (images, labels) in content.items():
            assert np.array_equal(found.splits[split].images, images)
            assert np.array_equal(found.splits[split].labels, labels)
        assert found.fingerprint == stores[0].fingerprint
    used = np.concatenate([images for split, (images, _) in content.items() if split != "test"]) / 255
    np.testing.assert_allclose(stores[0].mean, used.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(stores[0].std, used.std((0, 2, 3)), rtol=1e-9)
    assert len(stores[0].classes) == (100 if name == "cifar100" else 10)


def test_stl10_joins_its_splits(stl10):
    folder, content = stl10
    joined = prepare("stl10", folder).split("train+unlabeled")
    assert np.array_equal(joined.images, np.concatenate([content["train"][0], content["unlabeled"][0]]))
    assert not joined.labelled
    with pytest.raises(DataError, match="no split 'train\\+val'; it has train, unlabeled, test"):
        load("stl10").split("train+val")


def test_tinyimagenet(tinyimagenet, tmp_path):
    folder, _ = tinyimagenet
    for path in (folder, zip_of(folder, tmp_path / "tiny.zip")):
        found = prepare("tinyimagenet", path)
        assert found.classes == ("eel", "goldfish", "n03")
        assert found.size == (64, 64)
        assert found.splits["train"].labels.tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2]
        assert found.splits["test"].labels.tolist() == [0, 1, 2, 0]
        grey = found.splits["test"].images[0]
        assert np.array_equal(grey[0], grey[1])


def test_names_of_classes_may_be_missing(cifar100):
    folder, _ = cifar100
    (folder / "fine_label_names.txt").unlink()
    assert prepare("cifar100", folder).classes[:2] == ("class 0", "class 1")


def cut(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes() + b"x")


def swap(folder, a, b):
    (folder / a).rename(folder / "t")
    (folder / b).rename(folder / a)
    (folder / "t").rename(folder / b)


def mislabel(folder, name, at, label):
    content = bytearray((folder / name).read_bytes())
    content[at] = label
    (folder / name).write_bytes(bytes(content))


DAMAGE = {
    "data_batch_3.bin has 307,299 bytes of the 307,300 it should have": ("cifar10", cut, "data_batch_3.bin"),
    "test_batch.bin is longer than the 307,300 it should have": ("cifar10", lengthen, "test_batch.bin"),
    "has no data_batch_2.bin; give the official archive": (
        "cifar10",
        lambda f, n: (f / n).unlink(),
        "data_batch_2.bin",
    ),
    "data_batch_1.bin to data_batch_5.bin has": ("cifar10", swap, "data_batch_2.bin", "test_batch.bin"),
    "data_batch_1.bin is damaged: record 0 has label 77 of 10": ("cifar10", mislabel, "data_batch_1.bin", 0, 77),
    "batches.meta.txt names 1 classes; there should be 10": (
        "cifar10",
        lambda f, n: (f / n).write_text("one\n"),
        "batches.meta.txt",
    ),
    "batches.meta.txt is damaged: it is not text": (
        "cifar10",
        lambda f, n: (f / n).write_bytes(b"\xff\xfe\xfa"),
        "batches.meta.txt",
    ),
    "train.bin has 307,400 bytes of the 1,537,000": ("cifar100", swap, "train.bin", "test.bin"),
    "test.bin has 0 to 2 images a class": ("cifar100", lambda f, n: mislabel(f, n, 1, double(f)), "test.bin"),
    "unlabeled_X.bin has 829,439 bytes": ("stl10", cut, "unlabeled_X.bin"),
    "train_y.bin is damaged: labels go from 0 to 10": ("stl10", mislabel, "train_y.bin", 0, 0),
    "test_y.bin is damaged: labels go from 2 to 12": ("stl10", mislabel, "test_y.bin", 0, 12),
    "val/images/val_2.JPEG is missing": ("tinyimagenet", lambda f, n: (f / n).unlink(), "val/images/val_2.JPEG"),
    "n03_1.JPEG cannot be decoded": (
        "tinyimagenet",
        lambda f, n: (f / n).write_bytes(b"no"),
        "train/n03/images/n03_1.JPEG",
    ),
    "is of class 'n01', which wnids.txt does not name": (
        "tinyimagenet",
        lambda f, n: (f / n).write_text("n02\nn03\n"),
        "wnids.txt",
    ),
    "wnids.txt names 1 classes": ("tinyimagenet", lambda f, n: (f / n).write_text("n02\n"), "wnids.txt"),
    "val_annotations.txt has a line without a class": (
        "tinyimagenet",
        lambda f, n: (f / n).write_text("val_0.JPEG\n"),
        "val/val_annotations.txt",
    ),
}


def double(folder):
    """The label of the second record, to be given to the first as well."""
    return (folder / "test.bin").read_bytes()[3075]


@pytest.mark.parametrize("line", DAMAGE)
def test_damage_is_named(line, request, data_root):
    name, spoil, *arguments = DAMAGE[line]
    folder, _ = request.getfixturevalue(name)
    spoil(folder, *arguments)
    with pytest.raises(DataError) as caught:
        prepare(name, folder)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not store.exists(name)
    assert [p.name for p in data_root.glob("*") if p.is_dir()] == []
    assert list(data_root.glob(".*")) == []


def test_another_size_of_image_is_refused(tinyimagenet):
    folder, _ = tinyimagenet
    from tests.data.conftest import jpeg

    jpeg(folder / "train" / "n01" / "images" / "n01_0.JPEG", np.random.default_rng(0), size=(64, 63))
    with pytest.raises(DataError, match=r"n01_0.JPEG is not 64 x 64"):
        prepare("tinyimagenet", folder)


def test_archives_write_nothing_outside(cifar10, tmp_path, data_root):
    folder, _ = cifar10
    path = tar_of(folder, tmp_path / "evil.tar.gz", extra=[("../escaped.txt", b"x"), ("/tmp/escaped-abs.txt", b"x")])
    prepare("cifar10", path)
    written = {p.relative_to(data_root).as_posix() for p in data_root.rglob("*") if p.is_file()}
    kinds = ("images", "labels")
    assert written == {f"cifar10/{s}-{k}.npy" for s in ("train", "test") for k in kinds} | {"cifar10/store.json"}
    assert not (tmp_path / "escaped.txt").exists()


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b\x08\x00garbage"])
def test_damaged_archives(content, tmp_path):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged, or not a tar archive: [^\n]+; fetch it again\Z"):
        prepare("cifar10", path)


def test_a_truncated_archive(cifar10, tmp_path):
    folder, _ = cifar10
    path = tar_of(folder, tmp_path / "x.tar.gz")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="is damaged"):
        prepare("cifar10", path)


def test_unknown_and_unprepared():
    with pytest.raises(DataError, match="there is no data set 'cifar11'; did you mean 'cifar10'"):
        load("cifar11")
    with pytest.raises(DataError, match="there are shapes, cifar10, cifar100, stl10, tinyimagenet"):
        prepare("xyz")
    store.write("photos", {"train": [(np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int64))]}, ("a", "b"))
    with pytest.raises(DataError, match="there is no data set 'photo'; did you mean 'photos'"):
        load("photo")
    with pytest.raises(DataError, match="run: marginlens data prepare cifar10"):
        load("cifar10")
    with pytest.raises(DataError, match="does not exist"):
        prepare("cifar10", store.root() / "nowhere")


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "www"
    folder.mkdir()
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_downloads_are_checked(cifar10, server, monkeypatch, tmp_path):
    import hashlib

    folder, content = cifar10
    www, address = server
    path = tar_of(folder, www / "c.tar.gz")
    right = "md5:" + hashlib.md5(path.read_bytes()).hexdigest()
    source = replace(sources.SOURCES["cifar10"], url=f"{address}/c.tar.gz", checksum="md5:" + "0" * 32)
    monkeypatch.setitem(sources.SOURCES, "cifar10", source)
    with pytest.raises(DataError, match="has another content than it should"):
        prepare("cifar10")
    assert not store.exists("cifar10")
    assert not (store.root() / "downloads" / "c.tar.gz").exists()
    monkeypatch.setitem(sources.SOURCES, "cifar10", replace(source, checksum=right))
    assert np.array_equal(prepare("cifar10").splits["train"].images, content["train"][0])
    monkeypatch.setitem(sources.SOURCES, "cifar10", replace(source, url=f"{address}/absent.tar.gz"))
    shutil.rmtree(store.root() / "downloads")
    with pytest.raises(DataError, match=r"could not be downloaded .* run: marginlens data prepare cifar10 --from"):
        prepare("cifar10")


@pytest.mark.parametrize(
    ("members", "inner", "names"),
    [
        (["x/train/0.png", "x/test/0.png"], "", ["train/0.png", "test/0.png"]),
        (["train/0.png", "test/0.png"], "", ["train/0.png", "test/0.png"]),
        (["./train/0.png", "./test/0.png"], "", ["train/0.png", "test/0.png"]),
        (["x/0.png", "__MACOSX/0.png"], "x", ["0.png", "__MACOSX/0.png"]),
        (["./x/0.png", "./__MACOSX/0.png"], "x", ["0.png", "__MACOSX/0.png"]),
        (["mine/0.png", "__MACOSX/mine/._0.png", ".DS_Store"], "x", ["0.png", "__MACOSX/mine/._0.png", ".DS_Store"]),
        (["mine/0.png"], "x", ["0.png"]),
        (["0.png", "more/0.png"], "", ["0.png", "more/0.png"]),
    ],
)
def test_only_the_archives_own_folder_is_left_out(members, inner, names, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as held, tarfile.open(tmp_path / "x.tar", "w") as other:
        for name in members:
            held.writestr(name, name)
            (tmp_path / "file").write_text(name)
            other.add(tmp_path / "file", name)
    for path in (tmp_path / "x.zip", tmp_path / "x.tar"):
        files = open_files(path, inner)
        assert files.names() == names
        for name, member in zip(names, members, strict=True):
            with files.open(name) as file:
                assert file.read().decode() == member
        files.archive.close()


def test_a_set_without_an_address_is_read_from_where_it_is_said_to_be(tmp_path, monkeypatch):
    """And one that is drawn from nowhere."""

    def read(files):
        with files.open("pixels.bin") as file:
            pixels = np.frombuffer(file.read(), np.uint8).reshape(2, 3, 4, 4)
        return sources.Contents({"train": [store.Batch(pixels, np.array([0, 1]))]}, ("a", "b"))

    monkeypatch.setitem(sources.SOURCES, "mine", sources.Source(read, "two images"))
    (tmp_path / "pixels.bin").write_bytes(bytes(range(96)))
    with pytest.raises(DataError, match="mine is not to be downloaded; run: marginlens data prepare mine --from PATH"):
        prepare("mine")
    with pytest.raises(DataError, match=r"mine is not prepared in .*; run: marginlens data prepare mine"):
        load("mine")
    assert prepare("mine", tmp_path).splits["train"].images.ravel().tolist() == list(range(96))
    assert load("mine").classes == ("a", "b")
    monkeypatch.setitem(sources.SOURCES, "mine", sources.Source(read, "two images", version=2))
    with pytest.raises(DataError, match="mine was prepared by another version; run: marginlens data prepare mine"):
        load("mine")
    with pytest.raises(DataError, match="shapes is drawn, and read from nowhere; leave out --from"):
        prepare("shapes", tmp_path)
