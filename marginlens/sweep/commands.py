"""`marginlens sweep` and `marginlens reproduce`: --help prints their docstrings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from marginlens.data.prepare import ready
from marginlens.errors import DataError
from marginlens.evals import HEADLINE
from marginlens.options import COMMON, options, read_config, settle, show
from marginlens.output import PLAIN, counted, errors, legible, say, say_json
from marginlens.paper import TABLES, Cell, find
from marginlens.parameters import quoted
from marginlens.runs.config import Pretrain, choose_size
from marginlens.settings import build, hint
from marginlens.sweep import conduct
from marginlens.sweep import grid as grids
from marginlens.sweep import job as cells
from marginlens.sweep.job import Executor, GridPlace, Job, Selection, SweepPlace, TableSelection, merge, wanted
from marginlens.sweep.plan import away, check_known, check_prepared, evenly, look, make_plan, prepared
from marginlens.sweep.summary import finish, means_table, said

Cells: TypeAlias = dict[Pretrain, list[str]]
"""The cells of each pre-training."""

if TYPE_CHECKING:
    SweepOptions: TypeAlias = dict[str, Any]
    ReproduceOptions: TypeAlias = dict[str, Any]
else:
    SweepOptions = options(Pretrain, SweepPlace)
    ReproduceOptions = options(Selection, Executor)


def sweep(settings: OmitArgPrefixes[SweepOptions], *, grid: UseAppendAction[tuple[str, ...]] = ()) -> None:
    """Run every combination of a grid of settings, each followed by its probe, and print means over seeds.

    All other settings are those of marginlens pretrain. Complete runs are skipped: rerun the command to continue after
    a stop. For example:

        marginlens sweep --data shapes --grid "effect=plain|emphasis(s=5)" --grid "seed=0|1|2" --dry-run

        marginlens sweep --data cifar10 --grid "tau=0.1|0.25" --grid "method=mocov3|simclr" --per-gpu 2

        marginlens sweep --data cifar100 --grid "seed=0|1|2" --executor ray --address auto --gpus-per-run 0.5

    Args:
        grid: A setting and its values, such as "seed=0|1|2". Repeat it for more settings. It replaces a file's grid.
    """
    given = dict(settings) | ({"grid": grid} if grid else {})
    base, place, axes = _sweep_settings(given)
    if given.get("print_config"):
        shared = grids.common(base, axes) if axes else base
        say_json(json.dumps(shared | place.model_dump(mode="json"), indent=1))
        return
    jobs = _grid_jobs(base, place, axes)
    _do(jobs, place, bool(given.get("json")), f"sweep over {', '.join(axes)}", [], {})


def reproduce(tables: Positional[tuple[str, ...]], settings: OmitArgPrefixes[ReproduceOptions]) -> None:
    """Run what a table or figure of the paper needs: each pre-training once, with its probes and transfers.

    Complete runs are skipped: rerun the command to continue after a stop. With --epochs it is a shorter look, with
    --dataset a rehearsal; reports label both. For example:

        marginlens reproduce tab2 --only "MoCo/CIFAR10/*" --seeds 3 --dry-run

        marginlens reproduce tab2 tab3 --only "MoCo/*" "BYOL/*" --epochs 20 --limit-minutes 60 --records-only

        marginlens reproduce tab2 --only "MoCo/CIFAR10/*" --dataset shapes

    Args:
        tables: Tables and figures, such as tab2 or fig3; they share their runs. Replace a file's tables.
    """
    given = dict(settings)
    overrides = {name: value for name, value in given.items() if name not in COMMON}
    overrides |= {"tables": tables} if tables else {}
    chosen, place = settle((TableSelection, Executor), given.get("config", ""), overrides)
    if given.get("print_config"):
        say_json(show(chosen, place))
        return
    found, notes = _select(chosen.tables, chosen.only, chosen.readings)
    dataset = _named(chosen.dataset, place.workers) if chosen.dataset else None
    ask = (chosen.epochs or None, dataset, chosen.probe_epochs or None)
    asked = [(cell, cells.job(cell, seed, *ask)) for seed in range(chosen.seeds) for cell in found]
    sized = _sized([job.settings for _, job in asked])
    asked = [(cell, job.model_copy(update={"settings": own})) for (cell, job), own in zip(asked, sized, strict=True)]
    of: Cells = {}
    for cell, job in asked:
        of.setdefault(job.settings, []).append(f"{TABLES[cell.table].name}: {cell.path}")
    jobs = merge(evenly([job for _, job in asked]))
    _do(jobs, place, bool(given.get("json")), _title(chosen), notes, of)


def _do(jobs: list[Job], place: Executor, as_json: bool, title: str, notes: Sequence[str], of: Cells) -> None:
    """Plan, print the plan, and carry it out."""
    jobs = [job.with_more(place.also, place.beside) for job in jobs]
    away_from_home = place.executor == "ray" and not place.shared
    fingerprints = prepared(jobs, draw=not place.dry_run and not away_from_home)
    held = look(place.runs)
    steps = make_plan(jobs, place.runs, fingerprints, held)
    steps = [replace(step, cells=tuple(of.get(step.job.settings, ()))) for step in steps]
    steps = away(steps) if away_from_home else steps
    if place.executor == "local":  # a cluster's nodes may have others
        check_known(steps, fingerprints)
    if not place.dry_run:
        if place.executor == "local":
            check_prepared(steps, fingerprints)
        _confirm(sum(step.due for step in steps), place)
    work = conduct.prepare(steps, place, held)
    screen = Console(stderr=as_json, color_system=None, **PLAIN)
    say("\n".join([*notes, conduct.show(work, screen, title)]), error=as_json)
    found = work.facts() | {"notes": list(notes)}
    if not place.dry_run:
        console = errors()
        plain: dict[str, Any] = {"markup": False, "emoji": False, "soft_wrap": True}
        ended = conduct.carry_out(work, lambda line: console.print(legible(line), **plain))
        found |= ended
    if as_json:
        say_json(json.dumps(found, indent=1, allow_nan=False))
    elif not place.dry_run:
        say("\n".join(filter(None, [means_table(found["means"], screen), said(found)])))
    if not place.dry_run:
        finish(found)


def _confirm(count: int, place: Executor) -> None:
    """Ask before very many runs."""
    if count <= place.most or place.yes:
        return
    many = f"these are {count:,} runs, more than --most {place.most:,}"
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError(f"{many}; add --yes to run them all, or --dry-run to see them")
    if input(f"{many}. Run them all? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ValueError(f"{many}; nothing was run")


def _sweep_settings(given: dict[str, Any]) -> tuple[dict[str, Any], GridPlace, dict[str, list[Any]]]:
    """Return the settings that all runs share, where to run, and the grid.

    Only types are checked: the grid may make a setting valid that is invalid by itself.
    """
    held = read_config(Path(given["config"]), (Pretrain, GridPlace)) if given.get("config") else {}
    known = {*Pretrain.model_fields, *GridPlace.model_fields}
    for name in held:
        if name not in known:
            raise ValueError(f"{given['config']}: there is no setting {name!r}; {hint(name, known)}")
        _check_type(given["config"], name, held[name])
    held |= {name: value for name, value in given.items() if name not in COMMON}
    place = build(GridPlace, {name: value for name, value in held.items() if name in GridPlace.model_fields})
    axes = grids.parse(place.grid)
    for name in axes:
        if name in given:
            raise ValueError(
                f"--{name.replace('_', '-')} is given, and the grid has values of it; leave out one of them"
            )
    return {name: value for name, value in held.items() if name in Pretrain.model_fields}, place, axes


def _check_type(config: str, name: str, value: Any) -> None:
    """Raise for a YAML value that no setting takes: a date, bytes, a set, infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            f"{config}: {name} is {quoted(value)}; it must be text, a number, yes or no, or a list of those. "
            f"Put text in quotes"
        ) from None


def _grid_jobs(base: dict[str, Any], place: SweepPlace, axes: dict[str, list[Any]]) -> list[Job]:
    if not axes:
        raise ValueError('--grid is missing: a setting and its values, such as --grid "seed=0|1|2"')
    base, place, axes = _folders_prepared(base, place, axes)
    jobs = []
    for settings in _sized(grids.expand(base, axes)):
        own = [wanted(HEADLINE, settings.data, place.probe_epochs or None, place.holdout)] if place.probe else []
        others = [wanted("transfer", name, place.probe_epochs or None, place.holdout) for name in place.transfer_to]
        jobs.append(Job(settings=settings, evaluations=(*own, *others)))
    return merge(evenly(jobs))


def _folders_prepared(
    base: dict[str, Any], place: SweepPlace, axes: dict[str, list[Any]]
) -> tuple[dict[str, Any], SweepPlace, dict[str, list[Any]]]:
    """Return all three with the names of data sets in place of folders of images, which are prepared first."""
    base = base | {key: _named(data, place.workers) for key, data in base.items() if key == "data"}
    axes = axes | {key: [_named(d, place.workers) for d in values] for key, values in axes.items() if key == "data"}
    others = tuple(_named(data, place.workers) for data in place.transfer_to)
    return base, place.model_copy(update={"transfer_to": others}), axes


def _named(data: Any, workers: int) -> Any:
    """Return the name of a data set, prepared first if it is a folder of images; anything but text as it is."""
    if not isinstance(data, str):
        return data
    found = ready(data, workers)
    for line in found.notes:
        say(line, error=True)
    return found.name


def _sized(several: Sequence[Pretrain]) -> list[Pretrain]:
    """Return the settings with a size: a folder's own where none is given."""
    sizes: dict[str, int] = {}
    for data in dict.fromkeys(one.data for one in several if not one.size):
        try:
            sizes[data], why = choose_size(data)
        except DataError:  # it is perhaps prepared where the runs are
            sizes[data], why = 32, "because it is not prepared here"
        if why:
            say(f"{data}: views of {sizes[data]} px, {why} (--size sets another)", error=True)
    return [one if one.size else one.model_copy(update={"size": sizes[one.data]}) for one in several]


def _select(tables: Sequence[str], only: Sequence[str], every_reading: bool) -> tuple[list[Cell], list[str]]:
    """Return the cells to run, and a line on those that cannot be run; raise for a pattern without a match."""
    if not tables:
        raise ValueError(f"name a table or figure of the paper: {', '.join(TABLES)}")
    for table in tables:
        if table not in TABLES:
            raise ValueError(f"there is no table {quoted(table)}; there are {', '.join(TABLES)}")
    chosen: dict[tuple[str, str], Cell] = {}
    refused: dict[str, dict[str, ValueError]] = {table: {} for table in tables}
    for table in refused:
        for pattern in dict.fromkeys(only):
            try:
                chosen |= {(cell.address, cell.reading): cell for cell in find(pattern, table, every_reading)}
            except ValueError as error:
                refused[table][pattern] = error
    for pattern in only:
        if all(pattern in errors for errors in refused.values()):
            raise refused[tables[0]][pattern]
    nothing = [str(errors[only[0]]) for errors in refused.values() if len(errors) == len(set(only))]
    found = list(chosen.values())
    able = [cell for cell in found if cell.settings is not None]
    unable: dict[str, list[Cell]] = {}
    for cell in found:
        if cell.settings is None:
            unable.setdefault(cell.why_not, []).append(cell)
    notes = [f"left out: {counted(len(few), 'cell')}, the first {few[0].address}: {why}" for why, few in unable.items()]
    if not able:
        raise ValueError(f"none of these cells can be run: {next(iter(unable))}")
    return able, [*nothing, *notes]


def _title(chosen: TableSelection) -> str:
    """Return the title of a plan: the tables, and whether it is a shorter look or a rehearsal."""
    names = ", ".join(TABLES[key].name for key in dict.fromkeys(chosen.tables))
    labels = []
    if chosen.dataset:
        labels.append(f"a rehearsal on {chosen.dataset}, not the paper's data")
    elif chosen.epochs or chosen.probe_epochs:
        shorter = [(chosen.epochs, "epochs"), (chosen.probe_epochs, "epochs of probing")]
        labels.append(f"a shorter look, {' and '.join(f'{n} {what}' for n, what in shorter if n)}")
    return ": ".join([names, *labels])
