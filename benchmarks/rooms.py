"""Count the modules of marginlens that a user's two calls run through: `ml.pretrain`, then `ml.probe`.

    python benchmarks/rooms.py

Counts modules in which a function is called, not modules that are only imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import marginlens as ml

PACKAGE = Path(ml.__file__).parent


def entered() -> list[str]:
    """Return the modules of the package that the calls go through."""
    found: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    for observed in (False, True):  # the first time everything is imported, which is not counted
        settings = ml.Pretrain(data="shapes", epochs=1, limit=64, hidden=16, out=8)
        with tempfile.TemporaryDirectory() as folder:
            sys.setprofile(see if observed else None)
            try:
                run = ml.pretrain(settings, runs=folder, device="cpu", quiet=True)
                ml.probe(run, ml.Probe(epochs=1), device="cpu", quiet=True)
            finally:
                sys.setprofile(None)
    inside = (Path(name) for name in found if Path(name).is_relative_to(PACKAGE))
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in inside)


def main() -> None:
    """Print the count, the modules, and the size of the package."""
    modules = entered()
    files = sorted(PACKAGE.rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    print(f"pretrain and probe go through {len(modules)} modules; the package has {len(files)} with {lines:,} lines")
    print(json.dumps(modules, indent=1))


if __name__ == "__main__":
    main()
