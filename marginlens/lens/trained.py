"""A lens on a trained run: what a margin does to the rows that its embeddings make, in sentences with numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from marginlens.checks import EffectLike, as_effect
from marginlens.data.feed import Feed, open_feed
from marginlens.devices import choose_device, placed
from marginlens.effects import Effect, Margin, factors
from marginlens.evals.features import frozen
from marginlens.files import expanded
from marginlens.lens.live import Lens, embedded, lens_of
from marginlens.lens.parts import decompose, equivalent
from marginlens.loss import Rows, joined
from marginlens.loss import rows as rows_of
from marginlens.methods.protocol import Method, module_of, settings_of
from marginlens.parameters import as_float
from marginlens.runs import checkpoint
from marginlens.runs.model import load_method_of, make_views
from marginlens.runs.run import Run, open_run

MARGIN = "margin(m1=0.4)"
"""The margin that is looked at beside the run's own effect: that of the paper's Fig. 2."""
MOST = 2048
"""Images that are looked at."""


def look(
    run: Run | str | os.PathLike[str], effects: Sequence[EffectLike] = (), data: str = "", device: str = "auto"
) -> dict[str, Any]:
    """Return what a run's embeddings mean for an effect: angles, weights, equivalents, the size of its features.

    Two views of test images pass the trained encoder in eval mode, in batches of the run's size, so that a row has as
    many negatives as in training.

    Args:
        run: The run, its folder, or one of its checkpoints.
        effects: Effects to look at; not given: the run's own and `margin(m1=0.4)`.
        data: Another prepared data set than the run's own.
        device: auto, cpu, cuda or cuda:1.
    """
    opened, method = _load(run)
    settings = opened.settings
    feed = open_feed(data or settings.data, choose_device(device))
    placed(module_of(method), feed.device)
    asked = [as_effect(effect) for effect in effects] or [as_effect(settings.effect), as_effect(MARGIN)]
    split = "test" if "test" in feed.splits else next(iter(feed.splits))
    rows, lens, images = _rows(method, opened, feed, split)
    if bool(rows.A.isneginf().any()):
        for effect in asked:
            if effect.needs_negatives:
                what = f"{effect.needs_negatives} acts through negatives, and {settings.method} has none"
                raise ValueError(f"{effect}: {what}; it takes margin(m1=...) and emphasis(c=...)")
    known = {str(effect): _effect(effect, rows) for effect in asked}
    quarter = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return {
        "run": opened.name,
        "data": feed.name,
        "split": split,
        "images": images,
        "angles": rows.theta.double().quantile(quarter).tolist(),
        "seen": lens.read(),
        "effects": known,
    }


def sentences(found: dict[str, Any]) -> list[str]:
    """Return what was found in words, a sentence for each fact."""
    seen = found["seen"]
    low, middle, high = (math.degrees(x) for x in found["angles"])
    said = [
        f"{found['run']} on {found['images']:,} {found['split']} images of {found['data']}:",
        f"- Positives are at {middle:.0f} degrees in the median; 80 % are between {low:.0f} and {high:.0f}.",
    ]
    if "probability" in seen:
        said.append(
            f"- The loss gives a positive a probability of {seen['probability']:.2f} on average. A row has "
            f"{seen['effective_negatives']:.0f} effective negatives, and {seen['pull']['positive']:.0%} of the pull "
            f"on it comes from its positive."
        )
    for name, facts in found["effects"].items():
        said += [f"- {line}" for line in _lines(name, facts)]
    size = seen["features"]
    said.append(
        f"- Features have a mean norm of {size['norm']:.3g} and an effective rank of {size['rank']:.0f} of "
        f"{size['dimension']}. Features k times as large learn as at k squared times the rate: a linear probe at "
        f"rate 1 on these is one at rate {size['norm'] ** 2:.3g} on features of norm 1."
    )
    return said


def _lines(name: str, facts: dict[str, Any]) -> Iterator[str]:
    if name == "plain":
        return
    parts = {part: value for part, value in facts["parts"].items() if abs(value - 1.0) > 0.005}
    split = ", ".join(f"{part} {value:.3g}" for part, value in parts.items()) or "nothing"
    yield f"{name} multiplies the median positive's gradient by {facts['median']:.3g} ({split})."
    same = [f"emphasis(s={facts['s']:.3g})"] if facts["s"] is not None else []
    same += [f"margin(m2={facts['m2']:.3g})"] if facts["m2"] is not None else []
    if same:
        yield f"{' and '.join(same)} would give the positives the same mean weight, {facts['mean']:.3g}."
    if facts["turns_at"] is not None:
        yield (
            f"theta + m1 passes pi at {math.degrees(facts['turns_at']):.0f} degrees: {facts['repelled']:.1%} of the "
            f"positives are beyond it, and are repelled."
        )


def _effect(effect: Effect, rows: Rows) -> dict[str, Any]:
    """Return what an effect does to rows: at the median angle, on average, and what would be like it."""
    found, same = decompose(effect, rows), equivalent(effect, rows)
    middle = int(rows.theta.argsort()[(len(rows.theta) - 1) // 2])  # the row that `decompose` takes for the median
    m1 = next((as_float(f.m1) for f in factors(effect) if isinstance(f, Margin)), 0.0)
    return {
        "median": float(found.product.positive[middle]),
        "mean": same.weight,
        "parts": {name: float(getattr(found, name).positive[middle]) for name in found._fields},
        "s": same.s,
        "m2": same.m2,
        "turns_at": math.pi - m1 if m1 else None,
        "repelled": float((found.product.sign < 0).double().mean()),
    }


def _load(run: Run | str | os.PathLike[str]) -> tuple[Run, Method]:
    """Return a run and its method, with the weights of the last checkpoint or of the one that is named."""
    if not isinstance(run, Run) and (path := expanded(run)).suffix == ".safetensors":
        if not path.is_file():
            raise ValueError(f"{path} does not exist; name a run's folder, or a file of its checkpoints/")
        opened = open_run(path.parent.parent)
        return opened, load_method_of(opened, checkpoint.read(Path(path), opened.id))
    opened = open_run(run)
    return opened, load_method_of(opened)


def _rows(method: Method, run: Run, feed: Feed, split: str) -> tuple[Rows, Lens, int]:
    """Return the rows of two views of images, a lens that saw them, and the number of images."""
    settings = run.settings
    count = min(MOST, len(feed.labels(split)))
    size = min(settings.batch, count)
    some = torch.arange(count // size * size)
    lens = lens_of(method)
    rows: list[Rows] = []
    with frozen(module_of(method)):
        for views in feed.views(split, some, make_views(settings, feed), settings.seed, 0, size):
            pairs, features = embedded(method, views)
            for q, k in pairs:
                lens.observe(q, k, features)
                rows.append(rows_of(q, k, layout=lens.layout, **settings_of(module_of(method))))
    return Rows(*(x.cpu() for x in joined(rows))), lens, len(some)
