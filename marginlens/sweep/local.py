"""Jobs on this machine: one after another, or several at once on each GPU or on the CPU's cores, each in a process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from marginlens.parameters import quoted
from marginlens.sweep.child import Child, Outcome, wait
from marginlens.sweep.job import Where
from marginlens.sweep.plan import Step, look_again
from marginlens.sweep.worker import GRACE
from marginlens.train.model import choose_device
from marginlens.train.record import cpu_name

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
    if step.state == "cached" and step.entry is not None:
        return Outcome(step.number, "done", "by another process", 0.0, str(step.entry.path))
    return Outcome(step.number, "blocked", step.why, 0.0)
