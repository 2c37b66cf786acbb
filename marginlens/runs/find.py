"""A run by what a person calls it: its folder, its name, its id, or as much of either as is needed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from difflib import get_close_matches

from marginlens.paths import expanded
from marginlens.runs.entry import Entry, examine
from marginlens.runs.store import scan


def find(words: Sequence[str], runs: str) -> list[Entry]:
    """The entry of each word; a folder is taken as it is, anything else is looked for in the store."""
    store: list[Entry] | None = None
    found = []
    for word in words:
        path = expanded(word)
        if path.is_dir():
            found.append(examine(path.resolve() if path.name in ("", "..") else path))
            continue
        store = scan(runs) if store is None else store
        found.append(_one(word, store, runs))
    for entry in found:
        if entry.run is None:
            raise ValueError(entry.why)
    return found


def _one(word: str, store: list[Entry], runs: str) -> Entry:
    exact = [e for e in store if word == e.name or (e.run and word == e.run.id)]
    begun = [e for e in store if e.name.startswith(word) or (e.run and e.run.id.startswith(word))]
    for near in (exact, begun):
        if len(near) == 1:
            return near[0]
        if near:
            raise ValueError(f"{word!r} may be {near[0].name} or {near[1].name} ({len(near)} in all); say more of it")
    close = get_close_matches(word, [e.name for e in store], n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"marginlens runs --runs {shlex.quote(runs)} lists them"
    raise ValueError(f"there is no run {word!r} in {runs}; {hint}")
