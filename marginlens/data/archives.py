"""Files by name, wherever they are: in a folder, a tar or a zip archive.

Archives are read in place, member by member: nothing in them is ever written to disk, so nothing can be written outside
its folder. Nothing is unpickled.
"""

from __future__ import annotations

import tarfile
import zipfile
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
        return Zip(path)
    return Tar(path)


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

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            self.archive = tarfile.open(path)  # noqa: SIM115
            self.members = {m.name.split("/", 1)[-1]: m for m in self.archive if m.isfile()}
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

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} is damaged: {error}; fetch it again") from None
        self.members = {n.split("/", 1)[-1]: n for n in self.archive.namelist() if not n.endswith("/")}

    def names(self) -> list[str]:
        return list(self.members)

    def open(self, name: str) -> BinaryIO:
        return self.archive.open(self.members[name])  # type: ignore[return-value]
