"""The table of runs that are no cell's own: a row for the seeds of a setting, by the settings in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from marginlens.report.gather import Gathered
from marginlens.report.grids import Grid, Item, Piece, mean_of, measure, say
from marginlens.report.rates import beside
from marginlens.report.seen import Seen
from marginlens.runs.entry import when
from marginlens.runs.fields import plain, spelled
from marginlens.train.accuracy import diverged
from marginlens.train.config import Pretrain

_FIRST = ("loss", "kNN")
_CONTENT = "content of the data"

Results = dict[str, tuple[float, bool]]
"""What a run gave by the name of a column, and whether that is of a probe that diverged."""


def others_grid(gathered: Gathered) -> Grid:
    """Runs that are no cell's own; a setting that all of them share is said above the table."""
    runs, said = gathered.others, gathered.labels
    groups: dict[tuple[str, str, int], list[Seen]] = {}
    for seen in runs:
        groups.setdefault(seen.family, []).append(seen)
    firsts = [group[0] for group in groups.values()]
    fields, same = _differing(firsts)
    targets = {(one["data"], one["data_fingerprint"]) for seen in runs for one in seen.evaluations}
    several = {data for data, count in Counter(data for data, _ in targets).items() if count > 1}
    results = {seen.key: _results(seen, several) for seen in runs}
    columns = sorted({name for found in results.values() for name in found}, key=lambda n: (n not in _FIRST, n))
    rows = []
    for group in groups.values():
        group.sort(key=lambda seen: seen.order)
        row = [_runs(group, results)] + [_setting(group[0], name) for name in fields]
        row += [say(said.get(group[0].key, ""))] + [_mean_of(group, results, name) for name in columns]
        rows.append((*row, _seeds(group)))
    about = (
        "Sweeps, shorter looks, rehearsals: the settings in which they differ, and what they gave, as the mean over "
        "seeds ± the sample standard deviation."
    )
    about += f" All have {', '.join(f'{_name(n)} {_setting(firsts[0], n).text}' for n in same)}." if same else ""
    head = ("runs", *(_name(name) for name in fields), "label", *columns, "seeds")
    return Grid("others", "All other runs by their settings", about, head, rows)


def _differing(runs: Sequence[Seen]) -> tuple[list[str], list[str]]:
    """What tells runs apart, and what is the same in all: of what is always said, and what some have by no recipe."""
    given = {name for seen in runs for name in spelled(seen.settings)} - {"seed"}
    found = [name for name in Pretrain.model_fields if name in given]
    contents = {(seen.settings.data, seen.run.data) for seen in runs}
    found += [_CONTENT] if len(contents) > len({data for data, _ in contents}) else []
    same = [name for name in found if len(runs) > 1 and len({_setting(seen, name).text for seen in runs}) == 1]
    return [name for name in found if name not in same], same


def _name(field: str) -> str:
    return field.replace("_", " ")


def _setting(seen: Seen, name: str) -> Item:
    if name == _CONTENT:
        return say(seen.run.data[:10])
    value = seen.settings.model_dump(mode="json")[name]
    return say(plain(value, " "), sort=float(value) if type(value) in (int, float) else None)


def _results(seen: Seen, several: Collection[str]) -> Results:
    """What a run gave; `several`: data that differ in content, which is then named too."""
    result = seen.entry.result
    found = {name: (result[key], False) for key, name in (("loss", "loss"), ("knn", "kNN")) if key in result}
    elsewhere = beside(seen)
    for known in sorted((one for one in seen.evaluations if one not in elsewhere), key=when):
        foreign = known["kind"] == "transfer" and known["data"] in several
        name = measure(known) + (f" of content {known['data_fingerprint'][:10]}" if foreign else "")
        found[name] = known["top1"], diverged(known)
    return found


def _mean_of(group: Sequence[Seen], results: dict[str, Results], name: str) -> Item:
    """Over the seeds that have it, with how many these are where some have not."""
    found = [(seen, *results[seen.key][name]) for seen in group if name in results[seen.key]]
    first = found[0][0] if found else group[0]
    return mean_of([top for _, top, _ in found], len(group), sum(bad for _, _, bad in found), first)


def _seeds(group: Sequence[Seen]) -> Item:
    """How many came to an end, of how many there are."""
    ended = sum(seen.complete for seen in group)
    return say(str(ended) if ended == len(group) else f"{ended} of {len(group)}", sort=ended)


def _runs(group: Sequence[Seen], results: dict[str, Results]) -> Item:
    """Each seed, and what became of it or what it lacks."""
    names = dict.fromkeys(name for seen in group for name in results[seen.key])
    pieces = []
    for seen in group:
        said = seen.short
        if seen.complete:
            lacks = [name for name in names if name not in results[seen.key]]
            if not any(one["kind"] == "probe" for one in seen.evaluations):
                lacks = ["probe", *(name for name in lacks if not name.startswith("probe"))]
            missing = f"complete, no {', no '.join(lacks)}" if lacks else ""
            said = missing if seen.entry.state == "complete" else said
        note = seen.said if said == seen.short != seen.said else ""
        pieces.append(Piece(f"seed {seen.settings.seed}" + (f": {said}" if said else ""), seen, note))
    return Item(tuple(pieces))
