"""The generator against its published answers, a twin in plain integers, and torchvision's distributions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from marginlens.data import draw, pixels
from marginlens.data.draw import Slot
from marginlens.data.views import View, parameters

MANY = 100_000
# About a hundred p-values are looked at below, so that a right generator would fail here for one in a thousand choices
# of seed. (Seeds are fixed: a test passes always or never. At a level of 1e-3 each, chance alone fails one in ten.)
LEAST_P = 1e-5


def words(*values):
    return tuple(torch.tensor(v) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_answers(counter, key, answer):
    """Random123's known-answer vectors for philox4x32, 10 rounds."""
    assert tuple(int(w) for w in draw.philox(words(*counter), key)) == answer


def philox_twin(counter, key):
    """The same in Python's unbounded integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & 0xFFFFFFFF, p >> 32 ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def uniforms_twin(index, seed, epoch, number):
    key = seed % 2**32, seed >> 32
    blocks = [philox_twin((index % 2**32, index >> 32, epoch, number * 256 + b), key) for b in range(draw.BLOCKS)]
    return [(w >> 8) / 2**24 for w in itertools.chain(*blocks)]


SEED, EPOCH, NUMBER = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**24 - 1)
INDICES = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(INDICES, SEED, EPOCH, NUMBER)
def test_uniforms_follow_the_documented_layout(indices, seed, epoch, number):
    got = draw.uniforms(torch.tensor(indices), seed, epoch, number)
    assert got.dtype == torch.float32
    assert got.tolist() == [uniforms_twin(i, seed, epoch, number) for i in indices]
    assert torch.equal(got, draw.uniforms(torch.tensor(indices), seed, torch.tensor(epoch), number))


def boxes_twin(u, height, width, scale, ratio):
    """Torchvision's get_params for one sample, in numpy's float32, one rounding per operation."""
    f = np.float32
    for k in range(draw.ATTEMPTS):
        a, r = f(u[Slot.ATTEMPT + 2 * k]), f(u[Slot.ATTEMPT + 2 * k + 1])
        area = (a * f(scale[1] - scale[0]) + f(scale[0])) * f(height * width)
        y = (r * f(math.log(ratio[1]) - math.log(ratio[0])) + f(math.log(ratio[0]))) * f(0.125)
        e = f(1.0)
        for n in range(8, 0, -1):
            e = e * y * f(1.0 / n) + f(1.0)
        for _ in range(3):
            e = e * e
        w, h = int(np.round(np.sqrt(area * e))), int(np.round(np.sqrt(area / e)))
        if 0 < w <= width and 0 < h <= height:
            top, left = (int(f(u[s]) * f(n)) for s, n in ((Slot.TOP, height - h + 1), (Slot.LEFT, width - w + 1)))
            return [top, left, h, w]
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return [(height - h) // 2, (width - w) // 2, h, w]


SETTINGS = [
    (32, 32, (0.2, 1.0), (3 / 4, 4 / 3)),
    (96, 96, (0.08, 1.0), (3 / 4, 4 / 3)),
    (45, 64, (0.2, 1.0), (3 / 4, 4 / 3)),
    (20, 57, (0.3, 0.6), (3 / 4, 4 / 3)),  # many crops do not fit
    (62, 20, (0.6, 1.0), (3 / 4, 4 / 3)),  # none does, and the middle is half a pixel off
    (20, 61, (0.6, 1.0), (3 / 4, 1.3)),
    (5, 7, (0.01, 1.0), (0.2, 5.0)),  # many are empty
]


@pytest.mark.parametrize(("height", "width", "scale", "ratio"), SETTINGS)
def test_boxes_bit_for_bit(height, width, scale, ratio):
    """What a kernel has to reproduce: no ties are lost to another rounding."""
    u = draw.uniforms(torch.arange(2000), 7, 1, 2)
    got = draw.resized_boxes(u, height, width, scale, ratio).tolist()
    assert got == [boxes_twin(row, height, width, scale, ratio) for row in u.tolist()]


def torchvision_boxes(n, height, width, scale, ratio):
    """RandomResizedCrop.get_params, transcribed, with numpy's generator and doubles."""
    generator = np.random.default_rng(0)
    boxes = []
    for _ in range(n):
        for _ in range(10):
            area = height * width * generator.uniform(*scale)
            aspect = math.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                boxes.append((generator.integers(height - h + 1), generator.integers(width - w + 1), h, w))
                break
        else:
            w, h = width, height
            if width / height < min(ratio):
                h = round(w / min(ratio))
            elif width / height > max(ratio):
                w = round(h * max(ratio))
            boxes.append(((height - h) // 2, (width - w) // 2, h, w))
    return np.array(boxes, dtype=float)


@pytest.mark.parametrize(("height", "width", "scale", "ratio"), SETTINGS)
def test_boxes_are_distributed_as_torchvisions(height, width, scale, ratio):
    """Two-sample Kolmogorov-Smirnov on areas, ratios, sides and places; the boxes are whole pixels in both."""
    theirs = torchvision_boxes(20_000, height, width, scale, ratio)
    u = draw.uniforms(torch.arange(MANY), 3, 0, 0)
    ours = draw.resized_boxes(u, height, width, scale, ratio).double().numpy()
    top, left, h, w = ours.T
    assert (np.minimum(top, left) >= 0).all()
    assert (np.maximum(top + h - height, left + w - width) <= 0).all()
    for f in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        *(lambda b, k=k: b[:, k] for k in range(4)),
        lambda b: b[:, 0] - b[:, 1],
    ):
        assert stats.ks_2samp(f(ours), f(theirs)).pvalue > LEAST_P


def test_large_boxes_have_uniform_area_and_log_uniform_ratio():
    """Where whole pixels hardly matter and every crop fits, the distributions are the documented ones themselves."""
    u = draw.uniforms(torch.arange(MANY), 5, 0, 0)
    *_, h, w = draw.resized_boxes(u, 4000, 4000, (0.1, 0.5), (0.5, 2.0)).double().T.numpy()
    assert stats.kstest(h * w / 4000**2, stats.uniform(0.1, 0.4).cdf).pvalue > LEAST_P
    assert stats.kstest(np.log(w / h), stats.uniform(-math.log(2), 2 * math.log(2)).cdf).pvalue > LEAST_P


def test_padded_boxes():
    u = draw.uniforms(torch.arange(MANY), 5, 0, 1)
    boxes = draw.padded_boxes(u, 32, 40, 32, 4)
    assert (boxes[:, 2:] == 32).all()
    for column, count in ((0, 9), (1, 17)):
        assert stats.chisquare(torch.bincount(boxes[:, column] + 4, minlength=count).numpy()).pvalue > LEAST_P
        assert (boxes[:, column].min(), boxes[:, column].max()) == (-4, count - 5)
    with pytest.raises(ValueError, match=r"images are 20 x 40, .*padding of 4 .*the crop of"):
        draw.padded_boxes(u, 20, 40, 32, 4)


def test_slots_are_uniform_and_independent():
    u = draw.uniforms(torch.arange(MANY), 11, 0, 0).double()
    assert u.shape == (MANY, 36)
    assert 0 <= u.min() < u.max() < 1
    for column in u.T.numpy():
        assert stats.kstest(column, "uniform").pvalue > LEAST_P
    n = 20_000
    neighbours = ((1, 11, 0, 0), (0, 12, 0, 0), (0, 11, 1, 0), (0, 11, 0, 1), (2**32, 11, 0, 0), (0, 11 + 2**32, 0, 0))
    other = [draw.uniforms(torch.arange(n) + i, *key).double() for i, *key in neighbours]
    correlation = torch.corrcoef(torch.cat([u[:n], *other], dim=1).T).fill_diagonal_(0).abs()
    assert correlation.max() < 5.5 / math.sqrt(n)  # 32,000 pairs; 5.5 sigma by chance in one of a thousand such tables


def test_views_are_distributed_as_documented():
    view = View(solarise=0.3)
    p = parameters(torch.arange(MANY), 32, 32, view, 1, 2, 3)
    flags = {"flip": 0.5, "jittered": 0.8, "grey": 0.2, "blur": 0.5, "solarise": 0.3}
    for name, expected in flags.items():
        assert stats.binomtest(int(getattr(p, name).sum()), MANY, expected).pvalue > LEAST_P, name
    for a, b in itertools.combinations(flags, 2):
        both = getattr(p, a) & getattr(p, b)
        assert stats.binomtest(int(both.sum()), MANY, flags[a] * flags[b]).pvalue > LEAST_P, (a, b)
    for column in p.factors.T[:3].double().numpy():
        assert stats.kstest(column, stats.uniform(0.6, 0.8).cdf).pvalue > LEAST_P
    assert stats.kstest(p.factors[:, 3].double().numpy(), stats.uniform(-0.1, 0.2).cdf).pvalue > LEAST_P
    assert stats.kstest(p.sigma.double().numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > LEAST_P
    assert stats.chisquare(torch.bincount(p.order, minlength=24).numpy()).pvalue > LEAST_P
    assert sorted(pixels.ORDERS) == sorted(itertools.permutations(range(4)))


def test_every_parameter_has_a_slot_of_its_own():
    """The format, by number: sigma given a blur, say, must be as uniform as sigma."""
    indices = torch.arange(1000)
    u = draw.uniforms(indices, 1, 2, 3)
    p = parameters(indices, 32, 32, View(solarise=0.3, crop="padded"), 1, 2, 3)
    for flags, slot, probability in (
        (p.flip, 2, 0.5),
        (p.jittered, 3, 0.8),
        (p.grey, 9, 0.2),
        (p.blur, 10, 0.5),
        (p.solarise, 12, 0.3),
    ):
        assert torch.equal(flags, u[:, slot] < probability)
    assert torch.equal(p.boxes[:, :2], (u[:, :2] * 9).floor().long() - 4)
    close = {"rtol": 0, "atol": 1e-6}
    assert torch.allclose(p.factors[:, :3], 0.6 + 0.8 * u[:, 4:7], **close)
    assert torch.allclose(p.factors[:, 3], -0.1 + 0.2 * u[:, 7], **close)
    assert torch.equal(p.order, (u[:, 8] * 24).floor().long())
    assert torch.allclose(p.sigma, 0.1 + 1.9 * u[:, 11], **close)


def test_factors_never_fall_below_zero():
    u = draw.uniforms(torch.arange(10_000), 0, 0, 0)
    factors = draw.jitter_factors(u, (1.5, 1.0, 0.0, 0.5))
    assert 0 <= factors[:, 0].min() < 0.01
    assert 2.49 < factors[:, 0].max() <= 2.5
    assert (factors[:, 2] == 1).all()
    assert factors[:, 3].abs().max() <= 0.5


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(40)), st.integers(1, 40), SEED, EPOCH, NUMBER)
def test_same_for_any_order_and_batch_size(order, batch, seed, epoch, number):
    """Hence for any rank and any resumed run: a batch is all that either of them is to the generator."""
    indices = torch.arange(40) * 1_000_003
    whole = parameters(indices, 32, 45, View(), seed, epoch, number)
    order = torch.tensor(order)
    parts = [parameters(part, 32, 45, View(), seed, epoch, number) for part in indices[order].split(batch)]
    for name, expected in whole._asdict().items():
        got = torch.cat([getattr(p, name) for p in parts])
        assert torch.equal(got, expected[order]), name


def test_torchs_own_generator_plays_no_part():
    state = torch.get_rng_state()
    draw.uniforms(torch.arange(5), 0, 0, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_exp():
    x = torch.linspace(-4.7, 4.7, 100_001)
    exact = x.double().exp()
    assert ((draw.exp(x) - exact) / exact).abs().max() < 3e-6


@given(st.integers(1, 2**24 - 1))
def test_integers_stay_below(n):
    most, least = torch.tensor(1 - 2.0**-24), torch.tensor(0.0)
    assert (int(draw.below(most, n)), int(draw.below(least, n))) == (n - 1, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": -1}, "seed is -1; it must be an integer from 0 to 2^64 - 1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"epoch": 2**32}, "epoch is 4294967296; it must be an integer from 0 to 2^32 - 1"),
        ({"epoch": True}, "epoch is True"),
        ({"epoch": torch.tensor(1.5)}, "epoch must be an integer, not a torch.float32 tensor"),
        ({"number": 2**24}, "number is 16777216"),
        ({"number": 1.0}, "number is 1.0"),
        ({"indices": torch.tensor([3, -2])}, "index is -2"),
        ({"indices": torch.tensor([1.0])}, "indices must be a vector of integers"),
        ({"indices": torch.zeros(2, 2, dtype=torch.long)}, "of shape (2, 2)"),
    ],
)
def test_bad_input(change, words):
    good = {"indices": torch.arange(3), "seed": 0, "epoch": 0, "number": 0}
    with pytest.raises(ValueError) as caught:
        draw.uniforms(**good | change)
    assert words in str(caught.value).splitlines()[-1]
