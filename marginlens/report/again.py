"""What makes a run again: the settings that are not the recipe's own, and the commands that give them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marginlens.train.config import PROBE_RECIPES, Knn, Pretrain, Probe, Settings, build
from marginlens.train.identity import NEUTRAL_EVALUATION

ALWAYS = ("method", "data", "effect", "epochs", "seed")
"""Settings that are always spelled out."""


def commands(path: Path, settings: Pretrain, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to type, line by line, where the report was made: pre-training, then each evaluation."""
    store, folder = shlex.quote(str(path.parent)), shlex.quote(str(path))
    found = [f"marginlens pretrain {' '.join(_option(n, v) for n, v in spelled(settings).items())} --runs {store}"]
    for known in evaluations:
        kind, data = str(known["kind"]), str(known["data"])
        words = [f"marginlens {shlex.quote(kind)} {folder}"]
        words += [f"--to {shlex.quote(data)}"] if kind == "transfer" else []
        words += [_option(name, value) for name, value in unusual(known).items()]
        found.append(" ".join(words))
    return found


def spelled(settings: Pretrain) -> dict[str, Any]:
    """The settings that must be given to get all of them: what is not the recipe's own value, and `ALWAYS`."""
    wanted = settings.model_dump(mode="json")
    given = {name: wanted[name] for name in ALWAYS}
    try:
        base = build(Pretrain, given).model_dump(mode="json")
    except ValueError:  # these alone do not go together: everything is spelled out
        base = {}
    return given | {name: value for name, value in wanted.items() if name not in given and base.get(name) != value}


def unusual(known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation that are not the usual ones of its kind and data."""
    kind, data = str(known["kind"]), str(known["data"])
    usual: Settings = Knn() if kind == "knn" else build(Probe, PROBE_RECIPES.get(data, {}))
    expected = usual.model_dump(mode="json")
    neutral = {name: value for name, value in NEUTRAL_EVALUATION.items() if name in expected}
    return {name: value for name, value in (neutral | known["settings"]).items() if value != expected.get(name)}


def _option(name: str, value: Any) -> str:
    dashed = shlex.quote(name.replace("_", "-"))
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    if isinstance(value, list | tuple):
        return f"--{dashed} {' '.join(shlex.quote(str(x)) for x in value)}"
    return f"--{dashed} {shlex.quote(str(value))}"
