"""The records of a run's folder, and folders that are refused."""

import errno
import json
import os
import platform
import re
import shlex
import shutil
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import marginlens as ml
from marginlens import files as atomic
from marginlens.cli import main
from marginlens.runs import records
from marginlens.runs import run as record
from marginlens.runs.config import digits
from tests.records import json_lines
from tests.train.conftest import STEPS, resume, settings


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of a complete run's folder, to be spoilt."""
    return shutil.copytree(whole.path, tmp_path / "copy")


def refused(path):
    with pytest.raises(ValueError) as caught:
        ml.open_run(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_used_from_python(whole):
    run = ml.open_run(str(whole.path))
    assert run == whole
    assert run.complete
    assert run.settings == settings()
    result = run.result
    assert result.keys() == {
        "epochs",
        "steps",
        "images",
        "loss",
        "knn",
        "spread",
        "embedding_spread",
        "seconds",
        "images_per_second",
        "checkpoint",
    }
    assert (result["epochs"], result["steps"], result["images"]) == (2, STEPS, 24)
    assert result["loss"] == run.metrics[-1]["loss"]
    assert result["seconds"] > 0
    assert result["images_per_second"] > 0
    assert run.checkpoint().path.name == result["checkpoint"]
    assert run.evaluations == [] or run.evaluations[0]["run"] == run.id


def test_a_run_that_is_not_complete(interrupted, capsys):
    run = interrupted(4)
    assert not run.complete
    with pytest.raises(ValueError, match=r"is not complete; .*: marginlens pretrain --config") as caught:
        run.result  # noqa: B018
    words = shlex.split(str(caught.value).partition(": marginlens ")[2])
    main([*words, "--print-config"])
    assert json.loads(capsys.readouterr().out).items() >= json.loads(run.settings.model_dump_json()).items()
    with pytest.raises(ValueError, match="is not complete"):
        run.checkpoint()
    assert [line["epoch"] for line in run.metrics] == [1]


def test_metrics_have_the_documented_keys(whole, tmp_path):
    common = ["epoch", "step", "loss", "lr", "spread", "embedding_spread"]
    first, last = whole.metrics
    assert list(first) == [*common, "ema"]
    assert list(last) == [*common, "ema", "knn"]
    assert [(m["epoch"], m["step"]) for m in (first, last)] == [(1, 3), (2, 6)]
    simclr = ml.pretrain(settings(method="simclr"), runs=tmp_path, knn_every=1, quiet=True)
    assert [list(m) for m in simclr.metrics] == [[*common, "knn"]] * 2
    speed = json_lines(whole.path / "speed.jsonl")
    assert [list(line) for line in speed] == [["epoch", "seconds", "images_per_second"]] * 2


def test_the_settings_are_kept_in_full(whole):
    kept = json.loads((whole.path / "config.json").read_text())
    assert kept["settings"] == settings().model_dump(mode="json")
    assert kept["id"] == whole.id
    assert kept["identity"]["data"] == kept["data"] == whole.data
    assert kept["format"] == records.FORMAT


def test_a_line_for_each_start(interrupted):
    run = interrupted(2)
    interrupted(4, again=True)
    resume(run)
    found = json_lines(run.path / "environment.jsonl")
    assert [line["step"] for line in found] == [0, 2, 4]
    for line in found:
        assert line["marginlens"] == ml.__version__
        assert line["torch"] == torch.__version__
        assert line["python"] == platform.python_version()
        assert re.fullmatch(r"CPU, \d+ threads", line["device"])
        assert re.fullmatch(r"([0-9a-f]{7,40}\+?)?", line["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line["time"])
        assert (line["precision"], line["engine"]) == ("float32", "eager")


def curves(run):
    """Scalars as TensorBoard shows them: {name: [(step, value), ...]}."""
    found = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def assert_curves(run):
    found = curves(run)
    lines = run.metrics
    names = {name for line in lines for name in line} - {"epoch", "step"}
    assert found.keys() == names | {"images_per_second"}
    for name in names:
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert [step for step, _ in found[name]] == [step for step, _ in wanted], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert [step for step, _ in found["images_per_second"]] == [line["step"] for line in lines]


def test_curves_hold_the_same_numbers(whole):
    assert_curves(whole)


@pytest.mark.parametrize("step", [3, 4], ids="at step {}".format)
def test_curves_after_a_resume(interrupted, step):
    run = interrupted(step)
    time.sleep(1.1)  # event files are told apart by the second
    assert_curves(resume(run))


def test_curves_after_points_that_are_forgotten(interrupted):
    """Epoch 1 was written but not saved: it is written again, and shown once."""
    run = interrupted(4)
    newest = sorted((run.path / "checkpoints").iterdir())
    for path in newest:
        path.unlink()
    time.sleep(1.1)
    assert_curves(resume(run))


def test_a_folder_that_is_not_there(whole, tmp_path):
    start = whole.path.with_name(whole.path.name[:-3])
    assert refused(start) == f"{start} does not exist; did you mean {whole.path}?"
    assert refused(tmp_path / "nowhere").endswith("does not exist; give the folder that marginlens pretrain named")


def test_a_folder_of_something_else(whole, tmp_path):
    assert "is not a run's folder: it has no config.json" in refused(tmp_path)
    assert "it has no config.json" in refused(whole.path.parent)
    assert "it has no config.json" in refused(whole.path / "config.json")


SPOILT = {
    "empty": ("", "cannot be read"),
    "broken": ('{"format": 1,', "cannot be read"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
    "a list": ("[1]", "does not hold an object"),
    "foreign": ('{"model_type": "resnet"}', "was not written by this version"),
    "of another version": ({"format": 2}, "was not written by this version"),
    "without settings": ({"settings": ...}, "settings is missing"),
    "with settings that are a list": ({"settings": [1]}, "settings is [1]"),
    "with settings that are null": ({"settings": None}, "settings is None"),
    "with a bad value": ({"settings": {"lr": -1}}, "lr is -1"),
    "with an unknown setting": ({"settings": {"lrr": 1}}, "there is no setting 'lrr'; did you mean 'lr'?"),
    "without an id": ({"id": ...}, "id is missing"),
    "without data": ({"data": ...}, "data is missing"),
    "without a mean": ({"mean": ...}, "mean is missing"),
    "with a mean of words": ({"mean": ["a", "b", "c"]}, "mean.0 is 'a'"),
    "with a mean that is a number": ({"mean": 1.0}, "mean is 1.0"),
    "with a mean of one": ({"mean": [0.5]}, "mean is [0.5]"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_record_that_is_not_a_runs(copied, kind):
    content, line = SPOILT[kind]
    path = copied / "config.json"
    if isinstance(content, dict):
        content = {k: v for k, v in (json.loads(path.read_text()) | content).items() if v is not ...}
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refused(copied)
    assert line in said
    assert str(path) in said


@pytest.mark.parametrize("command", ["probe", "knn"])
def test_the_command_says_it_in_one_line(copied, capsys, command):
    (copied / "config.json").write_text("{")
    with pytest.raises(SystemExit) as caught:
        main([command, str(copied)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("marginlens: ")
    assert said.count("\n") == 1


def test_a_result_that_is_spoilt(copied):
    (copied / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json cannot be read"):
        ml.open_run(copied).result  # noqa: B018


@pytest.mark.parametrize("command", ["knn", "probe"])
def test_a_spoilt_record_is_one_line_where_it_is_used(command, copied, capsys):
    """As in a list of runs; measured again, a kept evaluation is read no more."""
    small = {"knn": ["--k", "3"], "probe": ["--epochs", "1"]}[command]
    shutil.rmtree(copied / "evaluations", ignore_errors=True)
    main([command, str(copied), *small])
    (kept,) = (copied / "evaluations").glob(f"{command}-*")
    for content in (b"{}", b'{"top1": "a"}', b"[", b""):
        kept.write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            main([command, str(copied), *small])
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert (ended.value.code, str(kept) in line) == (2, True)
        assert line.endswith("; remove that file, and evaluate again")
    main([command, str(copied), *small, "--again"])
    (copied / "result.json").write_text('{"a": 1}')
    with pytest.raises(SystemExit) as ended:
        main([command, str(copied), *small, "--again"])
    assert ended.value.code == 2
    assert "result.json: epochs is missing; " in capsys.readouterr().err


def test_a_line_that_is_no_json_is_named_by_its_number(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nspoilt\n{"a": 4}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl cannot be read \(line 3: Expecting value"):
        records.lines(records.Record, path)
    path.write_bytes(b'{"a": 1}\n\xff\n')
    with pytest.raises(ValueError, match=r"x\.jsonl cannot be read \(line 2"):
        records.lines(records.Record, path)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1 does not hold an object"):
        records.lines(records.Record, path)


def test_weights_that_are_gone(copied):
    run = ml.open_run(copied)
    newest = sorted((copied / "checkpoints").iterdir())[-1]
    newest.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{newest.name}.*.*: marginlens pretrain .*--resume"):
        run.checkpoint()
    newest.unlink()
    with pytest.raises(ValueError, match=r"has lost its last checkpoint; .*--resume"):
        run.checkpoint()
    for path in (copied / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="has no checkpoint: its weights are gone, its records can still be read"):
        run.checkpoint()
    assert run.result["steps"] == STEPS


def test_other_settings_in_the_same_folder_are_refused(copied, whole, tmp_path):
    """As after a record was edited by hand."""
    folder = copied.rename(tmp_path / whole.path.name)
    path = folder / "config.json"
    known = json.loads(path.read_text())
    known["settings"]["lr"] = 0.7
    path.write_text(json.dumps(known))
    for act in (ml.open_run, ml.probe, ml.knn):  # whatever looks at it
        with pytest.raises(ValueError, match=r"config\.json was changed: its settings are not those of its identity"):
            act(folder)
    known["identity"]["settings"]["lr"] = 0.7
    path.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"config\.json was changed: its id is .*, and its identity's is"):
        ml.open_run(folder)
    path.write_text(json.dumps(known | {"id": digits(known["identity"])}))
    with pytest.raises(ValueError, match="holds a run of other settings; give --runs another folder"):
        ml.pretrain(whole.settings, runs=tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize("where", ["flush", "rename"])
def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch, where):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "x.json"
    records.save_json(path, {"a": 1})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(*((atomic, "flush", fail) if where == "flush" else (record.Path, "rename", fail)))
        with pytest.raises(OSError, match="No space left"):
            records.save_json(path, {"a": 2})
    assert path.read_bytes() == before
    with pytest.raises(TypeError):
        records.save_json(path, {"a": object()})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    records.save_json(path, {"a": 2})
    assert records.read_json(path) == {"a": 2}


def test_lines_come_back(tmp_path):
    path = tmp_path / "x.jsonl"
    assert records.lines(records.Record, path) == []
    given = [{"a": 0.1 + 0.2}, {"b": "\u2028 a line's end\n"}, {"c": None}]
    for line in given:
        records.append(path, line)
    length = path.stat().st_size
    assert [dict(line) for line in records.lines(records.Record, path)] == given
    records.append(path, {"d": 1})
    records.rewind(path, length)
    assert [dict(line) for line in records.lines(records.Record, path)] == given
    records.rewind(tmp_path / "nowhere", 0)
    with pytest.raises(ValueError, match="nowhere lost lines"):
        records.rewind(tmp_path / "nowhere", 3)
    assert not (tmp_path / "nowhere").exists()
