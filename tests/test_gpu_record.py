"""The record of the GPU tests against the kernels as they are: whoever edits a kernel runs `make gpu` on a GPU."""

import json
import re

from tests.gpu.sources import RECORD, REPOSITORY, fingerprint


def test_the_record_is_of_these_kernels():
    record = json.loads(RECORD.read_text())
    assert record["kernels_sha256"] == fingerprint(), (
        "the kernels' source has moved since they were tested on a GPU: run `make gpu` there and commit results/"
    )


def test_everything_passed():
    outcomes = json.loads(RECORD.read_text())["outcomes"]
    assert outcomes
    assert set(outcomes.values()) == {"passed"}


def test_every_gpu_test_is_in_the_record():
    outcomes = json.loads(RECORD.read_text())["outcomes"]
    ran = {name.partition("[")[0] for name in outcomes}
    for path in sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M):
            assert f"{path.name}::{name}" in ran, f"{path.name}::{name} has never run on a GPU"
