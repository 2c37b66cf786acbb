"""Settings: the recipe fills in missing ones, and invalid ones are refused with a reason."""

import json
import pydoc
from inspect import signature
from pathlib import Path

import pytest
from pydantic import ValidationError
from torch import nn

import marginlens as ml
from marginlens import settings
from marginlens.data.sources import recipes
from marginlens.evals.knn import Knn
from marginlens.evals.probe import Probe
from marginlens.methods import METHODS
from marginlens.options import read_config, settle, show
from marginlens.runs.config import METHOD_SETTINGS, Pretrain, facts, takes
from marginlens.runs.model import make_method
from marginlens.runs.run import open_run
from marginlens.settings import build
from marginlens.train.commands import PretrainPlace


def test_the_recipe_of_the_paper():
    """ReSSL's small-image settings, number by number."""
    s = Pretrain(data="cifar10")
    assert (s.encoder, s.size, s.batch, s.epochs, s.warmup) == ("resnet18", 32, 256, 200, 5)
    assert (s.lr, s.momentum, s.weight_decay, s.decay_all) == (0.06, 0.9, 5e-4, True)
    assert (s.tau, s.hidden, s.out, s.ema, s.ema_schedule) == (0.25, 2048, 128, 0.99, "constant")
    assert (s.crop_scale, s.blur, s.weak_crop, s.symmetric, s.two_tau) == ((0.2, 1.0), 0.5, "resized", False, False)
    assert s.last_bn
    assert (s.predictor_bn, s.bn_splits) == (True, 4)
    assert not Pretrain(method="simclr").last_bn
    for name in ("stl10", "tinyimagenet"):
        assert (Pretrain(data=name).size, Pretrain(data=name).ema) == (64, 0.996)
    assert Pretrain(data="stl10").split == "train+unlabeled"
    byol = Pretrain(method="byol")
    assert (byol.tau, byol.beta, byol.last_bn) == (0.5, 0.0, False)
    p = Probe()
    assert (p.epochs, p.batch, p.lr, p.momentum, p.weight_decay) == (100, 256, 1.0, 0.9, 0.0)
    assert p.crop_scale == (0.08, 1.0)
    assert Knn().k == 200


@pytest.mark.parametrize("data", recipes("pretrain"))
@pytest.mark.parametrize("method", METHODS)
def test_what_is_given_wins_over_the_recipe_and_what_is_printed_is_what_runs(data, method):
    own = Pretrain(data=data, method=method, lr=0.123, batch=77, hidden=5, epochs=8)
    assert (own.lr, own.batch, own.hidden, own.warmup) == (
        0.123,
        77,
        5,
        min(own.epochs // 4, 2, recipes("pretrain")[data].get("warmup", 5)),
    )
    again = build(Pretrain, json.loads(json.dumps(own.model_dump(mode="json"))))
    assert again == own


@pytest.mark.parametrize(
    ("batch", "parts"),
    [(256, 4), ("256", 4), ("256.0", 4), (512, 8), (128, 2), (64, 1), (4, 1), (192, 3), (250, 1), (96, 1)],
)
def test_batch_norms_see_parts_of_64_images_where_these_fill_the_batch(batch, parts):
    assert Pretrain(batch=batch).bn_splits == parts
    assert Pretrain(batch=batch, method="byol").bn_splits == Pretrain(batch=batch, method="simclr").bn_splits == 1
    assert Pretrain(batch=batch, bn_splits=1).bn_splits == 1
    assert Pretrain(data="shapes", batch=batch).bn_splits == parts
    assert (Pretrain(data="shapes").batch, Pretrain(data="shapes").bn_splits) == (64, 1)


@pytest.mark.parametrize("epochs", [8, 8.0, "8", "8.0"])
def test_numbers_as_files_may_spell_them(epochs):
    assert Pretrain(epochs=epochs) == Pretrain(epochs=8)
    assert Pretrain(epochs=epochs).warmup == 2


@pytest.mark.parametrize("model", [Pretrain, Probe, Knn])
def test_help_lists_every_setting_with_its_default(model):
    text = pydoc.plain(pydoc.render_doc(model)).partition("Method resolution order")[0].replace("\n |  ", "\n")
    assert "Annotated" not in text
    for name, field in model.model_fields.items():
        assert f"\n{name} {settings.default(model, name)}\n    {field.description}\n" in text
    assert "\nlr (default: 0.06; shapes: 0.2)\n" in text or model is not Pretrain


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Pretrain().lr = 1.0


def test_one_effect_has_one_spelling():
    assert Pretrain(effect="Emphasis( s=5.0 )").effect == "emphasis(s=5)"
    assert Pretrain(effect=ml.Emphasis(s=5) * ml.Ratio(m1=0.4)).effect == "emphasis(s=5) * ratio(m1=0.4)"


REFUSED = {
    "there is no method 'moco'; did you mean 'mocov3'?": {"method": "moco"},
    "there is no encoder 'resnet19'; did you mean 'resnet18'?": {"encoder": "resnet19"},
    "there is no stem 'large'": {"stem": "large"},
    "there is no setting 'epcohs'; did you mean 'epochs'?": {"epcohs": 3},
    "there is no setting 'batch_size'; did you mean 'batch'?": {"batch_size": 64},
    "there is no setting 'temperature'; did you mean 'tau'?": {"temperature": 0.2},
    "there is no setting 'learning-rate'; did you mean 'lr'?": {"learning-rate": 0.1},
    "there is no setting 'backbone'; did you mean 'encoder'?": {"backbone": "resnet18"},
    "there is no setting 'projection_dim'; did you mean 'out'?": {"projection_dim": 128},
    "there is no effect 'emphasise'; did you mean 'emphasis'?": {"effect": "emphasise(s=2)"},
    "epochs is 0; it must be greater than or equal to 1": {"epochs": 0},
    "epochs is 'ten'; it must be a valid integer": {"epochs": "ten"},
    "lr is nan; it must be a finite number": {"lr": float("nan")},
    "tau is 0; it must be greater than or equal to 0.0001": {"tau": 0},
    "effect is 5; it must be text such as": {"effect": 5},
    "effect is None; it must be text such as": {"effect": None},
    "effect is {'emphasis': {'s': 5}}; it must be text": {"effect": {"emphasis": {"s": 5}}},
    "crop_scale is 1e-09 1; it must be two numbers": {"crop_scale": (1e-9, 1)},
    "beta is 2.0; it must be less than or equal to 1": {"beta": 2.0},
    "seed is -1": {"seed": -1},
    "seed is yes; it is not a switch: give its value": {"seed": True},
    "effect is no; it is not a switch": {"effect": False},
    "amp is yes; it is not a switch": {"amp": True},
    "size is 4; it must be from 8 to": {"size": 4},
    "warmup is 3 of 3 epochs; it must be shorter": {"epochs": 3, "warmup": 3},
    "crop_scale is 0.8 0.2; it must be two numbers in (0, 1], the smaller first": {"crop_scale": (0.8, 0.2)},
    "ema means nothing to simclr; leave it out": {"method": "simclr", "ema": 0.9},
    "symmetric means nothing to simclr": {"method": "simclr", "symmetric": True},
    "predictor_bn means nothing to simclr": {"method": "simclr", "predictor_bn": True},
    "bn_splits is 0; it must be greater than or equal to 1": {"bn_splits": 0},
    "bn_splits is 7; it must cut a batch of 256 into equal parts of two or more": {"bn_splits": 7},
    "bn_splits is 256; it must cut a batch of 256 into equal parts of two or more": {"bn_splits": 256},
    "two_tau means nothing to byol": {"method": "byol", "two_tau": True},
    "beta is 1; byol has no negatives": {"method": "byol", "beta": 1.0},
    "it is only a learning rate": {"method": "byol", "effect": "emphasis(s=5)"},
    "m1 acts through negatives, and BYOL has none": {"method": "byol", "effect": "ratio(m1=0.4)"},
    "alpha acts through negatives": {"method": "byol", "effect": "attenuation(alpha=1)"},
    "m2 acts through negatives": {"method": "byol", "effect": "margin(m2=0.2)"},
    "beta is 0, which leaves mocov3 without negatives": {"beta": 0.0},
    "beta is 0, which leaves simclr without negatives": {"method": "simclr", "beta": 0, "effect": "emphasis(s=2)"},
}


class Alone(nn.Module):
    """A method without a teacher, a predictor and negatives."""

    def __init__(self, backbone, *, tau=0.5, effect="plain", hidden=8, out=4):
        super().__init__()
        self.taken = {"tau": tau, "effect": effect, "hidden": hidden, "out": out}


def test_a_methods_arguments_are_its_settings(monkeypatch):
    """One that it does not take is refused: it would name another run and change nothing."""
    monkeypatch.setitem(METHODS, "alone", Alone)
    asked = {"method": "alone", "data": "shapes", "beta": 0.0}
    settings = build(Pretrain, asked | {"tau": 0.3})
    assert make_method(settings).taken == {"tau": 0.3, "effect": "plain", "hidden": 256, "out": 64}
    assert "ema" not in facts(settings, "")["settings"]
    for name, value in {"ema": 0.5, "symmetric": True, "bn_splits": 4, "two_tau": True, "last_bn": True}.items():
        with pytest.raises(ValueError, match=f"{name} means nothing to alone; leave it out"):
            build(Pretrain, asked | {name: value})
    with pytest.raises(ValueError, match="alone has no negatives"):
        build(Pretrain, asked | {"beta": 0.5})


def test_the_effects_of_a_method_without_negatives_are_said_by_its_name(monkeypatch):
    monkeypatch.setitem(METHODS, "alone", Alone)
    with pytest.raises(ValueError, match="m1 acts through negatives, and Alone has none; Alone takes margin"):
        build(Pretrain, {"method": "alone", "data": "shapes", "beta": 0.0, "effect": "ratio(m1=0.4)"})


def test_a_methods_class_that_is_written_anew_is_asked_anew(monkeypatch):
    monkeypatch.setitem(METHODS, "alone", Alone)
    assert not takes("alone", "symmetric")
    monkeypatch.setitem(METHODS, "alone", METHODS["byol"])
    assert takes("alone", "symmetric")


@pytest.mark.parametrize("method", METHODS)
def test_every_argument_of_a_method_is_a_setting_with_the_same_default(method):
    """Else it could not be set, and a run would not be named by it. What the recipe has otherwise is said here."""
    otherwise = {"mocov3": {"bn_splits": 4}}.get(method, {})
    apart = {"backbone", "features", "size", "impl"}
    names = {argument: name for name, argument in METHOD_SETTINGS.items() if name != "ema_schedule"}
    given = {name: x.default for name, x in signature(METHODS[method]).parameters.items() if name not in apart}
    assert given.keys() <= names.keys()
    settings = Pretrain(method=method)
    for argument, default in given.items():
        name = names[argument]
        assert str(getattr(settings, name)) == str(otherwise.get(name, default)), name


@pytest.mark.parametrize("line", REFUSED)
def test_refused_in_one_line(line):
    for make in (lambda given: build(Pretrain, given), lambda given: Pretrain(**given)):
        with pytest.raises(ValueError) as caught:
            make(REFUSED[line])
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def test_evaluations_are_refused_in_one_line_too():
    for make, line in (
        (lambda: Probe(learning_rate=1.0), "there is no setting 'learning_rate'; did you mean 'lr'?"),
        (lambda: Knn(n_neighbors=5), "there is no setting 'n_neighbors'; did you mean 'k'?"),
        (lambda: Probe(epochs=0), "epochs is 0; it must be greater than or equal to 1"),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == line


def test_a_synonym_is_not_a_name_and_leads_to_one():
    """A word stands for one name wherever both of two names are there."""
    every = {*Pretrain.model_fields, *PretrainPlace.model_fields, *Knn.model_fields, "from"} - {"temperature"}
    for ours, others in settings._SYNONYMS.items():
        assert ours in every
        assert not every & {*others.split()}
    for theirs in " ".join([*settings._SYNONYMS.values(), settings._PLACES, settings._WIDTHS]).split():
        assert settings.synonym(theirs, Pretrain.model_fields) in {"", *Pretrain.model_fields}
    assert settings.synonym("temperature", Knn.model_fields) == ""


@pytest.mark.parametrize("effect", ["plain", "margin(m1=0.4)", "emphasis(c=2.5)", "margin(m1=0.4) * emphasis(c=1)"])
def test_byol_takes_what_makes_sense(effect):
    assert Pretrain(method="byol", effect=effect).effect == effect


def test_a_file_then_the_command_line_then_the_recipe(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("data: shapes\nepochs: 7\nlr: 0.5\ncrop-scale: [0.3, 0.9]\nruns: elsewhere\n")
    chosen, place = settle((Pretrain, PretrainPlace), str(file), {"lr": 0.25})
    assert (chosen.epochs, chosen.lr, chosen.crop_scale, chosen.encoder) == (7, 0.25, (0.3, 0.9), "tiny")
    assert place.runs == "elsewhere"
    (tmp_path / "printed.json").write_text(show(chosen, place))
    assert settle((Pretrain, PretrainPlace), str(tmp_path / "printed.json"), {}) == [chosen, place]


def test_a_run_s_own_configuration_is_a_file_too(whole):
    assert build(Pretrain, read_config(whole.path / "config.json", [Pretrain])) == whole.settings


def test_what_an_older_run_did_not_know_yet_is_not_today_s_recipe(whole, tmp_path):
    """MoCo v3's predictor has ended in a batch norm by the recipe only since there is that setting."""
    older = json.loads((whole.path / "config.json").read_text())
    recipe = older["settings"] | {"data": "cifar100", "encoder": "resnet18"}
    older["settings"] = {name: value for name, value in recipe.items() if name not in ("predictor_bn", "bn_splits")}
    (tmp_path / "config.json").write_text(json.dumps(older))
    read = build(Pretrain, read_config(tmp_path / "config.json", [Pretrain]))
    assert (read.method, read.predictor_bn, read.bn_splits) == ("mocov3", False, 1)


def test_every_committed_run_s_configuration_is_that_run():
    records = sorted((Path(__file__).parents[2] / "results" / "runs").glob("*/config.json"))
    assert len(records) > 30
    for path in records:
        assert build(Pretrain, read_config(path, [Pretrain])) == open_run(path.parent).settings


BROKEN = {
    "is not YAML": ("a.yaml", "a: [1"),
    "is not JSON": ("a.json", "{'a': 1}"),
    "has epochs twice; keep one": ("c.yaml", "epochs: 2\ndata: shapes\nepochs: 3\n"),
    "has data twice": ("c.json", '{"data": "shapes", "data": "cifar10"}'),
    "has weight_decay twice": ("d.yaml", "weight-decay: 0\nweight_decay: 0.1\n"),
    "must hold settings by name": ("a.yml", "- 1\n- 2\n"),
    "there is no setting 'lrr'; did you mean 'lr'?": ("b.yaml", "lrr: 1\n"),
    "there is no setting 'learning_rate'; did you mean 'lr'?": ("e.yaml", "learning-rate: 1\n"),
}


@pytest.mark.parametrize("line", BROKEN)
def test_files_that_cannot_be_read(tmp_path, line):
    name, text = BROKEN[line]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        settle((Pretrain,), str(tmp_path / name), {})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read"):
        settle((Pretrain,), str(tmp_path / "nowhere.yaml"), {})


def test_what_is_merged_may_be_said_again(tmp_path):
    """YAML's own way to override."""
    (tmp_path / "a.yaml").write_text("<<: &short {epochs: 1, batch: 64}\nepochs: 2\ndata: shapes\n")
    assert read_config(tmp_path / "a.yaml") == {"epochs": 2, "batch": 64, "data": "shapes"}
    (tmp_path / "b.yaml").write_text("<<: [{epochs: 1}, {epochs: 3, seed: 4}]\n")
    assert read_config(tmp_path / "b.yaml") == {"epochs": 1, "seed": 4}


def test_off_is_off_though_yaml_takes_it_for_no():
    assert build(Pretrain, {"amp": False}).amp == "off"
