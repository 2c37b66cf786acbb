"""One thread a process: tests run in as many processes as there are cores, and threads would only get in their way."""

import torch

torch.set_num_threads(1)
