"""Paths as people type them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path


def expanded(path: str | PathLike[str]) -> Path:
    """A path whose ~ is the folder that it stands for."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"the ~ of {path} stands for no folder ({error})") from None
