"""`python -m marginlens.sweep.worker`: does jobs, each of which comes as a line of JSON on standard input.

How a job ended is one line of JSON on standard output; what is said while it is done goes to standard error, all of it
before that line. A request that says `again` keeps the process for another job: on a GPU it is long before a new one
has compiled kernels and chosen algorithms. Not after a job that failed or was stopped: nobody knows what that left
behind. The end of standard input asks it to stop: it comes when the parent wants so, and also when the parent is no
longer there. A scratch folder that the parent left is then removed, since nobody will read it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

import torch

from marginlens.output import mute
from marginlens.sweep import scratch

GRACE = 60.0
"""Seconds that a worker has to write a checkpoint when it was asked to end."""


def main() -> int:
    """Does jobs while they come, and returns the last one's exit code."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to standard error
    sys.stdout = sys.stderr = _Unheard(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outside of a job: an answer is not to be lost
    requests: SimpleQueue[bytes] = SimpleQueue()
    ended, code = threading.Event(), 2
    folders: set[Path] = set()
    threading.Thread(target=_watch, args=(requests, ended, folders), daemon=True).start()
    try:
        while line := requests.get():
            request = json.loads(line)
            folders.add(folder := Path(request["where"]["runs"]))
            with scratch.used(folder):
                found = _perform(request, ended)
            code = int(found["code"])
            found["again"] = bool(request.get("again")) and not code and _let_go()
            sys.stderr.flush()
            with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
                os.write(out, json.dumps(found).encode() + b"\n")
            if not found["again"]:
                break
    finally:
        _discard(folders)
    return code


def _discard(folders: Iterable[Path], *, mine: bool = False) -> None:
    """Remove scratch folders whose parent is gone; one that lives holds their lock, and reads the records."""
    for folder in folders:
        scratch.discard(folder, mine=mine)


def _perform(request: dict[str, Any], ended: threading.Event) -> dict[str, Any]:
    """Does a job, or as much of it as SIGTERM lets it."""
    try:
        with _stoppable(ended):
            return _attempt(request, ended)
    except (KeyboardInterrupt, _Stop):
        return {"code": 143, "run": "", "line": "stopped; the same command goes on where it was"}


def _attempt(request: dict[str, Any], ended: threading.Event) -> dict[str, Any]:
    """The run's folder, or one line that says why there is none to look at, and an exit code."""
    _name_part("")
    try:
        from marginlens import __version__
        from marginlens.sweep.job import Job, Where, perform

        if request["version"] != __version__:
            raise ValueError(f"marginlens is {__version__} here, and {request['version']} where the run was planned")

        where, job = Where(**request["where"]), Job(**request["job"])
        _check_data(job.data, where.fingerprints)
        parts = iter([e.name for e in job.evaluations])

        def between() -> bool:
            """Asked before each evaluation: what is said from here on is of that one."""
            _name_part(next(parts, ""))
            return ended.is_set()

        _name_part("pre-training")
        with torch.random.fork_rng(devices=[]):  # the next job finds the generator as a new process does
            path = perform(job, where, between)
        return {"code": 0, "run": str(path), "line": ""}
    except ValueError as error:
        return {"code": getattr(error, "code", 2), "run": "", "line": str(error)}
    except Exception as error:
        if isinstance(code := getattr(error, "code", None), int):  # a run that stopped, and says why
            return {"code": code, "run": "", "line": str(error)}
        traceback.print_exc()
        return {"code": 1, "run": "", "line": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _let_go() -> bool:
    """Frees what the job held, also of the GPU; whether this process can do another."""
    gc.collect()  # what refers to itself, and with it captured graphs, which hold memory of their own
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was used, and every job makes new streams
        torch.cuda.empty_cache()
    except RuntimeError:  # the job is done, whatever came after it
        traceback.print_exc()
        return False
    return True


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
        with mute(self):
            super().write(f"{self.part} {text}" if self.part and text.startswith("epoch ") else text)
        return len(text)

    def flush(self) -> None:
        with mute(self):
            super().flush()


def _name_part(name: str) -> None:
    if isinstance(sys.stderr, _Unheard):
        sys.stderr.part = name


class _Stop(BaseException):
    """A signal outside of pre-training, which takes its signals itself."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


@contextlib.contextmanager
def _stoppable(ended: threading.Event) -> Iterator[None]:
    """SIGTERM stops what is done in here, and one that came too early for that does, too."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        if ended.is_set():  # which is said before the signal: one of both is seen
            raise _Stop
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(requests: SimpleQueue[bytes], ended: threading.Event, folders: set[Path]) -> None:
    """Passes on what is asked for. At its end stops this process as SIGTERM would; for good after the grace."""
    with open(0, "rb", buffering=0, closefd=False) as asked:
        for line in asked:
            requests.put(line)
    ended.set()
    requests.put(b"")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    _discard(list(folders), mine=True)
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
