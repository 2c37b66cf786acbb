"""`shapes`: ten kinds of figure, drawn by a formula, so that everything runs offline in a minute on a CPU.

A fair test of a representation: figures are large, on a plain ground, in two random tones (either of them the
brighter), turned, sheared and moved, and their outline wobbles, so that no two of a class are alike and pixels say
little about the class. Two things would spoil it, for telling instances apart would then not need the figure: a
textured ground, and colours, much of which colour jitter leaves as they were. With random colours SimCLR stayed below
69 % in 20 epochs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

CLASSES = ("disc", "triangle", "frame", "star", "cross", "rays", "bars", "dots", "checks", "target")
SPLITS = ("train", "test")
VERSION = 1
"""Part of the content's identity: raised whenever the same seed draws other images."""

_FACTS = 17
_CHUNK = 512
_OVERSAMPLE = 2
_SMALLEST, _LARGEST = 0.65, 1.05
_SHIFT, _WARP, _WOBBLE = 0.6, 0.5, 0.06

Floats = NDArray[np.float64]
Outline = Callable[[Floats, Floats, Floats], NDArray[np.bool_]]
"""Which of the points (u, v), about -1 to 1, lie inside; t in [0, 1] varies the outline."""


def draw(
    count: int, split: str = "train", size: int = 32, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """`count` images (count, 3, size, size) and labels. Image i depends on (seed, split, i) alone."""
    if split not in SPLITS:
        raise ValueError(f"shapes has no split {split!r}; it has {' and '.join(SPLITS)}")
    if count < 1 or size < 8 or seed < 0:
        raise ValueError(f"shapes: count is {count}, size {size}, seed {seed}; at least 1, 8 and 0 are needed")
    key = np.array([seed, SPLITS.index(split) + 2 * VERSION], dtype=np.uint64)
    facts = np.random.Generator(np.random.Philox(key=key)).random((count, _FACTS))
    labels = (facts[:, 0] * len(CLASSES)).astype(np.int64)
    parts = [_paint(facts[i : i + _CHUNK], labels[i : i + _CHUNK], size) for i in range(0, count, _CHUNK)]
    return np.concatenate(parts), labels


def _paint(facts: Floats, labels: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    fine = size * _OVERSAMPLE
    inside = _figures(facts, labels, fine).reshape(len(facts), size, _OVERSAMPLE, size, _OVERSAMPLE)
    ground, figure = (tone[:, None, None] for tone in _tones(facts[:, 14:17]))
    image = ground + (figure - ground) * inside.mean(axis=(2, 4))
    painted = np.rint(255 * image).astype(np.uint8)
    return np.repeat(painted[:, None], 3, axis=1)


def _tones(facts: Floats) -> tuple[Floats, Floats]:
    """Ground and figure: a dark and a bright tone of grey, either being the figure."""
    dark = 0.1 + 0.3 * facts[:, 0]
    bright = dark + 0.25 + 0.3 * facts[:, 1]
    swap = facts[:, 2] < 0.5
    return np.where(swap, bright, dark), np.where(swap, dark, bright)


def _figures(facts: Floats, labels: NDArray[np.int64], fine: int) -> NDArray[np.bool_]:
    """Which of fine x fine points lie inside each figure."""
    axis = (np.arange(fine) + 0.5) / fine * 2 - 1
    x, y = np.meshgrid(axis, axis)
    turn = 2 * np.pi * facts[:, 1, None, None]
    scale = _SMALLEST + (_LARGEST - _SMALLEST) * facts[:, 2, None, None]
    stretch = np.exp(_WARP * (facts[:, 3, None, None] - 0.5))
    shear = _WARP * (facts[:, 4, None, None] - 0.5)
    x = x - _SHIFT * (facts[:, 5, None, None] - 0.5)
    y = y - _SHIFT * (facts[:, 6, None, None] - 0.5)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    u, v = (u + shear * v) * stretch / scale, v / stretch / scale
    angle = np.arctan2(v, u)
    wobble = sum(
        _WOBBLE
        * facts[:, 7 + 2 * k, None, None]
        * np.sin((k + 2) * angle + 2 * np.pi * facts[:, 8 + 2 * k, None, None])
        for k in range(3)
    )
    u, v = u * (1 + wobble), v * (1 + wobble)
    inside = np.empty(u.shape, dtype=bool)
    for label, outline in enumerate(_OUTLINES):
        chosen = labels == label
        inside[chosen] = outline(u[chosen], v[chosen], facts[chosen, 13, None, None])
    return inside


def _triangle(u: Floats, v: Floats) -> Floats:
    """Below 1 inside a regular triangle with its corners at distance 1."""
    sector = 2 * np.pi / 3
    angle = np.mod(np.arctan2(v, u), sector) - sector / 2
    reach: Floats = np.hypot(u, v) * np.cos(angle) / np.cos(sector / 2)
    return reach


def _cell(x: Floats) -> Floats:
    """The place within a cell of a grid, from -1/3 to 1/3."""
    place: Floats = np.mod(x + 1.0, 2 / 3) - 1 / 3
    return place


def _star(u: Floats, v: Floats, t: Floats) -> NDArray[np.bool_]:
    sector = 2 * np.pi / 5
    spoke = np.abs(np.mod(np.arctan2(v, u), sector) / sector * 2 - 1)
    waist = 0.38 + 0.1 * t
    return np.hypot(u, v) < 1.1 * (waist + (1 - waist) * spoke)


_OUTLINES: tuple[Outline, ...] = (
    lambda u, v, t: np.hypot(u, v) < 0.85,
    lambda u, v, t: _triangle(u, v) < 1.1,
    lambda u, v, t: np.abs(np.maximum(np.abs(u), np.abs(v)) - 0.72) < 0.13 + 0.06 * t,
    _star,
    lambda u, v, t: (np.minimum(np.abs(u), np.abs(v)) < 0.22 + 0.1 * t) & (np.maximum(np.abs(u), np.abs(v)) < 1.0),
    lambda u, v, t: (np.sin(6 * np.arctan2(v, u)) > 0.3 * t) & (np.hypot(u, v) < 1.05),
    lambda u, v, t: (np.abs(np.mod(v + 1.0, 0.5) - 0.25) < 0.1 + 0.05 * t) & (np.abs(u) < 1.0) & (np.abs(v) < 1.0),
    lambda u, v, t: (np.hypot(_cell(u), _cell(v)) < 0.17 + 0.06 * t) & (np.maximum(np.abs(u), np.abs(v)) < 1.0),
    lambda u, v, t: (_cell(u) * _cell(v) > 0.0) & (np.maximum(np.abs(u), np.abs(v)) < 0.99),
    lambda u, v, t: (np.abs(np.mod(np.hypot(u, v), 0.4) - 0.1) < 0.08 + 0.03 * t) & (np.hypot(u, v) < 1.0),
)
