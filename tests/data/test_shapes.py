"""`shapes` is deterministic, its splits are disjoint, and pixels say little about the class."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import marginlens as ml
from marginlens.data import shapes, store
from marginlens.data.prepare import load
from marginlens.data.views import make_view, strong, weak
from marginlens.nets import encoder, projector

EPOCHS = 11

FIRST_LABELS, TOTAL = [8, 4, 4, 6, 7, 7, 2, 6, 0, 9], 22443330


def test_an_image_depends_on_seed_split_and_number_alone():
    few, few_labels = shapes.draw(20)
    many, many_labels = shapes.draw(600)
    assert np.array_equal(few, many[:20])
    assert np.array_equal(few_labels, many_labels[:20])
    for other in (shapes.draw(20, seed=1), shapes.draw(20, "test")):
        assert not np.array_equal(few, other[0])
    large, _ = shapes.draw(4, size=48)
    assert large.shape == (4, 3, 48, 48)


def test_it_stays_what_it_is():
    """Stored results rest on these pixels: a change must raise VERSION, and this sum with it."""
    images, labels = shapes.draw(64)
    assert shapes.VERSION == 1
    assert labels[:10].tolist() == FIRST_LABELS
    assert abs(int(images.astype(np.int64).sum()) - TOTAL) < 2000  # libraries may round a sine's last bit differently


def test_train_and_test_are_disjoint_and_balanced():
    found = load("shapes")
    train, test = found.splits["train"], found.splits["test"]
    assert (len(train), len(test)) == (5000, 1000)
    known = {image.tobytes() for image in train.images}
    assert len(known) == 5000
    assert not any(image.tobytes() in known for image in test.images)
    counts = np.bincount(train.labels, minlength=10)
    assert counts.min() > 400
    assert load("shapes").fingerprint == found.fingerprint


def test_a_store_of_another_version_is_not_used(monkeypatch):
    few = {split: [store.Batch(*shapes.draw(4, split))] for split in ("train", "test")}
    store.write("shapes", few, shapes.CLASSES, version=shapes.VERSION + 1)
    assert len(load("shapes").splits["train"]) == 5000
    store.write("cifar10", few, shapes.CLASSES, version=0)
    with pytest.raises(ValueError, match="prepared by another version; run: marginlens data prepare cifar10"):
        load("cifar10")


@pytest.mark.parametrize("k", [pytest.param(k, marks=pytest.mark.slow) if k != 20 else k for k in (1, 5, 20, 200)])
def test_pixels_alone_do_not_tell(k):
    (x, y), (xt, yt) = (shapes.draw(5000), shapes.draw(1000, "test"))
    a, b = (torch.from_numpy(v).float().flatten(1) for v in (x, xt))
    nearest = torch.cdist(b, a).topk(k, largest=False).indices
    votes = torch.nn.functional.one_hot(torch.from_numpy(y)[nearest], 10).sum(1).argmax(1)
    accuracy = float((votes == torch.from_numpy(yt)).double().mean())
    assert 0.15 < accuracy < 0.60


def features(net, images):
    """What the encoder makes of images in eval mode."""
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(part.float() / 128 - 1) for part in images.split(500)])
    net.train()
    return found


def linear_probe(net, x, y, xt, yt):
    """Test accuracy of a linear layer on standardised features, by L-BFGS."""
    f, ft = features(net, x), features(net, xt)
    f, ft = (f - f.mean(0)) / (f.std(0) + 1e-6), (ft - f.mean(0)) / (f.std(0) + 1e-6)
    layer = torch.nn.Linear(f.shape[1], 10)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(f), y) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float((layer(ft).argmax(1) == yt).double().mean())


def tensors():
    return [torch.from_numpy(a) for a in (*shapes.draw(5000), *shapes.draw(1000, "test"))]


@pytest.mark.slow
def test_a_random_encoder_does_not_tell():
    torch.manual_seed(0)
    assert linear_probe(encoder("tiny"), *tensors()) < 0.60


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
def test_contrastive_learning_tells():
    """Plain SimCLR on `tiny`, in about a minute on 2 cores: the seconds are printed, the accuracy is asserted."""
    torch.manual_seed(0)
    x, y, xt, yt = tensors()
    net = encoder("tiny").to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(net, projector(net.features, hidden=256, out=64))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4)
    # a figure fills most of its image, so a fifth of the area rarely shows what it is: half of it does
    looks = [replace(view(32, (0.5,) * 3, (0.5,) * 3), scale=(0.5, 1.0)) for view in (strong, weak)]
    batch, epochs, start = 128, EPOCHS, time.perf_counter()
    total = epochs * (len(x) // batch)
    for step in range(total):
        epoch, place = divmod(step, len(x) // batch)
        if place == 0:
            order = torch.randperm(len(x))
        chosen = order[batch * place : batch * (place + 1)]
        optimizer.param_groups[0]["lr"] = 0.8 * min(1, step / 50) * (1 + math.cos(math.pi * step / total)) / 2
        z1, z2 = (model(make_view(x[chosen], chosen, v, 0, epoch, n)) for n, v in enumerate(looks))
        loss = ml.nt_xent(z1, z2, tau=0.25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    accuracy = linear_probe(net, x, y, xt, yt)
    print(f"{epochs} epochs in {seconds:.0f} s, linear probe {accuracy:.3f}")
    assert accuracy > 0.90


@pytest.mark.parametrize(
    ("arguments", "line"), [((0,), "count is 0"), ((5, "val"), "no split 'val'"), ((5, "train", 4), "size 4")]
)
def test_refused(arguments, line):
    with pytest.raises(ValueError, match=line):
        shapes.draw(*arguments)
