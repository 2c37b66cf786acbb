"""Export a representation: features of any images, and the backbone's weights with a model card."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from marginlens import evals
from marginlens.data.feed import Feed, Files, open_feed
from marginlens.data.folder import index_folder
from marginlens.data.prepare import folder_of
from marginlens.data.sources import SOURCES
from marginlens.data.store import exists
from marginlens.devices import choose_device, choose_precision, placed
from marginlens.errors import DataError, memory
from marginlens.evals.features import features, plain_images
from marginlens.files import expanded, put_new, writing
from marginlens.output import counted, legible
from marginlens.runs.evaluate import to_lower
from marginlens.runs.model import fingerprint, load_backbone_of
from marginlens.runs.records import Evaluation
from marginlens.runs.run import Run, open_run


def embed(
    run: Run | str | Path,
    data: str | Path,
    out: str | Path,
    *,
    split: str = "",
    size: int = 0,
    resize: int = 0,
    skip_bad: bool = False,
    device: str = "auto",
    workers: int = 2,
) -> dict[str, Any]:
    """Write the features of a folder of images, or of a prepared data set, as safetensors.

    The file has `features` (n, d) and, if there are labels, `labels` (n,). A text file beside it lists the images'
    names, row by row. Images are normalised as in pre-training. `split` defaults to the first split.
    """
    run, path = open_run(run), _free(out, ".files.txt")
    where = choose_device(device)
    backbone = placed(load_backbone_of(run), where)
    at = data if isinstance(data, str) else os.path.join(os.curdir, data)  # a Path is never a data set's name
    with _feed(at, where, workers, skip_bad) as (feed, skipped):
        split = split or feed.splits[0]
        labels, size = feed.labels(split), size or run.settings.size
        precision = choose_precision(run.settings.amp if where.type == "cuda" else "off", where)
        with memory(to_lower(where)):
            images = plain_images(feed, split, torch.arange(len(labels)), size, resize, (run.mean, run.std))
            found = features(backbone, images, precision).cpu()
        names = list(feed.index.splits[split].files) if isinstance(feed, Files) else []
        facts = {"run": run.id, "data": str(data), "split": split, "fingerprint": feed.fingerprint}
    tensors = {"features": found} | ({"labels": labels} if bool((labels >= 0).any()) else {})
    _write(path, reproducible(save(tensors, {key: str(value) for key, value in facts.items()})))
    written = {"out": str(path), "rows": len(found), "features": found.shape[1], **facts, "skipped": skipped}
    if names:
        beside = path.with_suffix(".files.txt")
        _write(beside, ("\n".join(names) + "\n").encode())
        written["files"] = str(beside)
    return written


def export(run: Run | str | Path, out: str | Path) -> dict[str, Any]:
    """Write the backbone's weights as safetensors under torchvision's names, with a model card beside them."""
    run, path = open_run(run), _free(out, ".md")
    backbone, settings = load_backbone_of(run), run.settings
    facts = {
        "format": "pt",
        "encoder": settings.encoder,
        "stem": backbone.stem,
        "features": str(backbone.features),
        "size": str(settings.size),
        "mean": json.dumps(run.mean),
        "std": json.dumps(run.std),
        "run": run.id,
    }
    card, text = path.with_suffix(".md"), model_card(run, path.name, facts, fingerprint(backbone))
    weights = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    _write(path, reproducible(save(weights, facts)))
    _write(card, text.encode(errors="backslashreplace"))
    shown = {"encoder": settings.encoder, "stem": backbone.stem, "features": backbone.features, "run": run.id}
    return {"out": str(path), "card": str(card), **shown, "size": settings.size, "mean": run.mean, "std": run.std}


def reproducible(content: bytes) -> bytes:
    """Return a safetensors file with a sorted header, because the library writes metadata in any order."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = dict(sorted(header.pop("__metadata__", {}).items()))
    by_place = sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0]))
    said = json.dumps({"__metadata__": metadata, **dict(by_place)}, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)  # tensors begin at a multiple of 8
    return len(said).to_bytes(8, "little") + said + content[8 + length :]


def model_card(run: Run, file: str, facts: dict[str, str], checksum: str) -> str:
    """Return, as Markdown, the facts that a user of the weights needs."""
    settings, result = run.settings, run.result
    rows = [("method", settings.method), ("effect", f"`{settings.effect}`"), ("data", _escaped(settings.data))]
    rows += [("images", f"{result.images:,}"), ("epochs", str(settings.epochs)), ("batch", str(settings.batch))]
    rows += [("seed", str(settings.seed))]
    rows += [(key, facts[key]) for key in ("encoder", "stem", "features", "size", "mean", "std")]
    rows += [("loss, last epoch", f"{result.loss:.4f}"), ("run", run.id), ("SHA-256 of the weights", checksum)]
    measured = [
        f"| {found.kind} | {_escaped(found.data)} | {found.top1:.2f} | {_how(found)} |" for found in run.evaluations
    ] or ["| nothing was measured | | | |"]
    return "\n".join(
        [
            f"# {_escaped(file)}",
            "",
            f"A {settings.encoder} backbone, pre-trained without labels by marginlens.",
            "Parameters have torchvision's names; there is no `fc`.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in rows),
            "",
            "## Measured",
            "",
            "| | data | top-1, % | how |",
            "|---|---|---|---|",
            *measured,
            "",
            "## Use",
            "",
            "```python",
            "import torch",
            "from safetensors.torch import load_file",
            "from marginlens.nets import encoder, load_backbone",
            "",
            f'model = encoder("{settings.encoder}", stem="{facts["stem"]}")',
            f"load_backbone(model, load_file({file!a}))",
            "model.eval()  # or its batch norms keep learning",
            f"mean, std = torch.tensor({facts['mean']}), torch.tensor({facts['std']})",
            f"images = torch.rand(4, 3, {settings.size}, {settings.size})  # yours: RGB in [0, 1]",
            "features = model((images - mean[:, None, None]) / std[:, None, None])",
            "```",
            "",
            "## All settings",
            "",
            "```json",
            json.dumps(settings.model_dump(mode="json"), indent=1),
            "```",
            "",
        ]
    )


def _escaped(name: str) -> str:
    """Return a name escaped for Markdown. Names come from folders, and may hold anything."""
    plain = legible(name).replace("\n", "\\n").replace("\t", "\\t")
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~-])", r"\\\1", plain) if _MARKUP.search(plain) else plain


_MARKUP = re.compile(r"[\\`*{}\[\]<>#!|&~]|__|^[-+]|\]\(")
"""Characters that Markdown may take for markup. A hyphen or an underscore inside a word is harmless."""


def _how(found: Evaluation) -> str:
    how, holdout = evals.get(found.kind).how(found), getattr(found.settings, "holdout", 0)
    how += f", on {counted(holdout, 'image')} kept back from training" if holdout else ""
    return f"{how}; it diverged, and says nothing about the backbone" if found.diverged else how


@contextmanager
def _feed(data: str, where: torch.device, workers: int, skip_bad: bool) -> Iterator[tuple[Feed, list[str]]]:
    """Yield a folder, indexed on the fly, or a prepared data set, and the images that were skipped."""
    path = folder_of(data)
    if path is None or not path.is_dir():
        if path is not None or (data not in SOURCES and not exists(data)):
            raise DataError(f"{data} is neither a folder with images nor a prepared data set (marginlens data list)")
        yield open_feed(data, where, workers), []
        return
    index, bad = index_folder(path, "folder", skip_bad=skip_bad, test_share=0.0, workers=max(workers, 1))
    yield Files(index, where, workers), bad


def _free(out: str | Path, beside: str) -> Path:
    """Return the file to write. Raise if the file or its companion exists, or the folder is not writable."""
    path = expanded(out)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is written as safetensors; give --out a name that ends in .safetensors")
    for file in (path, path.with_suffix(beside)):
        if os.path.lexists(file):
            raise ValueError(f"{file} exists already; remove it, or give --out another name")
    with writing(path, "--out"), tempfile.TemporaryFile(dir=path.parent):
        return path


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and never over another."""
    with writing(path, "--out"):
        put_new(path, content)
