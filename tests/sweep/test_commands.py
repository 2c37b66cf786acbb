"""`sweep` and `reproduce` on the command line, with fake runs: plans, output and errors."""

import json
import re
import signal
import time

import pytest

from marginlens.cli import main
from marginlens.data import shapes, store
from marginlens.runs.store import examine, scan
from marginlens.runs.work import locked
from marginlens.sweep import conduct, pool
from marginlens.sweep.estimate import Estimator
from marginlens.sweep.job import Executor
from marginlens.sweep.plan import make_plan
from marginlens.sweep.pool import Outcome
from tests.sweep.conftest import job, made

SWEEP = ("sweep", "--data", "shapes", "--epochs", "2", "--grid", "effect=plain|emphasis(s=5)", "--grid", "seed=0|1")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """An executor that runs nothing; `fails` maps a job's number to how it ends."""
    performed = []

    def run_local(steps, where, slots, ending, say, grace=60.0):
        for step in steps:
            if ending():
                return
            performed.append(step.name)
            if step.number in pretended.fails:
                yield Outcome(step.number, "failed", pretended.fails[step.number], 1.0, crashed=True)
                continue
            path = made(step.job, tmp_path / where.runs).path
            time.sleep(pretended.seconds)
            yield Outcome(step.number, "done", "", max(pretended.seconds, 1.0), str(path))

    def pretended(*words):
        performed.clear()
        main(list(words))
        return list(performed)

    pretended.fails, pretended.seconds, pretended.performed = {}, 0.0, performed
    monkeypatch.setattr(pool, "run_local", run_local)
    return pretended


@pytest.fixture
def tops(monkeypatch):
    """Makes pretended evaluations have this top-1, and more."""

    def given(top1, **more):
        def changed(done, runs, **words):
            run = made(done, runs, **words)
            for path in (run.path / "evaluations").iterdir():
                path.write_text(json.dumps(json.loads(path.read_text()) | {"top1": top1(done.settings)} | more))
            return run

        monkeypatch.setitem(globals(), "made", changed)

    made = globals()["made"]
    return given


def refused(capsys, *words, code=2):
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("marginlens: ")]
    return line


def test_a_sweep_runs_each_once_seed_by_seed(pretend, capsys):
    assert pretend(*SWEEP) == [
        "mocov3 shapes plain seed 0",
        "mocov3 shapes emphasis(s=5) seed 0",
        "mocov3 shapes plain seed 1",
        "mocov3 shapes emphasis(s=5) seed 1",
    ]
    out = capsys.readouterr().out
    assert "4 runs: 4 to run; time unknown" in out
    assert "4 runs done in" in out
    assert pretend(*SWEEP) == []
    assert "4 runs: 4 cached; nothing to do" in capsys.readouterr().out
    assert pretend(*SWEEP[:-1], "seed=0|1|2") == ["mocov3 shapes plain seed 2", "mocov3 shapes emphasis(s=5) seed 2"]
    out, err = capsys.readouterr()
    assert "4 cached" in out
    assert "2 to run; about" in out
    assert "1 of 2 runs ended; about" in err


def test_a_sweep_ends_with_means_over_seeds(pretend, capsys, tops):
    tops(lambda settings: 60.0 + settings.seed + (settings.effect != "plain"))
    pretend(*SWEEP)
    out = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "±" in line and "│" in line
    ]
    assert rows == [["plain", "2", "60.50 ± 0.71"], ["emphasis(s=5)", "2", "61.50 ± 0.71"]]
    assert "mean ± sample standard deviation over seeds" in out
    assert "diverged" not in out
    found = _json(pretend, capsys, *SWEEP, "--json")
    assert found["means"][1] == {
        "settings": {"effect": "emphasis(s=5)"},
        "seeds": [0, 1],
        "evaluations": {"probe": {"mean": 61.5, "std": pytest.approx(0.5**0.5), "seeds": 2, "diverged": 0}},
    }
    assert "means" not in _json(pretend, capsys, *SWEEP, "--dry-run", "--json")


def test_a_grid_of_seeds_alone_is_one_point(pretend, capsys):
    words = (*SWEEP[:-4], "--grid", "seed=0|1", "--beside", "3")
    (point,) = _json(pretend, capsys, *words, "--json")["means"]
    assert (point["settings"], list(point["evaluations"])) == ({"effect": "plain"}, ["probe", "probe lr=3"])
    assert point["evaluations"]["probe lr=3"]["seeds"] == 2


def test_reproduce_ends_with_means_too(pretend, capsys):
    words = ("reproduce", "tab2", "--only", "MoCo/CIFAR10/p*", "--dataset", "shapes", "--seeds", "2")
    found = _json(pretend, capsys, *words, "--json")["means"]
    assert [point["settings"]["effect"] for point in found] == ["plain", "emphasis(s=20)", "emphasis(s=20, c=0.7)"]
    assert {point["evaluations"]["probe"]["seeds"] for point in found} == {2}


def test_a_seed_that_failed_is_missing_in_its_mean(pretend, capsys):
    pretend.fails = {3: "killed"}
    with pytest.raises(SystemExit):
        pretend(*SWEEP)
    assert "50.00 (1 of 2 seeds)" in capsys.readouterr().out


def test_probes_that_diverged_are_told_while_and_after(pretend, capsys, tops):
    tops(lambda settings: 10.0, loss=669424.0)
    pretend(*SWEEP)
    out, err = capsys.readouterr()
    assert err.count("probe on shapes 10.00 % (diverged)") == 4
    assert out.count("10.00 ± 0.00 (2 diverged)") == 2
    assert "4 evaluations diverged: the layer ended worse than guessing" in out
    assert "--beside 0.1 0.3" in out
    found = _json(pretend, capsys, *SWEEP, "--json")  # measured before
    assert [point["evaluations"]["probe"]["diverged"] for point in found["means"]] == [2, 2]


def test_rates_that_diverged_to_nan_are_told(pretend, capsys, tops):
    tops(lambda settings: 50.0, lost=[30.0])
    pretend(*SWEEP[:-4], "--grid", "seed=0", "--beside", "3")
    err = capsys.readouterr().err
    assert (
        "done in 1 s: probe on shapes 50.00 %, probe on shapes lr=30 diverged (NaN), probe on shapes lr=3 50.00 %"
        in err
    )


def test_rates_that_are_asked_for_later_follow_and_the_weights_stay_until_then(pretend, capsys, tmp_path):
    """--records-only takes the weights of what is done, and of nothing else."""
    pretend(*SWEEP)
    words = (*SWEEP, "--beside", "3", "10", "--records-only")
    pretend.fails = {2: "killed"}
    with pytest.raises(SystemExit):
        pretend(*words)
    assert len(pretend.performed) == 4
    assert all(entry.weights for entry in scan(tmp_path / "runs"))
    pretend.fails = {}
    assert pretend(*words) == ["mocov3 shapes emphasis(s=5) seed 0"]
    assert [len(entry.evaluations) for entry in scan(tmp_path / "runs")] == [3] * 4
    assert "was done before: its weights are removed" in capsys.readouterr().err
    assert pretend(*words) == []


def test_what_no_probe_could_be_done_for_is_refused_before_its_training(pretend, capsys):
    said = refused(capsys, *SWEEP, "--holdout", "128")
    assert "cannot be run: holdout is 128" in said
    assert pretend.performed == []
    words = ("reproduce", "tab2", "--only", "MoCo/CIFAR10/plain", "--probe-epochs", "101", "--dry-run")
    said = refused(capsys, *words)
    assert "probe_epochs is 101" in said
    assert "has 100 on cifar10: --probe-epochs is for a shorter look" in said
    assert "has 20 on shapes" in refused(capsys, *words, "--dataset", "shapes")


def test_a_transfer_that_is_asked_for_later_follows(pretend, capsys):
    pretend(*SWEEP, "--no-probe")
    found = _json(pretend, capsys, *SWEEP, "--transfer-to", "shapes", "--dry-run", "--json")
    assert [step["evaluations"] for step in found["plan"]] == [["probe", "transfer to shapes"]] * 4
    assert {step["epochs_left"] for step in found["plan"]} == {0}
    assert found["counts"] == {"to run": 4}
    assert found["estimate_seconds"] is None  # nothing was probed yet


def test_a_dry_run_writes_nothing(pretend, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "nowhere"))
    found = _json(pretend, capsys, *SWEEP, "--dry-run", "--json")
    assert len(found["plan"]) == 4
    assert list(tmp_path.iterdir()) == []


def test_reproduce_shares_backbones_and_labels_what_it_is(pretend, capsys):
    words = ("reproduce", "tab2", "tab3", "--only", "MoCo/CIFAR10*/p*", "--dataset", "shapes", "--seeds", "2")
    found = _json(pretend, capsys, *words, "--json")
    assert found["done"] == len({json.dumps(step["settings"]) for step in found["plan"]})
    assert all(step["evaluations"] == ["probe", "transfer to shapes"] for step in found["plan"])
    assert {step["settings"]["epochs"] for step in found["plan"]} == {10}
    assert [step["settings"]["seed"] for step in found["plan"]] == sorted(s["settings"]["seed"] for s in found["plan"])
    pretend(*words)
    assert "a rehearsal on shapes, not the paper's data" in capsys.readouterr().out
    pretend("reproduce", "tab2", "--only", "MoCo/CIFAR10/*", "--epochs", "20", "--dry-run")
    out = capsys.readouterr().out
    assert "Tab. 2: a shorter look, 20 epochs" in out
    assert "5 runs: 5 to run" in out


def test_several_patterns_name_the_cells_of_each_once(pretend, capsys):
    """In the order of the tables' cells and not of the patterns; of a table that none matches a line says so."""

    def cells(*patterns):
        words = ("reproduce", "tab2", "tab3", "--only", *patterns, "--dry-run", "--json")
        found = _json(pretend, capsys, *words)
        return [cell for step in found["plan"] for cell in step["cells"]], found["notes"]

    plain, pos = "Tab. 2: MoCo/CIFAR10/plain", "Tab. 2: MoCo/CIFAR10/pos"
    both, notes = cells("MoCo/CIFAR10/pos", "moco/cifar10/p*n", "MoCo/CIFAR10/pos", "*/CIFAR10/plain")
    assert both == [pos, plain, "Tab. 2: SimCLR/CIFAR10/plain", "Tab. 2: BYOL/CIFAR10/plain"]
    assert [note for note in notes if note.startswith("no cell of Tab. 3 matches 'MoCo/CIFAR10/pos'")] == notes
    assert cells("MoCo/CIFAR10/plain", "MoCo/CIFAR10->*/pos") == ([plain, "Tab. 3: MoCo/CIFAR10->CIFAR100/pos"], [])


def test_a_dry_run_lists_the_cells(pretend, capsys):
    words = ("reproduce", "tab2", "tab3", "--only", "MoCo/CIFAR10*/plain", "--seeds", "2", "--dry-run")
    pretend(*words)
    said = "Tab. 2: MoCo/CIFAR10/plain; Tab. 3: MoCo/CIFAR10->CIFAR100/plain"
    assert f"[1, 3] {said}" in capsys.readouterr().out
    assert "; ".join(_json(pretend, capsys, *words, "--json")["plan"][2]["cells"]) == said


@pytest.mark.parametrize(
    ("there", "line", "said"),
    [
        (None, "", "stopped before its first checkpoint; the same command begins it again"),
        ({"epochs": 0, "complete": False}, "", "stopped in its first epoch; the same command continues there"),
        ({"epochs": 1, "complete": False}, "", "stopped after 1 of 2 epochs; the same command continues there"),
        ({"epochs": 1, "complete": False}, "was killed", "stopped after 1 of 2 epochs; .* there; it was killed"),
        ({"probe": False}, "", "stopped in its probe, which begins again"),
    ],
)
def test_a_stop_says_where_and_once_what_is_left(capsys, tmp_path, monkeypatch, there, line, said):
    def run_local(steps, where, slots, ending, say, grace=60.0):
        if there is not None:
            more = dict(there)
            first = job(probe=more.pop("probe", True), seed=0)
            made(first, tmp_path / "runs", **more)
        yield Outcome(2, "failed", "no", 1.0)
        signal.raise_signal(signal.SIGINT)
        assert ending()
        yield Outcome(1, "stopped", line, 1.0)

    monkeypatch.setattr(pool, "run_local", run_local)
    with pytest.raises(SystemExit) as caught:
        main([*SWEEP[:-4], "--grid", "seed=0|1|2"])
    assert caught.value.code == 130
    out, err = capsys.readouterr()
    assert re.search(rf"^\[1\] {said}$", err, re.MULTILINE), err
    assert (out + err).count("2 of 3 runs are left; the same command continues them") == 1
    assert re.search(r"0 runs done in .*, 0 done before, 1 failed, 2 left, all in runs", out)
    assert "2 of 3 runs ended" not in err


def test_reproduce_by_every_reading(pretend, capsys):
    words = ("reproduce", "tab2", "tab3", "--only", "MoCo/CIFAR10*/ratio", "--dry-run", "--json")
    assert len(_json(pretend, capsys, *words)["plan"]) == 2
    found = _json(pretend, capsys, *words, "--readings")["plan"]
    ran = {(step["settings"]["effect"], step["settings"]["bn_splits"]) for step in found}
    assert ran == {(f"ratio(m1=1.6{scope})", parts) for scope in ("", ", scope=row") for parts in (4, 1)}
    assert len(found) == 8
    assert all(len(step["evaluations"]) == 2 for step in found)
    words = ("reproduce", "tab2", "--only", "MoCo/CIFAR10/*/bn_splits=1", "--readings", "--dry-run", "--json")
    found = _json(pretend, capsys, *words)["plan"]
    assert len(found) == 5
    assert {step["settings"]["bn_splits"] for step in found} == {1}
    with pytest.raises(SystemExit):
        pretend("reproduce", "tab2", "--only", "MoCo/CIFAR10/pos/bn_splits=1", "--dry-run")
    said = "MoCo/CIFAR10/pos/bn_splits=1 is another reading"
    assert said in capsys.readouterr().err


def test_failed_runs_are_written_down_and_the_others_go_on(pretend, capsys, tmp_path):
    pretend.fails = {2: "its process was ended by SIGKILL"}
    with pytest.raises(SystemExit) as caught:
        pretend(*SWEEP)
    assert caught.value.code == 1
    out, err = capsys.readouterr()
    assert len(pretend.performed) == 4
    assert "[2] mocov3 shapes emphasis(s=5) seed 0 failed: its process was ended by SIGKILL" in out
    assert "marginlens: 1 of 4 runs failed; the first is [2]" in err
    assert [entry.state for entry in scan(tmp_path / "runs")] == ["complete"] * 3


def test_a_crash_is_recorded_in_the_run_s_folder(pretend, capsys, tmp_path, monkeypatch):
    def run_local(steps, where, slots, ending, say, grace=60.0):
        made(steps[0].job, tmp_path / "runs", epochs=1, complete=False)
        yield Outcome(1, "failed", "its process was ended by SIGKILL", 1.0, crashed=True)

    monkeypatch.setattr(pool, "run_local", run_local)
    refused(capsys, *SWEEP[:-4], "--grid", "seed=0", code=1)
    (entry,) = scan(tmp_path / "runs")
    assert (entry.state, entry.why) == ("failed", "its process was ended by SIGKILL")
    found = _json(pretend, capsys, *SWEEP[:-4], "--grid", "seed=0", "--dry-run", "--json")
    assert (found["plan"][0]["state"], found["plan"][0]["why"]) == ("failed", "its process was ended by SIGKILL")


def test_a_crash_is_recorded_where_the_data_are_not_known(tmp_path):
    """As of a cluster's run on shared storage, when the data are on the nodes alone."""
    run = made(job(), tmp_path, epochs=1, complete=False)
    place = Executor(runs=str(tmp_path))
    work = conduct.Work(make_plan([job()], tmp_path, {}), place, Estimator([], ""), 1, None)
    lines = []
    conduct._note(work, work.steps[0], Outcome(1, "failed", "ended by SIGKILL", 1.0, crashed=True), lines.append)
    assert lines == ["[1] failed: ended by SIGKILL"]
    assert examine(run.path).why == "ended by SIGKILL"


def test_blocked_runs_are_said_and_the_others_run(pretend, capsys, tmp_path):
    pretend(*SWEEP, "--no-probe")
    first = next(entry for entry in scan(tmp_path / "runs") if "plain-seed0" in entry.name)
    for path in (first.path / "checkpoints").iterdir():
        path.unlink()
    capsys.readouterr()
    pretend.performed.clear()
    line = refused(capsys, *SWEEP[:-1], "seed=0|2")
    assert "1 of 4 runs cannot be done" in line
    assert "its weights are gone" in line
    assert len(pretend.performed) == 3


def test_a_run_that_stays_in_use_is_said_and_has_not_failed(pretend, capsys, tmp_path, monkeypatch):
    def run_local(steps, where, slots, ending, say, grace=60.0):
        path = made(steps[0].job, tmp_path / "runs").path
        yield Outcome(1, "done", "by another process", 0.0, str(path))
        yield Outcome(2, "blocked", "x is in use by process 7; wait for it, or stop it first", 0.0)

    monkeypatch.setattr(pool, "run_local", run_local)
    with pytest.raises(SystemExit) as caught:
        main([*SWEEP[:-1], "seed=0", "--json"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["done"], found["failed"], found["left"]) == (1, [], [])
    assert [one["number"] for one in found["blocked"]] == [2]
    assert "[1] done by another process: probe on shapes 50.00 %" in err
    assert "[2] blocked: x is in use by process 7" in err
    assert "marginlens: 1 of 2 runs cannot be done; the first is [2]" in err


def test_a_shorter_probe_is_said_to_be_one(pretend, capsys):
    one = (*SWEEP[:-4], "--grid", "seed=0")
    pretend(*one)
    pretend(*one, "--probe-epochs", "1")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "epochs=1" in line]
    assert line.endswith(": probe on shapes epochs=1 50.00 %")  # and not the one that was there


def test_weights_of_what_was_done_before_go_too(pretend, capsys, tmp_path):
    """A process that was stopped after the last evaluation left them."""
    one = (*SWEEP[:-4], "--grid", "seed=0|1")
    pretend(*one)
    second = scan(tmp_path / "runs")[1]
    pretend(*one, "--records-only", "--dry-run")
    assert [entry.weights for entry in scan(tmp_path / "runs")] == [True, True]
    capsys.readouterr()
    with locked(second):
        pretend(*one, "--records-only")
    err = capsys.readouterr().err
    assert "[1] was done before: its weights are removed, " in err
    assert "[2] keeps its weights: " in err
    assert [entry.weights for entry in scan(tmp_path / "runs")] == [False, True]
    pretend(*one, "--records-only")
    assert [entry.weights for entry in scan(tmp_path / "runs")] == [False, False]


def test_the_time_limit_ends_with_what_is_left(pretend, capsys):
    pretend.seconds = 0.3
    pretend(*SWEEP, "--limit-minutes", "0.01")
    out = capsys.readouterr().out
    assert 0 < len(pretend.performed) < 4
    left = 4 - len(pretend.performed)
    assert f"{left} of 4 runs are left; the same command continues them" in out


def test_many_runs_are_confirmed(pretend, capsys, monkeypatch):
    many = (*SWEEP[:-1], "seed=" + "|".join(map(str, range(60))))
    assert "120 runs, more than --most 100; add --yes" in refused(capsys, *many)
    assert len(pretend(*many, "--most", "120")) == 120
    assert pretend(*many) == []  # all cached
    assert "more than --most 1;" in refused(capsys, *SWEEP[:-1], "seed=1000|1001", "--most", "1")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda asked: "n")
    assert "nothing was run" in refused(capsys, *SWEEP[:-1], "seed=1000|1001", "--most", "1")
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    assert len(pretend(*SWEEP[:-1], "seed=1000|1001", "--most", "1")) == 4


LONG, HUGE = "x" * 100_000, str(10**400)
ONE = ("sweep", "--data", "shapes", "--dry-run", "--grid", "seed=0")
MISTAKES = {
    ("reproduce", ""): "there is no table ''; there are tab1, tab2",
    ("reproduce", "tab2", "", "--dry-run"): "there is no table ''",
    ("reproduce", LONG): "x...; there are tab1",
    ("reproduce", "tab2", "--only", ""): "no cell of Tab. 2 matches ''",
    ("reproduce", "tab2", "--only", LONG): "x...; paths are method/data/row",
    ("reproduce", "tab2", "--seeds", "-1"): "seeds is -1",
    ("reproduce", "tab2", "--seeds", HUGE): "it must be less than or equal to 1000",
    ("reproduce", "tab2", "--epochs", "nan"): "--epochs needs a whole number, got 'nan'",
    ("reproduce", "tab2", "--epochs", HUGE): "--epochs is for a shorter look",
    ("reproduce", "tab2", "--limit-minutes", "nan"): "limit_minutes is nan; it must be a finite number",
    ("reproduce", "tab2", "--only", "MoCo/CIFAR10/pos", "--at-once", HUGE, "--dry-run"): "less than or equal to 1000",
    (*ONE, "--at-once", str(2**53)): "less than or equal to 1000",
    (*ONE, "--per-gpu", HUGE): "less than or equal to 1000",
    (*ONE, "--probe-epochs", HUGE): "less than or equal to 9007199254740992",
    (*ONE, "--holdout", HUGE): "less than or equal to 9007199254740992",
    (*ONE, "--runs", LONG): "File name too long; give another folder",
    (*ONE, "--transfer-to", LONG): "there is no data set",
    ("sweep", "--dry-run", "--grid", f"data={LONG}"): "there is no data set",
    (*ONE[:-1], f"epochs={HUGE}"): "0...; the most is 9,007,199,254,740,992",
    (*ONE[:-1], "seed=1|"): "has an empty value",
    (*ONE[:-1], "seed="): "has an empty value",
    (*ONE[:-1], ""): "--grid '' has no '='",
    (*ONE[:-1], "="): "there is no setting ''",
    (*ONE[:-1], LONG): "x... has no '='",
    (*ONE[:-1], f"{LONG}=1"): "there is no setting",
    (*ONE[:-1], f"method={LONG}"): "there is no method",
    (
        "sweep",
        "--grid",
        "seed=0",
        "--executor",
        "ray",
        "--address",
        f"127.0.0.1:{'9' * 5000}",
    ): "there is no Ray cluster",
    ("sweep", "--grid", "seed=0", "--executor", "ray", "--address", f"{'x' * 99}.org:1"): "there is no Ray cluster",
    ("sweep", "--data", "shapes"): "--grid is missing",
    ("sweep", "--grid", "sed=1"): "did you mean 'seed'?",
    ("sweep", "--grid", "seed=0", "--data", "cifar10"): "run: marginlens data prepare cifar10",
    ("sweep", "--grid", "seed=0", "--data", "shapes", "--transfer-to", "stl10"): "run: marginlens data prepare stl10",
    ("sweep", "--grid", "seed=0", "--data", "shapes", "--per-gpu", "2"): "give --at-once",
    (
        "sweep",
        "--grid",
        "batch=64|512",
        "--data",
        "shapes",
    ): "batch=512 cannot be run: batch is 512, but there are only",
    ("sweep", "--grid", "seed=0", "--data", "shapes", "--device", "tpu"): "there is no device 'tpu'",
    ("sweep", "--grid", "seed=0", "--data", "shapes", "--at-once", "0"): "at_once is 0",
    ("sweep", "--grid", "seed=0", "--data", "shapes", "--runs", "/dev/null"): "/dev/null is a file",
    ("sweep", "--seed", "4", "--grid", "seed=0|1"): "--seed is given, and the grid has values of it",
    ("sweep", "--grid", "seed=0|0", "--dry-run"): "seed=0 and seed=0 are the same run",
    ("reproduce", "tab2", "--dataset", "nope", "--dry-run"): "there is no data set 'nope'; there are shapes",
    ("sweep", "--grid", "seed=0", "--transfer-to", "cifar", "--dry-run"): "did you mean 'cifar10'?",
    ("reproduce",): "name a table or figure",
    ("reproduce", "tab99"): "there is no table 'tab99'",
    ("reproduce", "tab2", "--only", "MoCo/CIFAR11/pos"): "near it: MoCo/CIFAR10/pos",
    ("reproduce", "tab2", "--only", "MoCo/CIFAR10/pos", "BYOL/CIFAR11/plain"): "near it: BYOL/CIFAR10/plain",
    ("reproduce", "tab2", "--only"): "only is empty; give at least 1",
    ("reproduce", "tab4"): "marginlens has neither ImageNet",
    ("reproduce", "tab5"): "has no cells to run",
    ("reproduce", "tab2", "--epochs", "300"): "--epochs is for a shorter look",
    ("reproduce", "tab2", "--only", "MoCo/STL10/*"): "run: marginlens data prepare stl10",
    ("reproduce", "tab2", "--dataset", "shpaes"): "shpaes",
    ("reproduce", "tab2", "--seeds", "0"): "seeds is 0",
    ("reproduce", "tab2", "--executor", "ray", "--address", "127.0.0.1:1"): "there is no Ray cluster at 127.0.0.1:1",
    ("reproduce", "tab2", "--executor", "ray", "--address", "nowhere"): "it must be auto, HOST:PORT or ray://HOST:PORT",
    ("reproduce", "tab2", "--executor", "ray", "--device", "cuda:1"): "on a cluster give auto, cpu or cuda",
}


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words)[:80])
def test_mistakes(capsys, words, tmp_path):
    begin = time.monotonic()
    assert MISTAKES[words] in refused(capsys, *words)
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "runs").exists()


def test_ray_is_optional(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "pip install 'marginlens[ray]'" in refused(capsys, *SWEEP, "--executor", "ray")


def test_settings_from_a_file_and_printed(pretend, capsys, tmp_path):
    (tmp_path / "s.yaml").write_text("data: shapes\nepochs: 3\nprobe: false\n")
    printed = _json(pretend, capsys, "sweep", "--config", "s.yaml", "--grid", "seed=0|1", "--print-config")
    assert (printed["data"], printed["epochs"], printed["probe"], printed["most"]) == ("shapes", 3, False, 100)
    (tmp_path / "again.json").write_text(json.dumps(printed))
    assert (printed["grid"], printed["batch"], "seed" in printed) == (["seed=0|1"], 64, False)
    assert _json(pretend, capsys, "sweep", "--config", "again.json", "--print-config") == printed
    assert len(_json(pretend, capsys, "sweep", "--config", "again.json", "--dry-run", "--json")["plan"]) == 2
    whole = _json(pretend, capsys, "reproduce", "tab2", "--seeds", "3", "--print-config")
    (tmp_path / "again.json").write_text(json.dumps(whole))
    assert (whole["tables"], whole["seeds"]) == (["tab2"], 3)
    assert _json(pretend, capsys, "reproduce", "--config", "again.json", "--print-config") == whole
    other = _json(pretend, capsys, "reproduce", "tab3", "--config", "again.json", "--print-config")
    assert other["tables"] == ["tab3"]
    found = _json(pretend, capsys, "sweep", "--config", "s.yaml", "--epochs", "2", "--grid", "seed=0|1", "--json")
    assert [step["settings"]["epochs"] for step in found["plan"]] == [2, 2]
    assert [step["evaluations"] for step in found["plan"]] == [[], []]
    (tmp_path / "s.yaml").write_text("efect: plain\n")
    assert "there is no setting 'efect'" in refused(capsys, "sweep", "--config", "s.yaml", "--grid", "seed=0")
    (tmp_path / "s.yaml").write_text("only: MoCo/*\n")
    assert "only is 'MoCo/*'; it must be a list" in refused(capsys, "reproduce", "tab2", "--config", "s.yaml")


PRINTED, PLANNED = ("sweep", "--print-config"), ("sweep", "--dry-run", "--grid", "seed=0")
DEEP = "[" * 500 + "]" * 500
ODD_FILES = [
    ("data: 2026-01-01", PRINTED, "data is datetime.date(2026, 1, 1); it must be text, a number, yes or no, or a list"),
    ("data: 2026-01-01", PLANNED, "Put text in quotes"),
    ("split: !!binary aGk=", PRINTED, "split is b'hi'; it must be"),
    ("tau: .nan", PRINTED, "tau is nan; it must be"),
    ("grid: [1, 2]", PRINTED, "grid.0 is 1; it must be a valid string"),
    ("tables: [1]", ("reproduce", "--print-config"), "tables.0 is 1; it must be a valid string"),
    ("tables: ['']", ("reproduce", "--dry-run"), "there is no table ''"),
    ("only: []", ("reproduce", "tab2"), "only is empty"),
    ('runs: "a\\0b"', PLANNED, "embedded null byte; give another folder"),
    (f"seed: {DEEP}", PRINTED, ""),
    (f"grid: {DEEP}", PLANNED, ""),
    (f"tables: {DEEP}", ("reproduce", "--dry-run"), ""),
    ("{" * 5000, PRINTED, ""),
    (f'{{"grid": {DEEP * 20}}}', PLANNED, ""),
]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize(("text", "words", "said"), ODD_FILES, ids=[text[:20] for text, *_ in ODD_FILES])
def test_odd_files_are_one_line(capsys, tmp_path, suffix, text, words, said):
    (tmp_path / f"s.{suffix}").write_text(text)
    line = refused(capsys, *words, "--config", f"s.{suffix}")
    assert said in line or suffix == "json"
    assert len(line) < 500


def test_names_are_no_markup(pretend, capsys, tmp_path, monkeypatch):
    """In the plan's title and rows, and in what is said meanwhile: rich would hide [bold], or stumble over [/b]."""
    odd, few = "[bold]:smile:", [store.Batch(*shapes.draw(128, "train"))]
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    store.write(odd, {"train": few, "test": few}, shapes.CLASSES)
    pretend("reproduce", "tab2", "--only", "MoCo/CIFAR10/plain", "--dataset", odd, "--dry-run")
    out = " ".join(capsys.readouterr().out.split())
    assert f"a rehearsal on {odd}, not the paper's data" in out
    assert f"mocov3 {odd} plain seed 0" in out
    words = (*SWEEP[:-4], "--no-probe", "--dry-run", "--grid", "split=train|[/b]|[red]|:smile:|\x1b[31m")
    pretend(*words)
    out = capsys.readouterr().out
    for name in ("[/b]", "[red]", ":smile:", "\\x1b[31m"):
        assert f"split={name}" in out

    def run_local(steps, where, slots, ending, say, grace=60.0):
        say("[1] [/b] [red]of :smile: \x1b[31m")
        yield Outcome(1, "failed", "no [/b] [red] :smile: \x1b[31m", 1.0)

    monkeypatch.setattr(pool, "run_local", run_local)
    with pytest.raises(SystemExit):
        main([*SWEEP[:-5], "1", "--no-probe", "--data", odd, "--encoder", "tiny", "--batch", "64", "--grid", "seed=0"])
    out, err = capsys.readouterr()
    assert "[1] [/b] [red]of :smile: \\x1b[31m\n" in err
    assert "failed: no [/b] [red] :smile: \\x1b[31m\n" in out


def test_a_measured_store_estimates_the_longest_runs(pretend, capsys):
    """Or says nothing of them: no number is too large for it."""
    pretend(*SWEEP)
    for words in (("--epochs", str(2**53)), ("--probe-epochs", str(2**53)), ("--limit-minutes", "1e308")):
        found = _json(pretend, capsys, *SWEEP[:3], *words, "--grid", "seed=0|7", "--dry-run", "--json")
        assert found["plan"]


def _json(pretend, capsys, *words):
    capsys.readouterr()
    pretend(*words)
    return json.loads(capsys.readouterr().out)
