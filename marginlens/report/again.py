"""What makes a run again: the settings that are not the recipe's own, and the commands that give them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marginlens.runs.fields import odd, spelled
from marginlens.train.config import Pretrain


def commands(path: Path, settings: Pretrain, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to type, line by line, where the report was made: pre-training, then each evaluation."""
    store, folder = shlex.quote(str(path.parent)), shlex.quote(str(path))
    found = [f"marginlens pretrain {' '.join(_option(n, v) for n, v in spelled(settings).items())} --runs {store}"]
    for known in evaluations:
        kind, data = str(known["kind"]), str(known["data"])
        words = [f"marginlens {shlex.quote(kind)} {folder}"]
        words += [f"--to {shlex.quote(data)}"] if kind == "transfer" else []
        words += [_option(name, value) for name, value in odd(known).items()]
        found.append(" ".join(words))
    return found


def _option(name: str, value: Any) -> str:
    dashed = shlex.quote(name.replace("_", "-"))
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    if isinstance(value, list | tuple):
        return f"--{dashed} {' '.join(shlex.quote(str(x)) for x in value)}"
    return f"--{dashed} {shlex.quote(str(value))}"
