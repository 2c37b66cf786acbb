"""A grid is every combination of its values, typed as settings are. An invalid one gives one line."""

import pytest

from marginlens.runs.config import Pretrain
from marginlens.sweep import grid


def test_every_combination_once():
    axes = grid.parse(["effect=emphasis(s=2)|emphasis(s=5)", "seed=0|1|2"])
    found = grid.expand({"data": "shapes", "epochs": 3}, axes)
    assert grid.size(axes) == len(found) == len(set(found)) == 6
    assert {(s.effect, s.seed) for s in found} == {(e, n) for e in ("emphasis(s=5)", "emphasis(s=2)") for n in range(3)}
    assert {(s.data, s.epochs, s.encoder) for s in found} == {("shapes", 3, "tiny")}


def test_every_setting_can_be_in_a_grid():
    """Any field, as text, comes out as the value that was written."""
    texts = {"crop_scale": "0.3 1|0.4,1", "weights": "a.safetensors|b.safetensors", "beta": "0.5|1", "warmup": "0|1"}
    texts |= {
        "last-bn": "true|false",
        "method": "mocov3|byol",
        "data": "shapes|cifar10",
        "effect": "plain|ratio(m1=0.4)",
    }
    special = {"split", "stem", "encoder", "ema_schedule", "weak_crop", "amp", "size"}
    for name in Pretrain.model_fields:
        if name in texts or name.replace("_", "-") in texts or name in special:
            continue
        default = getattr(Pretrain(), name)
        texts[name] = "true|false" if isinstance(default, bool) else str(default)
    for name, text in texts.items():
        values = [getattr(s, name.replace("-", "_")) for s in grid.expand({}, grid.parse([f"{name}={text}"]))]
        assert all(isinstance(v, type(getattr(Pretrain(), name.replace("-", "_")))) for v in values), name
    assert grid.parse(["crop_scale=0.3 1|0.4,1"]) == {"crop_scale": [("0.3", "1"), ("0.4", "1")]}
    assert [s.last_bn for s in grid.expand({}, grid.parse(["last-bn=true|false"]))] == [True, False]


def test_a_grid_over_data_takes_each_one_s_recipe():
    shapes, stl10 = grid.expand({"epochs": 40}, grid.parse(["data=shapes|stl10"]))
    assert (shapes.encoder, shapes.batch, stl10.encoder, stl10.size) == ("tiny", 64, "resnet18", 64)


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        (["seed"], "has no '='"),
        (["efect=plain"], "did you mean 'effect'?"),
        (["seed=0||1"], "empty value"),
        (["crop_scale="], "empty value"),
        (["seed=0", "seed=1"], "'seed' twice"),
        (["seed=0|0"], "seed=0 and seed=0 are the same run"),
        (["tau=0.2|0.20"], "tau=0.2 and tau=0.20 are the same run"),
        (["seed=zero"], "the grid's seed=zero cannot be run"),
        (["seed=0,1"], "unable to parse string as an integer; values have | between them"),
        (
            ["method=mocov3|simclr", "ema=0.9|0.5"],
            "the grid's method=simclr, ema=0.9 cannot be run: ema means nothing to simclr",
        ),
        (["seed=" + "|".join(map(str, range(200))), "tau=" + "|".join(str(1 + i) for i in range(200))], "40,000 runs"),
    ],
)
def test_impossible_grids(grids, said):
    with pytest.raises(ValueError) as caught:
        grid.expand({}, grid.parse(grids))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grids", [["seed=0|1"], ["method=mocov3|simclr"], ["epochs=8|40", "data=shapes|stl10"]])
def test_what_runs_share_gives_the_same_runs(grids):
    axes, base = grid.parse(grids), {"data": "shapes", "epochs": 8, "seed": 3, "lr": 0.1}
    found = grid.common(base, axes)
    assert not found.keys() & axes.keys()
    assert (found["lr"], found["momentum"]) == (0.1, 0.9)
    assert grid.expand(found, axes) == grid.expand(base, axes)
