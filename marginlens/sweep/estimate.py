"""How long a plan will take, from what alike runs on the same device took; unknown where there are none.

Starting up, looking at neighbours and sharing a GPU are not in a rate. As runs finish, what they took corrects it.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from marginlens.data import store as data_store
from marginlens.data.prepare import open_data
from marginlens.data.store import Store
from marginlens.runs.config import Pretrain
from marginlens.runs.evaluate import Wanted
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run, Unreadable
from marginlens.runs.store import readable
from marginlens.settings import Settings
from marginlens.sweep.plan import Step

Key = tuple[Any, ...]


class Estimator:
    """Seconds per image as measured on one device, by an engine if one is named, and what follows for a plan."""

    def __init__(self, found: Iterable[Run | Unreadable], device: str, engine: str = "auto") -> None:
        self.device, self.engine = device, engine
        """As runs record them; no device: that of the first run to finish. auto: whatever engine there was."""
        self._rates: dict[Key, tuple[str, float]] = {}
        """When it was measured, and seconds per image: the newest of its kind."""
        self._images: dict[tuple[str, str], int] = {}
        self._took = self._guessed = 0.0
        for run in readable(found):
            self.learn(run)

    def learn(self, run: Run) -> None:
        """Take in what a run of the store measured."""
        settings = run.settings
        if run.outcome and not settings.limit:
            self._images[settings.data, settings.split] = run.outcome.images
        speeds = [line.images_per_second for line in run.speeds if line.images_per_second]
        engines = {start.get("engine", "") for start in run.starts}
        here = {start.device for start in run.starts} == {self.device} and self.engine in ("auto", *engines)
        if speeds and here:
            self._keep(_training(settings), run.resumed, 1 / median(speeds))
        for one in run.evaluations:
            if one.train_images and one.test_images:
                self._learn_evaluation(settings, one, one.train_images, one.test_images)

    def _learn_evaluation(self, settings: Pretrain, one: Evaluation, train: int, test: int) -> None:
        if not getattr(one.settings, "holdout", 0):
            self._images |= {(one.data, "train"): train, (one.data, "test"): test}
        if one.environment.device == self.device and one.seconds:
            self._keep(_measuring(settings, one), one.time, one.seconds / _passes(one.settings, train, test))

    def finished(self, step: Step, run: Run, seconds: float) -> None:
        """Take in that a step is done, and took so long from its start to its end."""
        self.device = self.device or run.device
        self.learn(run)
        guess = self._raw(step)
        if guess is not None:
            self._took, self._guessed = self._took + seconds, self._guessed + guess

    def guess(self, step: Step) -> float | None:
        """Return the seconds that a step will take; None where nothing alike was measured here."""
        raw = self._raw(step)
        return None if raw is None else raw * (self._took / self._guessed if self._guessed else 1.0)

    def total(self, steps: Iterable[Step], slots: int = 1) -> float | None:
        """Return the seconds that the due steps will take, `slots` at once; None where one of them is unknown."""
        due = [self.guess(step) for step in steps if step.due]
        known = [seconds for seconds in due if seconds is not None]
        return max(sum(known) / slots, max(known, default=0.0)) if len(known) == len(due) else None

    def _raw(self, step: Step) -> float | None:
        settings, found = step.job.settings, []
        if step.epochs_left:
            images = settings.limit or self._count(settings.data, settings.split)
            found.append(self._time(_training(settings), images * step.epochs_left))
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
        """Return the images of a split; 0 where neither the data nor a record of them is here."""
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


def _training(settings: Pretrain) -> Key:
    """Return what the time of an image in a step depends on."""
    return settings.method, settings.symmetric, settings.batch, settings.data, *_network(settings)


def _measuring(settings: Pretrain, one: Evaluation | Wanted) -> Key:
    """Return what the time of an image in an evaluation depends on; a transfer takes as long as a probe."""
    return type(one.settings), one.data, *_network(settings)


def _network(settings: Pretrain) -> Key:
    return settings.encoder, settings.stem, settings.size


def _passes(settings: Settings, train: int, test: int) -> int:
    """Return how many images an evaluation looks at."""
    return int(getattr(settings, "epochs", 1)) * train + test


def _prepared(data: str, split: str) -> int:
    if not data_store.exists(data):
        return 0
    found = open_data(data)
    if isinstance(found, Store):
        return len(found.labels(split))
    return len(found.splits[split].labels) if split in found.splits else 0
