"""A job holds its run from its first part to its last, so nobody removes the weights in between."""

import pytest

from marginlens.errors import Stopped
from marginlens.runs import records, work
from marginlens.runs.run import examine, open_run
from marginlens.runs.store import drop_weights
from marginlens.sweep import job as jobs
from tests.sweep.conftest import job, made


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Parts that only lock, as the real ones do, and note who holds the run between them."""
    done = job("shapes")
    seen = []

    def pretrain(settings, **more):
        run = made(done.model_copy(update={"evaluations": ()}), tmp_path)
        with work.locked(run):
            seen.append("pretrain")
        return run

    def evaluation(run, *more, **where):
        seen.append(examine(run.path).state)
        with work.locked(run):
            pass

    monkeypatch.setattr(jobs.training, "pretrain", pretrain)
    monkeypatch.setattr(jobs, "evaluate", evaluation)
    return done, seen


def test_a_run_is_held_between_the_parts_of_its_job(parts, tmp_path):
    done, seen = parts
    path = jobs.perform(done, jobs.Where(runs=str(tmp_path), records_only=True))
    assert seen == ["pretrain", "running", "running"]
    found = examine(path)
    assert (found.state, found.weights) == ("complete", False)


def test_a_job_is_done_though_its_weights_stay(parts, tmp_path, monkeypatch, capsys):
    def refuse(run):
        raise ValueError(f"{run.path} is left as it is: it cannot be removed (Permission denied)")

    monkeypatch.setattr(jobs, "drop_weights", refuse)
    assert examine(jobs.perform(parts[0], jobs.Where(runs=str(tmp_path), records_only=True))).state == "complete"
    assert "its weights stay: " in capsys.readouterr().err


def test_each_part_is_told_its_rates(parts, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(jobs, "evaluate", lambda run, kind, *more, beside, **where: told.append((kind, beside)))
    jobs.perform(parts[0].with_more(("knn", "probe"), (3.0, 10.0)), jobs.Where(runs=str(tmp_path)))
    assert told == [("probe", (3.0, 10.0)), ("transfer", (3.0, 10.0)), ("knn", ())]


def test_it_is_let_go_however_a_job_ends(parts, tmp_path):
    with pytest.raises(Stopped):
        jobs.perform(parts[0], jobs.Where(runs=str(tmp_path)), lambda: True)
    (path,) = tmp_path.iterdir()
    assert examine(path).state == "complete"
    assert drop_weights(open_run(path)) > 0


def test_a_crash_is_not_noted_of_a_run_that_goes_on_or_is_complete(tmp_path):
    cut, done = made(job(), tmp_path, epochs=1, complete=False), made(job(seed=1), tmp_path)
    jobs.note_crash(done, "killed")
    with work.locked(cut):
        jobs.note_crash(cut, "killed")
    assert not list(tmp_path.glob("*/failure.json"))
    jobs.note_crash(cut, "killed")
    assert records.read_json(cut.path / "failure.json")["step"] == 2
    assert (examine(cut.path).state, examine(cut.path).why) == ("failed", "killed")
