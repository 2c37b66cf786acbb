"""Malicious checkpoints: the checksum in the name fits the content, and the content is hostile."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load, save

import marginlens as ml
from marginlens.data import store
from tests.fuzz import mutate
from tests.fuzz.harness import Case, Outcome, scratch
from tests.train.conftest import SMALL

COMMANDS = ("resume", "resume", "resume", "export", "knn", "embed", "runs", "show")
TYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


@functools.cache
def trained() -> Path:
    """Return a folder with data, `data/little`, and a complete run of them in `runs`."""
    folder, rng = scratch() / "trained", np.random.default_rng(0)
    splits = {s: rng.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8) for s, n in (("train", 32), ("test", 16))}
    batches = {s: [store.Batch(images, np.arange(len(images)) % 4)] for s, images in splits.items()}
    store.write("little", batches, ["a", "b", "c", "d"], folder / "data")
    with mock.patch.dict(os.environ, {"MARGINLENS_DATA": str(folder / "data")}):
        place: dict[str, Any] = {"checkpoint_seconds": 0, "quiet": True, "workers": 0, "device": "cpu"}
        ml.pretrain(ml.Pretrain(**SMALL), runs=folder / "runs", **place)
    return folder


def copied(folder: Path) -> Path:
    """Copy data and run into a case's folder; return the run's folder."""
    shutil.copytree(trained(), folder, dirs_exist_ok=True)
    (run,) = (folder / "runs").iterdir()
    return run


def words(command: str, folder: Path, run: Path) -> list[str]:
    """Return the words of a command on a run."""
    place = ["--workers", "0", "--device", "cpu"]
    out = str(folder / "out.safetensors")
    return {
        "resume": ["pretrain", "--config", str(run / "config.json"), "--runs", str(run.parent), "--resume", *place],
        "export": ["export", str(run), "--out", out],
        "knn": ["knn", str(run), *place],
        "embed": ["embed", str(run), "--data", "little", "--out", out, *place],
        "runs": ["runs", "--runs", str(run.parent), "--json"],
        "show": ["runs", "show", str(run)],
    }[command]


def case(rng: Random, folder: Path) -> Case:
    """Return a run with hostile checkpoints, and a command that reads one."""
    run, command = copied(folder), rng.choice(COMMANDS)
    label = _spoil(rng, run)
    if command == "resume" and rng.random() < 0.8:
        (run / "result.json").unlink()

    def check(outcome: Outcome) -> str:
        if command == "resume" and not outcome.code and not (run / "result.json").is_file():
            return "ends well and leaves no result"
        return ""

    return Case(f"{label}, {command}", words(command, folder, run), check=check)


def _spoil(rng: Random, run: Path) -> str:
    """Replace the last checkpoint, or both."""
    paths = sorted((run / "checkpoints").iterdir())
    if rng.random() < 0.5:
        paths[0].unlink()
    content = paths[-1].read_bytes()
    paths[-1].unlink()
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["marginlens"])
    tensors = load(content)
    pick, step = rng.random(), 6
    if pick < 0.5:
        label, known = mutate.edited(rng, facts)
        made = save(tensors, {"marginlens": mutate.text(known).decode(errors="replace")})
    elif pick < 0.6:
        label, text = mutate.bad_json(rng, facts)
        made = save(tensors, {"marginlens": text.decode(errors="replace")} if rng.random() < 0.9 else None)
    elif pick < 0.85:
        label, made = _tensors(rng, tensors), b""
        made = save({n: t.contiguous() for n, t in tensors.items()}, {"marginlens": json.dumps(facts)})
    elif pick < 0.95:
        label, header = mutate.bad_json(rng, json.loads(content[8 : 8 + length]))
        made = len(header).to_bytes(8, "little") + header + content[8 + length :]
        label = f"header {label}"
    else:
        label, made = mutate.spoiled(rng, content)
    step = rng.choice(("00000006",) * 12 + ("00000004", "99999999999999999999", "9" * 150, "0", "\u0666"))
    name = f"step-{step}-{hashlib.sha256(made).hexdigest()[:32]}.safetensors"
    (run / "checkpoints" / name).write_bytes(made)
    return f"step {step[:12]} {label}"


def _tensors(rng: Random, tensors: dict[str, torch.Tensor]) -> str:
    """Change, add, rename or remove a tensor."""
    name = rng.choice(sorted(tensors))
    old = tensors[name]
    kinds: dict[str, Any] = {
        "missing": None,
        "flat": old.reshape(-1),
        "long": torch.zeros(7, *old.shape, dtype=old.dtype),
        "empty": old.reshape(-1)[:0],
        "scalar": torch.zeros((), dtype=old.dtype),
        "type": old.to(rng.choice(TYPES)),
        "nan": torch.full_like(old, float("nan")) if old.is_floating_point() else old - 5,
        "inf": torch.full_like(old, float("inf")) if old.is_floating_point() else torch.full_like(old, 2**40),
        "huge": torch.full_like(old, 1e30) if old.is_floating_point() else torch.full_like(old, -1),
    }
    kind = rng.choice((*kinds, "extra", "renamed", "none"))
    if kind == "none":
        tensors.clear()
    elif kind == "extra":
        tensors[rng.choice(("x", "method.x", "optimizer.x", "method.student.backbone.x"))] = old.clone()
    elif kind == "renamed":
        tensors[rng.choice(("x", name.upper(), name + ".x"))] = tensors.pop(name)
    elif kind == "missing":
        del tensors[name]
    else:
        tensors[name] = kinds[kind]
    return f"{kind} {name}"
