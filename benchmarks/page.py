"""Writes docs/developing/benchmarks.md from the measured results, so that no figure on it is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from pathlib import Path

LAYOUTS = ("MoCo, keys detached", "MoCo, both sides", "SimCLR")

ROOT = Path(__file__).parents[1]

HEAD = """# Benchmarks

Written by `python benchmarks/page.py` from `results/`. Each table was measured in one run (rows with a
star in another), contestants taking turns, so read the ratios: absolute times move by tens of per cent from run to run
on a shared machine.
"""

LOSS = """
## The loss on a CPU

`python benchmarks/loss.py` (`make bench` runs all): value and gradient of plain InfoNCE, d = {d}, tau = {tau}, on
{cores} cores of {cpu}, torch {torch}. Time and memory are relative to a plain `F.cross_entropy`
on the normalised embeddings; memory is what one call adds to the process's resident set at its peak.
pytorch-metric-learning is run up to 256 pairs: its memory is cubic.
"""

LOSS_TAIL = """
`chunked` is what `impl="auto"` picks. Targets: at N = 1,024 not slower than `F.cross_entropy` ({at_1024}), and under a
tenth of its memory at N = 8,192 ({at_8192}). At N = 256 it is slower by 1 to 2 ms, the fixed cost of its
many small operations. `reference` is the oracle that the tests compare with: it builds the whole matrix, and is not
meant to be fast.
"""

VIEWS = """
## Views on a CPU

`python benchmarks/views.py`: images per second, batch {batch}, {size} px, beside kornia with per-sample parameters in
the same run. A ratio above 1 means ours is faster.
"""

VIEWS_TAIL = """
Target: not slower than kornia, operation by operation. Missed for brightness alone, where the one pass that serves
brightness, contrast and saturation costs what kornia's multiplication costs, and the draw of parameters comes on top. A
whole strong view, which is what training uses, is about three times as fast.
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

`python benchmarks/step.py`: MoCo v3 on `shapes`, encoder `{encoder}`, batch {batch}, on {cores} cores of {cpu},
torch {torch}; {rounds} rounds in which every part ran once. The machine had other work, so beside the median stands
the least that was seen.
"""

STEP_TAIL = """
Forward and backward pass are {gflop:.2f} GFLOP, {conv:.0%} of it in convolutions. In their least times they run at
{reached:.0f} GFLOP/s, and a product of two 1,024 x 1,024 matrices at {product:.0f} GFLOP/s. By a profile, their time
goes to {spent}.
So convolutions alone run at about {alone:.0f} GFLOP/s; the rest is spent on operations that multiply little and pass
over the activations.
"""

LOSS_GPU = """
## The loss on a GPU

`python benchmarks/loss.py --device cuda`: value and gradient of plain InfoNCE, d = {d}, tau = {tau}, on an {device}
(driver {driver}), torch {torch}, triton {triton}. Time and memory relative to a plain `F.cross_entropy`, eager, which
multiplies in the inputs' own precision. Memory: what a call takes at its peak beyond its inputs and gradients.
Compilation is in no time. *Products*: the time over that of the matrix products which value and gradient cannot do
without (2 over all pairs with keys detached, 4 with both sides, 3 for SimCLR), at the
{bf16_tflops:.0f} TFLOP/s of a large bf16 product in the same run. *Exp*: the time over that of the exponentials (1, 2
and 2 per pair) at {exps}, measured with a kernel that does nothing else. *Error*: the gradient's relative distance from
that of `F.cross_entropy` in float64 at N = {checked:,}.
"""

LOSS_GPU_TAIL = """
cut-cross-entropy {cut} is Apple's, from its repository; it has no mask, so it cannot express SimCLR. *As it comes* it
skips blocks of gradients below a threshold that is meant for large vocabularies, and its error says what that costs
here; *exact* (`impl="cce_exact"`) skips none. FlexAttention gives the log-sum-exp over the negatives; the values that
it insists on multiplying are cut to 16 columns. torch's own `linear_cross_entropy` {linear}. lightly is {lightly}.
"""

VIEWS_GPU = """
## Views on a GPU

`python benchmarks/views.py --device cuda`: images per second at {size} px on an {device}, from uint8 images on the
device to normalised ones; kornia {kornia} with per-sample parameters, in both of its ways to crop; torchvision
{torchvision} image by image in one process with one thread on {cpu}, from memory. *In a graph*: the same without the
host's launches, as the training step runs it.
"""

STEP_GPU = """
## Training on a GPU

`python benchmarks/step.py --device cuda`: epochs over {images:,} images of 32 px ({data}), batch 256, on an {device}
with {cores} cores, torch {torch}. Beside ours, the CIFAR-10 examples of lightly {lightly} (examples/pytorch), run by a
launcher that changes nothing in them; where the table says so, their `num_workers` or their ResNet-18's stem were
replaced. As written, their network has ImageNet's stem: {theirs:.2f} GFLOP an image where ours, for small images, has
{ours:.2f}. Their MoCo is v2 with a queue, ours is v3. The first epoch is not counted.
"""


def found(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def cell(row, key, form):
    """A number of a row, or nothing where there is none."""
    return format(row[key], form) if row.get(key) is not None else ""


def table(rows, columns):
    """A table from rows; columns: title -> (key, format). What no row has is no column."""
    columns = {title: column for title, column in columns.items() if any(cell(row, *column) for row in rows)}
    text = f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        text += f"| {' | '.join(cell(row, *column) for column in columns.values())} |\n"
    return text


def left_out(rows):
    """What was left out and why, a line per reason."""
    reasons = {}
    for row in rows:
        where = ", ".join(
            str(row[key]) for key in ("layout", "dtype", "n", "view", "batch", "stem", "workers") if key in row
        )
        who = row.get("loss") or row.get("who")
        reasons.setdefault((who, row["why"]), []).append(where)
    lines = [
        f"- {who}: {why}{f' ({places})' if (places := '; '.join(filter(None, where))) else ''}"
        for (who, why), where in reasons.items()
    ]
    return "\nLeft out:\n\n" + "\n".join(lines) + "\n" if lines else ""


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
