"""Measure a run. Earlier results are read from its folder; new results are stored there.

The backbone is frozen: eval mode, no gradients, and its checksum is compared before and after.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import SerializeAsAny, field_validator
from pydantic_core.core_schema import ValidationInfo

from marginlens import evals
from marginlens.data.feed import Feed, open_feed
from marginlens.data.prepare import ready
from marginlens.devices import choose_device, choose_precision, placed
from marginlens.errors import Stopped, disk, memory
from marginlens.evals.knn import Knn
from marginlens.evals.probe import Probe
from marginlens.output import Display
from marginlens.runs import records, work
from marginlens.runs.config import evaluation_name
from marginlens.runs.model import fingerprint, load_backbone_of
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run, open_run
from marginlens.runs.work import environment
from marginlens.settings import Rates, Settings, build

S = TypeVar("S", bound=Settings)


class Wanted(Settings):
    """An evaluation that a run should have."""

    kind: str
    data: str
    settings: SerializeAsAny[Settings]
    beside: Rates = ()
    """More learning rates to try on the same crops."""

    @field_validator("settings", mode="before")
    @classmethod
    def _of_its_kind(cls, given: Any, info: ValidationInfo) -> Any:
        return build(evals.get(info.data["kind"]).settings, given) if isinstance(given, Mapping) else given

    @property
    def name(self) -> str:
        """A short name for the terminal."""
        return f"{self.kind} to {self.data}" if evals.get(self.kind).elsewhere else self.kind

    @property
    def several(self) -> list[Settings]:
        """Its settings at its own rate, and at the others."""
        return at_rates(self.settings, self.beside)


def evaluate(
    run: Run | str | Path,
    name: str,
    settings: Settings | None = None,
    *,
    to: str = "",
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    beside: Sequence[float] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure a run with the evaluation `name`, and store the result in the run's folder.

    A stored result is returned without measuring again, unless `again`. Settings that are not given follow the recipe
    of the data. `to` names other data, for evaluations such as "transfer".

    `beside` adds learning rates: one more layer each, on the same crops, for little more time. Each is stored as a
    probe of its own. The result has their top-1 by rate under "beside". "beside_diverged" lists the rates that
    diverged, whose top-1 says nothing.
    """
    run, evaluation = open_run(run), evals.get(name)
    if evaluation.elsewhere and not to:
        raise ValueError(f"{name} needs other data than the run learned from; name them with to=")
    if not evaluation.elsewhere and to:
        raise ValueError(f"{name} is measured on the data that the run learned from, not on {to!r}")
    if settings is not None and not isinstance(settings, evaluation.settings):
        raise TypeError(f"the settings of {name} are a {evaluation.settings.__name__}, not {settings!r}")
    data, notes = ready(to, workers) if to else (run.settings.data, ())
    for line in notes:
        Display("", quiet=quiet).say(line)
    chosen = evals.usual(name, data, settings.model_dump(exclude_unset=True) if settings else None)
    feed = open_feed(data, choose_device(device), workers)
    if not to and feed.fingerprint != run.data:
        raise ValueError(
            f"the content of {data} has changed since {run.path} learned from it; "
            f"prepare it as it was, or measure the run on what it is now: "
            f"marginlens transfer {shlex.quote(str(run.path))} --to {shlex.quote(data)}"
        )
    wanted = build(Wanted, {"kind": name, "data": data, "settings": chosen, "beside": tuple(beside)})
    return _evaluate(run, wanted, feed, again, quiet)


def probe(
    run: Run | str | Path,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    beside: Sequence[float] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a linear layer on a run's frozen backbone, on the data it learned from. See `evaluate`."""
    at: dict[str, Any] = {"device": device, "workers": workers, "again": again, "beside": beside, "quiet": quiet}
    return evaluate(run, "probe", settings, **at)


def transfer(
    run: Run | str | Path,
    to: str,
    settings: Probe | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    beside: Sequence[float] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Train the layer on other data, normalised by their own mean and std. See `evaluate`."""
    at: dict[str, Any] = {"device": device, "workers": workers, "again": again, "beside": beside, "quiet": quiet}
    return evaluate(run, "transfer", settings, to=to, **at)


def knn(
    run: Run | str | Path,
    settings: Knn | None = None,
    *,
    device: str = "auto",
    workers: int = 2,
    again: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Classify by nearest neighbours, on the data that the run learned from. See `evaluate`."""
    return evaluate(run, "knn", settings, device=device, workers=workers, again=again, quiet=quiet)


def at_rates(settings: S, beside: Sequence[float]) -> list[S]:
    """Return an evaluation's settings, then the same at other learning rates."""
    return [settings, *(build(type(settings), settings.model_dump() | {"lr": rate}) for rate in beside)]


def missing(several: Sequence[S], kept: Mapping[S, Evaluation]) -> list[S]:
    """Return the settings without a record, except for rates that diverged to NaN beside a recorded one."""
    lost = {rate for record in kept.values() for rate in record.lost}
    return [one for one in several if one not in kept and getattr(one, "lr", None) not in lost]


def to_lower(device: torch.device) -> str:
    """Return the options to change if memory runs out."""
    return "--size, or take --device cpu" if device.type != "cpu" else "--size, or close other programs"


def _evaluate(run: Run, wanted: Wanted, feed: Feed, again: bool, quiet: bool) -> dict[str, Any]:
    """Measure what is missing, store each record in the run's folder, and return the first one's."""
    folder = run.path / "evaluations"
    files = {one: folder / evaluation_name(wanted.kind, wanted.data, feed.fingerprint, one) for one in wanted.several}
    display = Display(wanted.kind, epochs := getattr(wanted.settings, "epochs", 1), epochs, quiet)

    def due() -> list[Settings]:
        kept = {} if again else {one: run.evaluation(path) for one, path in files.items() if path.exists()}
        return missing(list(files), kept)

    if due():
        # locked, so that no other process removes the weights or measures the same
        with work.locked(run) as hold, _still_there(hold):
            facts = {"kind": wanted.kind, "run": run.id, "data": wanted.data, "data_fingerprint": feed.fingerprint}
            left = due()  # again, because another process may have measured some before we got the lock
            for one, found in (_measured(run, wanted.kind, feed, left, display) if left else {}).items():
                hold.check()
                with disk(files[one], f"top-1 is {found['top1']:.2f} %, and could not be kept", then="measure again"):
                    records.save_json(files[one], facts | found)
    else:
        display.say(f"measured before: {files[wanted.settings]}")
    if not files[wanted.settings].exists():
        raise Stopped(
            f"the {wanted.kind} diverged (NaN) at this learning rate, but not at another; lower its learning rate"
        )
    first, *rest = (run.evaluation(path) for path in files.values() if path.exists())
    found = first.plain()
    if wanted.beside:
        found["beside"] = {f"{other.rate:g}": other.top1 for other in rest}
    if bad := [f"{other.rate:g}" for other in rest if other.diverged]:
        found["beside_diverged"] = bad
    return found


@contextmanager
def _still_there(hold: work.Hold) -> Iterator[None]:
    """Report a moved run's folder in place of any other error."""
    try:
        yield
    finally:
        hold.check()


def _measured(
    run: Run, kind: str, feed: Feed, several: Sequence[Settings], display: Display
) -> dict[Settings, dict[str, Any]]:
    """Return the numbers of evaluations, with time and place. Raise if the backbone changed."""
    backbone, device = placed(load_backbone_of(run), feed.device), feed.device
    folder = run.path / "evaluations"
    with disk(folder, "nothing was measured yet", then="measure again"):
        folder.mkdir(exist_ok=True)
    precision = choose_precision(run.settings.amp if device.type == "cuda" else "off", device)
    task = evals.Task(backbone, feed, run.settings.size, precision, display)
    before, begin = fingerprint(backbone), time.monotonic()
    with memory(to_lower(device)), display, feed.kept():
        found = evals.get(kind).measure(task, several)
    if fingerprint(backbone) != before:
        raise RuntimeError("the evaluation changed the backbone; this is a bug, and its result is not recorded")
    last: dict[str, Any] = {"seconds": time.monotonic() - begin, "environment": environment(device)}
    if lost := [getattr(one, "lr", None) for one in several if one not in found]:
        last["lost"] = lost  # so that nobody tries them again
    return {
        one: {"settings": one.model_dump(mode="json"), "backbone_sha256": before} | numbers | last
        for one, numbers in found.items()
    }
