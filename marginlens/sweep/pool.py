"""Jobs on this machine, each in a process of its own: started, listened to, asked to end, killed if it does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from select import select
from typing import Any, Literal

import torch

import marginlens
from marginlens.devices import choose_device
from marginlens.parameters import quoted
from marginlens.runs.work import InUse, cpu_name
from marginlens.sweep.job import Job, Where
from marginlens.sweep.plan import Step, look_again
from marginlens.sweep.worker import GRACE

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


_POLL = 0.2


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time."""

    device: str
    """As `choose_device` takes it, inside the worker."""
    environment: dict[str, str]
    index: int = 0
    """Of its GPU, as this process counts them."""


def make_slots(device: str, per_gpu: int = 1, at_once: int = 1) -> list[Slot]:
    """Places on the GPUs that `device` names, so many on each, or on the CPU, which they share."""
    kind = choose_device(device.partition(":")[0]).type
    if kind == "cpu":
        if per_gpu > 1:
            raise ValueError(f"--per-gpu is {per_gpu}, and this runs on the CPU; give --at-once")
        threads = max(1, torch.get_num_threads() // at_once)
        return [Slot("cpu", {"OMP_NUM_THREADS": str(threads)})] * at_once
    if at_once > 1:
        raise ValueError(f"--at-once is {at_once}, which is for the CPU, and this runs on GPUs; give --per-gpu")
    count = torch.cuda.device_count()
    index = device.partition(":")[2]
    if index and not (index.isdecimal() and len(index) <= 4 and int(index) < count):
        raise ValueError(f"device {quoted(device)} cannot be used: {count} CUDA devices are here; try auto")
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    gpus = named[:count] or [str(i) for i in range(count)]
    chosen = [int(index)] if index else range(count)
    # GPU by GPU, so that a few jobs spread over all of them
    return [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpus[i]}, i) for _ in range(per_gpu) for i in chosen]


def device_name(slots: Sequence[Slot]) -> str:
    """What runs in these slots will record as their device."""
    if slots[0].device == "cpu":
        return cpu_name(slots[0].environment["OMP_NUM_THREADS"])
    return torch.cuda.get_device_name(slots[0].index)


def run_local(
    steps: Sequence[Step],
    where: Where,
    slots: Sequence[Slot],
    ending: Callable[[], bool],
    say: Callable[[str], None],
    grace: float = GRACE,
) -> Iterator[Outcome]:
    """Does the steps in their order, and yields how each ended; those that were not begun when `ending` are left.

    A slot keeps its worker, which has started up and found the fastest algorithms, for the next step; unless its step
    ended in any way but done. A step that another process holds is looked at again when the others have ended. Whatever
    ends this, its children end with it.
    """
    waiting, held = deque(steps), set[int]()
    free: list[tuple[Slot, Child | None]] = [(slot, None) for slot in slots]
    running: dict[Child, tuple[Slot, Step]] = {}
    try:
        while running or (waiting and not ending()):
            while waiting and free and not ending():
                if waiting[0].number in held and any(step.number not in held for _, step in running.values()):
                    break
                step = waiting.popleft()
                if step.number in held:
                    step = look_again(step, where.runs)
                    if not step.due:
                        yield _meanwhile(step)
                        continue
                slot, worker = free.pop(0)
                say(f"[{step.number}] {step.name}")
                running[_begun(step, where, slot, worker)] = slot, step
            if ending():
                for child in running:
                    child.ask(grace)
            for child in list(running):
                ended = child.ended  # asked before its lines are read: its last ones are among them
                for line in child.lines():
                    say(f"[{child.number}] {line}")
                if ended or child.free:
                    slot, step = running.pop(child)
                    outcome = child.outcome()
                    free.append((slot, child if child.free and waiting else None))
                    if child.free and not waiting:
                        child.close()
                    if outcome.state == "blocked" and step.number not in held:
                        say(f"[{step.number}] comes last: {outcome.line}")
                        held.add(step.number)
                        waiting.append(step)
                    else:
                        yield outcome
            if running:
                wait(list(running), _POLL)
    finally:
        for child in [*running, *(worker for _, worker in free if worker is not None)]:
            child.close()


def _begun(step: Step, where: Where, slot: Slot, worker: Child | None) -> Child:
    """The step's child: the worker that the slot has kept, or a new one."""
    own = where.model_copy(update={"device": slot.device, "fingerprints": dict(step.fingerprints)})
    if worker is not None and worker.ended:  # killed while it waited
        worker.close()
        worker = None
    if worker is None:
        return Child(step.number, step.left, own, slot.environment, again=True)
    worker.give(step.number, step.left, own)
    return worker


def _meanwhile(step: Step) -> Outcome:
    """Of a step that another process held: it has done it, or it still holds it."""
    if step.state == "cached" and step.run is not None:
        return Outcome(step.number, "done", "by another process", 0.0, str(step.run.path))
    return Outcome(step.number, "blocked", step.why, 0.0)
