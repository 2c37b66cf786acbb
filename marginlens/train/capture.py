"""One step as a CUDA graph, which is recorded once and then replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(
    step: Callable[[], T], warm: int, reset: Callable[[], object] | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of one `step`, and what that step returned: tensors that every replay writes anew.

    Before that the step is executed `warm` times, each after `reset`, so that kernels are compiled and libraries have
    chosen their algorithms: on the stream of the capture, for libraries have a workspace for each. The step that is
    captured is not executed. What warming up has changed is the caller's to take back.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            if reset is not None:
                reset()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    return graph, found
