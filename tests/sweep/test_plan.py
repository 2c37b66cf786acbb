"""A plan says for every job: done, to resume, to do, or impossible and why."""

import json
import shutil
from dataclasses import replace

import pytest

from marginlens.data.sources import SOURCES
from marginlens.runs.records import read_json, save_json
from marginlens.runs.store import scan
from marginlens.runs.work import locked
from marginlens.sweep import plan
from marginlens.sweep.job import merge
from tests.sweep.conftest import job, made


def planned(jobs, runs, **fingerprints):
    known = plan.prepared(jobs, draw=False) | fingerprints
    return plan.make_plan(jobs, runs, known)


def states(steps):
    return [step.state for step in steps]


def test_nothing_is_there(tmp_path):
    jobs = [job(seed=seed) for seed in range(3)]
    steps = planned(jobs, tmp_path / "none")
    assert states(steps) == ["to run"] * 3
    assert [step.epochs_left for step in steps] == [2, 2, 2]
    assert not (tmp_path / "none").exists()


def test_only_what_is_drawn_is_made_for_a_plan(monkeypatch, tmp_path):
    """A set that is read from a place that is named cannot be."""
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path))
    monkeypatch.setitem(SOURCES, "shapes", replace(SOURCES["shapes"], drawn=False))
    assert plan.prepared([job()], draw=True) == {"shapes": ""}
    assert not list(tmp_path.iterdir())


def test_each_state(tmp_path):
    cached, lacking, cut, failed, gone, new = (job("shapes", seed=seed) for seed in range(6))
    made(cached, tmp_path)
    made(cached.model_copy(update={"settings": lacking.settings, "evaluations": lacking.evaluations[:1]}), tmp_path)
    made(cut, tmp_path, epochs=1, complete=False)
    path = made(failed, tmp_path, epochs=1, complete=False).path
    save_json(path / "failure.json", {"time": "", "line": "the loss became nan at step 1", "code": 1, "step": 1})
    half = gone.model_copy(update={"evaluations": gone.evaluations[1:]})
    weightless = made(half, tmp_path, weights=False)
    steps = planned([cached, lacking, cut, failed, gone, new], tmp_path)
    assert states(steps) == ["cached", "to run", "interrupted", "failed", "blocked", "to run"]
    assert [step.epochs_left for step in steps] == [0, 0, 1, 1, 0, 2]
    both = "probe, transfer to shapes"
    assert [step.follows for step in steps] == ["", "transfer to shapes", both, both, "probe", both]
    assert steps[3].why == "the loss became nan at step 1"
    assert str(weightless.path) in steps[4].why
    assert "its weights are gone" in steps[4].why
    assert plan.counts(steps) == {"cached": 1, "to run": 2, "interrupted": 1, "failed": 1, "blocked": 1}
    assert [step.due for step in steps] == [False, True, True, True, False, True]
    abroad = plan.away(steps)
    assert states(abroad) == ["cached", "blocked", "blocked", "blocked", "blocked", "to run"]
    assert "which the cluster does not see" in abroad[2].why


def test_rates_beside_a_probe_are_part_of_it(tmp_path):
    """What was measured at its own rate alone is not done; and what cannot be, as its weights are gone, is said."""
    here, gone = job("shapes"), job("shapes", seed=1)
    made(here, tmp_path)
    run = made(gone, tmp_path, weights=False)
    asked = [one.with_more((), (3.0, 10.0)) for one in (here, gone)]
    steps = planned(asked, tmp_path)
    assert states(steps) == ["to run", "blocked"]
    assert [step.follows for step in steps] == ["probe, transfer to shapes"] * 2
    rates = "at a learning rate of 3, 10"
    assert f"probe {rates}, transfer to shapes {rates} is missing, and its weights are gone" in steps[1].why
    made(gone.with_more((), (3.0,)), tmp_path)
    assert "probe at a learning rate of 10" in planned(asked, tmp_path)[1].why
    made(asked[1], tmp_path)
    assert states(planned(asked, tmp_path)) == ["to run", "cached"]
    assert len(run.evaluations) == 6


def test_a_rate_at_which_a_layer_was_lost_is_done_and_the_probe_s_own_is_not(tmp_path):
    def told(run, lr, lost):
        for path in (run.path / "evaluations").iterdir():
            known = read_json(path)
            if known["settings"]["lr"] == lr:
                save_json(path, known | {"lost": lost})
            else:
                path.unlink()

    asked = job().with_more((), (3.0, 1e9))
    own = asked.evaluations[0].settings.lr
    run = made(asked, tmp_path)
    told(run, own, [3.0, 1e9])
    assert states(planned([asked], tmp_path)) == ["cached"]
    assert planned([job().with_more((), (4.0,))], tmp_path)[0].state == "to run"
    made(asked, tmp_path)
    told(run, 3.0, [own, 1e9])
    assert states(planned([asked], tmp_path)) == ["to run"]


def test_what_ended_early_without_weights_is_begun_anew_elsewhere(tmp_path):
    """It came home from a node that failed: there is nothing here that the cluster would have to see."""
    cut, failed = job(seed=0), job(seed=1)
    made(cut, tmp_path, epochs=1, complete=False, weights=False)
    path = made(failed, tmp_path, epochs=1, complete=False, weights=False).path
    save_json(path / "failure.json", {"time": "", "line": "CUDA error", "code": 1, "step": 1})
    steps = planned([cut, failed], tmp_path)
    assert states(steps) == ["interrupted", "failed"]
    abroad = plan.away(steps)
    assert [(step.state, step.why, step.epochs_left) for step in abroad] == [("to run", "", 2)] * 2


@pytest.mark.parametrize("left", [(), ("lock",), (".config.json.12", "lock")])
def test_a_folder_that_was_only_made_is_no_hindrance(tmp_path, left):
    """A process was killed, or the disk was full, before the first file of the run."""
    path = made(job(), tmp_path).path
    shutil.rmtree(path)
    path.mkdir()
    for name in left:
        (path / name).write_text("{")
    assert states(planned([job()], tmp_path)) == ["to run"]
    (path / "cat.jpg").write_text("meow")
    assert states(planned([job()], tmp_path)) == ["blocked"]


def test_a_run_in_use_is_left_alone(tmp_path):
    run = made(job(), tmp_path, epochs=1, complete=False)
    with locked(run):
        (step,) = planned([job()], tmp_path)
    assert (step.state, "in use" in step.why) == ("blocked", True)
    run = made(job(seed=1), tmp_path)
    with locked(run):  # by someone who evaluates it otherwise
        steps = planned([job(seed=1), job("shapes", seed=1)], tmp_path)
        assert states(steps) == ["cached", "blocked"]
        assert steps[1].follows == "transfer to shapes"
        assert plan.look_again(steps[1], tmp_path) == steps[1].__class__(**vars(steps[1]) | {"number": 2})
    assert plan.look_again(steps[1], tmp_path).state == "to run"


def test_a_foreign_folder_in_a_run_s_place(tmp_path):
    path = made(job(), tmp_path).path
    (path / "config.json").write_text("{")
    (step, other) = planned([job(), job(seed=1)], tmp_path)
    assert (step.state, other.state) == ("blocked", "to run")
    assert "config.json" in step.why


def test_without_data_runs_are_known_by_their_settings(tmp_path, monkeypatch, data_root):
    made(job(), tmp_path / "runs")
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "empty"))
    jobs = [job(), job(data="cifar10")]
    known = plan.prepared(jobs, draw=False)
    assert known == {"shapes": "", "cifar10": ""}
    assert not (tmp_path / "empty").exists()
    steps = plan.make_plan(jobs, tmp_path / "runs", known)
    assert states(steps) == ["cached", "to run"]
    with pytest.raises(ValueError, match="run: marginlens data prepare cifar10"):
        plan.check_prepared(steps, known)
    plan.check_prepared(steps[:1], known)  # what is cached needs no data
    both = plan.make_plan([*jobs, job(data="stl10")], tmp_path / "runs", known | {"stl10": ""})
    with pytest.raises(ValueError, match="prepare cifar10 and marginlens data prepare stl10"):
        plan.check_prepared(both, known | {"stl10": ""})


def test_other_data_of_the_same_name_are_another_run(tmp_path):
    made(job(), tmp_path)
    assert states(planned([job()], tmp_path, shapes="0" * 64)) == ["to run"]


def test_transfer_data_that_changed_are_measured_again(tmp_path):
    path = made(job("shapes"), tmp_path).path
    (one,) = path.glob("evaluations/transfer-*")
    one.write_text(one.read_text().replace(scan(tmp_path)[0].data, "0" * 64))
    (step,) = planned([job("shapes")], tmp_path)
    assert (step.state, step.follows) == ("to run", "transfer to shapes")


def test_transfer_data_that_changed_back_were_measured(tmp_path):
    path = made(job("shapes"), tmp_path, weights=False).path
    (one,) = path.glob("evaluations/transfer-*")
    known = json.loads(one.read_text())
    later = known | {
        "data_fingerprint": "0" * 64,
        "environment": known["environment"] | {"time": "2099-01-01T00:00:00Z"},
    }
    one.with_name("transfer-shapes-0000000000.json").write_text(json.dumps(later))
    assert states(planned([job("shapes")], tmp_path)) == ["cached"]


def test_a_table_fills_evenly_and_shared_runs_come_once():
    jobs = merge(plan.evenly([job(seed=s, effect=e) for e in ("plain", "ratio(m1=0.4)") for s in (1, 0)] * 2))
    assert [(j.settings.seed, j.settings.effect) for j in jobs] == [
        (0, "plain"), (0, "ratio(m1=0.4)"), (1, "plain"), (1, "ratio(m1=0.4)")
    ]  # fmt: skip
    simclr = [job(method="simclr", seed=0), job("shapes", method="simclr", seed=0)]
    (one,) = merge(simclr)
    assert len(one.evaluations) == 2


def test_names_tell_jobs_apart():
    assert plan.names([job(seed=1)]) == ["mocov3 shapes plain seed 1"]
    found = plan.names([job(seed=1, tau=0.1), job(seed=1, tau=0.2)])
    assert found == ["mocov3 shapes plain seed 1 tau=0.1", "mocov3 shapes plain seed 1 tau=0.2"]
    found = plan.names([job(), job(data="stl10"), job(data="stl10", epochs=8)])  # size, split, warm-up: the recipe's
    assert [name.partition(" seed 0 ")[2] for name in found] == ["epochs=2", "epochs=2", "epochs=8"]
    found = plan.names([job(batch=batch, bn_splits=parts) for batch, parts in ((64, 1), (128, 2), (128, 1))])
    ends = ["bn_splits=1 batch=64", "bn_splits=2 batch=128", "bn_splits=1 batch=128"]
    assert [name.partition(" seed 0 ")[2] for name in found] == ends
    found = plan.names([job(batch=batch) for batch in (64, 128, 512)])  # the parts of a batch follow from it
    assert [name.partition(" seed 0 ")[2] for name in found] == ["batch=64", "batch=128", "batch=512"]


def test_planning_changes_nothing(tmp_path):
    made(job(), tmp_path)
    shutil.copytree(tmp_path, tmp_path.with_name("before"))
    planned([job(), job(seed=1)], tmp_path)
    files = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    before = tmp_path.with_name("before")
    assert files == {p.relative_to(before): p.read_bytes() for p in before.rglob("*") if p.is_file()}
