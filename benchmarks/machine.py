"""Facts about the machine and the versions, which every benchmark writes beside its numbers."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import marginlens as ml


def facts(device: str = "cpu", **more: Any) -> dict[str, Any]:
    """Return the machine, and the versions that every benchmark uses. `more` comes last."""
    found: dict[str, Any] = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "marginlens": ml.__version__,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "driver": driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **versions("triton"),
        }
    return found | more


def cpu() -> str:
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return names[0] if names else platform.processor()


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def versions(*names: str) -> dict[str, str | None]:
    """Return the version of each package, or None if it is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = _said(name)
    return found


def _said(name: str) -> str | None:
    """Return the version that a package without an installation record reports."""
    try:
        return str(getattr(importlib.import_module(name.replace("-", "_")), "__version__", "unknown"))
    except Exception:  # whatever a package does on import, it is not there for us
        return None


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
