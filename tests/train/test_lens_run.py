"""`marginlens lens run`: what a trained run's embeddings mean for a margin, in sentences."""

import json
import math

import pytest
import torch

import marginlens as ml
from marginlens.cli import main
from marginlens.lens import trained
from marginlens.runs.model import load_method_of
from tests.train.conftest import settings


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """A run of each method, the first with a margin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARGINLENS_DATA", str(prepared))
        store = tmp_path_factory.mktemp("runs")
        asked = {"mocov3": "margin(m1=0.4, m2=0.2)", "simclr": "plain", "byol": "emphasis(c=2)"}
        return {
            method: ml.pretrain(settings(method=method, effect=effect), runs=store, checkpoint_seconds=0, quiet=True)
            for method, effect in asked.items()
        }


@pytest.mark.parametrize("method", ["mocov3", "simclr", "byol"])
def test_it_says_what_the_rows_say(runs, method):
    run = runs[method]
    found = trained.look(run)
    said = "\n".join(trained.sentences(found))
    assert found["images"] == 16
    assert found["seen"]["rows"] == (32 if method == "simclr" else 16)
    middle = math.degrees(found["angles"][1])
    assert f"{middle:.0f} degrees in the median" in said
    assert ("effective negatives" in said) == (method != "byol")
    assert "effective rank" in said
    margin = found["effects"]["margin(m1=0.4)"]
    product = math.prod(margin["parts"].values())
    assert margin["median"] == pytest.approx(product, rel=1e-9)
    assert margin["turns_at"] == pytest.approx(math.pi - 0.4)
    assert f"{math.degrees(margin['turns_at']):.0f} degrees" in said
    norm = found["seen"]["features"]["norm"]
    assert f"{norm**2:.3g}" in said


def test_in_eval_mode_it_is_the_same_each_time_and_changes_nothing(runs):
    run = runs["mocov3"]
    before = {p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    assert trained.look(run) == trained.look(run.path)
    assert {p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    method = load_method_of(run)
    assert not any(module.training for module in method.modules())


def test_a_checkpoint_can_be_named(runs):
    run = runs["mocov3"]
    last, first = sorted((run.path / "checkpoints").iterdir())[::-1][:2]
    assert trained.look(last) == trained.look(run)
    assert trained.look(first)["angles"] != trained.look(run)["angles"]


def test_the_command(runs, capsys):
    main(["lens", "run", str(runs["mocov3"].path), "--effect", "emphasis(s=20)", "margin(m1=3.1)", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["effects"]) == {"emphasis(s=20)", "margin(m1=3.1)"}
    assert found["effects"]["emphasis(s=20)"]["s"] == pytest.approx(20.0)
    main(["lens", "run", str(runs["mocov3"].path)])
    assert "multiplies the median positive's gradient by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "does not exist"),
        (["nowhere/checkpoints/step-1.safetensors"], "does not exist"),
        (["RUN", "--effect", "margin(m3=1)"], "m3"),
        (["RUN", "--data", "nothing"], "nothing"),
        (["BYOL", "--effect", "ratio(m1=0.4)"], "negatives"),
    ],
)
def test_bad_input_is_one_line(runs, capsys, words, said):
    known = {"RUN": str(runs["mocov3"].path), "BYOL": str(runs["byol"].path)}
    with pytest.raises(SystemExit) as end:
        main(["lens", "run", *(known.get(word, word) for word in words)])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_a_lens_line_of_a_run_is_like_its_own_rows(runs):
    """At the end of training, in eval mode: the lens and the method's rows agree on the angle."""
    run = runs["mocov3"]
    found = trained.look(run)
    assert found["seen"]["angle"] == pytest.approx(float(torch.tensor(found["angles"])[1]), abs=0.5)


def test_the_page_takes_a_run_without_a_record(runs, tmp_path):
    """It looks at the last weights itself."""
    from marginlens.lens.page import recorded

    run = runs["mocov3"]
    (look,) = recorded(run)
    assert look.step == run.result.steps
    assert look.joint.counts == trained.look(run)["seen"]["joint"]["counts"]


def test_a_symmetric_method_has_as_many_images(prepared, tmp_path):
    run = ml.pretrain(settings(symmetric=True), runs=tmp_path, checkpoint_seconds=0, quiet=True)
    found = trained.look(run)
    assert (found["images"], found["split"], found["seen"]["rows"]) == (16, "test", 32)
