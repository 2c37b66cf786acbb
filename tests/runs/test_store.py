"""List a store, add runs, remove runs: whatever happens, a run is whole or not there."""

import json
import os
import shutil
import time

import pytest

import marginlens as ml
from marginlens import files
from marginlens.runs import checkpoint, work
from marginlens.runs import run as entries
from marginlens.runs import store as stores
from marginlens.runs.store import add, drop_weights, evaluation, examine, lookup, remove, scan
from tests.runs.conftest import DATA, content, put, records, settings, write
from tests.runs.conftest import evaluation as evaluated
from tests.train.conftest import launch, wait_for, words


def states(store):
    return {e.name: e.state for e in scan(store)}


def dump(value):
    return json.dumps(value).encode()


def test_every_state(store, interrupted, trained):
    done, failed = put(store, probe=80.0), put(store, 1, complete=False, done=1, failure="out of GPU memory")
    cut = interrupted(3, runs=store.parent / "cut", seed=4).path
    cut = cut.rename(store / cut.name)
    found = {e.name: e for e in scan(store)}
    assert list(found) == sorted(found)
    assert {n: e.state for n, e in found.items()} == {
        done.name: "complete",
        failed.name: "failed",
        cut.name: "interrupted",
        trained.path.name: "complete",
    }
    assert found[failed.name].why == "out of GPU memory"
    assert found[done.name].evaluations[0]["top1"] == 80.0
    assert (found[done.name].weights, found[trained.path.name].weights, found[cut.name].weights) == (False, True, True)
    assert (found[done.name].epochs_done, found[failed.name].epochs_done) == (2, 1)
    assert found[done.name].started == "2026-01-02T03:04:05Z"
    assert found[cut.name].size_bytes == sum(p.stat().st_size for p in cut.rglob("*") if p.is_file())


def test_a_run_whose_lock_is_held_is_running(trained, store):
    with work.locked(trained):
        assert states(store) == {trained.path.name: "running"}
    assert states(store) == {trained.path.name: "complete"}


def test_a_run_of_another_process_is_running(store):
    process = launch("-m", "marginlens", *words(runs=store, limit=8, epochs=400))
    try:
        wait_for(lambda: list(store.glob("*/metrics.jsonl")), process)
        assert set(states(store).values()) == {"running"}
    finally:
        process.kill()
        process.communicate()
    assert set(states(store).values()) == {"interrupted"}


def test_looking_does_not_keep_a_run_from_its_lock(trained, monkeypatch):
    """A look takes the lock for an instant; whoever starts the run at that instant tries again."""
    taken = []
    honest = work.fcntl.flock

    def flock(file, how):
        taken.append(how)
        if len(taken) == 1:
            raise BlockingIOError
        return honest(file, how)

    monkeypatch.setattr(work.fcntl, "flock", flock)
    with work.locked(trained):
        pass
    assert len(taken) == 3  # the folder twice, its lock file once


BAD = {
    "corrupt config": ("config.json", b"{", "config.json cannot be read"),
    "not an object": ("config.json", b"[1]", "does not hold an object"),
    "not text": ("config.json", b"\xff\xfe\x00", "cannot be read"),
    "a future format": ("config.json", dump({"format": 2, "settings": {}}), "not written by this version"),
    "an unknown setting": (
        "config.json",
        dump({"format": 1, "settings": {"epcohs": 1}, "id": "", "data": "", "mean": [0] * 3, "std": [1] * 3}),
        "there is no setting 'epcohs'",
    ),
    "no result": ("result.json", b"", "result.json cannot be read"),
    "a poor result": ("result.json", b"{}", "result.json: epochs is missing"),
    "metrics cut off": ("metrics.jsonl", b'{"epoch": 1, "loss": 1.0}\n{"epoch"', "it has 1 of 2 epochs"),
    "metrics spoilt": ("metrics.jsonl", b'{"epoch": 1\n{"epoch": 2}\n', "metrics.jsonl cannot be read"),
    "metrics of something else": ("metrics.jsonl", b"1\n2\n", "metrics.jsonl, line 1 does not hold an object"),
    "starts spoilt": ("environment.jsonl", b"{{\n", "environment.jsonl cannot be read"),
    "an evaluation cut off": ("evaluations/probe-shapes-0.json", b'{"kind": "pro', "cannot be read"),
    "an evaluation of nothing": (
        "evaluations/probe-shapes-0.json",
        b'{"kind": "probe"}',
        "run is missing",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_run_is_an_entry_with_a_reason(store, what):
    name, held, said = BAD[what]
    good, bad = put(store), put(store, 1)
    write(bad, {name: held})
    before = content(store)
    found = {e.name: e for e in scan(store)}
    assert found[good.name].state == "complete"
    assert isinstance(found[bad.name], entries.Unreadable)
    assert said in found[bad.name].why
    assert bad.name in found[bad.name].why
    assert "\n" not in found[bad.name].why
    assert content(store) == before


def test_a_corrupt_failure(store):
    bad = put(store, complete=False, done=1)
    write(bad, {"failure.json": b"{"})
    assert [e.state for e in scan(store)] == ["unreadable"]


def test_a_half_written_line_of_a_run_that_is_not_complete_is_nothing_bad(store):
    cut = put(store, complete=False)
    write(cut, {"metrics.jsonl": b'{"epoch": 1, "loss": 1.0}\n{"epoch"'})
    (found,) = scan(store)
    assert (found.state, found.epochs_done, found.last["loss"]) == ("interrupted", 1, 1.0)


def test_folders_that_are_no_runs(store):
    write(store / "photos", {"cat.jpg": b"meow"})
    write(store / "half", {".config.json.123": b"{"})
    (store / "empty").mkdir()
    write(store / ".hidden", {"x": b""})
    write(store, {"report.html": b"<html>"})
    (store / "nowhere").symlink_to(store / "gone")
    found = {e.name: e.why for e in scan(store)}
    assert found.keys() == {"photos", "half", "empty", "nowhere"}
    assert "is not a run's folder: it has no config.json" in found["photos"]
    assert "is half-written" in found["half"]
    assert "is a broken symlink" in found["nowhere"]


def test_a_link_to_a_run_is_that_run(store, tmp_path):
    there = put(tmp_path / "elsewhere", probe=1.0)
    (store / there.name).symlink_to(there)
    (found,) = scan(store)
    assert (found.state, found.path) == ("complete", store / there.name)
    with pytest.raises(ValueError, match="is a symlink, and is left alone"):
        remove(found)
    assert content(there)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(store):
    shut = put(store)
    shut.chmod(0)
    try:
        (found,) = scan(store)
        assert (found.state, "Permission denied" in found.why) == ("unreadable", True)
    finally:
        shut.chmod(0o755)


def test_what_the_system_refuses_is_a_reason(store, monkeypatch):
    """As root too: any error of the system is an entry's reason."""
    put(store)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(entries, "open_run", refuse)
    (found,) = scan(store)
    assert (found.state, "cannot be read (Permission denied)" in found.why) == ("unreadable", True)


def test_the_same_run_twice_counts_once(store):
    proper = put(store)
    shutil.copytree(proper, store / "a-copy")
    found = {e.name: e for e in scan(store)}
    assert (found[proper.name].state, found["a-copy"].state) == ("complete", "unreadable")
    assert f"is the same run as {proper.name}" in found["a-copy"].why


def test_a_folder_that_goes_while_it_is_looked_at(store, monkeypatch):
    kept, gone = put(store), put(store, 1)
    honest = stores.examine

    def look(path):
        if path == gone:
            shutil.rmtree(path)
        return honest(path)

    monkeypatch.setattr(stores, "examine", look)
    assert [e.path for e in scan(store)] == [kept]


@pytest.mark.slow
def test_two_thousand_runs_are_looked_at_in_seconds(store):
    for seed in range(2_000):
        put(store, seed, epochs=200, done=200, probe=80.0)
    begin = time.process_time()
    found = scan(store)
    assert len(found) == 2_000
    assert {e.state for e in found} == {"complete"}
    assert time.process_time() - begin < 10


def test_no_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="does not exist; give --runs"):
        scan(tmp_path / "gone")
    with pytest.raises(ValueError, match="is a file; give --runs"):
        scan(tmp_path / "file")


def test_lookup(store):
    plain, other = put(store), put(store, 1)
    put(store, 2, images="cd" * 32)
    found = scan(store)
    assert lookup(found, settings()).path == plain
    assert lookup(found, settings(seed=1), DATA).path == other
    assert lookup(found, settings(seed=1), "cd" * 32) is None
    assert lookup(found, settings(seed=2), "cd" * 32) is not None
    assert lookup(found, settings(seed=3)) is None
    assert lookup(found, settings(epochs=3)) is None


def test_an_evaluation_is_found_by_its_settings(store):
    run = ml.open_run(put(store, probe=80.0))
    asked = {"epochs": 20, "batch": 16, "lr": 0.5, "crop_scale": (0.5, 1.0)}
    assert evaluation(run, "probe", "shapes", ml.Probe(**asked))["top1"] == 80.0
    for other in ({"epochs": 21}, {"seed": 1}, {"holdout": 5}, {"weight_decay": 0.1}):
        assert evaluation(run, "probe", "shapes", ml.Probe(**(asked | other))) is None
    assert evaluation(run, "transfer", "shapes", ml.Probe(**asked)) is None
    assert evaluation(run, "probe", "cifar10", ml.Probe(**asked)) is None
    other = evaluated("probe", 1.0, data="cd" * 32) | {"run": run.id}
    write(run.path, {"evaluations/probe-shapes-1.json": dump(other)})
    assert evaluation(run, "probe", "shapes", ml.Probe(**asked))["top1"] == 80.0  # the other is of other images


def test_records_are_all_but_weights(trained):
    write(trained.path, {".result.json.12": b"", "evaluations/.probe.3": b"", "notes.txt": b"mine"})
    ml.knn(trained, ml.Knn(k=3), quiet=True)
    (near,) = (p.name for p in (trained.path / "evaluations").glob("[!.]*"))
    names = {"config.json", "environment.jsonl", "metrics.jsonl", "speed.jsonl", "result.json", "notes.txt"}
    found = stores.records(trained.path)
    assert found.keys() == names | {f"evaluations/{near}"}
    assert found["metrics.jsonl"] == (trained.path / "metrics.jsonl").read_bytes()


def test_added_from_a_folder_and_from_memory(trained, tmp_path):
    name = trained.path.name
    for where, given in (("a", trained.path), ("b/deep", stores.records(trained.path))):
        path = add(given, tmp_path / where, name)
        assert path == tmp_path / where / name
        assert stores.records(path) == stores.records(trained.path)
        assert ml.open_run(path).metrics == trained.metrics
        before = content(tmp_path / where)
        add(given, tmp_path / where, name)  # again
        assert {k: v for k, v in content(tmp_path / where).items() if "lock" not in k} == before
        (found,) = scan(tmp_path / where)
        assert (found.state, found.weights) == ("complete", False)


def name_of(chosen):
    return stores.identify(chosen, DATA), f"run-{stores.identify(chosen, DATA)}"


def test_what_is_there_is_completed(store):
    """A run that was brought in unfinished, failed, then finished, then evaluated."""
    chosen = settings()
    _, name = name_of(chosen)
    stages = [records(chosen, done=1, complete=False), records(chosen, done=1, complete=False, failure="oom")]
    stages += [records(chosen), records(chosen, probe=80.0)]
    for state, held in zip(("interrupted", "failed", "complete", "complete"), stages, strict=True):
        path = add(held, store, name)
        assert examine(path).state == state
        assert stores.records(path) == held
    other = records(chosen) | {"evaluations/transfer-shapes-1.json": dump(evaluated("transfer", 5.0))}
    for late in (*stages, other):  # what is less than what is there changes nothing, and evaluations are joined
        add(late, store, name)
    assert stores.records(path) == stages[-1] | other


def otherwise(held, name):
    """The same records with other losses in one file."""
    return held | {name: held[name].replace(b'"loss": ', b'"loss": 9')}


def test_another_outcome_is_refused(store):
    chosen = settings()
    _, name = name_of(chosen)
    path = add(records(chosen, probe=80.0), store, name)
    before = content(store)
    for other in (
        records(chosen, probe=81.0),
        otherwise(records(chosen), "metrics.jsonl"),
        otherwise(records(chosen), "result.json"),
    ):
        with pytest.raises(ValueError, match=r"holds another outcome of the same run: .* differs"):
            add(other, store, name)
    assert {k: v for k, v in content(store).items() if not k.endswith("lock")} == before
    assert examine(path).state == "complete"


def test_another_outcome_takes_the_place_of_one_that_ended_early(store):
    """A run that failed on a machine which is gone is begun anew, and need not come out as far, or alike."""
    chosen = settings()
    _, name = name_of(chosen)

    def failed(hour, done):
        held = records(chosen, done=done, complete=False, failure=f"at {hour}")
        held = {name: lines for name, lines in held.items() if done or name not in ("metrics.jsonl", "speed.jsonl")}
        held["failure.json"] = held["failure.json"].replace(b"T03:05", f"T{hour}:05".encode())
        return held | {"environment.jsonl": held["environment.jsonl"].replace(b"T03:04", f"T{hour}:04".encode())}

    path = add(failed("04", 2) | {"notes.txt": b"mine"}, store, name)
    with pytest.raises(ValueError, match=r"another outcome of the same run: environment.jsonl differs"):
        add(failed("03", 1), store, name)  # it was before
    for hour, epochs in (("05", 1), ("06", 0)):
        add(failed(hour, epochs), store, name)
        assert stores.records(path) == failed(hour, epochs) | {"notes.txt": b"mine"}
    done = otherwise(records(chosen, probe=80.0), "metrics.jsonl")
    write(path, {f"checkpoints/step-00000001-{'ab' * 16}.safetensors": b"\x02" + b"\0" * 7 + b"{}"})
    assert examine(path).weights
    with pytest.raises(ValueError, match="another outcome of the same run"):
        add(done, store, name)  # what is there can go on
    shutil.rmtree(path / "checkpoints")
    add(done, store, name)
    assert stores.records(path) == done | {"notes.txt": b"mine"}
    with pytest.raises(ValueError, match="another outcome of the same run"):
        add(records(chosen), store, name)


def test_a_folder_that_was_only_made_is_filled(store):
    chosen = settings()
    _, name = name_of(chosen)
    write(store / name, {".config.json.12": b"{", "lock": b"process 12"})
    assert stores.unbegun(store / name)
    assert stores.records(add(records(chosen), store, name)) == records(chosen)
    assert not stores.unbegun(store / name)


REFUSED = {
    "is not a run's folder": {"cat.jpg": b"meow"},
    "config.json cannot be read": {"config.json": b"{"},
    "which is not a record of a run": {"../escaped": b""},
    "holds '/etc/escaped', which": {"/etc/escaped": b""},
    "holds 'checkpoints/step-1', which": {"checkpoints/step-1": b""},
    "holds 'lock', which": {"lock": b""},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_run_is_not_added(store, said):
    with pytest.raises(ValueError, match=said):
        add(REFUSED[said], store, "run-0123456789")
    assert content(store.parent) == {}
    assert os.listdir(store) == []


def test_names_that_do_not_fit(store):
    chosen = settings()
    _, name = name_of(chosen)
    for odd, said in (("run-0123456789", "must end in its run's id"), ("../x", "cannot name"), (".x", "cannot name")):
        with pytest.raises(ValueError, match=said):
            add(records(chosen), store, odd)
    assert os.listdir(store) == []
    put(store)
    with pytest.raises(ValueError, match="is the same run"):
        add(records(chosen), store, name)
    assert len(os.listdir(store)) == 1


def test_a_run_in_use_or_damaged_is_not_added_to(store):
    chosen = settings()
    _, name = name_of(chosen)
    path = add(records(chosen), store, name)
    with work.locked(ml.open_run(path)), pytest.raises(ValueError, match="is in use by process"):
        add(records(chosen, probe=80.0), store, name)
    write(path, {"result.json": b"{"})
    with pytest.raises(ValueError, match=r"is not added: .*result.json cannot be read"):
        add(records(chosen, probe=80.0), store, name)
    assert not (path / "evaluations").exists()


class Cut(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("there", [False, True], ids=["new", "merged"])
def test_cut_off_at_any_file_leaves_no_half_run(store, monkeypatch, there):
    chosen = settings()
    _, name = name_of(chosen)
    first, held = records(chosen, done=1, complete=False, failure="oom"), records(chosen, probe=80.0)
    honest = files.save
    for cut in range(len(held)):
        shutil.rmtree(store)
        store.mkdir()
        if there:
            add(first, store, name)
        calls = []

        def save(path, written, cut=cut, calls=calls):
            calls.append(path)
            if len(calls) > cut + len(held) * there:  # a merge follows a whole copy aside
                raise Cut
            honest(path, written)

        with monkeypatch.context() as patch:
            patch.setattr(files, "save", save)
            try:
                add(held, store, name)
            except Cut:
                assert {e.state for e in scan(store)} <= ({"failed", "interrupted"} if there else set())
        add(held, store, name)
        assert [e.state for e in scan(store)] == ["complete"]
        assert stores.records(store / name) == held
        assert [n for n in os.listdir(store) if n.startswith(".")] == []


def test_a_full_disk_is_one_line(store, monkeypatch):
    chosen = settings()

    def save(path, written):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save", save)
    with pytest.raises(ValueError, match=r"is not added: cannot write .*No space left on device"):
        add(records(chosen), store, name_of(chosen)[1])
    assert os.listdir(store) == []


def test_weights_are_dropped_records_stay(trained):
    before = stores.records(trained.path)
    held = sum(p.stat().st_size for p in (trained.path / "checkpoints").iterdir())
    assert drop_weights(trained) == held > 0
    assert stores.records(trained.path) == before
    found = examine(trained.path)
    assert (found.state, found.weights) == ("complete", False)
    assert drop_weights(trained) == 0
    with pytest.raises(ValueError, match="its weights are gone"):
        trained.checkpoint()


def test_weights_that_a_killed_process_left_are_swept(trained):
    held = sum(p.stat().st_size for p in (trained.path / "checkpoints").iterdir())
    (trained.path / "checkpoints").rename(trained.path / ".checkpoints.7-0123abcd")
    with work.locked(trained), pytest.raises(work.InUse):
        drop_weights(trained)
    assert drop_weights(trained) == held
    assert not list(trained.path.glob(".checkpoints*"))


def test_weights_that_are_needed_are_kept(trained, interrupted, tmp_path):
    with work.locked(trained), pytest.raises(ValueError, match="is in use by process"):
        drop_weights(trained)
    with pytest.raises(ValueError, match=r"is not complete: .* needs its weights"):
        drop_weights(run := interrupted(3, runs=tmp_path / "cut"))
    for kept in (trained, run):
        assert checkpoint.names(kept.path / "checkpoints")


def test_a_checkpoint_that_was_cut_off_does_not_look_whole(trained):
    for path in checkpoint.names(trained.path / "checkpoints"):
        assert examine(trained.path).weights
        os.truncate(path, path.stat().st_size - 1)
    assert not examine(trained.path).weights


def test_weights_on_another_disk_are_left_alone(trained, tmp_path):
    """And not said to be freed: what a link leads to may be others' too."""
    folder = trained.path / "checkpoints"
    folder.rename(tmp_path / "large")
    folder.symlink_to(tmp_path / "large")
    before = content(trained.path)
    with pytest.raises(ValueError, match="is a symlink, and is left alone; remove its target"):
        drop_weights(trained)
    assert content(trained.path) == before
    assert checkpoint.names(folder)


def test_what_the_system_does_not_let_go_of_is_one_line(trained, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (found,) = scan(trained.path.parent)
    before = content(trained.path)
    with monkeypatch.context() as patched:
        patched.setattr(stores.os, "rename", refuse)
        for act in (lambda: drop_weights(trained), lambda: remove(found)):
            with pytest.raises(ValueError, match=r"is left as it is: it cannot be removed \(Permission denied\)"):
                act()
    with monkeypatch.context() as patched:
        patched.setattr(work, "_take", refuse)
        for act in (lambda: drop_weights(trained), lambda: remove(found)):
            with pytest.raises(ValueError, match="is left as it is: it cannot be removed"):
                act()
        with pytest.raises(ValueError, match="is not added: cannot write to"):
            add(stores.records(trained.path), trained.path.parent, trained.path.name)
    assert content(trained.path) == before


def test_a_record_that_is_a_link_is_not_left_behind(store, tmp_path):
    for name in ("result.json", "evaluations/probe-shapes-0123456789.json", "evaluations"):
        path = put(store, probe=80.0)
        (path / name).rename(tmp_path / "far")
        (path / name).symlink_to(tmp_path / "far")
        assert examine(path).state == "complete"
        with pytest.raises(ValueError, match=f"{name} is a symlink, and would not be copied"):
            add(path, tmp_path / "home", path.name)
        shutil.rmtree(path)
        (tmp_path / "far").unlink() if name != "evaluations" else None
    assert not (tmp_path / "home").exists()
    path = put(store, probe=80.0)
    (path / "evaluations" / ".#probe.json").symlink_to("an editor's lock")
    assert add(path, tmp_path / "home", path.name).exists()


@pytest.mark.parametrize("kind", ["nowhere", "itself", "folder"])
def test_a_result_that_is_no_file_does_not_make_a_run_interrupted(store, kind):
    path = put(store) / "result.json"
    path.unlink()
    path.mkdir() if kind == "folder" else path.symlink_to({"nowhere": "x", "itself": path.name}[kind])
    (found,) = scan(store)
    assert (found.state, "result.json is not a file" in found.why) == ("unreadable", True)


def test_removed(store, trained):
    (found,) = scan(store)
    size = found.size_bytes
    # as a process leaves it that is killed meanwhile
    write(store / ".run-0123456789.7-0123abcd.removed", {"config.json": b"{}"})
    with work.locked(trained):
        with pytest.raises(ValueError, match="is in use by process"):
            remove(found)
        with pytest.raises(ValueError, match="is running, and is left alone"):
            remove(scan(store)[0])
    assert remove(found) == pytest.approx(size, abs=100)  # the lock's holder has another number by now
    assert os.listdir(store) == []


def test_a_run_that_changed_since_is_not_removed(store):
    path = put(store, complete=False)
    (found,) = scan(store)
    write(path, records(settings()))
    with pytest.raises(ValueError, match="is now complete, and is left alone"):
        remove(found)
    assert examine(path).state == "complete"


def later(held):
    """Return the same outcome as it is found an hour later, at another speed, on another machine."""
    found = {}
    for name, lines in held.items():
        moved = lines.replace(b"T03:", b"T04:").replace(b"CPU, 2 threads", b"CPU, 64 threads")
        moved = moved.replace(b'"images_per_second": 1', b'"images_per_second": 9')
        found[name] = moved.replace(b'"seconds": ', b'"seconds": 1')
    if "result.json" in held:
        place = {"images_per_second": 7.5, "checkpoint": f"step-00000016-{'cd' * 16}.safetensors"}
        found["result.json"] = dump(json.loads(found["result.json"]) | place)
    return found


def test_an_equal_outcome_of_another_time_and_place_is_not_refused(store):
    """As of two drivers that did everything twice: what is there stays, and evaluations are joined."""
    chosen = settings()
    _, name = name_of(chosen)
    first = records(chosen, probe=80.0)
    path = add(first, store, name)
    second = later(first)
    assert {n for n in first if first[n] != second[n]} == first.keys() - {"config.json", "metrics.jsonl"}
    transfer = {"evaluations/transfer-shapes-1.json": dump(evaluated("transfer", 5.0))}
    for held in (second, second | transfer, later(records(chosen, done=1, complete=False, failure="oom"))):
        add(held, store, name)
        assert stores.records(path) == first | (transfer if held != second else {})
    longer = second | {"environment.jsonl": second["environment.jsonl"] * 2}  # it was interrupted in between
    add(longer, store, name)
    assert stores.records(path) == first | transfer
    assert examine(path).state == "complete"


def test_an_outcome_with_other_numbers_is_refused_whenever_it_was_found(store):
    chosen = settings()
    _, name = name_of(chosen)
    first = records(chosen, probe=80.0)
    path = add(first, store, name)
    (probe,) = (n for n in first if n.startswith("evaluations/"))
    other_probe = dump(json.loads(first[probe]) | {"top1": 80.01})
    other_note = {"notes.txt": b"mine"}
    for other, odd in (
        (otherwise(first, "metrics.jsonl"), "metrics.jsonl"),
        (otherwise(first, "result.json"), "result.json"),
        (first | {probe: other_probe}, probe),
        (records(chosen, probe=81.0), probe),
    ):
        with pytest.raises(ValueError, match=f"holds another outcome of the same run: {odd} differs"):
            add(later(other), store, name)
    assert stores.records(path) == first
    add(first | other_note, store, name)
    with pytest.raises(ValueError, match=r"notes\.txt differs"):
        add(later(first) | {"notes.txt": b"yours"}, store, name)
    assert stores.records(path) == first | other_note
