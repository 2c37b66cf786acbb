"""What a training loop asks of a method, and what every method checks of its backbone and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from marginlens import checks
from marginlens.checks import EffectLike
from marginlens.effects import PLAIN, Effect, Emphasis, factors
from marginlens.loss import Impl, Rows
from marginlens.modules import Setting, register_effect, settings_of
from marginlens.nets.count import feature_dim
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
"""Besides what is here, what the file of a method needs of the loss's own settings."""


class Method(Protocol):
    """What a training loop asks of a method, which is an `nn.Module` besides."""

    settings: dict[str, Any]
    """The loss's arguments: tau, effect, ..."""

    @property
    def backbone(self) -> nn.Module:
        """The encoder that learns, and that is evaluated afterwards."""

    @property
    def student(self) -> nn.ModuleDict:
        """The backbone and the projector that learn."""

    def loss(self, views: Sequence[Tensor]) -> Tensor:
        """The loss of two views of a batch."""

    def queries(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The first half of `loss`: what the student makes of the views."""

    def keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The second half: what the queries are compared with; needs nothing of the first, so it can run beside it."""

    def compare(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """The loss of both halves."""

    def rows(self, views: Sequence[Tensor]) -> Rows:
        """What the loss sees of each row, without gradient; batch norms count the batch."""

    def after_step(self, momentum: float | Tensor | None = None) -> None:
        """Moves the teacher, if there is one; `momentum` None is the method's own."""


def module_of(method: Method) -> nn.Module:
    """Return the method as the `nn.Module` that it is besides."""
    assert isinstance(method, nn.Module)
    return method


M = TypeVar("M", bound=type)
_KNOWN: set[type] = set()


def by_graph(method: M) -> M:
    """Marks a class, and none of its subclasses, with which a graph takes the same steps as its functions do.

    A graph calls `queries`, `keys` and `compare` once, on a copy of the method, and replays what they did: `loss` is
    `compare(queries(views), keys(views))`, and the three keep nothing but what they write into buffers in place. It
    moves each parameter of `teacher`, if there is one, towards that of its name in `student`: `after_step` does just
    that. It reads `settings["effect"]`. The heads are those of `nets/heads.py`.
    """
    _KNOWN.add(method)
    return method


def unmarked(method: type) -> str:
    """Why a graph may not do what the method does, or nothing."""
    return "" if method in _KNOWN else f"{method.__name__} is not marked by_graph, as docs/reference/methods.md has it"


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


def check_no_negatives(effect: Effect, method: str) -> None:
    """Refuse what means nothing without negatives, and s, which is only a learning rate without them."""
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
