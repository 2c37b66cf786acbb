"""The lens as a page: one HTML file to touch, with what recorded runs met laid over. It needs no server and no network.

Its pictures are computed in the browser by `templates/lens-math.js`, the twin of `marginlens.effects` in JavaScript.
An effect without a twin is named on the page, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from marginlens.effects import EFFECTS
from marginlens.lens import trained
from marginlens.report import environment
from marginlens.runs.records import Look
from marginlens.runs.run import Run

MARK = "<!doctype html>\n<html[^\n]*\n<title>marginlens lens</title>"
"""How our page begins. A stranger's file, which does not, is never replaced."""
MOST_STEPS = 60
"""Steps of a run that the page keeps, evenly chosen, the last one among them."""
_TEMPLATES = environment("marginlens.lens")


@dataclass(frozen=True)
class Twin:
    """An effect that the page can draw."""

    does: str
    """One line for its switch."""
    positive: str
    """Its weight on the positive, in HTML."""
    negative: str
    where: str
    """Its equation in the paper."""


TWINS = {
    "plain": Twin("the loss without an effect", "1", "1", "Eq. 3"),
    "margin": Twin(
        "moves the positive's logit",
        "sin(θ + m1) / sin θ · (1 − βq) / (1 − βq̃)",
        "(1 − q) / (1 − q̃)",
        "Theorem 4.1, Eq. 6",
    ),
    "emphasis": Twin("scales the positive's pull", "s · (1 − (θ / π)<sup>c</sup>)<sup>1/c</sup>", "1", "Eq. 11"),
    "ratio": Twin(
        "one part of a margin: its ratio",
        "(1 − q) / (1 − q̃), q with a margin m1",
        "1, or the same where it weights the whole row",
        "Lemma 4.2, Alg. 4",
    ),
    "attenuation": Twin(
        "keeps gradients from fading",
        "1 / (1 − αq̃)",
        "the same in type I, 1 in type II",
        "Eq. 12, Algs. 5, 6",
    ),
}
"""Effects with a twin in `templates/lens-math.js`. A new effect works without one: the page says that it is missing."""


@dataclass(frozen=True)
class Preset:
    """A state of the page that shows one thing."""

    name: str
    says: str
    effect: str
    positive: float
    """The positive's angle in degrees."""
    tau: float = 0.25
    copies: int = 1
    """Negatives that each one on the circle stands for."""
    maps: Literal["weights", "split", "gradients"] = "weights"


PRESETS = (
    Preset(
        "Plain (Fig. 1)",
        "A pull fades as the positive becomes probable; a push fades as its negative becomes improbable.",
        "plain",
        55,
        maps="gradients",
    ),
    Preset(
        "Angular margin (Fig. 2)",
        "The angular margin m1 pulls near positives much harder (first map) and scales the whole row (second map).",
        "margin(m1=0.4)",
        40,
        maps="split",
    ),
    Preset(
        "Subtractive margin",
        "The subtractive margin m2 keeps the whole row learning where the plain loss is nearly satisfied.",
        "margin(m2=0.3)",
        30,
    ),
    Preset(
        "Ratio (Fig. 8)",
        "The ratio alone never repels. It is largest at θ = (π − m1) / 2, here 67°, and a high probability.",
        "ratio(m1=0.8, scope=row)",
        67,
    ),
    Preset(
        "ArcFace-like",
        "With ArcFace's margin and scale, a positive beyond 151° is repelled. ArcFace has a fallback there; "
        "the paper has none.",
        "margin(m1=0.5)",
        168,
        tau=0.016,
    ),
    Preset(
        "DCL",
        "Decoupled contrastive learning is attenuation at alpha = 1: gradients no longer fade as the positive becomes "
        "probable.",
        "attenuation(alpha=1)",
        25,
    ),
    Preset(
        "Emphasis, s = 20",
        "Emphasis pulls the positive 20 times as hard and leaves each push as it is. The paper calls it pos.",
        "emphasis(s=20)",
        55,
    ),
)
START = 1
"""The preset that the page opens with: a margin."""


def recorded(run: Run) -> list[Look]:
    """Return what a lens recorded of a run, at `MOST_STEPS` steps at most; without a record, look at its weights."""
    if not run.looks:
        return [look_at(run)]
    found = [line for line in run.looks if any(map(any, line.joint.counts))]
    if not found:
        raise ValueError(f"{run.path / 'lens.jsonl'} has no row in it; record some: marginlens pretrain ... --lens 50")
    if len(found) > MOST_STEPS:
        found = [found[round(i * (len(found) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
    return found


def look_at(run: Run) -> Look:
    """Return what a lens sees of a run's last weights."""
    if not run.complete or not run.weights:
        how = "record one while it trains: marginlens pretrain ... --lens 50"
        raise ValueError(f"{run.path} has no lens.jsonl, and no weights of a complete run to look at; {how}")
    seen = trained.look(run)["seen"]
    return Look.model_validate({"epoch": run.result.epochs, "step": run.result.steps, **seen})


def page(runs: Sequence[Run] = ()) -> str:
    """Return the whole page, with the recorded distributions of these runs laid over its maps."""
    overlays = [_overlay(run, recorded(run)) for run in runs]
    missing = [name for name in EFFECTS if name not in TWINS]
    data = {"presets": [asdict(preset) for preset in PRESETS], "start": START, "runs": overlays}
    return _TEMPLATES.get_template("lens.html.j2").render(
        data=data, presets=PRESETS, start=START, twins=TWINS, missing=missing, runs=[run["name"] for run in overlays]
    )


def _overlay(run: Run, found: Sequence[Look]) -> dict[str, Any]:
    chosen = run.settings
    return {
        "name": run.name,
        "effect": chosen.effect,
        "tau": chosen.tau,
        "beta": chosen.beta,
        "steps": [line.step for line in found],
        "joints": [line.joint.model_dump(include={"theta", "q", "counts"}) for line in found],
    }
