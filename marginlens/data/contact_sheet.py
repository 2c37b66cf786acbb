"""Draw labelled rows of images into one PNG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from marginlens.data.store import Images
from marginlens.data.views import View, make_view
from marginlens.files import deliver, writing

MARK = "[^P]PNG.{4,60}tEXtSoftware\0marginlens"
"""First bytes of a picture that we drew. Other files are never replaced."""
_GAP = 2
_LABEL = 130
_GROUND, _INK = (255, 255, 255), (20, 20, 20)


def save_grid(rows: Iterable[tuple[str, Images]], path: Path, zoom: int = 2, head: Iterable[str] = ()) -> None:
    """Write rows of images (n, 3, h, w) with their labels. `head` names the columns."""
    rows = list(rows)
    height, width = (zoom * side + _GAP for side in rows[0][1].shape[2:])
    top = 18 if (names := list(head)) else 0
    columns = max(len(images) for _, images in rows)
    sheet = Image.new("RGB", (_LABEL + columns * width, top + len(rows) * height), _GROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for x, name in enumerate(names):
        draw.text((_LABEL + x * width, 2), name, _INK, font)
    for y, (label, images) in enumerate(rows):
        draw.text((4, top + y * height + height // 2 - 8), label[:20], _INK, font)
        for x, image in enumerate(images):
            tile = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
            large = tile.resize((zoom * tile.width, zoom * tile.height), Image.Resampling.NEAREST)
            sheet.paste(large, (_LABEL + x * width, top + y * height))
    drawn, ours = io.BytesIO(), PngInfo()
    ours.add_text("Software", "marginlens")
    sheet.save(drawn, "PNG", pnginfo=ours)
    with writing(path, "--out"):
        deliver(path, drawn.getvalue(), MARK)


def save_views(
    images: Images, labels: Sequence[str], views: Sequence[View], seed: int, path: Path, zoom: int = 2
) -> None:
    """Write a row for each image: the image, four of its strong views, four of its weak ones."""
    number = torch.arange(len(images))
    columns = [images]
    for which, view in enumerate(views):
        mean, std = (torch.tensor(x)[:, None, None] for x in (view.mean, view.std))
        for epoch in range(4):
            made = make_view(torch.from_numpy(images), number, view, seed, epoch, which) * std + mean
            columns.append(made.mul(255).round().clamp(0, 255).to(torch.uint8).numpy())
    rows = zip(labels, np.stack(columns, axis=1), strict=True)
    save_grid(rows, path, zoom, head=["original", *["strong"] * 4, *["weak"] * 4])
