"""Odd names: not UTF-8, control characters, markup, newlines, bidi overrides, very long ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from marginlens.data.folder import prepare_folder
from tests.data.conftest import tree_of_jpegs
from tests.fuzz import checkpoints, mutate
from tests.fuzz.harness import Case, Outcome, scratch

RAW = [
    b"\xff\xfe",
    b"caf\xe9",
    b"\x80" * 20,
    b"a\xc3",
    b"\xed\xa0\x80",
    b"x" * 250,
    b"\xe2\x80\xae" * 80,
    b"\x1b[2J\x1b[H\xff",
]
RUN_COMMANDS = (
    ["runs"],
    ["runs", "--json"],
    ["runs", "show"],
    ["runs", "compare"],
    ["report"],
    ["report", "--json"],
    ["export"],
    ["prune"],
)


def case(rng: Random, folder: Path) -> Case:
    """Return an odd name at some place, and a command that reads it."""
    name = odd(rng)
    place, make = rng.choice(PLACES)
    words, check = make(rng, folder, name)
    return Case(f"{place} {name[:40]!r}", words, check=check, spared=("", "data", "runs"))


def odd(rng: Random) -> str:
    """Return a hostile name that a file can have."""
    raw = rng.choice(
        (rng.choice(RAW), rng.choice(mutate.STRINGS).encode(errors="ignore"), rng.randbytes(rng.choice((1, 5, 40))))
    )
    raw = raw.replace(b"\0", b"").replace(b"/", b"_")[: rng.choice((20, 100, 240))]
    plain = raw if raw.strip(b".") else b"\x1b[31m" + raw
    return os.fsdecode(plain if rng.random() < 0.7 else b"a" + plain + b"z")


def _fine(outcome: Outcome) -> str:
    return ""


Made = tuple[list[str], Callable[[Outcome], str]]


def _images(rng: Random, folder: Path, name: str) -> Made:
    """Give the name to a class, an image or the folder of images, and prepare the folder."""
    tree = folder / "x"
    tree_of_jpegs(tree)
    pick = rng.randrange(4)
    if pick == 0:
        for split in ("train", "val"):
            (tree / split / "cat").rename(tree / split / name)
    elif pick == 1:
        file = tree / "train" / "cat" / "0.jpg"
        file.rename(file.with_name(name[:200] + ".jpg"))
    elif pick == 2:
        (folder / "x").rename(folder / name)
        tree = folder / name
    as_ = name if pick == 3 else "y"
    words = [
        "data",
        "prepare",
        "folder",
        "--from",
        str(tree),
        "--workers",
        "0",
        *rng.choice((["--as", as_], ["--as", as_], [])),
    ]
    return [*words, *rng.choice(([], ["--skip-bad"], ["--json"]))], _fine


def _prepared(rng: Random, folder: Path, name: str) -> Made:
    """Give the name to a class of a prepared folder, and look at it."""
    tree = folder / "x"
    tree_of_jpegs(tree)
    for split in ("train", "val"):
        (tree / split / "cat").rename(tree / split / name)
    try:
        prepare_folder(tree, "y", workers=0)
    except (ValueError, OSError):  # such a name is refused
        prepare_folder(scratch_images(), "y", workers=0)
    return [*_look(rng, folder, "y")], _fine


def _classes(rng: Random, folder: Path, name: str) -> Made:
    """Give the name to a class, a split or the path in a store's record."""
    checkpoints.copied(folder)
    path = folder / "data" / "little" / "store.json"
    record = json.loads(path.read_text())
    at = rng.randrange(4)
    if at == 0:
        record["classes"][0] = name
    elif at == 1:
        record["name"] = name
    elif at == 2:
        record["splits"][name] = record["splits"].pop("test")
    else:
        record |= {"kind": "folder", "path": name}
    path.write_bytes(json.dumps(record).encode())
    return _look(rng, folder, "little"), _fine


def _store(rng: Random, folder: Path, name: str) -> Made:
    """Give the name to a store, or to the folder of all stores."""
    checkpoints.copied(folder)
    if rng.random() < 0.5:
        (folder / "data" / "little").rename(folder / "data" / name)
        shutil.copytree(checkpoints.trained() / "data" / "little", folder / "data" / "whole")
    else:
        (folder / "data").rename(folder / name)
        os.environ["MARGINLENS_DATA"] = str(folder / name)
        name = "little"
    words = _look(rng, folder, name)

    def check(outcome: Outcome) -> str:
        return "does not list the stores" if words[:2] == ["data", "list"] and outcome.code else ""

    return words, check


def _run(rng: Random, folder: Path, name: str) -> Made:
    """Give the name to a run's folder, an evaluation or the folder of all runs."""
    run = checkpoints.copied(folder)
    store, pick = run.parent, rng.randrange(4)
    if pick == 0:
        shutil.copytree(run, run.with_name(name)) if rng.random() < 0.5 else run.with_name(name).mkdir()
    elif pick == 1:
        run = run.rename(run.with_name(name))
    elif pick == 2:
        store = store.rename(folder / name)
        run = store / run.name
    else:
        (run / "evaluations").mkdir(exist_ok=True)
        (run / "evaluations" / f"{name[:200]}.json").write_text(rng.choice(("{}", "[", json.dumps({"kind": name}))))
    first, *rest = words = rng.choice(RUN_COMMANDS)
    at, out = ["--runs", str(store)], str(folder / "out")
    if first == "export":
        return ["export", str(run), "--out", f"{out}.safetensors"], _fine
    if first == "prune":
        return ["runs", "prune", *at], _fine
    if first == "report":
        return [*words, *at, "--out", out], lambda o: "" if Path(out, "report.html").is_file() else "writes no report"
    which = {"show": [str(run)], "compare": [str(run), str(run)]}.get(rest[0] if rest else "", [])
    return [*words, *which, *at], _fine


def _out(rng: Random, folder: Path, name: str) -> Made:
    """Write to a place of that name."""
    run = checkpoints.copied(folder)
    out, weights = folder / name, str(folder / f"{name[:200]}.safetensors")
    place = ["--workers", "0", "--device", "cpu"]
    choices = (
        ["data", "show", "little", "--out", f"{out}.png"],
        ["data", "show", name],
        ["report", "--runs", str(run.parent), "--out", str(out)],
        ["export", str(run), "--out", weights],
        ["embed", str(run), "--data", "little", "--out", weights, *place],
        ["embed", str(run), "--data", name, "--out", str(folder / "o.safetensors"), *place],
    )
    return rng.choice(choices), _fine


def _look(rng: Random, folder: Path, name: str) -> list[str]:
    """Return a command that looks at prepared data."""
    out = ["--out", str(folder / "x.png")]
    looks = (
        ["list"],
        ["list", "--json"],
        ["info", name],
        ["info", name, "--json"],
        ["show", name, *out],
        ["views", name, "--count", "2", *out],
    )
    return ["data", *rng.choice(looks)]


def scratch_images() -> Path:
    """Return a folder of images with ordinary names."""
    tree_of_jpegs(scratch() / "plain")
    return scratch() / "plain"


PLACES = [(make.__name__[1:], make) for make in (_images, _prepared, _classes, _store, _run, _out)]
