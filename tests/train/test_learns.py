"""Slow: training on `shapes` learns something useful."""

import pytest
import torch

import marginlens as ml
from marginlens.data.feed import open_feed
from marginlens.evals import Task
from marginlens.evals.probe import measure
from marginlens.output import Display
from marginlens.runs.model import make_encoder

PROBE = ml.Probe(epochs=15, batch=16, lr=0.5, crop_scale=(0.5, 1.0))
EPOCHS = {"mocov3": 12, "simclr": 8, "byol": 30}


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize("method", EPOCHS)
def test_pre_training_beats_a_random_encoder_by_25_points(method, tmp_path, shapes):
    settings = ml.Pretrain(method=method, data="shapes", epochs=EPOCHS[method])
    feed = open_feed("shapes", torch.device("cpu"))
    display = Display("", quiet=True)
    random = measure(Task(make_encoder(settings), feed, settings.size, torch.float32, display), [PROBE])[PROBE]["top1"]
    run = ml.pretrain(settings, runs=tmp_path, knn_every=0, quiet=True)
    learned = ml.probe(run, PROBE, quiet=True)["top1"]
    print(f"{method}: random {random:.1f} %, after {EPOCHS[method]} epochs {learned:.1f} %")
    assert learned > random + 25
