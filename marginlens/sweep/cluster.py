"""Jobs on a Ray cluster: a task for each, which runs the same worker process as this machine does.

A run that was lost with its node is begun again elsewhere. With storage that all nodes see (`--shared`) runs lie there,
weights and all, and one that was lost goes on from its checkpoint. Otherwise a node works in a folder of its own, which
is gone when the run is done: its records come home, its weights do not.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marginlens.runs.store import add, records
from marginlens.sweep.child import Child, Outcome, wait
from marginlens.sweep.job import Job, Where
from marginlens.sweep.places import Executor
from marginlens.sweep.plan import Step
from marginlens.sweep.worker import GRACE

_POLL = 0.2
_REACH = 5.0
"""Seconds to wait for a cluster's port."""
_SCRATCH, _HELD = "marginlens-run-", ".held"


@dataclass(frozen=True)
class Wide:
    """A cluster: the name of its devices, how many runs it does at once, GPUs of each."""

    device: str
    slots: int
    gpus: float


def describe(place: Executor) -> Wide:
    """Connects to the cluster, and says how much of it there is."""
    if ":" in place.device:
        raise ValueError(f"--device {place.device} is for this machine; on a cluster give auto, cpu or cuda")
    ray = _connected(place.address)
    has = ray.cluster_resources()
    auto = 1.0 if has.get("GPU") and place.device != "cpu" else 0.0
    gpus = place.gpus_per_run or auto
    room = [int(has.get(kind, 0.0) / asked) for kind, asked in (("GPU", gpus), ("CPU", place.cpus_per_run)) if asked]
    if room and not min(room):
        raise ValueError(
            f"a run wants {gpus:g} GPUs and {place.cpus_per_run:g} cores, and the cluster has {has.get('GPU', 0):g} "
            f"and {has.get('CPU', 0):g}; lower --gpus-per-run or --cpus-per-run"
        )
    return Wide("", min(room, default=1), gpus)


def run_ray(
    steps: Sequence[Step], place: Executor, gpus: float, ending: Callable[[], bool], say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Does the steps on the cluster that `describe` connected to, and yields how each ended, in any order."""
    ray = _ray()
    asked = {"num_cpus": place.cpus_per_run, "num_gpus": gpus, "max_retries": 0, "max_calls": 1}
    task = ray.remote(**asked)(remote)
    where = place.where.model_dump(mode="json") | {"runs": str(Path(place.runs).expanduser().absolute())}

    def submit(step: Step) -> Any:
        own = where | {"fingerprint": step.fingerprint}
        return task.remote(step.number, step.left.model_dump(mode="json"), own, place.shared)

    pending: dict[Any, tuple[Step, int]] = {submit(step): (step, 0) for step in steps}
    try:
        while pending and not ending():
            ready, _ = ray.wait(list(pending), timeout=_POLL)
            for ref in ready:
                step, tries = pending.pop(ref)
                outcome = _result(ray, ref, step, place)
                if outcome is None and tries < place.retries:
                    say(f"[{step.number}] was lost with its node; begun again ({tries + 1} of {place.retries})")
                    pending[submit(step)] = step, tries + 1
                    continue
                yield outcome or Outcome(step.number, "failed", f"was lost with its node {tries + 1} times", 0.0)
        yield from _stop(ray, pending, place)
    finally:
        ray.shutdown()


def remote(number: int, job: dict[str, Any], where: dict[str, Any], shared: bool) -> dict[str, Any]:
    """What a node does: the job in a process of its own, and the run's records, where they must be sent."""
    if shared:
        return {"outcome": asdict(_listen(Child(number, Job(**job), Where(**where), {}))), "name": "", "records": {}}
    with _scratch() as folder:
        child = Child(number, Job(**job), Where(**where | {"runs": str(folder)}), {})
        outcome = _listen(child)
        found = [path for path in folder.iterdir() if (path / "config.json").is_file()]
        kept = {"name": found[0].name, "records": records(found[0])} if found else {"name": "", "records": {}}
        return {"outcome": asdict(outcome), **kept}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for one run on a node, locked while it is used; those that lost runs left here are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*/{_HELD}"):
        with suppress(OSError), left.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        with (folder / _HELD).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _listen(child: Child) -> Outcome:
    """Passes on what the worker says until it ends; a cancelled task asks it to."""
    cancelled = False
    try:
        while True:
            try:
                ended = child.ended
                for line in child.lines():
                    print(f"[{child.number}] {line}", file=sys.stderr, flush=True)
                if ended:
                    return child.outcome()
                if cancelled:
                    child.ask()
                wait([child], _POLL)
            except KeyboardInterrupt:  # what Ray cancels a task with
                cancelled = True
    finally:
        child.kill()


def _result(ray: Any, ref: Any, step: Step, place: Executor) -> Outcome | None:
    """How a task ended; None if it was lost with its node."""
    errors = ray.exceptions
    try:
        found = ray.get(ref)
    except errors.TaskCancelledError:
        return Outcome(step.number, "stopped", "stopped on the cluster", 0.0)
    except errors.RayTaskError as error:
        return Outcome(step.number, "failed", str(error.cause or error).strip().splitlines()[-1], 0.0)
    except errors.RayError:
        return None
    outcome = Outcome(**found["outcome"])
    return outcome if place.shared else _home(outcome, found["name"], found["records"], place)


def _home(outcome: Outcome, name: str, content: dict[str, bytes], place: Executor) -> Outcome:
    """Puts what a node measured in the store here."""
    runs = Path(place.runs)
    if outcome.state == "done":
        try:
            path = add(content, runs, name)
        except ValueError as error:
            return Outcome(outcome.number, "failed", str(error), outcome.seconds)
        return Outcome(outcome.number, "done", "", outcome.seconds, str(path))
    if "failure.json" in content:
        with suppress(ValueError):
            add(content, runs, name)
    return outcome


def _stop(ray: Any, pending: dict[Any, tuple[Step, int]], place: Executor) -> Iterator[Outcome]:
    """Cancels what is left, and waits for what was under way to write its checkpoints."""
    for ref in pending:
        ray.cancel(ref)
    left = list(pending)
    ready, _ = ray.wait(left, num_returns=len(left), timeout=GRACE) if left else ([], [])
    for ref in ready:
        step, _ = pending[ref]
        outcome = _result(ray, ref, step, place)
        if outcome is not None and outcome.state != "stopped":
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
        raise ValueError(f"there is no Ray cluster at {found} ({_first(error)}); {hint}") from None
    return ray


def _address(asked: str) -> str:
    """What `auto` stands for: what the environment names, else what Ray noted last on this machine."""
    if asked != "auto":
        return asked
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    named = os.environ.get("RAY_ADDRESS") or (noted.read_text().strip() if noted.is_file() else "")
    return named or "auto"


def _reachable(address: str) -> bool:
    """Whether something listens there: Ray itself would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--address is {address!r}; it must be auto, HOST:PORT or ray://HOST:PORT")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH):
            return True
    except (OSError, OverflowError):
        return False


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ValueError("ray is not installed; run: pip install 'marginlens[ray]'") from None


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
