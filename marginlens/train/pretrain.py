"""Pre-training: views -> embeddings -> loss -> step -> EMA -> record.

Everything random is a function of (seed, epoch, sample), so a run that was killed and resumed ends, on a CPU, with the
bits of one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marginlens.data import draw
from marginlens.data.views import View
from marginlens.methods import BYOL, MoCoV3, SimCLR
from marginlens.nets.ema import MOMENTA
from marginlens.train import checkpoint, record
from marginlens.train.config import Knn, Pretrain
from marginlens.train.curves import Curves
from marginlens.train.evaluate import knn_accuracy
from marginlens.train.features import features, plain_images, spread
from marginlens.train.feed import Feed, open_feed
from marginlens.train.model import (
    autocast,
    choose_device,
    choose_precision,
    make_encoder,
    make_method,
    make_optimizer,
    make_views,
    placed,
)
from marginlens.train.progress import Display
from marginlens.train.record import Run
from marginlens.train.schedule import learning_rate
from marginlens.train.stop import Asked, Stopped, disk, memory, signals

COLLAPSED = 0.01
"""A spread of features below this is warned about; a random encoder has about 0.2."""
LOOK_EVERY = 50
"""Steps between looks at the loss where looking makes the host wait for a device."""


@dataclass
class Trainer:
    """A run at work: what changes from step to step, and what it is made of."""

    run: Run
    feed: Feed
    method: MoCoV3 | SimCLR | BYOL
    optimizer: torch.optim.SGD
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    views: tuple[View, View]
    samples: int
    losses: Tensor
    """Loss of each step of the epoch under way, (steps per epoch,), on the device."""
    step: int = 0
    saved: str = "there is no checkpoint yet"
    seconds: float = field(default=0.0)
    """Time spent in the epoch's steps since this process began it."""
    counted: int = 0
    """Images trained on in those seconds."""

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
    def rate(self) -> float:
        return self.counted / self.seconds if self.seconds else 0.0


def pretrain(
    settings: Pretrain,
    *,
    runs: str | Path = "runs",
    resume: bool = False,
    device: str = "auto",
    workers: int = 2,
    knn_every: int = 10,
    checkpoint_seconds: float = 60.0,
    quiet: bool = False,
) -> Run:
    """Pre-trains with these settings in a folder of its own below `runs`, and returns the run.

    A run that is complete is returned as it is. One that was interrupted goes on with `resume=True`. `knn_every`:
    epochs between looks at nearest neighbours (0: at the end only); `checkpoint_seconds`: time between checkpoints.
    """
    where = choose_device(device)
    feed = open_feed(settings.data, where, workers)
    samples = check_data(settings, feed)
    choose_precision(settings.amp, where)
    make_encoder(settings)  # weights that do not fit are refused before there is a folder
    run = record.make_run(settings, feed, Path(runs))
    with record.locked(run):
        if run.complete:
            Display("", 1, 0, 1, quiet).say(f"{run.path} is complete already")
            return run
        with memory(settings.batch, settings.size):
            trainer = start(run, feed, samples)
            with Display(settings.method, trainer.total, 0, settings.epochs, quiet) as display, signals() as asked:
                go_on(trainer, display, resume)
                train(trainer, display, asked, knn_every, checkpoint_seconds)
        finish(trainer)
    return run


def start(run: Run, feed: Feed, samples: int) -> Trainer:
    """Everything as it is before the first step."""
    settings = run.settings
    precision = choose_precision(settings.amp, feed.device)
    method = placed(make_method(settings), feed.device)
    scaler = torch.amp.GradScaler(feed.device.type, enabled=precision == torch.float16)
    views = make_views(settings, feed)
    losses = torch.zeros(samples // settings.batch, device=feed.device)
    return Trainer(
        run, feed, method, make_optimizer(settings, method), scaler, precision, views, samples, losses=losses
    )


def go_on(trainer: Trainer, display: Display, resume: bool) -> None:
    """Takes up the newest whole checkpoint, if going on was asked for, and notes the start."""
    run = trainer.run
    found, damaged = checkpoint.newest(run.path / "checkpoints", run.id)
    for line in damaged:
        display.say(f"{line}; the one before it is used")
    if found is not None and not resume:
        raise ValueError(f"{run.path} was interrupted at step {found.facts['step']} of {trainer.total}; add --resume")
    with disk(run.path, "nothing was lost"):
        if found is not None:
            load(trainer, found)
            display.say(f"resuming {run.path} at step {trainer.step} of {trainer.total}")
        else:
            display.say(f"{run.path}: {trainer.total} steps of {trainer.settings.batch}")
        record.rewind(run.path / "metrics.jsonl", found.facts["metrics"] if found else 0)
        record.rewind(run.path / "speed.jsonl", found.facts["speed"] if found else 0)
        facts = {"precision": str(trainer.precision).removeprefix("torch."), "engine": "eager", "step": trainer.step}
        record.append(run.path / "environment.jsonl", record.environment(trainer.feed.device, **facts))


def train(trainer: Trainer, display: Display, asked: Asked, knn_every: int, checkpoint_seconds: float) -> None:
    """Runs to the end, or to a signal; checkpoints on the way."""
    curves = Curves(trainer.run.path / "tensorboard", trainer.step)
    saved = time.monotonic()
    while trainer.step < trainer.total:
        begin = time.perf_counter()
        for views in batches(trainer):
            train_step(trainer, views)
            trainer.seconds, begin = trainer.seconds + time.perf_counter() - begin, time.perf_counter()
            display.step(trainer.step, lambda: float(_last_loss(trainer)), lambda: trainer.rate)
            if trainer.step % trainer.per_epoch == 0:
                end_epoch(trainer, display, curves, knn_every)
            if asked.signal or time.monotonic() - saved >= checkpoint_seconds or trainer.step == trainer.total:
                save(trainer)
                saved = time.monotonic()
            if asked.signal:
                curves.close()
                raise Stopped(f"stopped by {asked.signal}; {trainer.saved}. Go on with --resume", asked.code)
            begin = time.perf_counter()
    curves.close()


def batches(trainer: Trainer) -> Iterator[list[Tensor]]:
    """Views of what is left of the epoch; a last partial batch is left out."""
    settings, (epoch, done) = trainer.settings, divmod(trainer.step, trainer.per_epoch)
    order = draw.order(trainer.samples, settings.seed, epoch)
    left = order[done * settings.batch : trainer.per_epoch * settings.batch]
    return trainer.feed.views(settings.split, left, trainer.views, settings.seed, epoch, settings.batch)


def train_step(trainer: Trainer, views: list[Tensor]) -> None:
    """One step of the method: loss, gradient, SGD, EMA."""
    settings, method, optimizer, scaler = trainer.settings, trainer.method, trainer.optimizer, trainer.scaler
    warmup = settings.warmup * trainer.per_epoch
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(trainer.step, trainer.total, settings.lr, warmup)
    with autocast(trainer.precision, trainer.feed.device):
        loss = method.loss([view.contiguous(memory_format=torch.channels_last) for view in views])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if settings.clip > 0.0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], settings.clip)
    scaler.step(optimizer)
    scaler.update()
    method.after_step(MOMENTA[settings.ema_schedule](settings.ema, trainer.step, trainer.total))
    trainer.losses[trainer.step % trainer.per_epoch] = loss.detach()
    trainer.step += 1
    trainer.counted += settings.batch
    if trainer.losses.device.type == "cpu" or trainer.step % LOOK_EVERY == 0 or trainer.step % trainer.per_epoch == 0:
        look(trainer)


def look(trainer: Trainer) -> None:
    """Stops a run whose loss is no longer a number, and says at which step that was."""
    done = (trainer.step - 1) % trainer.per_epoch + 1
    bad = (~trainer.losses[:done].isfinite()).nonzero()
    if len(bad):
        step = trainer.step - done + int(bad[0])
        value = float(trainer.losses[int(bad[0])])
        raise Stopped(f"the loss became {value} at step {step}; {_causes(trainer)}")


def _causes(trainer: Trainer) -> str:
    s = trainer.settings
    weights = ", or the effect's weights are unbounded" if s.beta < 1.0 and "attenuation" in s.effect else ""
    half = ", or fp16 overflows (try --amp off)" if trainer.precision == torch.float16 else ""
    return (
        f"{trainer.saved}. Likely: lr {s.lr:g} is too high for {s.effect} at tau {s.tau:g} (lower it, warm up longer, "
        f"or try --clip 1){weights}{half}"
    )


def end_epoch(trainer: Trainer, display: Display, curves: Curves, knn_every: int) -> None:
    """Measures and writes down an epoch."""
    settings, epoch, run = trainer.settings, trainer.step // trainer.per_epoch, trainer.run
    last = trainer.step == trainer.total
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "step": trainer.step,
        "loss": float(trainer.losses.double().mean()),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "spread": _spread(trainer),
    }
    if settings.method != "simclr":
        metrics["ema"] = MOMENTA[settings.ema_schedule](settings.ema, trainer.step - 1, trainer.total)
    if last or (knn_every and epoch % knn_every == 0):
        found = knn_accuracy(trainer.method.backbone, trainer.feed, Knn(), settings.size, trainer.precision)
        metrics |= {"knn": found} if found is not None else {}
    if metrics["spread"] < COLLAPSED:
        display.say(
            f"warning: the features have collapsed at epoch {epoch} (their spread is {metrics['spread']:.1e}); "
            f"lower lr, or check that the effect leaves the positives a gradient"
        )
    speed = {"epoch": epoch, "seconds": trainer.seconds, "images_per_second": trainer.rate}
    with disk(run.path, trainer.saved):
        record.append(run.path / "metrics.jsonl", metrics)
        record.append(run.path / "speed.jsonl", speed)
        curves.add(metrics | {"images_per_second": trainer.rate})
    display.epoch(trainer.step, epoch, metrics, trainer.rate)
    trainer.seconds, trainer.counted = 0.0, 0


def save(trainer: Trainer) -> None:
    """Writes a checkpoint, unless there is anything in it that is not a number."""
    if trainer.losses.device.type != "cpu":
        look(trainer)
    tensors, run = state(trainer), trainer.run
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Stopped(f"{name} is no longer finite at step {trainer.step}; {_causes(trainer)}")
    with disk(run.path / "checkpoints", trainer.saved):
        lengths = {name: (run.path / f"{name}.jsonl") for name in ("metrics", "speed")}
        facts = {name: path.stat().st_size if path.exists() else 0 for name, path in lengths.items()}
        scale = {"scaler": trainer.scaler.state_dict()} if trainer.scaler.is_enabled() else {}
        path = checkpoint.write(run.path / "checkpoints", trainer.step, tensors, {"run": run.id} | facts | scale)
    trainer.saved = f"the last good checkpoint is {path}"


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor that the next step depends on."""
    found = {f"method.{name}": tensor for name, tensor in trainer.method.state_dict().items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in _momenta(trainer).items()}
    return found | {"losses": trainer.losses, "rng": torch.get_rng_state()}


def load(trainer: Trainer, found: checkpoint.Checkpoint) -> None:
    """Puts a checkpoint's state in place."""
    own = state(trainer)
    checkpoint.fill(own, found)
    torch.set_rng_state(own["rng"])
    if trainer.scaler.is_enabled() and "scaler" in found.facts:
        trainer.scaler.load_state_dict(found.facts["scaler"])
    trainer.step = int(found.facts["step"])
    trainer.saved = f"the last good checkpoint is {found.path}"


def finish(trainer: Trainer) -> None:
    """Writes the result, which makes the run complete."""
    run = trainer.run
    last, speed = run.metrics[-1], record.lines(run.path / "speed.jsonl")
    seconds = sum(line["seconds"] for line in speed)
    result = {key: last[key] for key in ("loss", "knn", "spread") if key in last}
    facts = {"epochs": trainer.settings.epochs, "steps": trainer.total, "images": trainer.samples}
    time_taken = {"seconds": seconds, "images_per_second": sum(x["images_per_second"] for x in speed) / len(speed)}
    weights = checkpoint.names(run.path / "checkpoints")[0].name
    with disk(run.path / "result.json", trainer.saved):
        record.save_json(run.path / "result.json", facts | result | time_taken | {"checkpoint": weights})


def check_data(settings: Pretrain, feed: Feed) -> int:
    """The number of images to learn from, if there are enough for a batch."""
    samples = len(feed.labels(settings.split))
    if settings.limit > samples:
        raise ValueError(f"limit is {settings.limit}, and {feed.name} has {samples:,} images in {settings.split}")
    if settings.weak_crop == "padded" and feed.size != (settings.size, settings.size):
        has = "many sizes" if feed.size is None else "{} x {} px".format(*feed.size)
        raise ValueError(
            f"the padded crop needs images of the views' size, {settings.size} px, and {feed.name} has {has}; "
            f"give --size, or --weak-crop resized"
        )
    samples = settings.limit or samples
    if settings.batch > samples:
        raise ValueError(f"batch is {settings.batch}, and there are only {samples:,} images; lower --batch")
    return samples


def _momenta(trainer: Trainer) -> dict[str, Tensor]:
    """SGD's momentum of each parameter by its name; zeros before the first step, which mean the same."""
    names = {parameter: name for name, parameter in trainer.method.named_parameters()}
    found = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            held = trainer.optimizer.state[parameter]
            if held.get("momentum_buffer") is None:
                held["momentum_buffer"] = torch.zeros_like(parameter)
            found[names[parameter]] = held["momentum_buffer"]
    return found


def _last_loss(trainer: Trainer) -> Tensor:
    return trainer.losses[(trainer.step - 1) % trainer.per_epoch]


def _spread(trainer: Trainer) -> float:
    """Of the first images that are learned from."""
    some = torch.arange(min(256, trainer.samples))
    images = plain_images(trainer.feed, trainer.settings.split, some, trainer.settings.size)
    return spread(features(trainer.method.backbone, images, trainer.precision))
