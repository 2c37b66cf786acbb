"""Hostile input never crashes, hangs, eats memory or prints Python's own words: a few cases of each class."""

from collections import Counter

import pytest

from tests.fuzz.__main__ import CLASSES, watched

COUNTS = {
    "archives": 120, "images": 100, "stores": 200, "records": 120, "checkpoints": 60, "configs": 100, "words": 150,
    "specials": 60, "names": 80,
}  # fmt: skip


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", CLASSES)
def test_hostile_input_is_refused_in_a_line(name, share):
    count = COUNTS[name] // share
    _, tried = watched(name, seed=0, count=count)
    first = {one["reason"]: one["case"] for one in reversed(tried) if one["reason"]}
    reasons = Counter(one["reason"] for one in tried)
    bad = [f"{reasons[why]} x {why}\n  python -m tests.fuzz --only {name} --case {n}" for why, n in first.items()]
    assert not bad, "\n".join(bad)
    assert len(tried) == count
