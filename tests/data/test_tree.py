"""How a folder of images becomes classes and splits: each layout is read, or refused in one line."""

import json
import math
import shutil

import numpy as np
import pytest
from PIL import Image

from marginlens.cli import main
from marginlens.data import store
from marginlens.data.disk import checksum
from marginlens.data.feed import open_feed
from marginlens.data.folder import index_folder, prepare_folder, read_folder
from marginlens.data.tree import held_back
from marginlens.errors import DataError

COLOURS = iter(range(1 << 24))


def image(path, colour=None):
    """A small image that no other test file equals, unless its colour is given."""
    number = next(COLOURS) if colour is None else colour
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8), (number >> 16, (number >> 8) & 255, number & 255)).save(path)


def photos(folder, **counts):
    """Make folders of images by their names and numbers of images."""
    for name, count in counts.items():
        for i in range(count):
            image(folder / name / f"{i}.png")
    return folder


def read(path, **how):
    index, _ = index_folder(path, "x", workers=0, **how)
    return index


def said(index):
    return "\n".join(index.notes)


def by_class(index, split):
    part = index.splits[split]
    return {name: int((part.labels == label).sum()) for label, name in enumerate(index.classes)}


def prepare(capsys, *words):
    main(["data", "prepare", "folder", "--workers", "0", *map(str, words)])
    return capsys.readouterr().out


def test_each_folder_is_a_class_and_a_fifth_is_kept_back(tmp_path, capsys):
    photos(tmp_path / "photos", cat=10, dog=5, fish=20)
    out = prepare(capsys, "--from", tmp_path / "photos")
    assert "3 classes, one for each folder: cat, dog, fish\n" in out
    assert "kept back as test images: 7 of 35, a share of 0.2 of each class\n" in out
    assert f"photos: 28 train, 7 test in {store.root() / 'photos'}\n" in out
    index = read_folder("photos")
    assert index.classes == ("cat", "dog", "fish")
    assert by_class(index, "train") == {"cat": 8, "dog": 4, "fish": 16}
    assert by_class(index, "test") == {"cat": 2, "dog": 1, "fish": 4}
    for part in index.splits.values():
        assert [index.classes[label] for label in part.labels] == [file.split("/")[0] for file in part.files]
    assert not set(index.splits["train"].files) & set(index.splits["test"].files)
    assert (index.test_share, open_feed("photos", "cpu", 0).fingerprint) == (0.2, index.fingerprint)


@pytest.mark.parametrize(("share", "kept"), [(0.5, 5), (0.01, 1), (0.99, 9), (0.26, 3)])
def test_the_share_can_be_set_and_leaves_one_of_each_class_on_either_side(tmp_path, share, kept):
    index = read(photos(tmp_path, cat=10, dog=10), test_share=share)
    assert by_class(index, "test") == {"cat": kept, "dog": kept}
    assert by_class(index, "train") == {"cat": 10 - kept, "dog": 10 - kept}


def test_no_test_images_if_the_share_is_0(tmp_path, capsys):
    photos(tmp_path / "photos", cat=3, dog=3)
    found = json.loads(prepare(capsys, "--from", tmp_path / "photos", "--test-share", 0, "--json"))
    assert (found["splits"], found["classes"], found["skipped"]) == ({"train": 6}, ["cat", "dog"], [])
    assert found["notes"] == ["2 classes, one for each folder: cat, dog"]


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_a_share_out_of_range_is_refused(tmp_path, share):
    with pytest.raises(ValueError, match=f"test_share is {share:g}; it must be at least 0.* and below 1"):
        read(photos(tmp_path, cat=2, dog=2), test_share=share)


def test_the_choice_is_the_same_for_other_names_another_order_and_copies(tmp_path):
    photos(tmp_path / "one", cat=12, dog=12)
    first = read(tmp_path / "one")
    for name in ("cat", "dog"):
        for file in sorted((tmp_path / "one" / name).iterdir()):
            (tmp_path / "other" / f"a {name}").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "other" / f"a {name}" / f"{99 - int(file.stem)}.png")
    other = read(tmp_path / "other")
    for split in ("train", "test"):
        contents = [{bytes(row) for row in index.splits[split].digests} for index in (first, other)]
        assert contents[0] == contents[1]
    copied = first.path / first.splits["test"].files[0]
    shutil.copy(copied, copied.with_name("copy.png"))
    assert {"copy.png", copied.name} <= {file.split("/")[1] for file in read(tmp_path / "one").splits["test"].files}


def test_a_share_of_each_class_is_held_whatever_the_others_have():
    contents = [f"{i:02d}" for i in range(12)]
    assert held_back(contents, [0] * 10 + [1] * 2, 0.2) == {"00", "01", "10"}
    assert held_back(["a"] * 6, [0] * 6, 0.5) == set()


def test_the_fingerprint_tells_splits_and_labels_apart(tmp_path):
    photos(tmp_path / "two", cat=6, dog=6)
    found = [read(tmp_path / "two", test_share=share).fingerprint for share in (None, 0.2, 0.0, 0.4)]
    assert found[0] == found[1]
    photos(tmp_path / "one", cat=6)
    for name in ("cat", "dog"):
        shutil.copytree(tmp_path / "two" / name, tmp_path / "flat" / "all" / name)
    assert len({*found, read(tmp_path / "flat").fingerprint}) == 4


def test_a_flat_folder_has_no_labels_and_says_so(tmp_path, capsys):
    for i in range(3):
        image(tmp_path / "photos" / f"{i}.png")
    out = prepare(capsys, "--from", tmp_path / "photos")
    assert "without labels: all images are in one folder; put each class into a folder of its own" in out
    assert "photos: 3 train in " in out
    assert read_folder("photos").classes == ()


def test_images_beside_the_folders_make_it_unlabelled(tmp_path):
    photos(tmp_path, cat=2, dog=2)
    image(tmp_path / "cover.png")
    index = read(tmp_path)
    assert (index.classes, len(index.splits["train"]), list(index.splits)) == ((), 5, ["train"])
    assert "without labels: there are images beside the folders (cover.png); move them into folders" in said(index)


def test_one_folder_alone_is_no_class(tmp_path):
    index = read(photos(tmp_path / "a", cat=3))
    assert index.classes == ()
    assert "all images are in one folder, cat; a second class needs a folder beside it" in said(index)
    photos(tmp_path / "b" / "inner", cat=3, dog=3)
    index = read(tmp_path / "b")
    assert index.classes == ()
    assert f"all images are in inner; give {tmp_path / 'b' / 'inner'} itself to get classes" in said(index)


def test_deeper_folders_belong_to_their_class(tmp_path):
    photos(tmp_path, cat=2, dog=2)
    image(tmp_path / "cat" / "2024" / "may" / "a.png")
    index = read(tmp_path, test_share=0.0)
    assert by_class(index, "train") == {"cat": 3, "dog": 2}
    assert "deeper folders belong to the class that they are in: cat/2024/may" in said(index)


def test_hidden_folders_and_folders_without_images_are_no_classes(tmp_path):
    photos(tmp_path, cat=2, dog=2, **{".thumbnails": 2})
    image(tmp_path / "cat" / ".trash" / "a.png")
    (tmp_path / "fish").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.txt").write_text("no image")
    index = read(tmp_path)
    assert (index.classes, sum(map(len, index.splits.values()))) == (("cat", "dog"), 4)
    assert "skipped, without an image: fish, notes" in said(index)
    assert "thumbnails" not in said(index)


def test_a_class_of_one_image_keeps_it_for_training(tmp_path):
    index = read(photos(tmp_path, cat=5, dog=1))
    assert by_class(index, "train") == {"cat": 4, "dog": 1}
    assert by_class(index, "test") == {"cat": 1, "dog": 0}
    assert "only one image, so none to test on: dog" in said(index)
    assert list(read(photos(tmp_path / "few", cat=1, dog=1)).splits) == ["train"]


def test_copies_that_leave_a_class_without_images_are_refused(tmp_path):
    for i in range(4):
        image(tmp_path / "cat" / f"{i}.png", colour=i)
        image(tmp_path / "dog" / f"{i}.png", colour=9 + i)
    test = read(tmp_path).splits["test"].files
    for file in (tmp_path / "dog").iterdir():
        file.unlink()
    shutil.copy(tmp_path / next(file for file in test if file.startswith("cat")), tmp_path / "dog" / "0.png")
    with pytest.raises(DataError, match="every image of the class 'dog' is also in another class; remove the copies"):
        read(tmp_path)


def test_a_class_whose_images_are_all_broken_is_refused(tmp_path):
    photos(tmp_path, cat=2, dog=2)
    for file in (tmp_path / "dog").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="no image of the class 'dog' can be decoded"):
        read(tmp_path, skip_bad=True)


def test_splits_made_by_hand_stay(tmp_path):
    for split in ("train", "val"):
        photos(tmp_path / split, cat=4, dog=4)
    index = read(tmp_path)
    assert (by_class(index, "train"), by_class(index, "test")) == ({"cat": 4, "dog": 4}, {"cat": 4, "dog": 4})
    assert (index.notes, index.test_share) == ((), 0.0)
    with pytest.raises(DataError, match=r"test_share is 0\.2, and .* has test images of its own in val/; leave it out"):
        read(tmp_path, test_share=0.2)
    shutil.rmtree(tmp_path / "val")
    assert list(read(tmp_path).splits) == ["train"]
    assert by_class(read(tmp_path, test_share=0.25), "test") == {"cat": 1, "dog": 1}


def test_a_class_may_be_called_train(tmp_path):
    index = read(photos(tmp_path, bus=3, car=3, train=3))
    assert index.classes == ("bus", "car", "train")


def test_images_without_labels_have_none_to_keep_back(tmp_path):
    image(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"test_share is 0\.2, and .* is without labels: all images are in one folder"):
        read(tmp_path, test_share=0.2)
    assert read(tmp_path, test_share=0.0).classes == ()


def test_an_index_of_an_older_version_stays_without_labels(tmp_path):
    """Older versions read folders of classes without labels, and recorded no share."""
    photos(tmp_path / "photos" / "all", cat=2, dog=2)
    index, _ = prepare_folder(tmp_path / "photos", "photos", workers=0)
    path = store.root() / "photos" / "store.json"
    record = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("test_share", "skipped", "checksum")}
    path.write_text(json.dumps(record | {"checksum": checksum(record)}))
    older = read_folder("photos")
    assert (older.classes, older.test_share, older.skipped) == ((), 0.0, ())
    assert open_feed("photos", "cpu", 0).fingerprint == index.fingerprint


@pytest.mark.parametrize("odd", [{"test_share": 1.0}, {"test_share": "all"}, {"skipped": [3]}, {"given": [1, "x"]}])
def test_a_record_with_odd_values_is_refused(tmp_path, odd):
    prepare_folder(photos(tmp_path / "photos", cat=2, dog=2), "photos", workers=0)
    path = store.root() / "photos" / "store.json"
    record = {k: v for k, v in (json.loads(path.read_text()) | odd).items() if k != "checksum"}
    path.write_text(json.dumps(record | {"checksum": checksum(record)}))
    with pytest.raises(DataError, match=r"is damaged.*prepare"):
        read_folder("photos")


def test_the_share_is_for_a_folder_alone(capsys):
    with pytest.raises(SystemExit):
        main(["data", "prepare", "shapes", "--test-share", "0.2"])
    assert "--test-share" in capsys.readouterr().err


def test_the_moments_are_those_of_the_images_to_learn_from(tmp_path):
    index = read(photos(tmp_path, cat=5, dog=5), test_share=0.4)
    pixels = [np.asarray(Image.open(tmp_path / file)).mean((0, 1)) / 255 for file in index.splits["train"].files]
    np.testing.assert_allclose(index.mean, np.mean(pixels, axis=0), rtol=1e-9)
