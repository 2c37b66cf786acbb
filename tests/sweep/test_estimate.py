"""An estimate is what was measured on the device, scaled to what is left, and corrected by what runs took."""

import pytest

from marginlens.nets.count import facts
from marginlens.runs.store import Entry, examine, scan
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
    assert guess.basis == "measured"
    assert guess.seconds == pytest.approx(100 * TRAIN / 64.0 + 2 * 10.0)
    (limited,) = steps_of([job(probe=False, epochs=100, limit=64)], tmp_path)
    assert estimator(tmp_path).guess(limited).seconds == pytest.approx(100 * 64 / 64.0)


def test_what_is_done_takes_no_time(tmp_path):
    made(job(epochs=4), tmp_path, rate=64.0)
    made(job(epochs=4, seed=1), tmp_path, epochs=3, complete=False, rate=64.0)
    half = job("shapes", epochs=4)
    cached, cut, lacking = steps_of([job(epochs=4), job(probe=False, epochs=4, seed=1), half], tmp_path)
    found = estimator(tmp_path)
    assert found.guess(cut).seconds == pytest.approx(TRAIN / 64.0)
    assert found.guess(lacking).seconds == pytest.approx(2.0)
    assert found.total([cached]).seconds == 0


def test_scaled_by_flops(tmp_path):
    """Another encoder at another size: the ratio of their FLOPs; SimCLR's two gradients: 6 passes to 4."""
    made(job(epochs=4), tmp_path, rate=64.0)
    jobs = [job(probe=False, epochs=4, encoder="resnet18"), job(probe=False, epochs=4, method="simclr")]
    other, simclr = (estimator(tmp_path).guess(step) for step in steps_of(jobs, tmp_path))
    ratio = facts("resnet18", 32).flops / facts("tiny", 32).flops
    assert (other.basis, simclr.basis) == ("scaled", "scaled")
    assert other.seconds == pytest.approx(4 * TRAIN / 64.0 * ratio)
    assert simclr.seconds == pytest.approx(4 * TRAIN / 64.0 * 6 / 4)


def test_the_newest_run_tells(tmp_path):
    made(job(epochs=4), tmp_path, rate=64.0)
    made(job(epochs=4, seed=1), tmp_path, rate=256.0, time="2026-06-01T00:00:00Z")
    (step,) = steps_of([job(probe=False, seed=2)], tmp_path)
    assert estimator(tmp_path).guess(step).seconds == pytest.approx(2 * TRAIN / 256.0)


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
    assert found.guess(steps[1]).seconds == pytest.approx(2 * alone)
    assert found.total(steps[1:]).seconds == pytest.approx(4 * 2 * alone)
    assert found.total(steps[1:], slots=2).seconds == pytest.approx(2 * 2 * alone)
    assert found.total(steps[1:], slots=100).seconds == pytest.approx(2 * alone)  # no shorter than the longest


BROKEN = {
    "speed cut off": ("speed.jsonl", lambda held: '{"epoch": 1, "sec\n{"a":\n'),
    "speed of something else": ("speed.jsonl", lambda held: '{"epoch": 1}\n'),
    "speed of numbers": ("speed.jsonl", lambda held: "1\n2\n"),
    "no speed": ("speed.jsonl", lambda held: held.replace("64.0", '"fast"')),
    "a result without images": ("result.json", lambda held: held.replace("images", "pictures")),
    "a start without a time": ("environment.jsonl", lambda held: held.replace("time", "when")),
    "a probe without seconds": ("evaluations", lambda held: held.replace("seconds", "minutes")),
    "a probe of no images": ("evaluations", lambda held: held.replace('_images": ', '_images": -')),
    "a probe of nothing": ("evaluations", lambda held: held.replace('"epochs"', '"eras"')),
}


@pytest.mark.parametrize("what", BROKEN)
def test_records_of_no_use_are_passed_over(tmp_path, what):
    """They may break after they were looked at; another run still tells."""
    run = made(job(epochs=4), tmp_path, rate=64.0)
    entries = scan(tmp_path)
    name, change = BROKEN[what]
    (path,) = (run.path / name).glob("*") if name == "evaluations" else [run.path / name]
    path.write_text(change(path.read_text()))
    entries = [Entry(one.path, one.state, one.run) for one in entries]  # nothing read yet
    made(job(epochs=4, seed=1), tmp_path / "other", rate=64.0)
    (step,) = steps_of([job(seed=2)], tmp_path / "other")
    found = Estimator([*entries, *scan(tmp_path / "other")], DEVICE)
    assert found.guess(step).seconds == pytest.approx(2 * TRAIN / 64.0 + 2.0)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (40, "40 s"), (120, "2 min"), (8400, "2 h 20 min"), (5 * 86400 + 3600, "5 d 1 h")],
)
def test_spoken(seconds, said):
    assert spoken(seconds) == said
