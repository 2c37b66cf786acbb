"""The demo's page, self-contained, and its picture: curves, accuracies, views, maps of features, angles."""

from __future__ import annotations

import base64
import html
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from marginlens.data.atomic import deliver, writing
from marginlens.data.grid import MARK, save_views
from marginlens.train.config import Pretrain, Probe
from marginlens.train.feed import Feed
from marginlens.train.model import make_views
from marginlens.train.record import environment

if TYPE_CHECKING:
    from marginlens.demo import Shown

COLOURS = {"random": "#8a8a8a", "plain": "#1f6fb4", "margin": "#d1495b", "emphasis": "#2a9d6f"}
CLASSES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
Places: TypeAlias = NDArray[np.float32]
MARKS = {"html": "<!doctype html>\n<html[^\n]*\n<title>marginlens demo</title>", "png": MARK}
"""How our page and picture can be told from a stranger's, which are never replaced."""
_POINTS = 1000
_BINS = 45

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin:2.2rem 0 .3rem}
p{max-width:46rem}table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .9rem;border-bottom:1px solid #d9dde2;text-align:right}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}code{background:#f1f3f5;padding:.1rem .3rem;border-radius:3px}
img{max-width:100%;image-rendering:pixelated}.small{color:#5c6670;font-size:.85rem}
.swatch{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.5rem}
"""


def maps(shown: Sequence[Shown]) -> list[Places]:
    """Each encoder's test features in two dimensions, by t-SNE; only who is near whom means anything."""
    from sklearn.manifold import TSNE

    found = []
    for row in shown:
        unit = torch.nn.functional.normalize(row.features[:_POINTS]).numpy()
        near = min(30, (len(unit) - 1) // 3)
        found.append(TSNE(2, init="pca", random_state=0, max_iter=750, perplexity=near).fit_transform(unit))
    return found


def write_page(
    shown: Sequence[Shown],
    places: Sequence[Places],
    feed: Feed,
    settings: Pretrain,
    probe: Probe,
    path: Path,
) -> None:
    """One HTML file that needs no network."""
    bars = _figure(_bars(shown), first=True)
    plots = (_curves(shown), _scatter(shown, places, feed), _histogram(shown))
    curves, scatter, angles = (_figure(plot) for plot in plots)
    facts = environment(torch.device("cpu"))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>marginlens demo</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>
<h1>marginlens demo</h1>
<p>MoCo v3 on <code>shapes</code> (5,000 drawn figures of ten kinds; no labels used) with the
<code>{settings.encoder}</code> encoder: plain, with a margin, and with emphasis of positives. Then a linear layer on
each frozen encoder, trained with labels, tells how much of the kind of figure can be read off the features. The random
encoder is what all began from.</p>
{_table(shown)}
<p>{_verdict(shown)}</p>
<h2>Accuracy</h2><p>Full colour: linear probe. Pale: nearest neighbours.</p>{bars}
<h2>Training</h2><p>Loss and nearest-neighbour accuracy by epoch. With emphasis the value is the plain loss, and the
gradient is not its derivative; with a margin the value itself is another one. So compare losses along a curve, not
between curves.</p>{curves}
<h2>What the encoder sees</h2><p>An image, four strong views (the student's), four weak ones (the teacher's).</p>
<img alt="views" src="data:image/png;base64,{_views(feed, settings)}">
<h2>Maps of the features</h2><p>Test images by t-SNE of their features, coloured by a label that pre-training never
saw. Only neighbourhoods mean anything: not distances between groups, not sizes.</p>{scatter}
<h2>Angles of the positives</h2><p>Between the student's embedding of an image's strong view and the teacher's of its
weak view, on test images. A margin and emphasis both act on this angle.</p>{angles}
<p class="small">{settings.epochs} epochs, batch {settings.batch}, seed {settings.seed}, one seed each; the probe has
{probe.epochs} epochs of batch {probe.batch}. marginlens {facts["marginlens"]}, torch {facts["torch"]},
{html.escape(facts["device"])}; {sum(row.seconds for row in shown):.0f} s of pre-training. The runs are in the
folder beside this page.</p>
</body></html>
"""
    with writing(path, "--out"):
        deliver(path, page.encode(errors="backslashreplace"), MARKS["html"])


def write_picture(shown: Sequence[Shown], places: Sequence[Places], feed: Feed, path: Path) -> None:
    """The same in one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 6.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 12, height_ratios=(1, 1.15))
    _draw_bars(figure.add_subplot(grid[0, :4]), shown)
    _draw_curves(figure.add_subplot(grid[0, 4:8]), shown)
    _draw_angles(figure.add_subplot(grid[0, 8:]), shown)
    labels = feed.labels("test").numpy()
    for i, (row, xy) in enumerate(zip(shown, places, strict=True)):
        axes = figure.add_subplot(grid[1, 3 * i : 3 * i + 3])
        for label, name in enumerate(feed.classes):
            some = xy[labels[: len(xy)] == label]
            axes.scatter(some[:, 0], some[:, 1], s=5, color=CLASSES[label], label=name, linewidths=0)
        axes.set_title(f"{row.name}: {row.probe:.1f} %", fontsize=11)
        axes.set_xticks([])
        axes.set_yticks([])
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(names), fontsize=8, markerscale=2.5, frameon=False
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": "marginlens"})
    with writing(path, "--out"):
        deliver(path, drawn.getvalue(), MARKS["png"])


def _draw_bars(axes: Any, shown: Sequence[Shown]) -> None:
    for i, row in enumerate(shown):
        axes.barh(len(shown) - i, row.probe, color=COLOURS[row.name], height=0.7)
        axes.text(
            row.probe - 1, len(shown) - i, f"{row.probe:.1f}", va="center", ha="right", color="white", fontsize=10
        )
    axes.set_yticks([len(shown) - i for i in range(len(shown))], [row.name for row in shown])
    axes.set_xlim(0, 100)
    axes.set_title("linear probe, top-1 in %", fontsize=11)


def _draw_curves(axes: Any, shown: Sequence[Shown]) -> None:
    for row in shown:
        points = [(m["epoch"], m["knn"]) for m in row.metrics if "knn" in m]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[row.name], label=row.name)
        else:
            axes.axhline(row.knn, color=COLOURS[row.name], ls="--", label=row.name)
    axes.set_xlabel("epoch")
    axes.set_title("nearest neighbours, top-1 in %", fontsize=11)
    axes.legend(fontsize=8, frameon=False)


def _draw_angles(axes: Any, shown: Sequence[Shown]) -> None:
    for row in shown:
        axes.hist(
            row.angles.rad2deg().numpy(), bins=np.linspace(0, 135, _BINS), histtype="step", color=COLOURS[row.name]
        )
    axes.set_xlabel("degrees")
    axes.set_yticks([])
    axes.set_title("angles of the positives", fontsize=11)


def _figure(figure: Any, first: bool = False) -> str:
    """A plot as HTML; the first one brings plotly's script along."""
    found: str = figure.to_html(full_html=False, include_plotlyjs=first, config={"displayModeBar": False})
    return found


def _curves(shown: Sequence[Shown]) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("loss", "kNN, top-1 in %"))
    for row in shown:
        if not row.metrics:
            continue
        style = {"name": row.name, "legendgroup": row.name, "line": {"color": COLOURS[row.name]}}
        epochs = [m["epoch"] for m in row.metrics]
        figure.add_scatter(x=epochs, y=[m["loss"] for m in row.metrics], row=1, col=1, **style)
        near = [(m["epoch"], m["knn"]) for m in row.metrics if "knn" in m]
        figure.add_scatter(x=[e for e, _ in near], y=[k for _, k in near], row=1, col=2, showlegend=False, **style)
    return _laid_out(figure, 340).update_xaxes(title="epoch")


def _bars(shown: Sequence[Shown]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind, values, opacity in (
        ("linear probe", [r.probe for r in shown], 1.0),
        ("kNN", [r.knn for r in shown], 0.5),
    ):
        text = [f"{value:.1f}" for value in values]
        colours = [COLOURS[row.name] for row in shown]
        figure.add_bar(x=[r.name for r in shown], y=values, text=text, name=kind, marker_color=colours, opacity=opacity)
    return _laid_out(figure, 320).update_yaxes(title="top-1 in %", range=[0, 105]).update_layout(showlegend=False)


def _scatter(shown: Sequence[Shown], places: Sequence[Places], feed: Feed) -> Any:
    from plotly.subplots import make_subplots

    labels = feed.labels("test").numpy()
    figure = make_subplots(1, len(shown), subplot_titles=[f"{r.name}: {r.probe:.1f} %" for r in shown])
    for column, xy in enumerate(places, 1):
        for label, name in enumerate(feed.classes):
            some = xy[labels[: len(xy)] == label].round(2)
            figure.add_scatter(
                x=some[:, 0],
                y=some[:, 1],
                mode="markers",
                marker={"size": 4, "color": CLASSES[label]},
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                hoverinfo="name",
                row=1,
                col=column,
            )
    figure = _laid_out(figure, 360).update_xaxes(showticklabels=False).update_yaxes(showticklabels=False)
    return figure.update_layout(legend={"orientation": "h", "y": -0.05, "itemsizing": "constant"})


def _histogram(shown: Sequence[Shown]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for row in shown:
        degrees = row.angles.rad2deg().numpy().round(2)
        bins = {"start": 0, "end": 135, "size": 3}
        figure.add_histogram(x=degrees, name=row.name, xbins=bins, marker_color=COLOURS[row.name], opacity=0.55)
    return _laid_out(figure, 320).update_layout(barmode="overlay").update_xaxes(title="degrees")


def _laid_out(figure: Any, height: int) -> Any:
    return figure.update_layout(template="plotly_white", height=height, margin={"l": 50, "r": 20, "t": 40, "b": 45})


def _table(shown: Sequence[Shown]) -> str:
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{COLOURS[r.name]}"></span>{r.name}</td>'
        f"<td><code>{html.escape(r.effect)}</code></td><td>{r.probe:.1f} %</td><td>{r.knn:.1f} %</td>"
        f"<td>{r.angles.rad2deg().mean():.0f}°</td><td>{f'{r.seconds:.0f} s' if r.seconds else ''}</td></tr>"
        for r in shown
    )
    head = (
        "<tr><th></th><th>effect</th><th>linear probe</th><th>kNN</th><th>positive angle</th><th>pre-training</th></tr>"
    )
    return f"<table>{head}{rows}</table>"


def _verdict(shown: Sequence[Shown]) -> str:
    """What the numbers say, and how much that is worth."""
    best = max(shown, key=lambda row: row.probe)
    plain = next((row for row in shown if row.name == "plain"), best)
    gap = best.probe - plain.probe
    said = f"The best probe is {best.name}'s, {best.probe:.1f} %"
    if best is not plain:
        said += f", {gap:.1f} points above plain's"
    return f"{said}. One seed of a short run on a small set: another seed may move a number by ten points."


def _views(feed: Feed, settings: Pretrain, count: int = 6) -> str:
    """A PNG of views, in base64."""
    chosen = torch.arange(count)
    images = next(iter(feed.plain("train", chosen, settings.size, 0, count)))
    names = [feed.classes[int(label)] for label in feed.labels("train")[:count]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "views.png"
        save_views(images.numpy(), names, make_views(settings, feed), settings.seed, path, zoom=3)
        return base64.b64encode(path.read_bytes()).decode()
