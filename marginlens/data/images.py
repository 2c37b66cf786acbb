"""Decode one image file: RGB, 8 bits, upright; the first frame of an animation."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from marginlens.data.store import Images
from marginlens.errors import DataError
from marginlens.files import MIB, read, reason

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
FORMATS = ("JPEG", "PNG", "WEBP")
"""The only formats that are decoded, whatever a file is called. Pillow hands PostScript to another program."""
MOST_PIXELS = 64_000_000
"""Largest image: more than cameras make, and under 1 GB of memory during decoding."""
MOST_BYTES = 256 * MIB
"""Largest image file."""


def decode(file: Path | bytes, name: str) -> Images:
    """Return the pixels (3, height, width) of an image file, upright. A DataError names the file."""
    try:
        content = read(file, MOST_BYTES) if isinstance(file, Path) else file
        with unwarned(), open_image(content) as image:
            image.load()
            return pixels(as_rgb(ImageOps.exif_transpose(image)))
    except Exception as error:  # because Pillow's parsers fail in many ways on hostile bytes
        raise undecodable(name, error) from None


def open_image(content: bytes) -> Image.Image:
    """Open an image without decoding it. Raise if its format is unknown, or if it is too large."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is not a JPEG, PNG or WebP image") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels, the most that is read") from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels; at most {MOST_PIXELS:,} are read")
    return image


@contextmanager
def unwarned() -> Iterator[None]:
    """Silence Pillow's warnings: on metadata, which we do not read, and on sizes, where our own limit is lower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def undecodable(name: str | Path, error: Exception) -> DataError:
    """Return the error for an image that cannot be decoded."""
    return DataError(f"{name} cannot be decoded ({reason(error)})")


def shrunk(image: Image.Image, room: float) -> int:
    """Ask a JPEG's decoder for 1/2, 1/4 or 1/8 of the size, as far as `room` allows. Return the factor.

    It applies to both axes: a pixel for each 2, 4 or 8. The last pixel may reach beyond the image.
    """
    factor = 1
    while factor < 8 and room >= 2 * factor:
        factor *= 2
    if factor == 1 or image.format != "JPEG":
        return 1
    image.draft(None, (image.width // factor, image.height // factor))
    return factor


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB by Pillow's rules. Alpha is dropped, and 16-bit values keep their upper 8 bits."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def pixels(image: Image.Image) -> Images:
    """Return (3, height, width), contiguous."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
