"""A run at work: its state, one step of it, and the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import marginlens as ml
from marginlens.data import draw
from marginlens.data.feed import Feed
from marginlens.data.views import View
from marginlens.devices import autocast
from marginlens.errors import Stopped
from marginlens.methods.protocol import Method, module_of
from marginlens.nets.ema import MOMENTA, learning_rate
from marginlens.output import counted
from marginlens.runs import checkpoint
from marginlens.runs.config import Pretrain
from marginlens.runs.run import Run
from marginlens.runs.work import Hold

LOOK_EVERY = 50
"""Steps between checks of the loss on a device, because each check makes the host wait."""


@dataclass
class Trainer:
    """A run at work: its parts, and the state that changes from step to step."""

    run: Run
    feed: Feed
    method: Method
    optimizer: torch.optim.SGD
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    views: tuple[View, View]
    samples: int
    losses: Tensor
    """Loss of each step of the current epoch, (steps per epoch,), on the device."""
    step: int = 0
    saved: Path | None = None
    """The newest checkpoint."""
    seconds: float = 0.0
    """Time spent in this epoch's steps."""
    counted: int = 0
    """Images trained on in those seconds."""
    warned: bool = False
    """True if a collapse has been reported."""
    hold: Hold | None = None
    """This process's hold of the run's folder. None if nothing is written."""
    seen: list[Tensor] = field(default_factory=list)
    """Views of the last eager step."""
    written: dict[str, int] = field(default_factory=dict)
    """Length of each file of lines after this process's last write."""

    @property
    def settings(self) -> Pretrain:
        return self.run.settings

    @property
    def per_epoch(self) -> int:
        return self.samples // self.settings.batch

    @property
    def total(self) -> int:
        return self.per_epoch * self.settings.epochs

    @property
    def kept(self) -> str:
        """Which checkpoint is safe, for messages."""
        return f"the last good checkpoint is {self.saved}" if self.saved else "there is no checkpoint yet"

    @property
    def rate(self) -> float:
        return self.counted / self.seconds if self.seconds else 0.0

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(step, self.total, self.settings.lr, self.settings.warmup * self.per_epoch)

    def ema_at(self, step: int) -> float:
        """Return the teacher's momentum after a step."""
        return MOMENTA[self.settings.ema_schedule](self.settings.ema, step, self.total)


def check_data(settings: Pretrain, feed: Feed) -> int:
    """Return the number of images to learn from. Raise if the data do not fit the settings."""
    samples = len(feed.labels(settings.split))
    if settings.limit > samples:
        has = counted(samples, "image")
        raise ValueError(f"limit is {settings.limit}, but {feed.name} has {has} in {settings.split}")
    if settings.weak_crop == "padded" and feed.size != (settings.size, settings.size):
        has = "many sizes" if feed.size is None else "{} x {} px".format(*feed.size)
        raise ValueError(
            f"the padded crop needs images of the views' size, {settings.size} px, but {feed.name} has {has}; "
            f"give --size, or --weak-crop resized"
        )
    samples = settings.limit or samples
    if settings.batch > samples:
        raise ValueError(f"batch is {settings.batch}, but there are only {counted(samples, 'image')}; lower --batch")
    return samples


def batches(trainer: Trainer) -> Iterator[list[Tensor]]:
    """Return the views of the rest of the epoch, batch by batch. A last partial batch is left out."""
    settings, (epoch, done) = trainer.settings, divmod(trainer.step, trainer.per_epoch)
    order = draw.order(trainer.samples, settings.seed, epoch)
    left = order[done * settings.batch : trainer.per_epoch * settings.batch]
    return trainer.feed.views(settings.split, left, trainer.views, settings.seed, epoch, settings.batch)


def train_step(trainer: Trainer, views: list[Tensor]) -> None:
    """Take one step: loss, gradient, SGD, EMA."""
    settings, method, optimizer, scaler = trainer.settings, trainer.method, trainer.optimizer, trainer.scaler
    for group in optimizer.param_groups:
        group["lr"] = trainer.lr_at(trainer.step)
    trainer.seen = [view.contiguous(memory_format=torch.channels_last) for view in views]
    with autocast(trainer.precision, trainer.feed.device):
        loss = method.loss(trainer.seen)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if settings.clip > 0.0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], settings.clip)
    scaler.step(optimizer)
    scaler.update()
    method.after_step(trainer.ema_at(trainer.step))
    trainer.losses[trainer.step % trainer.per_epoch] = loss.detach()
    count(trainer)


def count(trainer: Trainer) -> None:
    """Count a finished step, and check the losses if that is due."""
    trainer.step += 1
    trainer.counted += trainer.settings.batch
    if trainer.losses.device.type == "cpu" or trainer.step % LOOK_EVERY == 0 or trainer.step % trainer.per_epoch == 0:
        look(trainer)


def look(trainer: Trainer) -> None:
    """Raise if a loss is NaN or infinite, and name its step."""
    done = (trainer.step - 1) % trainer.per_epoch + 1
    bad = (~trainer.losses[:done].isfinite()).nonzero()
    if len(bad):
        step = trainer.step - done + int(bad[0])
        value = float(trainer.losses[int(bad[0])])
        raise Stopped(f"the loss became {value} at step {step}; {causes(trainer)}")


def repelled(trainer: Trainer) -> float:
    """Return the share of positives in the run's first batch that the margin repels: theta + m1 > pi.

    The batch norms are left as they were.
    """
    settings, module = trainer.settings, module_of(trainer.method)
    order = draw.order(trainer.samples, settings.seed, 0)[: settings.batch]
    (views,) = trainer.feed.views(settings.split, order, trainer.views, settings.seed, 0, settings.batch)
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        with torch.no_grad(), autocast(trainer.precision, trainer.feed.device):
            slopes = trainer.method.rows([view.contiguous(memory_format=torch.channels_last) for view in views]).f
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)
    return float((slopes < 0).double().mean())


def causes(trainer: Trainer) -> str:
    """Return the last checkpoint, and likely reasons for a loss that is not finite."""
    s = trainer.settings
    loose = s.beta < 1.0 and ml.effect(s.effect).unbounded
    weights = ", or the effect's weights are unbounded" if loose else ""
    half = ", or fp16 overflows (try --amp off)" if trainer.precision == torch.float16 else ""
    return (
        f"{trainer.kept}. Likely: lr {s.lr:g} is too high for {s.effect} at tau {s.tau:g} (lower it, warm up longer, "
        f"or try --clip 1){weights}{half}"
    )


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Return every tensor that the next step depends on."""
    found = {f"method.{name}": tensor for name, tensor in module_of(trainer.method).state_dict().items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in _momenta(trainer).items()}
    return found | {"losses": trainer.losses}


def load(trainer: Trainer, found: checkpoint.Checkpoint) -> None:
    """Restore a checkpoint's state."""
    facts = found.facts
    if lost := [name for name in ("run", "metrics", "speed", "seconds", "counted") if name not in facts]:
        raise ValueError(f"{found.path} is not a checkpoint that a run wrote: it has no {lost[0]}; remove it")
    if facts["step"] > trainer.total:
        raise ValueError(f"{found.path} holds step {facts['step']}, but the run has {trainer.total}; remove it")
    checkpoint.fill(state(trainer), found)
    if trainer.scaler.is_enabled() and "scaler" in facts:
        try:
            trainer.scaler.load_state_dict(facts["scaler"])
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{found.path} has an incomplete loss scaler ({error}); remove it") from None
    trainer.step, trainer.seconds, trainer.counted = (facts[name] for name in ("step", "seconds", "counted"))
    trainer.saved = found.path


def _momenta(trainer: Trainer) -> dict[str, Tensor]:
    """Return SGD's momentum of each parameter by name. Missing ones become zeros, which mean the same."""
    names = {parameter: name for name, parameter in module_of(trainer.method).named_parameters()}
    found = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            held = trainer.optimizer.state[parameter]
            if held.get("momentum_buffer") is None:
                held["momentum_buffer"] = torch.zeros_like(parameter)
            found[names[parameter]] = held["momentum_buffer"]
    return found


def make_optimizer(settings: Pretrain, method: nn.Module) -> torch.optim.SGD:
    """Return SGD over the parameters that learn. Norms and biases decay like the others, or not at all."""
    learning = {name: p for name, p in method.named_parameters() if p.requires_grad}
    flat = [] if settings.decay_all else [p for p in learning.values() if p.dim() <= 1]
    spared = {id(p) for p in flat}
    groups: list[dict[str, Any]] = [{"params": [p for p in learning.values() if id(p) not in spared]}]
    if flat:
        groups.append({"params": flat, "weight_decay": 0.0})
    return torch.optim.SGD(groups, settings.lr, settings.momentum, weight_decay=settings.weight_decay)
