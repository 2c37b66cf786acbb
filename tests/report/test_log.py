"""The appendix of runs against the records: every number in its tables comes from a record."""

import re

import pytest

from marginlens.paper import TABLES
from marginlens.report.commands import read
from marginlens.report.grids import signed
from marginlens.runs.config import Pretrain
from marginlens.runs.store import scan
from marginlens.settings import build
from tests.report.measured import ROOT, rows

APPENDIX, FINDINGS = "docs/paper/appendix.md", "docs/paper/findings.md"
DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
METHOD = {"MoCo v3": "mocov3", "BYOL": "byol", "SimCLR": "simclr"}
OTHER = {"cifar10": "cifar100", "cifar100": "cifar10"}
SHORT = {"epochs": 40, "holdout": 10000}


def settings(row, **more):
    """What a row's words stand for; a table without a column for the method is of MoCo v3, without effects of plain."""
    found = {"method": METHOD[row.get("method", "MoCo v3")], "data": DATA[row.get("data", "CIFAR-100")]}
    found |= {"effect": row.get("effect", "plain"), "seed": row.get("seed", 0), **more}
    for word in filter(None, row.get("otherwise", "").replace("`", "").split(", ")):
        off = re.fullmatch(r"no (\w+)", word)
        name, _, value = (off[1], "", False) if off else word.partition("=")
        found[name] = True if value == "" else value
    return build(Pretrain, found)


@pytest.fixture(scope="module")
def runs():
    return {entry.settings: entry for entry in scan(ROOT / "results" / "runs")}


def top1(entry, kind, data, **chosen):
    """Of the evaluation with these settings; nothing where there is none."""
    wanted = {"epochs": 100, "holdout": 0, "lr": 1.0} | chosen
    found = [one for one in entry.evaluations if (one["kind"], one["data"]) == (kind, data)]
    tops = [one["top1"] for one in found if all(one.settings.get(name, 0) == x for name, x in wanted.items())]
    assert len(tops) <= 1
    return f"{tops[0]:.2f}" if tops else ""


def same(said, known):
    assert said.replace("not measured", "") == known


def test_full_runs(runs):
    """And each run of full length has its row."""
    known = set()
    for row in rows(APPENDIX, "Full length"):
        chosen = settings(row)
        known.add(chosen)
        entry = runs[chosen]
        same(row["probe"], top1(entry, "probe", chosen.data))
        same(row["transfer"], top1(entry, "transfer", OTHER[chosen.data]))
        same(row["kNN"], f"{entry.result['knn']:.2f}")
    assert known == {chosen for chosen in runs if chosen.epochs == 200}


def test_published_numbers(runs):
    published = {
        (cell.settings["method"], cell.settings["data"], cell.settings["effect"], cell.to): f"{cell.published.mean:.3f}"
        for key in ("tab1", "tab2", "tab3")
        for cell in TABLES[key].cells
    }
    for row in rows(APPENDIX, "Full length"):
        chosen = settings(row)
        effect = chosen.effect.replace(", scope=row", "")  # the paper has one number for both readings
        of = chosen.method, chosen.data, effect
        transfer = published[*of, OTHER[chosen.data]] if row["transfer"] else ""
        assert (row[5], row[7]) == (published[*of, ""], transfer)


GAINED = {
    "margins": ("margins", ""),
    "pos.": ("pos", ""),
    "pos. & curv.": ("pos+curv", ""),
    "ratio": ("ratio", ""),
    "ratio of the whole row": ("ratio", "scope=row"),
    "alpha = 0.25, type I": ("alpha=0.25/I", ""),
    "alpha = 0.25, type II": ("alpha=0.25/II", ""),
    "alpha = 1, type I": ("alpha=1/I", ""),
    "alpha = 1, type II": ("alpha=1/II", ""),
}
COLUMNS = {
    "CIFAR-10": "CIFAR10",
    "CIFAR-100": "CIFAR100",
    "to CIFAR-10": "CIFAR100->CIFAR10",
    "to CIFAR-100": "CIFAR10->CIFAR100",
}


def test_gains():
    """With quarters, with whole batches, published."""
    tables = read([ROOT / "results" / "runs"]).lines
    lines = {line.cell.path: line for key in ("tab1", "tab2", "tab3") for line in tables[key]}
    found = {row["gain over plain"]: row for row in rows(FINDINGS, "At the paper's rate")}
    assert list(found) == list(GAINED)
    for name, (effect, reading) in GAINED.items():
        for column, data in COLUMNS.items():
            if "alpha" in name and "to" in column:  # Tab. 1 has no transfers
                assert not found[name][column]
                continue
            both = ([reading] if reading else [], [reading, "bn_splits=1"] if reading else ["bn_splits=1"])
            quarters, whole = (lines.get("/".join(["MoCo", data, effect, *[", ".join(b)] * bool(b)])) for b in both)
            gains = [quarters and quarters.gain, whole.gain, whole.published_gain]
            assert found[name][column].split(" / ") == [signed(gain) or "not run" for gain in gains]


def test_looks(runs):
    known = set()
    for row in rows(APPENDIX, "Short"):
        chosen = settings(row, epochs=100)
        known.add(chosen)
        entry = runs[chosen]
        for name in (name for name in row if str(name).startswith("lr ")):
            same(row[name], top1(entry, "probe", "cifar100", **SHORT, lr=float(name.split()[1])))
        if "probe" in row:
            same(row["probe"], top1(entry, "probe", "cifar100", **SHORT))
            same(row["kNN (test set)"], f"{entry.result['knn']:.2f}")
    assert known == {chosen for chosen in runs if chosen.epochs == 100}


def test_learning_rates(runs):
    """Of probes on CIFAR-100, or of transfers to the data that a table names."""
    known = set()
    for row in rows(APPENDIX, "The probe's learning rate"):
        kind, data = ("transfer", DATA[row["to"]]) if "to" in row else ("probe", DATA[row.get("data", "CIFAR-100")])
        chosen = settings(row, data=OTHER[data] if kind == "transfer" else data)
        known.add(chosen)
        found = [one for one in runs[chosen].evaluations if (one["kind"], one["data"]) == (kind, data)]
        assert {row["feature norm"]} == {f"{one['feature_norm']:.2f}" for one in found}
        tops = {name: said for name, said in row.items() if str(name).startswith("lr ")}
        for name, said in tops.items():
            same(said, top1(runs[chosen], kind, data, lr=float(name.split()[1])))
        assert len([said for said in tops.values() if said]) == len(found)
    full = {chosen for chosen, entry in runs.items() if chosen.epochs == 200 and len(entry.evaluations) > 2}
    moco = {chosen for chosen in full if (chosen.method, chosen.data) == ("mocov3", "cifar100") and chosen.predictor_bn}
    assert moco | {chosen for chosen in full if chosen.method != "mocov3"} <= known
