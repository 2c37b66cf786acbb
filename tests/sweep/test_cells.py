"""A run's relation to a cell of the paper: exact, shorter, rehearsal, or none."""

from dataclasses import replace

import pytest

from marginlens.paper import TABLES, Cell, find, match, readings
from marginlens.runs.config import Pretrain
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run
from marginlens.settings import build
from marginlens.sweep import job as job_
from marginlens.sweep.job import Job, merge
from tests.sweep.conftest import made

RUNNABLE = [cell for table in TABLES.values() for cell in table.cells if cell.settings is not None]


def run(tmp_path, settings):
    return Run(tmp_path, settings, "", "", (0, 0, 0), (1, 1, 1))


def test_every_cell_matches_its_own_runs_and_says_what_they_are(tmp_path):
    for cell in RUNNABLE:
        for seed in (0, 7):
            whole = job_.job(cell, seed).settings
            assert match.match(cell, run(tmp_path, whole)) == "exact", cell.address
            short = job_.job(cell, seed, epochs=20).settings
            assert match.match(cell, run(tmp_path, short)) == "shorter", cell.address
            assert (short.epochs, short.warmup) == (20, min(whole.warmup, 5))
            other = job_.job(cell, seed, dataset="shapes").settings
            batch = whole.batch if "batch" in cell.at else 64  # what a cell sweeps, its rehearsal sweeps
            assert (other.epochs, other.encoder, other.batch, other.data) == (10, "tiny", batch, "shapes")
            assert match.match(cell, run(tmp_path, other)) == "rehearsal", cell.address


@pytest.mark.parametrize("table", [key for key in TABLES if any(c.table == key for c in RUNNABLE)])
def test_each_point_is_rehearsed_by_a_run_of_its_own(tmp_path, table):
    """Of one method and data set, cells that are different runs are different rehearsals, and each stands for one.

    Batches of a rehearsal are too small for parts: what sees them whole is rehearsed by the same run.
    """
    groups = {}
    for cell in (c for base in TABLES[table].cells if base.settings is not None for c in readings(base)):
        if "bn_splits=1" in cell.reading:
            given = {name: value for name, value in cell.settings.items() if name != "bn_splits"}
            ours, parts = (job_.job(c, 0, dataset="shapes").settings for c in (cell, replace(cell, settings=given)))
            assert ours == parts
            continue
        groups.setdefault(tuple(cell.path.split("/")[:2]), []).append(cell)
    for group in groups.values():
        runs = {job_.job(cell, 0).settings.model_copy(update={"epochs": 1, "warmup": 0}) for cell in group}
        rehearsals = {job_.job(cell, 0, dataset="shapes").settings for cell in group}
        assert len(rehearsals) == len(runs)
        for cell in group[:: max(len(group) // 4, 1)]:
            own = job_.job(cell, 0, dataset="shapes").settings
            matching = [c for c in group if match.match(c, run(tmp_path, own))]
            assert {job_.job(c, 0, epochs=20).settings for c in matching} == {job_.job(cell, 0, epochs=20).settings}


def test_what_is_not_a_cell_s(tmp_path):
    (cell,) = find("MoCo/CIFAR10/pos", "tab2")
    own = job_.job(cell, 0).settings
    for change in ({"lr": 0.05}, {"effect": "plain"}, {"limit": 100}, {"epochs": 201}, {"epochs": 20, "warmup": 4}):
        assert match.match(cell, run(tmp_path, own.model_copy(update=change))) is None, change
    assert match.match(find("MoCo/ImageNet/plain")[0], run(tmp_path, own)) is None


def test_a_look_that_is_not_shorter_is_refused():
    (cell,) = find("MoCo/CIFAR10/pos", "tab2")
    with pytest.raises(ValueError, match=r"epochs is 201, .*Tab. 2, .* has 200: --epochs is for a shorter look"):
        match.variants(cell, epochs=201)
    assert match.variants(cell, epochs=200) == match.variants(cell) == cell.settings
    with pytest.raises(ValueError, match="cannot be run: marginlens has neither ImageNet"):
        match.variants(find("MoCo/ImageNet/plain")[0])


def test_the_warm_up_of_a_cell_is_shortened_not_replaced():
    settings = {"method": "mocov3", "data": "cifar10", "epochs": 100, "warmup": 20}
    cell = Cell("t", "p", "r", "c", settings, "", "probe", "", None, "a")
    assert build(Pretrain, match.variants(cell, epochs=90)).warmup == 20
    assert build(Pretrain, match.variants(cell, epochs=40)).warmup == 10


def test_tables_share_their_backbones():
    """Tab. 2 and Tab. 3 of one data set: as many runs as rows, each with its probe and its transfer."""
    both = [*find("MoCo/CIFAR10/*", "tab2"), *find("MoCo/CIFAR10->CIFAR100/*", "tab3")]
    jobs = merge(job_.job(cell, seed) for seed in range(2) for cell in both)
    assert len(jobs) == 2 * len(find("MoCo/CIFAR10/*", "tab2"))
    for one in jobs:
        assert [e.name for e in one.evaluations] == ["probe", "transfer to cifar100"]
        assert {e.settings.epochs for e in one.evaluations} == {100}


def test_a_job_survives_json():
    for cell in RUNNABLE[:5]:
        job = job_.job(cell, 3, epochs=20, probe_epochs=7)
        again = Job.model_validate_json(job.model_dump_json())
        assert again == job
        assert again.evaluations[0].settings.epochs == 7


def test_which_evaluation_stands_for_a_rehearsed_cell(tmp_path):
    (cell,) = find("MoCo/CIFAR10->CIFAR100/pos", "tab3")
    job = job_.job(cell, 0, dataset="shapes")
    (probe,) = find("MoCo/CIFAR10/pos", "tab2")
    done = made(job, tmp_path)
    assert {match.match(wanted, done) for wanted in (cell, probe)} == {"rehearsal"}
    (record,) = match.standing(cell, done, "rehearsal")
    assert (record.kind, record.top1) == ("transfer", 50.0)
    assert match.standing(probe, done, "rehearsal") == []  # it was not probed


def measured(tmp_path, cell, *several):
    """A run of a cell with these evaluations: their settings, the content of their data, where they were made."""
    done = run(tmp_path, job_.job(cell, 0).settings)
    wanted = match.follows(cell)
    facts = {"kind": wanted.kind, "run": done.id, "data": wanted.data, "top1": 50.0, "seconds": 1.0}
    facts |= {"train_images": 9, "test_images": 9}
    found = {}
    for i, (settings, content, environment) in enumerate(several):
        more = {"data_fingerprint": content, "settings": settings.model_dump(mode="json"), "environment": environment}
        found[str(i)] = Evaluation.model_validate(facts | more)
    return done.joined(found)


def test_a_longer_probe_comes_first_and_another_is_none(tmp_path):
    (cell,) = find("MoCo/CIFAR10/pos", "tab2")
    whole, short = (match.follows(cell, probe_epochs=n).settings for n in (None, 10))
    long, other = (whole.model_copy(update=more) for more in ({"epochs": 101}, {"lr": 0.1}))

    def found(*settings):
        here = {"time": "2026-01-01T00:00:00Z", "device": "CPU"}
        done = measured(tmp_path, cell, *((one, "c", here) for one in settings))
        return [one.settings.epochs for one in match.standing(cell, done, "exact")]

    assert found(short) == [10]
    assert found(short, whole) == [100, 10]
    assert found(other, long) == []


def test_of_probes_alike_the_latest_counts(tmp_path):
    """Whatever their files are called: data of one name may have been prepared anew in between."""
    (cell,) = find("MoCo/CIFAR10->CIFAR100/pos", "tab3")
    asked = match.follows(cell).settings
    old, new, later = (
        (asked, name, {"device": "CPU"} | environment)
        for name, environment in (
            ("old", {"time": "2026-01-01T00:00:00Z"}),
            ("new", {"time": "2027-01-01T00:00:00Z"}),
            ("other numerics", {"time": "2028-01-01T00:00:00Z", "numerics": 99}),
        )
    )
    for held in ([old, new], [new, old], [new, old, later], [later, new]):
        assert match.standing(cell, measured(tmp_path, cell, *held), "exact")[0].data_fingerprint == "new"
