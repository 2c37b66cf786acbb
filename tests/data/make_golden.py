"""Make golden.npz: torchvision's own output for a few small images, in 16 bits. Run it where torchvision can be
imported.

    python tests/data/make_golden.py tests/data/golden.npz
"""

import sys

import numpy as np
import torch
import torchvision
import torchvision.transforms.functional as F
from torchvision.transforms import InterpolationMode

OFFSETS = ((-4, -4), (0, 3), (4, -2))
"""Top and left of padded crops, relative to the unpadded image."""


def images(n, height, width, seed):
    """Smooth blobs with hard edges and flat patches, so that every operation has something to get wrong."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    out = np.empty((n, 3, height, width), dtype=np.uint8)
    for i in range(n):
        for c in range(3):
            a, b, p, q = rng.uniform(0.05, 0.6, 2).tolist() + rng.uniform(0, 6, 2).tolist()
            out[i, c] = 127.5 + 127.5 * np.sin(a * x + p) * np.cos(b * y + q)
        out[i, :, : height // 3, : width // 3] = rng.integers(0, 256, 3)[:, None, None]
        out[i, :, -2:, -2:] = rng.integers(0, 256, (3, 2, 2))
    return out


def main(path):
    square, wide = images(2, 32, 32, 0), images(1, 28, 40, 1)
    x, w = (torch.from_numpy(a).float() / 255 for a in (square, wide))
    boxes = np.array([[0, 0, 32, 32], [3, 5, 17, 23], [10, 2, 9, 11], [1, 1, 30, 20]])
    wide_boxes = np.array([[0, 0, 28, 40], [2, 3, 25, 33], [11, 7, 10, 8]])
    bilinear = InterpolationMode.BILINEAR

    def crops(x, boxes, size):
        return [F.resized_crop(x, *box.tolist(), [size, size], bilinear, antialias=True) for box in boxes]

    factors = np.array([0.6, 0.87, 1.0, 1.4])
    shifts = np.array([-0.1, -0.03, 0.0, 0.1, 0.5])
    sigmas = np.array([0.1, 0.5, 1.3, 2.0])
    chain = F.adjust_hue(F.adjust_saturation(F.adjust_contrast(F.adjust_brightness(x, 1.3), 0.7), 1.35), 0.08)
    back = F.adjust_brightness(F.adjust_contrast(F.adjust_saturation(F.adjust_hue(x, 0.08), 1.35), 0.7), 1.3)
    stacks = {
        "crop32": crops(x, boxes, 32),
        "crop20": crops(x, boxes, 20),
        "wide_crop32": crops(w, wide_boxes, 32),
        "padded": [F.crop(F.pad(x, [4]), 4 + top, 4 + left, 32, 32) for top, left in OFFSETS],
        "flip": [F.hflip(x)],
        "brightness": [F.adjust_brightness(x, f) for f in factors],
        "contrast": [F.adjust_contrast(x, f) for f in factors],
        "saturation": [F.adjust_saturation(x, f) for f in factors],
        "hue": [F.adjust_hue(x, s) for s in shifts],
        "grey": [F.rgb_to_grayscale(x, 3)],
        "blur": [F.gaussian_blur(x, 13, float(s)) for s in sigmas],
        "solarise": [F.solarize(x, 0.5)],
        "chain": [chain, back],
    }
    arrays = {
        name: np.rint(65535 * torch.stack(list(stack)).numpy()).astype(np.uint16) for name, stack in stacks.items()
    }
    facts = {"square": square, "wide": wide, "boxes": boxes, "wide_boxes": wide_boxes}
    facts |= {"factors": factors, "shifts": shifts, "sigmas": sigmas}
    np.savez_compressed(path, made_with=f"torchvision {torchvision.__version__}", **facts, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
