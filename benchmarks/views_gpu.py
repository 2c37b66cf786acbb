"""Compare random views on a GPU: images per second, ours, kornia and torchvision; `benchmarks/views.py --device cuda`.

All make the same strong (or weak) view of uint8 images on the device, normalised. Torchvision works image by image on
the CPU, from memory, in one process with one thread. Ours draw from a counter, so a view can be made again; the others
use a generator. Times are medians of rounds in which all on the GPU take turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import machine
import torch
from torch import Tensor

from marginlens.data.views import View, make_view, strong, weak

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGES = 50_000
BATCHES = (256, 4096)


def contestants(view: View, name: str, images: Tensor, chosen: Tensor) -> dict[str, Callable[[], Any]]:
    """Return everything that runs on the device, with images chosen from all of them."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        from marginlens.data.fused import make_views

        found["ours, fused, bf16"] = lambda: make_views(images, chosen, (view,), 0, 0, dtype=torch.bfloat16)
        found["ours, fused, float32"] = lambda: make_views(images, chosen, (view,), 0, 0, dtype=torch.float32)
    except ImportError as error:
        print("fused views:", gpu.said(error), flush=True)
    found["ours, reference"] = lambda: make_view(images[chosen], chosen, view, 0, 0, 0)
    try:
        for mode, module in kornia_views(view, name).items():
            module = module.to(images.device)
            found[f"kornia, {mode}"] = lambda module=module: module(images[chosen].float() / 255)
    except Exception as error:  # whatever hinders kornia, the others go on
        print("kornia:", gpu.said(error), flush=True)
    return found


def kornia_views(view: View, name: str) -> dict[str, torch.nn.Module]:
    """The view by kornia, per sample, with both of its ways to crop."""
    import kornia.augmentation as K

    colours = [K.ColorJitter(*view.jitter, p=view.jitter_p), K.RandomGrayscale(p=view.grey)]
    colours += [K.RandomGaussianBlur((13, 13), view.sigma, p=view.blur)]
    after = [K.RandomHorizontalFlip(p=view.flip), *(colours if name == "strong" else []), K.Normalize(MEAN, STD)]
    return {
        mode: torch.nn.Sequential(
            K.RandomResizedCrop((view.size, view.size), scale=view.scale, cropping_mode=mode), *after
        )
        for mode in ("slice", "resample")
    }


def torchvision_view(view: View, name: str) -> Any:
    """The view by torchvision, for one image."""
    from torchvision.transforms import v2

    blur = v2.GaussianBlur(13, view.sigma)
    colours = [v2.RandomApply([v2.ColorJitter(*view.jitter)], view.jitter_p), v2.RandomGrayscale(view.grey)]
    colours.append(v2.RandomApply([blur], view.blur))
    after = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    crop = [v2.RandomResizedCrop(view.size, view.scale, view.ratio, antialias=True), v2.RandomHorizontalFlip(view.flip)]
    return v2.Compose([*crop, *(colours if name == "strong" else []), *after])


def torchvision_speed(view: View, name: str, images: Tensor, seconds: float) -> dict[str, float]:
    """Return images per second of one process with one thread, from PIL images and from tensors."""
    from PIL import Image

    transform, threads = torchvision_view(view, name), torch.get_num_threads()
    kinds: dict[str, list[Any]] = {
        "PIL": [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images],
        "tensors": list(images),
    }
    torch.set_num_threads(1)
    found = {}
    for kind, items in kinds.items():
        taken: list[float] = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            before = time.perf_counter()
            for item in items:
                transform(item)
            taken.append((time.perf_counter() - before) / len(items))
        found[kind] = 1 / statistics.median(taken)
    torch.set_num_threads(threads)
    return found


def measure(device: str, size: int, seconds: float, out: Path, batches: tuple[int, ...] = BATCHES) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, size, size), dtype=torch.uint8)
    held, rows, left_out = images.to(device), [], []
    facts = machine.facts(device, size=size, images=IMAGES, **machine.versions("kornia", "torchvision"))
    for name, view in {"strong": strong(size, MEAN, STD), "weak": weak(size, MEAN, STD)}.items():
        for batch in batches:
            chosen = torch.randperm(IMAGES, device=device)[:batch]
            calls = contestants(view, name, held, chosen)
            ready, memory = {}, {}
            for who, call in calls.items():
                try:
                    with torch.no_grad():
                        call()
                        _, memory[who] = gpu.cost(call, device)
                    ready[who] = call
                except Exception as problem:
                    left_out.append({"view": name, "batch": batch, "who": who, "why": gpu.said(problem)})
                    print(left_out[-1], flush=True)
            with torch.no_grad():
                taken = gpu.turns(ready, device, seconds, least=7)
            for who, ms in taken.items():
                row = {"view": name, "batch": batch, "who": who, "ms": ms, "images_per_s": 1e3 * batch / ms}
                rows.append(row | {"peak_mib": memory[who]})
        try:
            for kind, speed in torchvision_speed(view, name, images[:256], seconds).items():
                everywhere = {"images_per_s_times_cores": speed * (os.cpu_count() or 1)}
                rows.append(
                    {"view": name, "who": f"torchvision v2, {kind}, one core", "images_per_s": speed} | everywhere
                )
        except Exception as problem:
            left_out.append({"view": name, "who": "torchvision v2", "why": gpu.said(problem)})
            print(left_out[-1], flush=True)
        machine.save(out, {"facts": facts, "rows": rows, "left_out": left_out})
    if device == "cuda":
        captured(rows, held, size)
        machine.save(out, {"facts": facts, "rows": rows, "left_out": left_out})
    for row in rows:
        extra = "".join(
            f"  {key} {row[key]:,.3f}" for key in ("ms", "graph_ms", "peak_mib") if row.get(key) is not None
        )
        print(f"{row['view']:7} {row.get('batch', 1):5} {row['who']:34} {row['images_per_s']:14,.0f} images/s{extra}")


def captured(rows: list[dict[str, Any]], images: Tensor, size: int) -> None:
    """Time our views as a training step's graph replays them, without the host's launches."""
    views = {"strong": strong(size, MEAN, STD), "weak": weak(size, MEAN, STD)}
    for row in rows:
        if not row["who"].startswith("ours"):
            continue
        chosen = torch.randperm(IMAGES, device="cuda")[: row["batch"]]
        try:
            with torch.no_grad():
                row["graph_ms"] = gpu.captured(contestants(views[row["view"]], row["view"], images, chosen)[row["who"]])
        except Exception as problem:
            row["graph_note"] = gpu.said(problem)
