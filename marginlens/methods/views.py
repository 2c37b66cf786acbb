"""What every method checks of the views it is given, and of the backbone around which it is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from marginlens import checks
from marginlens.checks import EffectLike
from marginlens.loss import Impl
from marginlens.nets.count import feature_dim


def features_of(backbone: nn.Module, features: int | None, size: int) -> int:
    """How many features a backbone has: as said, as its `features` says, or as a dry run on `size` px images finds."""
    if not isinstance(backbone, nn.Module):
        named = f": marginlens.nets.encoder({backbone!r}) makes one" if isinstance(backbone, str) else ""
        raise TypeError(f"the backbone must be an nn.Module, not {type(backbone).__name__}{named}")
    if features is not None and (isinstance(features, bool) or not isinstance(features, int)):
        raise ValueError(f"features is {features!r}; it must be a whole number, or left out")
    found = getattr(backbone, "features", None) if features is None else features
    if isinstance(found, int):
        return found
    try:
        return feature_dim(backbone, size)
    except ValueError as error:
        raise ValueError(f"{error}; give size=, the side of your images, or features=") from None


def arguments(tau: float, beta: float, effect: EffectLike, impl: Impl) -> dict[str, Any]:
    """Return the loss's arguments, plain numbers as floats; raise for one that cannot be used."""
    if isinstance(tau, Tensor):
        raise TypeError("tau must be a number here; for a tau that learns, call the loss in a method of your own")
    checks.options("mean", impl)
    return {
        "tau": checks.temperature(tau, check=True),
        "beta": checks.share(beta),
        "effect": checks.as_effect(effect),
        "impl": impl,
    }


def pair(views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The strong and the weak view of the same images."""
    if len(views) != 2:
        raise ValueError(f"there are {len(views)} views; the loss is between two views of the same images")
    strong, weak = views
    if len(strong) != len(weak):
        raise ValueError(f"the views have {len(strong)} and {len(weak)} images; row i of both must show the same image")
    return strong, weak
