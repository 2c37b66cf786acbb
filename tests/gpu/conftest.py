"""Tests that need a CUDA GPU: `make gpu` runs them there, and writes down what passed for which kernels.

Elsewhere they are skipped, and tests/test_gpu_record.py holds the record against the source.
"""

import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch

from marginlens.data import prepare
from tests.gpu.sources import fingerprint


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
        "kernels_sha256": fingerprint(),
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
