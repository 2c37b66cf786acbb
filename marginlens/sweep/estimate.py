"""How long a plan will take, from what runs on the same device took.

The newest run with the same method, encoder, size and batch tells the throughput; where there is none, that of another
run is scaled by FLOPs. Starting up, looking at neighbours and sharing a GPU are not in a throughput: as runs finish,
what they took corrects the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from marginlens.data import store as data_store
from marginlens.data.prepare import open_data
from marginlens.data.store import Store
from marginlens.nets.count import facts
from marginlens.runs.store import Entry
from marginlens.sweep.job import Evaluation
from marginlens.sweep.plan import Step
from marginlens.train.config import Pretrain, takes

Basis = Literal["measured", "scaled"]


@dataclass(frozen=True)
class Guess:
    """Seconds that a step will take, and whether runs of this very shape said so."""

    seconds: float
    basis: Basis


@dataclass(frozen=True)
class _Seen:
    """What one run took: seconds per image, and the settings that this depends on."""

    when: str
    settings: Pretrain
    seconds: float


class Estimator:
    """What was measured on one device, and what follows for the steps of a plan."""

    def __init__(self, entries: Iterable[Entry], device: str) -> None:
        self.device = device
        """Its name as runs record it; "": that of the first run to finish."""
        self._runs: dict[tuple[Any, ...], _Seen] = {}
        """The newest of each shape."""
        self._probes: dict[tuple[Any, ...], _Seen] = {}
        """The newest of each network."""
        self._images: dict[tuple[str, str], int] = {}
        self._took = self._guessed = 0.0
        for entry in entries:
            self.learn(entry)

    def learn(self, entry: Entry) -> None:
        """Takes in what a run of the store measured."""
        if entry.run is None:
            return
        settings = entry.run.settings
        if entry.result and not settings.limit:
            self._images[settings.data, settings.split] = entry.result["images"]
        if entry.speeds and {start["device"] for start in entry.starts} == {self.device}:
            took = _Seen(entry.starts[-1]["time"], settings, 1 / median(entry.speeds))
            _keep(self._runs, _shape(settings), took)
        for found in entry.evaluations:
            if found["kind"] != "knn":
                self._learn_probe(settings, found)

    def _learn_probe(self, settings: Pretrain, found: dict[str, Any]) -> None:
        train, test, where = found["train_images"], found["test_images"], found["environment"]
        if not found["settings"].get("holdout"):
            self._images |= {(found["data"], "train"): train, (found["data"], "test"): test}
        if where["device"] == self.device and found["seconds"]:
            passes = found["settings"]["epochs"] * train + test
            _keep(self._probes, _network(settings), _Seen(where["time"], settings, found["seconds"] / passes))

    def finished(self, step: Step, entry: Entry, seconds: float) -> None:
        """A step is done, and took so long from its start to its end."""
        self.device = self.device or entry.device
        self.learn(entry)
        guess = self._raw(step)
        if guess is not None:
            self._took, self._guessed = self._took + seconds, self._guessed + guess.seconds

    def guess(self, step: Step) -> Guess | None:
        """How long a step will take; None where nothing of its kind was measured here."""
        raw = self._raw(step)
        if raw is None:
            return None
        factor = self._took / self._guessed if self._guessed else 1.0
        return Guess(raw.seconds * factor, raw.basis)

    def total(self, steps: Iterable[Step], slots: int = 1) -> Guess | None:
        """How long the due steps will take, so many at once; None where one of them cannot be told."""
        due = [self.guess(step) for step in steps if step.due]
        known = [guess for guess in due if guess is not None]
        if len(known) < len(due):
            return None
        basis: Basis = "measured" if all(guess.basis == "measured" for guess in known) else "scaled"
        longest = max((guess.seconds for guess in known), default=0.0)
        return Guess(max(sum(guess.seconds for guess in known) / slots, longest), basis)

    def _raw(self, step: Step) -> Guess | None:
        settings, found = step.job.settings, []
        if step.epochs_left:
            images = settings.limit or self._count(settings.data, settings.split)
            found.append(_scale(self._runs, settings, images * step.epochs_left, _training, _shape))
        found += [self._evaluation(settings, wanted) for wanted in step.missing]
        known = [guess for guess in found if guess is not None]
        if len(known) < len(found):
            return None
        exact = all(guess.basis == "measured" for guess in known)
        return Guess(sum(guess.seconds for guess in known), "measured" if exact else "scaled")

    def _evaluation(self, settings: Pretrain, wanted: Evaluation) -> Guess | None:
        train, test = (self._count(wanted.data, split) for split in ("train", "test"))
        passes = wanted.settings.epochs * train + test
        if self._probes:
            return _scale(self._probes, settings, passes, _forward, _network)
        # no probe was measured yet: a step of training, of which a forward pass is a part
        share = _forward(settings) / _training(settings)
        guess = _scale(self._runs, settings, passes * share, _training, _shape)
        return None if guess is None else Guess(guess.seconds, "scaled")

    def _count(self, data: str, split: str) -> int:
        """Images of a split; 0 where neither the data nor a record of them is here."""
        if (data, split) not in self._images:
            self._images[data, split] = _prepared(data, split)
        return self._images[data, split]


def spoken(seconds: float) -> str:
    """3 d 4 h, 2 h 20 min, 5 min, 40 s."""
    whole = max(round(seconds), 1)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _keep(held: dict[tuple[Any, ...], _Seen], key: tuple[Any, ...], one: _Seen) -> None:
    """The newest of its key, of equals the first."""
    if key not in held or one.when > held[key].when:
        held[key] = one


def _scale(
    seen: Mapping[tuple[Any, ...], _Seen], settings: Pretrain, images: float, cost: Any, shape: Any
) -> Guess | None:
    """From the newest run of the same shape, else from one like it, by the FLOPs of an image."""
    if not seen or not images:
        return None
    if alike := seen.get(shape(settings)):
        return Guess(images * alike.seconds, "measured")
    nearest = [one for one in seen.values() if _network(one.settings) == _network(settings)] or seen.values()
    newest = max(nearest, key=lambda one: one.when)
    return Guess(images * newest.seconds * cost(settings) / cost(newest.settings), "scaled")


def _network(settings: Pretrain) -> tuple[Any, ...]:
    return settings.encoder, settings.stem, settings.size


def _shape(settings: Pretrain) -> tuple[Any, ...]:
    return settings.method, settings.symmetric, settings.batch, *_network(settings)


def _forward(settings: Pretrain) -> float:
    """FLOPs of one image through the encoder; heads are small beside it."""
    stem = None if settings.stem == "auto" else settings.stem
    return _flops(settings.encoder, settings.size, stem)


def _training(settings: Pretrain) -> float:
    """FLOPs of one image in a step: a backward pass is two forward ones, a teacher has none."""
    taught = takes(settings.method, "ema")
    views = 1 if taught and not settings.symmetric else 2
    teacher = views if taught else 0
    return _forward(settings) * (3 * views + teacher)


@functools.cache
def _flops(encoder: str, size: int, stem: str | None) -> float:
    return float(facts(encoder, size, stem).flops)


def _prepared(data: str, split: str) -> int:
    if not data_store.exists(data):
        return 0
    found = open_data(data)
    if isinstance(found, Store):
        return len(found.labels(split))
    return len(found.splits[split].labels) if split in found.splits else 0
