"""Run jobs on a Ray cluster: a task for each, which starts the same worker process as on this machine.

A run that was lost with its node is retried elsewhere. With `--shared`, runs are in storage that every node sees, and a
lost run continues from its checkpoint. Otherwise a node works in a temporary folder, and sends the run's records back
without its weights.
"""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from marginlens import output
from marginlens.files import expanded
from marginlens.parameters import quoted
from marginlens.runs.run import open_run
from marginlens.runs.store import add, records
from marginlens.runs.work import InUse
from marginlens.sweep import scratch
from marginlens.sweep.job import Executor, Job, Where, note_crash
from marginlens.sweep.plan import Step
from marginlens.sweep.pool import Child, Outcome, wait
from marginlens.sweep.worker import GRACE

_POLL = 0.2
_REACH = 5.0
"""Seconds to wait for the cluster's port."""
_ENOUGH = 1000
"""Runs at once on a node if a run asks for no GPUs and no cores."""
_PAUSE = 5.0
"""Seconds between two tries at a run that another process has locked."""


@dataclass(frozen=True)
class Wide:
    """The size of a cluster: runs at once, and GPUs per run."""

    slots: int
    gpus: float


def describe(place: Executor) -> Wide:
    """Connect to the cluster, and return its size."""
    if ":" in place.device:
        raise ValueError(f"--device {place.device} is for this machine; on a cluster give auto, cpu or cuda")
    nodes = [node["Resources"] for node in _connected(place.address).nodes() if node["Alive"]]
    auto = 1.0 if any(has.get("GPU") for has in nodes) and place.device != "cpu" else 0.0
    gpus = place.gpus_per_run or auto
    if gpus > 1 and gpus % 1:
        raise ValueError(f"--gpus-per-run is {gpus:g}; above one it must be a whole number")
    slots = sum(_room(has, gpus, place.cpus_per_run) for has in nodes)
    if not slots:
        most = max((has.get("GPU", 0.0), has.get("CPU", 0.0)) for has in nodes) if nodes else (0, 0)
        raise ValueError(
            f"a run wants {gpus:g} GPUs and {place.cpus_per_run:g} cores of one node, and none of the cluster's "
            f"{len(nodes)} has as many, the largest {most[0]:g} and {most[1]:g}; lower --gpus-per-run or --cpus-per-run"
        )
    return Wide(slots, gpus)


def _room(has: Mapping[str, float], gpus: float, cores: float) -> int:
    """Count the runs that fit on a node at once; a part of a GPU comes from one GPU."""
    room = [_ENOUGH]
    if gpus:
        on_each = int(1 / gpus + 1e-6)
        room.append(int(has.get("GPU", 0.0)) * on_each if on_each else int(has.get("GPU", 0.0) / gpus))
    if cores:
        room.append(int(has.get("CPU", 0.0) / cores + 1e-6))
    return min(room)


def run_ray(
    steps: Sequence[Step], place: Executor, gpus: float, ending: Callable[[], bool], say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Run the steps on the cluster that `describe` connected to, and yield how each ended, in any order."""
    scratch.sweep()
    ray = _ray()
    asked = {"num_cpus": place.cpus_per_run, "num_gpus": gpus, "max_retries": 0, "max_calls": 1}
    task = ray.remote(**asked)(remote)
    where = place.where.model_dump(mode="json") | {"runs": str(expanded(place.runs).absolute())}

    def submit(step: Step) -> Any:
        own = where | {"fingerprints": dict(step.fingerprints)}
        return task.remote(step.number, step.left.model_dump(mode="json"), own, place.shared)

    pending: dict[Any, tuple[Step, int]] = {submit(step): (step, 0) for step in steps}
    try:
        while pending and not ending():
            ready, _ = ray.wait(list(pending), timeout=_POLL)
            for ref in ready:
                step, tries = pending.pop(ref)
                outcome = _result(ray, ref, step, place)
                if outcome is None and tries < place.retries:
                    say(f"[{step.number}] was lost with its node; retry ({tries + 1} of {place.retries})")
                    pending[submit(step)] = step, tries + 1
                    continue
                yield outcome or Outcome(step.number, "failed", f"was lost with its node {tries + 1} times", 0.0)
        yield from _stop(ray, pending, place)
    finally:
        ray.shutdown()


def remote(number: int, job: dict[str, Any], where: dict[str, Any], shared: bool) -> dict[str, Any]:
    """Run a job on a node in a process of its own; return its outcome, and its records if they must be sent back."""
    if shared:
        return {"outcome": asdict(_patient(number, Job(**job), Where(**where))), "name": "", "records": {}}
    with scratch.make() as folder:
        child = Child(number, Job(**job), Where(**where | {"runs": str(folder)}), {})
        outcome = _listen(child)
        found = [path for path in folder.iterdir() if (path / "config.json").is_file()]
        if found and outcome.crashed:
            note_crash(open_run(found[0]), outcome.line)
        kept = {"name": found[0].name, "records": records(found[0])} if found else {"name": "", "records": {}}
        return {"outcome": asdict(outcome), **kept}


def _patient(number: int, job: Job, where: Where) -> Outcome:
    """Run a job; retry while another process has locked its run, which may be a lost one that has not ended yet."""
    end = time.monotonic() + GRACE
    while True:
        outcome = _listen(Child(number, job, where, {}))
        if outcome.state != "blocked" or time.monotonic() > end:
            return outcome
        time.sleep(_PAUSE)


def _listen(child: Child) -> Outcome:
    """Pass on the worker's lines until it ends; ask it to end if the task is cancelled."""
    cancelled = False
    try:
        while True:
            try:
                ended = child.ended
                for line in child.lines():
                    output.say(f"[{child.number}] {line}", error=True, flush=True)
                if ended:
                    return child.outcome()
                if cancelled:
                    child.ask()
                wait([child], _POLL)
            except KeyboardInterrupt:  # Ray cancels a task by this
                cancelled = True
    finally:
        child.kill()


def _result(ray: Any, ref: Any, step: Step, place: Executor) -> Outcome | None:
    """Return how a task ended; None if it was lost with its node."""
    errors = ray.exceptions
    try:
        found = ray.get(ref)
    except errors.TaskCancelledError:
        return Outcome(step.number, "stopped", "stopped on the cluster", 0.0)
    except errors.RayTaskError as error:
        return Outcome(step.number, "failed", _line(error.cause or error, -1), 0.0)
    except errors.RayError:
        return None
    outcome = Outcome(**found["outcome"])
    return outcome if place.shared else _home(outcome, found["name"], found["records"], place)


def _home(outcome: Outcome, name: str, content: dict[str, bytes], place: Executor) -> Outcome:
    """Put a node's records into the store here, also a complete pre-training whose evaluations failed."""
    if not content.keys() & {"result.json", "failure.json"}:
        return outcome
    end = time.monotonic() + GRACE
    while True:
        try:
            path = add(content, Path(place.runs), name)
            return replace(outcome, run=str(path) if outcome.state == "done" else "")
        except InUse as error:
            if time.monotonic() > end:
                return replace(outcome, state="blocked", line=str(error), run="")
            time.sleep(_POLL)
        except ValueError as error:
            lost = f"{outcome.line}; and " if outcome.line else ""
            return replace(outcome, state="failed", line=f"{lost}{error}", run="")


def _stop(ray: Any, pending: dict[Any, tuple[Step, int]], place: Executor) -> Iterator[Outcome]:
    """Cancel the rest, and wait for running jobs to write their checkpoints."""
    for ref in pending:
        ray.cancel(ref)
    left = list(pending)
    ready, _ = ray.wait(left, num_returns=len(left), timeout=GRACE) if left else ([], [])
    for ref in ready:
        step, _ = pending[ref]
        outcome = _result(ray, ref, step, place)
        if outcome is not None and (outcome.state != "stopped" or outcome.seconds):  # otherwise the job had not begun
            yield outcome


def _connected(address: str) -> Any:
    ray = _ray()
    if ray.is_initialized():
        return ray
    found = _address(address)
    hint = "start one with: ray start --head, or give --address HOST:PORT"
    if found != "auto" and not _reachable(found):
        raise ValueError(f"there is no Ray cluster at {found}; {hint}")
    try:
        ray.init(address=found, logging_level="ERROR")
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise ValueError(f"there is no Ray cluster at {found} ({_line(error, 0)}); {hint}") from None
    return ray


def _address(asked: str) -> str:
    """Resolve `auto`: the environment's address, else the last that Ray noted on this machine."""
    if asked != "auto":
        return asked
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    named = os.environ.get("RAY_ADDRESS") or (noted.read_text().strip() if noted.is_file() else "")
    return named or "auto"


def _reachable(address: str) -> bool:
    """True if something listens there: Ray itself would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--address is {quoted(address)}; it must be auto, HOST:PORT or ray://HOST:PORT")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH):
            return True
    except (OSError, OverflowError, ValueError):  # also a port of thousands of digits, or a host that DNS cannot spell
        return False


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ValueError("ray is not installed; run: pip install 'marginlens[ray]'") from None


def _line(error: Exception, which: int) -> str:
    """Return a line of an error's message, or the error's name if it has none."""
    return str(error).strip().splitlines()[which][:200] if str(error).strip() else type(error).__name__
