"""Scratch folders of runs are removed, whoever is killed, and other people's folders are not. With real processes."""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from marginlens.sweep import cluster, pool, scratch
from marginlens.sweep.job import Executor, Where
from tests.sweep.conftest import job
from tests.train.conftest import launch, wait_for

TASK = """
import os, signal, tempfile, time
from marginlens.sweep import scratch
tempfile.gettempdir()  # which opens a file there
def end(*words, **more):
    os.kill(os.getpid(), signal.SIGKILL)
"""
HOLDS = """
with scratch.make() as folder:
    (folder / "run").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""
CUT_OFF = {
    "before its lock file": ("scratch.os.open = end", []),
    "before its lock": ("scratch.fcntl.flock = end", [scratch.NEW]),
    "before its rename": ("scratch.os.rename = end", [scratch.NEW]),
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """The temporary folder of this process and of those that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left(root):
    return sorted(path.name for path in root.glob("marginlens-run-*"))


def task():
    """A task at work in a process of its own, and its folder."""
    process = launch("-c", TASK + HOLDS)
    return process, Path(process.stdout.readline().strip())


def age(path, seconds=scratch._ABANDONED + 1):
    os.utime(path, (time.time() - seconds,) * 2)


def drive():
    """Begin a sweep on a cluster that does nothing."""
    nothing = SimpleNamespace(remote=lambda **asked: lambda task: task, shutdown=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_ray", lambda: nothing)
        assert list(cluster.run_ray([], Executor(), 0.0, lambda: False, print)) == []


def begin():
    with scratch.make():
        pass


@pytest.mark.parametrize("comes_next", [begin, drive])
def test_what_a_killed_task_left_is_removed(root, comes_next):
    process, folder = task()
    comes_next()
    assert left(root) == [folder.name]  # it is at work
    process.kill()
    process.communicate()
    assert left(root) == [folder.name]
    comes_next()
    assert left(root) == []


@pytest.mark.parametrize("where", CUT_OFF)
def test_what_a_task_left_that_was_killed_on_its_way_is_removed(root, where):
    cut, inside = CUT_OFF[where]
    process = launch("-c", f"{TASK}{cut}\n{HOLDS}")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (folder,) = root.iterdir()
    assert [path.name for path in folder.iterdir()] == inside
    if not inside:  # it may be in the making
        scratch.sweep()
        assert left(root) == [folder.name]
        age(folder)
    scratch.sweep()
    assert left(root) == []


def test_what_was_left_half_removed_is_removed(root):
    """The lock file goes last: without it nobody would know the folder for ours."""
    process = launch("-c", f"{TASK}scratch.shutil.rmtree = end\n{HOLDS.replace('60', '0')}")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(left(root)) == 1
    scratch.sweep()
    assert left(root) == []


def test_a_folder_is_another_if_the_first_was_taken_for_one_that_was_left(root, monkeypatch):
    """Whoever removes what killed tasks left may come between any two steps."""
    for module, step in ((os, "open"), (fcntl, "flock"), (os, "rename")):
        honest, taken = getattr(module, step), []

        def meanwhile(*words, module=module, step=step, honest=honest, taken=taken):
            monkeypatch.setattr(module, step, honest)
            (folder,) = root.iterdir()
            taken.append(folder)
            shutil.rmtree(folder)
            return honest(*words)

        monkeypatch.setattr(module, step, meanwhile)
        with scratch.make() as folder:
            assert taken
            assert folder != taken[0]
            begin()
            assert left(root) == [folder.name]
        assert left(root) == []


def test_a_task_that_is_about_to_lock_is_in_nobody_s_way(root, monkeypatch):
    honest = fcntl.flock

    def flock(file, how):
        monkeypatch.setattr(fcntl, "flock", honest)
        begin()
        return honest(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with scratch.make() as folder:
        begin()
        assert left(root) == [folder.name]
    assert left(root) == []


def test_what_others_have_stays(root, tmp_path):
    """By name, by kind, by what is in it; and no link is followed."""
    notes = root / "marginlens-run-notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    (root / "marginlens-run-notes123").mkdir()
    (root / "marginlens-run-notes123" / "notes.txt").write_text("mine")
    (root / "marginlens-run-mix_1234").mkdir()
    for name in (scratch.NEW, "notes.txt"):
        (root / "marginlens-run-mix_1234" / name).touch()
    (root / "marginlens-run-file1234").write_text("mine")
    (root / "marginlens-run-open1234").mkdir(mode=0o755)  # empty, and not as we make it
    (root / "marginlens-run-longer_name").mkdir(mode=0o700)
    there = tmp_path / "marginlens-run-there123"
    there.mkdir()
    (there / scratch.HELD).touch()
    (root / "marginlens-run-link1234").symlink_to(there)
    for name, target in (("lock1234", there / scratch.HELD), ("pipe1234", None)):
        (root / f"marginlens-run-{name}").mkdir()
        held = root / f"marginlens-run-{name}" / scratch.HELD
        os.mkfifo(held) if target is None else held.symlink_to(target)
    before = left(root)
    for path in (*root.iterdir(), there):
        age(path) if not path.is_symlink() else None
    begin()
    scratch.discard(there)  # it does not lie where we make them
    assert left(root) == before
    assert (notes / "notes.txt").read_text() == "mine"
    assert (there / scratch.HELD).exists()


def test_what_another_user_left_stays(root, monkeypatch):
    process, _ = task()
    process.kill()
    process.communicate()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    scratch.sweep()
    assert len(left(root)) == 1


PARENT = """
import sys, time
from marginlens.sweep import pool, scratch
from marginlens.sweep.job import Job, Where
with scratch.make() as folder:
    job = Job.model_validate_json(sys.argv[1])
    worker = pool.Child(1, job, Where(runs=str(folder), device="cpu"), {"OMP_NUM_THREADS": "1"})
    print(worker.process.pid, flush=True)
    time.sleep(600)
"""


def alive(pid):
    """True if a process is there that has not ended."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(") ")[2][0] != "Z"


def test_a_worker_whose_parent_is_gone_removes_its_folder(root):
    """At its end: as long as it lives, nobody takes the folder from under it."""
    parent = launch("-c", PARENT, job(epochs=5000, probe=False).model_dump_json())
    worker = int(parent.stdout.readline())
    try:
        wait_for(lambda: list(root.glob("*/*/metrics.jsonl")), parent)
        os.kill(worker, signal.SIGSTOP)
        parent.kill()
        parent.communicate()
        begin()
        assert len(left(root)) == 1
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: not alive(worker))
        assert left(root) == []
    finally:
        if alive(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_worker_that_was_asked_to_end_leaves_its_folder_to_its_parent(root):
    with scratch.make() as folder:
        where = Where(runs=str(folder), device="cpu")
        one = pool.Child(1, job(epochs=5000, probe=False), where, {"OMP_NUM_THREADS": "1"})
        wait_for(lambda: list(folder.glob("*/metrics.jsonl")))
        one.ask()
        wait_for(lambda: (one.lines(), one.ended)[1])
        assert one.outcome().state == "stopped"
        assert list(folder.glob("*/checkpoints/*.safetensors"))
    assert left(root) == []


def test_a_worker_that_does_not_end_in_time_removes_its_folder(root):
    """It holds the folder itself then."""
    process, folder = task()
    process.kill()
    process.communicate()
    with scratch.used(folder):
        scratch.discard(folder)
        assert folder.exists()
        scratch.discard(folder, mine=True)
    assert left(root) == []
