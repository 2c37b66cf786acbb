"""What the report reads of a store: every run once, with a name for the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from marginlens.runs.entry import Entry, when
from marginlens.train.config import Pretrain
from marginlens.train.identity import NUMERICS
from marginlens.train.record import Run


@dataclass(frozen=True)
class Seen:
    """A run, and all that its folder says."""

    key: str
    """Its name in a page: letters, digits and dashes."""
    entry: Entry
    run: Run
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    """Its own, and those that only a copy of it in another store has."""

    @property
    def settings(self) -> Pretrain:
        return self.run.settings

    @property
    def but_seed(self) -> str:
        """All its settings but the seed."""
        return self.settings.model_copy(update={"seed": 0}).model_dump_json()

    @property
    def family(self) -> tuple[str, str, int]:
        """What runs share that differ in their seed alone: settings, the data's content, the numerics."""
        return self.but_seed, self.run.data, self.run.numerics

    @property
    def order(self) -> tuple[int, str]:
        """By seed, and then by name."""
        return self.settings.seed, self.entry.name

    @property
    def complete(self) -> bool:
        return bool(self.entry.result)

    @property
    def began(self) -> str:
        """When it was last begun or gone on with."""
        return str(self.entry.starts[-1]["time"]) if self.entry.starts else ""

    @property
    def numerics(self) -> str:
        """What must be said of a run whose numbers mean something else by now; nothing of all others."""
        version = self.run.numerics
        return "" if version == NUMERICS else f"numerics {version}, not {NUMERICS}"

    @property
    def short(self) -> str:
        """What became of it, in a few words."""
        if self.entry.state == "interrupted":
            return f"interrupted at epoch {self.entry.epochs_done} of {self.settings.epochs}"
        return self.entry.state

    @property
    def said(self) -> str:
        """What became of it, and why."""
        return f"failed: {self.entry.why}" if self.entry.state == "failed" else self.short


def read_all(entries: Iterable[Entry]) -> tuple[list[Seen], list[tuple[str, str]], dict[str, list[str]]]:
    """Every run once, folders that cannot be read with why, and further copies of runs by key.

    Of copies in several stores the one that got furthest counts, the first of equals; evaluations of copies that came
    to the same result are joined.
    """
    bad: list[tuple[str, str]] = []
    found: dict[str, list[Seen]] = {}
    for entry in entries:
        if entry.run is None:
            bad.append((str(entry.path), entry.why))
            continue
        try:
            seen = Seen("", entry, entry.run, entry.run.metrics, entry.evaluations)
        except (ValueError, OSError) as error:  # it changed since it was looked at
            bad.append((str(entry.path), f"{entry.path} cannot be read ({' '.join(str(error).split())})"))
            continue
        found.setdefault(entry.run.id, []).append(seen)
    runs: list[Seen] = []
    copies: dict[str, list[str]] = {}
    for name, held in found.items():
        best = max(held, key=lambda seen: (seen.complete, len(seen.evaluations), len(seen.metrics)))
        runs.append(replace(best, key=f"run-{name}", evaluations=_joined(best, held)))
        if len(held) > 1:
            copies[f"run-{name}"] = [str(seen.entry.path) for seen in held if seen is not best]
    return runs, bad, copies


def _joined(best: Seen, held: Iterable[Seen]) -> list[dict[str, Any]]:
    """The evaluations of a run and of its copies: of one name, which is one measurement, the latest."""
    joined: dict[str, dict[str, Any]] = {}
    for seen in held:
        if seen.entry.result == best.entry.result:  # the same weights; another outcome's numbers are not this one's
            for name, one in seen.entry.evaluation_files.items():
                if name not in joined or when(one) > when(joined[name]):
                    joined[name] = one
    return [joined[name] for name in sorted(joined)]
