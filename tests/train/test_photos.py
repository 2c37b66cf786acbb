"""A folder of images is learned from as it lies there: prepared by itself, known by a name, at a size that suits it."""

import json
import re

import numpy as np
import pytest

import marginlens as ml
from marginlens.cli import main
from marginlens.data import prepare, store
from marginlens.data.folder import read_folder
from marginlens.errors import DataError
from marginlens.nets.resnet import default_stem
from marginlens.runs.config import SIDES, Pretrain, at_hand, choose_size, identify
from tests.data.conftest import jpeg
from tests.train.conftest import words

QUICK = {"encoder": "tiny", "hidden": 8, "out": 8, "batch": 4, "epochs": 1}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory, and a data folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    return tmp_path / "here"


def photos(folder, count=5, names=("cat", "dog"), size=(20, 24), seed=0):
    rng = np.random.default_rng(seed)
    for name in names:
        for i in range(count):
            jpeg(folder / name / f"{i}.jpg", rng, size=size)
    return folder


def quick(**more):
    return Pretrain(**(QUICK | {"size": 8} | more))


def pretrain(capsys, **more):
    main([*words(**({"limit": 0, "batch": 4, "epochs": 1, "runs": "runs", "workers": 0} | more)), "--json"])
    said = capsys.readouterr()
    return ml.open_run(json.loads(said.out)["run"]), said.err


def test_a_folder_is_prepared_and_known_by_its_name(here, capsys):
    photos(here / "photos")
    run, said = pretrain(capsys, data="./photos")
    assert "2 classes, one for each folder: cat, dog\n" in said
    assert "kept back as test images: 2 of 10" in said
    assert "./photos is now the data set photos: 8 train, 2 test\n" in said
    assert run.settings.data == "photos"
    assert run.data == read_folder("photos").fingerprint
    assert (run.result.images, "knn" in run.result.plain()) == (8, True)
    again, said = pretrain(capsys, data="./photos")
    assert again.path == run.path
    assert "./photos is prepared already, as photos\n" in said
    assert "already complete" in said
    assert pretrain(capsys, data="photos")[0].path == run.path


def test_the_same_from_python_and_by_hand_is_the_same_run(here, capsys):
    photos(here / "photos")
    ours = ml.pretrain(quick(data="./photos"), runs="one", workers=0, quiet=True)
    main(["data", "prepare", "folder", "--from", "photos", "--workers", "0"])
    by_hand = ml.pretrain(quick(data="photos"), runs="two", workers=0, quiet=True)
    assert (ours.id, ours.path.name) == (by_hand.id, by_hand.path.name)
    assert identify(ours.settings, ours.data) == ours.id
    assert ml.probe(ours, ml.Probe(epochs=1, batch=2), workers=0, quiet=True)["test_images"] == 2
    assert capsys.readouterr().err == ""


def test_a_name_and_settings_given_by_hand_are_kept(here, capsys):
    folder = photos(here / "photos")
    options = ["--as", "pets", "--test-share", "0.4", "--mean", "0.5", "0.5", "0.5", "--workers", "0"]
    main(["data", "prepare", "folder", "--from", "photos", *options])
    before = read_folder("pets")
    assert prepare.ready("./photos", 0).name == "pets"
    jpeg(folder / "cat" / "new.jpg", np.random.default_rng(9))
    assert "./photos is now the data set pets: 7 train, 4 test" in prepare.ready("./photos", 0).notes
    after = read_folder("pets")
    assert (after.test_share, after.mean, store.names()) == (0.4, (0.5, 0.5, 0.5), ["pets"])
    assert after.fingerprint != before.fingerprint


def test_images_that_were_skipped_by_hand_are_skipped_again(here):
    photos(here / "photos")
    (here / "photos" / "cat" / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 image below .*cat/bad\.jpg.*--from .*photos --skip-bad"):
        prepare.ready("./photos", 0)
    assert store.names() == []
    main(["data", "prepare", "folder", "--from", "photos", "--skip-bad", "--workers", "0"])
    assert prepare.ready("./photos", 0).notes == ("./photos is prepared already, as photos",)


@pytest.mark.parametrize("change", ["add", "remove", "move", "rewrite"])
def test_a_folder_that_changed_is_prepared_again(here, change):
    folder = photos(here / "photos")
    before = prepare.ready("./photos", 0)
    assert "is now the data set photos" in before.notes[-1]
    file = folder / "cat" / "0.jpg"
    if change == "add":
        jpeg(folder / "cat" / "9.jpg", np.random.default_rng(9))
    elif change == "remove":
        file.unlink()
    elif change == "move":
        file.rename(folder / "dog" / "9.jpg")
    else:
        jpeg(file, np.random.default_rng(9), size=(30, 40))
    assert "is now the data set photos" in prepare.ready("./photos", 0).notes[-1]
    assert prepare.ready("./photos", 0).notes == ("./photos is prepared already, as photos",)


def test_a_folder_that_lost_its_classes_is_prepared_again_without(here):
    folder = photos(here / "photos")
    prepare.ready("./photos", 0)
    jpeg(folder / "cover.jpg", np.random.default_rng(9))
    assert "without labels: there are images beside the folders" in prepare.ready("./photos", 0).notes[0]
    assert read_folder("photos").classes == ()


def test_folders_of_one_name_get_names_of_their_own(here):
    photos(here / "a" / "photos")
    photos(here / "b" / "photos", seed=1)
    first, other = (prepare.ready(f"{name}/photos", 0).name for name in "ab")
    assert first == "photos"
    assert re.fullmatch("photos-[0-9a-f]{6}", other)
    assert read_folder("photos").path == (here / "a" / "photos").resolve()
    assert [prepare.ready(f"{name}/photos", 0).name for name in "ab"] == [first, other]
    (here / "a").rename(here / "moved")
    assert prepare.ready("moved/photos", 0).name == "photos"  # the same images


@pytest.mark.parametrize("name", ["cifar10", "-x", ".hidden", "folder", "downloads", "~me", "my  pics+2"])
def test_a_folder_whose_name_would_mean_something_else(here, name):
    photos(here / name)
    found = prepare.ready(f"./{name}", 0).name
    assert found in ("images", "x", "hidden", "me", "my-pics-2")
    assert prepare.open_data(found).path == (here / name).resolve()


def test_a_name_is_that_of_the_data_set_first(here, capsys, prepared, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(prepared))
    photos(here / "little")
    run, said = pretrain(capsys, data="little", limit=8)
    assert "little is the data set of that name; for the folder here write ./little\n" in said
    assert run.data == store.read("little").fingerprint
    assert prepare.folder_of("little") is None
    for folder in ("./little", str(here / "little"), "little/", "~/little"):
        assert prepare.folder_of(folder) is not None
    photos(here / "only")
    assert prepare.folder_of("only") is not None
    for name in ("", "nothing", "shapes"):
        assert prepare.folder_of(name) is None


def test_help_says_whose_a_name_is(capsys):
    for command in ("pretrain", "embed"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(re.sub("[\u2502|]", "", capsys.readouterr().out).split())
        assert "A name that both have is the data set's" in said


def test_images_of_another_folder_can_be_transferred_to(here, capsys):
    run = ml.pretrain(quick(data=str(photos(here / "photos"))), runs="runs", workers=0, quiet=True)
    photos(here / "others", seed=1)
    words_of = ["transfer", str(run.path), "--to", "./others", "--epochs", "1", "--batch", "2", "--workers", "0"]
    main(words_of)
    said = capsys.readouterr()
    assert "./others is now the data set others" in said.err
    assert "transfer to others: top-1" in said.out


def test_a_sweep_takes_a_folder(here, capsys):
    photos(here / "photos", size=(70, 60))
    options = [f"--{name}={value}" for name, value in (QUICK | {"runs": "runs", "workers": 0}).items()]
    data = ["--data", "./photos", "--transfer-to", "./photos", "--no-probe"]
    main(["sweep", *data, "--grid", "seed=0|1", *options, "--dry-run", "--json"])
    said = capsys.readouterr()
    assert "photos: views of 64 px, because the median short side of the images is 60 px" in said.err
    plan = json.loads(said.out)["plan"]
    assert {(step["settings"]["data"], step["settings"]["size"]) for step in plan} == {("photos", 64)}
    assert {tuple(step["evaluations"]) for step in plan} == {("transfer to photos",)}


@pytest.mark.parametrize(("side", "size"), [(31, 32), (57, 32), (58, 64), (86, 64), (87, 96), (201, 96), (202, 224)])
def test_the_size_suits_the_images(here, side, size):
    photos(here / "photos", count=1, names=("a", "b", "c"), size=(side, side + 9))
    jpeg(here / "photos" / "a" / "small.jpg", np.random.default_rng(0), size=(9, 9))
    prepare.ready("./photos", 0)
    found, why = choose_size("photos")
    assert found == size
    assert f"{side} px" in why
    assert size == 32 or 0.9 * size <= side


def test_what_was_chosen_is_said_and_recorded(here, capsys):
    photos(here / "photos", size=(100, 90))
    main([*words(**QUICK, data="./photos", size=0, limit=0, runs="runs", workers=0), "--json"])
    said = capsys.readouterr()
    run = ml.open_run(json.loads(said.out)["run"])
    assert "size: 96 px, because the median short side of the images is 90 px (--size sets another)\n" in said.err
    assert "encoder: tiny with the stem small-pool, 3x3 at stride 1 and a max-pool" in said.err
    assert (run.settings.size, json.loads((run.path / "config.json").read_text())["settings"]["size"]) == (96, 96)
    assert run.id == identify(run.settings.model_copy(update={"size": 96}), run.data)
    main(["pretrain", "--config", str(run.path / "config.json"), "--runs", "runs", "--workers", "0"])
    said = capsys.readouterr().err
    assert "already complete" in said
    assert "size:" not in said


def test_a_size_that_is_given_is_taken(here, capsys):
    photos(here / "photos", size=(100, 90))
    run, said = pretrain(capsys, data="./photos", size=16)
    assert run.settings.size == 16
    assert "size:" not in said


@pytest.mark.parametrize(("data", "size"), [("cifar10", 32), ("shapes", 32), ("stl10", 64), ("tinyimagenet", 64)])
def test_the_size_of_every_other_data_set_is_the_recipe_s(data, size):
    assert Pretrain(data=data).size == Pretrain(data=data, size=0).size == size


def test_arrays_get_32_px_as_before(prepared, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(prepared))
    settings, notes = at_hand(Pretrain(data="little"))
    assert (settings.size, notes) == (32, ())
    assert Pretrain(data="little").size == 0


def test_every_size_that_is_chosen_has_a_stem_that_suits_it():
    """The paper's at 64 px, torchvision's at 224 px, so that the first stage sees 32 to 56 px."""
    stems = {size: default_stem("resnet18", size) for size in (*SIDES, 32)}
    assert stems == {224: "imagenet", 96: "small-pool", 64: "small-pool", 32: "small"}
