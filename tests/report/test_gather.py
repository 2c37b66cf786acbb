"""Which run stands where: laws about what may be laid beside a published number, and what may not."""

import fcntl
import json
import statistics

import pytest

from marginlens.paper import TABLES
from marginlens.report.gather import gather
from marginlens.report.grids import looks_grid, others_grid, paper_grid
from marginlens.runs.store import scan
from tests.report.folders import write_run


def read(*stores, only=()):
    return gather([entry for store in stores for entry in scan(store)], TABLES, only)


def line(found, path="MoCo/CIFAR10/plain", table="tab2"):
    (one,) = [x for x in found.lines[table] if x.cell.path == path]
    return one


def looks(found, table="tab2"):
    return [(x.cell.path, x.label, x.mean) for x in found.looks[table]]


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
    assert not found.others
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
    assert not found.others
    shown = [x.cell.path for x in found.lines["tab2"]]
    assert shown.index("MoCo/CIFAR10/ratio/scope=row") == shown.index("MoCo/CIFAR10/ratio") + 1
    assert sum("scope" in path for path in shown) == 1  # what did not run is not shown by every reading


def test_nothing_run(store):
    found = read(store)
    assert all(x.mean is None and not x.partial for lines in found.lines.values() for x in lines)
    rows = paper_grid(TABLES["tab2"], found.lines["tab2"]).rows
    assert len(rows) == 48
    assert {row[-1].text for row in rows} == {"not run"}
    why = paper_grid(TABLES["tab4"], found.lines["tab4"]).rows[0][-1].text
    assert why.startswith("not run: marginlens has neither ImageNet")


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
        "complete, not probed",
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
    assert others_grid(found).rows[0][4].text == "rehearsal on shapes, 10 of 200 epochs"


def test_a_copy_in_another_store_is_not_another_seed(store, tmp_path):
    write_run(store, data="cifar10", done=40)
    other = write_run(tmp_path / "more", data="cifar10", probe=90.0)
    found = read(store, tmp_path / "more")
    assert [v.top1 for v in line(found).values] == [90.0]
    assert line(found).partial == ()
    (seen,) = found.runs
    assert (seen.entry.path, list(found.copies)) == (other, [seen.key])


def test_other_data_under_the_same_name_do_not_count(store):
    for seed in (0, 1):
        write_run(store, data="cifar10", seed=seed, probe=90.0)
    write_run(store, data="cifar10", seed=0, probe=10.0, content="ff" * 30)
    ours = line(read(store))
    assert [v.top1 for v in ours.values] == [90.0, 90.0]
    assert [p.said for p in ours.partial] == ["not counted: the content of its data differs"]


def test_sweeps_by_the_settings_that_differ(store):
    for lr in (0.01, 0.1):
        for seed in (0, 1):
            write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, lr=lr, seed=seed, probe=60 + seed)
    write_run(store, data="shapes", effect="margin(m2=0.3)", epochs=4, lr=0.3, done=2)
    grid = others_grid(read(store))
    assert grid.head == (
        "method",
        "data",
        "effect",
        "epochs",
        "lr",
        "label",
        "kNN",
        "loss",
        "probe shapes",
        "seeds",
        "runs",
    )
    by_lr = {row[4].text: row for row in grid.rows}
    assert by_lr["0.01"][8].text == "60.50 ± 0.71"
    assert by_lr["0.3"][-1].text == "seed 0: interrupted at epoch 2 of 4"


def test_only_some_tables(store):
    write_run(store, data="cifar10", probe=90.0)
    write_run(store, data="cifar10", lr=0.01, probe=80.0)
    found = read(store, only=["tab2"])
    assert list(found.lines) == ["tab2"]
    assert [seen.settings.lr for seen in found.runs] == [0.06]
    assert found.others == []


@pytest.mark.parametrize(
    "wrong",
    [{"top1": float("nan")}, {"top1": "90"}, {"top1": None}, {"settings": {"epochs": 100, "colour": "red"}}],
    ids=str,
)
def test_a_record_that_no_run_wrote_is_an_unreadable_folder(store, wrong):
    path = write_run(store, data="cifar10", probe=90.0)
    (record,) = (path / "evaluations").iterdir()
    record.write_text(json.dumps(json.loads(record.read_text()) | wrong))
    found = read(store)
    assert [folder for folder, _ in found.bad] == [str(path)]
    assert found.runs == []
    assert "holds a record that no run wrote" in found.bad[0][1]
