"""failure.json exists if, and only if, a run's last start failed."""

import json
import time

import pytest

import marginlens as ml
from marginlens.errors import DataError, Stopped
from marginlens.runs import work
from marginlens.runs.store import examine, scan
from tests.train.conftest import STEPS, ending_before, launch, settings, wait_for, words

QUIET = {"workers": 0, "checkpoint_seconds": 0, "quiet": True}


@pytest.fixture
def failing(tmp_path):
    """Makes a run that meets an error before the given step; returns its folder."""

    def make(error, step=3, **more):
        with ending_before(step, error), pytest.raises(BaseException, match=r".*"):
            ml.pretrain(settings(), runs=tmp_path / "runs", **(QUIET | more))
        (path,) = (tmp_path / "runs").iterdir()
        return path

    return make


def test_a_run_that_stops_by_itself_says_why(failing):
    path = failing(Stopped("the loss became nan at step 3"))
    found = json.loads((path / "failure.json").read_text())
    assert (found["line"], found["code"], found["step"]) == ("the loss became nan at step 3", 1, 3)
    assert abs(time.mktime(time.strptime(found["time"], "%Y-%m-%dT%H:%M:%SZ")) - time.mktime(time.gmtime())) < 600
    assert (examine(path).state, examine(path).why) == ("failed", "the loss became nan at step 3")


def test_data_that_cannot_be_read_are_a_failure(failing):
    path = failing(DataError("cat.jpg cannot be decoded"))
    assert json.loads((path / "failure.json").read_text())["code"] == 2
    assert examine(path).why == "cat.jpg cannot be decoded"


def test_a_crash_says_what_crashed(failing):
    path = failing(RuntimeError("a bug\nin two lines"))
    assert examine(path).why == "RuntimeError: a bug in two lines"


def test_it_is_gone_when_the_run_goes_on(failing):
    path = failing(Stopped("no space left"))
    again = failing(KeyboardInterrupt(), step=4, resume=True)
    assert again == path
    assert not (path / "failure.json").exists()
    assert examine(path).state == "interrupted"
    failing(Stopped("again"), step=5, resume=True)
    assert examine(path).why == "again"
    run = ml.pretrain(settings(), runs=path.parent, resume=True, **QUIET)
    assert (examine(path).state, run.result["steps"]) == ("complete", STEPS)
    assert not (path / "failure.json").exists()


def test_a_start_that_is_refused_leaves_it(failing):
    path = failing(Stopped("no space left"))
    with pytest.raises(ValueError, match="add --resume"):
        ml.pretrain(settings(), runs=path.parent, **QUIET)
    assert examine(path).why == "no space left"


@pytest.mark.parametrize("error", [Stopped("stopped by SIGTERM", 143), KeyboardInterrupt(), SystemExit(1)])
def test_being_stopped_is_no_failure(failing, error):
    path = failing(error)
    assert not (path / "failure.json").exists()
    assert examine(path).state == "interrupted"


def test_a_signal_to_the_command_is_no_failure(tmp_path):
    process = launch("-m", "marginlens", *words(runs=tmp_path, limit=8, epochs=400))
    wait_for(lambda: list(tmp_path.glob("*/checkpoints/*.safetensors")), process)
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert [(e.state, e.weights) for e in scan(tmp_path)] == [("interrupted", True)]


def test_a_disk_that_is_full_hides_nothing(failing, monkeypatch):
    """The failure that cannot be noted is still the one that is raised."""

    def save(path, content):
        raise OSError(28, "No space left on device")

    run = ml.open_run(failing(KeyboardInterrupt()))
    monkeypatch.setattr(work, "save_json", save)
    with pytest.raises(Stopped, match="no space left"), work.failures(run, lambda: 3):
        raise Stopped("no space left")


def test_a_run_that_makes_its_end_again_is_not_complete_meanwhile(failing, tmp_path):
    """Its last checkpoint is damaged, so that it goes on from the one before it."""
    run = ml.pretrain(settings(), runs=tmp_path / "runs", **QUIET)
    run.checkpoint().path.write_bytes(b"")
    path = failing(KeyboardInterrupt(), step=STEPS - 1, resume=True)
    assert examine(path).state == "interrupted"
    ml.pretrain(settings(), runs=tmp_path / "runs", resume=True, **QUIET)
    assert examine(path).state == "complete"
