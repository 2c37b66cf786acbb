"""A run's hash covers everything that determines its result, nothing else, and never changes."""

import inspect
import json
import re
import shutil

import pytest
import torch
from pydantic import Field
from safetensors.torch import save_file

import marginlens as ml
from marginlens.devices import seeded
from marginlens.nets.resnet import encoder
from marginlens.runs import config
from marginlens.runs import run as record
from marginlens.runs.config import NEUTRAL, Pretrain, facts, identify, run_name
from marginlens.settings import build
from marginlens.train.commands import PretrainPlace
from tests.train.conftest import settings

DATA = "0123456789abcdef" * 4
FIXED = {
    "method": "mocov3",
    "data": "shapes",
    "effect": "plain",
    "epochs": 20,
    "seed": 0,
    "encoder": "tiny",
    "size": 32,
    "split": "train",
    "tau": 0.25,
    "hidden": 256,
    "out": 64,
    "last_bn": True,
    "ema": 0.9,
    "batch": 64,
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "warmup": 1,
    "crop_scale": (0.5, 1.0),
}
"""Every setting that has no neutral value, so that no recipe or default has a say."""

OTHERS = {
    "method": {"method": "byol", "beta": 0.0},
    "data": {"data": "other"},
    "effect": {"effect": "ratio(m1=0.4)"},
    "epochs": {"epochs": 21},
    "seed": {"seed": 1},
    "encoder": {"encoder": "resnet18"},
    "stem": {"stem": "imagenet"},
    "size": {"size": 24},
    "split": {"split": "train+test"},
    "limit": {"limit": 100},
    "tau": {"tau": 0.2},
    "beta": {"beta": 0.5},
    "hidden": {"hidden": 255},
    "out": {"out": 63},
    "last_bn": {"last_bn": False},
    "bias": {"bias": False},
    "predictor_bn": {"predictor_bn": True},
    "bn_splits": {"bn_splits": 8},
    "symmetric": {"symmetric": True},
    "two_tau": {"two_tau": True},
    "ema": {"ema": 0.99},
    "ema_schedule": {"ema_schedule": "cosine"},
    "batch": {"batch": 32},
    "lr": {"lr": 0.1},
    "momentum": {"momentum": 0.8},
    "weight_decay": {"weight_decay": 1e-4},
    "decay_all": {"decay_all": False},
    "warmup": {"warmup": 2},
    "clip": {"clip": 1.0},
    "crop_scale": {"crop_scale": (0.2, 1.0)},
    "weak_crop": {"weak_crop": "padded"},
    "blur": {"blur": 0.0},
    "amp": {"amp": "off"},
}


def fixed(**more):
    return Pretrain(**(FIXED | more))


def weights(path, seed=0):
    torch.manual_seed(seed)
    save_file(encoder("tiny").state_dict(), path)
    return str(path)


def test_every_setting_is_tried():
    assert OTHERS.keys() | {"weights"} == Pretrain.model_fields.keys()
    assert FIXED.keys() | NEUTRAL.keys() == Pretrain.model_fields.keys()
    assert not FIXED.keys() & NEUTRAL.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_every_setting_counts(name):
    assert identify(fixed(**OTHERS[name]), DATA) != identify(fixed(), DATA)


def test_no_two_of_them_collide():
    found = [identify(fixed(**other), DATA) for other in OTHERS.values()]
    assert len(set(found)) == len(found)


def test_simclr_has_no_momentum_of_a_teacher():
    chosen = {**FIXED, "method": "simclr"}
    del chosen["ema"]
    assert "ema" not in facts(Pretrain(**chosen), DATA)["settings"]
    assert identify(Pretrain(**chosen), DATA) == identify(fixed(method="simclr", ema=0.99), DATA)
    with pytest.raises(ValueError, match="ema means nothing to simclr"):
        fixed(method="simclr")


def test_the_data_and_the_numerics_count(monkeypatch):
    one = identify(fixed(), DATA)
    assert identify(fixed(), DATA.replace("0", "1")) != one
    monkeypatch.setattr(config, "NUMERICS", config.NUMERICS + 1)
    assert identify(fixed(), DATA) != one


def test_weights_count_by_content_not_by_path(tmp_path, monkeypatch):
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b", seed=1)
    same = shutil.copy(one, tmp_path / "c")
    ids = [identify(fixed(weights=str(path)), DATA) for path in (one, other, same)]
    assert ids[0] == ids[2] != ids[1]
    assert identify(fixed(), DATA) not in ids
    monkeypatch.setenv("HOME", str(tmp_path))
    assert identify(fixed(weights="~/a"), DATA) == ids[0]
    with pytest.raises(ValueError, match=r"cannot read .*nowhere \(No such file"):
        identify(fixed(weights=str(tmp_path / "nowhere")), DATA)


def test_where_and_how_often_does_not_count(tmp_path):
    assert not PretrainPlace.model_fields.keys() & Pretrain.model_fields.keys()
    arguments = inspect.signature(ml.pretrain).parameters.keys() - {"settings", "quiet"}
    assert arguments == PretrainPlace.model_fields.keys()
    places = [
        {"runs": tmp_path / "a", "device": "auto", "workers": 2, "knn_every": 10, "checkpoint_seconds": 60},
        {"runs": tmp_path / "b", "device": "cpu", "workers": 0, "knn_every": 1, "checkpoint_seconds": 0},
    ]
    one, other = (ml.pretrain(settings(epochs=1), quiet=True, **place) for place in places)
    assert (one.id, one.path.name) == (other.id, other.path.name)
    assert one.id == identify(one.settings, one.data)


SPELLINGS = [
    ("emphasis(s=5)", "emphasis(s=5.0)", "Emphasis( s=5 )"),
    ("plain", "Plain()", "plain()"),
    ("margin(m1=0.4, m2=0.2)", "Margin(m2=0.2, m1=0.4)"),
]


@pytest.mark.parametrize("spellings", SPELLINGS, ids=lambda spellings: spellings[0])
def test_one_effect_has_one_hash(spellings):
    assert len({run_name(fixed(effect=effect), DATA) for effect in spellings}) == 1


def test_an_effect_as_an_object():
    assert identify(fixed(effect=ml.Emphasis(s=5)), DATA) == identify(fixed(effect="emphasis(s=5)"), DATA)


def test_numbers_have_one_hash_however_they_are_written():
    odd = {"lr": 1, "clip": "1", "crop_scale": [1, 1.0], "ema": 1}
    plain = {"lr": 1.0, "clip": 1.0, "crop_scale": (1.0, 1.0), "ema": 1.0}
    assert identify(fixed(**odd), DATA) == identify(fixed(**plain), DATA)


def test_settings_survive_json():
    chosen = fixed(effect="emphasis(s=20, c=2.5) * ratio(m1=0.4)", lr=0.1 + 0.2, seed=(1 << 63) - 1)
    again = build(Pretrain, json.loads(json.dumps(chosen.model_dump(mode="json"))))
    assert again == chosen
    assert identify(again, DATA) == identify(chosen, DATA)


PINNED = {
    "mocov3-shapes-tiny-plain-seed0-0c722e9aa9": {},
    "byol-cifar10-resnet18-emphasis-c2.5-seed3-8dc45a1b25": {
        "method": "byol",
        "data": "cifar10",
        "effect": "emphasis(c=2.5)",
        "encoder": "resnet18",
        "seed": 3,
        "beta": 0.0,
        "symmetric": True,
        "ema_schedule": "cosine",
        "clip": 1.0,
        "crop_scale": (0.2, 1.0),
    },
}


@pytest.mark.parametrize("name", PINNED)
def test_runs_of_earlier_versions_keep_their_names(name):
    """A change that fails here orphans everyone's runs: give the new setting a neutral value, or raise NUMERICS."""
    assert run_name(fixed(**PINNED[name]), DATA) == name


class Later(Pretrain):
    """The settings of a later version."""

    swap: bool = Field(False)
    blur: float = Field(0.1)


def test_a_new_setting_orphans_no_run(monkeypatch):
    monkeypatch.setitem(NEUTRAL, "swap", False)
    given = FIXED | {"blur": 0.5}
    assert identify(Later(**given), DATA) == identify(fixed(), DATA)
    assert identify(Later(**given, swap=True), DATA) != identify(fixed(), DATA)


def test_a_new_default_is_another_run(monkeypatch):
    monkeypatch.setitem(NEUTRAL, "swap", False)
    assert identify(Later(**FIXED), DATA) == identify(fixed(blur=0.1), DATA)


def test_a_record_from_before_a_setting_still_opens(whole, tmp_path, monkeypatch):
    """At the value that means as before, whatever the default has become."""
    folder = tmp_path / whole.path.name
    folder.mkdir()
    content = json.loads((whole.path / "config.json").read_text())
    for name in (name for name, value in NEUTRAL.items() if content["settings"][name] == value):
        del content["settings"][name]
    (folder / "config.json").write_text(json.dumps(content))
    run = ml.open_run(folder)
    assert (run.settings, run.id) == (whole.settings, whole.id)
    monkeypatch.setitem(NEUTRAL, "swap", False)
    monkeypatch.setattr(record, "Pretrain", Later)
    run = ml.open_run(folder)
    assert (run.settings.blur, run.settings.swap) == (0.5, False)
    assert identify(run.settings, run.data) == whole.id


def test_an_effects_name_is_fit_for_a_folder():
    effect = "emphasis(s=20, c=2.5) * ratio(m1=0.4, scope='row') * attenuation(alpha=1, kind='II')"
    name = run_name(fixed(effect=effect), DATA)
    assert re.fullmatch(r"mocov3-shapes-tiny-[\w.-]{1,40}-seed0-[0-9a-f]{10}", name)


def test_seeds_have_weights_of_their_own():
    """Though torch takes 32 of their 63 bits."""
    found = []
    for seed in (0, 1, 1 << 32, 5 << 32, (5 << 32) + 1, (1 << 63) - 1):
        with seeded(seed):
            found.append(tuple(torch.rand(4).tolist()))
    assert len(set(found)) == len(found)
    with seeded(7):
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(7)))
