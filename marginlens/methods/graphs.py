"""Which methods may be replayed as a CUDA graph: it takes a step without calling `loss` or `after_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_KNOWN: set[Callable[..., Any]] = set()


def by_graph(function: F) -> F:
    """Marks a `loss` that is `compare(queries(views), keys(views))`, or an `after_step` that moves `teacher`, if any.

    A graph calls these three, beside each other, and moves each parameter of `teacher` towards the one of that name in
    `student`; it reads `settings["effect"]`. A method with either function unmarked runs one operation after another.
    """
    _KNOWN.add(function)
    return function


def of_its_own(method: type) -> str:
    """Why a graph would not do what the method does, or nothing: a subclass may have its own."""
    names = [name for name in ("loss", "after_step") if getattr(method, name) not in _KNOWN]
    return f"{method.__name__} has its own {' and '.join(names)}, which a graph does not call" if names else ""
