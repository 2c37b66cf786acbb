"""Small runs on a GPU, a few steps of them, and their distance."""

import torch

import marginlens as ml
from marginlens.data.feed import open_feed
from marginlens.runs import work
from marginlens.train.pretrain import start
from marginlens.train.trainer import check_data, state

CUDA = torch.device("cuda")


def settings(**more):
    return ml.Pretrain(**({"data": "shapes", "epochs": 4, "warmup": 0, "lr": 0.01, "limit": 640} | more))


def trainer_of(runs, **more):
    asked = settings(**more)
    feed = open_feed("shapes", CUDA)
    return start(work.make_run(asked, feed, runs), feed, check_data(asked, feed))


def take(which, trainer, count):
    while count:
        for _ in which.steps(trainer):
            count -= 1
            if not count:
                break


def held(trainer):
    """A copy of the state."""
    return {name: tensor.clone() for name, tensor in state(trainer).items()}


def assert_same_step(plain, whole, before, share=1e-2):
    """Every tensor of two states after a step from the same place, to this share of its way."""
    found = state(whole)
    for name, tensor in state(plain).items():
        moved = (tensor.double() - before[name].double()).norm()
        error = (found[name].double() - tensor.double()).norm()
        assert error <= share * moved + 1e-6 * tensor.double().norm() + 1e-5, (name, float(error), float(moved))
