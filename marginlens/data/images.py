"""One image file as pixels: RGB, 8 bits, upright; the first frame of an animation."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from marginlens.data.atomic import DataError
from marginlens.data.store import Images

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def decode(file: BinaryIO | Path, name: str) -> Images:
    """Pixels (3, height, width) of an image file, upright; a DataError that names it where it cannot be decoded."""
    try:
        with Image.open(file) as image:
            image.load()
            return pixels(as_rgb(ImageOps.exif_transpose(image)))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be decoded ({error})") from None


def shrunk(image: Image.Image, room: float) -> int:
    """Asks a JPEG's decoder for 1/2, 1/4 or 1/8 of the size, as far as `room` allows; returns by how much it shrinks.

    On either axis by just that, a pixel for each 2, 4 or 8: the last one may reach beyond the image.
    """
    factor = 1
    while factor < 8 and room >= 2 * factor:
        factor *= 2
    if factor == 1 or image.format != "JPEG":
        return 1
    image.draft(None, (image.width // factor, image.height // factor))
    return factor


def as_rgb(image: Image.Image) -> Image.Image:
    """Grey, CMYK, palette and alpha by Pillow's own rules (alpha is dropped); 16 bits keep their upper 8."""
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64)
        image = Image.fromarray(np.clip(deep >> 8, 0, 255).astype(np.uint8))
    return image.convert("RGB")


def pixels(image: Image.Image) -> Images:
    """(3, height, width), contiguous."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
