"""Translate the paper's words into settings: its names, its stated values, and the reading that we chose.

A cell's settings hold the values that define the cell; the rest is the laboratory's recipe (`runs/config.py`). That
recipe includes settings of MoCo v3 that the paper does not state (`MoCoV3.recipe`):

- Projector and predictor end in a batch norm without affine parameters. Without the projector's, s = 20 loses.
- The backbone's batch norms see a quarter of the batch. With the whole batch, s = 20 gains less than in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from marginlens import notation
from marginlens.effects import PLAIN, Attenuation, Emphasis, Kind, Margin, Ratio, Scope

METHODS = {"MoCo": "mocov3", "SimCLR": "simclr", "BYOL": "byol"}
"""The paper's names, and ours. It uses MoCo and MoCov3 for one method: both are MoCo v3."""

DATA = {"CIFAR10": "cifar10", "CIFAR100": "cifar100", "STL10": "stl10", "TinyImageNet": "tinyimagenet"}

EPOCHS = 200
"""Epochs of pre-training (Sec. 5.1, Appendix C.1)."""

BATCH = 256

STATED: dict[str, float] = {"batch": BATCH, "hidden": 2048, "out": 128, "momentum": 0.9, "lr": 0.06}
"""Appendix C.1, pre-training on the four small data sets. The rest of the recipe is ReSSL's ("basically follows")."""

STATED_TAU = {"MoCo": 0.25, "SimCLR": 0.25}
"""Appendix C.1. BYOL's is not stated."""

STATED_PROBE: dict[str, float] = {"epochs": 100, "momentum": 0.9, "lr": 1}
"""Appendix C.1: the linear layer, for probing and for transfer."""

RATIO_SCOPE: Scope = "positive"
"""The gradient that the ratio multiplies: the positive's, as in Alg. 4, or the whole row's ("row"), as in Sec. 5.4.

The tables do not say which one they used. Alg. 4 is given "for reproduction", so it is the first reading. The other one
is in `Cell.alternatives`."""

WHOLE_BATCH = {"bn_splits": 1}
"""The other reading of MoCo v3's batch norms: over the whole batch. The paper does not mention them."""


def run(method: str, data: str, effect: str, epochs: int = EPOCHS, batch: int = BATCH) -> dict[str, Any]:
    """Return settings of a pre-training, from the paper's names. Values that equal the recipe's are left out."""
    settings: dict[str, Any] = {"method": METHODS[method], "data": DATA[data], "effect": effect, "epochs": epochs}
    return settings if batch == BATCH else settings | {"batch": batch}


def spell(at: Mapping[str, float]) -> str:
    """Return the effect with margins m1, m2, or with scale s and curvature c. m1 alone is the ratio's."""
    if "m2" in at:
        return str(Margin(at["m1"], at["m2"]))
    if "m1" in at:
        return str(Ratio(at["m1"], RATIO_SCOPE)) if at["m1"] else str(PLAIN)
    s, c = at.get("s", 1.0), at.get("c", math.inf)
    return str(PLAIN) if s == 1.0 and math.isinf(c) else str(Emphasis(s, c))


def spell_attenuation(alpha: float, kind: Kind) -> str:
    """Return the effect of an attenuation, which is plain at alpha = 0."""
    return str(Attenuation(alpha, kind)) if alpha else str(PLAIN)


def others(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return other readings of a cell's settings by their difference: the ratio's scope, MoCo v3's batch norms, and
    both.
    """
    readings: dict[str, dict[str, Any]] = {}
    if isinstance(ratio := notation.effect(settings.get("effect", "plain")), Ratio):
        scope: Scope = "row" if RATIO_SCOPE == "positive" else "positive"
        readings[f"scope={scope}"] = {**settings, "effect": str(Ratio(ratio.m1, scope))}
    if settings.get("method") == METHODS["MoCo"]:
        label = ", ".join(f"{name}={value}" for name, value in WHOLE_BATCH.items())
        whole = {f"{name}, {label}": {**changed, **WHOLE_BATCH} for name, changed in readings.items()}
        readings |= {label: {**settings, **WHOLE_BATCH}} | whole
    return readings
