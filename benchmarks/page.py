"""Write docs/developing/benchmarks.md from the measured results, so that no number on it is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from pathlib import Path

LAYOUTS = ("MoCo, keys detached", "MoCo, both sides", "SimCLR")

ROOT = Path(__file__).parents[1]

HEAD = """# Benchmarks

How fast is marginlens beside other packages? `python benchmarks/page.py` writes this page from `results/`.

Each table was measured in one run, with the packages taking turns; rows with a star are from another run. Read the
ratios: absolute times move by tens of per cent from run to run on a shared machine.
"""

LOSS = """
## The loss on a CPU

`python benchmarks/loss.py`: value and gradient of plain InfoNCE, d = {d}, tau = {tau}, on {cores} cores of {cpu},
torch {torch}. Time and memory are relative to a plain `F.cross_entropy` on normalised embeddings. Memory is the peak
growth of the process's resident set in one call. pytorch-metric-learning needs cubic memory, so it runs up to 256
pairs.
"""

LOSS_TAIL = """
`impl="auto"` picks `chunked` on a CPU. It meets both targets: not slower than `F.cross_entropy` at N = 1,024
({at_1024}), and under a tenth of its memory at N = 8,192 ({at_8192}). At N = 256 its many small operations cost 1 to
2 ms more. `reference` builds the whole matrix; tests compare with it, and it is not meant to be fast.
"""

VIEWS = """
## Views on a CPU

`python benchmarks/views.py`: images per second, batch {batch}, {size} px, beside kornia with per-sample parameters.
Ours is faster where the ratio is above 1.
"""

VIEWS_TAIL = """
The target is not to be slower than kornia in any operation. Brightness alone misses it, because one pass serves
brightness, contrast and saturation, and parameters are drawn on top. A whole strong view, as training uses it, is
about three times as fast.
"""


def loss_page():
    found = json.loads((ROOT / "results" / "loss_cpu.json").read_text())
    rows = found["rows"]
    text = LOSS.format(**found["facts"])
    text += "\n| layout | N | loss | ms | time | MiB | memory |\n|---|---|---|---|---|---|---|\n"
    for row in rows:
        text += (
            f"| {row['layout']} | {row['n']:,} | {row['loss']} | {row['ms']:.1f} | {row['time_ratio']:.2f} "
            f"| {row['peak_mib']:.1f} | {row['memory_ratio']:.3f} |\n"
        )
    chunked = [r for r in rows if r["loss"] == "chunked"]
    at_1024 = ", ".join(f"{r['time_ratio']:.2f}" for r in chunked if r["n"] == 1024)
    at_8192 = ", ".join(f"{r['memory_ratio']:.3f}" for r in chunked if r["n"] == 8192)
    return text + LOSS_TAIL.format(at_1024=at_1024, at_8192=at_8192)


def views_page():
    found = json.loads((ROOT / "results" / "views_cpu.json").read_text())
    text = VIEWS.format(**found["facts"])
    text += "\n| operation | threads | ours | kornia | ratio |\n|---|---|---|---|---|\n"
    for row in found["rows"]:
        speeds = f"{row['ours']:,.0f} | {row['kornia']:,.0f} | {row['ratio']:.2f}"
        text += f"| {row['operation']} | {row['threads']} | {speeds} |\n"
    return text + VIEWS_TAIL


STEP = """
## The demo's step on a CPU

`python benchmarks/step.py`: MoCo v3 on `shapes`, encoder `{encoder}`, batch {batch}, on {cores} cores of {cpu}, torch
{torch}. Every part ran once in each of {rounds} rounds. The machine had other work, so the table has the least time
beside the median.
"""

STEP_TAIL = """
Forward and backward pass take {gflop:.2f} GFLOP, {conv:.0%} of it in convolutions. In their least times they run at
{reached:.0f} GFLOP/s. A product of two 1,024 x 1,024 matrices runs at {product:.0f} GFLOP/s, convolutions alone at
about {alone:.0f}. A profile splits their time into {spent}.
"""

LOSS_GPU = """
## The loss on a GPU

`python benchmarks/loss.py --device cuda`: value and gradient of plain InfoNCE, d = {d}, tau = {tau}, on an {device}
(driver {driver}), torch {torch}, triton {triton}. No time includes compilation. The rates of products and
exponentials were measured in the same run.

| column | meaning |
|---|---|
| time, memory | relative to a plain eager `F.cross_entropy`, which multiplies in the inputs' own precision |
| MiB | peak memory of a call beyond its inputs and gradients |
| products | the time over that of the matrix products (2; both sides 4; SimCLR 3) at {bf16_tflops:.0f} TFLOP/s |
| exp | the time over that of the exponentials (1; both sides 2; SimCLR 2 per pair) at {exps} |
| error | the gradient's relative distance from that of `F.cross_entropy` in float64, at N = {checked:,} |
"""

LOSS_GPU_TAIL = """
cut-cross-entropy {cut} is Apple's. It has no mask, so it cannot express SimCLR. *As it comes* it skips blocks of
gradients below a threshold that is meant for large vocabularies; *exact* (`impl="cce_exact"`) skips none.
FlexAttention gives the log-sum-exp over the negatives, with values cut to 16 columns. torch's own
`linear_cross_entropy` {linear}. lightly is {lightly}.
"""

VIEWS_GPU = """
## Views on a GPU

`python benchmarks/views.py --device cuda`: images per second at {size} px on an {device}, from uint8 images on the
device to normalised ones. kornia {kornia} has per-sample parameters, and both of its ways to crop are shown.
torchvision {torchvision} runs image by image, in one process with one thread on {cpu}, from memory. *In a graph* has
no launches by the host, as in the training step.
"""

STEP_GPU = """
## Training on a GPU

`python benchmarks/step.py --device cuda`: epochs over {images:,} images of 32 px ({data}), batch 256, on an {device}
with {cores} cores, torch {torch}. The first epoch is not counted. Our MoCo v3 has batch norms over the whole batch.

Beside ours are the CIFAR-10 examples of lightly {lightly} (examples/pytorch). A launcher runs them unchanged, except
for `num_workers` or the stem of ResNet-18 where the table says so. As written, their network has ImageNet's stem:
{theirs:.2f} GFLOP an image, where ours for small images has {ours:.2f}. Their MoCo is v2 with a queue.
"""


def found(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def cell(row, key, form):
    """Format a number of a row; "" if the row has none."""
    return format(row[key], form) if row.get(key) is not None else ""


def table(rows, columns):
    """Return a table of rows; columns: title -> (key, format). A column that no row has is left out."""
    columns = {title: column for title, column in columns.items() if any(cell(row, *column) for row in rows)}
    text = f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        text += f"| {' | '.join(cell(row, *column) for column in columns.values())} |\n"
    return text


def left_out(rows):
    """Return a table of the skipped measurements, a row per package and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        where = ", ".join(
            str(row[key]) for key in ("layout", "dtype", "n", "view", "batch", "stem", "workers") if key in row
        )
        who = row.get("loss") or row.get("who")
        reasons.setdefault((who, row["why"]), []).append(where)
    rows = "".join(f"| {who} | {why} | {'; '.join(filter(None, where))} |\n" for (who, why), where in reasons.items())
    return f"\nSkipped:\n\n| package | reason | where |\n|---|---|---|\n{rows}" if rows else ""


def step_page():
    if not (content := found("step_cpu")):
        return ""
    rows, least = content["rows"], content["rates"]["least"]
    total = {key: sum(row[key] for row in rows) for key in ("median_ms", "least_ms")}
    rows = [row | {"share": row["least_ms"] / total["least_ms"]} for row in [*rows, {"part": "whole", **total}]]
    columns = {"part": ("part", ""), "median, ms": ("median_ms", ".1f"), "least, ms": ("least_ms", ".1f")}
    text = STEP.format(**content["facts"]) + table(rows, columns | {"share": ("share", ".0%")})
    return text + STEP_TAIL.format(
        gflop=content["gflop"],
        conv=content["convolutions_gflop"] / content["gflop"],
        reached=least["gflops"],
        product=least["product_gflops"],
        alone=least["convolutions_gflops"],
        spent=", ".join(f"{kind} ({share:.0%})" for kind, share in content["spent"].items()),
    )


def loss_gpu_page():
    if not (content := found("loss_gpu")):
        return ""
    facts, roofs = content["facts"], content["roofs"]
    exps = f"{roofs['exponentials_per_s'] / 1e12:.2f} T/s" if "exponentials_per_s" in roofs else "a rate not measured"
    text = LOSS_GPU.format(**facts, exps=exps, bf16_tflops=roofs.get("bf16_tflops", float("nan")))
    columns = {"layout": ("layout", ""), "inputs": ("dtype", ""), "N": ("n", ","), "loss": ("loss", "")}
    columns |= {"ms": ("ms", ".3f"), "time": ("time_ratio", ".3f"), "MiB": ("peak_mib", ",.1f")}
    columns |= {"memory": ("memory_ratio", ".4f"), "products": ("products_ratio", ".2f")}
    columns |= {"exp": ("exponentials_ratio", ".2f"), "in a graph, ms": ("graph_ms", ".3f")}
    rows = [row | {"loss": row["loss"] + " *" * row.get("earlier", False)} for row in content["rows"]]
    for row in rows:
        if "emphasis" in row["loss"]:  # its gradient is not the plain loss's
            row.pop("gradient_error", None)
    rows.sort(key=lambda row: (LAYOUTS.index(row["layout"]), row["dtype"], row["n"]))
    text += table(rows, columns | {"error": ("gradient_error", ".0e")})
    if any(row.get("earlier") for row in content["rows"]):
        text += "\n\\* from an earlier run, when an eager call of ours still cost the host twice as much.\n"
    has = any(row["loss"] == "torch linear_cross_entropy" for row in content["rows"])
    linear = "is in its chunked form" if has else f"is not in torch {facts['torch']}"
    text += LOSS_GPU_TAIL.format(cut=facts["cut-cross-entropy"], lightly=facts["lightly"], linear=linear)
    if (most := max(row["n"] for row in content["rows"])) < 4096:
        text += f"\nThe run ended after N = {most:,}; [performance.md](performance.md) has our kernels at every size.\n"
    return text + left_out(content["left_out"])


def views_gpu_page():
    if not (content := found("views_gpu")):
        return ""
    columns = {"view": ("view", ""), "batch": ("batch", ","), "who": ("who", ""), "images/s": ("images_per_s", ",.0f")}
    columns |= {"ms": ("ms", ".3f"), "in a graph, ms": ("graph_ms", ".3f"), "MiB": ("peak_mib", ",.1f")}
    columns |= {f"times {content['facts']['cores']} cores": ("images_per_s_times_cores", ",.0f")}
    text = VIEWS_GPU.format(**content["facts"]) + table(content["rows"], columns)
    return text + left_out(content["left_out"])


def step_gpu_page():
    if not (content := found("step_gpu")):
        return ""
    facts = content["facts"]
    stems = facts["gflop_per_image"]
    text = STEP_GPU.format(**facts, theirs=stems["imagenet"], ours=stems["small"])
    rows = [row | {"as": "as written" if row.get("as_written") else ""} for row in content["rows"] if "why" not in row]
    columns = {"who": ("who", ""), "method": ("method", ""), "": ("as", ""), "stem": ("stem", "")}
    columns |= {"workers": ("workers", ""), "precision": ("precision", ""), "s/epoch": ("seconds_per_epoch", ".2f")}
    columns |= {"images/s": ("images_per_s", ",.0f"), "ms/step": ("ms_per_step", ".2f")}
    text += table(rows, columns)
    missing = [{"who": f"{row['who']}, {row['method']}", "why": row["why"]} for row in content["rows"] if "why" in row]
    return text + left_out(missing)


def page():
    return HEAD + loss_page() + views_page() + step_page() + loss_gpu_page() + views_gpu_page() + step_gpu_page()


if __name__ == "__main__":
    (ROOT / "docs" / "developing" / "benchmarks.md").write_text(page())
