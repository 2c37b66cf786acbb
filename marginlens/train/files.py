"""The files of a run's folder: JSON that is there whole or as it was, and lines of it that are only added to."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from marginlens.data.atomic import flush, put
from marginlens.files import MIB, parse, read, reason, text

MOST_BYTES = 1024 * MIB
"""Of a file of lines: a million epochs."""


def append(path: Path, line: dict[str, Any], before: int | None = None) -> int:
    """Add a line of JSON to a file, wait until the disk has it, and return the file's length.

    `before` is the length that the file must have: one that somebody else wrote, emptied or replaced is left as it is.
    """
    gone = os.O_CREAT if before else 0  # a file that had lines is not made again

    def opener(name: str, flags: int) -> int:
        return os.open(name, (flags | os.O_NONBLOCK) & ~gone, 0o666)

    with open(path, "ab", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        if before not in (None, size):
            raise OSError(errno.ESTALE, f"it has {size} bytes, and had {before} when this run last wrote to it")
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        flush(file)
        return os.fstat(file.fileno()).st_size


def length(path: Path) -> int:
    """Return the length of a file; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def rewind(path: Path, length: int | None = None) -> None:
    """Forget the lines written after a checkpoint; without a length, only one that was left half-written."""
    held = read(path, MOST_BYTES) if path.exists() else b""
    kept = held.rfind(b"\n") + 1 if length is None else length
    if len(held) < kept:
        lost = f"it has {len(held)} bytes of {kept}"
        raise ValueError(f"{path} lost lines that the checkpoint counts on ({lost}); remove its folder to start over")
    if len(held) > kept:
        os.truncate(path, kept)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the lines of a file, without one that a killed process left half-written."""
    if not path.exists():
        return []
    try:
        whole = text(path, MOST_BYTES).rpartition("\n")[0]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None
    try:
        found: list[dict[str, Any]] = _parsed("[" + whole.replace("\n", ",") + "]")  # at once: a store has thousands
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({_first_wrong(whole) or error})") from None
    if not all(isinstance(line, dict) for line in found):
        raise ValueError(f"{path} does not hold an object in each line")
    return found


def _first_wrong(whole: str) -> str:
    """Return which of the lines is not JSON, and why."""
    for number, line in enumerate(whole.split("\n"), 1):
        try:
            _parsed(line)
        except ValueError as error:
            return f"line {number}: {error}"
    return ""


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file aside and rename it."""
    put(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file."""
    try:
        found = _parsed(text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold an object")
    return found


def _parsed(said: str) -> Any:
    """Parse JSON; refuse it where it holds half of a character, which no file can be written with."""
    found = parse(said)
    if "\\ud" in said or "\\uD" in said:
        json.dumps(found, ensure_ascii=False).encode()
    return found
