"""Train MoCo v3 on `shapes` with nine effects and five seeds each: the numbers behind the demo.

    python benchmarks/demo_effects.py runs results/demo_effects.jsonl --share 0/2 &
    python benchmarks/demo_effects.py runs results/demo_effects.jsonl --share 1/2
    python benchmarks/demo_effects.py runs results/demo_effects.jsonl --summary FILE

Protocol, fixed before the first run:

- Settings are the demo's: the recipe for `shapes`, 10 epochs. Seeds 0 to 4. Plain and the decoupled loss also run at
  half the recipe's batch and learning rate, because the decoupled loss was proposed for small batches.
- Each backbone gets the demo's probe at five learning rates, twice: tested on 1,000 training images that were kept
  back (`holdout`), and tested on the test set. The rate that suits a backbone is chosen by the first.
- The demo shows plain, the decoupled loss, the best margin and the best emphasis. Best means the highest mean over
  seeds, on the images kept back, at the demo's rate.
- Also recorded: kNN, the mean norm of the features, the mean angle of the positives on test images.

A line is written when a run is complete; the same command continues after a stop. The demo reads the summary from
marginlens/report/templates/demo_seeds.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import marginlens as ml
from marginlens.data.feed import open_feed
from marginlens.demo import EPOCHS, PROBE, settings_of
from marginlens.evals.features import frozen
from marginlens.runs.model import load_method_of, make_views

EFFECTS = (
    "plain",
    "attenuation(alpha=1)",
    "margin(m1=0.2, m2=0.1)",
    "margin(m2=0.2)",
    "emphasis(s=2)",
    "emphasis(s=2, c=1)",
    "ratio(m1=0.4)",
    "ratio(m1=0.4, scope=row)",
    "attenuation(alpha=1, kind=II)",
)
SMALL = ("plain", "attenuation(alpha=1)")
"""Effects that are also trained at half the batch."""
SEEDS = range(5)
RATES = (0.05, 0.15, 1.5, 5.0)
"""Learning rates of the probe besides the demo's."""
HOLDOUT = 1000


def plan() -> list[dict[str, Any]]:
    """Return the settings of every run, seed by seed, so that all effects have equally many at any time."""
    return [
        {"effect": effect, "seed": seed, **more}
        for seed in SEEDS
        for more, effects in (({}, EFFECTS), ({"batch": 32, "lr": 0.1}, SMALL))
        for effect in effects
    ]


def line(asked: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Train one run, measure it, and return its line."""
    settings = settings_of(epochs=EPOCHS, **asked)
    run = ml.pretrain(settings, runs=runs, resume=True, device="cpu", quiet=True)
    probes = {}
    for name, holdout in (("holdout", HOLDOUT), ("test", 0)):
        ml.probe(run, PROBE.model_copy(update={"holdout": holdout}), device="cpu", quiet=True, beside=RATES)
        found = [e for e in run.evaluations if e.kind == "probe" and e.settings.holdout == holdout]
        probes[name] = {f"{e.rate:g}": e.top1 for e in sorted(found, key=lambda e: e.rate)}
    norms = [e.feature_norm for e in run.evaluations if e.kind == "probe" and not e.settings.holdout]
    known = {"run": run.id, "batch": settings.batch, "knn": run.result.knn, "feature_norm": norms[0]}
    device = {"device": run.device, "seconds": run.result.seconds}
    return asked | known | {"angle": _angle(run), "probe": probes} | device


def _angle(run: Any) -> float:
    """Return the mean angle of the positives on the test images, in degrees."""
    feed, method = open_feed("shapes", torch.device("cpu")), load_method_of(run)
    some = torch.arange(len(feed.labels("test")))
    with frozen(method):
        views = feed.views("test", some, make_views(run.settings, feed), run.settings.seed, 0, 250)
        return float(torch.cat([method.rows(pair).theta for pair in views]).rad2deg().mean())


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means and standard deviations over seeds, by effect and batch, in the order of the plan."""
    rows = []
    for asked in plan()[: len(plan()) // len(SEEDS)]:
        batch = asked.get("batch", 64)
        same = [x for x in lines if (x["effect"], x["batch"]) == (asked["effect"], batch)]
        measured = {
            "holdout": [x["probe"]["holdout"][f"{PROBE.lr:g}"] for x in same],
            "probe": [x["probe"]["test"][f"{PROBE.lr:g}"] for x in same],
            "knn": [x["knn"] for x in same],
            "angle": [x["angle"] for x in same],
            "norm": [x["feature_norm"] for x in same],
        }
        spread = {n: [round(statistics.mean(v), 2), round(statistics.stdev(v), 2)] for n, v in measured.items()}
        rows.append({"effect": asked["effect"], "batch": batch, "seeds": len(same), **spread})
    return rows


def main() -> None:
    """Run a share of the plan, or sum up what was run."""
    reader = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    reader.add_argument("runs", type=Path)
    reader.add_argument("out", type=Path)
    reader.add_argument("--share", default="0/1")
    reader.add_argument("--summary", type=Path, help="write means over seeds here, and run nothing")
    asked = reader.parse_args()
    if asked.summary:
        lines = [json.loads(x) for x in asked.out.read_text().splitlines()]
        asked.summary.write_text(json.dumps(summary(lines), indent=1) + "\n")
        return
    part, of = (int(x) for x in asked.share.split("/"))
    for number, one in enumerate(plan()):
        done = [json.loads(x) for x in asked.out.read_text().splitlines()] if asked.out.exists() else []
        same = ("effect", "seed", "batch")
        batch = one.get("batch", 64)
        if number % of != part or any([x[n] for n in same] == [one["effect"], one["seed"], batch] for x in done):
            continue
        text = json.dumps(line(one, asked.runs))
        with asked.out.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
