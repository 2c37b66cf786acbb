"""Engines take training steps: one operation after another (`eager`), or the whole step as one CUDA graph (`graph`).

Both take the same steps: same samples, views, schedules, checkpoints. The eager engine is the slow twin. The graph
reads everything that changes from tensors on the device: epoch, order of samples, position in it, learning rates,
teacher's momenta, seed, and the effect's numbers. So each replay is a new step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from marginlens.data import draw
from marginlens.data.feed import Arrays, Feed, unfused
from marginlens.data.views import make_view
from marginlens.devices import fastest_convolutions
from marginlens.effects import Effect, Product, factors
from marginlens.kernels import no_triton
from marginlens.kernels.launch import capture
from marginlens.methods.protocol import Method, module_of
from marginlens.nets.fast import Side, fast
from marginlens.train.trainer import Trainer, batches, count, state, train_step

Name = Literal["auto", "eager", "graph"]

_WARM = 3
"""Steps before the capture, in which kernels are compiled and cuDNN chooses its algorithms."""


class Engine(Protocol):
    """The interface that the training loop uses."""

    name: str
    about: str
    """The choice in words, for the terminal and the record."""

    def steps(self, trainer: Trainer) -> Iterator[None]:
        """Take the remaining steps of the epoch, one at a time."""


def choose(name: Name, trainer: Trainer) -> Engine:
    """Return the engine with this name. `auto` means the graph wherever it is possible."""
    if name == "eager":
        return Eager("as asked")
    why_not = obstacle(trainer.feed, trainer.precision)
    return Eager(why_not) if why_not else Graph(trainer)


def check(name: Name, feed: Feed, precision: torch.dtype) -> None:
    """Raise if the name is unknown, or if a graph is asked for but not possible."""
    if name not in ("auto", "eager", "graph"):
        raise ValueError(f"there is no engine {name!r}; there are auto, eager and graph")
    if name == "graph" and (why_not := obstacle(feed, precision)):
        raise ValueError(f"engine is 'graph', and {why_not}; leave it to auto, or say eager")


def obstacle(feed: Feed, precision: torch.dtype) -> str:
    """Return why a run cannot be captured, or ""."""
    if feed.device.type != "cuda":
        return f"a {feed.device.type} has no graphs"
    if not isinstance(feed, Arrays):
        return "images that are decoded as they are needed cannot be captured"
    if precision == torch.float16:
        return "fp16 scales its loss as it goes, which a graph cannot"
    return no_triton(feed.device)


class Eager:
    """Take steps one operation after another."""

    name = "eager"

    def __init__(self, why: str = "") -> None:
        self.about = f"eager ({why})"

    def steps(self, trainer: Trainer) -> Iterator[None]:
        for views in batches(trainer):
            train_step(trainer, views)
            yield


class Graph:
    """Capture views, teacher, student, loss, gradient, SGD and EMA once, and replay them.

    Weights live in flat buffers (`kernels/sgd_ema.py`), with half-precision copies beside them. The copies replace the
    weights in a shadow of the method, which shares everything else with it. With `beside`, the teacher's half of the
    loss and the gradients of weights run on streams of their own. With `captured=False` the same step runs operation by
    operation.
    """

    name = "graph"

    def __init__(self, trainer: Trainer, captured: bool = True, beside: bool = True) -> None:
        from marginlens.kernels.sgd_ema import Flat

        assert isinstance(trainer.feed, Arrays)
        settings, device, per_epoch = trainer.settings, trainer.feed.device, trainer.per_epoch
        self.trainer = trainer
        self.flat = Flat(module_of(trainer.method), trainer.optimizer, trainer.precision)
        self.method: Method
        self.method, self.learning = shadow(trainer.method, self.flat.half)
        self.method.settings["effect"], self.numbers = on_device(self.method.settings["effect"], device)
        self.images = trainer.feed.images(settings.split)
        self.unfused = unfused(self.images, trainer.views)
        self.seed = torch.tensor(settings.seed, device=device)
        self.epoch, self.position = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.order = torch.zeros(per_epoch, settings.batch, dtype=torch.int64, device=device)
        self.rates, self.shares = (torch.zeros(per_epoch, device=device) for _ in range(2))
        self.seen: list[Tensor] = []  # the views of the last step
        self.teacher = torch.cuda.Stream() if captured and beside and hasattr(trainer.method, "teacher") else None
        self.side = Side(torch.cuda.Stream()) if captured and beside else None
        self.graph = self._capture() if captured else None
        views = f"views by the reference, because {self.unfused}" if self.unfused else "views in one kernel"
        self.about = f"graph ({str(trainer.precision).removeprefix('torch.')}, {views})"

    def steps(self, trainer: Trainer) -> Iterator[None]:
        epoch, done = divmod(trainer.step, trainer.per_epoch)
        self.begin(epoch, done)
        for _ in range(done, trainer.per_epoch):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            count(trainer)
            yield

    def begin(self, epoch: int, done: int) -> None:
        """Put an epoch's order and schedules where the graph reads them."""
        trainer = self.trainer
        order = draw.order(trainer.samples, trainer.settings.seed, epoch, self.order.device)
        self.order.copy_(order[: self.order.numel()].view_as(self.order))
        steps = range(epoch * trainer.per_epoch, (epoch + 1) * trainer.per_epoch)
        self.rates.copy_(torch.tensor([trainer.lr_at(i) for i in steps]))
        self.shares.copy_(torch.tensor([1.0 - trainer.ema_at(i) for i in steps]))
        self.epoch.fill_(epoch)
        self.position.fill_(done)
        for group in trainer.optimizer.param_groups:
            group["lr"] = trainer.lr_at(steps[-1])

    def step(self) -> None:
        """Take a whole step, reading only from the device."""
        at = self.position[None]
        self.seen = self._views(self.order.index_select(0, at)[0])
        with fast(self.side):
            loss = self._loss(self.seen)
        grads = torch.autograd.grad(loss, self.learning)
        if self.side is not None:
            self.side.join()
        lr, share = (table.index_select(0, at)[0] for table in (self.rates, self.shares))
        self.flat.step(lr, share, grads, _clip(grads, self.trainer.settings.clip))
        self.trainer.losses.index_copy_(0, at, loss.detach()[None])
        self.position += 1

    def _views(self, chosen: Tensor) -> list[Tensor]:
        trainer = self.trainer
        dtype = trainer.precision
        if not self.unfused:
            from marginlens.data import fused

            return fused.make_views(self.images, chosen, trainer.views, self.seed, self.epoch, dtype=dtype)
        some = self.images[chosen]
        made = [
            make_view(some, chosen, view, trainer.settings.seed, self.epoch, number, dtype)
            for number, view in enumerate(trainer.views)
        ]
        return [view.contiguous(memory_format=torch.channels_last) for view in made]

    def _loss(self, views: list[Tensor]) -> Tensor:
        """Compute the teacher's half on a stream of its own, beside the student's."""
        if self.teacher is None:
            return self.method.compare(self.method.queries(views), self.method.keys(views))
        here = torch.cuda.current_stream()
        self.teacher.wait_stream(here)
        with torch.cuda.stream(self.teacher):
            keys = self.method.keys(views)
        queries = self.method.queries(views)
        here.wait_stream(self.teacher)
        return self.method.compare(queries, keys)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm up, undo the warm-up, and return the graph of one more step, which is recorded but not executed."""
        self.begin(0, 0)
        before = {name: tensor.clone() for name, tensor in state(self.trainer).items()}
        with fastest_convolutions(limit=0):
            graph, _ = capture(self.step, _WARM, reset=self.position.zero_)
        self.flat.bind()
        for name, tensor in state(self.trainer).items():
            tensor.copy_(before[name])
        self.flat.refresh()
        return graph


def shadow(method: Any, half: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
    """Return the method with the parameters in `half` in place of its own, and the parameters that learn, in order.

    Everything else is shared with the method.
    """
    other = copy.deepcopy(method)
    for place, module in method.named_modules():
        twin = other.get_submodule(place)
        twin._buffers.update(module._buffers)
        for name, own in module._parameters.items():
            full = f"{place}.{name}" if place else name
            if own is not None:
                twin._parameters[name] = nn.Parameter(half[full], own.requires_grad) if full in half else own
    return other, [p for p in other.parameters() if p.requires_grad]


def on_device(effect: Effect, device: torch.device) -> tuple[Effect, dict[str, Tensor]]:
    """Return the effect with its numbers on the device, where a captured graph reads them, and these numbers by name.

    Defaults stay plain numbers, because an effect may check for them: BYOL takes a margin only if m2 is at its default.
    """
    numbers: dict[str, Tensor] = {}
    moved = []
    for factor in factors(effect):
        given = {f.name: getattr(factor, f.name) for f in fields(factor)}  # type: ignore[arg-type]
        defaults = {f.name: f.default for f in fields(factor)}  # type: ignore[arg-type]
        found = {
            name: torch.tensor(value, device=device, dtype=torch.float32)
            for name, value in given.items()
            if isinstance(value, float | int) and value != defaults[name]
        }
        numbers |= {f"{type(factor).__name__.lower()}.{name}": value for name, value in found.items()}
        moved.append(replace(factor, **found) if found else factor)  # type: ignore[type-var]
    return (moved[0] if len(moved) == 1 else Product(tuple(moved))), numbers


def _clip(grads: tuple[Tensor, ...], most: float) -> Tensor | None:
    """Return the factor that limits the gradients' norm to `most`, as `clip_grad_norm_` does, or None."""
    if not most:
        return None
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads]))
    factor: Tensor = (most / (norm + 1e-6)).clamp(max=1.0)
    return factor
