"""`marginlens reproduce`, for real: killed, interrupted, resumed, and nothing is done twice."""

import json
import signal
import time

import pytest

from marginlens.runs.store import scan
from tests.sweep.conftest import TRAIN, command, starts
from tests.train.conftest import wait_for

EPOCHS = 30
WORDS = ("reproduce", "tab2", "tab3", "--only", "MoCo/CIFAR10*/plain", "--dataset", "shapes", "--epochs", EPOCHS)
WORDS += ("--seeds", 2, "--probe-epochs", 1, "--knn-every", 0, "--records-only")


def entries(runs):
    return {entry.name: entry for entry in scan(runs)} if runs.exists() else {}


def under_way(runs, complete):
    """A run that has written its second epoch, when so many others are complete."""
    time.sleep(0.1)
    found = entries(runs).values()
    going = [e for e in found if e.state == "running" and 2 <= e.epochs_done < EPOCHS - 10]
    return going if sum(e.state == "complete" for e in found) >= complete else []


@pytest.mark.slow
def test_nothing_is_repeated(tmp_path):
    runs = tmp_path / "runs"
    words = (*WORDS, "--runs", runs, "--json")

    killed = command(*words)
    wait_for(lambda: under_way(runs, 0), killed)
    killed.kill()
    killed.communicate()
    wait_for(lambda: all(e.state == "interrupted" for e in entries(runs).values()))  # its child ended by itself
    (first,) = entries(runs).values()
    assert first.weights
    done = first.epochs_done

    stopped = command(*words)
    wait_for(lambda: under_way(runs, 1), stopped)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, err
    assert "marginlens: stopped by SIGINT; " in err
    assert "Traceback" not in err
    assert json.loads(out)["signal"] == "SIGINT"
    complete = {name for name, e in entries(runs).items() if e.state == "complete"}
    assert first.name in complete
    before = starts(runs)
    assert len(before[first.name]) == 2
    assert before[first.name][1]["step"] >= 2 * done > 0

    ended = command(*words)
    out, err = ended.communicate(timeout=120)
    assert ended.returncode == 0, err
    after = starts(runs)
    assert all(after[name] == before[name] for name in complete)  # not even begun
    for name in after.keys() - complete:
        steps = [line["step"] for line in after[name]]
        assert steps == sorted(set(steps))
    for entry in entries(runs).values():
        assert (entry.state, entry.epochs_done, entry.weights) == ("complete", EPOCHS, False)
        assert sorted(e["kind"] for e in entry.evaluations) == ["probe", "transfer"]
    found = json.loads(out)
    assert (found["done"], found["cached"], found["runs"], len(after)) == (1, 1, 2, 2)


@pytest.mark.slow
def test_the_estimate_is_what_it_takes(tmp_path):
    """After one run the others are estimated to a factor of 2.5, whatever else the machine does meanwhile."""
    words = ("sweep", "--data", "shapes", "--epochs", 40, "--grid", "seed=0|1", "--probe-epochs", 5, "--runs", tmp_path)
    process = command(*words, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "1 of 2 runs ended; about" in err
    assert json.loads(out)["estimate_seconds"] is None
    (line,) = [line for line in err.splitlines() if "1 of 2 runs ended" in line]
    told = float(line.split("about ")[1].split(" s")[0])
    (line,) = [line for line in err.splitlines() if line.startswith("[2] done in ")]
    took = float(line.split("done in ")[1].split(" s")[0])
    assert took / 2.5 < told < took * 2.5
    dry = command(*words[:-5], "seed=2", "--probe-epochs", 5, "--runs", tmp_path, "--dry-run", "--json")
    found = json.loads(dry.communicate(timeout=60)[0])
    speeds = [e.result["images_per_second"] for e in scan(tmp_path)]
    assert 0.5 * 40 * TRAIN / max(speeds) < found["estimate_seconds"] < 2 * took
