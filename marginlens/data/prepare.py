"""From a name to a store: draw, download or read the data set once, keep it as arrays."""

from __future__ import annotations

from pathlib import Path

from marginlens.data import store
from marginlens.data.archives import Files, Folder, open_files
from marginlens.data.disk import record
from marginlens.data.folder import KIND, FolderIndex, read_folder, verify_index
from marginlens.data.sources import SOURCES, Source, source
from marginlens.data.store import Store
from marginlens.errors import DataError
from marginlens.files import expanded
from marginlens.parameters import hint


def prepare(name: str, path: Path | None = None, folder: Path | None = None) -> Store:
    """Writes the store of a data set, from its official archive or folder at `path`, or downloaded."""
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
