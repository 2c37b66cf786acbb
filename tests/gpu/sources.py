"""Which files hold GPU kernels, and a hash of what is written in them."""

import hashlib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "results" / "gpu_checks.json"
KERNELS = (
    "marginlens/data/fused.py",
    "marginlens/data/fused_draw.py",
    "marginlens/data/fused_pixels.py",
    "marginlens/kernels/rows.py",
    "marginlens/kernels/tiles.py",
    "marginlens/kernels/triton.py",
    "marginlens/nets/fused.py",
    "marginlens/nets/stem.py",
    "marginlens/train/flat.py",
)


def fingerprint():
    """SHA-256 of the kernels' source; blank lines and comments on lines of their own do not count."""
    found = hashlib.sha256()
    for name in KERNELS:
        for line in (REPOSITORY / name).read_text().splitlines():
            if line.strip() and not line.strip().startswith("#"):
                found.update(line.rstrip().encode() + b"\n")
    return found.hexdigest()
