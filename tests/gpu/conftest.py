"""Tests that need a CUDA GPU: `make gpu` runs them there, and records which definitions passed.

Elsewhere they are skipped, and tests/test_gpu_record.py compares the record with the source.
"""

import json
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest
import torch

from marginlens.data import prepare
from tests.gpu.sources import PENDING, definitions


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: make gpu"))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """The data set `shapes`, drawn once a session, where runs look for their data."""
    root = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARGINLENS_DATA", str(root))
        prepare.load("shapes", root)
        yield root


_OUTCOMES = {}


def pytest_runtest_logreport(report):
    if report.when == "call" and "tests/gpu" in report.nodeid:
        _OUTCOMES[report.nodeid.partition("tests/gpu/")[2]] = report.outcome


def pytest_sessionfinish():
    path = os.environ.get("MARGINLENS_GPU_RECORD")
    if not path or not _OUTCOMES:
        return
    import triton

    record = {
        "commit": _commit(),
        "definitions": definitions(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "outcomes": dict(sorted(_OUTCOMES.items())),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
    if set(_OUTCOMES.values()) == {"passed"}:
        PENDING.write_text("[]\n")


def _commit():
    """Return the commit that is checked out, with a + where files were changed; the GPU's machine may have no git."""
    ask = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        said = subprocess.run(ask, cwd=PENDING.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        said = ""
    return os.environ.get("MARGINLENS_COMMIT") or said or "a working tree without git"
