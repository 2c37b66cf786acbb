"""Folders of images: damaged, in unsupported formats, or far larger than their files."""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

from marginlens.data.feed import open_feed
from marginlens.data.folder import crop_file, read_folder
from tests.fuzz import mutate
from tests.fuzz.harness import Case, Outcome

SUFFIXES = (".jpg", ".png", ".webp", ".JPEG")
MODES = ("RGB", "L", "RGBA", "P", "CMYK", "1", "LA", "I;16", "I", "F", "YCbCr", "LAB", "HSV")
GHOST = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(stranger.txt) deletefile\nshowpage\n"


def case(rng: Random, folder: Path) -> Case:
    """Return a folder of good and bad images, and a command or call that reads it."""
    labelled, skip = rng.random() < 0.3, rng.random() < 0.6
    where = ["train/a", "train/b", "val/a", "val/b"] if labelled else ["", "in/side"]
    for name in where:
        (folder / "x" / name).mkdir(parents=True, exist_ok=True)
        (folder / "x" / name / "good.png").write_bytes(_encoded()[0][1])
    label, bad = _bad(rng)
    path = folder / "x" / where[0] / f"bad{rng.choice(SUFFIXES)}"
    _fake_ghostscript(folder)
    if rng.random() < 0.3:
        return _replaced(rng, folder, path, label, bad)
    path.write_bytes(bad)
    words = ["data", "prepare", "folder", "--from", str(folder / "x"), "--as", "y", "--workers", "0"]
    taken = rng.random() < 0.03
    if taken:  # a stranger's folder, which is no data set
        (folder / "data" / "y").mkdir(parents=True)

    def check(outcome: Outcome) -> str:
        if (folder / "ghost").exists():
            return "runs PostScript"
        if taken:
            return "" if outcome.code == 2 else "takes a folder that is a stranger's"
        return "refuses a folder from which bad images may be left out" if skip and outcome.code else ""

    return Case(f"prepare {label}", [*words, *(["--skip-bad"] if skip else [])], check=check, limit=20)


def _replaced(rng: Random, folder: Path, path: Path, label: str, bad: bytes) -> Case:
    """Return a read of a prepared folder after one of its images was replaced."""
    from marginlens.data.folder import prepare_folder

    path.write_bytes(_encoded()[rng.randrange(len(SUFFIXES))][1])
    prepare_folder(folder / "x", "y", workers=0)
    path.write_bytes(bad)
    box = rng.choice(((0, 0, 8, 8), (3, 2, 5, 7), (0, 0, 24, 40), (-5, -5, 90, 90)))
    known = rng.choice(((), (24, 40), (24, 40, len(bad)), (0, 0, 0)))

    def crop() -> None:
        assert crop_file(path, box, rng.choice((1, 8, 64)), known).shape[0] == 3

    def middles() -> None:
        feed = open_feed("y", torch.device("cpu"), workers=0)
        split = feed.splits[0]
        for part in feed.plain(split, torch.arange(len(feed.labels(split))), 8, 8, 4):
            assert part.shape[1:] == (3, 8, 8)

    def check(outcome: Outcome) -> str:
        return "runs PostScript" if (folder / "ghost").exists() else ""

    kind = rng.choice(("crop", "crop", "middles", "show"))
    if kind == "show":
        assert read_folder("y")
        return Case(f"show {label}", ["data", "show", "y", "--out", str(folder / "y.png")], check=check, limit=20)
    return Case(f"{kind} {label}", call=crop if kind == "crop" else middles, check=check, limit=20)


def _fake_ghostscript(folder: Path) -> None:
    """Put a program in Ghostscript's place that leaves a file when it is run."""
    program = folder / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {folder / 'ghost'}\nexit 0\n")
    program.chmod(0o755)


@functools.cache
def _encoded() -> list[tuple[str, bytes]]:
    """Return a picture in every format and mode that Pillow writes; common ones come first."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (24, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * 50
    common: list[tuple[str, dict[str, object]]] = [("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("JPEG", {"exif": exif})]
    common += [("JPEG", {"progressive": True}), ("WEBP", {"lossless": True, "exif": exif}), ("PNG", {"exif": exif})]
    common += [("TIFF", {"compression": c}) for c in ("tiff_lzw", "jpeg", "tiff_deflate", "packbits", "group4")]
    more: dict[str, object] = {"save_all": True, "append_images": [picture.rotate(90)] * 2}
    common += [("GIF", more), ("PNG", more), ("WEBP", more), ("TIFF", more), ("MPO", more), ("AVIF", more)]
    made = [(f"{kind} {' '.join(given)}", _saved(picture, kind, **given)) for kind, given in common]
    Image.init()
    for kind in sorted(Image.SAVE):
        made += [(f"{kind} {mode}", _saved(picture, kind, mode)) for mode in MODES]
    return [(name, content) for name, content in made if content]


def _saved(picture: Image.Image, kind: str, mode: str = "RGB", **given: object) -> bytes:
    out = io.BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"):
            (picture.convert("I").convert("I;16") if mode == "I;16" else picture.convert(mode)).save(out, kind, **given)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError):  # not in this mode
        return b""
    return out.getvalue()


def _bad(rng: Random) -> tuple[str, bytes]:
    """Return a hostile image."""
    pick = rng.random()
    if pick < 0.15:
        return rng.choice(_encoded())
    if pick < 0.35:
        return _png(rng)
    if pick < 0.45:
        return _jpeg(rng)
    if pick < 0.5:
        name, content = rng.choice((("ghost", GHOST.encode()), *(e for e in _encoded() if e[0].startswith("EPS"))))
        return name, content
    name, content = rng.choice(_encoded()[: 18 if pick < 0.85 else None])
    label, made = mutate.spoiled(rng, content)
    return f"{name}: {label}", made


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(rng: Random) -> tuple[str, bytes]:
    """Return a huge PNG, or one with odd chunks; all checksums are right."""
    sides = (
        (10_000, 10_000),
        (9_000, 9_000),
        (30_000, 30_000),
        (2**31 - 1, 1),
        (1, 2**31 - 1),
        (0, 5),
        (10**6, 80),
        (40, 24),
    )
    label, (width, height) = "size", rng.choice(sides)
    depth, colour = rng.choice(((1, 0), (1, 0), (8, 2), (16, 0), (8, 3), (16, 6), (7, 9)))
    extra = b""
    if rng.random() < 0.5:
        label, (width, height) = "chunks", (40, 24)
        odd = (
            b"iTXt",
            b"zTXt",
            b"tEXt",
            b"eXIf",
            b"iCCP",
            b"PLTE",
            b"tRNS",
            b"acTL",
            b"fcTL",
            b"fdAT",
            b"gAMA",
            b"XXXX",
            b"IHDR",
            b"IEND",
        )
        bomb = zlib.compress(b"x" * (80 << 20), 1) if rng.random() < 0.05 else zlib.compress(b"x" * 1000)
        tiff = b"II*\0\x08\0\0\0"
        bodies = (b"", b"k\0\0" + bomb, b"k\0\1\0\0\0" + bomb, b"Exif\0\0" + tiff + b"\xff\xff", rng.randbytes(33))
        bodies += (tiff + b"\1\0\x12\1\5\0\1\0\0\0\xff\xff\xff\xff",)
        extra = b"".join(_chunk(rng.choice(odd), rng.choice(bodies)) for _ in range(rng.choice((1, 3))))
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, rng.choice((0, 0, 1))))
    rows = height * (width * depth * (3 if colour == 2 else 4 if colour == 6 else 1) // 8 + 2)
    pixels = _zeros(rows if rows < 30 << 20 else rng.choice((100, 20 << 20)))
    made = b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")
    return f"PNG {label} {width}x{height} of {depth} bits", made


@functools.lru_cache(maxsize=8)
def _zeros(count: int) -> bytes:
    return zlib.compress(bytes(count), 6)


def _jpeg(rng: Random) -> tuple[str, bytes]:
    """Return a JPEG with a wrong size in its header, or with damaged EXIF data."""
    content = next(c for name, c in _encoded() if name == "JPEG exif")
    if rng.random() < 0.5:
        at = content.index(b"\xff\xc0") + 5
        sides = (0, 1, 2000, 9400, 13_000, 30_000, 65_500)
        height, width = rng.choice(sides), rng.choice(sides)
        return f"JPEG of {width}x{height}", content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]
    at = content.index(b"Exif\0\0") + 6
    length = struct.unpack(">H", content[at - 8 : at - 6])[0] - 8
    label, made = mutate.spoiled(rng, content[at : at + length])
    made = made[:60_000]
    return f"EXIF {label}", content[: at - 8] + struct.pack(">H", len(made) + 8) + b"Exif\0\0" + made + content[
        at + length :
    ]
