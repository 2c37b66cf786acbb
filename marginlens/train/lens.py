"""A lens on a run: embeds a batch beside the training step, and leaves no trace in what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from marginlens.devices import autocast
from marginlens.lens.live import embedded, lens_of
from marginlens.methods.protocol import Method, module_of


class Recorder:
    """Looks at the rows of a method every few steps, and sums up an epoch."""

    def __init__(self, method: Method, every: int) -> None:
        self.method, self.every, self.lens = method, every, lens_of(method)

    def look(self, step: int, views: Sequence[Tensor], precision: torch.dtype) -> None:
        """Look at the batch of a step, if the step's number is a multiple of `every`."""
        if step % self.every:
            return
        device = views[0].device
        devices = [device] if device.type == "cuda" else []
        unmoved = _unmoved(module_of(self.method))
        # a look leaves no trace: neither in batch norms nor in the random numbers that dropout draws
        with torch.random.fork_rng(devices), torch.no_grad(), unmoved, autocast(precision, device):
            pairs, features = embedded(self.method, views)
        for q, k in pairs:
            self.lens.observe(q.float(), k.float(), features)

    def read(self) -> dict[str, Any]:
        """Return what was seen since the last read; {} if there was no look."""
        try:
            return self.lens.read() if self.lens.sums else {}
        finally:
            self.lens.reset()


def scalars(found: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a look by names such as lens/alignment and lens/features/rank, for curves."""
    plain = {f"lens/{name}": value for name, value in found.items() if isinstance(value, float)}
    inner = {name: found[name] for name in ("features", "pull", "times") if name in found}
    return plain | {
        f"lens/{name}/{key}": float(value)
        for name, held in inner.items()
        for key, value in held.items()
        if value is not None
    }


@contextmanager
def _unmoved(module: nn.Module) -> Iterator[None]:
    """Put the buffers of a module back afterwards, because batch norms count what passes."""
    buffers = list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, kept in zip(buffers, before, strict=True):
            buffer.copy_(kept)
