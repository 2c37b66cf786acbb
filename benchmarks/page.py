"""Writes docs/benchmarks.md from the measured results, so that no figure on it is typed by hand.

python benchmarks/page.py
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEAD = """# Benchmarks

Written by `python benchmarks/page.py` from `results/`. Each table was measured in one run, contestants taking turns, so
read the ratios: absolute times move by tens of per cent from run to run on a shared machine.
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
tenth of its memory at N = 8,192 ({at_8192}). At N = 256 it is slower by about a millisecond, the fixed cost of its
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


def page():
    return HEAD + loss_page() + views_page()


if __name__ == "__main__":
    (ROOT / "docs" / "benchmarks.md").write_text(page())
