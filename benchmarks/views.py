"""Compare random views on this machine's CPU: images per second by operation, ours and kornia's, in one run.

    python benchmarks/views.py [--batch 256] [--size 32] [--out results/views_cpu.json]
    python benchmarks/views.py --device cuda          whole views on a GPU (views_gpu.py) -> results/views_gpu.json

Both sides draw their parameters per sample (kornia: same_on_batch=False), with the recipe's probabilities. Rows of
single operations start from float images. Whole views start from uint8 and end normalised. Kornia has two ways to crop,
and each row takes the faster one. Kornia does less: its crops are not antialiased, and its jitter has one order per
batch.

Times are medians of rounds in which both sides run once. Read the ratio. Use one thread on a busy machine: with more
threads, every barrier waits for the slowest core (see `load`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import machine
import torch

from marginlens.data import draw, pixels
from marginlens.data.draw import Slot
from marginlens.data.views import View, _chosen, make_view, strong, weak

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
JITTER = (0.4, 0.4, 0.4, 0.1)


def uniforms(x, blocks=draw.BLOCKS_WITHOUT_ATTEMPTS):
    return draw.uniforms(torch.arange(len(x)), 0, 0, 0, blocks)


def resized_crop(x):
    u = uniforms(x, draw.BLOCKS)
    boxes = draw.resized_boxes(u, *x.shape[2:], (0.2, 1.0), (3 / 4, 4 / 3))
    return pixels.crop(x, boxes, x.shape[3], u[:, Slot.FLIP] < 0.5)


def padded_crop(x):
    u = uniforms(x)
    boxes = draw.padded_boxes(u, *x.shape[2:], x.shape[3], 4)
    return pixels.crop(x, boxes, x.shape[3], u[:, Slot.FLIP] < 0.5)


def adjust(operation):
    def run(x):
        factors = draw.jitter_factors(uniforms(x), JITTER)
        return pixels.adjust(x, torch.full((len(x),), operation), factors[:, operation])

    return run


def hue(x):
    return pixels.hue(x, draw.jitter_factors(uniforms(x), JITTER)[:, pixels.HUE])


def jitter(x):
    u = uniforms(x)
    order = draw.below(u[:, Slot.ORDER], 24)
    return _chosen(x.clone(), u[:, Slot.JITTER] < 0.8, pixels.jitter, draw.jitter_factors(u, JITTER), order)


def grey(x):
    return _chosen(x.clone(), uniforms(x)[:, Slot.GREY] < 0.2, pixels.grey)


def blur(x):
    u = uniforms(x)
    sigma = draw.between(u[:, Slot.SIGMA], 0.1, 2.0)
    return _chosen(x.clone(), u[:, Slot.BLUR] < 0.5, lambda y, s: pixels.blur(y, s, 6), sigma)


def solarise(x):
    return _chosen(x.clone(), uniforms(x)[:, Slot.SOLARISE] < 0.2, pixels.solarise)


def normalise(x):
    return pixels.normalise(x, MEAN, STD)


def view(view: View):
    return lambda images: make_view(images, torch.arange(len(images)), view, 0, 0, 0)


def kornia_crops(size, *after):
    """Return both of kornia's ways to crop, each followed by the other operations."""
    import kornia.augmentation as K

    crops = [K.RandomResizedCrop((size, size), scale=(0.2, 1.0), cropping_mode=m) for m in ("slice", "resample")]
    return [torch.nn.Sequential(c, K.RandomHorizontalFlip(p=0.5), *after) for c in crops]


def from_bytes(module):
    return lambda images: module(images.float() / 255)


def operations(size):
    """Return name: (ours, kornia's, input)."""
    import kornia.augmentation as K

    flip, normal = K.RandomHorizontalFlip(p=0.5), K.Normalize(MEAN, STD)
    padded = [K.RandomCrop((size, size), padding=4, cropping_mode=m) for m in ("slice", "resample")]
    colours = (
        K.ColorJitter(*JITTER, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.RandomGaussianBlur((13, 13), (0.1, 2.0), p=0.5),
    )
    return {
        "resized crop + flip": (resized_crop, kornia_crops(size), "float"),
        "padded crop + flip": (padded_crop, [torch.nn.Sequential(c, flip) for c in padded], "float"),
        "brightness": (adjust(pixels.BRIGHTNESS), [K.ColorJitter(0.4, 0, 0, 0)], "float"),
        "contrast": (adjust(pixels.CONTRAST), [K.ColorJitter(0, 0.4, 0, 0)], "float"),
        "saturation": (adjust(pixels.SATURATION), [K.ColorJitter(0, 0, 0.4, 0)], "float"),
        "hue": (hue, [K.ColorJitter(0, 0, 0, 0.1)], "float"),
        "jitter": (jitter, [colours[0]], "float"),
        "grey": (grey, [colours[1]], "float"),
        "blur": (blur, [colours[2]], "float"),
        "solarise": (solarise, [K.RandomSolarize((0.5, 0.5), (0.0, 0.0), p=0.2)], "float"),
        "normalise": (normalise, [normal], "float"),
        "weak view": (view(weak(size, MEAN, STD)), [from_bytes(m) for m in kornia_crops(size, normal)], "uint8"),
        "strong view": (
            view(strong(size, MEAN, STD)),
            [from_bytes(m) for m in kornia_crops(size, *colours, normal)],
            "uint8",
        ),
    }


def times(contestants, x, seconds):
    """Return median milliseconds of each contestant over interleaved rounds."""
    taken = [[] for _ in contestants]
    for run in contestants:
        run(x)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(taken[0]) < 7:
        for run, all_taken in zip(contestants, taken, strict=True):
            before = time.perf_counter()
            run(x)
            all_taken.append(1e3 * (time.perf_counter() - before))
    return [statistics.median(t) for t in taken]


def measure(threads, inputs, arguments):
    """Return a row per operation."""
    torch.set_num_threads(threads)
    for name, (ours, theirs, kind) in operations(arguments.size).items():
        mine, *others = times([ours, *theirs], inputs[kind], arguments.seconds)
        speeds = [1e3 * arguments.batch / ms for ms in (mine, min(others))]
        ratio = speeds[0] / speeds[1]
        print(f"{threads:7} {name:20} {speeds[0]:15,.0f} {speeds[1]:17,.0f} {ratio:14.2f}", flush=True)
        yield {"threads": threads, "operation": name, "ours": speeds[0], "kornia": speeds[1], "ratio": ratio}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seconds", type=float, help="per operation; cpu 4, cuda 1.5")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="results/views_cpu.json or results/views_gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        import views_gpu

        out = arguments.out or Path("results/views_gpu.json")
        views_gpu.measure("cuda", arguments.size, arguments.seconds or 1.5, out)
        return
    arguments.seconds = arguments.seconds or 4.0
    out = arguments.out or Path("results/views_cpu.json")
    torch.manual_seed(0)
    # without a large block freed once, as any training step frees, glibc returns memory after each operation, and the
    # time measured, for both sides, is that of page faults
    torch.ones(7_500_000)
    images = torch.randint(0, 256, (arguments.batch, 3, arguments.size, arguments.size), dtype=torch.uint8)
    inputs = {"uint8": images, "float": images.float() / 255}
    print(f"{'threads':7} {'operation':20} {'ours, images/s':>15} {'kornia, images/s':>17} {'ours / kornia':>14}")
    with torch.no_grad():
        rows = [row for threads in arguments.threads for row in measure(threads, inputs, arguments)]
    more = {"batch": arguments.batch, "size": arguments.size, **machine.versions("kornia")}
    machine.save(out, {"facts": machine.facts(**more), "rows": rows})


if __name__ == "__main__":
    main()
