"""What the report reads of a store: every run once, with a name for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from marginlens.runs.store import Entry
from marginlens.train.config import Pretrain, Probe, build
from marginlens.train.identity import NEUTRAL_EVALUATION
from marginlens.train.record import Run


@dataclass(frozen=True)
class Seen:
    """A run, and all that its folder says."""

    key: str
    """Its name in a page: letters, digits and dashes."""
    entry: Entry
    run: Run
    metrics: list[dict[str, Any]]

    @property
    def settings(self) -> Pretrain:
        return self.run.settings

    @property
    def complete(self) -> bool:
        return bool(self.entry.result)

    @property
    def said(self) -> str:
        """What became of it, in words."""
        if self.entry.state == "interrupted":
            return f"interrupted at epoch {self.entry.epochs_done} of {self.settings.epochs}"
        return f"failed: {self.entry.why}" if self.entry.state == "failed" else self.entry.state


def read_all(entries: Iterable[Entry]) -> tuple[list[Seen], list[tuple[str, str]], dict[str, list[str]]]:
    """Every run once, folders that cannot be read with why, and further copies of runs by key.

    Of copies in several stores the one that got furthest counts, the first of equals.
    """
    bad: list[tuple[str, str]] = []
    found: dict[str, list[Seen]] = {}
    for entry in entries:
        if entry.run is None:
            bad.append((str(entry.path), entry.why))
            continue
        try:
            seen = _see(entry, entry.run)
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            bad.append((str(entry.path), f"{entry.path} holds a record that no run wrote ({why})"))
            continue
        found.setdefault(entry.run.id, []).append(seen)
    runs: list[Seen] = []
    copies: dict[str, list[str]] = {}
    for number, (name, held) in enumerate(found.items()):
        best = max(held, key=lambda seen: (seen.complete, len(seen.entry.evaluations), len(seen.metrics)))
        key = f"run-{name}" if re.fullmatch("[0-9a-f]{10}", name) else f"run-number-{number}"
        runs.append(replace(best, key=key))
        if len(held) > 1:
            copies[key] = [str(seen.entry.path) for seen in held if seen is not best]
    return runs, bad, copies


def _see(entry: Entry, run: Run) -> Seen:
    """Looks into every record, so that a wrong one is found here and not in the middle of a page."""
    for known in entry.evaluations:
        if not math.isfinite(known["top1"]) or not isinstance(known["settings"], dict):
            raise ValueError(f"an evaluation with top1 {known['top1']!r}")
        if known["kind"] in ("probe", "transfer"):
            build(Probe, NEUTRAL_EVALUATION | known["settings"])
    for name in ("loss", "knn"):
        if not math.isfinite(entry.result.get(name, 0.0)):
            raise ValueError(f"result.json with {name} {entry.result[name]!r}")
    metrics = run.metrics
    for line in metrics:
        int(line["epoch"])
    return Seen("", entry, run, metrics)
