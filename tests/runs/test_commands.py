"""`marginlens runs` and its subcommands: their output, their errors, and the files that they never touch."""

import json
import os
import time

import pytest

import marginlens as ml
from marginlens.runs import store as stores
from marginlens.runs import work
from marginlens.runs.query import FIELDS
from marginlens.runs.store import scan
from tests.runs.conftest import content, evaluation, put, records, settings, write


def names(out):
    return [line.split()[0] for line in out.splitlines()[2:]]


@pytest.fixture
def several(store):
    """Four runs: three complete, of which one is longer, and one that failed."""
    return [
        put(store, 0, probe=80.0),
        put(store, 1, effect="emphasis(s=5)", probe=70.0),
        put(store, 2, effect="emphasis(s=20)", epochs=4, done=4, tau=0.5),
        put(store, 3, complete=False, done=1, failure="the loss became nan at step 5"),
    ]


def test_listed(ask, store, several):
    code, out, err = ask("runs", "--runs", store)
    assert (code, err) == (0, "")
    assert out.startswith(f"4 runs in {store}\n")
    assert names(out) == sorted(path.name for path in several)
    (line,) = [x for x in out.splitlines() if x.startswith(several[0].name)]
    assert line.split()[1:] == ["complete", "2/2", "2", "80.00", "%", "2026-01-02T03:04"]


def test_listed_with_the_settings_that_are_not_the_recipes(ask, store):
    usual, hot, long = put(store), put(store, lr=1e30, symmetric=True), put(store, epochs=4, done=4)
    lines = {line.split()[0]: line for line in ask("runs", "--runs", store)[1].splitlines()}
    assert lines["run"].endswith("started           settings")
    assert lines[hot.name].endswith("2026-01-02T03:04  symmetric=yes lr=1e+30")
    assert all(lines[path.name].endswith("2026-01-02T03:04") for path in (usual, long))


def test_a_probe_that_diverged_is_marked(ask, store):
    good, bad = put(store, 0, probe=80.0), put(store, 1, probe=11.0)
    for path, loss in ((good, 4.6), (bad, 4.7)):  # guessing among ten has 2.303
        (one,) = (path / "evaluations").iterdir()
        one.write_text(json.dumps(json.loads(one.read_text()) | {"loss": loss}))
    out = ask("runs", "--runs", store)[1]
    assert "11.00 % (diverged)" in out
    assert out.count("(diverged)") == 1
    assert names(ask("runs", "--runs", store, "--where", "diverged=yes")[1]) == [bad.name]
    assert "11.00 % (diverged)" in ask("runs", "show", bad)[1]
    out = ask("runs", "compare", good, bad)[1]
    assert ("80.00 % " in out, "11.00 % (diverged)" in out) == (True, True)
    found = json.loads(ask("runs", "compare", good, bad, "--json")[1])
    assert (found["results"]["probe on shapes"], found["diverged"]) == ([80.0, 11.0], {"probe on shapes": [1]})


def test_nothing_stands_twice_in_what_is_shown(ask, store):
    path = put(store, probe=80.0)
    more = {"epoch": 3, "step": 9, "loss": 1.0, "lr": 0.01, "ema": 0.99}
    (path / "metrics.jsonl").write_text(2 * (json.dumps(more) + "\n"))
    rows = [line.split("│")[1].strip() for line in ask("runs", "show", path)[1].splitlines() if line.startswith("│")]
    assert {"lr", "--lr", "--crop-scale", "epochs done", "--epochs"} <= set(rows)
    assert len(rows) == len(set(rows))


def test_listed_as_json(ask, store, several):
    found = json.loads(ask("runs", "--runs", store, "--json")[1])
    assert found["unreadable"] == []
    rows = {row["name"]: row for row in found["runs"]}
    assert rows.keys() == {path.name for path in several}
    assert all(row.keys() == set(FIELDS) for row in rows.values())
    first = rows[several[0].name]
    assert (first["state"], first["probe"], first["seed"], first["has_weights"]) == ("complete", 80.0, 0, False)
    assert (first["crop_scale"], first["bytes"] > 500, first["knn"]) == ("0.5 1", True, None)


CONDITIONS = {
    "data=shapes": [0, 1, 2, 3],
    "data=cifar10": [],
    "effect=emphasis*": [1, 2],
    "effect=emphasis(s=5.0)": [1],
    "effect!=emphasis*": [0, 3],
    "epochs>=3": [2],
    "epochs < 3": [0, 1, 3],
    "state=complete": [0, 1, 2],
    "state!=complete": [3],
    "seed=1": [1],
    "seed==1": [1],
    "tau>0.25": [2],
    "probe>75": [0],
    "probe<=75": [1],
    "epochs-done=1": [3],
    "has_weights=no": [0, 1, 2, 3],
    "last_bn=yes": [0, 1, 2, 3],
    "started>=2026-01-03": [],
    "started<2026-01-03": [0, 1, 2, 3],
    "name=*seed2*": [2],
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_filtered(ask, store, several, condition):
    code, out, _ = ask("runs", "--runs", store, "--where", condition)
    assert code == 0
    assert names(out) == sorted(several[i].name for i in CONDITIONS[condition])


def test_a_name_with_brackets_is_found(ask, store):
    path = put(store, data="photos[2024]")
    put(store, data="photos2")
    for wanted in ("photos[2024]", "photos[*"):
        assert names(ask("runs", "--runs", store, "--where", f"data={wanted}")[1]) == [path.name]


def test_conditions_are_all_met(ask, store, several):
    out = ask("runs", "--runs", store, "--where", "effect=emphasis*", "epochs>=3", "state=complete")[1]
    assert names(out) == [several[2].name]


def test_sorted(ask, store, several):
    by = [several[i].name for i in (1, 0)]
    rest = sorted(several[i].name for i in (2, 3))  # without a probe: last, either way
    assert names(ask("runs", "--runs", store, "--sort", "probe")[1]) == by + rest
    assert names(ask("runs", "--runs", store, "--sort", "probe", "--reverse")[1]) == by[::-1] + rest
    out = ask("runs", "--runs", store, "--sort", "seed", "--reverse")[1]
    assert names(out) == [path.name for path in several[::-1]]


MISTAKES = {
    "a run has no field 'efect'; did you mean 'effect'?": ["--where", "efect=plain"],
    "a run has no field 'zzz'; there are name, id, state": ["--where", "zzz=1"],
    "--where 'epochs' is not a condition; write field=value": ["--where", "epochs"],
    "--where 'epochs>=' is not a condition": ["--where", "epochs>="],
    "--where '=5' is not a condition": ["--where", "=5"],
    "epochs needs a number, got 'many'": ["--where", "epochs>=many"],
    "seed needs a number, got 'one'": ["--where", "seed=one"],
    "loss needs a number, got 'nan'": ["--where", "loss<nan"],
    "last_bn is yes or no, and has no order": ["--where", "last_bn>0"],
    "there is no value of last_bn 'maybe'": ["--where", "last_bn=maybe"],
    "there is no state 'completed'; did you mean 'complete'?": ["--where", "state=completed"],
    "a run has no field 'los'; did you mean 'loss'?": ["--sort", "los"],
    "(did you mean --where?)": ["--were", "seed=1"],
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(ask, store, several, said):
    code, out, err = ask("runs", "--runs", store, *MISTAKES[said])
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs", "cmpare"], "there is no command 'runs cmpare'; did you mean 'marginlens runs compare'?"),
        (["runs", "show", "nosuch"], "there is no run 'nosuch' in"),
        (["runs", "show", "mocov3"], "(4 in all); "),
        (["runs", "compare", "mocov3"], "got 1 run; "),
        (["runs", "prune", "--yes"], "--yes needs"),
        (["runs", "add"], "FOLDER"),
    ],
)
def test_mistakes_of_the_others(ask, store, several, words, said):
    more = [] if words[1] == "cmpare" else ["--runs", store]
    before = content(store)
    code, _, err = ask(*words, *more)
    assert code == 2
    assert said.lower() in err.lower()
    assert content(store) == before


@pytest.mark.parametrize("command", [["runs"], ["runs", "show", "x"], ["runs", "compare", "x", "y"], ["runs", "prune"]])
def test_no_store(ask, tmp_path, command):
    (tmp_path / "file").write_text("")
    assert "does not exist; give --runs" in ask(*command, "--runs", tmp_path / "gone")[2]
    code, _, err = ask(*command, "--runs", tmp_path / "file")
    assert (code, "is a file; give --runs" in err) == (2, True)


@pytest.fixture
def spoilt(store, several):
    """The same store, with a corrupt run, a foreign folder and one that is half-written."""
    corrupt = put(store, 7, complete=False)
    write(corrupt, {"config.json": b"{"})
    write(store / "photos", {"cat.jpg": b"meow"})
    write(store / "half", {".config.json.77": b"{"})
    return [corrupt, store / "half", store / "photos"]


def test_bad_folders_are_said_and_the_good_listed(ask, store, several, spoilt):
    before = content(store)
    code, out, err = ask("runs", "--runs", store)
    assert code == 2
    assert names(out) == sorted(path.name for path in several)
    lines = err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"marginlens: {store}") for line in lines)
    assert {str(path) in err for path in spoilt} == {True}
    ways = ("; repair it, or move its folder out of the store", "; remove it if nothing is writing it")
    assert all(line.endswith((*ways, "; move it out of the store")) for line in lines)
    code, out, _ = ask("runs", "--runs", store, "--json")
    assert (code, len(json.loads(out)["runs"])) == (2, 4)
    assert {x["path"] for x in json.loads(out)["unreadable"]} == {str(path) for path in spoilt}
    assert content(store) == before


def test_shown(ask, store, several):
    run = several[0]
    write(run, {"evaluations/transfer-shapes-1.json": json.dumps(evaluation("transfer", 61.5)).encode()})
    for word in (run, run.name, run.name[:-3], run.name[-10:], run.name[-10:-4]):
        code, out, _ = ask("runs", "show", word, "--runs", store)
        assert code == 0
        assert out.startswith(f"{run}\n")  # however long
    assert "80.00 %" in out
    assert "61.50 %" in out
    assert "2026-01-02T03:04:05Z on CPU, 2 threads" in out
    found = json.loads(ask("runs", "show", run, "--json")[1])
    assert ml.Pretrain(**found["settings"]) == settings()
    assert (found["state"], found["epochs_done"], len(found["evaluations"])) == ("complete", 2, 2)
    assert "the loss became nan at step 5" in ask("runs", "show", several[3])[1]


def test_the_command_that_is_shown_makes_the_run(ask, trained, tmp_path):
    found = json.loads(ask("runs", "show", trained.path, "--json")[1])
    words = found["command"].split()[1:]
    words[words.index("--runs") + 1] = tmp_path / "again"
    assert ask(*words)[0] == 0
    assert [path.name for path in (tmp_path / "again").iterdir()] == [trained.path.name]


def test_compared(ask, store, several):
    found = json.loads(ask("runs", "compare", several[0], several[2].name, "--runs", store, "--json")[1])
    assert found["runs"] == [several[0].name, several[2].name]
    assert found["settings"] == {
        "effect": ["plain", "emphasis(s=20)"],
        "epochs": [2, 4],
        "seed": [0, 2],
        "warmup": [0, 1],
        "tau": [0.25, 0.5],
    }
    assert found["results"]["loss"] == [2.0, 3.0]
    assert found["results"]["probe on shapes"] == [80.0, None]
    out = ask("runs", "compare", several[0], several[2], several[3])[1]
    assert "emphasis(s=20)" in out
    assert "80.00 %" in out
    assert "the settings are the same" in ask("runs", "compare", several[0], several[0])[1]


def test_evaluations_are_told_apart(ask, several):
    odd = {"evaluations/probe-shapes-1.json": evaluation("probe", 60.0, lr=0.25, weight_decay=0.1)}
    odd["evaluations/probe-shapes-2.json"] = evaluation("probe", 61.0, lr=0.25, holdout=0)
    write(several[0], {name: json.dumps(one).encode() for name, one in odd.items()})
    found = json.loads(ask("runs", "compare", several[0], several[1], "--json")[1])["results"]
    assert found["probe on shapes"] == [80.0, 70.0]
    assert found["probe on shapes lr=0.25 weight_decay=0.1"] == [60.0, None]
    assert found["probe on shapes lr=0.25"] == [61.0, None]


def test_of_evaluations_on_data_that_changed_the_latest_is_compared(ask, several):
    for name, (top1, day) in {"b": (44.0, 2), "a": (43.0, 3), "c": (42.0, 1)}.items():
        one = evaluation("transfer", top1, name * 64, several[0].name[-10:])
        one["environment"]["time"] = f"2026-01-0{day}T00:00:00Z"
        write(several[0], {f"evaluations/transfer-shapes-{name}.json": json.dumps(one).encode()})
    found = json.loads(ask("runs", "compare", several[0], several[1], "--json")[1])["results"]
    assert found["transfer to shapes"] == [43.0, None]


def test_pruning_only_says_what_it_would_do(ask, store, several, trained):
    cut = put(store, 9, complete=False)
    before = content(store)
    code, out, _ = ask("runs", "prune", "--runs", store)
    assert code == 0
    assert f"would remove failed {several[3]}, " in out
    assert "(the loss became nan at step 5)" in out
    assert f"would remove interrupted {cut}, " in out
    assert f"would remove weights of {trained.path}, " in out
    assert content(store) == before


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--failed"], {"failed"}),
        (["--interrupted"], {"interrupted"}),
        (["--failed", "--interrupted"], {"failed", "interrupted"}),
        (["--weights"], set()),
        (["--failed", "--where", "seed=99"], set()),
    ],
)
def test_pruned(ask, store, several, trained, options, gone):
    put(store, 9, complete=False)
    before = {e.name: e.state for e in scan(store)}
    code, out, _ = ask("runs", "prune", "--runs", store, *options, "--yes")
    assert code == 0
    assert {e.name: e.state for e in scan(store)} == {n: s for n, s in before.items() if s not in gone}
    assert (trained.path / "checkpoints").exists() == ("--weights" not in options)
    assert [n for n in os.listdir(store) if n.startswith(".")] == []
    assert ("removed" in out) == (options[-1] != "seed=99")


def test_only_old_ones(ask, store, several):
    long_ago = time.time() - 10 * 86_400
    young = put(store, 9, complete=False, failure="no")
    for path in several[3].rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert "nothing to remove" in ask("runs", "prune", "--runs", store, "--failed", "--older-than", "11", "--yes")[1]
    ask("runs", "prune", "--runs", store, "--failed", "--older-than", "9", "--yes")
    assert (several[3].exists(), young.exists()) == (False, True)


def test_named_runs_are_removed_whole(ask, store, several):
    before = content(store)
    assert "would remove complete" in ask("runs", "prune", several[0].name, "--runs", store)[1]
    assert content(store) == before
    code, out, _ = ask("runs", "prune", several[0].name, several[1], "--runs", store, "--yes")
    assert (code, out.count("removed complete")) == (0, 2)
    assert {e.path for e in scan(store)} == set(several[2:])
    code, out, _ = ask("runs", "prune", several[2], several[2].name, several[3], "--runs", store, "--yes")
    assert (code, out.count("removed ")) == (0, 2)
    assert not scan(store)


def test_what_cannot_be_removed_is_said_and_the_others_are(ask, store, several, monkeypatch):
    rename = os.rename

    def refuse(source, target):
        if several[0] in (source, source.parent):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(stores.os, "rename", refuse)
    code, out, err = ask("runs", "prune", several[0], several[1], "--runs", store, "--yes")
    assert (code, out.count("removed complete")) == (2, 1)
    assert err == f"marginlens: {several[0]} is left as it is: it cannot be removed (Permission denied)\n"
    assert {e.path for e in scan(store)} == {several[0], *several[2:]}


def test_what_runs_or_is_no_run_is_never_pruned(ask, store, several, spoilt, trained):
    everything = ["--failed", "--interrupted", "--weights", "--yes"]
    with work.locked(ml.open_run(several[3])), work.locked(trained):
        before = content(store)
        code, out, err = ask("runs", "prune", "--runs", store, *everything)
        assert (code, out) == (2, "nothing to remove\n")
        assert all(str(path) in err for path in spoilt)
        code, _, err = ask("runs", "prune", several[3], "--runs", store, "--yes")
        assert (code, "is running, and is left alone; stop it first" in err) == (2, True)
        for path in spoilt:
            code, _, err = ask("runs", "prune", path, "--runs", store, "--yes")
            assert (code, str(path) in err) == (2, True)
        assert content(store) == before


def test_added(ask, store, several, tmp_path, trained):
    code, out, _ = ask("runs", "add", *several, trained.path, "--runs", tmp_path / "home")
    assert code == 0
    assert out.splitlines() == [str(tmp_path / "home" / path.name) for path in [*several, trained.path]]
    assert [e.state for e in scan(tmp_path / "home")] == [e.state for e in scan(store)]
    assert not (tmp_path / "home" / trained.path.name / "checkpoints").exists()


def test_what_cannot_be_added_is_said_and_the_others_added(ask, several, spoilt, tmp_path):
    home = tmp_path / "home"
    write(home / several[1].name, records(settings(seed=1, effect="emphasis(s=5)"), probe=12.0))
    code, out, err = ask("runs", "add", *several, *spoilt, tmp_path / "gone", "--runs", home)
    assert code == 2
    assert out.splitlines() == [str(home / several[i].name) for i in (0, 2, 3)]
    assert len(err.splitlines()) == 5
    assert "holds another outcome of the same run: evaluations/probe-shapes-0123456789.json differs" in err
    assert {e.state for e in scan(home)} == {"complete", "failed"}


def test_one_corrupt_evaluation_can_be_removed_alone(ask, store, several):
    bad = write(several[0], {"evaluations/probe-x.json": b"{"}) / "evaluations" / "probe-x.json"
    code, _, err = ask("runs", "--runs", store)
    assert (code, err.startswith(f"marginlens: {bad} ")) == (2, True)
    assert err.endswith("; remove that file, and evaluate again\n")
    bad.unlink()
    assert ask("runs", "--runs", store)[0] == 0


def test_what_was_there_already_is_not_said_to_be_added(ask, several, tmp_path):
    home = tmp_path / "home"
    write(home / several[0].name, records(settings()))
    write(home / several[1].name, records(settings(seed=1, effect="emphasis(s=5)"), probe=70.0))
    code, out, _ = ask("runs", "add", *several[:3], "--runs", home)
    assert code == 0
    paths = [str(home / path.name) for path in several]
    assert out.splitlines() == [paths[2], f"{paths[0]} (completed)", f"{paths[1]} (there already)"]
    found = json.loads(ask("runs", "add", *several[:3], "--runs", home, "--json")[1])
    assert found == {"added": [], "completed": [], "there_already": paths[:3]}


def test_a_whole_store_is_added_by_its_runs(ask, store, several, tmp_path):
    code, out, err = ask("runs", "add", store, "--runs", tmp_path / "home")
    assert (code, out) == (2, "nothing was added\n")
    assert err == f"marginlens: {store} is a store, not a run's folder; give the runs in it: {store}/*\n"
