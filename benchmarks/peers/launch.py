"""Runs an example of lightly's as its authors wrote it, on CIFAR-10 files that were not downloaded.

    python -u benchmarks/peers/launch.py EXAMPLE.py [--workers 16] [--stem small]

The script is run unchanged, in the current folder, which holds datasets/cifar10. What is changed is around it: nothing
is downloaded or checked against checksums; if asked, its DataLoader gets other workers, and its ResNet-18 the stem for
small images (3 x 3, stride 1, no pooling) in place of ImageNet's.
"""

from __future__ import annotations

import argparse
import runpy

import torch
import torchvision


def no_downloads():
    from torchvision.datasets import cifar

    cifar.CIFAR10.download = lambda self: None
    cifar.CIFAR10._check_integrity = lambda self: True
    cifar.check_integrity = lambda *_: True


def with_workers(count):
    loader = torch.utils.data.DataLoader

    class Loader(loader):
        def __init__(self, *given, **named):
            super().__init__(*given, **(named | {"num_workers": count}))

    torch.utils.data.DataLoader = Loader


def with_small_stem():
    make = torchvision.models.resnet18

    def resnet18(*given, **named):
        model = make(*given, **named)
        model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        model.maxpool = torch.nn.Identity()
        return model

    torchvision.models.resnet18 = resnet18


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script")
    parser.add_argument("--workers", type=int, default=0, help="0: as the script has it")
    parser.add_argument("--stem", choices=("imagenet", "small"), default="imagenet")
    arguments = parser.parse_args()
    no_downloads()
    if arguments.workers:
        with_workers(arguments.workers)
    if arguments.stem == "small":
        with_small_stem()
    runpy.run_path(arguments.script, run_name="__main__")


if __name__ == "__main__":
    main()
