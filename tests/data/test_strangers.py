"""Nothing of the user's is ever replaced or removed: files that we did not write stay, everywhere."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from marginlens import files
from marginlens.cli import main
from marginlens.data import disk, folder, sources, store
from marginlens.data.prepare import download, load, open_data, prepare
from marginlens.errors import DataError
from marginlens.files import below
from tests.data.conftest import jpeg, tar_of, tree_of_jpegs
from tests.data.test_store import write


def content(path):
    """Return the bytes of every file below a folder, and the targets of symlinks."""
    found = sorted(p for p in path.rglob("*") if p.is_symlink() or p.is_file())
    return {str(p.relative_to(path)): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in found}


def refused(*words):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code == 2


@pytest.fixture
def photos(data_root):
    """A folder of the user's in the folder of stores, as anybody has it who keeps all data in `data/`."""
    tree_of_jpegs(data_root / "photos")
    (data_root / "photos" / "notes.txt").write_text("originals, no copy anywhere")
    return data_root / "photos"


@pytest.mark.parametrize(
    "words",
    [
        ("data", "prepare", "folder", "--from", "{photos}"),
        ("data", "prepare", "folder", "--from", "{photos}", "--as", "downloads"),
        ("data", "prepare", "folder", "--from", "{photos}", "--as", "others"),
        ("data", "prepare", "folder", "--from", "{photos}/train", "--as", "photos"),
        ("data", "prepare", "folder", "--from", "{root}", "--as", "pets"),
        ("data", "prepare", "folder", "--from", "{root}/link", "--as", "photos"),
        ("data", "prepare", "tinyimagenet", "--from", "{root}/tinyimagenet"),
        ("data", "prepare", "cifar10", "--from", "{root}/cifar10/cifar-10-batches-bin"),
        ("data", "info", "shapes"),
        ("data", "prepare", "shapes"),
        ("data", "show", "shapes"),
    ],
)
def test_a_folder_of_the_users_survives(words, photos, data_root, capsys):
    for name in ("others", "downloads", "tinyimagenet", "shapes", "cifar10"):
        (data_root / name).mkdir()
        (data_root / name / "theirs.txt").write_text(name)
    (data_root / "cifar10" / "cifar-10-batches-bin").mkdir()
    (data_root / "link").symlink_to(photos)
    before = content(data_root)
    refused(*(word.format(photos=photos, root=data_root) for word in words))
    assert content(data_root) == before
    said = capsys.readouterr().err
    assert said.startswith("marginlens: ")
    assert said.count("\n") == 1


def test_what_we_wrote_is_replaced(tmp_path):
    tree_of_jpegs(tmp_path / "photos")
    for seed in (1, 2):
        jpeg(tmp_path / "photos" / "train" / "cat" / "0.jpg", np.random.default_rng(seed))
        index, _ = folder.prepare_folder(tmp_path / "photos", "pets")
        assert folder.read_folder("pets").fingerprint == index.fingerprint


def test_a_file_that_was_put_into_a_store_is_kept(data_root):
    write()
    (data_root / "x" / "notes").mkdir()
    with pytest.raises(DataError, match=r"x holds notes, which no data set has; move that file away"):
        write(seed=1)
    (data_root / "x" / "notes" / "mine.txt").write_text("mine")
    before = content(data_root)
    with pytest.raises(DataError, match=r"x holds notes/mine\.txt"):
        write(seed=1)
    assert content(data_root) == before


def test_a_file_that_comes_into_a_store_while_it_is_replaced_is_kept(data_root, monkeypatch):
    """It comes between the look and the rename."""
    write()
    rename = type(data_root).rename

    def late(path, target):
        if path == data_root / "x":
            (path / "mine.txt").write_text("mine")
        return rename(path, target)

    monkeypatch.setattr(type(data_root), "rename", late)
    assert write(seed=1).fingerprint == store.read("x").fingerprint
    assert [p.read_text() for p in data_root.rglob("mine.txt")] == ["mine"]
    assert not [p for p in data_root.rglob("mine.txt") if ".x." in str(p)]  # in sight, and not swept up later


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to a store", "link to nothing"])
def test_what_is_no_folder_is_not_replaced(kind, data_root, tmp_path):
    data_root.mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mine.txt").write_text("mine")
    if kind == "file":
        (data_root / "x").write_text("mine")
    else:
        target = {"link to a folder": "far", "link to a store": "y", "link to nothing": "nowhere"}[kind]
        if target == "y":
            write("y", folder=tmp_path)
        (data_root / "x").symlink_to(tmp_path / target)
    before = content(data_root), content(tmp_path)
    with pytest.raises(DataError, match="and is never replaced; remove it"):
        write()
    assert (content(data_root), content(tmp_path)) == before


def test_hidden_files_of_strangers_are_not_swept(data_root):
    """Only what a writer on this host left, by the name that it gave."""
    data_root.mkdir()
    names = [".x.a.b.partial", ".x.notes.old", ".x.partial", ".x.host.1-zz.partial", ".y.h.1-0123abcd.partial"]
    for name in names:
        (data_root / name).mkdir()
        (data_root / name / "mine.txt").write_text("mine")
    before = content(data_root)
    write()
    assert {name: held for name, held in content(data_root).items() if not name.startswith("x/")} == before


def test_a_stranger_among_the_downloads_is_not_replaced(data_root, cifar10):
    (data_root / "downloads").mkdir(parents=True)
    theirs = data_root / "downloads" / "cifar-10-binary.tar.gz"
    theirs.write_text("mine")
    with pytest.raises(DataError, match=r"is not the official archive: its checksum is not md5:.*; move it away"):
        download("cifar10", sources.SOURCES["cifar10"], data_root / "downloads")
    assert theirs.read_text() == "mine"


@pytest.mark.parametrize("command", ["show", "views"])
def test_a_picture_of_the_users_is_not_replaced(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ("shapes.png" if command == "show" else "shapes-views.png")
    file.write_bytes(b"\x89PNG my holidays")
    refused("data", command, "shapes")
    assert file.read_bytes() == b"\x89PNG my holidays"
    assert f"{file.name} was not written by this version of marginlens, and is not replaced" in capsys.readouterr().err
    file.unlink()
    for _ in range(2):  # ours may be drawn again
        main(["data", command, "shapes"])


def test_an_archive_in_the_stores_own_folder_is_refused(data_root, cifar10, tmp_path):
    write("cifar10")
    archive = tar_of(cifar10[0], data_root / "cifar10" / "archive.tar.gz")
    with pytest.raises(DataError, match="overlap; give another name with --as, --from the files alone"):
        prepare("cifar10", archive)
    assert archive.exists()


WRITER = """
import sys
from tests.data.test_store import write
for i in range(15):
    write(seed=i % 2)
print("done", flush=True)
"""


def test_writers_and_readers_at_once(data_root):
    """Nobody meets a folder that is not empty, nor one that is not there: it is replaced 30 times meanwhile."""
    known = {write(seed=seed).fingerprint for seed in (0, 1)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert load("x").fingerprint in known
        assert store.exists("x")
        reads += 1
    for writer in writers:
        said, error = writer.communicate()
        assert (said, error, writer.returncode) == ("done\n", "", 0)
    assert reads > 5
    assert [p.name for p in data_root.iterdir()] == ["x"]


def test_a_reader_waits_between_two_renames(data_root, monkeypatch):
    write()
    aside = data_root / f".x.{disk._host()}.{files.unique()}.old"
    (data_root / "x").rename(aside)

    def sleep(seconds, slept=time.sleep):
        if aside.exists():
            aside.rename(data_root / "x")
        slept(seconds)

    monkeypatch.setattr(store.time, "sleep", sleep)
    assert open_data("x").name == "x"


def test_a_writer_that_was_killed_between_two_renames_is_not_waited_for_long(data_root, monkeypatch):
    write()
    (data_root / "x").rename(data_root / f".x.{disk._host()}.{files.unique()}.old")
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    with pytest.raises(DataError, match="there is no data set 'x'"):
        open_data("x")


@pytest.mark.parametrize("kind", ["images", "labels"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_byte_that_changed_is_noticed(data_root, kind, split):
    """At equal length, which no shape tells."""
    from marginlens.data.feed import open_feed

    write()
    assert open_feed("x", "cpu").name == "x"
    path = data_root / "x" / f"{split}-{kind}.npy"
    held = bytearray(path.read_bytes())
    held[-8] = (held[-8] + 1) % 3
    path.write_bytes(held)
    with pytest.raises(DataError, match="the data set x is damaged: its images or labels have changed since"):
        open_feed("x", "cpu")


@pytest.mark.parametrize("name", ["mean", "std", "classes", "name", "fingerprint"])
def test_a_record_that_was_changed_is_noticed(data_root, name):
    write()
    record = data_root / "x" / "store.json"
    known = json.loads(record.read_text())
    known[name] = {"mean": [0.1] * 3, "std": [0.1] * 3, "classes": ["c", "b", "a"]}.get(name, "ab" * 32)
    record.write_text(json.dumps(known))
    with pytest.raises(DataError, match=r"store\.json is damaged .*changed after it was written.*prepare x again"):
        store.read("x")


@pytest.mark.parametrize("what", ["content", "labels", "files", "sizes"])
def test_a_folder_that_changed_is_noticed(data_root, tmp_path, what):
    """The index when it is opened, each image when it is decoded: at equal length and size."""
    from marginlens.data.feed import open_feed

    tree_of_jpegs(tmp_path / "photos")
    index, _ = folder.prepare_folder(tmp_path / "photos", "pets")
    if what == "content":
        path = tmp_path / "photos" / index.splits["train"].files[1]
        held = bytearray(path.read_bytes())
        held[-30] ^= 1
        path.write_bytes(held)
    else:
        path = data_root / "pets" / f"train-{what}.{'txt' if what == 'files' else 'npy'}"
        held = path.read_bytes()
        path.write_bytes(
            held.replace(b"0.jpg", b"9.jpg", 1) if what == "files" else held[:-8] + bytes([held[-8] ^ 1]) + held[-7:]
        )
    with pytest.raises(DataError, match="has changed since"):
        list(open_feed("pets", "cpu", 0).plain("train", torch.arange(4), 8, 8, 4))


def test_how_long_it_takes_to_verify_cifar(data_root):
    """Under a second, once per run, for as many bytes as CIFAR has: here a tenth of them."""
    images = np.zeros((6_000, 3, 32, 32), np.uint8)
    found = store.write("big", {"train": [store.Batch(images, np.arange(6_000) % 10)]}, [str(i) for i in range(10)])
    begin = time.perf_counter()
    store.verify(found)
    assert time.perf_counter() - begin < 0.1


class Interrupted(BaseException):
    """A signal that comes at a bad moment."""


@pytest.mark.parametrize("how", [OSError(5, "Input/output error"), Interrupted()], ids=["a broken disk", "a signal"])
def test_a_replacement_that_fails_leaves_the_old_one(data_root, monkeypatch, how):
    """Between the two renames."""
    kept = write(seed=0).fingerprint
    rename = type(data_root).rename

    def broken(path, target):
        if path.name.endswith(".partial"):
            raise how
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(data_root), "rename", broken)
        with pytest.raises((DataError, Interrupted)):
            write(seed=1)
    assert store.read("x").fingerprint == kept
    assert [p.name for p in data_root.iterdir()] == ["x"]


def test_what_a_writer_left_that_was_killed_between_two_renames_is_put_back(data_root):
    kept = write(seed=0).fingerprint
    (data_root / "x").rename(data_root / f".x.{disk._host()}.999999999-0123abcd.old")
    with pytest.raises(DataError, match="there are no images"):
        store.write("x", {"train": []}, ["a"])
    assert store.read("x").fingerprint == kept


def test_a_process_number_that_is_none(data_root):
    data_root.mkdir()
    stray = data_root / f".x.{disk._host()}.99999999999999999999999-deadbeef.partial"
    stray.mkdir()
    write()
    assert not stray.exists()


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("marginlens.files.os.scandir", refuse)
    with pytest.raises(PermissionError):
        list(below(tmp_path))


@pytest.mark.parametrize("name", [".DS_Store", "._x", "Thumbs.db", ".nfs0000000000abcd"])
def test_litter_of_systems_does_not_block(data_root, name):
    write()
    (data_root / "x" / name).write_text("litter")
    write(seed=1)
    assert not (data_root / "x" / name).exists()


def test_another_kind_is_not_replaced(data_root, tmp_path):
    """Arrays that somebody wrote by hand are perhaps nowhere else."""
    tree_of_jpegs(tmp_path / "photos")
    kept = write("mine").fingerprint
    with pytest.raises(DataError, match="mine is a data set of arrays, and is not replaced"):
        folder.prepare_folder(tmp_path / "photos", "mine")
    assert store.read("mine").fingerprint == kept
    folder.prepare_folder(tmp_path / "photos", "pets")
    with pytest.raises(DataError, match="pets is an index of a folder of images, and is not replaced"):
        write("pets")


@pytest.mark.parametrize("kind", ["lengths", "digests"])
def test_an_index_that_lost_a_file_is_damaged(data_root, tmp_path, kind):
    tree_of_jpegs(tmp_path / "photos")
    folder.prepare_folder(tmp_path / "photos", "pets")
    (data_root / "pets" / f"train-{kind}.npy").unlink()
    with pytest.raises(DataError, match="pets is damaged: train has lost its lengths or digests"):
        folder.read_folder("pets")
