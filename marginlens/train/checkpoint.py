"""Checkpoints: one safetensors file each, whole or not there at all, its SHA-256 in its name.

    step-00001200-5f0c....safetensors     tensors: method.*, optimizer.*, losses; metadata: numbers, as JSON

Reading one executes nothing from it. The last two are kept, so that a damaged one costs a minute, not a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from marginlens.data.atomic import flush

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{32})\.safetensors")
_PARTIAL = ".partial"


class Checkpoint(NamedTuple):
    """What was read: tensors by name, and numbers."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Writes a checkpoint aside, flushes it, gives it its name, and only then removes the oldest."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(plain, {"marginlens": json.dumps({"format": FORMAT, "step": step} | facts)})
    path = folder / f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
    partial = path.with_suffix(_PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            flush(file)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    _flush_folder(folder)
    for old in names(folder)[KEEP:]:
        old.unlink(missing_ok=True)
    return path


def names(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest(folder: Path, run: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of the run, and a line on each newer one that is damaged."""
    for left in folder.glob(f"*{_PARTIAL}"):
        left.unlink(missing_ok=True)
    damaged: list[str] = []
    for path in names(folder):
        try:
            return read(path, run), damaged
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(f"{damaged[0]}, and no older checkpoint is whole; remove {folder.parent} to start over")
    return None, damaged


def set_aside(used: Checkpoint) -> None:
    """Renames what is newer than the checkpoint in use, which is damaged, so that it takes no whole one's place."""
    for path in names(used.path.parent):
        if path == used.path:
            break
        path.rename(path.with_name(f"{path.name}.damaged"))


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that is not what was written."""


def read(path: Path, run: str = "") -> Checkpoint:
    """A checkpoint, verified; `run` is the hash of the run that it must belong to."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path} is not a checkpoint of marginlens, whose names are step-NUMBER-SHA256.safetensors")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found[:32] != name[2]:
            raise Damaged(f"{path} is damaged: its content does not match its checksum")
        with safe_open(path, "pt") as stored:
            facts = json.loads((stored.metadata() or {}).get("marginlens", "{}"))
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of marginlens")
    if run and facts.get("run") != run:
        raise ValueError(f"{path} belongs to another run ({facts.get('run')}, not {run}); put it back where it was")
    return Checkpoint(path, tensors, facts)


@torch.no_grad()
def fill(own: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's tensors into tensors of the same names, shapes and dtypes; nothing unless all fit."""
    given = checkpoint.tensors
    odd = sorted(own.keys() ^ given.keys())
    odd += [n for n in own if n in given and (own[n].shape, own[n].dtype) != (given[n].shape, given[n].dtype)]
    if odd:
        raise ValueError(
            f"{checkpoint.path} does not fit this model in {odd[0]} ({len(odd)} tensors in all); "
            f"it was written by another version of the model"
        )
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _flush_folder(folder: Path) -> None:
    """Makes a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
