"""Prepared data with a damaged or malicious record or array: stores of arrays and folder indices."""

from __future__ import annotations

import functools
import io
import json
import pickle
import shutil
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.lib import format as npy

from marginlens.data.feed import open_feed
from marginlens.data.folder import prepare_folder
from marginlens.data.store import Batch, write
from tests.data.conftest import tree_of_jpegs
from tests.fuzz import mutate
from tests.fuzz.harness import Case, Outcome, scratch

COMMANDS = ("list", "list", "info", "info --json", "show", "views", "feed", "feed", "feed")
HEADERS = (
    "{'descr': '|u1', 'fortran_order': False, 'shape': (10**9, 3, 5, 6), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999, 3, 5, 6), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 3, 5, 6), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (10.5, 3, 5, 6), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (True, 3, 5, 6), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': 900, }",
    "{'descr': '|u1', 'fortran_order': 7, 'shape': (10, 3, 5, 6), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (10, 3, 5, 6), }",
    "{'descr': '|S0', 'fortran_order': False, 'shape': (10, 3, 5, 6), }",
    "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (10, 3, 5, 6), }",
    "{'descr': ('|u1', (10**6,)), 'fortran_order': False, 'shape': (10, 3, 5, 6), }",
    "{'descr': 'x', 'fortran_order': False, 'shape': (10, 3, 5, 6), }",
    "{'descr': '|u1', 'shape': (10, 3, 5, 6), }",
    "__import__('os').system('touch stranger.txt')",
    "{'a': " * 60 + "1" + "}" * 60,
    "(" * 5000 + ")" * 5000,
    "-" * 9000 + "1",
    "[" * 150 + "]" * 150,
    "{'descr': '|u1', 'fortran_order': False, 'shape': (10, 3, 5, 6" + "0" * 9000 + "), }",
    "\0" * 100,
)


def case(rng: Random, folder: Path) -> Case:
    """Return a damaged store beside a good one, and a command or call that opens it."""
    kind = rng.choice(("arrays", "arrays", "index"))
    name = rng.choice(("x", "x", "cifar10")) if kind == "arrays" else "x"
    store = folder / "data" / name
    shutil.copytree(_template(kind), store)
    shutil.copytree(_template("arrays"), folder / "data" / "whole")
    if name != "x" or kind == "index":
        record = json.loads((store / "store.json").read_text())
        record["path"] = str(_template("images"))
        (store / "store.json").write_text(json.dumps(record))
    noticed = rng.random() < 0.15
    label = _silent(rng, store) if noticed else _spoil(rng, store)
    command = "feed" if noticed else rng.choice(COMMANDS)

    def check(outcome: Outcome) -> str:
        if noticed and not outcome.code:
            return f"opens changed arrays ({kind}, {label})"
        if command == "list" and (outcome.code or '"whole"' not in outcome.out):
            return "does not list the whole store"
        return ""

    def feed() -> None:
        found = open_feed(name, torch.device("cpu"), workers=0)
        for split in found.splits:
            order = torch.arange(len(found.labels(split)))[:4]
            assert all(len(part) for part in found.plain(split, order, 8, 8, 2))

    words = {"list": ["list", "--json"], "info": ["info", name], "info --json": ["info", name, "--json"]}
    words |= {"show": ["show", name, "--out", str(folder / "x.png")]}
    words |= {"views": ["views", name, "--count", "2", "--out", str(folder / "x.png")]}
    call = feed if command == "feed" else None
    title = f"{kind} {label}, {command}"
    return Case(title, ["data", *words[command]] if command != "feed" else [], call=call, check=check)


@functools.cache
def _template(kind: str) -> Path:
    """Return the folder of a store, of an index, or of the images that are in it."""
    root = scratch() / "stores"
    if kind == "images":
        tree_of_jpegs(scratch() / "images")
        return scratch() / "images"
    if kind == "index":
        prepare_folder(_template("images"), "index", workers=0, root=root)
        return root / "index"
    rng = np.random.default_rng(0)
    images = {split: rng.integers(0, 256, (n, 3, 5, 6), dtype=np.uint8) for split, n in (("train", 10), ("test", 4))}
    write("arrays", {s: [Batch(x, np.arange(len(x)) % 3)] for s, x in images.items()}, ["a", "b", "c"], root)
    return root / "arrays"


def _spoil(rng: Random, store: Path) -> str:
    """Spoil one file of a store."""
    path = store / "store.json" if rng.random() < 0.45 else rng.choice(sorted(store.iterdir()))
    content = path.read_bytes()
    if path.name == "store.json":
        label, made = mutate.bad_json(rng, json.loads(content))
    elif path.suffix == ".txt" and rng.random() < 0.6:
        label, made = "names", _names(rng, content)
    elif path.suffix == ".npy" and rng.random() < 0.6:
        label, made = "array", _array(rng, content)
    else:
        label, made = mutate.spoiled(rng, content)
    if rng.random() < 0.05:
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
        return f"no {path.name}"
    path.write_bytes(made)
    return f"{path.name}: {label}"


def _silent(rng: Random, store: Path) -> str:
    """Change an element of an array; its file's length and its labels' range stay as they are."""
    path = rng.choice(sorted(store.glob("*.npy")))
    array = np.load(path)
    flat = array.reshape(-1)
    at = rng.randrange(len(flat))
    if "labels" in path.name:
        flat[at] = (flat[at] + 1) % 2
    else:
        flat[at] += 1
    np.save(path, array)
    return path.name


def _array(rng: Random, content: bytes) -> bytes:
    """Write another array in an array's place, or an invalid header."""
    array = np.load(io.BytesIO(content))
    pick = rng.randrange(8)
    if pick < 3:
        header = rng.choice(HEADERS).encode()
        header += b" " * rng.choice((0, 64)) + b"\n"
        version = rng.choice((1, 2, 3))
        length = len(header).to_bytes(2 if version == 1 else 4, "little")
        return npy.magic(version, 0) + length + header + array.tobytes()
    kinds = (np.int8, np.uint16, np.float64, np.complex64, np.bool_, "S3", "U2", "M8[s]", "<i8", ">i8", np.float16)
    shapes = ((0,), (len(array),), (1, *array.shape), array.shape[::-1], (len(array) + 1, *array.shape[1:]), ())
    made = {
        3: lambda: array.astype(rng.choice(kinds)),
        4: lambda: np.resize(array, rng.choice(shapes)),
        5: lambda: np.asfortranarray(array),
        6: lambda: np.full_like(array, rng.choice((-1, 100, 0)), dtype=np.int64),
    }
    if pick == 7:
        trap = np.array([_Trap()] * len(array), dtype=object)
        return rng.choice((pickle.dumps(_Trap()), _saved(trap), b"PK\x03\x04" + content))
    return _saved(made[pick]())


class _Trap:
    """An object that changes a stranger's file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.unlink, (Path("stranger.txt"),))


def _saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def _names(rng: Random, content: bytes) -> bytes:
    names = content.split(b"\n")
    odd = ("../" * 9 + "etc/passwd", "/dev/zero", "/etc/passwd", ".", "", "\0", *mutate.STRINGS)
    names[rng.randrange(len(names))] = rng.choice(odd).encode(errors="surrogatepass")
    return b"\n".join(names)
