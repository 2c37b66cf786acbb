"""A drop-in InfoNCE loss with margins and gradient re-weighting, and a tool to measure whether they help.

The losses are functions of embeddings (n, d):

    info_nce(q, k)          rows of q against rows of k (MoCo)
    nt_xent(z1, z2)         two views of each sample (SimCLR)
    positive_only(p, z)     positives alone (BYOL)
    InfoNCE, NTXent         the same as modules

Each takes an `effect`: `Plain`, `Margin`, `Emphasis`, `Ratio`, `Attenuation`, or a product of them. `rows` returns
angles, probabilities and weights of each row. `MoCoV3`, `SimCLR` and `BYOL` are whole methods around a backbone.

The laboratory trains and measures: `pretrain(Pretrain(...))` returns a `Run`; `probe`, `knn`, `transfer`, `embed` and
`export` take one.

Each name is imported when it is first used, because the loss needs torch alone and the command's help not even that.
"""

from __future__ import annotations

import importlib
import re
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marginlens.effects import Attenuation, Emphasis, Margin, Plain, Ratio
    from marginlens.evals.knn import Knn
    from marginlens.evals.probe import Probe
    from marginlens.lens import Lens
    from marginlens.loss import Rows, info_nce, nt_xent, positive_only, rows
    from marginlens.methods import BYOL, MoCoV3, SimCLR
    from marginlens.modules import InfoNCE, NTXent
    from marginlens.notation import effect
    from marginlens.runs.config import Pretrain
    from marginlens.runs.evaluate import evaluate, knn, probe, transfer
    from marginlens.runs.export import embed, export
    from marginlens.runs.run import Run, open_run
    from marginlens.train.pretrain import pretrain

__version__ = "0.1.0"

_LABORATORY = r"\.(train|runs|evals)\."
_LOCK = threading.RLock()
_NAMES = {
    "marginlens.effects": ("Attenuation", "Emphasis", "Margin", "Plain", "Ratio"),
    "marginlens.lens": ("Lens",),
    "marginlens.loss": ("Rows", "info_nce", "nt_xent", "positive_only", "rows"),
    "marginlens.modules": ("InfoNCE", "NTXent"),
    "marginlens.notation": ("effect",),
    "marginlens.methods": ("BYOL", "MoCoV3", "SimCLR"),
    "marginlens.evals.knn": ("Knn",),
    "marginlens.evals.probe": ("Probe",),
    "marginlens.runs.config": ("Pretrain",),
    "marginlens.runs.export": ("embed", "export"),
    "marginlens.train.pretrain": ("pretrain",),
    "marginlens.runs.evaluate": ("evaluate", "knn", "probe", "transfer"),
    "marginlens.runs.run": ("Run", "open_run"),
}

__all__ = [
    "BYOL",
    "Attenuation",
    "Emphasis",
    "InfoNCE",
    "Knn",
    "Lens",
    "Margin",
    "MoCoV3",
    "NTXent",
    "Plain",
    "Pretrain",
    "Probe",
    "Ratio",
    "Rows",
    "Run",
    "SimCLR",
    "effect",
    "embed",
    "evaluate",
    "export",
    "info_nce",
    "knn",
    "nt_xent",
    "open_run",
    "positive_only",
    "pretrain",
    "probe",
    "rows",
    "transfer",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    with _LOCK:  # because two threads must not begin to import modules that import each other
        for module, names in _NAMES.items():
            if name in names:
                found = globals()[name] = getattr(_import(module), name)
                return found
        if not name.startswith("_") and find_spec(f"marginlens.{name}"):
            return _import(f"marginlens.{name}")
    raise AttributeError(f"module 'marginlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, without the laboratory's where it is not installed or, as on Windows, cannot run."""
    there = all(find_spec(name) is not None for name in ("pydantic", "safetensors", "fcntl"))
    known = {module: names for module, names in _NAMES.items() if there or not re.search(_LABORATORY, module)}
    names = (name for held in known.values() for name in held)
    return [*names, *(name for name in globals() if name.startswith("__"))]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "marginlens":
            raise
        raise ImportError(f"{error.name} is not installed; run: pip install 'marginlens[lab]'") from error
