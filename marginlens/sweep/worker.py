"""`python -m marginlens.sweep.worker`: does one job, which comes as a line of JSON on standard input.

How it ended is one line of JSON on standard output; what it says while it works goes to standard error. The end of
standard input asks it to stop: it comes when the parent wants so, and also when the parent is no longer there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

GRACE = 60.0
"""Seconds that a worker has to write a checkpoint when it was asked to end."""


def main() -> int:
    """Does the job, and returns the exit code."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to standard error
    sys.stdout = sys.stderr = _Unheard(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    request, ended = json.loads(_first_line()), threading.Event()
    threading.Thread(target=_watch, args=(ended,), daemon=True).start()
    signal.signal(signal.SIGTERM, _stop)
    found = _perform(request, ended)
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
        os.write(out, json.dumps(found).encode() + b"\n")
    return int(found["code"])


def _perform(request: dict[str, Any], ended: threading.Event) -> dict[str, Any]:
    """The run's folder, or one line that says why there is none to look at, and an exit code."""
    try:
        from marginlens import __version__
        from marginlens.sweep.job import Job, Where, perform

        if request["version"] != __version__:
            raise ValueError(f"marginlens is {__version__} here, and {request['version']} where the run was planned")

        where, job = Where(**request["where"]).model_dump(), Job(**request["job"])
        _check_data(job.data, where.pop("fingerprints"))
        parts = iter([e.name for e in job.evaluations])

        def between() -> bool:
            """Asked before each evaluation: what is said from here on is of that one."""
            _name_part(next(parts, ""))
            return ended.is_set()

        _name_part("pre-training")
        path = perform(job, where.pop("runs"), ended=between, **where)
        return {"code": 0, "run": str(path), "line": ""}
    except ValueError as error:
        return {"code": getattr(error, "code", 2), "run": "", "line": str(error)}
    except (KeyboardInterrupt, _Stop):
        return {"code": 143, "run": "", "line": "stopped; the same command goes on where it was"}
    except Exception as error:
        if isinstance(code := getattr(error, "code", None), int):  # a run that stopped, and says why
            return {"code": code, "run": "", "line": str(error)}
        traceback.print_exc()
        return {"code": 1, "run": "", "line": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _check_data(names: Sequence[str], fingerprints: Mapping[str, str]) -> None:
    """Refuses data that are not prepared, or are others than the plan's: the run would not be the one asked for.

    Those of the evaluations too, and before hours of pre-training that they would follow.
    """
    from marginlens.data.prepare import open_data

    for name in names:
        if fingerprints.get(name, "") not in ("", open_data(name).fingerprint):
            raise ValueError(
                f"{name} has another content here than where the run was planned; prepare the same on both"
            )


class _Unheard(io.TextIOWrapper):
    """Standard error that may break: a run whose parent is gone has a checkpoint to write, and not to die of a line."""

    part = ""
    """Of the job, which is said before an epoch: those of all parts look alike."""

    def write(self, text: str) -> int:
        with _mute():
            super().write(f"{self.part} {text}" if self.part and text.startswith("epoch ") else text)
        return len(text)

    def flush(self) -> None:
        with _mute():
            super().flush()


def _name_part(name: str) -> None:
    if isinstance(sys.stderr, _Unheard):
        sys.stderr.part = name


@contextlib.contextmanager
def _mute() -> Iterator[None]:
    """From a broken pipe on, what is said goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _Stop(BaseException):
    """A signal outside of pre-training, which takes its signals itself."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


def _first_line() -> bytes:
    """Read byte by byte: what follows the line is for the watcher."""
    held = b""
    while not held.endswith(b"\n"):
        if not (more := os.read(0, 1)):
            sys.exit(2)
        held += more
    return held


def _watch(ended: threading.Event) -> None:
    """Waits for the end of standard input, then stops this process as SIGTERM would; for good after the grace."""
    while os.read(0, 1):
        pass
    ended.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
