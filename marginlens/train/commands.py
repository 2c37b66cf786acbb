"""`marginlens pretrain`, `probe`, `knn`, `transfer`, `embed`, `export`: docstrings are what --help prints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tyro.conf import OmitArgPrefixes, Positional

from marginlens.data.prepare import open_data
from marginlens.output import say as say_new
from marginlens.paths import expanded
from marginlens.train import embed as embedding
from marginlens.train import pretrain as training
from marginlens.train import probe as probing
from marginlens.train.accuracy import diverged
from marginlens.train.config import PROBE_RECIPES, Knn, Pretrain, Probe
from marginlens.train.identity import run_name
from marginlens.train.options import options, perform
from marginlens.train.places import EmbedPlace, EvaluatePlace, ExportPlace, PretrainPlace, ProbePlace, TransferPlace
from marginlens.train.record import open_run

if TYPE_CHECKING:
    PretrainOptions: TypeAlias = dict[str, Any]
    ProbeOptions: TypeAlias = dict[str, Any]
    KnnOptions: TypeAlias = dict[str, Any]
    TransferOptions: TypeAlias = dict[str, Any]
    EmbedOptions: TypeAlias = dict[str, Any]
    ExportOptions: TypeAlias = dict[str, Any]
else:
    PretrainOptions = options(Pretrain, PretrainPlace)
    ProbeOptions = options(Probe, ProbePlace)
    KnnOptions = options(Knn, EvaluatePlace)
    TransferOptions = options(Probe, TransferPlace)
    EmbedOptions = options(EmbedPlace)
    ExportOptions = options(ExportPlace)


def pretrain(settings: OmitArgPrefixes[PretrainOptions]) -> None:
    """Pre-trains an encoder without labels, in a run's folder that can be resumed, probed and exported.

    Whatever is not given takes the recipe's value for the data set; --print-config shows them all. For example:

        marginlens pretrain --method mocov3 --data shapes --encoder tiny --effect "emphasis(s=5)" --epochs 20

        marginlens pretrain --data cifar10 --seed 1 --runs ~/runs --resume

        marginlens pretrain --config settings.yaml --lr 0.03 --print-config

        marginlens pretrain --config RUN/config.json --seed 1
    """

    def act(chosen: Pretrain, place: PretrainPlace) -> dict[str, Any]:
        if place.resume:
            folder = expanded(place.runs) / run_name(chosen, open_data(chosen.data).fingerprint)
            if not folder.exists():
                say_new(f"nothing was begun with these settings, so this is a new run: {folder}", error=True)
        run = training.pretrain(chosen, **place.model_dump())
        return {"run": str(run.path), **run.result}

    def say(found: dict[str, Any]) -> str:
        near = f", kNN {found['knn']:.2f} %" if "knn" in found else ""
        done = f"{found['run']}: {found['epochs']} epoch{'s' * (found['epochs'] > 1)}, loss {found['loss']:.4f}{near}"
        return f"{done}\nnext: marginlens {_next(found['run'])}"

    perform((Pretrain, PretrainPlace), dict(settings), act, say)


def _next(run: str) -> str:
    """What can be done with a run of such data: what has no labels cannot be probed, nor tested without test images."""
    at = shlex.quote(run)
    try:
        data = open_data(open_run(run).settings.data)
    except ValueError:  # gone since
        return f"probe {at}"
    if not data.classes:
        return f"embed {at} --data {shlex.quote(data.name)} --out features.safetensors"
    return f"probe {at}" if "test" in data.splits else f"probe {at} --holdout {max(1, len(data.splits['train']) // 10)}"


def probe(run: Positional[Path], settings: OmitArgPrefixes[ProbeOptions]) -> None:
    """Trains a linear layer on a run's frozen backbone, and says its accuracy after the last epoch.

    With --holdout the test set is not looked at: that is how to choose settings. For example:

        marginlens probe runs/mocov3-shapes-tiny-plain-seed0-1a2b3c4d5e

        marginlens probe RUN --holdout 1000

        marginlens probe RUN --beside 0.1 0.3 3 10

    Args:
        run: The run's folder.
    """

    found = open_run(run)

    def act(chosen: Probe, place: ProbePlace) -> dict[str, Any]:
        return probing.probe(found, chosen, **place.model_dump())

    recipe = PROBE_RECIPES.get(found.settings.data, {})
    perform((Probe, ProbePlace), dict(settings), act, _accuracy, lambda given: recipe)


def knn(run: Positional[Path], settings: OmitArgPrefixes[KnnOptions]) -> None:
    """Classifies test images by a run's nearest training images: no training, a first look.

    Each of the k nearest votes for its class with weight exp(cosine / temperature). For example:

        marginlens knn RUN --k 20

    Args:
        run: The run's folder.
    """

    def act(chosen: Knn, place: EvaluatePlace) -> dict[str, Any]:
        return probing.knn(open_run(run), chosen, **place.model_dump())

    perform((Knn, EvaluatePlace), dict(settings), act, _accuracy)


def transfer(run: Positional[Path], settings: OmitArgPrefixes[TransferOptions]) -> None:
    """Trains a linear layer on a run's frozen backbone for other data than it learned from.

    The other data are normalised by their own mean and std, and resized to the run's image size. For example:

        marginlens transfer RUN --to cifar10

    Args:
        run: The run's folder.
    """

    def act(chosen: Probe, place: TransferPlace) -> dict[str, Any]:
        where = place.model_dump()
        return probing.transfer(open_run(run), where.pop("to"), chosen, **where)

    def recipe(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return PROBE_RECIPES.get(str(given.get("to")), {})

    perform((Probe, TransferPlace), dict(settings), act, _accuracy, recipe)


def embed(run: Positional[Path], settings: OmitArgPrefixes[EmbedOptions]) -> None:
    """Writes a run's features of any images as safetensors, with the files' names beside them.

    Images are normalised as in pre-training. For example:

        marginlens embed RUN --data ~/photos --out photos.safetensors

        marginlens embed RUN --data cifar10 --split test --out test.safetensors

    Args:
        run: The run's folder.
    """

    def act(place: EmbedPlace) -> dict[str, Any]:
        where = place.model_dump()
        return embedding.embed(open_run(run), where.pop("data"), where.pop("out"), **where)

    def say(written: dict[str, Any]) -> str:
        names = f", names of the files in {written['files']}" if "files" in written else ""
        left = "".join(f"skipped: {line}\n" for line in written["skipped"])
        return f"{left}{written['out']}: {written['rows']:,} x {written['features']} features{names}"

    perform((EmbedPlace,), dict(settings), act, say)


def export(run: Positional[Path], settings: OmitArgPrefixes[ExportOptions]) -> None:
    """Writes a run's backbone as safetensors under torchvision's names, and a model card beside it.

    For example:

        marginlens export RUN --out backbone.safetensors

    Args:
        run: The run's folder.
    """

    def act(place: ExportPlace) -> dict[str, Any]:
        return embedding.export(open_run(run), place.out)

    perform((ExportPlace,), dict(settings), act, lambda w: f"{w['out']}, and its card {w['card']}")


def _accuracy(found: dict[str, Any]) -> str:
    more = f", top-5 {found['top5']:.2f} %" if "top5" in found else ""
    kept = found["settings"]["holdout"]
    on = f"{kept:,} images kept back from training" if kept else "the test set"
    lost = "; it diverged" if diverged(found) else ""
    if (k := found["settings"].get("k", 0)) > (voted := found.get("neighbours", k)):
        lost = f"; there are {voted:,} images to learn from, and all vote"
    lines = [f"{found['kind']} on {found['data']}: top-1 {found['top1']:.2f} %{more}, on {on}{lost}"]
    for rate, top in found.get("beside", {}).items():
        lost = "; it diverged" if rate in found.get("beside_diverged", ()) else ""
        lines.append(f"  at a learning rate of {rate}: {top:.2f} %{lost}")
    return "\n".join(lines)
