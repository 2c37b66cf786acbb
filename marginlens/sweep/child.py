"""A worker process as its parent sees it: started, listened to, asked to end, and killed if it does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from select import select
from typing import Any, Literal

import marginlens
from marginlens.sweep.job import Job, Where
from marginlens.sweep.worker import GRACE
from marginlens.train.record import InUse

WORKER = (sys.executable, "-m", "marginlens.sweep.worker")


Ending = Literal["done", "failed", "stopped", "blocked"]
"""blocked: another process holds the run."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    number: int
    state: Ending
    line: str
    """Why, where it is not done by us."""
    seconds: float
    run: str = ""
    """Its folder, where it is done."""
    crashed: bool = False
    """Whether it could say nothing itself."""


class Child:
    """One worker process. `ask` and `kill` may come at any time; `outcome` is there when it has ended.

    With `again` it does not end when its job is done: it is then `free`, has an `outcome`, and can be given another.
    """

    def __init__(
        self,
        number: int,
        job: Job,
        where: Where,
        environment: Mapping[str, str],
        again: bool = False,
    ) -> None:
        self.again, self.asked_at = again, 0.0
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # a session of its own: Ctrl-C in the terminal is for the parent, which passes it on once
        self.process = subprocess.Popen(WORKER, start_new_session=True, env=os.environ | dict(environment), **pipes)
        self._ends = [self._pipe("stdout"), self._pipe("stderr")]
        self._held = dict.fromkeys(self._ends, b"")
        for end in self._ends:
            os.set_blocking(end, False)
        self.give(number, job, where)

    def give(self, number: int, job: Job, where: Where) -> None:
        """Has it do a job: its first, or another when it is free."""
        self.number, self.begin = number, time.monotonic()
        self._answer: dict[str, Any] = {}
        request: dict[str, Any] = {"version": marginlens.__version__, "job": job.model_dump(mode="json")}
        request |= {"where": where.model_dump(mode="json"), "again": self.again}
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its outcome says so
            os.write(self._pipe("stdin"), json.dumps(request).encode() + b"\n")

    @property
    def ended(self) -> bool:
        """Whether it is no longer there; what it said before may still be unheard."""
        return self.process.poll() is not None

    @property
    def free(self) -> bool:
        """Whether it has done its job, as `lines` has heard, and waits for another."""
        return bool(self._answer.get("again")) and not self.asked_at

    def lines(self) -> list[str]:
        """What it has said on standard error since the last time, in whole lines.

        Standard output is read first. The worker answers there when all that it had to say of its job is in the other
        pipe, so whoever has read the answer finds the rest there, and no line is taken for one of the next job.
        """
        for end in self._ends:
            self._held[end] += _available(end)
        answer, error = self._ends
        *whole, rest = self._held[error].split(b"\n")
        if self._held[answer].endswith(b"\n"):
            self._answer, self._held[answer] = _parsed(self._held[answer]), b""
            whole, rest = [*whole, *([rest] if rest else [])], b""  # a last line that it did not end
        self._held[error] = rest
        return [line.decode(errors="replace") for line in whole]

    def ask(self, grace: float = GRACE) -> None:
        """Asks it to end, once; kills it when it has not after the grace."""
        now = time.monotonic()
        if not self.asked_at:
            self.asked_at = now
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        elif now - self.asked_at > grace:
            self.kill()

    def kill(self) -> None:
        """Ends it and what it started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> int:
        """Ends it, if it has not ended, and what it started and left; its exit code."""
        self.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def outcome(self) -> Outcome:
        """How its job ended, once it is free or has ended."""
        exited = 0 if self.free else self.close()
        seconds, found = time.monotonic() - self.begin, self._answer
        if not found:
            return self._silent(exited, seconds)
        state: Ending = "done" if found["code"] == 0 else "failed"
        state = "blocked" if found["code"] == InUse.code else state
        state = "stopped" if found["code"] > 128 and self.asked_at else state
        # where it stopped is in its folder; what it says itself is for whoever runs it alone
        return Outcome(self.number, state, "" if state == "stopped" else found["line"], seconds, found["run"])

    def _silent(self, code: int, seconds: float) -> Outcome:
        """Of one that was killed, or never came to do its job."""
        if self.asked_at:
            return Outcome(self.number, "stopped", "did not end when it was asked to, and was killed", seconds)
        if code >= 0:
            last = self._held[self._ends[1]].decode(errors="replace").strip()
            why = f"its process ended with exit code {code} and said nothing: {last}"
        else:
            name = signal.Signals(-code).name
            memory = ", perhaps by the system for want of memory" if code == -signal.SIGKILL else ""
            why = f"its process was ended by {name}{memory}; the same command goes on from its last checkpoint"
        return Outcome(self.number, "failed", why, seconds, crashed=True)

    def _pipe(self, name: str) -> int:
        pipe = getattr(self.process, name)
        return int(pipe.fileno())

    @property
    def ears(self) -> list[int]:
        """What to wait for."""
        return self._ends


def wait(children: Sequence[Child], seconds: float) -> None:
    """Until one of them says something, at most so long."""
    ready, _, _ = select([end for child in children for end in child.ears], [], [], seconds)
    if ready:
        time.sleep(min(seconds, 0.02))  # lines come in bunches, and one that has closed its pipes is always ready


def _parsed(answer: bytes) -> dict[str, Any]:
    """What a worker answered, or nothing, where that is no answer."""
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {}
    return found


def _available(end: int) -> bytes:
    held = b""
    while True:
        try:
            more = os.read(end, 1 << 16)
        except BlockingIOError:
            return held
        if not more:
            return held
        held += more
