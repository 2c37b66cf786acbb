"""Archives of data sets: damaged, malicious and far too large tar and zip files."""

from __future__ import annotations

import functools
import gzip
import io
import lzma
import struct
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np

from marginlens.data import sources
from marginlens.data.prepare import open_data
from tests.data.conftest import jpeg
from tests.fuzz import mutate
from tests.fuzz.harness import Case, Outcome, scratch

Members = list[tuple[str, bytes]]
RECORDS = 10
SPECIAL = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
SPECIAL += (tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, b"Z")
TARGETS = ("data_batch_1.bin", "../../stranger.txt", "/etc/passwd", "/dev/zero", "x", ".", "batches.meta.txt")
HEADER = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "mtime": (136, 12), "typeflag": (156, 1)}
HEADER |= {"linkname": (157, 100), "magic": (257, 8), "devmajor": (329, 8), "prefix": (345, 155)}
PAX = ("path", "size", "mtime", "linkpath", "hdrcharset", "GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.major")
PAX += ("GNU.sparse.numblocks", "GNU.sparse.realsize", "GNU.sparse.name", "uid", "atime")
BOMB = 2 << 30


def case(rng: Random, folder: Path) -> Case:
    """Return an archive and the command that prepares it."""
    name = rng.choice(("cifar10", "cifar10", "tinyimagenet"))
    made = rng.random()
    if made < 0.01:
        label, content, sound = "bomb", _bomb(rng, name), False
    elif made < 0.05:
        label, content, sound = "sound", _pack(rng, list(_members(name)), sound=True), True
    else:
        label, content, sound = *_spoiled(rng, name), False
    path = folder / rng.choice(("x.tar.gz", "x.zip", "x.bin", "x"))
    path.write_bytes(content)

    def check(outcome: Outcome) -> str:
        if sound and outcome.code:
            return f"a sound archive is refused: {outcome.err}"
        inside = sorted(p.name for p in (folder / "data").glob("*") if "stranger" not in p.name)
        if inside != [] if outcome.code else inside != [name]:
            return f"leaves {inside} behind"
        if not outcome.code:
            open_data(name)
        return ""

    small = functools.partial(mock.patch.object, sources, "CIFAR_RECORDS", RECORDS)
    words = ["data", "prepare", name, "--from", str(path)]
    return Case(f"{name} {label}", words, check=check, around=small, limit=20)


def _spoiled(rng: Random, name: str) -> tuple[str, bytes]:
    """Spoil the members, the container's headers or the bytes."""
    members, labels = list(_members(name)), []
    if rng.random() < 0.5:
        labels.append(_edit(rng, members))
    packed = _pack(rng, members)
    pick = rng.random()
    if pick < 0.4 or not labels:
        label, packed = mutate.spoiled(rng, packed)
        labels.append(label)
    return " ".join(labels), packed


@functools.cache
def _members(name: str) -> tuple[tuple[str, bytes], ...]:
    """Return the files of a small data set in its official format."""
    rng = np.random.default_rng(0)
    if name == "cifar10":
        batches = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        images = {b: b"".join(bytes([i]) + bytes([i * 20]) * 3072 for i in range(RECORDS)) for b in batches}
        images["batches.meta.txt"] = "\n".join(sources.CIFAR10_CLASSES).encode()
        return tuple((f"cifar-10-batches-bin/{n}", content) for n, content in images.items())
    folder = scratch() / "tiny-imagenet-200"
    for i, wnid in enumerate(("n01", "n02")):
        jpeg(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", rng)
        jpeg(folder / "val" / "images" / f"val_{i}.JPEG", rng)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\nval_1.JPEG\tn02\t0\n")
    (folder / "wnids.txt").write_text("n01\nn02")
    (folder / "words.txt").write_text("n01\tgoldfish, carp\nn02\teel\n")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return tuple((p.relative_to(folder.parent).as_posix(), p.read_bytes()) for p in files)


def _edit(rng: Random, members: Members) -> str:
    """Drop, repeat, rename or change members."""
    kind = rng.choice(("drop", "repeat", "rename", "content", "content", "text", "many"))
    at = rng.randrange(len(members))
    name, content = members[at]
    if kind == "drop":
        del members[at]
    elif kind == "repeat":
        members.append((name, mutate.spoiled(rng, content)[1]))
    elif kind == "rename":
        members[at] = (_name(rng, name), content)
    elif kind == "content":
        members[at] = (name, mutate.spoiled(rng, content)[1])
    elif kind == "text":
        texts = [i for i, (n, _) in enumerate(members) if n.endswith(".txt")]
        at = rng.choice(texts) if texts else at
        lines = [rng.choice(mutate.STRINGS)[:500] for _ in range(rng.choice((0, 1, 3, 10)))]
        made = rng.choice(("\n".join(lines), "\t".join(lines), members[at][1].decode() + "\n".join(lines)))
        members[at] = (members[at][0], made.encode(errors="surrogatepass"))
    else:
        members += [(f"{rng.choice(('a', 'x/y', name))}{i}", b"") for i in range(rng.choice((10, 2000)))]
    return kind


def _name(rng: Random, name: str) -> str:
    made = rng.choice(mutate.STRINGS)[:300]
    return rng.choice((f"/{name}", f"../{name}", f"./{name}", made or "y", f"{made}/{name}", f"{name}/{made}"))


def _pack(rng: Random, members: Members, sound: bool = False) -> bytes:
    if rng.random() < 0.4:
        packed = _zip(rng, members)
        return packed if sound or rng.random() < 0.5 else _bad_zip(rng, packed)
    content = _tar(rng, members, sound)
    if not sound and rng.random() < 0.4:
        content = _bad_header(rng, content)
    return rng.choice((bytes, lambda c: gzip.compress(c, 1), lambda c: lzma.compress(c, preset=0)))(content)


def _tar(rng: Random, members: Members, sound: bool) -> bytes:
    """Write a tar archive; one member may be special or have a hostile extended header."""
    out, odd = io.BytesIO(), -1 if sound or rng.random() < 0.5 else rng.randrange(len(members) or 1)
    form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as archive:
        for i, (name, content) in enumerate(members):
            info = tarfile.TarInfo(name.encode(errors="surrogatepass").decode(errors="surrogateescape"))
            info.size = len(content)
            if i == odd and rng.random() < 0.5:
                info.type, info.linkname = rng.choice(SPECIAL), rng.choice((*TARGETS, name))
            elif i == odd:
                values = ("-1", "1e999", "9" * 30, "nan", "x", "\ud800", "0", "1,2,3", "5", "BINARY")
                info.pax_headers = {rng.choice(PAX): rng.choice(values) for _ in range(rng.choice((1, 3)))}
            try:
                archive.addfile(info, io.BytesIO(content))
            except (ValueError, OverflowError):  # a name that this format cannot hold
                continue
    return out.getvalue()


def _bad_header(rng: Random, content: bytes) -> bytes:
    """Change a field of a tar header and correct its checksum."""
    starts = [i for i in range(0, len(content) - 512, 512) if content[i + 257 : i + 262] == b"ustar"]
    if not starts:
        return content
    start = rng.choice(starts)
    header = bytearray(content[start : start + 512])
    at, width = rng.choice(list(HEADER.values()))
    numbers = (
        b"77777777777",
        b"-1",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"00000000000",
        b"\x80" + b"\0" * 6 + b"\x7f",
    )
    header[at : at + width] = rng.choice((*numbers, rng.randbytes(width))).ljust(width, b"\0")[:width]
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return content[:start] + bytes(header) + content[start + 512 :]


def _zip(rng: Random, members: Members) -> bytes:
    out = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(out, "w", kind) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name.encode(errors="replace").decode() or "x"), content, kind)
    return out.getvalue()


def _bad_zip(rng: Random, content: bytes) -> bytes:
    """Change flags, method, checksum or sizes of an entry, in its own header, in the directory or in both."""
    made = bytearray(content)
    fields = {"flags": (6, 2), "method": (8, 2), "crc": (14, 4), "packed": (18, 4), "size": (22, 4), "name": (26, 2)}
    at, width = fields[rng.choice(list(fields))]
    values = (0, 1, 0x41, 0x800, 8, 9, 12, 14, 93, 99, 2**31, 2**32 - 1, 2**32 - 2, rng.getrandbits(32))
    value = struct.pack("<I", rng.choice(values))[:width]
    chosen = rng.choice(((b"PK\x03\x04",), (b"PK\x01\x02",), (b"PK\x03\x04", b"PK\x01\x02")))
    which = rng.randrange(4)
    for sign in chosen:
        start, found = -1, -1
        for _ in range(which + 1):
            start, found = content.find(sign, start + 1), start
        start = start if start >= 0 else found
        if start >= 0:
            place = start + at + (2 if sign == b"PK\x01\x02" else 0)
            made[place : place + width] = value
    return bytes(made)


def _bomb(rng: Random, name: str) -> bytes:
    """Return a small archive with one file that unpacks to 2 GB."""
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = squeezer.compress(b"\n" * (1 << 20)) + squeezer.flush(zlib.Z_FULL_FLUSH)
    packed = piece * (BOMB >> 20) + b"\x03\x00"
    files = [n for n, _ in _members(name) if n.endswith(("txt", "1.bin"))]
    target = rng.choice(files)
    if rng.random() < 0.5:
        members = [(n, c) for n, c in _members(name) if n != target]
        info = tarfile.TarInfo(target)
        info.size = BOMB
        tail = zlib.compressobj(9, zlib.DEFLATED, -15)
        rest = tail.compress(_tar(rng, members, sound=True)) + tail.flush()
        head = zlib.compressobj(9, zlib.DEFLATED, -15)
        start = head.compress(info.tobuf()) + head.flush(zlib.Z_FULL_FLUSH)
        return b"\x1f\x8b\x08" + bytes(7) + start + packed[:-2] + rest + bytes(8)
    content = bytearray(_zip_stored(name, target, packed))
    for sign, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = content.rindex(sign)
        content[start + at : start + at + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        content[start + at + 14 : start + at + 18] = struct.pack("<I", BOMB)
    return bytes(content)


def _zip_stored(name: str, target: str, packed: bytes) -> bytes:
    """Return a zip archive whose last entry holds bytes that are compressed already."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for n, content in _members(name):
            if n != target:
                archive.writestr(n, content)
        archive.writestr(target, packed)
    return out.getvalue()
