"""Show what an effect does to gradients: in theory, on given rows, and on a model that trains."""

from marginlens.lens import theory
from marginlens.lens.live import Lens
from marginlens.lens.parts import Equivalent, Part, Parts, decompose, equivalent

__all__ = ["Equivalent", "Lens", "Part", "Parts", "decompose", "equivalent", "theory"]
