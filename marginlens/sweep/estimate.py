"""Estimate how long a plan takes, from runs of the same kind on the same device; unknown if there are none.

A rate is the seconds per image of one kind of work: data, encoder, size, batch, method, engine, device. Start-up and
nearest neighbours are not in a rate. As runs finish, the seconds that they took beyond their rates are added to the
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

from marginlens.data import store as data_store
from marginlens.data.prepare import open_data
from marginlens.data.store import Store
from marginlens.runs.config import Pretrain
from marginlens.runs.evaluate import Wanted
from marginlens.runs.records import Evaluation, Start
from marginlens.runs.run import Run, Unreadable
from marginlens.runs.store import readable
from marginlens.settings import Settings
from marginlens.sweep.plan import Step

Key = tuple[Any, ...]


class Estimator:
    """The rates of one device and engine, and the time that a plan takes by them."""

    def __init__(self, found: Iterable[Run | Unreadable], device: str, engine: str = "auto") -> None:
        self.device, self.engine = device, engine
        """The device as runs record it; "": the device of the first run to finish."""
        self._rates: dict[Key, tuple[str, float]] = {}
        """The newest rate of each kind of work: when it was measured, and seconds per image."""
        self._images: dict[tuple[str, str], int] = {}
        self._beyond: list[float] = []
        """Of each finished step, the seconds beyond its rates: start-up and all that is in no rate."""
        for run in readable(found):
            self.learn(run)

    def learn(self, run: Run) -> None:
        """Learn the rates of a run."""
        settings = run.settings
        if run.outcome and not settings.limit:
            self._images[settings.data, settings.split] = run.outcome.images
        speeds = [line.images_per_second for line in run.speeds if line.images_per_second]
        here = {start.device for start in run.starts} == {self.device}
        if speeds and here and all(self._same_engine(start) for start in run.starts):
            self._keep(_training(settings, settings.limit), run.resumed, 1 / median(speeds))
        for one in run.evaluations:
            if one.train_images and one.test_images:
                self._learn_evaluation(settings, one, one.train_images, one.test_images)

    def _learn_evaluation(self, settings: Pretrain, one: Evaluation, train: int, test: int) -> None:
        if not getattr(one.settings, "holdout", 0):
            self._images |= {(one.data, "train"): train, (one.data, "test"): test}
        if one.environment.device == self.device and one.seconds:
            self._keep(_measuring(settings, one), one.time, one.seconds / _passes(one.settings, train, test))

    def _same_engine(self, start: Start) -> bool:
        """True if a run of this engine would run as that one did."""
        used = start.get("engine", "")
        if self.engine != "auto":
            return bool(used == self.engine)
        # on a GPU auto takes the graph, and so tells nothing about eager steps that somebody asked for
        return used == "graph" or start.device.startswith("CPU") or "as asked" not in start.get("engine_about", "")

    def finished(self, step: Step, run: Run, seconds: float) -> None:
        """Learn from a step that is done, and took `seconds` from start to end."""
        self.device = self.device or run.device
        self.learn(run)
        raw = self._raw(step)
        if raw is not None:
            self._beyond.append(max(0.0, seconds - raw))

    def guess(self, step: Step) -> float | None:
        """Return the seconds that a step will take; None if nothing of its kind was measured here."""
        raw = self._raw(step)
        return None if raw is None else raw + (fmean(self._beyond) if self._beyond else 0.0)

    def total(self, steps: Iterable[Step], slots: int = 1) -> float | None:
        """Return the seconds that the due steps will take, `slots` at once; None if one of them is unknown."""
        due = [self.guess(step) for step in steps if step.due]
        known = [seconds for seconds in due if seconds is not None]
        return max(sum(known) / slots, max(known, default=0.0)) if len(known) == len(due) else None

    def _raw(self, step: Step) -> float | None:
        settings, found = step.job.settings, []
        if step.epochs_left:
            images = settings.limit or self._count(settings.data, settings.split)
            # an epoch of few images is mostly overhead: its rate holds for that limit alone
            keys = [_training(settings, limit) for limit in dict.fromkeys((settings.limit, 0))]
            known_key = next((key for key in keys if key in self._rates), keys[0])
            found.append(self._time(known_key, images * step.epochs_left))
        found += [self._evaluation(settings, wanted) for wanted in step.missing]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    def _evaluation(self, settings: Pretrain, wanted: Wanted) -> float | None:
        train, test = (self._count(wanted.data, split) for split in ("train", "test"))
        return self._time(_measuring(settings, wanted), _passes(wanted.settings, train, test))

    def _time(self, key: Key, images: float) -> float | None:
        return images * self._rates[key][1] if images and key in self._rates else None

    def _keep(self, key: Key, when: str, seconds: float) -> None:
        if key not in self._rates or when > self._rates[key][0]:
            self._rates[key] = when, seconds

    def _count(self, data: str, split: str) -> int:
        """Return the images of a split; 0 if neither the data nor a record of them is here."""
        if (data, split) not in self._images:
            self._images[data, split] = _prepared(data, split)
        return self._images[data, split]


def spoken(seconds: float) -> str:
    """Return a time for reading: 3 d 4 h, 2 h 20 min, 5 min, 40 s."""
    whole = max(round(seconds), 1)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _training(settings: Pretrain, limit: int) -> Key:
    """Return the settings that the seconds per image of a training step depend on."""
    return settings.method, settings.symmetric, settings.batch, settings.data, settings.amp, limit, *_network(settings)


def _measuring(settings: Pretrain, one: Evaluation | Wanted) -> Key:
    """Return the settings that the seconds per image of an evaluation depend on; a transfer is timed as a probe."""
    own = [getattr(one.settings, name, 0) for name in ("batch", "size")]
    return type(one.settings), one.data, settings.amp, *own, *_network(settings)


def _network(settings: Pretrain) -> Key:
    return settings.encoder, settings.stem, settings.size


def _passes(settings: Settings, train: int, test: int) -> int:
    """Return the number of images that an evaluation looks at."""
    return int(getattr(settings, "epochs", 1)) * train + test


def _prepared(data: str, split: str) -> int:
    if not data_store.exists(data):
        return 0
    found = open_data(data)
    if isinstance(found, Store):
        return len(found.labels(split))
    return len(found.splits[split].labels) if split in found.splits else 0
