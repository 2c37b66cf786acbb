"""Contrastive representation learning, seen through margins."""

from marginlens.effects import Attenuation, Emphasis, Margin, Plain, Ratio
from marginlens.loss import Rows, info_nce, nt_xent, positive_only, rows
from marginlens.modules import InfoNCE, NTXent
from marginlens.notation import effect

__version__ = "0.1.0"

__all__ = [
    "Attenuation",
    "Emphasis",
    "InfoNCE",
    "Margin",
    "NTXent",
    "Plain",
    "Ratio",
    "Rows",
    "effect",
    "info_nce",
    "nt_xent",
    "positive_only",
    "rows",
]
