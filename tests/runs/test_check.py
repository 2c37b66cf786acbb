"""Records that no run wrote: every command reports them in a line, and none crashes."""

import json
import shlex
import shutil

import pytest

from marginlens.runs.config import run_name
from marginlens.runs.store import scan
from marginlens.sweep.estimate import Estimator
from tests.runs.conftest import DATA, evaluation, put, records, settings, write

HUGE = 10**400
PROBE = "evaluations/probe-shapes-0123456789.json"


def change(path, changes):
    """Sets keys of a record, or of the last line of records; ... takes one away, a dot leads into an object."""
    text = path.read_text()
    whole = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    for key, value in changes.items():
        *within, name = key.split(".")
        at = whole[-1]
        for part in within:
            at = at[part]
        if value is ...:
            del at[name]
        else:
            at[name] = value
    path.write_text("".join(json.dumps(one) + "\n" for one in whole))


WRONG = {
    "result.json": [
        ({"images": ...}, "images is missing"),
        ({"images": None}, "images is None"),
        ({"images": 1.5}, "images is 1.5"),
        ({"loss": HUGE}, "loss is 1000000"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"steps": True}, "steps is True"),
        ({"knn": 101.0}, "knn is 101.0; it must be less than or equal to 100"),
        ({"seconds": "x"}, "seconds is 'x'"),
    ],
    "metrics.jsonl": [
        ({"loss": HUGE}, "line 2: loss is 1000000"),
        ({"loss": None}, "line 2: loss is None"),
        ({"loss": ...}, "line 2: loss is missing"),
        ({"epoch": "2"}, "line 2: epoch is '2'"),
        ({"epoch": 2.5}, "line 2: epoch is 2.5"),
        ({"spread": float("inf")}, "line 2: spread is inf"),
        ({"spread": True}, "line 2: spread is True"),
        ({"a later one": "x"}, "line 2: a later one is 'x'"),
    ],
    "speed.jsonl": [
        ({"images_per_second": ...}, "line 2: images_per_second is missing"),
        ({"images_per_second": "x"}, "line 2: images_per_second is 'x'"),
        ({"images_per_second": HUGE}, "line 2: images_per_second is 1000000"),
        ({"images_per_second": 5e-324}, "line 2: 4.94066e-324 is too small"),
        ({"seconds": -1}, "line 2: seconds is -1"),
    ],
    "environment.jsonl": [
        ({"time": ...}, "line 1: time is missing"),
        ({"device": []}, "line 1: device is []"),
        ({"device": "\ud800"}, "cannot be read"),
    ],
    PROBE: [
        ({"seconds": ...}, "seconds is missing"),
        ({"seconds": []}, "seconds is []"),
        ({"test_images": ...}, "test_images is missing"),
        ({"train_images": 0}, "train_images is 0"),
        ({"train_images": HUGE}, "train_images is 1000000"),
        ({"environment": None}, "environment is None"),
        ({"environment.time": ...}, "environment.time is missing"),
        ({"environment.numerics": "1"}, "environment.numerics is '1'"),
        ({"top1": None}, "top1 is None"),
        ({"top1": HUGE}, "top1 is 1000000"),
        ({"data": {}}, "data is {}"),
        ({"data": "cifar10"}, "is on 'cifar10', but its run learned from shapes"),
        ({"kind": 1}, "kind is 1"),
        ({"run": "ffffffffff"}, "is from the run 'ffffffffff', but in the folder of"),
        ({"settings": None}, "does not know such an evaluation, but a later one may: settings is None"),
        ({"settings": {}}, "settings has no epochs"),
        ({"settings.epochs": "20"}, "epochs is '20'"),
        ({"settings.epochs": HUGE}, "epochs is 1000000"),
        ({"settings.epochs": 0}, "epochs is 0"),
        ({"settings.seed": True}, "seed is yes; it is not a switch"),
        ({"settings.crops": 10}, "there is no setting 'crops'"),
        ({"kind": "retrieval"}, "there is no evaluation 'retrieval'"),
    ],
    "config.json": [
        ({"id": "0123456789"}, "was changed: its id is '0123456789', and its identity's is"),
        ({"identity": ...}, "was changed: its id is"),
        ({"identity": None}, "identity is None"),
        ({"identity.numerics": 2}, "was changed: its id is"),
        ({"settings.effect": "emphasis(s=20)"}, "was changed: its settings are not those of its identity"),
        ({"settings.seed": 5}, "was changed: its settings are not those of its identity"),
        ({"settings.hidden": HUGE}, "was changed: its settings"),
        ({"settings.weights": "some.safetensors"}, "was changed: its settings"),
        ({"data": "cd" * 32}, "was changed: its data are not those of its identity"),
        ({"mean": [HUGE, 0, 0]}, "mean.0 is 1000000"),
        ({"std": [float("nan"), 0, 0]}, "std.0 is nan"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_record_is_an_unreadable_folder(store, name):
    good = put(store, 0)
    bad = put(store, 1, probe=80.0)
    proper = {path: path.read_bytes() for path in bad.rglob("*.json*")}
    assert [e.state for e in scan(store)] == ["complete", "complete"]
    for changes, said in WRONG[name]:
        change(bad / name, changes)
        one, other = scan(store)
        assert (one.path, one.state) == (good, "complete")
        assert (other.path, other.state) == (bad, "unreadable"), changes
        assert said in other.why, changes
        assert str(bad / name) in other.why
        assert ("\n" in other.why, len(other.why) < 600) == (False, True), other.why
        for path, held in proper.items():
            path.write_bytes(held)


@pytest.mark.parametrize("name", ["speed.jsonl", "metrics.jsonl", "result.json", PROBE, "config.json"])
def test_records_that_are_no_json_or_far_too_deep(store, name):
    bad = put(store, probe=80.0)
    for held in (b'{"epoch": 1, "sec\n{"a":\n', b"[" * 100_000 + b"\n", b'{"loss": ' + b"9" * 5_000 + b"}\n"):
        write(bad, {name: held})
        (found,) = scan(store)
        assert found.state == "unreadable"
        assert ("\n" in found.why, str(bad) in found.why) == (False, True)


def test_no_command_stumbles(ask, store, tmp_path):
    good, bad = put(store, 0, probe=70.0), put(store, 1, probe=80.0)
    spoilt = (("speed.jsonl", {"seconds": None}), (PROBE, {"settings": None}), ("result.json", {"images": ...}))
    for name, changes in spoilt:
        shutil.rmtree(bad)
        change(put(store, 1, probe=80.0) / name, changes)
        code, out, err = ask("runs", "--runs", store)
        assert (code, good.name in out, err.count("\n"), name in err) == (2, True, 1, True)
        for words in (["runs", "show", bad.name], ["runs", "compare", good.name, bad.name]):
            code, _, err = ask(*words, "--runs", store)
            assert (code, err.count("\n"), name in err) == (2, 1, True)
        code, _, err = ask("report", "--runs", store, "--out", tmp_path / "report")
        assert (code, err.count("\n"), name in err) == (2, 1, True)
        Estimator(scan(store), "CPU, 2 threads")


def test_what_any_version_writes_is_readable(store):
    """A run that began from weights, which may be gone, and one from before some settings."""
    chosen = settings(seed=3)
    weights = store.parent / "some.safetensors"
    weights.write_bytes(b"weights")
    begun = settings(seed=4, weights=str(weights))
    old, from_weights = (write(store / run_name(one, DATA), records(one)) for one in (chosen, begun))
    change(old / "config.json", {"settings.stem": ..., "settings.blur": ...})
    weights.unlink()
    assert [(e.state, e.why) for e in scan(store)] == [("complete", "")] * 2
    assert {e.numerics for e in scan(store)} == {1}
    change(from_weights / "config.json", {"settings.weights": ""})
    assert {e.path: e.state for e in scan(store)} == {old: "complete", from_weights: "unreadable"}


def test_the_recipe_s_own_probe_is_the_one_that_is_listed(ask, store):
    first, second = put(store, 0, probe=80.0), put(store, 1)
    late = {"environment": {"time": "2027-01-01T00:00:00Z", "device": "CPU"}}
    short = evaluation("probe", 31.0, run=first.name[-10:], epochs=1) | late
    write(first, {"evaluations/probe-shapes-1.json": json.dumps(short).encode()})
    only = evaluation("probe", 90.0, run=second.name[-10:], epochs=1)
    write(second, {"evaluations/probe-shapes-1.json": json.dumps(only).encode()})
    rows = {row["seed"]: row for row in json.loads(ask("runs", "--runs", store, "--json")[1])["runs"]}
    assert [(rows[i]["probe"], rows[i]["probe_by"]) for i in (0, 1)] == [(80.0, "recipe"), (90.0, "epochs=1")]
    out = ask("runs", "--runs", store)[1]
    assert "  80.00 %    " in out
    assert "  90.00 % *" in out
    assert out.splitlines()[-1].startswith("* by an evaluation that is not the recipe's")
    out = ask("runs", "--runs", store, "--where", "probe_by=recipe")[1]
    assert (first.name in out, second.name in out, "*" in out) == (True, False, False)


def test_of_rates_measured_at_once_the_one_nearest_to_the_recipe_is_listed(ask, store):
    """Else the lowest, whatever the names of the files."""
    path = put(store, 0)
    for name, lr, epochs in (("1", 3.0, 1), ("2", 0.01, 1), ("3", 10.0, 1), ("4", 5.0, 20)):
        one = evaluation("probe", 10 * lr, run=path.name[-10:], epochs=epochs)
        one["settings"]["lr"] = lr
        write(path, {f"evaluations/probe-shapes-{name}.json": json.dumps(one).encode()})
    listed = json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]
    assert (listed["probe"], listed["probe_by"]) == (50.0, "lr=5")
    (path / "evaluations/probe-shapes-4.json").unlink()
    listed = json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]
    assert (listed["probe"], listed["probe_by"]) == (0.1, "epochs=1 lr=0.01")


def test_nearest_neighbours_otherwise_do_not_hide_those_of_the_recipe(ask, store):
    path = put(store, 0)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    write(path, {"metrics.jsonl": "\n".join([lines[0], lines[1][:-1] + ', "knn": 21.7}', ""]).encode()})
    last = json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]
    assert (last["knn"], last["knn_by"]) == (21.7, "recipe")
    write(
        path, {"evaluations/knn-shapes-1.json": json.dumps(evaluation("knn", 99.0, run=path.name[-10:], k=5)).encode()}
    )
    assert json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0] | {"bytes": 0} == last | {"bytes": 0}


def test_a_probe_that_diverged_is_known_by_its_classes(ask, store):
    """As the record has them, whatever the data are called."""
    path = put(store, 0)
    one = evaluation("probe", 10.0, run=path.name[-10:]) | {"loss": 5.0}
    for classes, lost in ((10, True), (100, False)):
        write(path, {"evaluations/probe-shapes-1.json": json.dumps(one | {"classes": classes}).encode()})
        assert json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]["diverged"] is lost
    write(path, {"evaluations/probe-shapes-1.json": json.dumps(one | {"classes": 0}).encode()})
    assert "classes" in scan(store)[0].why


@pytest.mark.parametrize("lost", [3.0, ["3"], [[3.0]], {"3": 1}])
def test_rates_that_were_lost_are_numbers(store, lost):
    path = put(store, 0)
    one = evaluation("probe", 10.0, run=path.name[-10:])
    write(path, {"evaluations/probe-shapes-1.json": json.dumps(one | {"lost": [3.0]}).encode()})
    assert [entry.state for entry in scan(store)] == ["complete"]
    write(path, {"evaluations/probe-shapes-1.json": json.dumps(one | {"lost": lost}).encode()})
    assert "lost" in scan(store)[0].why


def test_nearest_neighbours_that_find_nothing_are_a_number(ask, store):
    path = put(store, 0)
    change(path / "metrics.jsonl", {"knn": 12.0})
    assert json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]["knn"] == 12.0
    found = evaluation("knn", 0.0, run=path.name[-10:])
    write(path, {"evaluations/knn-shapes-1.json": json.dumps(found).encode()})
    row = json.loads(ask("runs", "--runs", store, "--json")[1])["runs"][0]
    assert (row["knn"], row["knn_by"]) == (0.0, "recipe")


@pytest.mark.parametrize("line", ["OSError: cannot open [/mnt/x]", "KeyError: [bold]gone", "no :smile: here"])
def test_what_a_record_says_is_no_markup(ask, store, line):
    failed = put(store, 0, complete=False, done=1, failure=line)
    change(failed / "environment.jsonl", {"device": "[red]GPU[/red] [/]"})
    code, out, _ = ask("runs", "show", failed)
    assert (code, line in out, "[red]GPU[/red] [/]" in out) == (0, True, True)
    code, out, _ = ask("runs", "compare", failed, put(store, 1))
    assert (code, "[red]GPU[/red] [/]" in out) == (0, True)


def test_the_command_that_is_shown_is_quoted(ask, tmp_path):
    path = put(tmp_path / "a b; touch gone #")
    words = shlex.split(json.loads(ask("runs", "show", path, "--json")[1])["command"])
    assert words == [
        "marginlens",
        "pretrain",
        "--config",
        f"{path}/config.json",
        "--runs",
        f"{path.parent}",
        "--resume",
    ]


def test_keys_of_a_later_version_are_kept(ask, store):
    path = put(store, probe=80.0)
    later = {"result.json": {"later": [3]}, "metrics.jsonl": {"later": 1.5}, "environment.jsonl": {"later": "x"}}
    for name, changes in (later | {PROBE: {"later": {"a": 1}}}).items():
        change(path / name, changes)
    code, out, _ = ask("runs", "show", path, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["result"]["later"], found["last_epoch"]["later"]) == ([3], 1.5)
    assert (found["starts"][-1]["later"], found["evaluations"][0]["later"]) == ("x", {"a": 1})


def test_a_record_is_read_by_name_or_as_a_mapping(store):
    path = put(store, probe=80.0)
    (run,) = scan(store)
    assert run.result.loss == run.result["loss"] == json.loads((path / "result.json").read_text())["loss"]
    assert "knn" not in run.result
    assert run.result.get("knn", 1.0) == 1.0
    assert dict(run.metrics[0]) == json.loads((path / "metrics.jsonl").read_text().splitlines()[0])
    (probe,) = run.evaluations
    assert (probe["top1"], probe["settings"]["lr"], probe.settings.lr) == (80.0, 0.5, 0.5)
