"""An estimate is the measured rate on the device times the remaining work, corrected by the time of finished runs."""

import json

import pytest

from marginlens.runs.store import examine, scan
from marginlens.sweep.estimate import Estimator, spoken
from marginlens.sweep.plan import make_plan, prepared
from tests.sweep.conftest import DEVICE, TRAIN, job, made


def steps_of(jobs, runs):
    return make_plan(jobs, runs, prepared(jobs, draw=False))


def estimator(runs, device=DEVICE):
    return Estimator(scan(runs), device)


def test_throughput_of_the_same_shape(tmp_path):
    """Seconds per image of training and of probing, times the images that are left."""
    made(job(epochs=4), tmp_path, rate=64.0, probe_seconds=10.0)
    (step,) = steps_of([job("shapes", epochs=100, seed=5, effect="ratio(m1=0.4)")], tmp_path)
    guess = estimator(tmp_path).guess(step)
    assert guess == pytest.approx(100 * TRAIN / 64.0 + 2 * 10.0)
    (limited,) = steps_of([job(probe=False, epochs=100, limit=64)], tmp_path)
    assert estimator(tmp_path).guess(limited) == pytest.approx(100 * 64 / 64.0)


def test_what_is_done_takes_no_time(tmp_path):
    made(job(epochs=4), tmp_path, rate=64.0)
    made(job(epochs=4, seed=1), tmp_path, epochs=3, complete=False, rate=64.0)
    half = job("shapes", epochs=4)
    cached, cut, lacking = steps_of([job(epochs=4), job(probe=False, epochs=4, seed=1), half], tmp_path)
    found = estimator(tmp_path)
    assert found.guess(cut) == pytest.approx(TRAIN / 64.0)
    assert found.guess(lacking) == pytest.approx(2.0)
    assert found.total([cached]) == 0


def test_what_was_never_measured_is_unknown(tmp_path):
    """Another encoder, method, engine or data set: nothing is scaled from what was measured."""
    made(job(epochs=4), tmp_path, rate=64.0)
    unlike = ({"encoder": "resnet18"}, {"method": "simclr"}, {"batch": 32})
    jobs = [job(probe=False, epochs=4, **other) for other in unlike]
    known, *others = steps_of([job(probe=False, epochs=8), *jobs], tmp_path)
    found = estimator(tmp_path)
    assert found.guess(known) == pytest.approx(8 * TRAIN / 64.0)
    assert [found.guess(step) for step in others] == [None] * 3
    assert found.total([known, *others]) is None
    assert Estimator(scan(tmp_path), DEVICE, "graph").guess(known) is None


def test_a_rate_of_other_data_tells_nothing(tmp_path):
    """Neither of training, nor of a probe, nor of a transfer: other data have other images and other augmentation."""
    made(job(data="cifar10", epochs=4), tmp_path, rate=64.0, probe_seconds=10.0)
    alone, probed, transferred = steps_of(
        [job(probe=False, epochs=4), job(epochs=4), job("shapes", data="cifar10", probe=False, epochs=4)], tmp_path
    )
    found = estimator(tmp_path)
    assert [found.guess(step) for step in (alone, probed, transferred)] == [None] * 3
    assert found.total([alone]) is None
    (same,) = steps_of([job(data="cifar10", epochs=8, seed=1)], tmp_path)
    assert found.guess(same) == pytest.approx(8 * TRAIN / 64.0 + 10.0)


def test_a_start_is_added_and_scales_nothing(tmp_path):
    """A short run takes 57 times its rate to start up; a run of fifty times its length does not."""
    jobs = [job(epochs=2), job(epochs=100), job(epochs=4, batch=32, probe=False)]
    steps = steps_of(jobs, tmp_path)
    found = estimator(tmp_path)
    run = made(jobs[0], tmp_path, rate=128.0, probe_seconds=1.0)
    raw = 2 * TRAIN / 128.0 + 1.0
    found.finished(steps[0], examine(run.path), 57 * raw)
    assert found.guess(steps[1]) == pytest.approx(100 * TRAIN / 128.0 + 1.0 + 56 * raw)
    assert found.guess(steps[2]) is None


def test_a_rate_of_a_few_images_tells_nothing_of_all(tmp_path):
    made(job(probe=False, epochs=4, limit=64), tmp_path, rate=2.0)
    few, every = steps_of([job(probe=False, limit=64), job(probe=False)], tmp_path / "other")
    assert estimator(tmp_path).guess(few) == pytest.approx(2 * 64 / 2.0)
    assert estimator(tmp_path).guess(every) is None


@pytest.mark.parametrize(
    ("engine", "about", "asked", "known"),
    [
        ("graph", "graph", "auto", True),
        ("eager", "eager (as asked)", "auto", False),
        ("eager", "eager (fp16 scales its loss as it goes)", "auto", True),
        ("eager", "eager (as asked)", "eager", True),
        ("graph", "graph", "eager", False),
    ],
)
def test_a_rate_is_of_the_engine_that_would_be_used(tmp_path, engine, about, asked, known):
    made(job(probe=False), tmp_path, device="NVIDIA H200", engine=engine, engine_about=about)
    (step,) = steps_of([job(probe=False, seed=1)], tmp_path)
    assert (Estimator(scan(tmp_path), "NVIDIA H200", asked).guess(step) is not None) is known


@pytest.mark.parametrize("other", [{"size": 16}, {"amp": "off"}, {"symmetric": True}])
def test_a_rate_is_of_the_same_settings(tmp_path, other):
    made(job(epochs=4), tmp_path)
    (step,) = steps_of([job(epochs=4, **other)], tmp_path)
    assert estimator(tmp_path).guess(step) is None


def test_the_newest_run_tells(tmp_path):
    made(job(epochs=4), tmp_path, rate=64.0)
    made(job(epochs=4, seed=1), tmp_path, rate=256.0, time="2026-06-01T00:00:00Z")
    (step,) = steps_of([job(probe=False, seed=2)], tmp_path)
    assert estimator(tmp_path).guess(step) == pytest.approx(2 * TRAIN / 256.0)


def test_another_device_tells_nothing(tmp_path):
    made(job(), tmp_path, device="NVIDIA H200")
    (step,) = steps_of([job(seed=1)], tmp_path)
    found = estimator(tmp_path)
    assert found.guess(step) is None
    assert found.total([step]) is None


def test_runs_that_finish_correct_the_rest(tmp_path):
    """Nothing is known, a run takes twice what its throughput says, so the others are told to."""
    jobs = [job(seed=seed, epochs=4) for seed in range(5)]
    steps = steps_of(jobs, tmp_path)
    found = estimator(tmp_path, device="")
    assert found.total(steps) is None
    run = made(jobs[0], tmp_path, rate=64.0, probe_seconds=2.0)
    alone = 4 * TRAIN / 64.0 + 2.0
    found.finished(steps[0], examine(run.path), 2 * alone)
    assert found.device == DEVICE
    assert found.guess(steps[1]) == pytest.approx(2 * alone)
    assert found.total(steps[1:]) == pytest.approx(4 * 2 * alone)
    assert found.total(steps[1:], slots=2) == pytest.approx(2 * 2 * alone)
    assert found.total(steps[1:], slots=100) == pytest.approx(2 * alone)  # no shorter than the longest


def test_an_epoch_or_a_probe_of_no_time_tells_nothing(tmp_path):
    run = made(job(epochs=4), tmp_path, rate=64.0)
    slow = {"epoch": 5, "seconds": 0.0, "images_per_second": 0.0}
    with (run.path / "speed.jsonl").open("a") as file:
        file.write(json.dumps(slow) + "\n")
    (path,) = (run.path / "evaluations").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 0.0}))
    (step,) = steps_of([job(seed=2)], tmp_path / "other")
    assert Estimator(scan(tmp_path), DEVICE).guess(step) is None  # as if no probe had been measured
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 2.0}))
    assert Estimator(scan(tmp_path), DEVICE).guess(step) == pytest.approx(2 * TRAIN / 64.0 + 2.0)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (40, "40 s"), (120, "2 min"), (8400, "2 h 20 min"), (5 * 86400 + 3600, "5 d 1 h")],
)
def test_spoken(seconds, said):
    assert spoken(seconds) == said
