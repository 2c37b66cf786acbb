"""`marginlens runs`, and `runs show`, `compare`, `prune`, `add`. --help prints these docstrings."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import Field
from tyro.conf import OmitArgPrefixes, Positional

from marginlens.files import expanded
from marginlens.options import options, perform
from marginlens.output import complain
from marginlens.runs import store, texts
from marginlens.runs.query import conditions, ordered, row
from marginlens.runs.run import Run, Unreadable
from marginlens.runs.store import find
from marginlens.settings import Settings


class StorePlace(Settings):
    """The store."""

    runs: str = Field("runs", description="Folder of runs.")


class Choice(StorePlace):
    """The runs to choose."""

    where: tuple[str, ...] = Field(
        (), description="Only runs that meet these, e.g. data=cifar10 'effect=emphasis*' 'epochs>=100' state=complete."
    )


class ListPlace(Choice):
    """Their order."""

    sort: str = Field("name", description="The field to sort by, such as loss, knn, probe, started or a setting.")
    reverse: bool = Field(False, description="Sort in descending order.")


class PrunePlace(Choice):
    """The things to remove."""

    failed: bool = Field(False, description="Runs that failed.")
    interrupted: bool = Field(False, description="Interrupted runs, which --resume could continue.")
    weights: bool = Field(False, description="Weights of complete runs; their records stay.")
    older_than: float = Field(0.0, ge=0, description="Only runs unchanged for this many days.")
    yes: bool = Field(False, description="Remove them; without this, only list them.")


if TYPE_CHECKING:
    ListOptions: TypeAlias = dict[str, Any]
    StoreOptions: TypeAlias = dict[str, Any]
    PruneOptions: TypeAlias = dict[str, Any]
else:
    ListOptions = options(ListPlace)
    StoreOptions = options(StorePlace)
    PruneOptions = options(PrunePlace)


DAY = 86_400


def runs(settings: OmitArgPrefixes[ListOptions]) -> None:
    """List the runs of a store: state, progress and results.

    A folder that is not a run, or is damaged, gets a line of its own, and the exit code is then 2. See also marginlens
    runs show, compare, prune and add, each with --help. For example:

        marginlens runs --runs ~/runs --where data=cifar10 'effect=emphasis*' 'epochs>=100' state=complete

        marginlens runs --sort probe --reverse

        marginlens runs --where 'loss<2' --json
    """
    good: list[Run] = []
    bad: list[Unreadable] = []

    def act(place: ListPlace) -> dict[str, Any]:
        chosen = conditions(place.where)
        found = store.scan(place.runs)
        bad.extend(one for one in found if isinstance(one, Unreadable))
        good.extend(ordered([run for run in store.readable(found) if chosen(run)], place.sort, place.reverse))
        rows = [row(run) for run in good] if settings.get("json") else []
        unreadable = [{"path": str(one.path), "why": one.why} for one in bad]
        return {"store": place.runs, "runs": rows, "unreadable": unreadable}

    def say(found: dict[str, Any]) -> str:
        return texts.listed(good, f"{len(good)} run{'s' * (len(good) != 1)} in {found['store']}")

    perform((ListPlace,), dict(settings), act, say)
    _end(one.why for one in bad)


def show(run: Positional[str], settings: OmitArgPrefixes[StoreOptions]) -> None:
    """Show one run: settings, results, evaluations, where it ran, and the command that makes it.

    For example:

        marginlens runs show mocov3-shapes-tiny-plain-seed0-1a2b3c4d5e

        marginlens runs show 1a2b --runs ~/runs --json

    Args:
        run: The run's folder, its name in the store, its id, or the beginning of either.
    """

    def act(place: StorePlace) -> dict[str, Any]:
        return texts.described(find([run], place.runs)[0])

    perform((StorePlace,), dict(settings), act, texts.full)


def compare(run: Positional[tuple[str, ...]], settings: OmitArgPrefixes[StoreOptions]) -> None:
    """Compare runs side by side: the settings that differ, and the results.

    For example:

        marginlens runs compare 1a2b3c4d5e 0f0ef7a567 --runs ~/runs

    Args:
        run: Two runs or more: folders, names in the store, ids, or the beginnings of them.
    """

    def act(place: StorePlace) -> dict[str, Any]:
        if len(run) < 2:
            raise ValueError(f"got {len(run)} run; give at least two: marginlens runs compare A B")
        return texts.comparison(find(run, place.runs))

    perform((StorePlace,), dict(settings), act, texts.compared)


def prune(run: Positional[tuple[str, ...]] = (), *, settings: OmitArgPrefixes[PruneOptions]) -> None:
    """List failed or interrupted runs, and weights of complete ones, that can be removed; with --yes, remove them.

    Never touches running runs, damaged folders, or folders that are not runs. For example:

        marginlens runs prune

        marginlens runs prune --failed --older-than 7 --yes

        marginlens runs prune --weights --where data=shapes

        marginlens runs prune 1a2b3c4d5e --yes

    Args:
        run: Runs to remove whole, complete or not: folders, names, ids. With --weights, only their weights.
    """
    bad: list[str] = []

    def act(place: PrunePlace) -> dict[str, Any]:
        kinds = [name for name in ("failed", "interrupted", "weights") if getattr(place, name)]
        if place.yes and not kinds and not run:
            raise ValueError("--yes needs something to remove; name runs, or add --failed, --interrupted or --weights")
        found = find(run, place.runs) if run else store.scan(place.runs)
        bad.extend(one.why for one in found if isinstance(one, Unreadable))
        plan = _plan(store.readable(found), place, kinds, bool(run))
        done = _remove(plan, bad) if place.yes else [{k: v for k, v in step.items() if k != "of"} for step in plan]
        return {"removed": place.yes, "bytes": sum(step["bytes"] for step in done), "steps": done}

    perform((PrunePlace,), dict(settings), act, _pruned)
    _end(bad)


def add(folder: Positional[tuple[Path, ...]], settings: OmitArgPrefixes[StoreOptions]) -> None:
    """Copy the records of runs made elsewhere into a store. Weights stay where they are.

    Each run is added whole or not at all. A run that is already there gets its missing records; one with another
    outcome is refused. For example:

        marginlens runs add /mnt/cluster/runs/* --runs ~/runs

    Args:
        folder: Folders of runs.
    """
    bad: list[str] = []

    def act(place: StorePlace) -> dict[str, Any]:
        if not folder:
            raise ValueError("no folder is given; name a run's folder: marginlens runs add FOLDER")
        done: dict[str, list[str]] = {"added": [], "completed": [], "there_already": []}
        for path in folder:
            try:
                what, final = _add(path, expanded(place.runs))
                done[what].append(str(final))
            except ValueError as error:
                bad.append(str(error))
        return done

    perform((StorePlace,), dict(settings), act, _added)
    _end(bad)


def _add(path: Path, home: Path) -> tuple[str, Path]:
    """Add a run, and return "added", "completed" or "there_already", with its folder."""
    source = expanded(path).resolve()
    if not (source / "config.json").exists() and any(source.glob("*/config.json")):
        raise ValueError(f"{path} is a store, not a run's folder; give the runs in it: {shlex.quote(str(path))}/*")
    final = home / source.name
    before = store.records(final) if final.is_dir() and not store.unbegun(final) else None
    store.add(source, home, source.name)
    if before is None:
        return "added", final
    return ("there_already" if store.records(final) == before else "completed"), final


def _added(found: dict[str, Any]) -> str:
    lines = [
        path if what == "added" else f"{path} ({what.replace('_', ' ')})"
        for what, paths in found.items()
        for path in paths
    ]
    return "\n".join(lines) or "nothing was added"


def _plan(runs: Iterable[Run], place: PrunePlace, kinds: list[str], named: bool) -> list[dict[str, Any]]:
    """Return the steps that remove runs or weights, each with its run, its kind and its bytes."""
    chosen = conditions(place.where)
    before, asked = time.time() - place.older_than * DAY, kinds or ["failed", "interrupted", "weights"]
    plan = []
    for run in {run.path: run for run in runs}.values():  # once, even if it was named twice
        if not chosen(run) or (place.older_than and run.changed > before):
            continue
        if run.path.is_symlink() and not named:
            continue  # its target belongs to another store
        if named and not kinds:
            if run.state == "running":
                raise ValueError(f"{run.path} is running, and is left alone; stop it first")
            what = "run"
        elif run.state in asked:
            what = "run"
        else:
            what = "weights" if run.state == "complete" and run.weights and "weights" in asked else ""
        if what:
            size = run.size_bytes if what == "run" else run.weights_bytes
            known = {"path": str(run.path), "what": what, "state": run.state, "why": run.why, "bytes": size}
            plan.append(known | {"of": run})
    return plan


def _remove(plan: list[dict[str, Any]], bad: list[str]) -> list[dict[str, Any]]:
    """Carry out the plan. Runs that have changed since are left alone, and reported."""
    done = []
    for step in plan:
        run = step.pop("of")
        try:
            freed = store.remove(run) if step["what"] == "run" else store.drop_weights(run)
            done.append(step | {"bytes": freed})
        except ValueError as error:
            bad.append(str(error))
    return done


def _pruned(found: dict[str, Any]) -> str:
    if not found["steps"]:
        return "nothing to remove"
    verb = "removed" if found["removed"] else "would remove"
    lines = []
    for step in found["steps"]:
        what = "weights of" if step["what"] == "weights" else step["state"]
        why = f" ({step['why']})" if step["why"] else ""
        lines.append(f"{verb} {what} {step['path']}, {texts.amount(step['bytes'])}{why}")
    then = "" if found["removed"] else "; --yes with --failed, --interrupted, --weights or runs' names removes them"
    return "\n".join([*lines, f"{texts.amount(found['bytes'])} in all{then}"])


def _end(lines: Iterable[str]) -> None:
    """Report bad folders, a line each, after the good ones, and exit with the code of bad input."""
    bad = list(lines)
    for line in bad:
        complain(line)
    if bad:
        sys.exit(2)
