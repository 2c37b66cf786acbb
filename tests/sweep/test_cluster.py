"""Files that go to a cluster and come back, without a cluster; `test_ray.py` has a real one."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from marginlens.runs import records as files
from marginlens.runs import work
from marginlens.runs.store import examine, records, scan
from marginlens.sweep import cluster
from marginlens.sweep.job import Executor, Where
from marginlens.sweep.pool import Outcome
from tests.sweep.conftest import job, made


class RayError(Exception):
    """As Ray's."""


class TaskCancelledError(RayError):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's: it holds what the task raised."""

    def __init__(self, cause):
        super().__init__()
        self.cause = cause


def fake(result=None, nodes=()):
    """Ray, as far as it is asked here."""

    def get(ref):
        if isinstance(result, Exception):
            raise result
        return result

    known = SimpleNamespace(RayError=RayError, TaskCancelledError=TaskCancelledError, RayTaskError=RayTaskError)
    listed = [{"Alive": alive, "Resources": {"CPU": float(c), "GPU": float(g)}} for alive, c, g in nodes]
    return SimpleNamespace(exceptions=known, get=get, nodes=lambda: listed)


def home(outcome, run, runs):
    """How a task ended that left this run on its node."""
    found = {"outcome": asdict(outcome), "name": run.path.name, "records": records(run.path)}
    return cluster._result(fake(found), None, SimpleNamespace(number=1), Executor(runs=str(runs)))


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_complete_pre_training_comes_home_whatever_follows(tmp_path, state):
    run = made(job(probe=False), tmp_path / "node")
    found = home(Outcome(1, state, "" if state == "done" else "no", 2.0, "x"), run, tmp_path / "home")
    assert (found.state, found.seconds) == (state, 2.0)
    assert found.run == (str(tmp_path / "home" / run.path.name) if state == "done" else "")
    (entry,) = scan(tmp_path / "home")
    assert (entry.state, entry.weights) == ("complete", False)


def test_what_was_only_begun_stays_away_and_a_failure_comes_home(tmp_path):
    run = made(job(), tmp_path / "node", epochs=1, complete=False)
    assert home(Outcome(1, "stopped", "", 1.0), run, tmp_path / "home").state == "stopped"
    assert not (tmp_path / "home").exists()
    files.save_json(run.path / "failure.json", {"time": "", "line": "oom", "code": 1, "step": 2})
    assert home(Outcome(1, "failed", "oom", 1.0), run, tmp_path / "home").line == "oom"
    (entry,) = scan(tmp_path / "home")
    assert (entry.state, entry.why) == ("failed", "oom")


def test_what_cannot_be_put_in_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE", 0.0)
    run = made(job(probe=False), tmp_path / "node")
    there = made(job(probe=False), tmp_path / "home")
    files.save_json(there.path / "result.json", there.result.plain() | {"loss": 2.0})
    found = home(Outcome(1, "stopped", "stopped", 1.0), run, tmp_path / "home")
    assert (found.state, "stopped; and " in found.line, "result.json differs" in found.line) == ("failed", True, True)
    with work.locked(there):
        found = home(Outcome(1, "done", "", 1.0), run, tmp_path / "home")
    assert (found.state, "is in use by process" in found.line) == ("blocked", True)


def test_the_same_numbers_of_another_driver_are_no_failure(tmp_path):
    """Two drivers without --shared do everything twice; what came home first stays."""
    job_of_both = job("shapes")
    there = made(job_of_both, tmp_path / "home", time="2026-01-01T00:00:00Z")
    run = made(job_of_both, tmp_path / "node", rate=7.0, probe_seconds=9.0, time="2026-01-01T00:00:07Z")
    before = records(there.path)
    found = home(Outcome(1, "done", "", 1.0, "x"), run, tmp_path / "home")
    assert (found.state, found.line, found.run) == ("done", "", str(there.path))
    assert records(there.path) == before


def test_an_error_that_says_nothing_has_a_name():
    for cause, said in ((MemoryError(), "MemoryError"), (ValueError("a\nb\n"), "b")):
        found = cluster._result(fake(RayTaskError(cause)), None, SimpleNamespace(number=1), Executor())
        assert (found.state, found.line) == ("failed", said)


@pytest.mark.parametrize(
    ("nodes", "asked", "slots"),
    [
        ([(True, 8, 2), (True, 8, 2)], {"gpus_per_run": 2}, 2),
        ([(True, 8, 2), (True, 1, 2)], {"gpus_per_run": 0.4}, 5),  # two on each GPU, and a core for each
        ([(True, 8, 1), (False, 8, 8)], {}, 1),
        ([(True, 2, 0), (True, 2, 0)], {"cpus_per_run": 0.5}, 8),
    ],
)
def test_room_is_what_each_node_has(monkeypatch, nodes, asked, slots):
    monkeypatch.setattr(cluster, "_connected", lambda address: fake(nodes=nodes))
    assert cluster.describe(Executor(**asked)).slots == slots


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        ([(True, 8, 2), (True, 16, 2)], {"gpus_per_run": 4}, "wants 4 GPUs and 1 cores of one node, and none of the"),
        ([(True, 8, 2), (True, 16, 2)], {"gpus_per_run": 4}, "cluster's 2 has as many, the largest 2 and 16; lower"),
        ([(True, 2, 0), (True, 2, 0)], {"cpus_per_run": 3}, "wants 0 GPUs and 3 cores"),
        ([(True, 8, 4)], {"gpus_per_run": 1.5}, "above one it must be a whole number"),
        ([], {}, "cluster's 0 has as many"),
    ],
)
def test_a_run_that_fits_on_no_node_is_refused(monkeypatch, nodes, asked, said):
    """Ray would wait for such a node to come, for ever."""
    monkeypatch.setattr(cluster, "_connected", lambda address: fake(nodes=nodes))
    with pytest.raises(ValueError, match=said):
        cluster.describe(Executor(**asked))


def test_what_was_under_way_says_where_it_stopped_and_what_waited_says_nothing():
    stopped = {"outcome": asdict(Outcome(1, "stopped", "", 5.0)), "name": "", "records": {}}
    for result, seconds in ((stopped, [5.0]), (TaskCancelledError(), [])):
        ray, asked = fake(result), []
        ray.cancel, ray.wait = asked.append, lambda refs, num_returns, timeout: (refs, [])
        found = cluster._stop(ray, {"ref": (SimpleNamespace(number=1), 0)}, Executor(shared=True))
        assert ([o.seconds for o in found], asked) == (seconds, ["ref"])


def remote(shared=False):
    where = Where(runs="unused", device="cpu").model_dump(mode="json")
    return cluster.remote(1, job().model_dump(mode="json"), where, shared)


def test_a_crash_on_a_node_is_written_down_there(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def crash(child):
        made(job(), Path(child.runs), epochs=1, complete=False)
        return Outcome(1, "failed", "its process was ended by SIGKILL", 1.0, crashed=True)

    monkeypatch.setattr(cluster, "Child", lambda number, job, where, env: SimpleNamespace(runs=where.runs))
    monkeypatch.setattr(cluster, "_listen", crash)
    found = remote()
    cluster._home(Outcome(**found["outcome"]), found["name"], found["records"], Executor(runs=str(tmp_path / "home")))
    assert examine(tmp_path / "home" / found["name"]).why == "its process was ended by SIGKILL"


def test_a_run_in_use_on_shared_storage_is_waited_for(monkeypatch):
    """What was lost with its node may hold its lock for a while yet."""
    endings, clock = ["blocked", "blocked", "done", "blocked"], [0.0]
    monkeypatch.setattr(cluster, "Child", lambda *parts: None)
    monkeypatch.setattr(cluster, "_listen", lambda child: Outcome(1, endings.pop(0), "", 1.0))

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert remote(shared=True)["outcome"]["state"] == "done"
    assert clock[0] > 0
    endings[:] = ["blocked"] * 100
    assert remote(shared=True)["outcome"]["state"] == "blocked"
    assert cluster.GRACE < clock[0] < 2 * cluster.GRACE
