"""Runs on a real Ray cluster of two nodes, one of which is killed while it works: every run completes exactly once."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from marginlens.cli import main
from marginlens.runs.store import scan
from tests.sweep.conftest import command, starts
from tests.train.conftest import wait_for

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own, and what it leaves open

RUNS, EPOCHS = 2, 12
WORDS = ("sweep", "--data", "shapes", "--epochs", EPOCHS, "--knn-every", 0, "--executor", "ray", "--json")


@pytest.fixture(scope="module")
def cluster(prepared):
    """Two nodes of two cores on this machine, with all of their files in a folder of their own."""
    folder = tempfile.mkdtemp(prefix="mlray")  # short: sockets lie in it
    os.mkdir(f"{folder}/tmp")
    with pytest.MonkeyPatch.context() as patch:
        own = {"TMPDIR": f"{folder}/tmp", "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        own["MARGINLENS_DATA"] = str(prepared)  # of the nodes, which have an environment of their own
        for name, value in own.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 2, "object_store_memory": 80 << 20}
        made = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
        made.second, made.tmp = made.add_node(**small), Path(folder) / "tmp"
        made.wait_for_nodes(timeout=60)  # or all runs may go to the first
        yield made
        made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def workers(node):
    """The processes that do runs for a node, by their ancestry."""
    raylet = node.all_processes["raylet"][0].process.pid
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    below, before = {str(raylet)}, 0
    while len(below) > before:
        before = len(below)
        below |= {pid for pid, parent, *_ in rows if parent in below}
    return [int(pid) for pid, _, args in rows if pid in below and "marginlens.sweep.worker" in args]


def training(pids):
    """Those that have come to train: they hold a run's lock."""
    time.sleep(0.1)
    return [pid for pid in pids if any(name.endswith("/lock") for name in held_files(pid))]


def held_files(pid):
    """Names of the files that a process has open; it may end, or close them, while we look."""
    found = []
    with suppress(FileNotFoundError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(os.readlink(fd))
    return found


def gone(pid):
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_a_node_dies_and_every_run_completes_once(cluster, tmp_path):
    runs = tmp_path / "runs"
    seeds = ("--grid", "seed=" + "|".join(map(str, range(RUNS))), "--probe-epochs", 1, "--cpus-per-run", 2)
    process = command(*WORDS, *seeds, "--runs", runs, "--address", cluster.address, "--retries", 2)
    (lost, *_) = wait_for(lambda: training(workers(cluster.second)), process)
    cluster.remove_node(cluster.second, allow_graceful=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "was lost with its node; retry (1 of 2)" in err
    assert json.loads(out)["done"] == RUNS
    found = scan(runs)
    assert [(entry.state, entry.epochs_done) for entry in found] == [("complete", EPOCHS)] * RUNS
    assert [entry.weights for entry in found] == [False] * RUNS  # those stay away
    assert [[e["kind"] for e in entry.evaluations] for entry in found] == [["probe"]] * RUNS
    assert [len(begun) for begun in starts(runs).values()] == [1] * RUNS
    wait_for(lambda: gone(lost))
    assert not list(cluster.tmp.glob("marginlens-run-*"))  # what the lost run left was removed by the next


@pytest.mark.slow
def test_a_shared_store_keeps_weights(cluster, tmp_path, capsys):
    words = (*WORDS, "--grid", "seed=0", "--no-probe", "--runs", tmp_path / "runs", "--shared")
    process = command(*words, "--address", cluster.address)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (entry,) = scan(tmp_path / "runs")
    assert (entry.state, entry.weights) == ("complete", True)
    main([*map(str, words), "--address", "127.0.0.1:1"])  # nothing is due, so nobody asks for the cluster
    assert json.loads(capsys.readouterr().out)["cached"] == 1


@pytest.mark.slow
def test_two_drivers_that_do_everything_twice_both_end_well(cluster, tmp_path):
    """Without --shared neither sees what the other does; what comes home second is equal."""
    words = (*WORDS, "--grid", "seed=0", "--probe-epochs", 1, "--runs", tmp_path / "runs", "--address", cluster.address)
    drivers = [command(*words) for _ in range(2)]
    for driver in drivers:
        out, err = driver.communicate(timeout=180)
        assert driver.returncode == 0, err
        found = json.loads(out)
        assert (found["done"], found["cached"], found["failed"]) == (1, 0, [])
    (entry,) = scan(tmp_path / "runs")
    assert (entry.state, [one["kind"] for one in entry.evaluations]) == ("complete", ["probe"])
    assert not list(cluster.tmp.glob("marginlens-run-*"))
