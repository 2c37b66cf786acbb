"""Whole methods around any backbone: `method.loss(views)`, and `method.after_step()` after the optimiser's step.

    method = MoCoV3(backbone, effect="emphasis(s=5)")
    loss = method.loss([strong, weak])      # two views (n, 3, h, w) of the same n images
    loss.backward(); optimizer.step()
    method.after_step()

To add a method, write one file and add one entry here. Its arguments say which settings it takes in the laboratory.
"""

from __future__ import annotations

from typing import Any

from marginlens.methods.byol import BYOL
from marginlens.methods.mocov3 import MoCoV3
from marginlens.methods.protocol import Method
from marginlens.methods.simclr import SimCLR

METHODS: dict[str, type[Any]] = {"mocov3": MoCoV3, "simclr": SimCLR, "byol": BYOL}

__all__ = ["BYOL", "METHODS", "Method", "MoCoV3", "SimCLR"]
