"""The laboratory from the command line: the commands of the README, and one line with exit code 2 for every mistake."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import marginlens as ml
from marginlens.cli import main
from marginlens.data import store
from marginlens.runs import export
from marginlens.runs.records import Evaluation
from marginlens.train import commands
from tests.data.conftest import jpeg
from tests.runs.conftest import evaluation as evaluated
from tests.train.conftest import SMALL, resume, settings, snapshot, words


def run(capsys, *options):
    main([str(o) for o in options])
    return capsys.readouterr()


def refused(capsys, *options):
    with pytest.raises(SystemExit) as caught:
        main([str(o) for o in options])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.out == ""
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("marginlens: ")
    return lines[0]


def test_from_images_to_an_accuracy(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = run(capsys, *words(method="mocov3", effect="emphasis(s=5)", seed=0, runs="RUNS"))
    folder = re.search(r"^next: marginlens probe (\S+)$", said.out, flags=re.M)[1]
    assert folder.startswith("RUNS/mocov3-little-tiny-emphasis-s5-seed0-")
    assert "kNN" in said.out
    found = json.loads(run(capsys, "probe", folder, "--epochs", 2, "--json").out)
    assert (found["kind"], found["settings"]["epochs"]) == ("probe", 2)
    assert "top-1" in run(capsys, "probe", folder, "--epochs", 2, "--holdout", 8).out
    assert "8 images kept back" in run(capsys, "probe", folder, "--epochs", 2, "--holdout", 8).out
    near = run(capsys, "knn", folder).out
    assert re.search(r"knn on little: top-1 [\d.]+ %, on the test set; .*\b32\b.* vote", near)
    assert "vote" not in run(capsys, "knn", folder, "--k", 32).out
    (kept,) = (p for p in Path(folder, "evaluations").glob("knn-*") if '"k": 200' in p.read_text())
    kept.write_text(re.sub(r'\s*"neighbours": 32,', "", kept.read_text()))  # as the first runs wrote it
    assert "vote" not in run(capsys, "knn", folder).out
    assert "transfer to little" in run(capsys, "transfer", folder, "--to", "little", "--epochs", 1).out
    assert "32 x 128 features" in run(capsys, "embed", folder, "--data", "little", "--out", "f.safetensors").out
    assert "backbone.md" in run(capsys, "export", folder, "--out", "backbone.safetensors").out
    kinds = {(e["kind"], e["settings"]["holdout"]) for e in ml.open_run(folder).evaluations}
    assert kinds == {("probe", 0), ("probe", 8), ("knn", 0), ("transfer", 0)}


def test_what_comes_next_is_what_the_data_allow(capsys, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(4):
        for name in "ab":
            jpeg(tmp_path / "pets" / "train" / name / f"{i}.jpg", rng, size=(20, 24))
    said = run(capsys, "data", "prepare", "folder", "--from", tmp_path / "pets", "--as", "pets").out
    assert "without labels" not in said
    said = run(capsys, "data", "prepare", "folder", "--from", tmp_path / "pets/train/a", "--as", "bare").out
    assert "without labels" in said
    for data, after in (("pets", r"probe (\S+) --holdout 1"), ("bare", r"embed (\S+) --data bare --out f\S+")):
        said = run(capsys, *words(data=data, limit=0, batch=4, epochs=1, runs=tmp_path / "runs", workers=0)).out
        line = re.search(f"^next: marginlens {after}$", said, flags=re.M)
        assert line, said
    run(capsys, "embed", line[1], "--data", "bare", "--out", tmp_path / "f.safetensors")
    shutil.copytree(line[1], tmp_path / "my runs" / "one")
    assert commands._next(f"{tmp_path}/my runs/one").startswith(f"embed '{tmp_path}/my runs/one' --data bare")
    shutil.rmtree(store.root() / "bare")
    assert commands._next(line[1]) == f"probe {line[1]}"


def test_resuming_what_was_not_begun_and_learning_from_test_images_are_said(capsys, tmp_path):
    new = "nothing to resume with these settings, so this is a new run: "
    assert new in run(capsys, *words(runs=tmp_path, resume=True)).err
    assert new not in run(capsys, *words(runs=tmp_path, resume=True)).err
    said = run(capsys, *words(runs=tmp_path, seed=1, split="train+test")).err
    assert new not in said
    assert "note: it learns from the test images" in said


def test_a_command_is_told_from_its_options(capsys):
    said = refused(capsys, "pretrian", "--data", "shapes")
    assert said == "marginlens: there is no command 'pretrian'; did you mean 'marginlens pretrain'?"
    assert "there is no option --bogus before a command" in refused(capsys, "--bogus", "pretrain")
    assert "marginlens data list" in run(capsys, "data", "--help").out
    assert "marginlens pretrain" in run(capsys, "--help").out


def test_print_config_is_what_runs_and_reads_back(capsys, tmp_path):
    printed = run(capsys, *words(lr=0.03), "--print-config").out
    (tmp_path / "all.json").write_text(printed)
    assert run(capsys, "pretrain", "--config", tmp_path / "all.json", "--print-config").out == printed
    assert json.loads(printed)["lr"] == 0.03
    said = run(capsys, "pretrain", "--config", tmp_path / "all.json", "--runs", tmp_path / "runs", "--json").out
    found = ml.open_run(json.loads(said)["run"])
    assert {k: v for k, v in json.loads(printed).items() if k in type(found.settings).model_fields} == json.loads(
        found.settings.model_dump_json()
    )
    for command in ("probe", "knn"):
        assert json.loads(run(capsys, command, found.path, "--print-config").out)["holdout"] == 0


def test_one_of_a_kind_is_not_several(capsys, tmp_path):
    said = run(capsys, *words(batch=24, epochs=1, runs=tmp_path))
    assert "1 step of 24 images" in said.err
    (folder,) = tmp_path.iterdir()
    assert "1 image kept back from training" in run(capsys, "probe", folder, "--epochs", 1, "--holdout", 1).out


def test_the_same_from_python(tmp_path):
    done = ml.pretrain(ml.Pretrain(**SMALL), runs=tmp_path, quiet=True)
    assert ml.probe(done, ml.Probe(epochs=1), quiet=True)["top1"] == ml.probe(done.path, ml.Probe(epochs=1))["top1"]


def test_an_effect_without_numbers_is_noted(capsys, tmp_path):
    said = run(capsys, *words(effect="margin", epochs=1, runs=tmp_path)).err
    assert "note: margin at its defaults changes nothing" in said
    assert "note:" not in run(capsys, *words(effect="margin(m1=0.1)", epochs=1, runs=tmp_path)).err


@pytest.mark.slow
def test_shapes_has_a_probe_of_its_own(capsys, shapes, tmp_path):
    short = ml.pretrain(ml.Pretrain(data="shapes", limit=64, epochs=1), runs=tmp_path, quiet=True)
    printed = json.loads(run(capsys, "probe", short.path, "--print-config", "--lr", "0.1").out)
    assert (printed["epochs"], printed["batch"], printed["lr"], printed["crop_scale"]) == (20, 16, 0.1, [0.5, 1.0])
    assert json.loads(run(capsys, "transfer", short.path, "--to", "little", "--print-config").out)["epochs"] == 100
    words_of = ("probe", short.path, "--epochs", "1", "--json")
    assert ml.probe(short, ml.Probe(epochs=1), quiet=True) == json.loads(run(capsys, *words_of).out)
    named = run(capsys, "transfer", short.path, "--to", "shapes", "--print-config").out
    (tmp_path / "to.yaml").write_text("to: shapes\n")
    assert run(capsys, "transfer", short.path, "--config", tmp_path / "to.yaml", "--print-config").out == named
    assert json.loads(named)["epochs"] == 20
    assert "(default: 100; shapes: 20)" in " ".join(helped(capsys, "probe").split())


def helped(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out.replace("\u2502", "").replace("|", "")


MISTAKES = {
    "there is no method 'mocov4'; did you mean 'mocov3'?": words(method="mocov4"),
    "there is no data set 'cifar11'; did you mean 'cifar10'?": ["pretrain", "--data", "cifar11"],
    "run: marginlens data prepare cifar10": ["pretrain", "--data", "cifar10"],
    "there is no option --epcohs (did you mean --epochs?)": ["pretrain", "--epcohs", "3"],
    "there is no option --batch-size (did you mean --batch?)": ["pretrain", "--batch-size", "64"],
    "there is no option --temperature (did you mean --tau?)": ["pretrain", "--temperature=0.2"],
    "no option --learning_rate (did you mean --lr?), nor --wd (did you mean --weight-decay?)": [
        *("pretrain", "--learning_rate", "0.1", "--epochs", "3", "--wd", "0"),
    ],
    "there is no option --gpu (did you mean --device?)": ["probe", "--gpu", "0"],
    "there is no option --output (did you mean --runs?)": ["pretrain", "--output", "x"],
    "there is no option --output-dir (did you mean --out?)": ["export", "RUN", "--output-dir", "x"],
    "there is no option --embed-dim (did you mean --out?)": ["pretrain", "--embed-dim", "8"],
    "there is no option -b (did you mean --batch?)": ["pretrain", "-b", "8"],
    "there is no option --xyzzy; marginlens pretrain --help lists": ["pretrain", "--no-bias", "--xyzzy"],
    "--epochs needs a whole number, got 'ten'": ["pretrain", "--epochs", "ten"],
    "--lr needs a number, got 'high'": ["pretrain", "--lr", "high"],
    "--lr needs a value": ["pretrain", "--lr"],
    "--crop-scale needs 2 values": ["pretrain", "--crop-scale", "0.5"],
    "unexpected argument: shapes": ["pretrain", "shapes"],
    "there is no setting 'epcohs'; did you mean 'epochs'?": ["pretrain", "--config", "typo.yaml"],
    "batch is 25, but there are only 24 images; lower --batch": words(batch=25),
    "limit is 99, but little has 32 images in train": words(limit=99),
    "emphasis(s=5): without negatives s multiplies the whole gradient": words(method="byol", effect="emphasis(s=5)"),
    "there is no effect 'emfasis'; did you mean 'emphasis'?": words(effect="emfasis(s=5)"),
    "size is 4; it must be from 8 to": words(size=4),
    "padded crop needs images of the views' size, 8 px, but little has 16 x 16 px": words(weak_crop="padded"),
    "little has no split 'validation'; it has train, test": words(split="validation"),
    "device 'cuda:99' cannot be used: 0 CUDA devices are here": words(device="cuda:99"),
    "there is no device 'meta'; there are auto, cpu, cuda": words(device="meta"),
    "tau is 1e-300; it must be greater than or equal to 0.0001": words(tau="1e-300"),
    "/some/folder is not a folder; give one with images": words(data="/some/folder"),
    "amp is 'bf16', which is for CUDA": words(amp="bf16"),
    "--ema-schedule is 'linear'; it must be one of 'constant', 'cosine'": words(ema_schedule="linear"),
    "cannot write to": words(runs="/proc/nope"),
    "is not a run's folder: it has no config.json": ["probe", "."],
    "nowhere does not exist": ["knn", "nowhere"],
    "an argument is missing: PATH (The run's folder)": ["probe"],
    "--to is missing": ["transfer", "nowhere"],
    "--out is missing": ["export", "nowhere"],
    "size is 3; it must be from 8 to 512 pixels": ["knn", "nowhere", "--size", "3"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(capsys, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.yaml").write_text("epcohs: 3\n")
    assert line in refused(capsys, *MISTAKES[line])
    assert [p.name for p in tmp_path.iterdir()] == ["typo.yaml"]  # nothing was begun


def test_a_foreign_checkpoint(capsys, whole, interrupted, tmp_path):
    """One of another run, put in the place of the newest: refused, and nothing is overwritten."""
    run = interrupted(3, runs=tmp_path / "runs", seed=5)
    theirs = whole.checkpoint().path
    (run.path / "checkpoints" / theirs.name).write_bytes(theirs.read_bytes())
    before = snapshot(run.path)
    line = refused(capsys, *words(seed=5, runs=tmp_path / "runs", resume=True))
    assert "belongs to another run" in line
    assert theirs.name in line
    assert snapshot(run.path) == before


def test_another_precision_does_not_go_on(capsys, interrupted, tmp_path):
    """As when a run that began on a GPU is resumed on a CPU."""
    run = interrupted(3, runs=tmp_path / "runs")
    path = run.path / "environment.jsonl"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    before = snapshot(run.path)
    line = refused(capsys, *words(runs=tmp_path / "runs", resume=True))
    assert "began in bfloat16 on CPU" in line
    assert "would resume in float32 here" in line
    assert snapshot(run.path) == before


def test_a_start_that_left_nothing_behind_has_no_precision_to_go_on_in(interrupted, whole, tmp_path):
    """As when a run died on a GPU before its first checkpoint, and was begun again on a CPU."""
    run = interrupted(3, runs=tmp_path)
    path = run.path / "environment.jsonl"
    first = json.loads(path.read_text())
    path.write_text(json.dumps(first | {"precision": "bfloat16"}) + "\n" + path.read_text())
    assert resume(run).complete
    assert (run.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_a_complete_run_is_left_alone(capsys, tmp_path):
    ml.pretrain(settings(), runs=tmp_path, quiet=True)
    (path,) = tmp_path.iterdir()
    before = snapshot(path)
    assert "is already complete" in run(capsys, *words(runs=tmp_path)).err
    assert snapshot(path) == before


@pytest.mark.parametrize("told", [{"classes": 10}, {}], ids=["its classes", "as the first records were"])
def test_a_probe_that_diverged_is_marked_wherever_it_is_shown(told):
    known = evaluated("probe", 12.0, epochs=1, lr=3.0) | {"data": "cifar10"} | told
    for loss, lost in ((9.9, True), (1.0, False)):
        found = known | {"loss": loss}
        assert ("diverged" in commands._accuracy(found)) is lost
        assert ("diverged" in export._how(Evaluation.model_validate(found))) is lost
        assert "1 epoch at learning rate 3" in export._how(Evaluation.model_validate(found))


@pytest.mark.parametrize(("classes", "shown"), [(4, False), (5, False), (6, True), (None, True)])
def test_top_5_of_five_classes_is_not_shown(classes, shown):
    from marginlens.train.commands import _accuracy

    start = {"time": "2026-11-15T12:00:00Z", "device": "CPU"}
    given = {"kind": "probe", "run": "a" * 10, "data": "little", "data_fingerprint": "ab"}
    given |= {"settings": ml.Probe().model_dump(mode="json")}
    given |= {"top1": 50.0, "top5": 100.0, "seconds": 1.0, "environment": start, "train_images": 8, "test_images": 8}
    assert ("top-5" in _accuracy(given | ({"classes": classes} if classes else {}))) == shown
