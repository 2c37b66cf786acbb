"""One thread a process: tests run in as many processes as there are cores, and threads would only get in their way."""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def all_cores():
    """For the slow tests, which run alone."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
