"""Files by name, in a folder, a tar or a zip archive.

Archives are read in place, member by member. Nothing is written to disk, so nothing can be written outside a folder.
Nothing is unpickled. Members, their sizes and their headers are bounded, so an archive cannot make us read forever.
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from marginlens.errors import DataError
from marginlens.files import MIB, below, opened, reason, spoken

MOST_MEMBERS = 2_000_000
MOST_BYTES = 16 * 1024 * MIB
"""Largest archive, unpacked, all members together. The largest data set has 3 GiB."""
TEXT_BYTES = 16 * MIB
"""Largest list of names or labels."""
IMAGE_BYTES = 64 * MIB
"""Largest image in an archive."""
_HEADER_BYTES = MIB
"""Largest header before a member of a tar archive, such as a long name."""


class Files(Protocol):
    """Files by name, in a folder or in an archive."""

    where: str

    def names(self) -> list[str]: ...

    def open(self, name: str) -> BinaryIO: ...


def open_files(path: Path, inner: str) -> Files:
    """Open the files at `path`: an archive, or a folder that holds them, directly or in a folder named `inner`."""
    if os.path.isdir(path):
        return Folder(path / inner if os.path.isdir(path / inner) else path)
    try:
        with opened(path) as file:
            return (Zip if zipfile.is_zipfile(file) else Tar)(path, inner)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the official archive or its extracted folder") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({reason(error)}); give the official archive or its folder") from None


def content(files: Files, name: str, most: int) -> bytes:
    """Return the bytes of a file, at most `most`. Raise KeyError if there is no such file."""
    with files.open(name) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise DataError(f"{files.where}: {name} has more than {spoken(most)}, the most that is read")
    return found


def _below(members: Iterable[str], inner: str) -> dict[str, str]:
    """Return members by their name below the archive's own folder: `inner`, or a folder that holds all of them.

    Files that a Mac adds do not count.
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
        try:
            return [Path(name).as_posix() for name in below(self.path)]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read ({reason(error)})") from None

    def open(self, name: str) -> BinaryIO:
        try:
            return opened(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(name) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / name} cannot be read ({reason(error)}); fetch it again") from None


class Tar:
    """Members of a tar archive, by their name below the archive's own folder."""

    def __init__(self, path: Path, inner: str) -> None:
        self.where = str(path)
        with _damage(f"{path} is damaged, or not a tar archive"):
            self.archive = tarfile.open(path, tarinfo=_Member)  # noqa: SIM115
            held: dict[str, tarfile.TarInfo] = {}
            for member in _bounded(path, self.archive, lambda m: m.size):
                if member.isfile():
                    held[member.name] = member
            self.members = {name: held[member] for name, member in _below(held, inner).items()}

    def names(self) -> list[str]:
        return list(self.members)

    def open(self, name: str) -> BinaryIO:
        file = self.archive.extractfile(self.members[name])
        if file is None:
            raise KeyError(name)
        return cast(BinaryIO, _Reader(file, f"{self.where}: {name} is damaged"))


class _Member(tarfile.TarInfo):
    """A tar header with a bounded length; tarfile would read a header of any length."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        longer = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX)
        if self.type in longer and self.size > _HEADER_BYTES:
            raise RuntimeError(f"a header of {self.size:,} bytes; at most {_HEADER_BYTES:,} are read")
        parsed: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return parsed


_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class Zip:
    """Members of a zip archive, by their name below the archive's own folder."""

    def __init__(self, path: Path, inner: str) -> None:
        self.where = str(path)
        with _damage(f"{path} is damaged"):
            self.archive = zipfile.ZipFile(path)
            held = _bounded(path, self.archive.infolist(), lambda m: m.file_size)
            self.members = _below((member.filename for member in held if not member.is_dir()), inner)

    def names(self) -> list[str]:
        return list(self.members)

    def open(self, name: str) -> BinaryIO:
        member = self.members[name]
        with _damage(f"{self.where}: {name} is damaged"):
            return cast(BinaryIO, _Reader(self.archive.open(member), f"{self.where}: {name} is damaged"))


class _Reader:
    """A member being read. Damage anywhere in it raises one line."""

    def __init__(self, file: Any, what: str) -> None:
        self._file, self._what = file, what

    def read(self, size: int = -1) -> bytes:
        with _damage(self._what):
            found: bytes = self._file.read(size)
            return found

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _bounded(path: Path, members: Iterable[Any], size: Callable[[Any], int]) -> Iterator[Any]:
    """Yield an archive's members. Raise if there are too many, or if they are too large."""
    total = 0
    for count, member in enumerate(members, 1):
        total += max(0, size(member))
        if count > MOST_MEMBERS or total > MOST_BYTES:
            bound = f"{MOST_MEMBERS:,} members and {spoken(MOST_BYTES)} unpacked"
            raise DataError(f"{path} holds too much: at most {bound} are read; give the official archive")
        yield member


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Turn any error of an archive's reader into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # because each compression has its own errors, and headers are parsed carelessly
        told = isinstance(error, _TOLD) and str(error).strip()
        first = str(error).strip().splitlines()[0].strip(" :")[:200] if told else "its contents cannot be read"
        raise DataError(f"{what}: {first}; fetch it again") from None


_TOLD = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, RuntimeError)
"""Errors whose text explains what is wrong with an archive."""
