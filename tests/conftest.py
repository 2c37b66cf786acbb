"""Use one thread per process, because tests run in as many processes as there are cores.

Tests run on the CPU, even beside a GPU, with Triton's kernels in its interpreter. MARGINLENS_TEST_CUDA=1 uses the GPU.
"""

import os

if not os.environ.get("MARGINLENS_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

import pytest
import torch

from tests.gpu.sources import summary

torch.set_num_threads(1)


def pytest_report_header():
    """Say above the tests what a GPU has verified, since most machines that run them have none."""
    return summary()


@pytest.fixture
def all_cores():
    """For the slow tests, which run alone."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
