"""Errors that end a command with one line, and an exit code for each way in which a run ends early."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


class DataError(ValueError):
    """Report data on disk that the user can repair: one line that says what happened, and what to do."""


class Stopped(Exception):  # noqa: N818  because it is not always an error
    """Report in one line that a run ended early."""

    def __init__(self, line: str, code: int = 1) -> None:
        super().__init__(line)
        self.code = code


@dataclass
class Asked:
    """The signal that asked the run to end, if any, and the exit code for it."""

    signal: str = ""
    code: int = 0


@contextmanager
def signals() -> Iterator[Asked]:
    """Note SIGTERM and Ctrl-C, so that the run can finish a step and save; a second signal interrupts."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.signal:
            raise KeyboardInterrupt
        asked.signal, asked.code = signal.Signals(number).name, 128 + number

    before: dict[Any, Any] = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def disk(path: Path, kept: str, then: str = "go on with --resume") -> Iterator[None]:
    """Report a failed write of a run in one line, with the last thing that is safe."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = f"no space left to write {path}" if full else f"cannot write {path} ({error.strerror or error})"
        do = "free some space" if full else "repair it"
        raise Stopped(f"{what}; {kept}. {do}, then {then}") from None


@contextmanager
def memory(lower: str) -> Iterator[None]:
    """Report missing memory in one line, with the settings to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Stopped(f"out of GPU memory; lower {lower}") from error
    except MemoryError as error:
        raise Stopped(f"out of main memory; lower {lower}") from error
    except RuntimeError as error:
        if isinstance(error.__context__, torch.OutOfMemoryError):  # because a failed capture of a graph hides it
            raise Stopped(f"out of GPU memory; lower {lower}") from error
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        raise Stopped(f"out of main memory; lower {lower}") from error
