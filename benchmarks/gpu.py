"""Measure time and memory on a CUDA GPU. Everything but graphs also runs on a CPU, to rehearse a benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def once(call: Call, device: str) -> float:
    """Return milliseconds of one call, host and device, starting with an idle device."""
    synchronize(device)
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    before = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - before)


def median(call: Call, device: str, repeats: int = 20, warm: int = 3) -> float:
    """Return the median time of some calls."""
    for _ in range(warm):
        call()
    return statistics.median(once(call, device) for _ in range(repeats))


def turns(calls: dict[str, Call], device: str, seconds: float, least: int = 3, most: int = 50) -> dict[str, float]:
    """Return medians over rounds in which each call runs once, so that a slow spell affects all alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - begin > seconds:
            break
        for name, call in calls.items():
            taken[name].append(once(call, device))
    return {name: statistics.median(found) for name, found in taken.items()}


def captured(call: Call, repeats: int = 20) -> float:
    """Return the median time of a replay of a call captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median(graph.replay, "cuda", repeats)


def cost(call: Call, device: str) -> tuple[float, float | None]:
    """Return milliseconds of one call, and its peak MiB beyond the memory allocated before."""
    if device != "cuda":
        return once(call, device), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = once(call, device)
    return ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def said(error: BaseException) -> str:
    """Return the first line of an error, cut for a table."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
