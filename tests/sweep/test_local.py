"""The executor of this machine: every way in which a child or the parent can end."""

import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import marginlens
from marginlens.data import shapes, store
from marginlens.nets import fast
from marginlens.runs import work
from marginlens.runs.run import open_run
from marginlens.runs.store import scan
from marginlens.runs.work import locked
from marginlens.sweep import plan, pool, worker
from marginlens.sweep.job import Job, Where, wanted
from tests.sweep.conftest import job, made, small
from tests.train.conftest import wait_for

FAKE = """
import json, os, signal, sys, time
def note(what):
    with open(os.path.join(folder, "log"), "a") as file:
        file.write(f"{what} {seed} {os.getpid()}\\n")
def answer(code, line="", again=False):
    print(json.dumps({"code": code, "run": folder, "line": line, "again": again}), flush=True)
    if not again:
        sys.exit(code)
for line in sys.stdin:
    request = json.loads(line)
    seed, folder = request["job"]["settings"]["seed"], request["where"]["runs"]
    note("begin")
    print("working", file=sys.stderr, flush=True)
    kind = request["job"]["settings"]["tau"]
    if kind == 1.0:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 2.0:
        sys.exit("Killed by a bad import")
    if kind == 3.0:
        answer(1, "no space left to write x; free some space")
    if kind == 4.0:
        time.sleep(600)
    if kind == 5.0:
        sys.stdin.read()
        answer(143, "stopped")
    if kind == 6.0 and open(os.path.join(folder, "log")).read().count(f"begin {seed} ") == 1:
        answer(75, "x is in use by process 1; wait for it")
    time.sleep(0.2)
    note("end")
    print(f"of seed {seed}\\nlast words of seed {seed}", file=sys.stderr, end="", flush=True)
    answer(0, again=request["again"])
"""
FINE, CRASHES, SILENT, FULL, HANGS, WAITS, LOCKED = 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Steps whose worker does what `tau` says; returns the executor and what was said."""
    monkeypatch.setattr(pool, "WORKER", (sys.executable, "-S", "-E", "-c", FAKE))
    lines = []

    def run(*kinds, at_once=1, ending=lambda: False, grace=60.0):
        jobs = [job(seed=i, tau=kind) for i, kind in enumerate(kinds)]
        steps = plan.make_plan(jobs, tmp_path / "none", {})
        slots = [pool.Slot("cpu", {})] * at_once
        return pool.run_local(steps, Where(runs=str(tmp_path)), slots, ending, lines.append, grace)

    run.lines = lines
    run.log = lambda: [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    return run


def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_one_after_another(fake):
    found = list(fake(FINE, FINE, FINE))
    assert [(o.number, o.state) for o in found] == [(1, "done"), (2, "done"), (3, "done")]
    assert [(what, seed) for what, seed, _ in fake.log()] == [(w, s) for s in "012" for w in ("begin", "end")]
    assert "[2] working" in fake.lines
    assert all(0.2 < o.seconds < 20 for o in found)


def test_a_worker_does_what_comes_next_unless_its_job_was_not_done(fake):
    found = list(fake(FINE, FINE, FULL, FINE, CRASHES, FINE, LOCKED, FINE))
    assert [o.number for o in found if o.state == "done"] == [1, 2, 4, 6, 8, 7]
    assert [o.number for o in found if o.crashed] == [5]  # and not the one that its process had done before
    begun = [(int(seed) + 1, pid) for what, seed, pid in fake.log() if what == "begin"]
    together = [[number for number, own in begun if own == pid] for pid in dict.fromkeys(pid for _, pid in begun)]
    assert together == [[1, 2, 3], [4, 5], [6, 7], [8, 7]]
    assert not any(alive(pid) for _, pid in begun)


def test_a_slot_keeps_its_worker_to_itself(fake):
    list(fake(*[FINE] * 6, at_once=2))
    assert len({pid for _, _, pid in fake.log()}) == 2


def test_what_a_worker_says_is_of_the_job_that_it_is_at(fake, monkeypatch):
    """Also what it says just before its answer: here all of it comes between two looks at its pipes."""
    honest = pool._available

    def slow(end):
        found = honest(end)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(pool, "_available", slow)
    list(fake(FINE, FINE, FINE))
    for number in (1, 2, 3):
        said = [line.partition(" ")[2] for line in fake.lines if line.startswith(f"[{number}] ")]
        assert said[1:] == ["working", f"of seed {number - 1}", f"last words of seed {number - 1}"]


def test_a_worker_that_was_killed_while_it_waited_is_replaced(fake):
    run = fake(FINE, FINE)
    assert next(run).state == "done"
    (pid,) = {pid for _, _, pid in fake.log()}
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert [o.state for o in run] == ["done"]
    assert len({pid for _, _, pid in fake.log()}) == 2


def test_two_at_once(fake):
    assert len(list(fake(FINE, FINE, FINE, FINE, at_once=2))) == 4
    running, most = set(), 0
    for what, seed, _ in fake.log():
        running = running | {seed} if what == "begin" else running - {seed}
        most = max(most, len(running))
    assert most == 2


def test_others_go_on_when_one_fails(fake):
    found = list(fake(CRASHES, SILENT, FULL, FINE))
    assert [o.state for o in found] == ["failed", "failed", "failed", "done"]
    assert [o.crashed for o in found] == [True, True, False, False]
    assert "ended by SIGKILL, perhaps by the system because memory ran out" in found[0].line
    assert "exit code 1 and said nothing" in found[1].line
    assert found[2].line.startswith("no space left")


def test_one_in_use_comes_last(fake):
    found = list(fake(LOCKED, FINE, FINE))
    assert [(o.number, o.state) for o in found] == [(2, "done"), (3, "done"), (1, "done")]
    assert "[1] is tried again at the end: x is in use by process 1; wait for it" in fake.lines


def test_two_in_use_come_last_though_both_were_found_at_once(fake, monkeypatch):
    monkeypatch.setattr(pool, "WORKER", (*pool.WORKER[:-1], FAKE.replace("time.sleep(0.2)", "time.sleep(1)")))
    found = list(fake(LOCKED, LOCKED, FINE, at_once=2))
    assert (found[0].number, {o.state for o in found}) == (3, {"done"})
    log = [(what, seed) for what, seed, _ in fake.log()]
    assert set(log[log.index(("end", "2")) + 1 :]) == {(what, seed) for what in ("begin", "end") for seed in "01"}


def test_one_that_another_process_did_meanwhile_is_done(fake, tmp_path):
    run = made(job(seed=0, tau=LOCKED), tmp_path)
    first, last = fake(LOCKED, FINE)
    assert (first.number, last) == (2, pool.Outcome(1, "done", "by another process", 0.0, str(run.path)))
    assert sum(what == "begin" and seed == "0" for what, seed, _ in fake.log()) == 1


def test_one_that_stays_in_use_has_not_failed(fake, tmp_path):
    with locked(made(job(seed=0, tau=LOCKED), tmp_path, epochs=1, complete=False)):
        (found,) = fake(LOCKED)
    assert (found.state, found.crashed) == ("blocked", False)
    assert "is in use by another process; wait for it, or stop it first" in found.line


def after(fake, count):
    """True from when so many workers have begun."""
    return lambda: sum(line.endswith("working") for line in fake.lines) >= count


def test_asked_to_end_they_do_and_nothing_new_begins(fake):
    found = list(fake(WAITS, WAITS, FINE, at_once=2, ending=after(fake, 2)))
    assert sorted((o.number, o.state) for o in found) == [(1, "stopped"), (2, "stopped")]


def test_asked_to_end_in_its_second_job_a_worker_does(fake):
    found = list(fake(FINE, WAITS, FINE, ending=after(fake, 2)))
    assert [(o.number, o.state) for o in found] == [(1, "done"), (2, "stopped")]
    assert len({pid for _, _, pid in fake.log()}) == 1


def test_one_that_does_not_end_is_killed(fake):
    begin = time.monotonic()
    (found,) = list(fake(HANGS, ending=after(fake, 1), grace=0.5))
    assert (found.state, found.crashed) == ("stopped", False)
    assert "was killed" in found.line
    assert time.monotonic() - begin < 20
    assert not alive(fake.log()[0][2])


def test_whatever_ends_the_parent_ends_its_children(fake):
    run = fake(HANGS, FINE, at_once=2)
    assert next(run).number == 2
    pid = wait_for(lambda: next((pid for _, seed, pid in fake.log() if seed == "0"), ""))
    assert alive(pid)
    assert not any(alive(pid) for _, seed, pid in fake.log() if seed == "1")  # there was nothing more for it to do
    run.close()
    assert not alive(pid)


def test_whatever_ends_the_parent_ends_a_worker_that_waits(fake):
    run = fake(FINE, FINE)
    next(run)
    ((_, _, pid), *_) = fake.log()
    assert alive(pid)
    run.close()
    assert not alive(pid)


@pytest.mark.parametrize("before", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_ends_when_its_parent_is_gone(tmp_path, before):
    """The real one: all of its pipes break, as they do when the parent is killed, and it writes a checkpoint."""
    where, long = Where(runs=str(tmp_path), device="cpu"), job(epochs=500, seed=7)
    first = job(epochs=1, probe=False) if before else long
    orphan = pool.Child(1, first, where, {"OMP_NUM_THREADS": "1"}, again=True)
    if before:
        wait_for(lambda: (orphan.lines(), orphan.free)[1])
        assert orphan.outcome().state == "done"
        orphan.give(2, long, where)
    wait_for(lambda: list(tmp_path.glob("*-seed7-*/metrics.jsonl")))
    for pipe in (orphan.process.stderr, orphan.process.stdout):
        pipe.close()
    time.sleep(1.0)  # a line or two that nobody hears
    orphan.process.stdin.close()
    wait_for(lambda: orphan.ended)
    assert orphan.process.returncode == 143
    assert [entry.state for entry in scan(tmp_path)].count("complete") == before
    (entry,) = [entry for entry in scan(tmp_path) if entry.state != "complete"]
    assert (entry.state, entry.weights) == ("interrupted", True)
    assert entry.epochs_done > 1


@pytest.mark.slow
def test_jobs_in_one_process_end_as_in_a_process_each(tmp_path):
    """Bit for bit: weights, metrics and what was measured. A job's parts are named, and nothing of the one before."""
    evaluations = (wanted("probe", "shapes", 2), wanted("transfer", "shapes", 3))
    ways = {"effect": "emphasis(s=5)", "seed": 3, "method": "simclr"}, {"seed": 4}, {"seed": 4, "method": "byol"}
    jobs = [Job(settings=small(**way), evaluations=evaluations) for way in ways]
    lines, own = [], {"OMP_NUM_THREADS": "1"}
    steps, where = plan.make_plan(jobs, tmp_path / "one", {}), Where(runs=str(tmp_path / "one"), device="cpu")
    found = list(pool.run_local(steps, where, [pool.Slot("cpu", own)], lambda: False, lines.append))
    assert [o.state for o in found] == ["done"] * 3
    folders = [Path(o.run) for o in found]
    assert len({(folder / "lock").read_text() for folder in folders}) == 1  # which names the process
    for number in (1, 2, 3):
        said = [line.partition("] ")[2].partition(" epoch")[0] for line in lines if line.startswith(f"[{number}] ")]
        assert [part for part in said if part in NAMED] == [NAMED[0]] * 2 + [NAMED[1]] * 2 + [NAMED[2]] * 3
    alone = where.model_copy(update={"runs": str(tmp_path / "each")})
    for some, folder in list(zip(jobs, folders, strict=True))[1:]:  # the first had a new process anyway
        other = pool.Child(1, some, alone, own)
        wait_for(lambda: other.ended)
        assert other.lines()
        assert other.outcome().state == "done"
        assert results(folder) == results(tmp_path / "each" / folder.name)


NAMED = ("pre-training", "probe", "transfer to shapes")


def results(folder):
    """What a run computed, without how long it took and where; a checkpoint's name is a hash of that, too."""
    timed = ("seconds", "images_per_second", "environment", "checkpoint")
    found = {"metrics": (folder / "metrics.jsonl").read_bytes()}
    for path in (folder / "result.json", *sorted((folder / "evaluations").iterdir())):
        found[path.name] = {key: value for key, value in json.loads(path.read_text()).items() if key not in timed}
    tensors = open_run(folder).checkpoint().tensors
    return found | {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_job_leaves_nothing_behind(tmp_path):
    """Measured around a second job: the first one loads modules, and fills what is kept for good."""

    def state():
        assert worker._let_go()
        held = [x.nbytes for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        flags = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        kept = fast.on(), work._KEPT.get(), torch.get_num_threads(), torch.get_default_dtype(), *flags
        signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        random = torch.get_rng_state().tolist()
        return sorted(os.listdir("/proc/self/fd")), sum(held), kept, signals, random, dict(os.environ), os.getcwd()

    found = []
    for seed in (0, 1):
        some = Job(settings=small(seed=seed, epochs=1), evaluations=(wanted("probe", "shapes", 1),))
        request = {"version": marginlens.__version__, "job": some.model_dump(mode="json")}
        where = Where(runs=str(tmp_path), device="cpu").model_dump(mode="json")
        assert worker._perform(request | {"where": where}, threading.Event())["code"] == 0
        found.append(state())
    assert found[0] == found[1]


def test_what_a_job_draws_changes_no_other(tmp_path, monkeypatch):
    def perform(job, where, ended):
        torch.rand(3)
        return Path(where.runs)

    monkeypatch.setattr("marginlens.sweep.job.perform", perform)
    request = {"version": marginlens.__version__, "job": job().model_dump(mode="json")}
    before = torch.get_rng_state()
    where = Where(runs=str(tmp_path)).model_dump(mode="json")
    assert worker._perform(request | {"where": where}, threading.Event())["code"] == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_job_that_was_given_just_before_the_end_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_attempt", lambda request, ended: pytest.fail("it was begun"))
    ended, before = threading.Event(), signal.getsignal(signal.SIGTERM)
    ended.set()
    assert worker._perform({}, ended)["code"] == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_whose_gpu_is_broken_does_no_other_job(monkeypatch):
    calls = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: calls.append("clear"), raising=False)
    assert worker._let_go()
    assert calls == ["synchronize", "clear", "empty"]

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", broken)
    assert not worker._let_go()


def test_a_worker_names_what_it_is_at(tmp_path):
    real = pool.Child(1, job("shapes"), Where(runs=str(tmp_path), device="cpu"), {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: real.ended)
    said = [line.partition("  ")[0] for line in real.lines()]
    assert real.outcome().state == "done"
    ends = [line for line in said if line.endswith(("epoch 2/2", "epoch 20/20"))]
    assert ends == ["pre-training epoch 2/2", "probe epoch 20/20", "transfer to shapes epoch 20/20"]


def test_other_data_of_the_same_name_are_refused(tmp_path, monkeypatch):
    """A node's data may be others than those that the plan was made with."""
    request = {"version": marginlens.__version__, "job": job().model_dump(mode="json")}
    where = Where(runs=str(tmp_path), fingerprints={"shapes": "0" * 64}).model_dump(mode="json")
    found = worker._perform(request | {"where": where}, threading.Event())
    assert (found["code"], "shapes differs from the data" in found["line"]) == (2, True)
    found = worker._perform(request | {"where": where, "version": "0"}, threading.Event())
    assert (found["code"], "0 where the run was planned" in found["line"]) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_data_of_evaluations_are_looked_at_before_pre_training(tmp_path, monkeypatch, data_root):
    """Hours before they are needed."""
    few = {split: [store.Batch(*shapes.draw(8, split))] for split in ("train", "test")}
    monkeypatch.setenv("MARGINLENS_DATA", str(tmp_path / "data"))
    shutil.copytree(data_root, tmp_path / "data")
    store.write("cifar10", few, shapes.CLASSES, tmp_path / "data")
    for other, said in (("cifar10", "cifar10 differs from the data"), ("cifar100", "cifar100 is not prepared")):
        request = {"version": marginlens.__version__, "job": job(other).model_dump(mode="json")}
        where = Where(runs=str(tmp_path / "runs"), fingerprints={"cifar10": "0" * 64}).model_dump(mode="json")
        found = worker._perform(request | {"where": where}, threading.Event())
        assert (found["code"], said in found["line"]) == (2, True), found
    assert not (tmp_path / "runs").exists()


def test_a_worker_whose_run_is_in_use_says_so(tmp_path):
    request = {"version": marginlens.__version__, "job": job().model_dump(mode="json")}
    where = Where(runs=str(tmp_path), device="cpu").model_dump(mode="json")
    with locked(made(job(), tmp_path, epochs=1, complete=False)):
        found = worker._perform(request | {"where": where}, threading.Event())
    assert (found["code"], "is in use by process" in found["line"]) == (75, True)


def test_slots(monkeypatch):
    assert [s.environment for s in pool.make_slots("cpu", at_once=3)] == [{"OMP_NUM_THREADS": "1"}] * 3
    assert pool.device_name(pool.make_slots("cpu")) == "CPU, 1 threads"
    with pytest.raises(ValueError, match="give --at-once"):
        pool.make_slots("cpu", per_gpu=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = [s.environment["CUDA_VISIBLE_DEVICES"] for s in pool.make_slots("auto", per_gpu=2)]
    assert gpus == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in pool.make_slots("cuda")] == ["4", "7"]
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in pool.make_slots("cuda:1")] == ["7"]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: ("NVIDIA A", "NVIDIA B")[index])
    assert [pool.device_name(pool.make_slots(name)) for name in ("cuda:1", "cuda", "cuda:0")] == [
        "NVIDIA B", "NVIDIA A", "NVIDIA A"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="give --per-gpu"):
        pool.make_slots("cuda", at_once=2)
    with pytest.raises(ValueError, match="2 CUDA devices are here"):
        pool.make_slots("cuda:2")


def test_a_signal_that_is_not_sigkill_is_named(fake, monkeypatch):
    monkeypatch.setattr(pool, "WORKER", (sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 11)"))
    (found,) = list(fake(FINE))
    assert f"ended by {signal.Signals(11).name};" in found.line
