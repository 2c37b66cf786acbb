"""Folders of images: both trees, every kind of image, and views cropped during decoding."""

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from marginlens.data import folder as folders
from marginlens.data import store
from marginlens.data.folder import crop_file, prepare_folder, read_folder
from marginlens.data.images import decode
from marginlens.data.stream import kept_workers, middles, stream
from marginlens.data.views import make_view, strong, weak
from marginlens.errors import DataError
from tests.data.conftest import jpeg

PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def tree(tmp_path):
    """train and val with two classes, images of several sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                jpeg(tmp_path / "pets" / split / name / f"{i}.jpg", rng, size=(40 + 8 * i, 50))
    return tmp_path / "pets"


def test_a_tree_with_classes(tree):
    index, skipped = prepare_folder(tree, "pets")
    assert skipped == []
    assert index.classes == ("cat", "dog")
    assert index.splits["train"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert index.splits["test"].files == ("val/cat/0.jpg", "val/cat/1.jpg", "val/dog/0.jpg", "val/dog/1.jpg")
    assert index.splits["train"].sizes[1].tolist() == [48, 50]
    means = [decode(tree / f, f).mean((1, 2)) / 255 for f in index.splits["train"].files]
    np.testing.assert_allclose(index.mean, np.mean(means, axis=0), rtol=1e-9)
    again = read_folder("pets")
    assert again.fingerprint == index.fingerprint
    assert again.splits["train"].files == index.splits["train"].files
    assert np.array_equal(again.splits["test"].labels, index.splits["test"].labels)
    given, _ = prepare_folder(tree, "pets", mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    assert given.mean == (0.1, 0.2, 0.3)


def test_a_folder_without_labels(tmp_path):
    rng = np.random.default_rng(0)
    jpeg(tmp_path / "photos" / "b.jpg", rng)
    jpeg(tmp_path / "photos" / "deep" / "er" / "a.JPEG", rng)
    (tmp_path / "photos" / "notes.txt").write_text("not an image")
    (tmp_path / "photos" / ".hidden.jpg").write_text("not an image")
    jpeg(tmp_path / "photos" / ".trash" / "c.jpg", rng)
    jpeg(tmp_path / "photos" / "deep" / ".thumbnails" / "a.jpg", rng)
    index, _ = prepare_folder(tmp_path / "photos", "photos")
    assert index.splits["train"].files == ("b.jpg", "deep/er/a.JPEG")
    assert index.splits["train"].labels.tolist() == [-1, -1]
    assert index.classes == ()


def test_kinds_of_images(tmp_path):
    tmp_path /= "kinds"
    tmp_path.mkdir()
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    rgb = Image.fromarray(colour)
    files = {
        "grey.png": rgb.convert("L"),
        "cmyk.jpg": rgb.convert("CMYK"),
        "alpha.png": rgb.convert("RGBA"),
        "palette.png": rgb.convert("P"),
        "deep.png": Image.fromarray((colour[..., 0].astype(np.uint16) << 8) + 7),
        "plain.webp": rgb,
    }
    for name, image in files.items():
        image.save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
    frames = [Image.fromarray(np.full((6, 8, 3), v, np.uint8)) for v in (10, 200)]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    turned = rgb.getexif()
    turned[0x0112] = 6  # shown turned by 90 degrees
    rgb.save(tmp_path / "turned.png", exif=turned)
    for name in (*files, "moving.webp"):
        assert decode(tmp_path / name, name).shape == (3, 6, 8)
    assert np.array_equal(decode(tmp_path / "deep.png", "x"), np.stack([colour[..., 0]] * 3))
    assert np.array_equal(decode(tmp_path / "alpha.png", "x"), colour.transpose(2, 0, 1))
    assert (decode(tmp_path / "moving.webp", "x") == 10).all()
    assert np.array_equal(decode(tmp_path / "turned.png", "x"), np.rot90(colour, -1).transpose(2, 0, 1))
    index, _ = prepare_folder(tmp_path, "kinds")
    sizes = dict(zip(index.splits["train"].files, index.splits["train"].sizes.tolist(), strict=True))
    assert sizes["turned.png"] == [8, 6]


def test_undecodable_images_are_listed(tree):
    (tree / "train" / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (tree / "train" / "dog" / "empty.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 images .*train/cat/broken.jpg .*train/dog/empty.png.*--skip-bad"):
        prepare_folder(tree, "pets")
    index, skipped = prepare_folder(tree, "pets", skip_bad=True)
    assert len(index.splits["train"]) == 6
    assert [s.split(" ")[0] for s in skipped] == ["train/cat/broken.jpg", "train/dog/empty.png"]


def test_processes_find_what_one_finds(tmp_path):
    rng = np.random.default_rng(2)
    (tmp_path / "many").mkdir()
    for i in range(70):
        jpeg(tmp_path / "many" / f"{i}.jpg", rng, size=(8 + i % 3, 9))
    (tmp_path / "many" / "broken.jpg").write_bytes(b"\xff\xd8")
    alone, beside = (prepare_folder(tmp_path / "many", "m", workers=n, skip_bad=True) for n in (0, 2))
    assert alone[1] == beside[1]
    for name in ("mean", "std", "fingerprint"):
        assert getattr(alone[0], name) == getattr(beside[0], name)
    (one,), (other,) = (found[0].splits.values() for found in (alone, beside))
    assert one.files == other.files
    assert (one.sizes == other.sizes).all()
    with pytest.raises(ValueError, match="workers is -1"):
        prepare_folder(tmp_path / "many", "m", workers=-1)


def test_what_is_hidden_is_no_class(tree):
    for split in ("train", "val"):
        jpeg(tree / split / ".ipynb_checkpoints" / "0.jpg", np.random.default_rng(0))
    index, _ = prepare_folder(tree, "pets")
    assert index.classes == ("cat", "dog")
    assert len(index.splits["train"]) == 6


def test_links_are_followed_but_not_in_circles(tmp_path, tree):
    (tree / "train" / "cat").rename(tmp_path / "far")
    (tree / "train" / "cat").symlink_to(tmp_path / "far")
    jpeg(tmp_path / "more" / "9.jpg", np.random.default_rng(0))
    (tmp_path / "far" / "more").symlink_to(tmp_path / "more")
    index, _ = prepare_folder(tree, "pets")
    assert index.splits["train"].files[:4] == tuple(
        f"train/cat/{name}" for name in ("0.jpg", "1.jpg", "2.jpg", "more/9.jpg")
    )
    (tmp_path / "more" / "again").symlink_to(tmp_path / "far")
    with pytest.raises(DataError, match="again is a link to a folder that it is in; remove it"):
        prepare_folder(tree, "pets")


def test_a_folder_that_may_not_be_read_is_left_out(tmp_path, monkeypatch):
    for name in ("ok.jpg", "lost+found/a.jpg"):
        jpeg(tmp_path / "disk" / name, np.random.default_rng(0))
    look = folders.Path.iterdir

    def refuse(path):
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(folders.Path, "iterdir", refuse)
    assert prepare_folder(tmp_path / "disk", "disk")[0].splits["train"].files == ("ok.jpg",)


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "GIF", "PPM", "EPS", "ICO", "PCX", "TGA", "DDS", "AVIF"])
def test_other_formats_by_a_known_name_are_refused(tmp_path, kind, monkeypatch):
    """Pillow would hand PostScript to Ghostscript; none of the others is listed in the docs."""
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    (tmp_path / "odd").mkdir()
    image.save(tmp_path / "odd" / "a.png", format=kind)
    jpeg(tmp_path / "odd" / "b.jpg", np.random.default_rng(0))
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("another program was started"))
    with pytest.raises(DataError, match=r"a\.png \(it is not a JPEG, PNG or WebP image\)"):
        prepare_folder(tmp_path / "odd", "odd")
    index, skipped = prepare_folder(tmp_path / "odd", "odd", skip_bad=True)
    assert (index.splits["train"].files, len(skipped)) == (("b.jpg",), 1)
    with pytest.raises(DataError, match="it is not a JPEG, PNG or WebP image"):
        crop_file(tmp_path / "odd" / "a.png", (0, 0, 8, 8), 8)


@pytest.mark.parametrize("letter", ["\u2028", "\x85", "\x0c", "\r", "\t", "é", "\u200d"])
def test_names_come_back_as_they_were(tmp_path, letter):
    for name in (f"a{letter}b.jpg", "ok.jpg"):
        jpeg(tmp_path / "odd" / name, np.random.default_rng(0))
    index, _ = prepare_folder(tmp_path / "odd", "odd")
    assert read_folder("odd").splits["train"].files == index.splits["train"].files
    assert f"a{letter}b.jpg" in index.splits["train"].files


@pytest.mark.parametrize("name", [b"a\nb.jpg", b"caf\xe9.jpg"])
def test_names_that_cannot_come_back_are_refused(tmp_path, name):
    jpeg(tmp_path / "odd" / "ok.jpg", np.random.default_rng(0))
    shutil.copy(tmp_path / "odd" / "ok.jpg", os.path.join(os.fsencode(tmp_path / "odd"), name))
    with pytest.raises(DataError, match="has a name that cannot be kept in a list of names; rename it"):
        prepare_folder(tmp_path / "odd", "odd")


def test_a_class_of_which_nothing_is_left_is_refused(tree):
    for file in (tree / "train" / "dog").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="train: no image of the class 'dog' can be decoded"):
        prepare_folder(tree, "pets", skip_bad=True)


@pytest.mark.parametrize("size", [(20, 20), (90, 90), None])
def test_an_image_that_is_another_by_now_is_refused(tree, size):
    """Of another size, or of another content: its file is not as long as it was."""
    index, _ = prepare_folder(tree, "pets")
    size = size or tuple(index.splits["train"].sizes[1].tolist()[::-1])
    jpeg(tree / "train" / "cat" / "1.jpg", np.random.default_rng(0), size=size)
    asked = stream(index, "train", [weak(12, *PLAIN)], seed=0, epoch=0, batch=2, workers=0)
    with pytest.raises(DataError, match=r"1\.jpg has changed since its folder was prepared; prepare it again"):
        list(asked)
    with pytest.raises(DataError, match=r"1\.jpg has changed since its folder was prepared; prepare it again"):
        list(middles(index, "train", [0, 1], size=12, resize=14, batch=2, workers=0))


def test_an_index_of_an_older_version_is_read(tree):
    """Which did not know how long files are."""
    index, _ = prepare_folder(tree, "pets")
    record = store.root() / "pets" / "store.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "checksum"}))
    for kind in ("lengths", "digests"):
        for file in (store.root() / "pets").glob(f"*-{kind}.npy"):
            file.unlink()
    older = read_folder("pets")
    assert older.splits["train"].lengths is None
    assert older.fingerprint == index.fingerprint
    assert len(list(middles(older, "train", [0, 1], size=12, resize=14, batch=2, workers=0))) == 1


def test_bad_trees(tmp_path, tree):
    with pytest.raises(DataError, match="is not a folder"):
        prepare_folder(tmp_path / "nowhere", "x")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"has no images; .jpg, .jpeg, .png, .webp are read"):
        prepare_folder(tmp_path / "void", "x")
    (tmp_path / "void" / "train").mkdir()
    with pytest.raises(DataError, match="has no class folders"):
        prepare_folder(tmp_path / "void", "x")
    (tmp_path / "void" / "train" / "one").mkdir()
    with pytest.raises(DataError, match="has one class, 'one'; give the folder of images itself"):
        prepare_folder(tmp_path / "void", "x")
    for given in ({"std": (0.0, 1.0, 1.0)}, {"std": (math.nan, 1.0, 1.0)}, {"mean": (5.0, 0.5, 0.5)}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is .*; it must be numbers from"):
            prepare_folder(tree, "x", **given)
    (tree / "val" / "bird").mkdir()
    with pytest.raises(DataError, match=r"has a class 'bird' that .*train has not"):
        prepare_folder(tree, "x")
    (tree / "val" / "bird").rmdir()
    (tree / "train" / "ant").mkdir()
    with pytest.raises(DataError, match="ant has no images"):
        prepare_folder(tree, "x")


def test_a_crop_is_taken_at_decode_scale(tmp_path):
    """A JPEG whose crop has room to spare is decoded at a fraction, and looks the same."""
    rng = np.random.default_rng(0)
    jpeg(tmp_path / "big.jpg", rng, size=(512, 640))
    with Image.open(tmp_path / "big.jpg") as image:
        whole = image.convert("RGB")
    for top, left, height, width in ((0, 0, 512, 640), (100, 50, 300, 350), (17, 33, 40, 50)):
        ours = crop_file(tmp_path / "big.jpg", (top, left, height, width), 32).astype(float)
        box = (left, top, left + width, top + height)
        theirs = np.asarray(whole.resize((32, 32), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
        assert np.abs(ours - theirs).mean() < 1.0
        assert np.abs(ours - theirs).max() < 8
    with Image.open(tmp_path / "big.jpg") as image:
        assert folders.shrunk(image, 8.0) == 8.0
        assert image.size == (80, 64)
    with pytest.raises(DataError, match="is gone"):
        crop_file(tmp_path / "none.jpg", (0, 0, 1, 1), 4)


TURNS = {1: None} | dict(enumerate((0, 3, 1, 5, 2, 6, 4), start=2))
"""How an image is kept that is noted as turned, by EXIF's number: the transposition that EXIF's undoes."""


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(("height", "width", "top"), [(1000, 257, 743), (257, 1000, 0), (1000, 65, 930), (375, 500, 0)])
def test_a_crop_lies_where_it_would_in_the_whole_image(tmp_path, height, width, top, turn):
    """Where a side is no multiple of what the decoder shrinks by; red and green tell where a pixel comes from."""
    side = min(height, width)
    left = 0 if top else width - side
    ramp = np.zeros((height, width, 3), dtype=np.uint8)
    ramp[..., 0] = np.linspace(0, 255, height)[:, None]
    ramp[..., 1] = np.linspace(0, 255, width)
    kept = Image.fromarray(ramp)
    kept = kept if TURNS[turn] is None else kept.transpose(TURNS[turn])
    exif = Image.Exif()
    exif[0x0112] = turn
    kept.save(tmp_path / "ramp.jpg", quality=98, exif=exif)
    with Image.open(tmp_path / "ramp.jpg") as image:
        assert np.abs(np.asarray(ImageOps.exif_transpose(image)).astype(float) - ramp).max() < 8
    ours = crop_file(tmp_path / "ramp.jpg", (top, left, side, side), 8).astype(float)
    box = (left, top, left + side, top + side)
    theirs = np.asarray(Image.fromarray(ramp).resize((8, 8), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
    assert np.abs(ours - theirs).max() < 4


def test_a_program_ends_though_it_holds_a_stream(pngs):
    """By an exception's traceback, say. Its workers do not hear what multiprocessing sends them at the end."""
    script = (
        "from marginlens.data.folder import read_folder; from marginlens.data.stream import stream\n"
        "from marginlens.data.views import View\n"
        "if __name__ == '__main__':\n"
        "    held = stream(read_folder('p'), 'train', [View(8)], seed=0, epoch=0, batch=2, workers=1)\n"
        "    print(len(next(held).indices))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_script_needs_no_guard(tmp_path, monkeypatch):
    """Workers do not run it again, though it is a file that they could import."""
    (tmp_path / "many").mkdir()
    for i in range(70):
        Image.new("RGB", (9, 9), (i, i, i)).save(tmp_path / "many" / f"{i}.png")
    (tmp_path / "script.py").write_text(
        "print('begun')\n"
        "from pathlib import Path\n"
        "from marginlens.data.folder import prepare_folder; from marginlens.data.stream import stream\n"
        "from marginlens.data.views import View\n"
        f"index, _ = prepare_folder(Path({str(tmp_path / 'many')!r}), 'many')\n"
        "views = stream(index, 'train', [View(8)], seed=0, epoch=0, batch=40, workers=1)\n"
        "print([len(part.indices) for part in views])\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert (done.stdout, done.stderr) == ("begun\n[40, 30]\n", "")


@pytest.mark.slow
def test_a_script_with_a_guard_is_imported_as_ever(tmp_path):
    """So what it sets at its top, and its own kinds of view, are there in the workers; in threads, too."""
    (tmp_path / "few").mkdir()
    for i in range(6):
        jpeg(tmp_path / "few" / f"{i}.jpg", np.random.default_rng(i))
    cut = tmp_path / "few" / "0.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "script.py").write_text(
        "from pathlib import Path; from threading import Thread\n"
        "from PIL import ImageFile\n"
        "from marginlens.data.folder import prepare_folder; from marginlens.data.stream import stream\n"
        "from marginlens.data.views import View\n"
        "ImageFile.LOAD_TRUNCATED_IMAGES = True\n"
        "class Mine(View): pass\n"
        "def go():\n"
        "    views = stream(index, 'train', [Mine(8)], seed=0, epoch=0, batch=4, workers=1)\n"
        "    print([len(part.indices) for part in views])\n"
        "if __name__ == '__main__':\n"
        f"    index, _ = prepare_folder(Path({str(tmp_path / 'few')!r}), 'few')\n"
        "    thread = Thread(target=go); thread.start(); thread.join(); go()\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert (done.stdout, done.stderr) == ("[4, 2]\n[4, 2]\n", "")


@pytest.fixture
def pngs(tmp_path):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (9, 3, 24, 20), dtype=np.uint8)
    (tmp_path / "p").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "p" / f"{i}.png")
    index, _ = prepare_folder(tmp_path / "p", "p")
    return index, torch.from_numpy(images)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_views_are_the_same_views(pngs, workers):
    """As from memory, but for the 8 bits that a crop is rounded to on its way from the worker."""
    index, images = pngs
    views = (weak(12, *PLAIN), strong(12, *PLAIN))
    order = [4, 1, 8, 0, 3]
    seen = []
    for indices, (first, second) in stream(
        index, "train", views, seed=3, epoch=2, batch=2, order=order, workers=workers
    ):
        seen += indices.tolist()
        want = [make_view(images[indices], indices, v, 3, 2, number) for number, v in enumerate(views)]
        assert (first - want[0]).abs().max() < 1.01 / 255
        assert (second - want[1]).abs().mean() < 1.5 / 255
    assert seen == order


@pytest.mark.slow
def test_workers_wait_for_the_next_pass(pngs):
    """And see its epoch and its order; what is asked otherwise, or ended early, has workers of its own."""
    index, _ = pngs

    def asked(epoch, **other):
        chosen = {"seed": 3, "batch": 4, "order": [epoch, 7, 5, 2, 8], "workers": 1} | other
        return stream(index, "train", [strong(12, *PLAIN)], epoch=epoch, **chosen)

    def at_work():
        return {process.pid for process in multiprocessing.active_children()} - before

    before = set()
    before = at_work()
    with kept_workers():
        first = set()
        for epoch in (0, 1):
            for ours, theirs in zip(list(asked(epoch)), list(asked(epoch, workers=0)), strict=True):
                assert torch.equal(ours.indices, theirs.indices)
                assert torch.equal(ours.views[0], theirs.views[0])
            first = first or at_work()
            assert len(first) == 1
            assert at_work() == first
        list(asked(2, seed=4))
        (second,) = at_work()
        assert {second} != first
        held = asked(3, seed=4)
        next(held)
        assert at_work() == {second}
        held.close()
        assert not at_work()
        list(asked(2))
        assert len(at_work()) == 1
    assert not at_work()


def test_streams_that_make_no_sense(pngs):
    index, _ = pngs
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        next(stream(index, "test", [weak(12, *PLAIN)], seed=0, epoch=0, batch=2))
    with pytest.raises(DataError, match="only the resized crop can be streamed"):
        next(stream(index, "train", [weak(12, *PLAIN, crop="padded")], seed=0, epoch=0, batch=2))
