"""The fused kernel against its slow twins: parameters to the bit, pixels to 1e-5 of their range.

A bfloat16 may also be off by half a step, 2^-8 of it; in the interpreter by a whole step, because that rounds down.
"""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from marginlens.data import draw, fused
from marginlens.data.fused import draw_parameters, empty_views, make_views, supported
from marginlens.data.views import View, make_view, parameters, strong, weak
from tests.data.operations import ALONE, MEAN, STD
from tests.data.test_views import photos

PIXEL = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 2.0**-8 if torch.cuda.is_available() else 2.0**-7

STRONG, WEAK, PADDED = strong(32, MEAN, STD), weak(32, MEAN, STD), weak(32, MEAN, STD, crop="padded")
PLAIN = View(size=32, flip=0.0, jitter_p=0.0, grey=0.0, blur=0.0)
SMALL = View(size=16, jitter=(0.8, 0.8, 0.8, 0.5), jitter_p=1.0, grey=0.5, blur=0.5, solarise=0.5, mean=MEAN, std=STD)

SLIVERS = View(size=17, scale=(0.01, 1.0), ratio=(0.01, 100.0), jitter=(0.0, 1.5, 10.0, 0.5), jitter_p=1 / 3)
DRAWN = {
    "strong": (STRONG, 32, 32),
    "strong, not square": (STRONG, 40, 56),
    "weak": (WEAK, 96, 96),
    "padded": (PADDED, 32, 37),
    "hardly a box fits": (SLIVERS, 9, 251),
    "no box fits": (View(scale=(0.9, 1.0), ratio=(5.0, 6.0)), 31, 33),
    "no box fits, the other way": (View(scale=(0.9, 1.0), ratio=(0.1, 0.2)), 31, 33),
    "a pixel": (View(size=1, crop="padded", padding=0, solarise=0.25), 1, 1),
}


def indices_of(n, seed=0):
    """Samples of a small data set, and of one beyond 32 bits."""
    few = torch.arange(n // 2) + 1000 * seed
    return torch.cat([few, torch.randint(1 << 62, (n - n // 2,), generator=torch.Generator().manual_seed(seed))])


def same_parameters(ours, twins):
    return [name for name, a, b in zip(twins._fields, ours, twins, strict=True) if not torch.equal(a.cpu(), b)]


def twin(images, chosen, view, seed, epoch, number):
    return make_view(images[chosen], chosen, view, seed, epoch, number)


def close(ours, theirs, view, dtype=torch.float32):
    assert ours.shape == theirs.shape
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    off = (ours.float().cpu() - theirs).abs()
    room = PIXEL / torch.tensor(view.std).view(3, 1, 1)
    if dtype == torch.bfloat16:
        room = room + theirs.abs() * HALF
    assert (off <= room).all(), f"differ by {off.max():.3g}"


def fused_views(images, chosen, views, *moment, **options):
    """On the GPU where there is one."""
    options = {"dtype": torch.float32, **options}
    return make_views(images.to(DEVICE), chosen.to(DEVICE), views, *moment, **options)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    ("seed", "epoch", "first"), [(0, 0, 0), (2**32 - 1, 2**32 - 1, 3), (2**64 - 1, 2**31, 2**24 - 2), (7 << 40, 1, 250)]
)
def test_parameters_are_equal_to_the_bit(name, seed, epoch, first):
    view, height, width = DRAWN[name]
    indices = indices_of(1000, first % 10)
    ours = draw_parameters(indices.to(DEVICE), height, width, (view, replace(view, flip=0.1)), seed, epoch, first)
    for k, v in enumerate((view, replace(view, flip=0.1))):
        assert same_parameters(ours[k], parameters(indices, height, width, v, seed, epoch, first + k)) == []


def test_parameters_of_many_samples_and_epochs():
    for epoch in range(5):
        indices = torch.arange(4000) * 13 + epoch
        ours = draw_parameters(indices.to(DEVICE), 32, 32, (STRONG,), 42, epoch)[0]
        assert same_parameters(ours, parameters(indices, 32, 32, STRONG, 42, epoch, 0)) == []
        assert ours.jittered.float().mean().item() == pytest.approx(0.8, abs=0.03)


def test_each_attempt_at_a_box_is_taken():
    """A view of which most boxes do not fit, so that early, late and no attempts all occur among its samples."""
    indices = torch.arange(2000)
    u = draw.uniforms(indices, 1, 2, 0)
    pairs = u[:, draw.Slot.ATTEMPT :]
    area = draw.between(pairs[:, 0::2], *SLIVERS.scale) * 9 * 251
    aspect = draw.exp(draw.between(pairs[:, 1::2], math.log(0.01), math.log(100.0)))
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w > 0) & (w <= 251) & (h > 0) & (h <= 9)
    firsts = torch.where(fits.any(1), fits.byte().argmax(1), -1)
    assert set(firsts.tolist()) == set(range(-1, draw.ATTEMPTS))
    ours = draw_parameters(indices.to(DEVICE), 9, 251, (SLIVERS,), 1, 2)[0]
    assert same_parameters(ours, parameters(indices, 9, 251, SLIVERS, 1, 2, 0)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", [STRONG, WEAK, PADDED], ids=["strong", "weak", "padded"])
def test_views(view, dtype):
    images, chosen = photos(30, 32, 32), torch.tensor([3, 29, 0, 17, 3, 25])
    ours = fused_views(images, chosen, (view,), 5, 6, 1, dtype=dtype)[0]
    close(ours, twin(images, chosen, view, 5, 6, 1), view, dtype)


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [(64, 64, 64), (64, 96, 96), (32, 40, 56), (20, 37, 26), (3, 9, 5), (50, 7, 11), (1, 3, 2)],
)
def test_sizes(size, height, width):
    view = replace(SMALL, size=size, flip=1.0, blur=1.0)
    images, chosen = photos(4, height, width), torch.tensor([2, 0])
    close(fused_views(images, chosen, (view,), 0, 3)[0], twin(images, chosen, view, 0, 3, 0), view)


def test_shrinking_by_a_lot():
    view = replace(PLAIN, size=16, scale=(0.9, 1.0))
    images, chosen = photos(2, 33, 256), torch.arange(2)
    close(fused_views(images, chosen, (view,), 0, 0)[0], twin(images, chosen, view, 0, 0, 0), view)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("crop", ["resized", "padded"])
def test_each_operation_alone(name, crop):
    plain = replace(PLAIN, crop=crop, padding=7, size=18)
    view = replace(plain, **ALONE[name])
    images, chosen = photos(6, 20, 19), torch.tensor([5, 1])
    ours = fused_views(images, chosen, (view,), 8, 1)[0]
    close(ours, twin(images, chosen, view, 8, 1, 0), view)
    without = twin(images, chosen, plain, 8, 1, 0)
    assert ((ours.cpu() - without).abs().amax((1, 2, 3)) > 1e-3).all() == (name != "nothing")


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU always multiplies this way")
def test_the_blur_of_float16_parts(monkeypatch):
    """What a GPU multiplies: sums of two float16, which the interpreter multiplies right, unlike bfloat16."""
    kernel = fused.views_kernel

    class AsOnTheGpu:
        def __getitem__(self, grid):
            return lambda *given, **options: kernel[grid](*given, **{**options, "INTERPRET": False})

    monkeypatch.setattr(fused, "views_kernel", AsOnTheGpu())
    view = replace(PLAIN, blur=1.0, sigma=(0.3, 6.0))
    images, chosen = photos(6, 32, 32), torch.arange(6)
    close(fused_views(images, chosen, (view,), 8, 1)[0], twin(images, chosen, view, 8, 1, 0), view)


def test_jitter_takes_every_order():
    view = replace(PLAIN, size=16, jitter=(0.8, 0.8, 0.8, 0.3), jitter_p=1.0)
    drawn = parameters(torch.arange(400), 16, 16, view, 0, 0, 0).order.tolist()
    chosen = torch.tensor([drawn.index(order) for order in range(24)])
    images = photos(400, 16, 16)
    close(fused_views(images, chosen, (view,), 0, 0)[0], twin(images, chosen, view, 0, 0, 0), view)


def test_several_views_in_one_launch():
    views = (
        replace(SMALL, jitter_p=0.5),
        replace(PLAIN, size=16, crop="padded"),
        replace(SMALL, crop="padded", std=(1.0,) * 3),
    )
    images, chosen = photos(9, 17, 21), torch.tensor([8, 2, 2, 5])
    together = fused_views(images, chosen, views, 3, 4, 5)
    for k, view in enumerate(views):
        assert torch.equal(together[k], fused_views(images, chosen, (view,), 3, 4, 5 + k)[0])
        close(together[k], twin(images, chosen, view, 3, 4, 5 + k), view)


def test_a_view_does_not_depend_on_its_batch():
    images, chosen = photos(9, 16, 16), torch.tensor([8, 2, 0, 5])
    whole = fused_views(images, chosen, (SMALL,), 3, 4)[0]
    turned = fused_views(images, chosen.flip(0), (SMALL,), 3, 4)[0]
    assert torch.equal(turned, whole.flip(0))
    assert torch.equal(fused_views(images, chosen[2:3], (SMALL,), 3, 4)[0], whole[2:3])
    assert not torch.equal(fused_views(images, chosen, (SMALL,), 3, 5)[0], whole)
    assert not torch.equal(fused_views(images, chosen, (SMALL,), 3 + (1 << 32), 4)[0], whole)


def test_images_that_are_already_gathered():
    images, chosen = photos(9, 16, 16), torch.tensor([8, 2, 0])
    whole = fused_views(images, chosen, (SMALL,), 3, 4)[0]
    some, indices = images[chosen].to(DEVICE), chosen.to(DEVICE)
    assert torch.equal(make_views(some, None, (SMALL,), 3, 4, dtype=torch.float32, indices=indices)[0], whole)
    rows = torch.arange(3, device=DEVICE)
    assert torch.equal(make_views(some, rows, (SMALL,), 3, 4, dtype=torch.float32, indices=indices)[0], whole)


@pytest.mark.parametrize(("seed", "epoch"), [(3, 4), (2**63 - 1, 2**32 - 1)])
def test_seed_and_epoch_on_the_device(seed, epoch):
    images, chosen = photos(9, 16, 16), torch.tensor([8, 2, 0])
    whole = fused_views(images, chosen, (SMALL,), seed, epoch)[0]
    held = [torch.tensor(x, device=DEVICE) for x in (seed, epoch)]
    for moment in (held, (seed, held[1]), (held[0], epoch)):
        assert torch.equal(fused_views(images, chosen, (SMALL,), *moment)[0], whole)


def test_out_is_filled_and_nothing_else():
    images, chosen = photos(5, 16, 16), torch.tensor([4, 1])
    views = (replace(SMALL, size=13), replace(PLAIN, size=13))
    room = torch.full((2 * 2 * 13 * 13 * 3 + 64,), math.nan, device=DEVICE)
    out = room[32:-32].view(2, 2, 13, 13, 3).permute(0, 1, 4, 2, 3)
    ours = fused_views(images, chosen, views, 1, 2, out=out)
    assert ours[1].data_ptr() == out[1].data_ptr()
    assert not out.isnan().any()
    assert room[:32].isnan().all()
    assert room[-32:].isnan().all()
    assert torch.equal(out, torch.stack(fused_views(images, chosen, views, 1, 2)))
    assert fused_views(images, chosen[:0], views, 1, 2)[1].shape == (0, 3, 13, 13)


IMAGES, CHOSEN = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)
BAD = {
    "images are torch.float32 of shape (4, 3, 32, 32)": {"images": IMAGES.float()},
    "images are torch.uint8 of shape (4, 1, 32, 32)": {"images": IMAGES[:, :1]},
    "they must be contiguous": {"images": IMAGES.transpose(2, 3)},
    "images are on the device meta": {"images": IMAGES.to("meta")},
    "views of 32 pixels from images of 32 x 300 are too large": {
        "images": torch.zeros(1, 3, 32, 300, dtype=torch.uint8)
    },
    "views of 129 pixels from images of 32 x 32 are too large": {"views": (View(size=129),)},
    "the views have sizes [16, 32]": {"views": (STRONG, SMALL)},
    "the views have sizes []": {"views": ()},
    "even with a padding of 4 smaller than the crop of 64": {"views": (replace(PADDED, size=64),)},
    "chosen is torch.int32 of shape (4,)": {"chosen": CHOSEN.int()},
    "chosen is torch.int64 of shape (2, 2)": {"chosen": CHOSEN.view(2, 2)},
    "chosen goes from 1 to 4, but there are 4 images": {"chosen": CHOSEN + 1},
    "chosen and indices are both None": {"chosen": None},
    "indices is torch.int64 of shape (3,); it must be contiguous torch.int64 of shape (4,)": {"indices": CHOSEN[:3]},
    "index is -1": {"indices": CHOSEN - 1},
    "chosen is on meta and the images are on cpu": {"chosen": CHOSEN.to("meta")},
    "seed is -1": {"seed": -1},
    "seed is 18446744073709551616": {"seed": 1 << 64},
    "seed is torch.int64 of shape (1,)": {"seed": torch.zeros(1, dtype=torch.int64)},
    "epoch is 4294967296": {"epoch": 1 << 32},
    "epoch is torch.int32 of shape ()": {"epoch": torch.zeros((), dtype=torch.int32)},
    "number is 16777216": {"first": 1 << 24},
    "dtype is torch.float16": {"dtype": torch.float16},
    "out is torch.bfloat16 of shape (1, 3, 3, 32, 32)": {
        "out": empty_views(3, (STRONG,), torch.bfloat16, IMAGES.device)
    },
    "out has strides": {"out": torch.empty(1, 4, 3, 32, 32, dtype=torch.bfloat16)},
}


@pytest.mark.skipif(DEVICE != "cpu", reason="what is on the device is not looked at")
@pytest.mark.parametrize("words", BAD)
def test_bad_input(words, monkeypatch):
    monkeypatch.setattr(fused, "_INTERPRET", "device meta" not in words)
    given = {"images": IMAGES, "chosen": CHOSEN, "views": (STRONG,), "seed": 0, "epoch": 0} | BAD[words]
    with pytest.raises(ValueError) as caught:
        make_views(**given)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_bad_samples_of_drawn_parameters():
    samples = CHOSEN.to(DEVICE)
    for bad in (samples.int(), samples[::2], samples.view(2, 2)):
        with pytest.raises(ValueError, match=r"indices is torch.int\d\d of shape .* must be contiguous torch.int64"):
            draw_parameters(bad, 32, 32, (STRONG,), 0, 0)
    with pytest.raises(ValueError, match=r"epoch is -1; it must be"):
        draw_parameters(samples, 32, 32, (STRONG,), 0, -1)
    for views, width in (((STRONG, SMALL), 32), ((STRONG,), 257)):
        with pytest.raises(ValueError, match=rf"images are 32 x {width}; .* views must be of one size"):
            draw_parameters(samples, 32, width, views, 0, 0)


def test_tables_are_kept():
    """A captured graph reads the table of its views for as long as it lives."""
    table = fused._table((PLAIN,), 32, 32, torch.device("cpu"))
    for side in range(33, 133):
        fused._table((PLAIN,), 32, side, torch.device("cpu"))
    assert fused._table((PLAIN,), 32, 32, torch.device("cpu")) is table


def test_what_is_supported(monkeypatch):
    assert supported(IMAGES.to(DEVICE), (STRONG, WEAK)) is None
    monkeypatch.setattr(fused, "_INTERPRET", False)
    assert supported(IMAGES, (STRONG,)) == "images are on the device cpu; the kernel needs a CUDA device"
