"""`marginlens data ...`: prepare data sets, and look at them."""

from __future__ import annotations

import json as jsons
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table
from tyro.conf import Positional, arg

from marginlens.checks import whole
from marginlens.data import store
from marginlens.data.contact_sheet import save_grid, save_views
from marginlens.data.disk import record
from marginlens.data.folder import KIND, FolderIndex, crop_file, prepare_folder
from marginlens.data.prepare import folder_name, open_data, prepare, verified
from marginlens.data.sources import SOURCES, recipes
from marginlens.data.store import NO_LABEL, Images, Store
from marginlens.data.views import Crop, View, strong, weak
from marginlens.errors import DataError
from marginlens.files import expanded
from marginlens.options import MaybePath
from marginlens.output import say, say_json, show

THUMBNAIL = 64


def data_list(*, json: bool = False) -> None:
    """List the data sets, and which of them are prepared.

    Args:
        json: Print JSON instead of a table.
    """
    names = [*SOURCES, KIND, *(n for n in store.names() if n not in (*SOURCES, KIND))]
    rows = [{"name": n, "prepared": n != KIND and store.exists(n), "about": _about(n)} for n in names]
    if json:
        say_json(jsons.dumps({"folder": str(store.root()), "data": rows}, indent=1))
        return
    table = Table("name", "prepared", "what it is", title=f"data sets in {store.root()}")
    for row in rows:
        table.add_row(str(row["name"]), "yes" if row["prepared"] else "", str(row["about"]))
    show(table)


def data_prepare(
    name: Positional[str],
    *,
    from_: Annotated[Path | None, arg(name="from", metavar="PATH")] = None,
    as_: Annotated[str | None, arg(name="as", metavar="NAME")] = None,
    skip_bad: bool = False,
    mean: Annotated[tuple[float, float, float] | None, arg(metavar="RED GREEN BLUE")] = None,
    std: Annotated[tuple[float, float, float] | None, arg(metavar="RED GREEN BLUE")] = None,
    test_share: Annotated[float | None, arg(metavar="SHARE")] = None,
    workers: int = 2,
    json: bool = False,
) -> None:
    """Download a data set, or read a local copy, and store it as arrays in the folder MARGINLENS_DATA.

    A folder of images is not copied. Its classes are the folders in it, and a fifth of each class becomes test images.
    With train/CLASS/ and val/CLASS/ or test/CLASS/ in it, these are the splits. Images in one folder have no labels.

    For example:

        marginlens data prepare cifar10

        marginlens data prepare cifar100 --from ~/cifar-100-binary.tar.gz

        marginlens data prepare folder --from ~/photos --as photos

    Args:
        name: shapes, cifar10, cifar100, stl10, tinyimagenet, or folder: any folder of images.
        from_: The official archive or its extracted folder, or the folder of images.
        as_: The name to give a folder; its own, if none is given.
        skip_bad: Leave out images that cannot be decoded, instead of refusing the folder.
        mean: A folder's mean per channel, in [0, 1]; computed, if none is given.
        std: A folder's standard deviation per channel; computed, if none is given.
        test_share: Share of each class to keep back as test images; 0: none.
        workers: Processes that decode a folder; 0: none but this one.
        json: Print JSON instead of text.
    """
    skipped: list[str] = []
    notes: tuple[str, ...] = ()
    if name == KIND:
        if from_ is None:
            raise DataError("a folder is prepared from a path: marginlens data prepare folder --from PATH")
        name = folder_name(as_ or expanded(from_).resolve().name)
        how: dict[str, Any] = {"skip_bad": skip_bad, "mean": mean, "std": std, "test_share": test_share}
        index, skipped = prepare_folder(from_, name, **how, workers=workers)
        notes = index.notes
    elif skip_bad or any(given is not None for given in (as_, mean, std, test_share)):
        raise DataError(f"--as, --mean, --std, --test-share and --skip-bad are for a folder; {name} is not one")
    else:
        prepare(name, from_)
    facts = describe(name) | {"skipped": skipped, "notes": notes}
    if json:
        say_json(jsons.dumps(facts, indent=1))
        return
    for line in skipped:
        say(f"skipped: {line}")
    for line in notes:
        say(line)
    say(f"{name}: {_counts(facts)} in {store.root() / name}")


def data_info(name: Positional[str], *, json: bool = False) -> None:
    """Show the facts of a prepared data set: images, classes, size, mean and std.

    Args:
        name: The data set.
        json: Print JSON: images per split, classes, size, mean and std per channel, fingerprint.
    """
    facts = describe(name)
    if json:
        say_json(jsons.dumps(facts, indent=1))
        return
    table = Table(show_header=False, title=name)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in facts.items():
        if key == "splits":
            table.add_row("images", _counts(facts))
        elif key == "classes":
            some = f"{len(value)}: {', '.join(value[:10])}{', ...' if len(value) > 10 else ''}"
            table.add_row("classes", some if value else "none")
        else:
            table.add_row(key, ", ".join(f"{v:.4f}" for v in value) if key in ("mean", "std") else str(value))
    show(table)


def data_show(name: Positional[str], *, out: MaybePath = None, split: str = "train", columns: int = 12) -> None:
    """Write a grid of images as PNG, a row for each class.

    Args:
        name: The data set.
        out: The file to write; NAME.png, if none is given.
        split: train, test, or unlabeled.
        columns: Images in a row.
    """
    whole("columns", columns)
    path = out or Path(f"{name}.png")
    save_grid(_by_class(name, split, columns), path)
    say(f"wrote {path}")


def data_views(
    name: Positional[str],
    *,
    out: MaybePath = None,
    count: int = 10,
    seed: int = 0,
    crop: Crop = "resized",
    scale: Annotated[tuple[float, float] | None, arg(metavar="LEAST MOST")] = None,
) -> None:
    """Write a grid as PNG: an image, four of its strong views, four of its weak ones.

    Args:
        name: The data set.
        out: The file to write; NAME-views.png, if none is given.
        count: Images, a row for each.
        seed: Another seed, other views.
        crop: The weak view's crop: resized or padded.
        scale: Share of the area in a resized crop; that of the data set's recipe, if none is given.
    """
    whole("count", count)
    scale = scale or recipes("pretrain").get(name, {}).get("crop_scale", View().scale)
    images, labels, classes = _some(name, count)
    size = images.shape[-1]
    plain = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    both = [replace(view, scale=scale) for view in (strong(size, *plain), weak(size, *plain, crop=crop))]
    path = out or Path(f"{name}-views.png")
    save_views(images, [_label(label, classes) for label in labels], both, seed, path)
    say(f"wrote {path}")


def describe(name: str) -> dict[str, Any]:
    """Return the facts of a prepared data set, its content verified."""
    data = verified(name)
    splits = {split: len(part) for split, part in data.splits.items()}
    size = "various" if isinstance(data, FolderIndex) else "{} x {}".format(*data.size)
    return {
        "name": name,
        "splits": splits,
        "classes": list(data.classes),
        "size": size,
        "mean": list(data.mean),
        "std": list(data.std),
        "fingerprint": data.fingerprint,
    }


def _by_class(name: str, split: str, columns: int) -> list[tuple[str, Images]]:
    data = open_data(name)
    if split not in data.splits:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(data.splits)}")
    labels = data.splits[split].labels
    rows = []
    for label in np.unique(labels)[:20]:
        chosen = np.flatnonzero(labels == label)[:columns]
        rows.append((_label(int(label), data.classes), _take(data, split, chosen)))
    return rows


def _take(data: Store | FolderIndex, split: str, chosen: Any) -> Images:
    if isinstance(data, Store):
        return np.array(data.splits[split].images[chosen])
    part = data.splits[split]
    return np.stack([crop_file(data.path / part.files[i], _middle(*part.sizes[i]), THUMBNAIL) for i in chosen])


def _middle(height: int, width: int) -> tuple[int, int, int, int]:
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def _some(name: str, count: int) -> tuple[Images, list[int], tuple[str, ...]]:
    """Return images, evenly chosen because a folder's first ones are all of one class, their labels and the classes."""
    data = open_data(name)
    split = next(iter(data.splits))
    whole = len(data.splits[split])
    chosen = np.arange(min(count, whole)) * whole // min(count, whole)
    return _take(data, split, chosen), data.splits[split].labels[chosen].tolist(), data.classes


def _label(label: int, classes: tuple[str, ...]) -> str:
    return "" if label == NO_LABEL else classes[label]


def _counts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in facts["splits"].items())


def _about(name: str) -> str:
    if name in SOURCES:
        return SOURCES[name].about
    if name == KIND:
        return "any folder of images; marginlens data prepare folder --from PATH gives it a name"
    try:
        known = record(store.root() / name, name)
    except DataError as error:
        return str(error)
    if known.kind != KIND:
        return "a data set of arrays"
    counts = ", ".join(f"{count:,} {split}" for split, count in known.splits.items() if isinstance(count, int))
    classes = f", {len(known.classes)} classes" if known.classes else ", without labels"
    return f"a folder of images: {known.path} ({counts}{classes})"
