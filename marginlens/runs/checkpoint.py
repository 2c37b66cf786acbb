"""Checkpoints: one safetensors file each, written whole or not at all, with its SHA-256 in its name.

    step-00001200-5f0c....safetensors     tensors: method.*, optimizer.*, losses; metadata: numbers, as JSON

Reading a checkpoint executes nothing. The last two are kept, so a damaged one costs a minute, not a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from marginlens.files import flush, opened, parse, reason

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{32})\.safetensors")
_HALF = re.compile(r"step-\d+-[0-9a-f]{32}\.partial")
_PARTIAL = ".partial"
_Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _Facts(BaseModel):
    """Check the numbers in a checkpoint's metadata.

    The file may come from anywhere; a right checksum proves nothing.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    step: _Count
    run: str = ""
    metrics: _Count = 0
    speed: _Count = 0
    seconds: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    counted: _Count = 0
    scaler: dict[str, float | int] = {}


class Checkpoint(NamedTuple):
    """Contents of a checkpoint: tensors by name, and numbers."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Write a checkpoint to a temporary file, flush it, rename it, and only then remove the oldest.

    The run's folder must exist. A folder that was moved or removed is not created again.
    """
    folder.mkdir(exist_ok=True)
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
    """Return the checkpoints in a folder, newest first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest(folder: Path, run: str) -> tuple[Checkpoint | None, list[str]]:
    """Return the run's newest whole checkpoint, and a line for each newer one that is damaged."""
    for left in folder.glob(f"*{_PARTIAL}"):
        if _HALF.fullmatch(left.name):  # other names are other programs' files
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
    """Rename damaged checkpoints that are newer than the one in use, so that they take no whole one's place."""
    for path in names(used.path.parent):
        if path == used.path:
            break
        path.rename(path.with_name(f"{path.name}.damaged"))


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that differs from the file that was written."""


def read(path: Path, run: str = "") -> Checkpoint:
    """Read and verify a checkpoint. `run` is the id of the run that it must belong to."""
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path} is not a checkpoint of marginlens: names are step-NUMBER-SHA256.safetensors")
    try:
        with opened(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found[:32] != name[2]:
            raise Damaged(f"{path} is damaged: its content does not match its checksum")
        with safe_open(path, "pt") as stored:
            facts = parse((stored.metadata() or {}).get("marginlens", "{}"))
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118  not a dict
    except Damaged:
        raise
    except (OSError, SafetensorError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise Damaged(f"{path} cannot be read ({reason(error)})") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version of marginlens")
    _check(path, facts, int(name[1]))
    if run and facts.get("run") != run:
        raise ValueError(f"{path} belongs to another run ({facts.get('run')}, not {run}); put it back where it was")
    return Checkpoint(path, tensors, facts)


def _check(path: Path, facts: dict[str, Any], step: int) -> None:
    """Raise unless a run could have written these numbers."""
    try:
        known = _Facts(**facts)
    except (ValidationError, TypeError) as error:
        what = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        said = f"{'.'.join(map(str, what['loc']))[:60]}: {what['msg']}"
        raise ValueError(f"{path} is not a checkpoint that a run wrote ({said}); remove it") from None
    if known.step != step:
        raise ValueError(f"{path} holds step {known.step}, but its name says another; remove it")


@torch.no_grad()
def fill(own: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's tensors into tensors of the same names, shapes and dtypes. Copy nothing unless all fit."""
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
    """Flush a folder, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
