"""The registry alone: no unnoticed change, every cell can be run, one home per number."""

import hashlib
import json
import math
import pickle
from collections import Counter

import pytest

import marginlens as ml
from marginlens.evals.probe import Probe
from marginlens.paper import TABLES, Published, elsewhere, figures, find, hyper, readings, recipe
from marginlens.paper.cells import published
from marginlens.paper.tables import ROWS
from marginlens.runs.config import Pretrain
from marginlens.settings import build

CHECKSUMS = {
    "tab1": "9441a02dea6d38ae",
    "tab2": "2b6b381fa56ff719",
    "tab3": "b989350c07af033e",
    "tab4": "9347d558e7f69757",
    "tab5": "f94ad908ea6c09de",
    "tab6": "df1729eca27ae80e",
    "tab7": "c3338cb087827d13",
    "tab8": "40f4763a347a7beb",
    "tab9": "41977a2d06fb41bb",
    "tab10": "9682e8fd27d574f2",
}
"""Of the numbers as stored; they were compared with the LaTeX source, number by number."""

CELLS = [cell for table in TABLES.values() for cell in table.cells]
RUNNABLE = [cell for cell in CELLS if cell.settings is not None]


def checksum(table):
    numbers = [[c.path, c.row, c.column, str(c.published)] for c in table.cells if c.published]
    numbers += [[v.row, v.column, v.value] for v in table.values]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def full(settings):
    return build(Pretrain, settings).model_dump()


def test_the_numbers_are_those_that_were_compared():
    assert {key: checksum(t) for key, t in TABLES.items() if t.kind != "figure"} == CHECKSUMS


def test_what_there_is():
    assert list(TABLES) == [f"tab{i}" for i in range(1, 11)] + [f"fig{i}" for i in range(1, 9)]
    counts = {"tab1": 40, "tab2": 48, "tab3": 48, "tab4": 4, "tab9": 16, "tab10": 16}
    assert Counter(c.table for c in CELLS if c.published) == counts
    assert [len(TABLES[f"tab{i}"].values) for i in range(5, 9)] == [16, 8, 24, 8]
    assert [TABLES[key].name for key in ("tab10", "fig3")] == ["Tab. 10", "Fig. 3"]
    assert all(key == table.key for key, table in TABLES.items())


def test_paths_and_addresses_are_unique():
    for table in TABLES.values():
        paths = [cell.path.lower() for cell in table.cells]
        assert len(set(paths)) == len(paths)
        assert all(cell.table == table.key for cell in table.cells)
    addresses = [x.address for table in TABLES.values() for x in (*table.cells, *table.values)]
    assert len(set(addresses)) == len(addresses)
    assert len(set(CELLS)) == len(CELLS)


def test_every_cell_builds():
    for cell in RUNNABLE:
        for settings in (cell.settings, *cell.alternatives.values()):
            built = build(Pretrain, settings)
            assert "seed" not in settings
            assert built.effect == settings["effect"] == str(ml.effect(settings["effect"]))
            assert built.epochs == cell.at.get("epochs", recipe.EPOCHS)
        assert not cell.why_not


def test_what_cannot_be_run_says_why():
    stopped = [cell for cell in CELLS if cell.settings is None]
    assert {cell.table for cell in stopped} == {"tab4"}
    assert all("ImageNet" in cell.why_not for cell in stopped)
    assert [cell.at for cell in stopped] == [
        {"epochs": 100, "batch": 4096},
        {"epochs": 100, "batch": 4096, "s": 10, "c": 1.5},
        {"epochs": 100, "batch": 4096},
        {"epochs": 100, "batch": 4096, "s": 2, "c": 1},
    ]


def test_the_recipe_is_what_the_paper_states():
    """Left out of the cells, because the defaults have it: a default that changes must be written into the cells."""
    for cell in RUNNABLE:
        built, method = build(Pretrain, cell.settings), cell.path.split("/")[0]
        stated = recipe.STATED | {"batch": cell.at.get("batch", recipe.BATCH)}
        stated |= {"tau": recipe.STATED_TAU[method]} if method in recipe.STATED_TAU else {}
        assert {name: getattr(built, name) for name in stated} == stated
        assert built.encoder == "resnet18"
        assert built.last_bn is (method == "MoCo")
    probe = Probe()
    assert {name: getattr(probe, name) for name in recipe.STATED_PROBE} == recipe.STATED_PROBE


def test_settings_are_no_longer_than_needed():
    """Equal runs have equal settings only if nothing is said twice."""
    for cell in RUNNABLE:
        rest = {
            name: value for name, value in cell.settings.items() if name not in ("method", "data", "effect", "epochs")
        }
        assert set(rest) <= {"batch"}
        assert rest.get("batch") != recipe.BATCH
    by_settings = {json.dumps(c.settings, sort_keys=True) for c in RUNNABLE}
    by_meaning = {json.dumps(full(c.settings), sort_keys=True) for c in RUNNABLE}
    assert len(by_settings) == len(by_meaning)


@pytest.mark.parametrize(("transfer", "probing"), [("tab3", "tab2"), ("tab10", "tab9")])
def test_transfer_uses_the_backbones_that_were_probed(transfer, probing):
    for cell in TABLES[transfer].cells:
        method, places, row = cell.path.split("/")
        source, target = places.split("->")
        (same,) = find(f"{method}/{source}/{row}", probing)
        assert cell.settings == same.settings
        assert cell.to == recipe.DATA[target] != cell.settings["data"]
        assert (cell.measure, same.measure, same.to) == ("transfer", "probe", "")


@pytest.mark.parametrize("key", ["tab2", "tab3"])
def test_parameters_come_from_the_hyper_parameter_tables(key):
    """Spelled anew from the tables' values; each value is used, and by the rows that its table is for."""
    used = set()
    sources = {name: table for name, table in ROWS.values() if table}
    for cell in TABLES[key].cells:
        method, places, row = cell.path.split("/")
        data = places.split("->")[0]
        if row == "plain":
            assert (cell.settings["effect"], cell.at) == ("plain", {})
            continue
        values = [v for v in sources[row].values if (v.method, v.data) == (method, data) and v.value is not None]
        used |= {v.address for v in values}
        name = {"margins": "margin", "ratio": "ratio"}.get(row, "emphasis")
        text = f"{name}({', '.join(f'{v.symbol}={v.value}' for v in values)})"
        assert cell.settings["effect"] == str(ml.effect(text))
        assert cell.at == {v.symbol: v.value for v in values}
    assert used == {v.address for table in hyper.TABLES for v in table.values if v.value is not None}


def test_a_value_has_one_home(monkeypatch):
    """A changed value of a hyper-parameter table changes the cell that is built from it."""
    assert hyper.given(hyper.CURVES, "BYOL", "STL10") == {"c": 5.0}
    with pytest.raises(ValueError, match=r"Tab\. 6 has no row for BYOL on STL10; its rows are MoCov3, CIFAR10;"):
        hyper.given(hyper.SCALES, "BYOL", "STL10")
    monkeypatch.setattr("marginlens.paper.tables.given", lambda table, method, data: {"s": 123.0})
    from marginlens.paper.tables import _PROBING, _methods

    rows = [c.settings["effect"] for c in _methods("tab2", _PROBING, "probe") if not c.path.endswith("plain")]
    assert set(rows) == {"emphasis(s=123)"}


def test_no_attenuation_is_the_plain_run():
    for cell in find("*/alpha=0", "tab1"):
        (plain,) = (other for other in elsewhere(cell) if other.table == "tab2")
        assert plain.path.endswith("/plain")
        assert plain.published.mean == cell.published.mean


def test_the_ratio_has_two_readings():
    ratios = [cell for cell in RUNNABLE if cell.settings["effect"].startswith("ratio")]
    assert {cell.table for cell in ratios} == {"tab2", "tab3", "fig7"}
    assert {cell.path for cell in CELLS if "scope=row" in cell.alternatives} == {cell.path for cell in ratios}
    for cell in ratios:
        m1 = ml.effect(cell.settings["effect"]).m1
        assert cell.settings["effect"] == str(ml.Ratio(m1))
        assert cell.alternatives["scope=row"] == cell.settings | {"effect": str(ml.Ratio(m1, scope="row"))}


def test_batch_norms_of_moco_have_two_readings():
    """Each reading of a cell comes with whole batches too; the other methods have one."""
    for cell in RUNNABLE:
        built = {what: build(Pretrain, settings) for what, settings in cell.alternatives.items()}
        first = build(Pretrain, cell.settings)
        if first.method != "mocov3":
            assert set(built) <= {"scope=row"}
            continue
        assert first.bn_splits == 4
        assert built["bn_splits=1"] == first.model_copy(update={"bn_splits": 1})
        if "scope=row" in built:
            both = built["scope=row"].model_copy(update={"bn_splits": 1})
            assert built.pop("scope=row, bn_splits=1") == both != built.pop("scope=row")
        assert set(built) == {"bn_splits=1"}


def test_find_by_readings():
    (base,) = find("MoCo/CIFAR10/pos", "tab2")
    assert find("moco/cifar10/pos", "tab2", every_reading=True) == readings(base)
    found = find("*/BN_splits=1", "tab2", every_reading=True)
    assert {cell.reading for cell in found} == {"bn_splits=1"}
    assert [cell.path for cell in found] == [f"{c.path}/bn_splits=1" for c in find("MoCo/*", "tab2")]
    with pytest.raises(ValueError, match=r"no cell of Tab\. 2 matches"):
        find("*/bn_splits=1", "tab2")
    with pytest.raises(ValueError, match="near it: MoCo/CIFAR10/pos/bn_splits=1,"):
        find("MoCo/CIFAR10/pos/bn_split=1", "tab2", every_reading=True)


FIGURES = [table for table in TABLES.values() if table.kind == "figure" and table.cells]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_figures_say_what_is_unknown_and_what_is_ours(figure):
    assert "not in the text: unknown" in figure.note
    assert {"method", "data", *figure.cells[0].at} - set(figure.given), "a figure with nothing of ours needs no note"
    assert "ours" in figure.note
    for cell in figure.cells:
        assert cell.published is None
        swept = {name for name in cell.at if name not in figure.given}
        no_effect = math.isinf(cell.at.get("c", 0)) or cell.at.get("m1") == 0
        assert cell.ours is (bool(swept) or no_effect)
        assert ml.effect(cell.settings["effect"]) == effect_at(cell)


def effect_at(cell):
    """The effect by a figure's coordinates."""
    if cell.at.get("m1"):
        return ml.Ratio(cell.at["m1"])
    s, c = cell.at.get("s", 1.0), cell.at.get("c", math.inf)
    return ml.Plain() if (s, c) == (1.0, math.inf) else ml.Emphasis(s, c)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_figures_can_be_redrawn(figure):
    """Panel, series and x tell every point apart."""
    places = Counter(
        (c.settings["data"], c.settings["method"] if figure.series == "method" else c.at[figure.series], c.at[figure.x])
        for c in figure.cells
    )
    assert set(places.values()) == {1}


def test_maps_need_no_run():
    maps = [t for t in TABLES.values() if t.kind == "figure" and not t.cells]
    assert [t.key for t in maps] == ["fig1", "fig2", "fig8"]
    assert all("no run" in t.note for t in maps)
    assert TABLES["fig2"].fixed == {"beta": 1, "tau": 0.25, "m1": 0.4}


def test_our_grid_of_s_has_the_values_of_the_tables():
    printed = [
        (v.method, v.value) for t in (hyper.SCALES, hyper.CURVES) for v in t.values if v.symbol == "s" and v.value
    ]
    printed += [("MoCo", cell.at["s"]) for cell in TABLES["tab9"].cells]
    assert all(value in figures.OUR_SCALES[method] for method, value in printed)


def test_a_figures_point_finds_its_number_in_a_table():
    (point,) = find("MoCo/CIFAR10/s=20", "fig3")
    found = elsewhere(point)
    assert [cell.address for cell in found if cell.published] == ["Tab. 2, row MoCo + pos., column CIFAR10"]
    assert point not in found
    assert elsewhere(find("MoCo/ImageNet/plain")[0]) == ()


def test_find():
    (cell,) = find("MoCo/CIFAR10/pos", "tab2")
    assert (cell.published, cell.address) == (
        Published(90.663, 0.159),
        "Tab. 2, row MoCo + pos., column CIFAR10",
    )
    assert [c.path for c in find("moco/cifar10/*", "tab2")] == [
        f"MoCo/CIFAR10/{row}" for row in ("plain", "margins", "pos", "pos+curv", "ratio")
    ]
    assert {c.table for c in find("MoCo/CIFAR10/*")} == {"tab1", "tab2", "tab9", "fig3", "fig5", "fig6", "fig7"}
    assert find("*") == tuple(CELLS)
    (cell,) = find("MoCo/CIFAR100->CIFAR10/plain")
    assert str(cell.published) == "75.417 ± 0.241"


@pytest.mark.parametrize(
    ("pattern", "table", "line"),
    [
        ("MoCo/CIFAR10/poss", "tab2", r"no cell of Tab\. 2 matches 'MoCo/CIFAR10/poss'; near it: MoCo/CIFAR10/pos, "),
        ("zzz", "", "no cell of the paper matches 'zzz'; paths are method/data/row, such as MoCo/CIFAR10/"),
        ("*", "tab99", "there is no table 'tab99'; there are tab1, "),
        ("*", "tab5", r"Tab\. 5 has no cells to run"),
        ("", "", "no cell of the paper matches ''"),
    ],
)
def test_what_is_not_found(pattern, table, line):
    with pytest.raises(ValueError, match=line) as error:
        find(pattern, table)
    assert "\n" not in str(error.value)


def test_numbers_print_as_they_were_printed():
    for text in ("89.413 ± 0.109", "42.420", "68.9", "88.000 ± 0.078"):
        assert str(published(text)) == text
    for text in ("89.413 +- 0.109", "", "89", "89.413 ± ", "-"):
        with pytest.raises(ValueError, match="is not a published number"):
            published(text)


def test_cells_travel():
    """To other processes and into files."""
    assert pickle.loads(pickle.dumps(TABLES)) == TABLES
    for cell in RUNNABLE:
        assert json.loads(json.dumps(cell.settings)) == cell.settings
