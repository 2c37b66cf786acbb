"""A user's files beside our own survive every command that replaces or removes something."""

import json
import os
import shutil

import pytest

import marginlens as ml
from marginlens import files
from marginlens.errors import DataError
from marginlens.report.tables import BEGIN, END
from marginlens.runs import store as stores
from marginlens.runs import work
from marginlens.runs.store import add, drop_weights, remove, scan
from tests.runs.conftest import ask, content, put, records, settings, store, trained  # noqa: F401
from tests.train.conftest import data_root, prepared, whole  # noqa: F401

PLACES = ["mine.txt", "checkpoints/mine.txt", "evaluations/mine.txt", "tensorboard/events.out.tfevents.17.host.1.v2"]


@pytest.mark.parametrize("place", PLACES)
def test_prune(trained, ask, place):  # noqa: F811
    mine = trained.path / place
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = content(trained.path.parent)
    words = ["--weights"] if place.startswith("checkpoints") else [trained.id]
    code, _, said = ask("runs", "prune", *words, "--yes", "--runs", trained.path.parent)
    assert (code, f"no run writes {mine}; move that file away first" in said) == (2, True)
    lost = before.items() - content(trained.path.parent).items()
    assert {name for name, _ in lost} <= {f"{trained.path.name}/lock"}


@pytest.mark.parametrize("act", ["weights", "run"])
def test_prune_while_a_file_comes(trained, monkeypatch, act):  # noqa: F811
    """Between the look and the rename."""
    (entry,) = scan(trained.path.parent)
    place = trained.path / "checkpoints" / "mine.txt"
    rename, came = os.rename, []

    def late(path, target):
        if not came:
            came.append(place.write_text("mine"))
        rename(path, target)

    monkeypatch.setattr(stores.os, "rename", late)
    with pytest.raises(ValueError, match=r"no run writes .*mine\.txt"):
        drop_weights(trained) if act == "weights" else remove(entry)
    assert place.read_text() == "mine"
    assert trained.checkpoint()


@pytest.mark.parametrize(
    "name", [".metrics.jsonl.12-0123abcd", ".config.json.7", ".DS_Store", "tensorboard/events.out.tfevents.17"]
)
def test_prune_takes_what_is_ours(trained, name):  # noqa: F811
    """Leftovers of killed processes too, and the litter of systems."""
    (trained.path / name).parent.mkdir(exist_ok=True)
    (trained.path / name).write_text("")
    (entry,) = scan(trained.path.parent)
    remove(entry)
    assert not os.listdir(trained.path.parent)


@pytest.mark.parametrize("name", [".keep.removed", ".notes.7-0123abcd.removed"])
def test_prune_leaves_hidden_folders_of_strangers(trained, name):  # noqa: F811
    home = trained.path.parent
    (home / name).mkdir()
    (home / name / "mine.txt").write_text("mine")
    (entry,) = scan(home)
    remove(entry)
    assert (home / name / "mine.txt").read_text() == "mine"


def test_add_writes_through_no_link(store, tmp_path, ask):  # noqa: F811
    source, target = put(tmp_path / "a", probe=80.0), put(store, probe=70.0)
    shared = tmp_path / "shared"
    (target / "evaluations").rename(shared)
    (target / "evaluations").symlink_to(shared)
    before = content(shared)
    code, _, said = ask("runs", "add", source, "--runs", store)
    assert (code, "evaluations is a symlink; put the file itself in its place" in said) == (2, True)
    assert content(shared) == before


MARKED = f"# Mine\r\nx \u202e y\x0c\r\n{BEGIN}\r\n{END}\r\n\ttail \x1b\r\n"


def test_insert_keeps_every_byte_around_it(store, tmp_path, ask):  # noqa: F811
    put(store, probe=80.0)
    page = tmp_path / "R.md"
    page.write_bytes(MARKED.encode())
    assert ask("report", "--runs", store, "--out", tmp_path / "out", "--insert", page)[0] == 0
    held = page.read_bytes()
    head, tail = MARKED.encode().split(BEGIN.encode())[0], MARKED.encode().split(END.encode())[1]
    assert held.startswith(head + BEGIN.encode())
    assert held.endswith(END.encode() + tail)


THEIRS = {
    "tables.tex": "\\documentclass{article}\nMy thesis\n% made by marginlens report\n",
    "tables.md": "# Notes\n\nMade by `marginlens report`: see below\n",
    "report.html": "<!doctype html>\n<p>My page about <title>marginlens report</title>\n",
    "rates.svg": "<svg><!-- --ink:#1b1f24;--paper:#fff --></svg>",
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_report_replaces_only_reports(store, tmp_path, ask, name):  # noqa: F811
    put(store)
    (tmp_path / "out").mkdir()
    mine = tmp_path / "out" / name
    mine.write_text(THEIRS[name])
    words = ["report", "--runs", store, "--out", tmp_path / "out"]
    words += ["--rates", mine] if name == "rates.svg" else []
    code, _, said = ask(*words)
    assert (code, f"{mine} was not written by this version of marginlens" in said) == (2, True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert mine.read_text() == THEIRS[name]
    mine.unlink()
    for _ in range(2):
        code, _, said = ask(*words[:5])
        assert code == 0


@pytest.mark.parametrize("kind", ["file", "broken link"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_export_and_embed_take_no_others_place(trained, tmp_path, kind, when, monkeypatch):  # noqa: F811
    for act in (lambda at: ml.export(trained, at), lambda at: ml.embed(trained, "little", at)):
        path = tmp_path / "x.safetensors"

        def appear(path=path):
            path.write_text("mine") if kind == "file" else path.symlink_to(tmp_path / "nowhere")

        save = files.save

        def late(aside, held, appear=appear, save=save):
            save(aside, held)
            appear()

        with monkeypatch.context() as patch:
            if when == "before":
                appear()
            else:
                patch.setattr(files, "save", late)
            with pytest.raises(ValueError, match="already; remove it"):
                act(path)
        assert path.read_text() == "mine" if kind == "file" else path.is_symlink()
        path.unlink()
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".txt" and p.name not in ("store",)] == []


def test_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.os, "link", refuse)
    files.put_new(tmp_path / "x", b"ours")
    with pytest.raises(OSError, match="not supported"):
        files.put_new(tmp_path / "x", b"other")
    assert (tmp_path / "x").read_bytes() == b"ours"
    monkeypatch.undo()
    with pytest.raises(DataError, match="already; remove it"):
        files.put_new(tmp_path / "x", b"other")


def test_a_file_system_that_cannot_lock(trained, monkeypatch):  # noqa: F811
    monkeypatch.setattr(work, "_lock", lambda file: None)
    with pytest.raises(ValueError, match="cannot be locked on this file system; give --runs"), work.locked(trained):
        pass


def test_improper_metrics_are_not_complete(trained):  # noqa: F811
    metrics = trained.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join(['{"epoch": 1}', *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match="line 1: loss is missing"):
        ml.pretrain(trained.settings, runs=trained.path.parent)
    with pytest.raises(ValueError, match="line 1: loss is missing"):
        trained.checkpoint()


def test_equal_numbers_are_one_outcome(store):  # noqa: F811
    """Two processes measured the same, at other times: what is there stays."""
    there = put(store, probe=80.0)
    other = dict(records(settings(), probe=80.0))
    name = "evaluations/probe-shapes-0123456789.json"
    other["speed.jsonl"] = other["speed.jsonl"].replace(b"0.5", b"0.7")
    other[name] = json.dumps(json.loads(other[name]) | {"seconds": 9.0}).encode()
    before = content(there)
    add(other, store, there.name)
    after = {name: held for name, held in content(there).items() if name != "lock"}
    assert after == before
    shutil.rmtree(there)
