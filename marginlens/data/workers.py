"""Processes that decode images. They do not run the program again, and they end with their parent.

Imports nothing else of ours, because a worker must watch its parent before it imports torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

_spawning = threading.Lock()


def end_with_parent(number: int = 0) -> None:
    """End this worker as soon as its parent is gone, because a killed parent cannot tell its workers.

    Call this first in a worker, so that it also ends during its imports.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextmanager
def without_main() -> Iterator[None]:
    """Start processes inside that do not run the program again.

    Spawned processes import the main module. A script without `if __name__ == "__main__"` would start over in each of
    them. So the main module is hidden for the milliseconds of a start.
    """
    if not _begins_anew():
        yield
        return
    with _spawning:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _begins_anew() -> bool:
    """True if the program is a script that does not check its own name."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return False
    try:
        return "__name__" not in Path(path).read_text(errors="replace")
    except OSError:
        return True
