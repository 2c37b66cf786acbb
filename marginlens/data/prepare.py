"""From a name to a store: draw, download or read the data set once, keep it as arrays.

Where a folder of images may be given too, a text is a name first: `photos` is the data set of that name, if there is
one, and else the folder. A text with a slash in it, or with ~ in front, is always a folder: `./photos`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from marginlens.data import store
from marginlens.data.archives import Files, Folder, open_files
from marginlens.data.disk import record
from marginlens.data.folder import KIND, FolderIndex, index_folder, read_folder, unchanged, verify_index, write_folder
from marginlens.data.sources import SOURCES, Source, source
from marginlens.data.store import Store
from marginlens.data.tree import read_tree
from marginlens.errors import DataError
from marginlens.files import expanded
from marginlens.parameters import hint


def prepare(name: str, path: Path | None = None, folder: Path | None = None) -> Store:
    """Write the store of a data set, from its official archive or folder at `path`, or downloaded."""
    found = source(name)
    if path is not None and found.drawn:
        raise DataError(f"{name} is drawn, and read from nowhere; leave out --from")
    store.check_target(name, None if path is None else expanded(path), folder)
    files = _files(name, found, path, folder or store.root())
    contents = found.read(files)
    return store.write(name, contents.splits, contents.classes, folder, found.version)


def load(name: str, folder: Path | None = None) -> Store:
    """A prepared data set; one that is drawn, such as `shapes`, needs no preparing."""
    if not store.exists(name, folder):
        if name not in SOURCES:
            others = [other for other in store.names(folder) if other != name and other not in SOURCES]
            raise DataError(f"there is no data set {name!r}; {hint(name, [*SOURCES, *others])}")
        return prepare(name, folder=folder) if SOURCES[name].drawn else store.read(name, folder)
    if name in SOURCES and _version(name, folder) != SOURCES[name].version:
        if SOURCES[name].drawn:
            return prepare(name, folder=folder)
        raise DataError(f"{name} was prepared by another version; run: marginlens data prepare {name}")
    return store.read(name, folder)


def _version(name: str, folder: Path | None) -> int:
    """Of the source that a store was made from."""
    return record((folder or store.root()) / name, name).version


def open_data(name: str, folder: Path | None = None) -> Store | FolderIndex:
    """Whatever was prepared under that name: a store of arrays, or the index of a folder of images."""
    if not name or name.startswith(".") or "/" in name:
        raise DataError(f"{name!r} is not the name of a data set; run: marginlens data prepare folder --from PATH")
    if name not in SOURCES and store.exists(name, folder):
        kind = store.steady((folder or store.root()) / name, name, lambda facts: facts.kind)
        if kind == KIND:
            return read_folder(name, folder)
    return load(name, folder)


def verified(name: str) -> Store | FolderIndex:
    """Return a prepared data set whose content is what was prepared; raise if a byte of it has changed."""
    found = open_data(name)
    return store.verify(found) if isinstance(found, Store) else verify_index(found)


class Ready(NamedTuple):
    """A data set that can be opened by its name, and what was done for it."""

    name: str
    notes: tuple[str, ...] = ()


def folder_of(data: str) -> Path | None:
    """Return the folder of images that a text stands for; None where it is the name of a data set."""
    if "/" in data or data.startswith(("~", ".")):
        return expanded(data) if data.startswith("~") else Path(data)
    if not data or data in SOURCES or store.exists(data) or not os.path.isdir(data):
        return None
    return Path(data)


def clash(data: str) -> str:
    """Return a line on a data set whose name a folder here has too; "" for any other."""
    both = data and folder_of(data) is None and os.path.isdir(data)
    return f"{data} is the data set of that name; for the folder here write ./{data}" if both else ""


def ready(data: str, workers: int = 2) -> Ready:
    """Return the name of the data set that a text stands for; a folder of images is prepared first.

    It keeps the name and the settings by which it was prepared before, and is not read again unless its files are
    others later. A new one gets its own name, with six digits of its content where another folder has that name.
    """
    path = folder_of(data)
    if path is None:
        return Ready(data)
    path = Path(os.path.realpath(path))
    known = _prepared_from(path)
    if known is not None and unchanged(known):
        return Ready(known.name, (f"{data} is prepared already, as {known.name}",))
    mean, std = known.given if known else (None, None)
    tree = read_tree(path)
    shared = known and known.classes and tree.classes and "test" not in tree.splits
    share = known.test_share if known and shared else None
    index, _ = index_folder(path, path.name, mean=mean, std=std, test_share=share, workers=workers)
    index = replace(index, name=known.name if known else _free_name(index))
    write_folder(index)
    counts = ", ".join(f"{len(part):,} {split}" for split, part in index.splits.items())
    return Ready(index.name, (*index.notes, f"{data} is now the data set {index.name}: {counts}"))


def _prepared_from(path: Path) -> FolderIndex | None:
    """Return what was prepared from a folder: of several the one of its own name, else the first."""
    for name in sorted(store.names(), key=lambda name: (name != path.name, name)):
        try:
            facts = record(store.root() / name, name)
            if facts.kind == KIND and facts.path == str(path) and name not in SOURCES:
                return read_folder(name)
        except DataError:  # a damaged one is not this folder's
            continue
    return None


def _free_name(index: FolderIndex) -> str:
    """Return a name for a folder that was never prepared: its own, unless something else has it."""
    plain = re.sub(r"[\s+]+", "-", index.path.name).strip("-.~") or "images"
    try:
        own = folder_name(plain)
    except DataError:
        own = "images"
    if not store.exists(own) and not os.path.lexists(store.root() / own):
        return own
    try:
        if read_folder(own).fingerprint == index.fingerprint:  # the same images, which were elsewhere
            return own
    except DataError:
        pass
    return f"{own}-{index.fingerprint[:6]}"


LONGEST = 150
"""Bytes of a data set's name, which is a part of longer names of files."""


def folder_name(name: str) -> str:
    """Return the name of a folder's data set; raise for one that could be mistaken for something else."""
    odd = name in SOURCES or name.startswith((".", "-", "~")) or "/" in name or "\0" in name
    if odd or name in ("", KIND, store.DOWNLOADS) or name != name.encode(errors="ignore").decode():
        raise DataError(f"a folder cannot be stored as {name[:80]!r}; give it another name with --as NAME")
    if len(os.fsencode(name)) > LONGEST:
        raise DataError(f"a folder cannot be stored as {name[:80]!r}...: it is too long; give a name with --as NAME")
    return name


def _files(name: str, found: Source, path: Path | None, root: Path) -> Files:
    if found.drawn:
        return Folder(root)
    if path is None and not found.url:
        raise DataError(f"{name} is not to be downloaded; run: marginlens data prepare {name} --from PATH")
    at = download(name, found, root / store.DOWNLOADS) if path is None else expanded(path)
    return open_files(at, found.inner)


def download(name: str, found: Source, folder: Path) -> Path:
    """The official archive, fetched once, its checksum verified."""
    import pooch
    import requests

    file = found.url.rsplit("/", 1)[-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / file).exists() and not pooch.hashes.hash_matches(str(folder / file), found.checksum):
            raise DataError(
                f"{folder / file} is not the official archive: its checksum is not {found.checksum}; move it away"
            )
        fetched = pooch.retrieve(found.url, found.checksum, fname=file, path=folder, progressbar=_progress())
    except (requests.RequestException, OSError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(
            f"{name} could not be downloaded from {found.url} ({reason}); "
            f"fetch {file} yourself and run: marginlens data prepare {name} --from {file}"
        ) from None
    except DataError:
        raise
    except ValueError as error:  # pooch's word for a checksum that does not match; the file is already gone
        raise DataError(f"{found.url} has another content than it should ({error})".replace("\n", " ")) from None
    return Path(fetched)


def _progress() -> bool:
    """pooch draws its bar with tqdm, which only comes with the lab extra."""
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
