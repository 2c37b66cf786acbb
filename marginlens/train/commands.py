"""`marginlens pretrain`, `embed`, `export`, and a command for each evaluation. --help prints these docstrings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field
from tyro.conf import OmitArgPrefixes, Positional

from marginlens import evals
from marginlens.data.prepare import clash, open_data
from marginlens.files import expanded
from marginlens.options import options, perform
from marginlens.output import counted
from marginlens.output import say as say_new
from marginlens.runs import export as embedding
from marginlens.runs.config import Pretrain, at_hand, run_name
from marginlens.runs.evaluate import evaluate
from marginlens.runs.records import Evaluation
from marginlens.runs.run import open_run
from marginlens.settings import Machine, Rates, Settings, Size
from marginlens.train import pretrain as training


class PretrainPlace(Machine):
    """Where and how to run a pre-training."""

    runs: str = Field("runs", description="Folder of runs; the run gets a folder of its own in it.")
    engine: Literal["auto", "eager", "graph"] = Field(
        "auto", description="The step as one CUDA graph, or one operation after another; auto: a graph if possible."
    )
    resume: bool = Field(False, description="Resume the same run if it was interrupted; otherwise start it.")
    knn_every: int = Field(10, ge=0, description="Epochs between kNN evaluations; 0: at the end only.")
    checkpoint_seconds: float = Field(60.0, ge=0, description="Time between checkpoints.")
    lens: int = Field(0, ge=0, description="Steps between looks at the rows of the loss, for lens.jsonl; 0: none.")


class EvaluatePlace(Machine):
    """Where to run an evaluation."""

    again: bool = Field(False, description="Measure again, even if a result is stored.")


class Beside(Settings):
    """Other rates to try."""

    beside: Rates = Field((), description="Learning rates to try beside --lr, on the same crops: one probe of each.")


class Elsewhere(Settings):
    """Where to transfer to."""

    to: str = Field(description="A data set to transfer to, or a folder of images, which is prepared first.")


class EmbedPlace(Machine):
    """The images to embed."""

    data: str = Field(description="A folder of images, or a data set. A name that both have is the data set's: ./NAME.")
    out: str = Field(description="The safetensors file to write.")
    split: str = Field("", description="The split to embed; not given: the first one.")
    size: Size = Field(0, description="Side of the images in pixels; 0: as in pre-training.")
    resize: int = Field(0, ge=0, description="Resize images to this before the central crop; 0: to the crop.")
    skip_bad: bool = Field(False, description="Skip images that cannot be decoded.")


class ExportPlace(Settings):
    """The file to write."""

    out: str = Field(description="The safetensors file to write; its model card is written beside it.")


if TYPE_CHECKING:
    PretrainOptions: TypeAlias = dict[str, Any]
    EmbedOptions: TypeAlias = dict[str, Any]
    ExportOptions: TypeAlias = dict[str, Any]
else:
    PretrainOptions = options(Pretrain, PretrainPlace)
    EmbedOptions = options(EmbedPlace)
    ExportOptions = options(ExportPlace)


def pretrain(settings: OmitArgPrefixes[PretrainOptions]) -> None:
    """Pre-train an encoder without labels, in a run's folder that can be resumed, probed and exported.

    Options that are not given take the recipe's value for the data set; --print-config shows all. For example:

        marginlens pretrain --method mocov3 --data shapes --encoder tiny --effect "emphasis(s=5)" --epochs 20

        marginlens pretrain --data cifar10 --seed 1 --runs ~/runs --resume

        marginlens pretrain --data ./photos --encoder tiny --epochs 20

        marginlens pretrain --config settings.yaml --lr 0.03 --print-config

        marginlens pretrain --config RUN/config.json --seed 1
    """

    def act(chosen: Pretrain, place: PretrainPlace) -> dict[str, Any]:
        both = clash(chosen.data)
        chosen, notes = at_hand(chosen, place.workers)
        for line in (both, *notes) if both else notes:
            say_new(line, error=True)
        if place.resume:
            folder = expanded(place.runs) / run_name(chosen, open_data(chosen.data).fingerprint)
            if not folder.exists():
                say_new(f"nothing to resume with these settings, so this is a new run: {folder}", error=True)
        run = training.pretrain(chosen, **place.model_dump())
        return {"run": str(run.path), **run.result.plain()}

    def say(found: dict[str, Any]) -> str:
        near = f", kNN {found['knn']:.2f} %" if "knn" in found else ""
        done = f"{found['run']}: {counted(found['epochs'], 'epoch')}, loss {found['loss']:.4f}{near}"
        return f"{done}\nnext: marginlens {_next(found['run'])}"

    perform((Pretrain, PretrainPlace), dict(settings), act, say)


def _next(run: str) -> str:
    """Return the next command for a run. Data without labels cannot be probed; without test images a probe needs
    --holdout.
    """
    at = shlex.quote(run)
    try:
        data = open_data(open_run(run).settings.data)
    except ValueError:  # gone since
        return f"probe {at}"
    if not data.classes:
        return f"embed {at} --data {shlex.quote(data.name)} --out features.safetensors"
    return f"probe {at}" if "test" in data.splits else f"probe {at} --holdout {max(1, len(data.splits['train']) // 10)}"


def place_of(name: str) -> type[Settings]:
    """Return the options of an evaluation's command that do not change its number."""
    found = evals.get(name)
    return type("Place", (*[Elsewhere] * found.elsewhere, *[Beside] * found.rated, EvaluatePlace), {})


def evaluation(name: str) -> Callable[..., None]:
    """Return an evaluation's command. Its options are the settings; its help is the file's docstring."""
    found, place = evals.get(name), place_of(name)

    def command(run: Path, settings: dict[str, Any]) -> None:
        def act(chosen: Settings, where: Settings) -> dict[str, Any]:
            return evaluate(run, name, chosen, **where.model_dump())

        def recipe(given: Mapping[str, Any]) -> Mapping[str, Any]:
            if not found.settings.recipes:
                return {}
            data = given.get("to") if found.elsewhere else open_run(run).settings.data
            return found.settings.recipes.get(str(data), {})

        perform((found.settings, place), dict(settings), act, _accuracy, recipe)

    taken: Any = OmitArgPrefixes[options(found.settings, place)]  # type: ignore[misc]
    command.__annotations__ |= {"run": Positional[Path], "settings": taken}
    command.__doc__ = f"{sys.modules[evals.MODULES[name]].__doc__}\nArgs:\n    run: The run's folder.\n"
    command.__name__ = name
    return command


def embed(run: Positional[Path], settings: OmitArgPrefixes[EmbedOptions]) -> None:
    """Write a run's features of any images as safetensors, with the files' names beside them.

    Images are normalised as in pre-training. For example:

        marginlens embed RUN --data ~/photos --out photos.safetensors

        marginlens embed RUN --data cifar10 --split test --out test.safetensors

    Args:
        run: The run's folder.
    """

    def act(place: EmbedPlace) -> dict[str, Any]:
        where = place.model_dump()
        if both := clash(place.data):
            say_new(both, error=True)
        return embedding.embed(open_run(run), where.pop("data"), where.pop("out"), **where)

    def say(written: dict[str, Any]) -> str:
        names = f", names of the files in {written['files']}" if "files" in written else ""
        left = "".join(f"skipped: {line}\n" for line in written["skipped"])
        return f"{left}{written['out']}: {written['rows']:,} x {written['features']} features{names}"

    perform((EmbedPlace,), dict(settings), act, say)


def export(run: Positional[Path], settings: OmitArgPrefixes[ExportOptions]) -> None:
    """Write a run's backbone as safetensors under torchvision's names, with a model card beside it.

    For example:

        marginlens export RUN --out backbone.safetensors

    Args:
        run: The run's folder.
    """

    def act(place: ExportPlace) -> dict[str, Any]:
        return embedding.export(open_run(run), place.out)

    perform((ExportPlace,), dict(settings), act, lambda w: f"{w['out']}, and its card {w['card']}")


def _accuracy(found: dict[str, Any]) -> str:
    record = Evaluation.model_validate({k: v for k, v in found.items() if not k.startswith("beside")})
    several = record.top5 is not None and (record.classes or 6) > 5  # because of five classes or fewer all are among 5
    more = f", top-5 {record.top5:.2f} %" if several else ""
    kept = getattr(record.settings, "holdout", 0)
    on = f"{counted(kept, 'image')} kept back from training" if kept else "the test set"
    said = "it diverged" if record.diverged else evals.get(record.kind).remark(record)
    remark = f"; {said}" if said else ""
    lines = [f"{record.name}: top-1 {record.top1:.2f} %{more}, on {on}{remark}"]
    for rate, top in found.get("beside", {}).items():
        lost = "; it diverged" if rate in found.get("beside_diverged", ()) else ""
        lines.append(f"  at a learning rate of {rate}: {top:.2f} %{lost}")
    return "\n".join(lines)
