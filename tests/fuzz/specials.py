"""Special files: pipes, devices, sockets, broken symlinks, symlink loops, folders in a file's place."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from marginlens.data.feed import open_feed
from marginlens.data.folder import crop_file
from tests.data.conftest import tree_of_jpegs
from tests.fuzz import checkpoints
from tests.fuzz.harness import Case

KINDS = (
    "fifo",
    "fifo",
    "zero",
    "zero",
    "full",
    "random",
    "null device",
    "block",
    "socket",
    "dangling",
    "loop",
    "folder",
    "up",
    "self",
)
KINDS += ("long loop", "mem", "sparse", "closed")
RUN_FILES = ("lock", "config.json", "metrics.jsonl", "environment.jsonl", "speed.jsonl", "result.json", "failure.json")
RUN_FILES += ("evaluations", "evaluations/probe-little-0123456789.json", "checkpoints", "tensorboard", ".config.json.1")
STORE_FILES = ("store.json", "train-images.npy", "train-labels.npy", "test-images.npy", "test-labels.npy", "")
RUN_COMMANDS = (
    "runs",
    "runs",
    "show",
    "resume",
    "export",
    "knn",
    "embed",
    "report",
    "prune",
    "add",
    "compare",
    "drop",
    "probe",
)
OPTIONS = (
    "from cifar10",
    "from folder",
    "from tinyimagenet",
    "config",
    "config",
    "weights",
    "insert",
    "out",
    "markdown",
    "rates",
)
OPTIONS += ("embed out", "embed data", "show out", "runs", "data root", "export out")


def case(rng: Random, folder: Path) -> Case:
    """Return a special file in the place of a regular one, and a command that reads it."""
    run, kind = checkpoints.copied(folder), rng.choice(KINDS)
    place = rng.choice(("run", "run", "store", "option", "option", "image"))
    if place == "run":
        where, made = _in_run(rng, folder, run, kind)
    elif place == "store":
        where, made = _in_store(rng, folder, kind)
    elif place == "image":
        where, made = _image(rng, folder, kind)
    else:
        where = rng.choice(OPTIONS)
        _make(folder / "odd", kind)
        made = _option(where, folder, run, folder / ("odd/x" if rng.random() < 0.1 else "odd"))
    act = {"call": made} if callable(made) else {"words": made}
    return Case(f"{kind} as {where}", **act, spared=("", "data", "runs"))


def _make(path: Path, kind: str) -> None:
    """Replace what is at a path by a special file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    aims = {"zero": "/dev/zero", "full": "/dev/full", "random": "/dev/urandom", "dangling": "nowhere/at/all"}
    aims |= {"loop": path.name, "up": "..", "self": ".", "mem": "/proc/self/mem"}
    if kind in aims:
        path.symlink_to(aims[kind])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in ("null device", "block"):
        try:
            kept = (stat.S_IFBLK, os.makedev(7, 250)) if kind == "block" else (stat.S_IFCHR, os.makedev(1, 3))
            os.mknod(path, 0o600 | kept[0], kept[1])
        except OSError:  # only root can
            path.symlink_to("/dev/null")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path must be short
            end.bind(path.name[:90])
            os.chdir(here)
    elif kind == "long loop":
        path.symlink_to(f"{path.name}.2")
        path.with_name(f"{path.name}.2").symlink_to(path.name)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "closed":
        path.write_bytes(b"{}")
        path.chmod(0)
    else:
        path.mkdir()
        (path / "inside").write_text("{}")


def _in_run(rng: Random, folder: Path, run: Path, kind: str) -> tuple[str, list[str]]:
    checkpoint = max((run / "checkpoints").iterdir())
    choices = [*(run / name for name in RUN_FILES), checkpoint, checkpoint, run / "checkpoints" / "step-x.partial", run]
    path = rng.choice(choices)
    if rng.random() < 0.3 and path != run:
        (run / "result.json").unlink()
    _make(path, kind)
    at = ["--runs", str(run.parent)]
    place = ["--workers", "0", "--device", "cpu"]
    commands = {
        "report": ["report", *at, "--out", str(folder / "report")],
        "prune": ["runs", "prune", *at],
        "drop": ["runs", "prune", "--weights", "--yes", *at],
        "add": ["runs", "add", str(run), "--runs", str(folder / "other")],
        "compare": ["runs", "compare", run.name, run.name[:9], *at],
        "probe": ["probe", str(run), "--epochs", "1", *place],
    }
    command = rng.choice(RUN_COMMANDS)
    words = commands.get(command) or checkpoints.words(command, folder, run)
    return f"{path.name[:30]}, {command}", words


def _in_store(rng: Random, folder: Path, kind: str) -> tuple[str, list[str] | Callable[[], object]]:
    path = folder / "data" / "little" / rng.choice(STORE_FILES)
    _make(path, kind)
    command = rng.choice(("list", "info", "show", "feed", "prepare"))
    words = {
        "list": ["data", "list"],
        "info": ["data", "info", "little"],
        "show": ["data", "show", "little", "--out", str(folder / "o.png")],
        "prepare": ["data", "prepare", "folder", "--from", str(folder / "x"), "--as", "little", "--workers", "0"],
    }
    if command == "prepare":
        tree_of_jpegs(folder / "x")
    feed = lambda: open_feed("little", torch.device("cpu"), workers=0)
    return f"{path.name}, {command}", words.get(command) or feed


def _image(rng: Random, folder: Path, kind: str) -> tuple[str, list[str] | Callable[[], object]]:
    tree_of_jpegs(folder / "x")
    path = (
        folder / "x" / rng.choice(("train/cat/0.jpg", "train/cat/y.png", "train/cat", "train", "val", "z", "train/z"))
    )
    _make(path, kind)
    prepare = ["data", "prepare", "folder", "--from", str(folder / "x"), "--as", "y", "--workers", "0"]
    if rng.random() < 0.3:
        return f"{path.name}, crop", lambda: crop_file(path, (0, 0, 8, 8), 8)
    return f"{path.name}, prepare", [*prepare, *rng.choice(([], ["--skip-bad"]))]


def _option(where: str, folder: Path, run: Path, odd: Path) -> list[str]:
    """Return the words of a command with an option that names the special file."""
    name = where.rpartition(" ")[2]
    out, at = str(folder / "report"), ["--runs", str(run.parent)]
    safe = odd.with_suffix(".safetensors")
    if where in ("embed out", "export out") and os.path.lexists(odd):
        odd.rename(safe)
    if where == "data root":
        os.environ["MARGINLENS_DATA"] = str(odd)
    pretrain = ["pretrain", "--print-config"]
    small = [word for name, value in checkpoints.SMALL.items() for word in (f"--{name}", str(value))]
    small += ["--workers", "0", "--device", "cpu"]
    return {
        "from": [
            "data",
            "prepare",
            name,
            "--from",
            str(odd),
            *(["--as", "y", "--workers", "0"] if name == "folder" else []),
        ],
        "config": [*pretrain, "--config", str(odd)],
        "weights": ["pretrain", "--weights", str(odd), *small, *at],
        "insert": ["report", *at, "--out", out, "--insert", str(odd)],
        "out": ["report", *at, "--out", str(odd)],
        "markdown": ["report", *at, "--out", out, "--markdown", str(odd)],
        "rates": ["report", *at, "--out", out, "--latex", str(odd)],
        "embed out": ["embed", str(run), "--data", "little", "--out", str(safe), "--workers", "0"],
        "export out": ["export", str(run), "--out", str(safe)],
        "embed data": ["embed", str(run), "--data", str(odd), "--out", str(folder / "o.safetensors"), "--workers", "0"],
        "show out": ["data", "show", "little", "--out", str(odd)],
        "runs": ["runs", "--runs", str(odd)],
        "data root": ["data", "list"],
    }[where if not where.startswith("from") else "from"]
