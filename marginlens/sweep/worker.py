"""`python -m marginlens.sweep.worker`: run jobs that come as lines of JSON on standard input.

The answer to a job is one line of JSON on standard output. Progress goes to standard error, all of it before the
answer. A request with `again` keeps the process for another job, because a new process on a GPU first compiles kernels
and chooses algorithms. After a job that failed or was stopped, the process ends in any case: its state is unknown. The
end of standard input asks the worker to stop; it comes when the parent wants so, or is gone. The worker then removes a
scratch folder that the parent left.
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
"""Seconds to write a checkpoint after being asked to end."""


def main() -> int:
    """Run jobs while they come, and return the exit code of the last."""
    out = os.dup(1)
    os.dup2(2, 1)  # because standard output is for answers
    sys.stdout = sys.stderr = _Unheard(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # outside of a job, because an answer must not get lost
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
            with contextlib.suppress(BrokenPipeError):  # the parent is gone
                os.write(out, json.dumps(found).encode() + b"\n")
            if not found["again"]:
                break
    finally:
        _discard(folders)
    return code


def _discard(folders: Iterable[Path], *, mine: bool = False) -> None:
    """Remove scratch folders whose parent is gone; a live parent holds their lock."""
    for folder in folders:
        scratch.discard(folder, mine=mine)


def _perform(request: dict[str, Any], ended: threading.Event) -> dict[str, Any]:
    """Run a job until it is done or SIGTERM comes."""
    try:
        with _stoppable(ended):
            return _attempt(request, ended)
    except (KeyboardInterrupt, _Stop):
        return {"code": 143, "run": "", "line": "stopped; the same command continues there"}


def _attempt(request: dict[str, Any], ended: threading.Event) -> dict[str, Any]:
    """Run a job; return its folder and exit code 0, or a line that says why it failed and another code."""
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
            """Name the evaluation that begins, and return True if the job must stop before it."""
            _name_part(next(parts, ""))
            return ended.is_set()

        _name_part("pre-training")
        with torch.random.fork_rng(devices=[]):  # the next job starts with the generator of a new process
            path = perform(job, where, between)
        return {"code": 0, "run": str(path), "line": ""}
    except ValueError as error:
        return {"code": getattr(error, "code", 2), "run": "", "line": str(error)}
    except Exception as error:
        if isinstance(code := getattr(error, "code", None), int):  # a `Stopped`, which has a line for the user
            return {"code": code, "run": "", "line": str(error)}
        traceback.print_exc()
        return {"code": 1, "run": "", "line": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _let_go() -> bool:
    """Free the memory of a job, also on the GPU; return True if this process can run another."""
    gc.collect()  # cycles, and with them captured graphs, which hold memory
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one per stream, and every job makes new streams
        torch.cuda.empty_cache()
    except RuntimeError:  # the job itself is done
        traceback.print_exc()
        return False
    return True


def _check_data(names: Sequence[str], fingerprints: Mapping[str, str]) -> None:
    """Raise if a data set of the job or its evaluations is missing or differs from the plan's."""
    from marginlens.data.prepare import open_data

    for name in names:
        if fingerprints.get(name, "") not in ("", open_data(name).fingerprint):
            raise ValueError(
                f"{name} differs from the data where the run was planned; prepare the same data on both machines"
            )


class _Unheard(io.TextIOWrapper):
    """Standard error that may break: a run whose parent is gone must still write its checkpoint."""

    part = ""
    """The part of the job, written before its epochs: lines of all parts look alike."""

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
    """A signal outside of pre-training, which handles its own signals."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


@contextlib.contextmanager
def _stoppable(ended: threading.Event) -> Iterator[None]:
    """Let SIGTERM stop the block, also if it came just before."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        if ended.is_set():  # the event is set before the signal, so at least one is observed
            raise _Stop
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(requests: SimpleQueue[bytes], ended: threading.Event, folders: set[Path]) -> None:
    """Pass requests on. At the end of standard input, stop this process by SIGTERM; after the grace, exit."""
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
