"""The folder of a data set: its record, its arrays, and its replacement, whole or not at all.

Records may come from anywhere. Only records that we could have written are accepted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from marginlens.errors import DataError
from marginlens.files import below, opened, parse, reason, save, text, unique
from marginlens.output import complain

FORMAT = 1
_SPLIT = re.compile(r"[^/+.\x00][^/+\x00]*")


class Facts(BaseModel):
    """The record of a store, store.json. Strict, because the file may come from anywhere."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    format: int
    name: str
    version: int = 1
    kind: str = ""
    """"folder" for an index of image files, "" for arrays."""
    path: str = ""
    splits: dict[str, Any]
    """Arrays: their shapes. Index: the number of files."""
    classes: list[str]
    mean: Annotated[list[float], Field(min_length=3, max_length=3)]
    std: Annotated[list[float], Field(min_length=3, max_length=3)]
    fingerprint: str
    checksum: str = ""
    """SHA-256 of everything else; "" in stores of older versions."""
    test_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """An index: share of each class that was kept back as test images."""
    skipped: list[str] = []
    """An index: files that cannot be decoded."""

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
        """Names of all files of the store."""
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
    """Return the record of a finished store or folder index."""
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
    raise DataError(f"{path} was written by another version; {again}")


def array(path: Path, shape: tuple[int, ...], kind: str, *, mapped: bool = False) -> NDArray[Any]:
    """Return an array with exactly this shape and dtype from a NumPy file, memory-mapped or read."""
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
    """Return shape, order and dtype from a NumPy file's header."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise OSError("it is not a NumPy file that marginlens wrote")
        return np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception:  # because NumPy parses the header as Python, which fails in many ways
        raise OSError("it is not a NumPy file") from None


Own = Callable[[Path], Iterable[str]]
"""Returns the names of our files in a folder. Raises a DataError if the folder is not ours."""
_ELSEWHERE = "set MARGINLENS_DATA to another folder"


@contextmanager
def partial(where: Path, name: str, own: Own | None = None) -> Iterator[Path]:
    """Make a hidden folder to write into, and remove it on failure. First remove leftovers of killed writers.

    With `own`, a folder that a killed writer moved aside, but did not replace, is moved back.
    """
    try:
        where.mkdir(parents=True, exist_ok=True)
        _sweep(where, name, own)
        folder = where / f".{name}.{_host()}.{unique()}.partial"
        folder.mkdir()
    except OSError as error:
        raise DataError(f"cannot write to {where} ({error.strerror}); {_ELSEWHERE}") from None
    try:
        yield folder
    except OSError as error:
        raise DataError(f"cannot write {name} to {where} ({error.strerror}); {_ELSEWHERE}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path, own: Own) -> None:
    """Rename a complete folder to its final name, in place of one of ours. On failure the old one stays.

    Several writers may do this at once. Each folder is in place for a while, and the last one stays.
    """
    while True:
        before = _inode(final)
        try:
            check_ours(final, own)
        except (DataError, OSError):
            if _inode(final) != before:
                continue  # because another writer has replaced it
            raise
        old = final.with_name(f".{final.name}.{_host()}.{unique()}.old")
        try:
            with suppress(FileNotFoundError):  # raised if another writer has moved it away
                final.rename(old)
            folder.rename(final)
        except BaseException as error:
            if not os.path.lexists(final):
                with suppress(OSError):
                    old.rename(final)
                raise
            _discard(old, final, own)
            if not isinstance(error, OSError):
                raise
        else:
            _discard(old, final, own)
            return


def check_ours(final: Path, own: Own) -> None:
    """Raise unless a folder may be replaced: it is missing, empty, or holds only our files."""
    if not os.path.lexists(final):
        return
    if final.is_symlink() or not final.is_dir():
        what = "a symlink" if final.is_symlink() else "a file"
        raise DataError(f"{final} is {what}, and is never replaced; remove it, or {_ELSEWHERE}")
    held = set(below(final))
    if strangers := sorted(held - {*own(final)} if held else ()):
        raise DataError(f"{final} holds {strangers[0]}, which no data set has; move that file away, or {_ELSEWHERE}")


def _discard(old: Path, final: Path, own: Own) -> None:
    """Remove a replaced folder of ours. Keep it, under a visible name, if other files were added meanwhile."""
    if not os.path.lexists(old):
        return
    try:
        check_ours(old, own)
    except (DataError, OSError) as error:
        kept = final.with_name(f"{final.name}-replaced-{unique()}")
        old.rename(kept)
        complain(f"the old contents of {final} are kept as {kept.name} ({reason(error)})")
        return
    shutil.rmtree(old, ignore_errors=True)


def _inode(path: Path) -> int:
    """Return the inode of a path, or 0 if nothing is there."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0


def moving(final: Path) -> bool:
    """True while a writer replaces this folder: the old one is moved aside, the new one is not yet in place."""
    return any(_made_aside(final.name, path.name, "old") for path in final.parent.glob(f".{escape(final.name)}.*.old"))


def _sweep(where: Path, name: str, own: Own | None) -> None:
    """Remove leftovers of killed writers on this host, but no other files with such names."""
    for kind in ("partial", "old"):
        for left in where.glob(f".{escape(name)}.*.{kind}"):
            made = _made_aside(name, left.name, kind)
            if not made or made[1] != _host() or _alive(int(made[2])):
                continue
            if kind == "partial":
                shutil.rmtree(left, ignore_errors=True)
            elif not os.path.lexists(where / name):
                left.rename(where / name)
            elif own is not None:
                _discard(left, where / name, own)


def _made_aside(name: str, aside: str, kind: str) -> re.Match[str] | None:
    """Return host and process of the writer that made a folder of this name, or None if no writer did."""
    return re.fullmatch(rf"\.{re.escape(name)}\.([^.]+)\.(\d+)-[0-9a-f]{{8}}\.{kind}", aside)


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
