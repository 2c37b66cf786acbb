"""What a run is: a hash of everything that determines its result, and of nothing else.

Where it runs, how fast, how often it is saved or looked at is not part of it: those are arguments of `pretrain`, not
settings. A setting added later names here the value that means "as before": runs made before it keep their name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marginlens.files import opened, reason
from marginlens.paths import expanded
from marginlens.train.config import Pretrain, Settings, build, takes

NUMERICS = 1
"""Raised when the same settings come to mean other numbers: views, initialisation, loss, schedule, order."""

NEUTRAL: dict[str, Any] = {
    "stem": "auto",
    "limit": 0,
    "weights": "",
    "beta": 1.0,
    "bias": True,
    "predictor_bn": False,
    "bn_splits": 1,
    "symmetric": False,
    "two_tau": False,
    "ema_schedule": "constant",
    "decay_all": True,
    "clip": 0.0,
    "weak_crop": "resized",
    "blur": 0.5,
    "amp": "auto",
}
"""Settings that are left out of the hash at this value. A frozen meaning, whatever a default may become."""


NEUTRAL_EVALUATION: dict[str, Any] = {"weight_decay": 0.0, "holdout": 0, "resize": 0, "size": 0}
"""The same for evaluations."""


def evaluation_name(kind: str, data: str, fingerprint: str, settings: Settings) -> str:
    """The file of an evaluation: its kind, its data, and ten digits of what determines it."""
    known = digits([kind, fingerprint, NUMERICS, _telling(settings, NEUTRAL_EVALUATION)])
    return f"{kind}-{data}-{known}.json"


def facts(settings: Pretrain, fingerprint: str) -> dict[str, Any]:
    """What is hashed: settings that are not neutral, the data's and the weights' content, the numerics' version."""
    kept = _telling(settings, NEUTRAL)
    if not takes(settings.method, "ema"):
        del kept["ema"]  # it has no teacher
    if settings.weights:
        kept["weights"] = digest(expanded(settings.weights))
    return {"settings": kept, "data": fingerprint, "numerics": NUMERICS}


def _telling(settings: Settings, neutral: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not at their neutral value."""
    values = settings.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


def identify(settings: Pretrain, fingerprint: str) -> str:
    """The run's id: ten digits of its facts."""
    return digits(facts(settings, fingerprint))


def digits(known: Any) -> str:
    """Ten hexadecimal digits that stand for what JSON can hold."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]


def changed(settings: Pretrain, fingerprint: str, id_: str, held: Mapping[str, Any]) -> str:
    """What was changed since these facts were held: an id is their hash, and they are those of settings and data."""
    if (proper := digits(held)) != id_:
        return f"its id is {id_[:100]!r}, and its identity's is {proper}"
    if held.get("data") != fingerprint or not isinstance(held.get("numerics"), int):
        return "its data are not those of its identity"
    return "" if _same_settings(settings, held.get("settings")) else "its settings are not those of its identity"


def _same_settings(settings: Pretrain, held: Any) -> bool:
    """Whether what was hashed is what these settings say; weights are hashed by their content, which may be gone."""
    if not isinstance(held, dict) or ("weights" in held) != bool(settings.weights):
        return False
    plain = settings.model_copy(update={"weights": ""}) if settings.weights else settings
    kept = {name: value for name, value in held.items() if name != "weights"}
    if facts(plain, "")["settings"] == kept:
        return True
    try:  # as this version reads it: an older one may have spelled an effect otherwise
        return bool(build(Pretrain, NEUTRAL | {"ema": plain.ema} | kept) == plain)
    except ValueError:
        return False


def run_name(settings: Pretrain, fingerprint: str) -> str:
    """The name of its folder."""
    return name_of(settings, identify(settings, fingerprint))


def name_of(settings: Pretrain, id_: str) -> str:
    """A folder's name that says what the run is: mocov3-shapes-tiny-emphasis-s5-seed0-1a2b3c4d5e."""
    effect = re.sub(r"[^\w.]+", "-", settings.effect.replace("=", "")).strip("-")
    words = (settings.method, settings.data, settings.encoder, effect[:40], f"seed{settings.seed}")
    return "-".join([*words, id_])


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({reason(error)}); say where it is with --weights") from None
