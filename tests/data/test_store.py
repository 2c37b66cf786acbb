"""A store exists whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from marginlens import files
from marginlens.data import disk, store
from marginlens.data.store import Batch
from marginlens.errors import DataError


def batches(count, seed=0, classes=3, part=4):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 3, 5, 6), dtype=np.uint8)
    labels = np.arange(count) % classes
    return [Batch(images[i : i + part], labels[i : i + part]) for i in range(0, count, part)]


def write(name="x", seed=0, folder=None):
    return store.write(name, {"train": batches(10, seed), "test": batches(4, seed + 1)}, ["a", "b", "c"], folder)


def test_written_and_read_back():
    written = write()
    found = store.read("x")
    assert found.size == (5, 6)
    assert found.classes == ("a", "b", "c")
    assert np.array_equal(found.splits["train"].images, np.concatenate([b.images for b in batches(10)]))
    assert isinstance(found.splits["train"].images, np.memmap)
    images, labels = found.splits["train"].to("cpu")
    assert images.shape == (10, 3, 5, 6)
    assert labels.tolist() == [0, 1, 2] * 3 + [0]
    assert written.fingerprint == found.fingerprint


def test_the_fingerprint_is_of_the_content():
    one = write().fingerprint
    assert write("other").fingerprint == one
    assert write("x", seed=5).fingerprint != one
    pieces = store.write("y", {"train": batches(10, part=3), "test": batches(4, 1)}, ["a", "b", "c"])
    assert pieces.fingerprint == one
    assert store.write("z", {"train": batches(10), "test": batches(4, 1)}, ["a", "b", "d"]).fingerprint != one


@pytest.mark.parametrize("kind", [np.uint8, np.int32, list])
def test_whole_numbers_of_any_kind_are_labels(kind):
    given = {"train": [Batch(b.images, list(b.labels) if kind is list else b.labels.astype(kind)) for b in batches(4)]}
    found = store.write("x", given, ["a", "b", "c"])
    assert found.splits["train"].labels.dtype == np.int64
    assert found.fingerprint == store.write("y", {"train": batches(4)}, ["a", "b", "c"]).fingerprint


def test_a_second_writing_replaces_the_first(data_root):
    write()
    second = write(seed=5)
    assert store.read("x").fingerprint == second.fingerprint
    assert sorted(p.name for p in data_root.iterdir()) == ["x"]


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("at", range(1, 5))
def test_what_is_read_while_another_is_written_is_of_one_writing(monkeypatch, at, gone):
    """Whichever of its files is opened when it is replaced, and though one is gone for a moment."""
    kept, opened, array = write(seed=0).fingerprint, [], store.array

    def replaced(path, shape, kind, **more):
        opened.append(path)
        if len(opened) == at:
            write(seed=0)
        if len(opened) == at + 1 and gone:
            path.unlink()
            try:
                return array(path, shape, kind, **more)
            finally:
                write(seed=0)
        return array(path, shape, kind, **more)

    write(seed=1)
    monkeypatch.setattr(store, "array", replaced)
    found = store.read("x")
    assert found.fingerprint == kept
    for split, count, seed in (("train", 10, 0), ("test", 4, 1)):
        images = np.concatenate([b.images for b in batches(count, seed)])
        assert np.array_equal(found.splits[split].images, images)


@pytest.mark.parametrize(
    ("splits", "line"),
    [
        (
            {"train": [Batch(np.zeros((2, 3, 4, 4), np.uint8), np.array([0, 3]))]},
            "label 3 is out of range; there are 3",
        ),
        ({"train": [Batch(np.zeros((1, 3, 4, 4), np.uint8), np.array([-2]))]}, "label -2 is out of range"),
        ({"train": []}, "train: there are no images"),
        (
            {"train": [*batches(4), Batch(np.zeros((1, 3, 9, 9), np.uint8), np.array([0]))]},
            r"images of \(9, 9\) among images of \(5, 6\)",
        ),
        (
            {"train": [Batch(np.full((2, 3, 4, 4), 0.5), np.array([0, 1]))]},
            r"images are float64 \(2, 3, 4, 4\); they must be uint8 \(n, 3, height, width\)",
        ),
        ({"train": [Batch(np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1]))]}, r"images are uint8 \(2, 4, 4, 3\)"),
        ({"train": [Batch(np.zeros((2, 3, 4), np.uint8), np.array([0, 1]))]}, r"images are uint8 \(2, 3, 4\)"),
        (
            {"train": [Batch(np.zeros((3, 3, 4, 4), np.uint8), np.array([0, 1])), *batches(4)]},
            r"3 images with labels int64 \(2,\); each image must have a whole number, or -1",
        ),
        ({"train": [Batch(np.zeros((2, 3, 4, 4), np.uint8), np.array([0.0, 1.0]))]}, "with labels float64"),
        ({"train": [Batch(np.zeros((2, 3, 4, 4), np.uint8), np.array([False, True]))]}, "with labels bool"),
        (
            {"train": [Batch(np.zeros((2, 3, 4, 4), np.uint8), np.array([0, 2**64 - 1], np.uint64))]},
            "label 18446744073709551615 is out of range",
        ),
    ],
)
def test_bad_content_leaves_nothing(splits, line, data_root):
    with pytest.raises(DataError, match=line):
        store.write("x", splits, ["a", "b", "c"])
    assert list(data_root.iterdir()) == []


def test_damaged_stores_are_refused_by_name(data_root):
    write()
    record = data_root / "x" / "store.json"
    good = record.read_text()
    for content, line in (
        ("{", "store.json is damaged"),
        ("[]", "another version"),
        (json.dumps(json.loads(good) | {"format": 99}), "another version"),
        (good.replace("[\n    10,", "[\n    11,"), "it was changed after it was written"),
        (older(good.replace("[\n    10,", "[\n    11,").replace("[\n    10\n", "[\n    11\n")), "its record says"),
    ):
        record.write_text(content)
        with pytest.raises(DataError, match=line):
            store.read("x")
    record.write_text(good)
    labels = data_root / "x" / "train-labels.npy"
    kept = labels.read_bytes()
    for wrong in (b"zzzz", b"\xfe\xff\xff\xff"):
        labels.write_bytes(kept[:-8] + wrong + kept[-4:])
        with pytest.raises(DataError, match=r"train-labels.npy is damaged: .*; prepare x again"):
            store.read("x")
    labels.write_bytes(kept)
    images = data_root / "x" / "train-images.npy"
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"train-images.npy cannot be read"):
        store.read("x")
    images.write_bytes(b"junk")
    with pytest.raises(DataError, match=r"train-images.npy cannot be read"):
        store.read("x")
    images.unlink()
    with pytest.raises(DataError, match=r"train-images.npy cannot be read"):
        store.read("x")


def older(record):
    """The record as an older version wrote it, which had no checksum."""
    return json.dumps({name: value for name, value in json.loads(record).items() if name != "checksum"})


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*set MARGINLENS_DATA to another folder"):
        write(folder=tmp_path / "file" / "below")


def test_no_space_left(data_root, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "flush", full)
    with pytest.raises(DataError, match=r"cannot write x to .*No space left on device"):
        write()
    assert list(data_root.iterdir()) == []


SLOW_WRITER = """
import sys, time
from tests.data.test_store import batches
from marginlens.data import store
def slowly():
    for batch in batches(40):
        print("wrote", flush=True)
        time.sleep(0.05)
        yield batch
store.write("x", {"train": slowly(), "test": batches(4, 1)}, ["a", "b", "c"])
print("done", flush=True)
"""


def start():
    return subprocess.Popen([sys.executable, "-c", SLOW_WRITER], stdout=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_no_store(data_root):
    writer = start()
    for _ in range(4):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not store.exists("x")
    leftover = list(data_root.iterdir())
    assert len(leftover) == 1
    assert leftover[0].name.endswith(".partial")
    with pytest.raises(DataError, match="x is not prepared"):
        store.read("x")
    write()
    assert [p.name for p in data_root.iterdir()] == ["x"]


def test_two_preparations_at_once(data_root):
    writers = [start(), start()]
    for writer in writers:
        writer.stdout.readline()
    seen = set()
    while any(w.poll() is None for w in writers):
        if store.exists("x"):
            try:
                seen.add(store.read("x").fingerprint)
            except DataError:  # between the two renames of a replacement
                continue
        time.sleep(0.005)
    assert all(w.communicate()[0].endswith("done\n") for w in writers)
    seen.add(store.read("x").fingerprint)
    assert len(seen) == 1
    assert [p.name for p in data_root.iterdir()] == ["x"]


def test_the_living_are_not_swept_up(data_root):
    with disk.partial(data_root, "x") as mine:
        write()
        assert mine.is_dir()


def test_a_file_is_delivered_where_a_link_leads(tmp_path):
    real, link = tmp_path / "there" / "real.md", tmp_path / "link.md"
    real.parent.mkdir()
    link.symlink_to("there/real.md")
    for content in (b"new", b"newer"):  # the link dangles at first
        files.deliver(link, content)
        assert link.is_symlink()
        assert real.read_bytes() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.md", "real.md", "there"]


def test_a_record_takes_the_place_of_a_link(tmp_path):
    """What it leads to is not ours."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"theirs")
    link.symlink_to(real)
    files.put(link, b"ours")
    assert (link.is_symlink(), link.read_bytes(), real.read_bytes()) == (False, b"ours", b"theirs")


def test_a_file_is_delivered_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.deliver(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_log_that_is_open_is_gone_on_with(name, tmp_path):
    """`>> log`: its name is not taken by another file."""
    log, way = tmp_path / "log", tmp_path / "way"
    log.write_bytes(b"before\n")
    way.symlink_to(name)
    code = f"from pathlib import Path; from marginlens import files; files.deliver(Path({str(way)!r}), b'new')"
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_bytes() == b"before\nnew"


def test_what_is_printed_around_it_is_neither_lost_nor_written_over(tmp_path):
    """`> file`, which has a place of its own for whoever opens it anew."""
    code = "from pathlib import Path; from marginlens import files; print('one')\n"
    code += "files.deliver(Path('/dev/stdout'), b'two\\n'); print('three')"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "file").read_text() == "one\ntwo\nthree\n"


def test_standard_output_may_be_closed(tmp_path):
    code = "from pathlib import Path; from marginlens import files; files.deliver(Path('/dev/stderr'), b'said')"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run(["sh", "-c", f'exec "$0" -c "{code}" >&-', sys.executable], stderr=file, check=True)
    assert (tmp_path / "file").read_text() == "said"
