"""The interface between a training loop and a method, and the checks that every method makes of backbone and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from marginlens import checks
from marginlens.checks import EffectLike
from marginlens.effects import PLAIN, Effect, Emphasis, factors
from marginlens.loss import Impl, Rows
from marginlens.modules import Setting, register_effect, settings_of
from marginlens.nets.count import NoTensor, feature_dim
from marginlens.parameters import shortest

__all__ = [
    "PLAIN",
    "EffectLike",
    "Impl",
    "Method",
    "Rows",
    "Setting",
    "arguments",
    "by_graph",
    "check_no_negatives",
    "features_of",
    "module_of",
    "pair",
    "register_effect",
    "settings_of",
    "unmarked",
]
"""Includes the names of the loss's settings that a method's file needs."""


class Method(Protocol):
    """The methods and attributes that a training loop uses. A method is also an `nn.Module`."""

    settings: dict[str, Any]
    """Arguments of the loss: tau, effect, ..."""

    @property
    def backbone(self) -> nn.Module:
        """The encoder that learns, and that is evaluated afterwards."""

    @property
    def student(self) -> nn.ModuleDict:
        """The backbone and the projector that learn."""

    def loss(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch."""

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the first half of `loss`: the student's outputs for the views."""

    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the second half: the targets of the queries. Needs no queries, so it can run beside them."""

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """Return the loss of both halves."""

    def rows(self, views: Sequence[Tensor]) -> Rows:
        """Return the loss's view of each row, without gradients. Batch norms count the batch."""

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        """Move the teacher, if there is one. `momentum` None means the method's own."""


def module_of(method: Method) -> nn.Module:
    """Return the method, typed as the `nn.Module` that it also is."""
    assert isinstance(method, nn.Module)
    return method


M = TypeVar("M", bound=type)
_KNOWN: set[type] = set()


def by_graph(method: M) -> M:
    """Mark a class, but not its subclasses, as safe to replay in a CUDA graph.

    A graph calls `queries`, `keys` and `compare` once, on a copy of the method, and replays their operations. So:

    - `loss` must be `compare(queries(views), keys(views))`.
    - The three must keep no state except buffers that they write in place.
    - `after_step` must only move each parameter of `teacher`, if there is one, towards its namesake in `student`.
    - The effect must be `settings["effect"]`, and the heads must be those of `nets/heads.py`.
    """
    _KNOWN.add(method)
    return method


def unmarked(method: type) -> str:
    """Return why a graph may not replay the method, or "" if it may."""
    return "" if method in _KNOWN else f"{method.__name__} is not marked by_graph (see docs/reference/methods.md)"


def features_of(backbone: nn.Module, features: int | None, size: int) -> int:
    """Return the number of features: `features`, else the backbone's own `features`, else that of a dry run.

    The dry run uses images of `size` px.
    """
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
    except NoTensor:
        raise
    except ValueError as error:
        raise ValueError(f"{error}; give size=, the side of your images, or features=") from None


def arguments(tau: float, beta: float, effect: EffectLike, impl: Impl) -> dict[str, Any]:
    """Return the loss's arguments, plain numbers as floats. Raise for an invalid one."""
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
    """Return the strong and the weak view of the same images."""
    if len(views) != 2:
        raise ValueError(f"got {len(views)} views; the loss needs two views of the same images")
    strong, weak = views
    if len(strong) != len(weak):
        raise ValueError(f"the views have {len(strong)} and {len(weak)} images; row i of both must show the same image")
    return strong, weak


def check_no_negatives(effect: Effect, method: str) -> None:
    """Raise for effects that need negatives, and for s, which is only a learning rate without them."""
    for factor in factors(effect):
        if factor.needs_negatives:
            raise ValueError(
                f"{effect}: {factor.needs_negatives} acts through negatives, and {method} has none; "
                f"{method} takes margin(m1=...) and emphasis(c=...)"
            )
        if isinstance(factor, Emphasis) and shortest(factor.s) != "1":
            raise ValueError(
                f"{effect}: without negatives s multiplies the whole gradient, so it is only a learning rate; "
                f"raise lr instead (curvature, emphasis(c=...), does mean something)"
            )
