"""Train a linear layer on a run's frozen backbone for other data than it learned from.

The other data are normalised by their own mean and std, and resized to the run's image size. For example:

    marginlens transfer RUN --to cifar10
"""

from __future__ import annotations

from dataclasses import replace

from marginlens.evals import probe

EVALUATION = replace(probe.EVALUATION, elsewhere=True)
