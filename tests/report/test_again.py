"""The commands in a report ask for exactly the settings that were run."""

import json
import shlex
from pathlib import Path

import pytest

import marginlens as ml
from marginlens import evals
from marginlens.cli import main
from marginlens.report.gather import gather
from marginlens.report.page import commands
from marginlens.runs.config import Pretrain
from marginlens.runs.store import scan
from marginlens.settings import build
from tests.report.folders import write_run

SETTINGS = [
    {},
    {"data": "shapes", "epochs": 3},
    {"data": "shapes", "epochs": 20, "crop_scale": (0.3, 0.9), "lr": 0.1, "warmup": 0},
    {"method": "simclr", "effect": "margin(m1=0.4, m2=0.2)", "batch": 512, "seed": 7},
    *({"batch": batch, "bn_splits": parts} for batch in (64, 128, 512) for parts in (1, 2, 4, 8)),
    {"data": "shapes", "batch": 128},
    {"data": "shapes", "batch": 128, "bn_splits": 1},
    {"batch": 100, "bn_splits": 4},
    {"method": "byol", "effect": "emphasis(c=2.5)", "symmetric": True, "ema_schedule": "cosine"},
    {"last_bn": False, "bias": False, "decay_all": False, "two_tau": True, "clip": 1.0, "weak_crop": "padded"},
    {"data": "stl10", "split": "train", "size": 96, "stem": "small-pool", "amp": "off", "blur": 0.0},
    {"data": "my own set", "effect": "emphasis(s=20, c=2.5) * ratio(m1=0.4)", "tau": 0.07, "beta": 0.5},
]


def typed(line, capsys):
    """What a command would run with."""
    program, *words = shlex.split(line)
    assert program == "marginlens"
    main([*words, "--print-config"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_pretrain_again(given, capsys):
    settings = build(Pretrain, given)
    (line,) = commands(Path("some runs/a-run"), settings, [])
    found = typed(line, capsys)
    assert found["runs"] == "some runs"
    assert build(Pretrain, {name: found[name] for name in Pretrain.model_fields}) == settings


@pytest.mark.parametrize("data", ["cifar10", "shapes"])
@pytest.mark.parametrize("changed", [{}, {"epochs": 5, "holdout": 1000, "crop_scale": (0.2, 0.7)}], ids=str)
def test_evaluate_again(tmp_path, capsys, data, changed):
    write_run(tmp_path, data=data, epochs=2, probe=60.0, transfer={data: 50.0}, probe_settings=changed)
    (seen,) = gather(scan(tmp_path), {}).runs
    lines = commands(seen.path, seen.settings, seen.evaluations)
    assert [line.split()[1] for line in lines] == ["pretrain", "probe", "transfer"]
    for line in lines[1:]:
        found = typed(line, capsys)
        expected = evals.usual("probe", data, changed)
        assert build(ml.Probe, {name: found[name] for name in ml.Probe.model_fields}) == expected
    assert typed(lines[2], capsys)["to"] == data
