"""`shapes`: deterministic, disjoint, and no easy prey for pixels."""

import numpy as np
import pytest
import torch

from marginlens.data import shapes
from marginlens.data.prepare import load
from marginlens.nets import encoder

FIRST_LABELS, TOTAL = [8, 4, 4, 6, 7, 7, 2, 6, 0, 9], 22423575


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


@pytest.mark.parametrize("k", [1, 5, 20, 200])
def test_pixels_alone_do_not_tell(k):
    (x, y), (xt, yt) = (shapes.draw(5000), shapes.draw(1000, "test"))
    a, b = (torch.from_numpy(v).float().flatten(1) for v in (x, xt))
    nearest = torch.cdist(b, a).topk(k, largest=False).indices
    votes = torch.nn.functional.one_hot(torch.from_numpy(y)[nearest], 10).sum(1).argmax(1)
    accuracy = float((votes == torch.from_numpy(yt)).double().mean())
    assert 0.15 < accuracy < 0.60


def test_a_random_encoder_does_not_tell():
    torch.manual_seed(0)
    net = encoder("tiny").eval()
    (x, y), (xt, yt) = (shapes.draw(2000), shapes.draw(1000, "test"))
    with torch.no_grad():
        f, ft = (net(torch.from_numpy(v).float() / 128 - 1) for v in (x, xt))
    f, ft = (f - f.mean(0)) / f.std(0), (ft - f.mean(0)) / f.std(0)
    layer = torch.nn.Linear(f.shape[1], 10)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100)
    labels = torch.from_numpy(y)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(f), labels) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float((layer(ft).argmax(1) == torch.from_numpy(yt)).double().mean()) < 0.60


@pytest.mark.parametrize(
    ("arguments", "line"), [((0,), "count is 0"), ((5, "val"), "no split 'val'"), ((5, "train", 4), "size 4")]
)
def test_refused(arguments, line):
    with pytest.raises(ValueError, match=line):
        shapes.draw(*arguments)
