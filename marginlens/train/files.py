"""The files of a run's folder: JSON that is there whole or as it was, and lines of it that are only added to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from marginlens.data.atomic import flush, put


def append(path: Path, line: dict[str, Any]) -> None:
    """A line of JSON at a file's end, on the disk before this returns."""
    with path.open("ab") as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        flush(file)


def rewind(path: Path, length: int | None = None) -> None:
    """Forgets the lines written after a checkpoint; without a length, only one that was left half-written."""
    held = path.read_bytes() if path.exists() else b""
    kept = held.rfind(b"\n") + 1 if length is None else length
    if len(held) < kept:
        lost = f"it has {len(held)} bytes of {kept}"
        raise ValueError(f"{path} lost lines that the checkpoint counts on ({lost}); remove its folder to start over")
    if len(held) > kept:
        os.truncate(path, kept)


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the lines of a file; one that a killed process left half-written is not there."""
    if not path.exists():
        return []
    try:
        whole = path.read_text().rpartition("\n")[0]
        found: list[dict[str, Any]] = _parsed("[" + whole.replace("\n", ",") + "]")  # at once: a store has thousands
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({_first_wrong(whole) or error})") from None
    if not all(isinstance(line, dict) for line in found):
        raise ValueError(f"{path} does not hold an object in each line")
    return found


def _first_wrong(whole: str) -> str:
    """Which of the lines is no JSON, and why."""
    for number, line in enumerate(whole.split("\n"), 1):
        try:
            _parsed(line)
        except ValueError as error:
            return f"line {number}: {error}"
    return ""


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file aside and renames it."""
    put(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file."""
    try:
        found = _parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold an object")
    return found


def _parsed(text: str) -> Any:
    """JSON, refused where it holds half of a character, which no file can be written with."""
    found = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found
