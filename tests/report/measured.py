"""Numbers that the pages give, recomputed from the run records: means over seeds, gains, best rates."""

import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from marginlens.paper import TABLES
from marginlens.runs.config import Pretrain
from marginlens.runs.store import scan
from marginlens.settings import build

ROOT = Path(__file__).parents[2]
FULL = {"epochs": 100, "holdout": 0}
NORMS = {"quarters": {}, "whole batches": {"bn_splits": 1}}
MEASURED = {
    "CIFAR-10": ("cifar10", "probe", "cifar10"),
    "CIFAR-100": ("cifar100", "probe", "cifar100"),
    "to CIFAR-10": ("cifar100", "transfer", "cifar10"),
    "to CIFAR-100": ("cifar10", "transfer", "cifar100"),
}
"""By a column's name: the data of pre-training, the evaluation, its data."""
EFFECTS = {
    "plain": "plain",
    "margins": {"cifar10": "margin(m1=0.1, m2=0.4)", "cifar100": "margin(m1=0.5, m2=0.7)"},
    "pos.": "emphasis(s=20)",
    "pos. & curv.": {"cifar10": "emphasis(s=20, c=0.7)", "cifar100": "emphasis(s=40, c=1)"},
    "ratio": "ratio(m1=1.6)",
    "ratio of the whole row": "ratio(m1=1.6, scope=row)",
    "alpha = 0.25, type I": "attenuation(alpha=0.25)",
    "alpha = 0.25, type II": "attenuation(alpha=0.25, kind=II)",
    "alpha = 1, type I": "attenuation(alpha=1)",
    "alpha = 1, type II": "attenuation(alpha=1, kind=II)",
}
"""The rows of the paper's tables as effects, by the data of pre-training where that matters."""


def rows(page, title):
    """Return the rows of all tables under a title of a page, by column."""
    part = (ROOT / page).read_text().split(f"\n## {title}")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"(?:^ *\|.*\n)+", part, flags=re.M):
        head, _, *lines = ([cell.strip().strip("*") for cell in line.split("|")[1:-1]] for line in block.splitlines())
        found += [dict(enumerate(line)) | dict(zip(head, line, strict=True)) for line in lines]
    return found


def records():
    """Return the committed runs."""
    return list(scan(ROOT / "results" / "runs"))


def spelled(row, data):
    """Return the effect of a row for the data of pre-training."""
    effect = EFFECTS[row]
    return effect if isinstance(effect, str) else effect[data]


def chosen(runs, effect, data, **settings):
    """Return the full-length runs of a setting by seed, of MoCo v3 where no method is named."""
    wanted = build(Pretrain, {"method": "mocov3", "data": data, "effect": effect, **settings}).model_dump()
    return {run.settings.seed: run for run in runs if run.settings.model_dump() == wanted | {"seed": run.settings.seed}}


def curves(runs, row, column, **settings):
    """Return top-1 by seed and learning rate of the linear layer."""
    data, kind, on = MEASURED[column]
    found = {}
    for seed, run in chosen(runs, spelled(row, data), data, **settings).items():
        probes = [one for one in run.evaluations if (one.kind, one.data) == (kind, on)]
        full = [one for one in probes if all(getattr(one.settings, name) == x for name, x in FULL.items())]
        if full:
            found[seed] = {one.settings.lr: one.top1 for one in full}
    return found


def at_rate_1(found):
    """Return top-1 by seed at the paper's learning rate."""
    return {seed: tops[1.0] for seed, tops in found.items()}


def at_best(found):
    """Return top-1 by seed at the rate with the highest mean, of the rates that all seeds have.

    Seeds that were probed at one rate alone are left out.
    """
    several = {seed: tops for seed, tops in found.items() if len(tops) > 1}
    if not several:
        return {}
    rates = set.intersection(*(set(tops) for tops in several.values()))
    rate = max(sorted(rates), key=lambda lr: statistics.fmean(tops[lr] for tops in several.values()))
    return {seed: tops[rate] for seed, tops in several.items()}


def gain(ours, plain):
    """Return how far the mean over seeds is above that of plain; None where one has not been run."""
    return mean(ours) - mean(plain) if ours and plain else None


def mean(tops):
    return statistics.fmean(tops.values())


def shown(value, form="0.01"):
    """Write a number as the tables do: two places, half of the last one goes up."""
    return str(Decimal(repr(round(float(value), 9))).quantize(Decimal(form), ROUND_HALF_UP) + 0)


def signed(value):
    """Write a difference with its sign; "" for None."""
    return "" if value is None else f"{'+' if float(shown(value)) >= 0 else ''}{shown(value)}"


def with_spread(tops):
    """Write a mean over seeds and the sample standard deviation, which one seed does not have."""
    spread = f" ± {shown(statistics.stdev(tops.values()))}" if len(tops) > 1 else ""
    return shown(mean(tops)) + spread


def published(table, row, column, method="MoCo"):
    """Return a cell's published number."""
    data, kind, on = MEASURED[column]
    settings = {"method": {"MoCo": "mocov3", "SimCLR": "simclr", "BYOL": "byol"}[method], "data": data}
    effect = spelled(row, data).replace(", scope=row", "")  # the paper has one number for both readings
    to = on if kind == "transfer" else ""
    (cell,) = (
        cell
        for cell in TABLES[table].cells
        if cell.settings | settings | {"effect": effect} == cell.settings and cell.to == to
    )
    return cell.published
