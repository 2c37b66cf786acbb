"""Which files hold what only a GPU runs, kernels and what launches or captures them, and a hash of what they say."""

import hashlib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "results" / "gpu_checks.json"
KERNELS = (
    "marginlens/data/fused.py",
    "marginlens/data/fused_draw.py",
    "marginlens/data/fused_pixels.py",
    "marginlens/kernels/launch.py",
    "marginlens/kernels/rows.py",
    "marginlens/kernels/tiles.py",
    "marginlens/kernels/triton.py",
    "marginlens/nets/channels.py",
    "marginlens/nets/fast.py",
    "marginlens/nets/folded.py",
    "marginlens/nets/linear.py",
    "marginlens/nets/norm.py",
    "marginlens/nets/norm_kernels.py",
    "marginlens/nets/norm_tiles.py",
    "marginlens/nets/pool.py",
    "marginlens/nets/stem.py",
    "marginlens/train/capture.py",
    "marginlens/train/engine.py",
    "marginlens/train/flat.py",
    "marginlens/train/linear.py",
)


def fingerprint():
    """SHA-256 of their source; blank lines and comments on lines of their own do not count."""
    found = hashlib.sha256()
    for name in KERNELS:
        for line in (REPOSITORY / name).read_text().splitlines():
            if line.strip() and not line.strip().startswith("#"):
                found.update(line.rstrip().encode() + b"\n")
    return found.hexdigest()
