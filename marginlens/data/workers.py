"""Processes that decode images: they do not run the program again, and they end with their parent.

Imports nothing else of ours: a worker is watched before it imports torch.
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
    """End this worker process as soon as its parent is gone, however that ended: killed, it could tell nobody.

    Called first in a worker. One that is still importing when its parent dies ends here.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextmanager
def without_main() -> Iterator[None]:
    """Within, a process that is started does not run the program again, if it would.

    Spawned processes import the main module: a script that calls this and is not under `if __name__ == "__main__"`
    would begin anew in each of them. So it is out of sight for the milliseconds of a start.
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
    """Return True if the program is a script that does not ask for its own name."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        return False
    try:
        return "__name__" not in Path(path).read_text(errors="replace")
    except OSError:
        return True
