"""Data of one name may differ in content between runs; then one content counts in a table, and the others say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marginlens.paper import Cell
from marginlens.report.seen import Seen
from marginlens.runs.entry import when
from marginlens.sweep.cells import Label, standing

Usual = Mapping[tuple[Label, str], str]
"""The content of data that counts in a table, by the kind of its runs and the name of the data."""


def usual_contents(found: Iterable[tuple[Cell, Seen, Label]]) -> Usual:
    """Where data of one name differ in content: that of most complete runs, of as many the latest."""
    votes: dict[tuple[Label, str], dict[str, dict[str, tuple[bool, str]]]] = {}
    for cell, seen, kind in found:
        ballots = [(seen.settings.data, seen.run.data, seen.began)]
        if cell.measure == "transfer":
            able = standing(cell, seen.run, seen.evaluations, kind)
            ballots += [(one["data"], one["data_fingerprint"], when(one)) for one in able]
        for data, content, time in ballots:
            cast = votes.setdefault((kind, data), {}).setdefault(content, {})
            cast[seen.key] = max(cast.get(seen.key, (False, "")), (seen.complete, time))

    def weight(cast: tuple[str, dict[str, tuple[bool, str]]]) -> tuple[int, str, int, str, str]:
        content, held = cast
        done, every = [time for complete, time in held.values() if complete], [time for _, time in held.values()]
        return len(done), max(done, default=""), len(every), max(every), content

    return {key: max(contents.items(), key=weight)[0] for key, contents in votes.items()}


def odd_data(one: Mapping[str, Any], kind: Label, usual: Usual) -> str:
    """What is odd about the content that an evaluation was made on; nothing where it is that of the others."""
    return odd_content(one["data"], one["data_fingerprint"], usual.get((kind, one["data"]), one["data_fingerprint"]))


def odd_content(data: str, content: str, usual: str) -> str:
    """Which content some data have, and which counts; nothing where they are the same."""
    if content == usual:
        return ""
    return f"not counted: the content of its {data} is {content[:10]}, and {usual[:10]} counts"
