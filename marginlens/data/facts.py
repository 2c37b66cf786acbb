"""Records of stores and of indexes of folders: store.json, and the arrays beside it.

Both may come from anywhere, and are taken only as we write them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from marginlens.data.atomic import DataError, save
from marginlens.files import opened, parse, reason, text

FORMAT = 1
_SPLIT = re.compile(r"[^/+.\x00][^/+\x00]*")


class Facts(BaseModel):
    """The record of a store, store.json: strict, since it may come from anywhere."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    format: int
    name: str
    version: int = 1
    kind: str = ""
    """"folder" of an index of image files, "" of arrays."""
    path: str = ""
    splits: dict[str, Any]
    """Arrays: their shapes. An index: the number of files."""
    classes: list[str]
    mean: Annotated[list[float], Field(min_length=3, max_length=3)]
    std: Annotated[list[float], Field(min_length=3, max_length=3)]
    fingerprint: str
    checksum: str = ""
    """SHA-256 of all the rest; "" in a store of an older version."""

    @model_validator(mode="after")
    def _proper(self) -> Self:
        for split in self.splits:
            if not _SPLIT.fullmatch(split):
                raise ValueError(f"{split!r} is not the name of a split")
        if not self.splits:
            raise ValueError("it has no split")
        if not all(0 <= x <= 1 for x in (*self.mean, *self.std)):
            raise ValueError("mean and std must be from 0 to 1")
        if self.checksum and self.checksum != checksum(self.model_dump(exclude_unset=True)):
            raise ValueError("it was changed after it was written")
        return self

    @property
    def files(self) -> set[str]:
        """The names of all files of the store."""
        kinds = ["labels.npy"]
        kinds += ["files.txt", "sizes.npy", "lengths.npy", "digests.npy"] if self.kind else ["images.npy"]
        return {"store.json", *(f"{split}-{kind}" for split in self.splits for kind in kinds)}


def checksum(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its checksum."""
    known = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def save_record(folder: Path, facts: dict[str, Any]) -> None:
    """Write store.json, with its own checksum."""
    save(folder / "store.json", json.dumps(facts | {"checksum": checksum(facts)}, indent=1).encode())


def record(path: Path, name: str) -> Facts:
    """Return what a finished store or folder index says of itself."""
    again = f"remove {path} and prepare {name} again"
    try:
        held = parse(text(path / "store.json"))
        if isinstance(held, dict) and held.get("format") == FORMAT:
            return Facts(**held)
    except FileNotFoundError:
        raise DataError(f"{name} is not prepared in {path.parent}; run: marginlens data prepare {name}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])[:60]
        raise DataError(f"{path / 'store.json'} is damaged ({where}{first['msg']}); {again}") from None
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path / 'store.json'} is damaged ({reason(error)}); {again}") from None
    raise DataError(f"{path} is a store of another version; {again}")


def array(path: Path, shape: tuple[int, ...], kind: str, *, mapped: bool = False) -> NDArray[Any]:
    """Return an array of just this shape and type from a NumPy file, memory-mapped or read."""
    try:
        with opened(path) as file:
            found = _stated(file)
            length = os.fstat(file.fileno()).st_size - file.tell()
            if found != (shape, False, np.dtype(kind)):
                stated = f"shape {found[0]} of {found[2]}, its record says {shape} of {np.dtype(kind)}"
                raise DataError(f"{path} has {stated}; remove {path.parent} and prepare again")
            if length != math.prod(shape) * np.dtype(kind).itemsize:
                raise DataError(f"{path} cannot be read (it is cut short or too long); prepare again")
            if mapped:
                return np.memmap(file, dtype=kind, mode="r", offset=file.tell(), shape=shape)
            return np.frombuffer(bytearray(file.read(length)), dtype=kind).reshape(shape)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({reason(error)}); remove {path.parent} and prepare again") from None


def _stated(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and type that a NumPy file states."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise OSError("it is not a NumPy file that marginlens wrote")
        return np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception:  # NumPy reads the header as Python, which has many ways to fail
        raise OSError("it is no NumPy file") from None
