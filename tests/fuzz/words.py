"""Command lines with real options and hostile values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from marginlens import evals
from marginlens.cli import COMMANDS
from marginlens.runs.commands import ListPlace, PrunePlace, StorePlace
from marginlens.runs.config import Pretrain
from marginlens.sweep import conduct
from marginlens.sweep.job import Executor, Selection, SweepPlace
from marginlens.train import pretrain
from marginlens.train.commands import EmbedPlace, ExportPlace, PretrainPlace, place_of
from tests.fuzz import mutate
from tests.fuzz.harness import Case

MODELS: dict[str, tuple[Any, ...]] = {
    "pretrain --print-config": (Pretrain, PretrainPlace),
    **{f"{name} RUN": (evals.get(name).settings, place_of(name)) for name in evals.MODULES},
    "embed RUN": (EmbedPlace,),
    "export RUN": (ExportPlace,),
    "sweep --dry-run --no-probe": (Pretrain, SweepPlace),
    "sweep --print-config": (Pretrain, SweepPlace),
    "reproduce tab2 --dry-run": (Selection, Executor),
    "reproduce tab3 --print-config": (Selection, Executor),
    "runs": (ListPlace,),
    "runs show RUN": (StorePlace,),
    "runs compare RUN RUN": (StorePlace,),
    "runs prune": (PrunePlace,),
    "runs add RUN": (StorePlace,),
}
OTHERS = {
    "data list": ("json",),
    "data info NAME": ("json",),
    "data show NAME": ("out", "split", "columns"),
    "data views NAME": ("out", "count", "seed", "crop", "scale"),
    "data prepare folder": ("from", "as", "mean", "std", "skip-bad", "workers"),
    "report": ("runs", "out", "only", "paper", "markdown", "latex", "insert", "rates", "json"),
    "data": (),
}
USUAL = [
    "0",
    "1",
    "2",
    "0.5",
    "shapes",
    "little",
    "cifar10",
    "tiny",
    "plain",
    "emphasis(s=5)",
    "cpu",
    "auto",
    "train",
    "x",
    "seed=0|1",
    "0|1",
    "epochs>=1",
]
USUAL += ["state=complete", "probe", "loss", "name", "tab2", "MoCo/CIFAR10/*", "1e-3", "local", "simclr", "byol"]
NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "-0",
    "1e18",
    "9223372036854775807",
    "9223372036854775808",
    "0x10",
    "1_000",
    "1,5",
    "1.0",
    "00",
    "+1",
]
NUMBERS += ["9" * 30, "9" * 5000, "\u0661", "5e-324", "1e-400", " 1", "2147483648"]
EFFECTS = ["emphasis(s=", "emphasis(s=nan)", "emphasis(s=1e999)", "emphasis(s=5)*" * 200 + "plain", "(" * 3000]
EFFECTS += ["emphasis(s=5, s=5)", "margin(m1=0.1)*margin(m2=1)", "emphasis(s='5')", "lambda: 0", "x" * 5000 + "(s=1)"]
EFFECTS += ["emphasis(\n)", "__import__('os')"]
GRIDS = ["seed=0|1", "seed=", "=1", "seed=0|0", "effect=plain|", "tau=nan|1", "a=b=c", "|", f"seed={'1|' * 3000}2"]
PATHS = [
    "/dev/null",
    "/dev/null/x",
    "/",
    ".",
    "..",
    "file",
    "file/x",
    "folder",
    "missing/x",
    "~",
    "~nobody/x",
    "//",
    "folder/",
    "-",
    "/etc/passwd",
]
CONDITIONS = ["x=1", "effect=[", "effect=*", "diverged>yes", "state=odd", "loss<nan"]
CONDITIONS += ["loss<" + "9" * 400, "name=" + "*a" * 25 + "b"]


def case(rng: Random, folder: Path) -> Case:
    """Return a command line that cannot train."""
    (folder / "file").write_text("x")
    (folder / "folder").mkdir()
    (folder / "runs").mkdir()
    start = rng.choice((*MODELS, *OTHERS))
    parts = [_value(rng) if part in ("RUN", "NAME") else part for part in start.split()]
    options = OTHERS[start] if start in OTHERS else [n for model in MODELS[start] for n in model.model_fields]
    if start.startswith("sweep"):
        options = [*options, "grid", "grid"]
    hidden = {"yes", "seeds", "dry_run", "executor", "device", "print_config"}
    chosen = rng.sample(sorted(set(options) - hidden), min(len(set(options) - hidden), rng.choice((0, 1, 1, 2, 3))))
    for name in chosen:
        parts += [_option(rng, name), *(_value(rng, name) for _ in range(rng.choice((0, 1, 1, 1, 1, 2))))]
    if rng.random() < 0.05:
        parts = [_value(rng)] if start in MODELS else [*parts[: rng.randrange(len(parts) + 1)], _value(rng)]
    if rng.random() < 0.005:
        parts = ["encoders", *parts[-1:]]  # which takes seconds
    if rng.random() < 0.04:
        parts = [*rng.choice(list(COMMANDS)).split(), "--help"]
    if parts and parts[0] == "demo" and "--help" not in parts:
        parts = ["--version"]
    return Case(start, [_argument(part) for part in parts], around=_idle)


@contextlib.contextmanager
def _idle() -> Iterator[None]:
    """Fail inside the `with` block if anything would be trained."""
    busy = AssertionError("it would train")
    with (
        mock.patch.object(pretrain, "pretrain", side_effect=busy),
        mock.patch.object(conduct, "carry_out", side_effect=busy),
    ):
        yield


def _argument(word: str) -> str:
    """Return a word as it can be in argv: no NUL, invalid UTF-8 escaped."""
    try:
        return os.fsdecode(word.replace("\0", "").encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        return word.encode(errors="ignore").decode()


def _option(rng: Random, name: str) -> str:
    word = f"--{name.replace('_', '-')}"
    odd = (word[:-1], word.upper(), f"--no-{name}", word.replace("--", "-"), f"{word}={_value(rng)}")
    return word if rng.random() < 0.7 else rng.choice(odd)


def _value(rng: Random, name: str = "") -> str:
    """Return a value, often of the kind that an option asks for."""
    special = {"effect": EFFECTS, "grid": GRIDS, "where": CONDITIONS, "config": PATHS, "out": PATHS, "runs": PATHS}
    special |= dict.fromkeys(("from", "markdown", "latex", "insert", "rates", "weights", "data"), PATHS)
    if name in special and rng.random() < 0.6:
        return rng.choice(special[name])
    raw = ["\udcff", "\udce9t\udce9", "x\udc80"]
    return rng.choice(rng.choice((NUMBERS, NUMBERS, USUAL, USUAL, mutate.STRINGS, raw)))
