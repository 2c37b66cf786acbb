"""Our pixels beside torchvision's own, kept in golden.npz (made by make_golden.py; 16 bits, so 1e-5 of rounding)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from marginlens.data import pixels

GOLDEN = np.load(Path(__file__).with_name("golden.npz"), allow_pickle=False)
SQUARE, WIDE = (torch.from_numpy(GOLDEN[name]).float() / 255 for name in ("square", "wide"))
ROUNDING = 1e-5


def golden(name):
    return torch.from_numpy(GOLDEN[name].astype(np.float32) / 65535)


def repeat(value):
    return torch.full((len(SQUARE),), value)


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < tolerance + ROUNDING


@pytest.mark.parametrize(
    ("name", "source", "boxes", "size"),
    [("crop32", SQUARE, "boxes", 32), ("crop20", SQUARE, "boxes", 20), ("wide_crop32", WIDE, "wide_boxes", 32)],
)
def test_resized_crops(name, source, boxes, size):
    for box, theirs in zip(GOLDEN[boxes], golden(name), strict=True):
        n = len(source)
        ours = pixels.crop(source, torch.from_numpy(box).expand(n, 4), size, torch.zeros(n, dtype=torch.bool))
        close(ours, theirs, 2e-5)


def test_padded_crops():
    for (top, left), theirs in zip(((-4, -4), (0, 3), (4, -2)), golden("padded"), strict=True):
        n = len(SQUARE)
        box = torch.tensor([top, left, 32, 32]).expand(n, 4)
        close(pixels.crop(SQUARE, box, 32, torch.zeros(n, dtype=torch.bool)), theirs, 1e-6)


def test_flip():
    n = len(SQUARE)
    box = torch.tensor([0, 0, 32, 32]).expand(n, 4)
    close(pixels.crop(SQUARE, box, 32, torch.ones(n, dtype=torch.bool)), golden("flip")[0], 1e-6)


@pytest.mark.parametrize(
    ("name", "operation"),
    [("brightness", pixels.BRIGHTNESS), ("contrast", pixels.CONTRAST), ("saturation", pixels.SATURATION)],
)
def test_adjustments(name, operation):
    for factor, theirs in zip(GOLDEN["factors"], golden(name), strict=True):
        close(pixels.adjust(SQUARE, repeat(operation), repeat(float(factor))), theirs, 2e-6)


def test_hue():
    for shift, theirs in zip(GOLDEN["shifts"], golden("hue"), strict=True):
        close(pixels.hue(SQUARE, repeat(float(shift))), theirs, 1e-5)


def test_grey():
    close(pixels.grey(SQUARE), golden("grey")[0], 2e-6)


def test_blur():
    for sigma, theirs in zip(GOLDEN["sigmas"], golden("blur"), strict=True):
        close(pixels.blur(SQUARE, repeat(float(sigma)), 6), theirs, 5e-6)


def test_solarise():
    close(pixels.solarise(SQUARE), golden("solarise")[0], 1e-6)


def test_colour_jitter_forth_and_back():
    factors = torch.tensor([1.3, 0.7, 1.35, 0.08]).expand(len(SQUARE), 4)
    for order, theirs in zip(((0, 1, 2, 3), (3, 2, 1, 0)), golden("chain"), strict=True):
        close(pixels.jitter(SQUARE, factors, repeat(pixels.ORDERS.index(order))), theirs, 2e-5)
