"""Pre-training: views -> embeddings -> loss -> step -> EMA -> record.

All randomness is a function of (seed, epoch, sample). So on a CPU, a run that was killed and resumed is bit-identical
to a run that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import marginlens as ml
from marginlens.data import draw
from marginlens.data.feed import Feed, open_feed
from marginlens.devices import choose_device, choose_precision, placed
from marginlens.effects import factors
from marginlens.errors import Asked, DataError, Stopped, disk, memory, signals
from marginlens.evals.features import features, plain_images, spread
from marginlens.evals.knn import Knn, knn_accuracy
from marginlens.methods import METHODS
from marginlens.methods.protocol import module_of, unmarked
from marginlens.output import Display, counted
from marginlens.runs import checkpoint, records, work
from marginlens.runs import work as lock
from marginlens.runs.config import Pretrain, at_hand, takes
from marginlens.runs.model import fingerprint, make_encoder, make_method, make_views
from marginlens.runs.run import EVALUATION_FILES, Run
from marginlens.train import engine as engines
from marginlens.train.engine import Engine, Name
from marginlens.train.lens import Recorder, scalars
from marginlens.train.tensorboard import Curves
from marginlens.train.trainer import Trainer, causes, check_data, load, look, make_optimizer, repelled, state

COLLAPSED = 0.05
"""A spread below this gives a warning. Measured: at least 0.09 before training, at least 0.4 after, 0.02 in a
collapse."""

LINES = ("metrics", "speed", "lens")
"""Files that get a line for each epoch."""

MOST_REPELLED = 0.5
"""A margin that repels a larger share of the positives is reported."""

SEEN = 256
"""Number of images for the spread."""


def pretrain(
    settings: Pretrain,
    *,
    runs: str | Path = "runs",
    resume: bool = False,
    device: str = "auto",
    engine: Name = "auto",
    workers: int = 2,
    knn_every: int = 10,
    checkpoint_seconds: float = 60.0,
    lens: int = 0,
    quiet: bool = False,
) -> Run:
    """Pre-train with these settings, in a folder of its own in `runs`, and return the run.

    A complete run is returned without training. An interrupted run needs `resume=True`.

    Args:
        settings: Everything that determines the result; a folder of images given as `data` is prepared first.
        runs: Folder of runs.
        resume: Continue the same run if it was interrupted.
        device: "auto", "cpu", "cuda" or "cuda:0".
        engine: "graph" captures the whole step as a CUDA graph, "eager" does not; "auto" captures if possible.
        workers: Processes that decode images.
        knn_every: Epochs between kNN evaluations; 0 means only at the end.
        checkpoint_seconds: Time between checkpoints.
        lens: Steps between looks at the rows of the loss, for lens.jsonl; 0 means none. The result is the same.
        quiet: Print nothing.
    """
    if not isinstance(settings, Pretrain):
        raise TypeError(f"settings must be a marginlens.Pretrain, such as Pretrain(data='shapes'), not {settings!r}")
    if isinstance(lens, bool) or not isinstance(lens, int) or lens < 0:
        raise ValueError(f"lens is {lens!r}; it must be a number of steps, or 0 for none")
    where = choose_device(device)
    settings, notes = at_hand(settings, workers)
    for line in notes:
        Display("", quiet=quiet).say(line)
    feed = open_feed(settings.data, where, workers)
    samples = check_data(settings, feed)
    engines.check(engine, feed, choose_precision(settings.amp, where))
    if engine == "graph" and (why := unmarked(METHODS[settings.method])):
        raise ValueError(f"engine is 'graph', and {why}; leave it to auto, or say eager")
    # both raise for settings that do not fit, before there is a folder
    make_views(settings, feed)
    make_encoder(settings)
    run = work.make_run(settings, feed, Path(runs))
    if _done(run, resume, quiet):
        return run
    trainer: Trainer | None = None
    with lock.locked(run) as hold, work.failures(run, lambda: trainer.step if trainer else 0, hold):
        if _done(run, resume, quiet):  # again, because another process may have finished it before we got the lock
            return run
        lower = f"--batch ({settings.batch}) first, and --lr with it, then --size, --hidden or the --encoder"
        with memory(lower):
            trainer = start(run, feed, samples)
            trainer.hold = hold
            with Display(settings.method, trainer.total, settings.epochs, quiet) as display, signals() as asked:
                chosen = go_on(trainer, display, resume, engine)
                recorder = Recorder(trainer.method, lens) if lens else None
                with feed.kept(), Curves(run.path / "tensorboard", trainer.step) as curves:
                    train(trainer, chosen, display, curves, asked, knn_every, checkpoint_seconds, recorder)
        for path in stale(trainer):
            Display("", quiet=quiet).say(f"removed {path}, which measured weights that no longer exist; measure again")
            path.unlink()
        finish(trainer)
    return run


def _done(run: Run, resume: bool, quiet: bool) -> bool:
    """Return True, and log it, if the run is complete; raise if its records are not those of a complete one."""
    done = run.complete and not (resume and damaged_end(run))
    if done:
        run.check_records()
        Display("", quiet=quiet).say(f"{run.path} is already complete")
    return done


def start(run: Run, feed: Feed, samples: int) -> Trainer:
    """Return the state before the first step."""
    settings = run.settings
    precision = choose_precision(settings.amp, feed.device)
    method = make_method(settings)
    module = placed(module_of(method), feed.device)
    scaler = torch.amp.GradScaler(feed.device.type, enabled=precision == torch.float16)
    views = make_views(settings, feed)
    losses = torch.zeros(samples // settings.batch, device=feed.device)
    return Trainer(
        run, feed, method, make_optimizer(settings, module), scaler, precision, views, samples, losses=losses
    )


def damaged_end(run: Run) -> bool:
    """True if a complete run's last checkpoint is damaged or missing, and an earlier one is whole."""
    found, _ = checkpoint.newest(run.path / "checkpoints", run.id)
    return found is not None and bool(found.facts["step"] != run.result.steps)


def stale(trainer: Trainer) -> list[Path]:
    """Return evaluations of other weights: those of an end that was redone, which differs on a GPU."""
    kept = sorted((trainer.run.path / "evaluations").glob(EVALUATION_FILES))
    own = fingerprint(trainer.method.student["backbone"]) if kept else ""
    found = []
    for path in kept:
        with suppress(ValueError):  # an unreadable file is reported when somebody reads the run
            known = records.read_json(path)
            if known.get("run") == trainer.run.id and known.get("backbone_sha256", own) != own:
                found.append(path)
    return found


def go_on(trainer: Trainer, display: Display, resume: bool, engine: Name) -> Engine:
    """Load the newest whole checkpoint if resuming, choose the engine, and note the start."""
    run = trainer.run
    found, damaged = checkpoint.newest(run.path / "checkpoints", run.id)
    for line in damaged:
        display.say(f"{line}; using the one before it")
    if found is not None and not resume:
        raise ValueError(f"{run.path} was interrupted at step {found.facts['step']} of {trainer.total}; add --resume")
    precision = str(trainer.precision).removeprefix("torch.")
    with disk(run.path, "nothing was lost"):
        records.rewind(run.path / "environment.jsonl")
        if found is not None:
            _check_precision(run, precision)
            load(trainer, found)
            checkpoint.set_aside(found)
            display.begin_at(trainer.step)
            display.say(f"resuming {run.path} at step {trainer.step} of {trainer.total}")
        else:
            if done := len(run.metrics):
                kept = f"records of {done} of {counted(trainer.settings.epochs, 'epoch')}, but no checkpoint"
                display.say(f"{run.path} has {kept}: starting over")
            display.say(f"{run.path}: {counted(trainer.total, 'step')} of {counted(trainer.settings.batch, 'image')}")
            if "test" in trainer.settings.split.split("+"):
                display.say("note: it learns from the test images, so its accuracy on them says little about others")
        records.rewind(run.path / "metrics.jsonl", found.facts["metrics"] if found else 0)
        records.rewind(run.path / "speed.jsonl", found.facts["speed"] if found else 0)
        seen = found.facts.get("lens", 0) if found else 0
        records.rewind(run.path / "lens.jsonl", min(seen, records.length(run.path / "lens.jsonl")))
        if idle := [str(f) for f in factors(ml.effect(trainer.settings.effect)) if f.idle]:
            display.say(f"note: {' and '.join(idle)} at its defaults changes nothing; give it numbers, or use plain")
    why = unmarked(type(trainer.method)) if engine == "auto" else ""
    chosen = engines.Eager(why) if why else engines.choose(engine, trainer)
    display.say(f"engine: {chosen.about}")
    with disk(run.path, "nothing was lost"):
        for name in ("failure.json", "result.json"):  # because these describe an earlier end
            (run.path / name).unlink(missing_ok=True)
        trainer.written = {name: records.length(run.path / f"{name}.jsonl") for name in LINES}
        facts = {"precision": precision, "engine": chosen.name, "engine_about": chosen.about, "step": trainer.step}
        records.append(run.path / "environment.jsonl", work.environment(trainer.feed.device, **facts))
    return chosen


def _check_precision(run: Run, precision: str) -> None:
    """Raise unless the run resumes in the precision it started in, because the result would differ."""
    began = next((start for start in reversed(run.starts) if not start.step), None)  # earlier starts left no weights
    if began is not None and began.precision not in ("", precision):
        raise ValueError(
            f"{run.path} began in {began.precision} on {began.device}, but would resume in {precision} here; "
            f"resume it on such a device"
        )


def train(
    trainer: Trainer,
    engine: Engine,
    display: Display,
    curves: Curves,
    asked: Asked,
    knn_every: int,
    checkpoint_seconds: float,
    recorder: Recorder | None = None,
) -> None:
    """Train to the end, or until a signal, with checkpoints on the way."""
    saved = time.monotonic()
    while trainer.step < trainer.total:
        begin = time.perf_counter()
        for _ in _steps(trainer, engine):
            trainer.seconds, begin = trainer.seconds + time.perf_counter() - begin, time.perf_counter()
            display.step(trainer.step, lambda: float(_last_loss(trainer)), lambda: trainer.rate)
            if recorder is not None:
                recorder.look(trainer.step, getattr(engine, "seen", trainer.seen), trainer.precision)
            if trainer.step % trainer.per_epoch == 0:
                end_epoch(trainer, display, curves, knn_every, recorder)
            if time.monotonic() - saved >= checkpoint_seconds or trainer.step == trainer.total:
                save(trainer)
                saved = time.monotonic()
            if asked.signal:
                break
            begin = time.perf_counter()
        if asked.signal and trainer.step < trainer.total:
            save(trainer)
            raise Stopped(f"stopped by {asked.signal}; {trainer.kept}. Go on with --resume", asked.code)


def _steps(trainer: Trainer, engine: Engine) -> Iterator[None]:
    """Take the rest of the epoch's steps. Save a checkpoint if an image cannot be read."""
    try:
        yield from engine.steps(trainer)
    except DataError:
        save(trainer)
        raise


def end_epoch(
    trainer: Trainer, display: Display, curves: Curves, knn_every: int, recorder: Recorder | None = None
) -> None:
    """Measure an epoch, and record the numbers."""
    settings, epoch = trainer.settings, trainer.step // trainer.per_epoch
    last = trainer.step == trainer.total
    metrics: dict[str, Any] = {
        "epoch": epoch,
        "step": trainer.step,
        "loss": float(trainer.losses.double().mean()),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        **_spreads(trainer),
    }
    if lost := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise Stopped(f"the {lost[0].replace('_', ' ')} is {metrics[lost[0]]} after epoch {epoch}; {causes(trainer)}")
    if takes(settings.method, "ema"):
        metrics["ema"] = trainer.ema_at(trainer.step - 1)
    if last or (knn_every and epoch % knn_every == 0):
        found = knn_accuracy(trainer.method.backbone, trainer.feed, Knn(), settings.size, trainer.precision)
        metrics |= {"knn": found} if found is not None else {}
    if epoch == 1 and ml.effect(settings.effect).moves_logit:
        metrics["repelled"] = repelled(trainer)
        if metrics["repelled"] > MOST_REPELLED:
            display.say(
                f"note: {settings.effect} repels {100 * metrics['repelled']:.0f} % of the positives after epoch 1: "
                f"where theta + m1 is above pi, the loss pushes the two views of an image apart; lower m1"
            )
    which = "features" if metrics["spread"] < COLLAPSED else "embeddings"
    if (least := min(metrics["spread"], metrics["embedding_spread"])) < COLLAPSED and not trainer.warned:
        trainer.warned = True
        display.say(
            f"warning: the {which} have hardly any spread at epoch {epoch} ({least:.1e}; 1 fills the sphere): they "
            f"have collapsed, unless training has just begun; lower lr, or check that the negatives get a gradient"
        )
    speed = {"epoch": epoch, "seconds": trainer.seconds, "images_per_second": trainer.rate}
    try:
        looked = recorder.read() if recorder is not None else {}
    except ValueError as error:  # because a look must not end a training that would succeed without it
        looked = {}
        display.say(f"warning: the lens has no record of epoch {epoch}: {error}")
    seen = {"epoch": epoch, "step": trainer.step, **looked} if looked else {}
    for name, line in zip(LINES, (metrics, speed, seen), strict=True):
        if line:
            with writing(trainer, f"{name}.jsonl") as path:
                trainer.written[name] = records.append(path, line, trainer.written.get(name))
    with writing(trainer, "tensorboard"):
        curves.add(metrics | {"images_per_second": trainer.rate} | scalars(looked))
    display.epoch(trainer.step, epoch, metrics, trainer.rate)
    trainer.seconds, trainer.counted = 0.0, 0


@contextmanager
def writing(trainer: Trainer, name: str) -> Iterator[Path]:
    """Write a file of the run. A run's folder that is gone is not created again."""
    path = trainer.run.path / name
    check_hold(trainer)
    try:
        with disk(path, trainer.kept):
            yield path
    except Stopped:
        check_hold(trainer)  # reports a moved folder in place of the disk's error
        raise


def check_hold(trainer: Trainer) -> None:
    """Raise if the run's folder is no longer where it was."""
    if trainer.hold is not None:
        trainer.hold.check()


def save(trainer: Trainer) -> None:
    """Write a checkpoint. Raise if a number in it is not finite."""
    if trainer.losses.device.type != "cpu":
        look(trainer)
    tensors, run = state(trainer), trainer.run
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Stopped(f"{name} is no longer finite at step {trainer.step}; {causes(trainer)}")
    with writing(trainer, "checkpoints") as folder:
        facts: dict[str, Any] = {name: trainer.written.get(name, 0) for name in LINES}
        facts |= {"run": run.id, "seconds": trainer.seconds, "counted": trainer.counted}
        scale = {"scaler": trainer.scaler.state_dict()} if trainer.scaler.is_enabled() else {}
        path = checkpoint.write(folder, trainer.step, tensors, facts | scale)
    trainer.saved = path


def finish(trainer: Trainer) -> None:
    """Write the result, which makes the run complete."""
    run = trainer.run
    check_hold(trainer)
    run.check_records()
    last, speeds = run.metrics[-1], run.speeds
    seconds = sum(line.seconds for line in speeds)
    result = {key: last[key] for key in ("loss", "knn", "spread", "embedding_spread") if key in last}
    facts = {"epochs": trainer.settings.epochs, "steps": trainer.total, "images": trainer.samples}
    images = sum(line.seconds * line.images_per_second for line in speeds)
    time_taken = {"seconds": seconds, "images_per_second": images / seconds if seconds else 0.0}
    assert trainer.saved is not None
    with writing(trainer, "result.json") as path:
        records.save_json(path, facts | result | time_taken | {"checkpoint": trainer.saved.name})


def _last_loss(trainer: Trainer) -> Tensor:
    return trainer.losses[(trainer.step - 1) % trainer.per_epoch]


@lru_cache(maxsize=1)
def _some(samples: int) -> Tensor:
    """Return samples from the whole split, because the first ones may share a class.

    Cached, because sorting is slow.
    """
    return draw.order(samples, 0, 0)[:SEEN].sort().values


def _spreads(trainer: Trainer) -> dict[str, float]:
    """Return the spread of some images' features, and of their embeddings, which collapse first."""
    some = _some(trainer.samples)
    student = trainer.method.student
    images = plain_images(trainer.feed, trainer.settings.split, some, trainer.settings.size)
    seen = features(student["backbone"], images, trainer.precision)
    embedded = features(student["projector"], [seen], trainer.precision)
    return {"spread": spread(seen), "embedding_spread": spread(embedded)}
