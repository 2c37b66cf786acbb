"""Where each run is shown: laws about which runs may stand beside a published number."""

import fcntl
import json
import re
import statistics

import pytest

from marginlens.paper import TABLES
from marginlens.report.commands import summary
from marginlens.report.figures import figure
from marginlens.report.gather import gather
from marginlens.report.grids import looks_grid, paper_grid
from marginlens.report.latex import latex
from marginlens.report.page import page
from marginlens.report.tables import cells_grid, grids, settings_grid
from marginlens.runs.run import open_run
from marginlens.runs.store import scan
from tests.report.folders import evaluate, settle, write_run


def read(*stores, only=()):
    return gather([entry for store in stores for entry in scan(store)], TABLES, only)


def line(found, path="MoCo/CIFAR10/plain", table="tab2"):
    (one,) = [x for x in found.lines[table] if x.cell.path == path]
    return one


def looks(found, table="tab2"):
    return [(x.cell.path, x.label, x.mean) for x in found.looks[table]]


def others(found):
    """Runs that stand in no cell."""
    own = {run.key for lines in found.lines.values() for x in lines for run in x.runs}
    return [run for run in found.runs if run.key not in own]


def texts(grid):
    return [dict(zip(grid.head, (item.text for item in row), strict=True)) for row in grid.rows]


@pytest.fixture
def store(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_mean_and_sample_deviation_over_seeds_beside_the_published_number(store):
    tops = [89.9, 90.12, 89.8]
    for seed, top1 in enumerate(tops):
        write_run(store, data="cifar10", seed=seed, probe=top1, transfer={"cifar100": 43 + seed})
    found = read(store)
    ours = line(found)
    assert (ours.mean, ours.std) == (pytest.approx(statistics.mean(tops)), pytest.approx(statistics.stdev(tops)))
    assert ours.difference == pytest.approx(statistics.mean(tops) - 89.413)
    assert [v.run.settings.seed for v in ours.values] == [0, 1, 2]
    assert line(found, "MoCo/CIFAR10->CIFAR100/plain", "tab3").mean == 44
    assert line(found, "MoCo/CIFAR10/alpha=0", "tab1").mean == ours.mean  # the same run stands in several tables
    assert line(found, "MoCo/CIFAR10/s=1", "fig3").mean == ours.mean
    assert not others(found)
    assert not any(found.looks.values())  # 200 of the 1,000 epochs of Tab. 9 are Tab. 2's own


def test_one_seed_has_no_deviation(store):
    write_run(store, data="cifar10", probe=90.0)
    assert line(read(store)).std is None


def test_another_reading_of_the_paper_stands_where_it_ran_beside_the_same_number(store):
    write_run(store, data="cifar10", effect="ratio(m1=1.6, scope=row)", probe=89.0, transfer={"cifar100": 42})
    found = read(store)
    other = line(found, "MoCo/CIFAR10/ratio/scope=row")
    assert (other.cell.row, other.mean, other.difference) == ("MoCo + ratio. (scope=row)", 89.0, pytest.approx(-1.1))
    assert line(found, "MoCo/CIFAR10->CIFAR100/ratio/scope=row", "tab3").mean == 42
    assert line(found, "MoCo/CIFAR10/ratio").mean is None
    assert not others(found)
    shown = [x.cell.path for x in found.lines["tab2"]]
    assert shown.index("MoCo/CIFAR10/ratio/scope=row") == shown.index("MoCo/CIFAR10/ratio") + 1
    assert sum("scope" in path for path in shown) == 1  # what did not run is not shown by every reading


def test_whole_batches_are_another_reading_of_moco(store):
    write_run(store, data="cifar100", probe=60.4)
    write_run(store, data="cifar100", bn_splits=1, probe=61.9)
    write_run(store, data="cifar100", method="simclr", probe=62.0)
    found = read(store)
    assert line(found, "MoCo/CIFAR100/plain").mean == 60.4
    other = line(found, "MoCo/CIFAR100/plain/bn_splits=1")
    assert (other.cell.row, other.mean) == ("MoCo (bn_splits=1)", 61.9)
    assert line(found, "SimCLR/CIFAR100/plain").mean == 62.0
    assert not others(found)
    assert [row["row"] for row in texts(paper_grid(TABLES["tab2"], found.shown["tab2"]))] == [
        "MoCo",
        "MoCo (bn_splits=1)",
        "SimCLR",
    ]
    assert re.search(rf">{len(TABLES['tab2'].cells)}</td><td[^>]*>2</td>", page(found, [store]))


def test_a_rehearsal_of_several_readings_is_the_first_one_s(store):
    """Batches of shapes are one part: whole ones and parts of them are one run."""
    write_run(store, data="shapes", epochs=10, probe=70.0)
    paths = [path for path, *_ in looks(read(store))]
    assert "MoCo/CIFAR10/plain" in paths
    assert not [path for path in paths if "bn_splits" in path]


def test_nothing_run(store):
    found = read(store)
    assert all(x.mean is None and not x.partial for lines in found.lines.values() for x in lines)
    assert found.shown == {}
    assert [grid.key for grid in grids(found)] == []
    rows = paper_grid(TABLES["tab2"], found.lines["tab2"]).rows
    assert len(rows) == 12
    assert {item.text for row in rows for item in row[2::2]} == {"not run"}


def test_an_effect_gains_over_plain_of_the_same_cell(store):
    """Of the same reading and data, in probes and in transfers; plain itself gains nothing, nor what has no plain."""
    write_run(store, data="cifar100", seed=0, probe=60.0, transfer={"cifar10": 77.0})
    write_run(store, data="cifar100", seed=1, probe=61.0)
    write_run(store, data="cifar100", effect="emphasis(s=20)", probe=65.0, transfer={"cifar10": 80.0})
    write_run(store, data="cifar100", effect="ratio(m1=1.6, scope=row)", probe=62.0)
    write_run(store, data="cifar100", effect="emphasis(s=20)", bn_splits=1, probe=64.5)
    write_run(store, data="cifar100", effect="ratio(m1=1.6)", bn_splits=1, probe=61.5)
    write_run(store, data="cifar100", bn_splits=1, probe=62.5)
    write_run(store, data="cifar10", effect="emphasis(s=20)", probe=90.0)
    write_run(store, method="simclr", data="cifar100", effect="emphasis(s=1.125)", probe=63.0)
    lines = {line.cell.path: line for key in ("tab2", "tab3") for line in read(store).lines[key] if line.values}
    gains = {path: line.gain for path, line in lines.items() if line.gain is not None}
    assert gains == {
        "MoCo/CIFAR100/pos": 4.5,
        "MoCo/CIFAR100/ratio/scope=row": 1.5,
        "MoCo/CIFAR100/pos/bn_splits=1": 2.0,
        "MoCo/CIFAR100/ratio/bn_splits=1": -1.0,
        "MoCo/CIFAR100->CIFAR10/pos": 3.0,
    }
    assert lines["MoCo/CIFAR100/pos"].published_gain == pytest.approx(65.413 - 60.956)
    gained = {row[1].text: row[6] for row in cells_grid(read(store)).rows if row[2].text == "CIFAR100"}
    assert (gained["MoCo + pos."].text, gained["MoCo + pos."].sort) == ("+4.50 (+4.46)", 4.5)
    assert (gained["MoCo"].text, gained["MoCo"].sort) == ("", None)
    known = {line["path"]: line for line in summary(read(store))["tables"]["tab2"]}
    pos = known["MoCo/CIFAR100/pos"]
    assert (pos["gain"], pos["published_gain"], pos["gain_diverged"]) == (4.5, pytest.approx(4.457), False)
    assert (known["MoCo/CIFAR10/pos"]["gain"], known["MoCo/CIFAR10/pos"]["published_gain"]) == (None, None)
    assert "gain (published)" in latex(read(store))
    assert "& +4.50 (+4.46) &" in latex(read(store))


def test_a_gain_over_a_plain_that_diverged_is_marked(store):
    lose(write_run(store, data="cifar100", probe=20.0), 99.0)
    write_run(store, data="cifar100", effect="emphasis(s=20)", probe=65.0)
    found = read(store)
    gains = {row["row"]: row["gain (published)"] for row in texts(cells_grid(found)) if row["table"] == "Tab. 2"}
    assert gains["MoCo + pos."] == "+45.00 (+4.46) (diverged)"
    assert [line["gain_diverged"] for line in summary(found)["tables"]["tab2"] if line["gain"]] == [True]


def test_partial_runs_are_what_they_are(store):
    write_run(store, data="cifar10", seed=0, done=40)
    write_run(store, data="cifar10", seed=1, done=3, failure="the loss became nan; lower --lr")
    held = write_run(store, data="cifar10", seed=2, done=7)
    write_run(store, data="cifar10", seed=3)
    write_run(store, data="cifar10", seed=4, probe=50.0, probe_settings={"holdout": 1000})
    with (held / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours = line(read(store))
    assert ours.mean is None
    assert [p.said for p in ours.partial] == [
        "interrupted at epoch 40 of 200",
        "failed: the loss became nan; lower --lr",
        "running",
        "complete, no probe",
        "complete, probe has other settings",
    ]


def test_a_shorter_look_has_its_label_and_no_published_number(store):
    write_run(store, data="cifar100", effect="emphasis(s=20)", epochs=20, probe=55.0)
    found = read(store)
    assert line(found, "MoCo/CIFAR100/pos").mean is None
    assert looks(found) == [("MoCo/CIFAR100/pos", "20 of 200 epochs", 55.0)]
    assert not found.looks["tab9"]  # 20 of 1,000 says nothing more
    assert all(x.difference is None for lines in found.looks.values() for x in lines)
    grid = looks_grid(found)
    assert "published" not in grid.head
    assert {row[0].text for row in grid.rows} == {"20 of 200 epochs"}


def test_a_shorter_probe_makes_an_exact_run_a_look(store):
    write_run(store, data="cifar10", probe=80.0, probe_settings={"epochs": 10})
    found = read(store)
    assert line(found).mean is None
    assert [p.said for p in line(found).partial] == ["complete, only a shorter look (probe of 10 of 100 epochs)"]
    assert looks(found) == [("MoCo/CIFAR10/plain", "probe of 10 of 100 epochs", 80.0)]


def test_a_rehearsal_has_its_label(store):
    write_run(store, data="shapes", effect="emphasis(s=20)", epochs=10, probe=75.0)
    found = read(store)
    assert {label for _, label, _ in looks(found)} == {"rehearsal on shapes, 10 of 200 epochs"}
    assert len(looks_grid(found).rows) == 1  # one run, however many cells it rehearses
    assert {row["label"] for row in texts(looks_grid(found))} == {"rehearsal on shapes, 10 of 200 epochs"}


def test_a_copy_in_another_store_is_not_another_seed(store, tmp_path):
    write_run(store, data="cifar10", done=40)
    other = write_run(tmp_path / "more", data="cifar10", probe=90.0)
    found = read(store, tmp_path / "more")
    assert [v.top1 for v in line(found).values] == [90.0]
    assert line(found).partial == ()
    (seen,) = found.runs
    assert (seen.path, list(found.copies)) == (other, [seen.key])


def test_of_data_that_changed_the_latest_count(store):
    """Runs on older content are not averaged with them, and say so."""
    for seed in (0, 1):
        write_run(store, data="cifar10", seed=seed, probe=90.0, time="2026-01-02T00:00:00Z")
    write_run(store, data="cifar10", seed=2, probe=10.0, content="ff" * 30, time="2026-01-01T00:00:00Z")
    ours = line(read(store))
    assert [v.top1 for v in ours.values] == [90.0, 90.0]
    said = "not counted: the content of its cifar10 is ffffffffff, and c10c10c10c counts"
    assert [p.said for p in ours.partial] == [said]
    write_run(store, data="cifar10", seed=3, done=3, content="ff" * 30, time="2026-01-03T00:00:00Z")
    assert [v.top1 for v in line(read(store)).values] == [90.0, 90.0]  # a run that is not complete decides nothing
    write_run(store, data="cifar10", seed=4, probe=20.0, content="ff" * 30, time="2026-01-04T00:00:00Z")
    assert [v.top1 for v in line(read(store)).values] == [10.0, 20.0]


def test_one_content_counts_in_a_whole_table(store):
    """Not one in this cell and another in the next: they stand beside each other."""
    write_run(store, data="cifar10", probe=90.0, time="2026-01-02T00:00:00Z")
    old = {"content": "ff" * 30, "time": "2026-01-01T00:00:00Z"}
    write_run(store, data="cifar10", effect="emphasis(s=20)", probe=10.0, **old)
    pos = line(read(store), "MoCo/CIFAR10/pos")
    assert pos.mean is None
    assert [p.said[:11] for p in pos.partial] == ["not counted"]


TRANSFER = ("MoCo/CIFAR10->CIFAR100/plain", "tab3")


@pytest.mark.parametrize("content", ["00" * 30, "ff" * 30], ids=["named before", "named after"])
def test_transfers_to_other_content_are_not_averaged(store, content):
    path = write_run(store, data="cifar10", transfer={"cifar100": 43.0})
    older = {"time": "2020-01-01T00:00:00Z"}
    evaluate(write_run(store, data="cifar10", seed=2), "transfer", "cifar100", content, 10.0, **older)
    ours = line(read(store), *TRANSFER)
    assert [v.top1 for v in ours.values] == [43.0]
    said = f"not counted: the content of its cifar100 is {content[:10]}, and c100c100c1 counts"
    assert [(p.run.settings.seed, p.said) for p in ours.partial] == [(2, said)]
    evaluate(path, "transfer", "cifar100", content, 77.0, time="2027-01-01T00:00:00Z")
    assert [v.top1 for v in line(read(store), *TRANSFER).values] == [77.0, 10.0]


def test_sweeps_transferred_to_several_contents_have_a_column_for_each(store):
    for seed, content in enumerate(("aa" * 30, "bb" * 30)):
        evaluate(write_run(store, data="cifar10", lr=0.01, seed=seed), "transfer", "cifar100", content, 40.0 + seed)
    (row,) = texts(settings_grid(read(store)))
    assert row["transfer cifar100 of aaaaaaaaaa"] == "40.00 (1 of 2 seeds)"
    assert row["transfer cifar100 of bbbbbbbbbb"] == "41.00 (1 of 2 seeds)"


def test_rehearsals_on_two_data_sets_both_count(store):
    for seed in (0, 1):
        write_run(store, data="shapes", epochs=10, seed=seed, probe=75.0)
    write_run(store, data="other", epochs=10, probe=60.0)
    found = [x for x in read(store).looks["tab2"] if x.cell.path == "MoCo/CIFAR10/plain"]
    assert [(x.label, len(x.values), x.partial) for x in found] == [
        ("rehearsal on other, 10 of 200 epochs", 1, ()),
        ("rehearsal on shapes, 10 of 200 epochs", 2, ()),
    ]


def test_a_rehearsal_of_a_batch_size_is_drawn_at_that_one(store):
    write_run(store, method="simclr", data="shapes", effect="emphasis(s=2)", batch=512, epochs=10, probe=50.0)
    found = read(store)
    assert [path for path, _, _ in looks(found, "fig4")] == ["SimCLR/CIFAR100/batch=512/s=2"]
    assert not found.looks["fig3"]  # those points are rehearsed by the recipe's batch size
    drawn = figure(found.tables["fig4"], found.looks["fig4"])
    assert re.findall("<title>(.*?)</title>", drawn) == ["batch = 512, batch = 512, s = 2: 50.00 (1 seed)"]


def test_a_rehearsal_of_the_usual_batch_size_is_drawn_at_that_one_too(store):
    """Its cell has the settings of others, which are rehearsed at the recipe's batch size."""
    for batch, s, top in ((64, 1.25, 40.0), (256, 2, 50.0)):
        effect = f"emphasis(s={s})"
        write_run(store, method="simclr", data="shapes", effect=effect, batch=batch, epochs=10, probe=top)
    found = read(store)
    assert [path for path, _, _ in looks(found, "fig4")] == ["SimCLR/CIFAR100/batch=256/s=2"]
    assert {path.rpartition("/")[2] for path, _, _ in looks(found, "fig3")} == {"s=1.25"}


def test_another_reading_is_a_series_of_its_own_in_a_figure(store):
    write_run(store, data="cifar10", effect="ratio(m1=1.6)", probe=89.0)
    write_run(store, data="cifar10", effect="ratio(m1=1.6, scope=row)", probe=88.0)
    found = read(store)
    assert line(found, "MoCo/CIFAR10/m1=1.6/scope=row", "fig7").mean == 88.0
    drawn = figure(found.tables["fig7"], found.lines["fig7"])
    titles = re.findall("<title>(.*?)</title>", drawn)
    assert titles == ["MoCo (scope=row), m1 = 1.6: 88.00 (1 seed)", "MoCo, m1 = 1.6: 89.00 (1 seed)"]
    assert "</i>MoCo (scope=row)</span>" in drawn
    assert sum("scope" in x.cell.path for x in found.lines["fig7"]) == 1


def test_runs_of_other_numerics_have_a_label_and_are_not_averaged(store):
    write_run(store, data="cifar10", seed=0, probe=90.0)
    for seed in (0, 1):
        settle(write_run(store, data="cifar10", seed=seed + 5, probe=50.0), lambda c: c["identity"].update(numerics=0))
    odd = {"lr": 0.01, "data": "cifar10"}
    write_run(store, **odd, probe=80.0)
    settle(write_run(store, **odd, seed=1, probe=40.0), lambda c: c["identity"].update(numerics=0))
    found = read(store)
    assert not found.bad
    assert [v.top1 for v in line(found).values] == [90.0]
    assert {p.said for p in line(found).partial} == {"not counted: numerics 0, not 1"}
    assert ("MoCo/CIFAR10/plain", "numerics 0, not 1", 50.0) in looks(found)
    assert all(x.difference is None for x in found.looks["tab2"])
    said = {row["numerics"]: row["probe"] for row in texts(settings_grid(found)) if row["other settings"]}
    assert said == {"": "80.00", "numerics 0, not 1": "40.00"}


def test_an_evaluation_by_other_numerics_has_a_label(store):
    path = write_run(store, data="cifar10", probe=90.0)
    (one,) = (path / "evaluations").iterdir()
    known = json.loads(one.read_text())
    known["environment"]["numerics"] = 7
    one.write_text(json.dumps(known))
    found = read(store)
    assert line(found).mean is None
    assert looks(found)[0] == ("MoCo/CIFAR10/plain", "evaluated with numerics 7, not 1", 90.0)


def test_a_seed_counts_once(store):
    """As when a version that spelled an effect otherwise made the same run under another id."""
    first = write_run(store, data="cifar10", effect="emphasis(s=20)", probe=88.0, time="2026-01-01T00:00:00Z")

    def other(config):
        config["identity"]["settings"]["effect"] = "emphasis(s=20.0)"

    settle(first, other)
    latest = write_run(store, data="cifar10", effect="emphasis(s=20)", probe=90.0, time="2026-01-02T00:00:00Z")
    found = read(store)
    assert (found.bad, len(found.runs)) == ([], 2)
    ours = line(found, "MoCo/CIFAR10/pos")
    assert [v.top1 for v in ours.values] == [90.0]
    assert [p.said for p in ours.partial] == [f"not counted: {latest.name} has this seed already"]


def test_evaluations_of_copies_are_joined(store, tmp_path):
    write_run(store, data="cifar10", probe=90.0)
    late = write_run(tmp_path / "more", data="cifar10", probe=91.0, transfer={"cifar100": 43.0}, time="2027-01-01")
    early = write_run(tmp_path / "third", data="cifar10", transfer={"cifar10": 1.0}, time="2020-01-01")
    for order in ([store, late.parent, early.parent], [early.parent, late.parent, store]):
        found = read(*order)
        assert [v.top1 for v in line(found).values] == [91.0]  # of one name the latest
        assert [v.top1 for v in line(found, *TRANSFER).values] == [43.0]
        (seen,) = found.runs
        assert sorted(one["top1"] for one in seen.evaluations) == [1.0, 43.0, 91.0]
        assert page(found, []).count("<b>transfer ") == 2


def test_evaluations_of_another_outcome_are_not_joined(store, tmp_path):
    write_run(store, data="cifar10", probe=90.0, transfer={"stl10": 30.0})
    write_run(tmp_path / "more", data="cifar10", transfer={"cifar100": 43.0}, knn=60.0)
    found = read(store, tmp_path / "more")
    assert line(found).mean == 90.0
    assert line(found, *TRANSFER).mean is None


def test_a_hidden_file_among_evaluations_is_not_one(store):
    path = write_run(store, data="cifar10", probe=90.0)
    (path / "evaluations" / "._probe-x.json").write_bytes(b"\0\5\x16\7")
    assert line(read(store)).mean == 90.0
    assert len(open_run(path).evaluations) == 1


def test_a_row_for_each_setting_with_means_and_spreads(store):
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, lr=lr, seed=seed, probe=60 + seed)
    write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, lr=0.3, done=2)
    write_run(store, data="shapes", epochs=4, probe=50.0, transfer={"cifar10": 30.0})
    grid = settings_grid(read(store))
    about, measured = (
        ("data", "method", "effect", "epochs", "other settings"),
        ("probe", "transfer cifar10", "kNN", "loss"),
    )
    assert grid.head == (*about, "seeds", *measured, "runs")
    plain, *swept = texts(grid)
    assert [plain[name] for name in about] == ["shapes", "mocov3", "plain", "4", ""]
    assert (plain["probe"], plain["transfer cifar10"], plain["seeds"]) == ("50.00", "30.00", "1")
    by_lr = {row["other settings"]: row for row in swept}
    assert list(by_lr) == ["lr=0.01", "lr=0.1", "lr=0.3"]
    assert [by_lr["lr=0.01"][name] for name in ("probe", "seeds", "runs")] == ["60.50 ± 0.71", "2", "seed 0, seed 1"]
    assert (by_lr["lr=0.3"]["runs"], by_lr["lr=0.3"]["seeds"]) == ("seed 0: interrupted at epoch 2 of 4", "0 of 1")
    known = summary(read(store))["settings"]
    assert [one["measured"].get("probe") for one in known[:2]] == [
        {"mean": 50.0, "std": None, "seeds": 1, "diverged": 0},
        {"mean": 60.5, "std": pytest.approx(0.5**0.5), "seeds": 2, "diverged": 0},
    ]
    assert known[1]["settings"] | {"lr": 0.01} == known[1]["settings"]
    assert "seed" not in known[1]["settings"]


def test_effects_of_one_setting_follow_each_other_plain_first(store):
    for effect in ("emphasis(s=10)", "emphasis(s=5)", "attenuation(alpha=1)", "plain"):
        for data in ("cifar100", "cifar10"):
            for lr in (0.06, 0.01):
                write_run(store, data=data, effect=effect, lr=lr)
    rows = [(row["data"], row["other settings"], row["effect"]) for row in texts(settings_grid(read(store)))]
    effects = ["plain", "attenuation(alpha=1)", "emphasis(s=5)", "emphasis(s=10)"]
    assert rows == [
        (data, other, effect) for data in ("cifar10", "cifar100") for other in ("", "lr=0.01") for effect in effects
    ]


def test_a_paper_s_table_is_its_grid(store):
    """Data sets across, methods and effects down; what has no run is left out, unless all is asked for."""
    for seed in (0, 1):
        write_run(store, data="cifar10", seed=seed, probe=90.0 + seed)
    write_run(store, data="cifar100", effect="emphasis(s=20)", probe=65.0)
    write_run(store, data="cifar100", effect="attenuation(alpha=1)", probe=61.0)
    write_run(store, data="stl10", done=3)
    found = read(store)
    assert list(found.shown) == ["tab1", "tab2", "tab3", "fig3", "fig5", "fig6", "fig7"]
    grid = paper_grid(TABLES["tab2"], found.shown["tab2"])
    assert grid.head == ("row", "CIFAR10 published", "CIFAR10 ours", "CIFAR100 published", "CIFAR100 ours")
    assert [tuple(row.values()) for row in texts(grid)] == [
        ("MoCo", "89.413 ± 0.109", "90.50 ± 0.71", "", ""),
        ("MoCo + pos.", "", "", "65.413 ± 0.205", "65.00"),
    ]
    first = texts(paper_grid(TABLES["tab1"], found.shown["tab1"]))
    assert [(row["row"], row["CIFAR100 ours"]) for row in first] == [
        ("MoCo, alpha = 0", ""),
        ("MoCo, alpha = 1, type I", "61.00"),
    ]
    assert not paper_grid(TABLES["tab3"], found.shown["tab3"]).rows  # no run was transferred
    assert paper_grid(TABLES["fig3"], found.shown["fig3"]).head == ("row", "s = 1 (our grid)", "s = 20 (our grid)")
    every = gather(scan(store), TABLES, paper=True)
    assert {key for key, table in TABLES.items() if table.kind != "figure"} <= set(every.shown)
    whole = texts(paper_grid(TABLES["tab2"], every.shown["tab2"]))
    assert (len(whole), len(whole[0])) == (12, 9)
    assert (whole[0]["STL10 published"], whole[0]["STL10 ours"]) == ("87.629 ± 0.175", "interrupted at epoch 3 of 200")
    assert {row["TinyImageNet ours"] for row in whole} == {"not run"}
    given = texts(paper_grid(TABLES["tab7"], every.shown["tab7"]))
    assert given[0] == {"row": "MoCov3, CIFAR10", "pos. (s)": "20", "curv. (c)": "0.7"}


def test_a_cell_is_listed_once_with_all_its_numbers(store):
    write_run(store, data="cifar100", probe=60.0)
    write_run(store, data="cifar100", effect="emphasis(s=20)", probe=65.0)
    write_run(store, data="cifar100", effect="emphasis(s=5)", probe=63.0)
    write_run(store, data="cifar100", effect="ratio(m1=1.6)", done=3)
    rows = texts(cells_grid(read(store)))
    assert [(row["table"], row["row"], row["ours"], row["gain (published)"]) for row in rows] == [
        ("Tab. 2", "MoCo", "60.00", ""),
        ("Tab. 2", "MoCo + pos.", "65.00", "+5.00 (+4.46)"),
        ("Tab. 2", "MoCo + ratio.", "", ""),
        ("Tab. 3", "MoCo", "", ""),
        ("Tab. 3", "MoCo + pos.", "", ""),
        ("Tab. 3", "MoCo + ratio.", "", ""),
        ("Fig. 3", "MoCo, CIFAR100", "63.00", "+3.00"),
    ]
    assert rows[2]["runs"] == "seed 0: interrupted at epoch 3 of 200"


def test_a_number_says_how_many_seeds_it_has_where_some_lack_it(store):
    odd = {"data": "shapes", "epochs": 4, "lr": 0.1}
    write_run(store, **odd, probe=60.4)
    write_run(store, **odd, seed=1)
    for seed in (0, 1):
        write_run(store, **odd | {"lr": 1e30}, seed=seed, done=0, failure="the loss became nan; lower --lr " * 5)
    grid = settings_grid(read(store))
    first, second = (dict(zip(grid.head, row, strict=True)) for row in grid.rows)
    assert (first["probe"].text, first["kNN"].text) == ("60.40 (1 of 2 seeds)", "70.00 ± 0.00")
    assert (first["runs"].text, first["seeds"].text) == ("seed 0, seed 1: complete, no probe", "2")
    assert (second["runs"].text, second["seeds"].text) == ("seed 0: failed, seed 1: failed", "0 of 2")
    assert second["runs"].pieces[0].note.startswith("failed: the loss became nan; lower")


def test_a_look_says_which_seeds_have_no_number(store):
    for seed, more in enumerate(({"probe": 75.0}, {}, {"done": 3, "failure": "no memory"})):
        write_run(store, data="cifar10", epochs=20, seed=seed, **more)
    found = read(store)
    rows = {tuple(item.text for item in row[2:]) for row in looks_grid(found).rows}
    assert rows >= {("75.00", "1", "seed 0: 75.00, seed 1: complete, no probe, seed 2: failed")}
    said = {p.said for x in found.looks["tab3"] for p in x.partial}
    assert said == {"failed: no memory"}  # no seed has a transfer: none lacks one


def test_a_probe_that_diverged_is_marked_wherever_its_number_stands(store):
    for seed in (0, 1):
        path = write_run(store, data="cifar10", seed=seed, probe=90.0 - 40 * seed)
        if seed:
            lose(path, 4.7)  # guessing among 10 has 2.3
    lose(write_run(store, data="cifar10", lr=0.1, probe=11.0), 4.7)
    lose(write_run(store, data="cifar10", lr=0.2, probe=12.0), 4.5)
    lose(write_run(store, data="my own", probe=13.0), 4.7)  # of how many classes is not known
    found = read(store)
    row = texts(cells_grid(found))[0]
    assert (row["ours"], row["runs"]) == ("70.00 ± 28.28 (1 diverged)", "seed 0: 90.00, seed 1: 50.00 (diverged)")
    grid = settings_grid(found)
    assert {row["probe"] for row in texts(grid)} == {"70.00 ± 28.28 (1 diverged)", "11.00 (diverged)", "12.00", "13.00"}
    assert "2 evaluations diverged" in grid.about
    assert page(found, []).count('<span class="bad">diverged</span>') == 2


def lose(path, loss):
    """Makes that the loss of a run's only evaluation."""
    (one,) = (path / "evaluations").iterdir()
    one.write_text(json.dumps(json.loads(one.read_text()) | {"loss": loss}))


def test_only_some_tables(store):
    write_run(store, data="cifar10", probe=90.0)
    write_run(store, data="cifar10", lr=0.01, probe=80.0)
    found = read(store, only=["tab2"])
    assert list(found.lines) == ["tab2"]
    assert [seen.settings.lr for seen in found.runs] == [0.06]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top1": float("nan")}, "top1 is nan"),
        ({"top1": "90"}, "top1 is '90'"),
        (
            {"settings": {"colour": "red"}},
            "this version of marginlens does not know such an evaluation, but a later one may: there is no setting",
        ),
        (
            {"kind": "retrieval"},
            "this version of marginlens does not know such an evaluation, but a later one may: there is no evaluation",
        ),
    ],
    ids=str,
)
def test_a_record_that_no_run_wrote_is_an_unreadable_folder(store, wrong, said):
    path = write_run(store, data="cifar10", probe=90.0)
    (record,) = (path / "evaluations").iterdir()
    known = json.loads(record.read_text())
    known |= {"settings": known["settings"] | wrong["settings"]} if "settings" in wrong else wrong
    record.write_text(json.dumps(known))
    found = read(store)
    assert [folder for folder, _ in found.bad] == [str(path)]
    assert found.runs == []
    assert f"{record}: {said}" in found.bad[0][1]
