"""`marginlens demo`: the whole laboratory in a few minutes on a CPU, and a page that shows what came of it."""

from __future__ import annotations

import base64
import io
import json as jsons
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

import marginlens as ml
from marginlens import output
from marginlens.data.contact_sheet import MARK, save_views
from marginlens.data.feed import Feed, open_feed
from marginlens.errors import Stopped
from marginlens.evals import Task
from marginlens.evals.features import features, frozen, plain_images
from marginlens.evals.knn import Knn, knn_accuracy
from marginlens.evals.probe import Probe, measure
from marginlens.files import check_replaceable, deliver, writing
from marginlens.lens.figures import element
from marginlens.lens.page import MARK as MARK_LENS
from marginlens.lens.page import page
from marginlens.lens.parts import decompose
from marginlens.loss import Rows, joined
from marginlens.methods import Method
from marginlens.output import Display, errors
from marginlens.report import render
from marginlens.runs.config import Pretrain
from marginlens.runs.evaluate import probe
from marginlens.runs.model import load_method_of, make_method, make_views
from marginlens.runs.records import Epoch
from marginlens.runs.run import Run
from marginlens.runs.work import environment
from marginlens.settings import build
from marginlens.train.pretrain import pretrain

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

EFFECTS = {
    "plain": "plain",
    "decoupled": "attenuation(alpha=1)",
    "margin": "margin(m2=0.2)",
    "emphasis": "emphasis(s=2, c=1)",
}
"""Plain, the decoupled loss (DCL), and the best margin and emphasis of `results/demo_effects.jsonl`."""
EPOCHS = 10
KNN_EVERY = 2
LENS = 26
"""Steps between looks of the lens: three in an epoch."""
PROBE = Probe(epochs=8, batch=16, lr=0.5, crop_scale=(0.5, 1.0))
"""Short, and in small batches: on 2 cores there is no time for the recipe's hundred epochs."""
BATCH = 250
COLOURS = {
    "random": "#8a8a8a",
    "plain": "#1f6fb4",
    "decoupled": "#8e5aa8",
    "margin": "#d1495b",
    "emphasis": "#2a9d6f",
}
MARKS = {"html": "<!doctype html>\n<html[^\n]*\n<title>marginlens demo</title>", "png": MARK}
"""How our page and picture can be told from a stranger's, which are never replaced."""
POINTS = 1000
"""Of a map."""
SWEEP: list[dict[str, Any]] = jsons.loads((Path(__file__).parent / "report/templates/demo_seeds.json").read_text())
"""Means and standard deviations over five seeds of each effect; `benchmarks/demo_effects.py` wrote them."""

Draw: TypeAlias = "Callable[[FigureBase, Sequence[Shown]], None]"


@dataclass(frozen=True)
class Shown:
    """One line of the demo: a run, or the random encoder that all began from."""

    name: str
    effect: str
    probe: float
    knn: float
    seconds: float
    metrics: list[Epoch]
    """None for the random encoder."""
    places: dict[str, NDArray[np.float32]]
    """Where the map has test images of each kind, (n, 2); only who is near whom means anything."""
    rows: Rows
    """Rows of the loss on two views of the test images."""
    norm: float
    """The mean norm of their features."""

    @property
    def degrees(self) -> Tensor:
        """Angles of the positives, (n,)."""
        return self.rows.theta.rad2deg()

    @property
    def angle(self) -> float:
        """The mean angle in degrees."""
        return float(self.degrees.mean())

    @property
    def weights(self) -> Tensor:
        """How the effect multiplies the gradient of each positive, (n,)."""
        return decompose(self.effect if self.metrics else "plain", self.rows).product.positive


class Seeds(NamedTuple):
    """Five seeds of an effect: mean and standard deviation of what was measured on the test images."""

    seeds: int
    probe: tuple[float, float]
    angle: tuple[float, float]
    norm: tuple[float, float]


def demo(*, out: Path = Path("demo"), epochs: int = EPOCHS, json: bool = False) -> None:
    """Pre-train MoCo v3 on shapes with four losses, probe the runs, and write a page that explains the difference.

    The losses are plain, decoupled, with a margin and with emphasis. This takes three to four minutes on two CPU cores.
    Run it again to continue after a stop. The page shows each run beside five seeds that were run before.

    Args:
        out: The folder to write: report.html, report.png, and the runs.
        epochs: Epochs of each pre-training.
        json: Print the table as JSON.
    """
    begin, plain = time.monotonic(), settings_of("plain", epochs)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {out} ({error.strerror}); give --out another folder") from None
    for kind in MARKS:
        check_replaceable(out / f"report.{kind}", MARKS[kind])
    check_replaceable(out / "lens.html", MARK_LENS)
    feed = open_feed("shapes", torch.device("cpu"))
    console = errors()
    shown, runs = [_random(feed, plain)], []
    for name in EFFECTS:
        console.print(f"\n{name}: {EFFECTS[name]}", markup=False)
        run = _run(settings_of(EFFECTS[name], epochs), out / "runs")
        runs.append(run)
        shown.append(_trained(name, feed, run))
    with writing(out / "report.png", "--out"):
        deliver(out / "report.png", _drawn(_draw_all, (14.4, 6.8), shown, "png"), MARKS["png"])
    with writing(out / "report.html", "--out"):
        deliver(out / "report.html", _page(shown, feed, plain), MARKS["html"])
        deliver(out / "lens.html", page(runs).encode(errors="backslashreplace"), MARK_LENS)
    if json:
        output.say_json(_json(shown))
        return
    output.show(_table(shown))
    output.say(f"wrote report.html, lens.html and report.png in {out}, in {time.monotonic() - begin:.0f} s")


def settings_of(effect: str, epochs: int, **more: Any) -> Pretrain:
    """Return the settings of a run of the demo: the recipe for `shapes`, shorter."""
    asked = {"method": "mocov3", "data": "shapes", "effect": effect, "epochs": epochs, **more}
    settings: Pretrain = build(Pretrain, asked)
    return settings


def _random(feed: Feed, settings: Pretrain) -> Shown:
    """Return the line of the encoder that all runs begin from: it is the floor of a probe."""
    method = make_method(settings)
    display = Display("random", PROBE.epochs, PROBE.epochs, quiet=True)
    task = Task(method.backbone, feed, settings.size, torch.float32, display)
    top1 = measure(task, [PROBE])[PROBE]["top1"]
    near = knn_accuracy(method.backbone, feed, Knn(), settings.size, torch.float32)
    return Shown("random", "", top1, near or 0.0, 0.0, [], *_look(method, feed, settings))


def _run(settings: Pretrain, runs: Path) -> Run:
    try:
        return pretrain(settings, runs=runs, resume=True, device="cpu", knn_every=KNN_EVERY, lens=LENS)
    except Stopped as end:  # here there is no --resume, for it always does
        raise Stopped(str(end).replace("Go on with --resume", "The same command goes on there"), end.code) from None


def _trained(name: str, feed: Feed, run: Run) -> Shown:
    settings = run.settings
    top1 = probe(run, PROBE, device="cpu", quiet=True)["top1"]
    looks = _look(load_method_of(run), feed, settings)
    result = run.result
    return Shown(name, settings.effect, top1, result.knn or 0.0, result.seconds or 0.0, run.metrics, *looks)


def _look(method: Method, feed: Feed, settings: Pretrain) -> tuple[dict[str, NDArray[np.float32]], Rows, float]:
    """Return a map of the test images, what the loss would see of two views of each, and the size of their features."""
    some = torch.arange(len(feed.labels("test")))
    found = features(method.backbone, plain_images(feed, "test", some, settings.size), torch.float32)
    assert isinstance(method, nn.Module)
    with frozen(method):
        views = feed.views("test", some, make_views(settings, feed), settings.seed, 0, BATCH)
        rows = joined(map(method.rows, views))
    return _map(found[:POINTS], feed), rows, float(found.norm(dim=1).mean())


def _map(rows: Tensor, feed: Feed) -> dict[str, NDArray[np.float32]]:
    """Return features of test images in two dimensions, by t-SNE, for each kind of figure."""
    from sklearn.manifold import TSNE

    near = min(30, (len(rows) - 1) // 3)
    tsne = TSNE(2, init="pca", random_state=0, max_iter=750, perplexity=near)
    places = tsne.fit_transform(torch.nn.functional.normalize(rows).numpy())
    labels = feed.labels("test")[: len(places)].numpy()
    return {name: places[labels == label] for label, name in enumerate(feed.classes)}


def _table(shown: list[Shown]) -> Table:
    table = Table("", "effect", "probe", "5 seeds", "kNN", "angle", "time", title="MoCo v3 on shapes: top-1")
    for row in shown:
        taken = f"{row.seconds:.0f} s" if row.seconds else ""
        known = seeds_of(row.effect) if row.effect else None
        before = "{:.1f} ± {:.1f}".format(*known.probe) if known else ""
        table.add_row(
            row.name, row.effect, f"{row.probe:.1f} %", before, f"{row.knn:.1f} %", f"{row.angle:.0f}°", taken
        )
    return table


def _json(shown: list[Shown]) -> str:
    kept = ("name", "effect", "probe", "knn", "seconds")
    rows = [{name: getattr(row, name) for name in kept} | {"angle": row.angle, "norm": row.norm} for row in shown]
    return jsons.dumps({"version": ml.__version__, "rows": rows}, indent=1)


def _page(shown: Sequence[Shown], feed: Feed, settings: Pretrain) -> bytes:
    """Return the page: one HTML file that needs no network."""
    text = render(
        "demo.html.j2",
        shown=shown,
        colours=COLOURS,
        lesson=lesson(shown),
        decoupled=decoupled(),
        epochs=EPOCHS,
        seeds={row.name: seeds_of(row.effect) if row.effect else None for row in shown},
        sweep=SWEEP,
        drawings={name: _svg(name, shown) for name in DRAWINGS},
        views=_views(feed, settings),
        settings=settings,
        probe=PROBE,
        facts=environment(torch.device("cpu")),
    )
    return text.encode(errors="backslashreplace")


def seeds_of(effect: str, batch: int = 64) -> Seeds | None:
    """Return what five seeds of an effect gave; None for an effect that was not in the sweep."""
    for row in SWEEP:
        if (row["effect"], row["batch"]) == (effect, batch):
            return Seeds(row["seeds"], *(tuple(row[name]) for name in ("probe", "angle", "norm")))
    return None


def lesson(shown: Sequence[Shown]) -> dict[str, str]:
    """Return what happened, why, and what a probe at a fixed rate makes of it, by a word for each."""
    known = {row.name: found for row in shown if row.effect and (found := seeds_of(row.effect))}
    plain = next(row for row in shown if row.name == "plain")
    others = [row for row in shown if row.metrics and row is not plain]
    mean, spread = known["plain"].probe
    better = [row.name for row in others if known[row.name].probe[0] > mean + spread]
    verdict = f"{' and '.join(better)} beat plain" if better else "no loss clearly beats plain"
    ranked = sorted(known, key=lambda name: -known[name].probe[0])
    scores = ", ".join(f"{name} {known[name].probe[0]:.0f} ± {known[name].probe[1]:.0f} %" for name in ranked)
    near = min(others, key=lambda row: row.angle)
    if near.angle < plain.angle - 1.0:
        does = "weighs positives more and pulls them" if near.name == "emphasis" else "pulls positives"
        why = (
            f"{near.name.capitalize()} {does} closest: their mean angle is {near.angle:.0f}°, and {plain.angle:.0f}° "
            f"with plain."
        )
        if near.name not in better:
            why += " Closer positives alone are not better features."
    else:
        why = f"No loss pulled positives closer than plain did, whose mean angle is {plain.angle:.0f}°."
    low, high = (choose(row.norm for row in [plain, *others]) for choose in (min, max))
    size = "about equally large" if high < 1.15 * low else f"up to {high / low:.1f} times as large as others"
    return {
        "What happened": (
            f"On these images {verdict}. Over five seeds of {EPOCHS} epochs a linear probe reaches {scores}."
        ),
        "Why": why,
        "What a probe at one rate sees": (
            f"Features are {size} here (mean norm {low:.1f} to {high:.1f}). On CIFAR emphasis made them four times as "
            f"large, and a probe at a low fixed rate then favours it."
        ),
    }


def decoupled() -> str:
    """Return what the sweep says of the decoupled loss and small batches."""
    apart = {}
    for batch in (64, 32):
        plain, other = seeds_of("plain", batch), seeds_of("attenuation(alpha=1)", batch)
        assert plain
        assert other
        points = other.probe[0] - plain.probe[0]
        apart[batch] = f"{abs(points):.1f} points {'above' if points > 0 else 'below'} plain at batch {batch}"
        apart[batch] += " (within the spread of seeds)" if abs(points) < max(plain.probe[1], other.probe[1]) else ""
    return f"The decoupled loss (DCL) is meant for small batches: over five seeds it is {' and '.join(apart.values())}."


def _views(feed: Feed, settings: Pretrain, count: int = 6) -> str:
    """Return a PNG of views, in base64."""
    images = next(iter(feed.plain("train", torch.arange(count), settings.size, 0, count)))
    names = [feed.classes[int(label)] for label in feed.labels("train")[:count]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "views.png"
        save_views(images.numpy(), names, make_views(settings, feed), settings.seed, path, zoom=3)
        return base64.b64encode(path.read_bytes()).decode()


def _svg(name: str, shown: Sequence[Shown]) -> str:
    """Return a drawing for the page."""
    return element(_drawn(*DRAWINGS[name], shown, "svg"), name)


def _drawn(draw: Draw, size: tuple[float, float], shown: Sequence[Shown], kind: Literal["png", "svg"]) -> bytes:
    """Return a drawing as the bytes of a file, which are the same for the same numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    facts = {"Software": "marginlens"} if kind == "png" else dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn = io.BytesIO()
    with matplotlib.rc_context(
        {"font.sans-serif": ["DejaVu Sans"], "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "marginlens"}
    ):
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        draw(figure, shown)
        figure.savefig(drawn, format=kind, metadata=facts)
    return drawn.getvalue()


def _draw_all(figure: FigureBase, shown: Sequence[Shown]) -> None:
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.15))[:, 0]
    parts = [*top.subfigures(1, 4, squeeze=False, width_ratios=(1.3, 1.9, 1, 1.1))[0], bottom]
    for (draw, _), part in zip(DRAWINGS.values(), parts, strict=True):
        draw(part, shown)


def _draw_accuracy(figure: FigureBase, shown: Sequence[Shown]) -> None:
    axes, colours = figure.subplots(), [COLOURS[row.name] for row in shown]
    bars = axes.bar(range(len(shown)), [row.probe for row in shown], 0.6, color=colours)
    axes.bar_label(bars, fmt="%.0f", fontsize=8, label_type="center", color="white")
    for place, row in enumerate(shown):
        if row.effect and (known := seeds_of(row.effect)):
            axes.errorbar(place + 0.4, *known.probe, fmt="o", color="black", ms=4, capsize=3)
    axes.set_xticks(range(len(shown)), [row.name for row in shown], fontsize=8)
    axes.set(title="linear probe in % (dot: mean and std of 5 seeds)", ylim=(0, 105))


def _draw_training(figure: FigureBase, shown: Sequence[Shown]) -> None:
    loss, near = figure.subplots(1, 2, sharex=True)
    for row in shown:
        style = {"color": COLOURS[row.name], "label": row.name}
        if row.metrics:
            loss.plot([x.epoch for x in row.metrics], [x.loss for x in row.metrics], "o-", **style)
            points = [(x.epoch, x.knn) for x in row.metrics if x.knn is not None]
            near.plot(*np.transpose(points), "o-", **style)
        else:
            near.axhline(row.knn, ls="--", **style)
    for axes, title in ((loss, "loss"), (near, "kNN, top-1 in %")):
        axes.set(title=title, xlabel="epoch")
        axes.locator_params(axis="x", integer=True)
    near.legend(fontsize=8, frameon=False)


def _draw_angles(figure: FigureBase, shown: Sequence[Shown]) -> None:
    axes = figure.subplots()
    for row in shown:
        axes.hist(row.degrees.numpy(), range(0, 91, 3), histtype="step", color=COLOURS[row.name], lw=1.4)
    axes.set(title="angles of the positives", xlabel="degrees", yticks=[])


def _draw_weights(figure: FigureBase, shown: Sequence[Shown]) -> None:
    """Draw how each effect multiplies the gradient of a positive, over the angles that occurred in its run."""
    axes = figure.subplots()
    for row in shown:
        if not row.metrics:
            continue
        angle, weight = row.degrees.double(), row.weights
        places = angle.quantile(torch.linspace(0.02, 0.98, 13, dtype=torch.float64))
        bins = [(angle >= low) & (angle <= high) for low, high in pairwise(places)]
        middle = [float(angle[some].mean()) for some in bins]
        low, half, high = ([float(weight[some].quantile(share)) for some in bins] for share in (0.1, 0.5, 0.9))
        axes.plot(middle, half, color=COLOURS[row.name], label=row.name)
        axes.fill_between(middle, low, high, color=COLOURS[row.name], alpha=0.15, lw=0)
    axes.axhline(1.0, color="black", lw=0.5)
    axes.set(title="weight on the positive's gradient", xlabel="degrees", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=7)


def _draw_maps(figure: FigureBase, shown: Sequence[Shown]) -> None:
    for axes, row in zip(figure.subplots(1, len(shown)), shown, strict=True):
        for name, places in row.places.items():
            axes.plot(*places.T, "o", ms=2.2, mew=0, label=name)
        axes.set(title=f"{row.name}: {row.probe:.1f} %", xticks=[], yticks=[])
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), markerscale=2.5, frameon=False)


DRAWINGS: dict[str, tuple[Draw, tuple[float, float]]] = {
    "accuracy": (_draw_accuracy, (6.4, 3.0)),
    "training": (_draw_training, (9.6, 3.2)),
    "angles": (_draw_angles, (6.4, 3.0)),
    "weights": (_draw_weights, (6.4, 3.2)),
    "maps": (_draw_maps, (9.6, 3.3)),
}
"""A function that draws each part of the page, and its size in inches."""
