"""Which methods may be replayed as a CUDA graph: it takes a step without calling `loss` or `after_step`."""

from __future__ import annotations

from typing import TypeVar

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
    return "" if method in _KNOWN else f"{method.__name__} is not marked by_graph, as docs/methods.md has it"
