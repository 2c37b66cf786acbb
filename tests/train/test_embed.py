"""Exported features and weights describe themselves."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import marginlens as ml
from marginlens.data.feed import Files, open_feed
from marginlens.data.images import decode
from marginlens.devices import placed
from marginlens.evals.features import features, plain_images
from marginlens.nets import encoder, load_backbone
from marginlens.runs.model import load_backbone_of
from tests.data.conftest import jpeg, tree_of_jpegs
from tests.train.conftest import settings

CPU = torch.device("cpu")


def test_features_of_a_folder_keep_their_names(whole, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("b.jpg", "a.jpg", "deep/c.png", "ö space.jpg"):
        jpeg(tmp_path / "photos" / name, rng, size=(40, 30))
    written = ml.embed(whole, tmp_path / "photos", tmp_path / "f.safetensors", workers=0)
    names = (tmp_path / "f.files.txt").read_text().splitlines()
    assert names == sorted(names)
    assert set(names) == {"a.jpg", "b.jpg", "deep/c.png", "ö space.jpg"}
    found = load_file(tmp_path / "f.safetensors")
    assert found["features"].shape == (4, load_backbone_of(whole).features)
    assert "labels" not in found
    assert written["rows"] == 4
    # row by row, what the backbone makes of that very file
    backbone = load_backbone_of(whole)
    for name, row in zip(names, found["features"], strict=True):
        image = torch.from_numpy(decode(tmp_path / "photos" / name, name))[None, :, 5:35, :].float() / 255
        small = torch.nn.functional.interpolate(image, 8, mode="bilinear", antialias=True)
        mean, std = (torch.tensor(x)[:, None, None] for x in (whole.mean, whole.std))
        with torch.no_grad():
            assert (backbone((small - mean) / std)[0] - row).abs().max() < 0.05 * row.abs().max()


def test_a_tree_has_labels_and_bad_files_are_named(whole, tmp_path):
    tree_of_jpegs(tmp_path / "pets")
    (tmp_path / "pets" / "train" / "cat" / "bad.jpg").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"bad\.jpg"):
        ml.embed(whole, tmp_path / "pets", tmp_path / "f.safetensors", workers=0)
    written = ml.embed(whole, tmp_path / "pets", tmp_path / "f.safetensors", workers=0, skip_bad=True, size=16)
    assert "bad.jpg" in written["skipped"][0]
    assert load_file(tmp_path / "f.safetensors")["labels"].tolist() == [0, 0, 1, 1]
    ml.embed(whole, tmp_path / "pets", tmp_path / "t.safetensors", workers=0, skip_bad=True, split="test")
    assert (tmp_path / "t.files.txt").read_text().splitlines() == ["val/cat/0.jpg", "val/dog/0.jpg"]


def test_features_of_a_prepared_data_set(whole, tmp_path):
    ml.embed(whole, "little", tmp_path / "f.safetensors", split="test")
    found = load_file(tmp_path / "f.safetensors")
    images = plain_images(open_feed("little", CPU), "test", torch.arange(16), 8)
    assert torch.equal(found["features"], features(placed(load_backbone_of(whole), CPU), images, torch.float32))
    assert found["labels"].tolist() == [i % 4 for i in range(16)]
    assert not (tmp_path / "f.files.txt").exists()


def test_what_has_no_card_is_not_exported(whole, tmp_path):
    copied = shutil.copytree(whole.path, tmp_path / "copy")
    (copied / "evaluations").mkdir(exist_ok=True)
    (copied / "evaluations" / "knn-spoilt.json").write_text("{}")
    with pytest.raises(ValueError, match=r"knn-spoilt\.json: kind is missing.*; remove that file, and evaluate again"):
        ml.export(copied, tmp_path / "backbone.safetensors")
    assert not list(tmp_path.glob("backbone*"))


def test_the_exported_backbone_is_the_run_s_and_starts_another(whole, tmp_path):
    file = tmp_path / "out" / "backbone.safetensors"
    ml.probe(whole, ml.Probe(epochs=1, holdout=8), quiet=True)
    ml.export(whole, file)
    model = encoder("tiny", stem="small-pool")
    load_backbone(model, load_file(file))
    assert all(torch.equal(v, load_backbone_of(whole).state_dict()[k]) for k, v in model.state_dict().items())
    with safe_open(file, "pt") as stored:
        facts = stored.metadata()
    assert (facts["encoder"], facts["stem"], facts["size"], facts["run"]) == ("tiny", "small-pool", "8", whole.id)
    assert json.loads(facts["mean"]) == list(whole.mean)
    card = file.with_suffix(".md").read_text()
    for said in (
        whole.id,
        "mocov3",
        "little",
        "on 8 images kept back",
        'encoder("tiny", stem="small-pool")',
        '"seed": 0',
    ):
        assert said in card
    code = card.split("```python\n")[1].split("```")[0].replace("backbone.safetensors", str(file))
    names = {}
    exec(code, names)
    assert torch.equal(names["model"].conv1.weight, model.conv1.weight)
    assert not names["model"].training
    assert names["features"].shape == (4, model.features)
    near = os.path.relpath(file)
    again = ml.pretrain(settings(weights=near, lr=0.0, ema=1.0, epochs=1), runs=tmp_path / "runs", quiet=True)
    kept = ml.open_run(again.path).settings.weights
    assert os.path.isabs(kept)  # found from elsewhere too
    assert os.path.samefile(kept, file)
    assert torch.equal(load_backbone_of(again).conv1.weight, model.conv1.weight)
    file.unlink()  # a run that is done no longer needs what it began from
    assert load_backbone_of(ml.open_run(again.path)).features == model.features


def test_weights_that_do_not_fit_leave_no_run(tmp_path):
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "odd.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save({"a": 1}, tmp_path / "pickle.safetensors")
    lines = {"odd": "do not fit this encoder", "text": "not a readable safetensors", "pickle": "not a readable"}
    for name, line in lines.items():
        with pytest.raises(ValueError, match=line):
            ml.pretrain(settings(weights=str(tmp_path / f"{name}.safetensors")), runs=tmp_path / "runs", quiet=True)
    with pytest.raises(ValueError, match=r"nowhere\.safetensors"):
        ml.pretrain(settings(weights="nowhere.safetensors"), runs=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()


def test_nothing_is_overwritten(whole, tmp_path):
    for name in ("f.safetensors", "g.files.txt", "h.md"):
        (tmp_path / name).write_text("mine")
    for act in (
        lambda: ml.embed(whole, "little", tmp_path / "f.safetensors"),
        lambda: ml.embed(whole, "little", tmp_path / "g.safetensors"),
        lambda: ml.export(whole, tmp_path / "f.safetensors"),
        lambda: ml.export(whole, tmp_path / "h.safetensors"),
    ):
        with pytest.raises(ValueError, match="exists already"):
            act()
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        ml.export(whole, tmp_path / "backbone.pt")
    with pytest.raises(ValueError, match="give --out another place"):
        ml.export(whole, "/proc/nope/b.safetensors")
    with pytest.raises(ValueError, match="give --out another place"):  # before any image is looked at
        ml.embed(whole, tmp_path / "nowhere", tmp_path / "h.md" / "n.safetensors")
    with pytest.raises(ValueError, match="is neither a folder with images nor a prepared data set"):
        ml.embed(whole, tmp_path / "nowhere", tmp_path / "n.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.safetensors", "g.files.txt", "h.md"]
    assert all(p.read_text() == "mine" for p in tmp_path.iterdir())


def test_a_folder_can_be_learned_from_and_probed(tmp_path):
    """The streaming feed gives the same views as any number of workers, and its runs can be resumed."""
    from marginlens.data.folder import prepare_folder

    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            for i in range(count):
                jpeg(tmp_path / "pets" / split / name / f"{i}.jpg", rng, size=(20, 24))
    prepare_folder(tmp_path / "pets", "pets")
    asked = settings(data="pets", limit=0, batch=4, epochs=2)
    run = ml.pretrain(asked, runs=tmp_path / "runs", workers=0, quiet=True)
    other = ml.pretrain(asked, runs=tmp_path / "others", workers=1, quiet=True)
    assert (run.path / "metrics.jsonl").read_bytes() == (other.path / "metrics.jsonl").read_bytes()
    found = ml.probe(run, ml.Probe(epochs=2, batch=4), workers=0, quiet=True)
    assert (found["train_images"], found["test_images"]) == (12, 6)
    assert isinstance(open_feed("pets", torch.device("cpu")), Files)
    given = prepare_folder(tmp_path / "pets", "pets", mean=(0.0,) * 3, std=(1.0,) * 3)[0]
    assert given.fingerprint != run.data  # other pixels reach the backbone, so it is other data
    with pytest.raises(ValueError, match="content of pets has changed since"):
        ml.knn(run, workers=0, quiet=True)
    with pytest.raises(ValueError, match="the padded crop needs images of the views' size"):
        ml.pretrain(settings(data="pets", limit=0, weak_crop="padded"), runs=tmp_path / "runs")


def test_a_file_that_goes_bad_ends_a_run_in_one_line(tmp_path):
    """Whatever process decodes it; what was learned so far is kept."""
    from marginlens.data.folder import prepare_folder

    rng = np.random.default_rng(0)
    for i in range(12):
        jpeg(tmp_path / "many" / f"{i:02d}.jpg", rng, size=(16, 16))
    prepare_folder(tmp_path / "many", "many")
    (tmp_path / "many" / "07.jpg").write_bytes(b"?")
    asked = settings(data="many", limit=0, batch=2, epochs=2)
    for workers in (0, 1):
        with pytest.raises(ValueError) as caught:
            ml.pretrain(asked, runs=tmp_path / str(workers), workers=workers, checkpoint_seconds=1e9, quiet=True)
        assert "07.jpg has changed since its folder was prepared" in str(caught.value)
        assert "\n" not in str(caught.value)
        (run,) = (tmp_path / str(workers)).iterdir()
        assert len(list((run / "checkpoints").iterdir())) == 1


def test_a_folder_and_a_data_set_of_one_name(whole, tmp_path, monkeypatch):
    (tmp_path / "little").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ml.embed(whole, "little", "f.safetensors")["rows"] == 32
    for folder in ("./little", Path("little"), tmp_path / "little"):
        with pytest.raises(ValueError, match="has no images"):
            ml.embed(whole, folder, "g.safetensors")


def test_all_images_of_a_folder_are_embedded_and_none_is_kept_back(whole, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for i in range(5):
            jpeg(tmp_path / "pets" / name / f"{i}.jpg", rng, size=(20, 24))
    assert ml.embed(whole, tmp_path / "pets", tmp_path / "f.safetensors", workers=0)["rows"] == 10
    assert load_file(tmp_path / "f.safetensors")["labels"].tolist() == [0] * 5 + [1] * 5
