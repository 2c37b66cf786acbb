"""Run jobs on this machine, each in a process of its own."""

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
"""blocked: another process has locked the run."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    number: int
    state: Ending
    line: str
    """The reason, unless this command did the job."""
    seconds: float
    run: str = ""
    """Its folder, if it is done."""
    crashed: bool = False
    """True if the process died without an answer."""


class Child:
    """One worker process. `ask` and `kill` may be called at any time, `outcome` once it is free or has ended.

    With `again` the process stays after its job: it is then `free`, and `give` gives it another.
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
        # a session of its own, because the parent passes Ctrl-C on, once
        self.process = subprocess.Popen(WORKER, start_new_session=True, env=os.environ | dict(environment), **pipes)
        self._ends = [self._pipe("stdout"), self._pipe("stderr")]
        self._held = dict.fromkeys(self._ends, b"")
        for end in self._ends:
            os.set_blocking(end, False)
        self.give(number, job, where)

    def give(self, number: int, job: Job, where: Where) -> None:
        """Send a job: the first, or another when the process is free."""
        self.number, self.begin = number, time.monotonic()
        self._answer: dict[str, Any] = {}
        request: dict[str, Any] = {"version": marginlens.__version__, "job": job.model_dump(mode="json")}
        request |= {"where": where.model_dump(mode="json"), "again": self.again}
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and its outcome tells
            os.write(self._pipe("stdin"), json.dumps(request).encode() + b"\n")

    @property
    def ended(self) -> bool:
        """True if the process has ended; some of its lines may still be unread."""
        return self.process.poll() is not None

    @property
    def free(self) -> bool:
        """True if `lines` has read that the job is done, and the process waits for another."""
        return bool(self._answer.get("again")) and not self.asked_at

    def lines(self) -> list[str]:
        """Return the whole lines on standard error since the last call.

        Standard output is read first. The worker answers there after its last line on standard error, so all lines of
        a job are read with its answer, and none is taken for one of the next job.
        """
        for end in self._ends:
            self._held[end] += _available(end)
        answer, error = self._ends
        *whole, rest = self._held[error].split(b"\n")
        if self._held[answer].endswith(b"\n"):
            self._answer, self._held[answer] = _parsed(self._held[answer]), b""
            whole, rest = [*whole, *([rest] if rest else [])], b""  # a last line without a newline
        self._held[error] = rest
        return [line.decode(errors="replace") for line in whole]

    def ask(self, grace: float = GRACE) -> None:
        """Ask the process to end, once; kill it after the grace."""
        now = time.monotonic()
        if not self.asked_at:
            self.asked_at = now
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        elif now - self.asked_at > grace:
            self.kill()

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> int:
        """Kill the process and its children if they are still there; return the exit code."""
        self.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def outcome(self) -> Outcome:
        """Return how the job ended; the process must be free or have ended."""
        exited = 0 if self.free else self.close()
        seconds, found = time.monotonic() - self.begin, self._answer
        if not found:
            return self._silent(exited, seconds)
        state: Ending = "done" if found["code"] == 0 else "failed"
        state = "blocked" if found["code"] == InUse.code else state
        state = "stopped" if found["code"] > 128 and self.asked_at else state
        # the folder tells where it stopped; its own line is meant for a command that runs it alone
        return Outcome(self.number, state, "" if state == "stopped" else found["line"], seconds, found["run"])

    def _silent(self, code: int, seconds: float) -> Outcome:
        """Return the outcome of a process that gave no answer."""
        if self.asked_at:
            return Outcome(self.number, "stopped", "did not end when asked, and was killed", seconds)
        if code >= 0:
            last = self._held[self._ends[1]].decode(errors="replace").strip()
            why = f"its process ended with exit code {code} and said nothing: {last}"
        else:
            name = signal.Signals(-code).name
            memory = ", perhaps by the system because memory ran out" if code == -signal.SIGKILL else ""
            why = f"its process was ended by {name}{memory}; the same command continues from its last checkpoint"
        return Outcome(self.number, "failed", why, seconds, crashed=True)

    def _pipe(self, name: str) -> int:
        pipe = getattr(self.process, name)
        return int(pipe.fileno())

    @property
    def ears(self) -> list[int]:
        """The pipes to wait for."""
        return self._ends


def wait(children: Sequence[Child], seconds: float) -> None:
    """Wait until a child writes a line, at most `seconds`."""
    ready, _, _ = select([end for child in children for end in child.ears], [], [], seconds)
    if ready:
        time.sleep(min(seconds, 0.02))  # lines come in bunches, and a closed pipe is always ready


def _parsed(answer: bytes) -> dict[str, Any]:
    """Parse a worker's answer; {} if it is not JSON."""
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
    """The device as `choose_device` takes it in the worker."""
    environment: dict[str, str]
    index: int = 0
    """The index of its GPU in this process."""


def make_slots(device: str, per_gpu: int = 1, at_once: int = 1) -> list[Slot]:
    """Return the slots: `per_gpu` on each GPU that `device` names, or `at_once` that share the CPU."""
    kind = choose_device(device.partition(":")[0]).type
    if kind == "cpu":
        if per_gpu > 1:
            raise ValueError(f"--per-gpu is {per_gpu}, but this runs on the CPU; give --at-once")
        threads = max(1, torch.get_num_threads() // at_once)
        return [Slot("cpu", {"OMP_NUM_THREADS": str(threads)})] * at_once
    if at_once > 1:
        raise ValueError(f"--at-once is {at_once}, but this runs on GPUs; give --per-gpu")
    count = torch.cuda.device_count()
    index = device.partition(":")[2]
    if index and not (index.isdecimal() and len(index) <= 4 and int(index) < count):
        raise ValueError(f"device {quoted(device)} cannot be used: {count} CUDA devices are here; try auto")
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    gpus = named[:count] or [str(i) for i in range(count)]
    chosen = [int(index)] if index else range(count)
    # the first slot of every GPU comes before the second of any, because few jobs should spread
    return [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpus[i]}, i) for _ in range(per_gpu) for i in chosen]


def device_name(slots: Sequence[Slot]) -> str:
    """Return the device that runs in these slots will record."""
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
    """Run the steps in order, and yield how each ended. No step begins once `ending` is true.

    A slot keeps its worker for the next step, unless its step was not done: it has already compiled kernels and chosen
    algorithms. A step that another process has locked is tried again after the others. Children end with this call.
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
                ended = child.ended  # before its lines are read, so that the last ones are among them
                for line in child.lines():
                    say(f"[{child.number}] {line}")
                if ended or child.free:
                    slot, step = running.pop(child)
                    outcome = child.outcome()
                    free.append((slot, child if child.free and waiting else None))
                    if child.free and not waiting:
                        child.close()
                    if outcome.state == "blocked" and step.number not in held:
                        say(f"[{step.number}] is tried again at the end: {outcome.line}")
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
    """Start a step in the worker that the slot has kept, or in a new one."""
    own = where.model_copy(update={"device": slot.device, "fingerprints": dict(step.fingerprints)})
    if worker is not None and worker.ended:  # killed while it waited
        worker.close()
        worker = None
    if worker is None:
        return Child(step.number, step.left, own, slot.environment, again=True)
    worker.give(step.number, step.left, own)
    return worker


def _meanwhile(step: Step) -> Outcome:
    """Return the outcome of a step that another process has done, or still has locked."""
    if step.state == "cached" and step.run is not None:
        return Outcome(step.number, "done", "by another process", 0.0, str(step.run.path))
    return Outcome(step.number, "blocked", step.why, 0.0)
