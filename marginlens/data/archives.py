"""Files by name, wherever they are: in a folder, a tar or a zip archive.

Archives are read in place, member by member: nothing in them is ever written to disk, so nothing can be written outside
its folder. Nothing is unpickled.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

from marginlens.data.atomic import DataError


class Files(Protocol):
    """Files by name, in a folder or in an archive."""

    where: str

    def names(self) -> list[str]: ...

    def open(self, name: str) -> BinaryIO: ...


def open_files(path: Path, inner: str) -> Files:
    """The files at `path`: an archive, or a folder that holds them itself or in a folder named `inner`."""
    if path.is_dir():
        return Folder(path / inner if (path / inner).is_dir() else path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the official archive or its extracted folder")
    if zipfile.is_zipfile(path):
        return Zip(path, inner)
    return Tar(path, inner)


def _below(members: Iterable[str], inner: str) -> dict[str, str]:
    """Members by their name below the archive's own folder, which is `inner`, or a folder that all of them are in.

    What a Mac puts beside it does not count.
    """
    names = {name.removeprefix("./"): name for name in members}
    beside = ("__MACOSX/", ".DS_Store", "._")
    tops = {name.partition("/")[0] if "/" in name else "" for name in names if not name.startswith(beside)}
    own = inner if inner in tops else tops.pop() if len(tops) == 1 else ""
    return {name.removeprefix(f"{own}/"): member for name, member in names.items()}


class Folder:
    """Files below a folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def names(self) -> list[str]:
        return [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()]

    def open(self, name: str) -> BinaryIO:
        try:
            return (self.path / name).open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise KeyError(name) from None


class Tar:
    """Members of a tar archive, by their name below the archive's own folder."""

    def __init__(self, path: Path, inner: str) -> None:
        self.where = str(path)
        try:
            self.archive = tarfile.open(path)  # noqa: SIM115
            held = {m.name: m for m in self.archive if m.isfile()}
            self.members = {name: held[member] for name, member in _below(held, inner).items()}
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
            raise DataError(f"{path} is damaged, or no tar archive: {why}; fetch it again") from None

    def names(self) -> list[str]:
        return list(self.members)

    def open(self, name: str) -> BinaryIO:
        file = self.archive.extractfile(self.members[name])
        if file is None:
            raise KeyError(name)
        return file  # type: ignore[return-value]


class Zip:
    """Members of a zip archive, by their name below the archive's own folder."""

    def __init__(self, path: Path, inner: str) -> None:
        self.where = str(path)
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} is damaged: {error}; fetch it again") from None
        self.members = _below((name for name in self.archive.namelist() if not name.endswith("/")), inner)

    def names(self) -> list[str]:
        return list(self.members)

    def open(self, name: str) -> BinaryIO:
        return self.archive.open(self.members[name])  # type: ignore[return-value]
