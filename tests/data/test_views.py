"""Every operation against torchvision's formulas, Pillow, kornia or scipy on the same parameters; laws; whole views.

Tolerances, in units of a pixel's full range. Against float oracles with the same formula: 2e-6, float32's rounding
(crops: 2e-5, as the weights come from differences of coordinates). Against kornia, where it weights red by 0.299 and
not by torchvision's 0.2989: 3e-4. Against Pillow, which rounds to 8 bits after every step: 1 to 3 steps of 1/255.
"""

import colorsys

import kornia
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage

from marginlens.data import pixels
from marginlens.data.pixels import BRIGHTNESS, CONTRAST, HUE, SATURATION
from marginlens.data.views import Parameters, View, make_view, parameters, render, strong, weak
from tests.data.operations import MEAN, STD

STEP = 1 / 255
ROUNDING = 2e-6
RESIZING = 2e-5

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31)
sides = st.integers(1, 41)


def photos(n, height, width, seed=0):
    """uint8 images with smooth parts, edges, black, white and grey: what separates one filter from another."""
    g = torch.Generator().manual_seed(seed)
    coarse = F.interpolate(torch.rand(n, 3, 4, 4, generator=g), (height, width), mode="bicubic")
    noise = torch.rand(n, 3, height, width, generator=g) - 0.5
    x = coarse + 0.5 * noise * (torch.rand(n, 1, 1, 1, generator=g) > 0.5)
    x[:, :, : height // 4] = x[:, :1, : height // 4]
    return (x.clamp(0, 1) * 1.4 - 0.2).clamp(0, 1).mul(255).round().byte()


def floats(n, height, width, seed=0):
    return photos(n, height, width, seed).float() / 255


def pillow(image):
    """One (3, h, w) image in [0, 1]."""
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance, f"differ by {(a - b).abs().max():.3g}"


def no_flip(n):
    return torch.zeros(n, dtype=torch.bool)


def torchvision_grey(x):
    return (0.2989 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2])[:, None]


def torchvision_adjust(x, operation, factor):
    """Torchvision's _blend of float images, transcribed."""
    f = factor.view(-1, 1, 1, 1)
    if operation == BRIGHTNESS:
        other = torch.zeros_like(x)
    else:
        other = torchvision_grey(x)
        other = other.mean((1, 2, 3), keepdim=True) if operation == CONTRAST else other
    return (f * x + (1 - f) * other).clamp(0, 1)


def torchvision_hue(x, shift):
    """Torchvision's adjust_hue of float images: _rgb2hsv and _hsv2rgb, transcribed."""
    r, g, b = x.unbind(1)
    maxc, minc = x.max(1).values, x.min(1).values
    eqc = maxc == minc
    cr = maxc - minc
    s = cr / torch.where(eqc, 1, maxc)
    rc, gc, bc = ((maxc - c) / torch.where(eqc, 1, cr) for c in (r, g, b))
    hr = (maxc == r) * (bc - gc)
    hg = ((maxc == g) & (maxc != r)) * (2 + rc - bc)
    hb = ((maxc != g) & (maxc != r)) * (4 + gc - rc)
    h = torch.fmod((hr + hg + hb) / 6 + 1, 1)
    h = (h + shift.view(-1, 1, 1)) % 1
    i = torch.floor(h * 6)
    f = h * 6 - i
    v, i = maxc, i.long() % 6
    p, q, t = ((v * (1 - s * k)).clamp(0, 1) for k in (1, f, 1 - f))
    table = torch.stack([torch.stack(c) for c in ((v, q, p, p, t, v), (t, v, v, q, p, p), (p, p, t, v, v, q))])
    return table.gather(1, i.expand(3, 1, *i.shape))[:, 0].transpose(0, 1)


@st.composite
def boxed(draw):
    height, width = draw(sides), draw(sides)
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    return height, width, (draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w)


@quick
@given(boxed(), sides, seeds)
def test_crop_is_an_antialiased_bilinear_resize(sizes, size, seed):
    height, width, (top, left, h, w) = sizes
    x = floats(2, height, width, seed)
    box = torch.tensor([[top, left, h, w], [0, 0, height, width]])
    ours = pixels.crop(x, box, size, torch.tensor([False, True]))
    first, second = x[:1, :, top : top + h, left : left + w], x[1:]
    close(ours[:1], F.interpolate(first, (size, size), mode="bilinear", antialias=True), RESIZING)
    close(ours[1:], F.interpolate(second, (size, size), mode="bilinear", antialias=True).flip(3), RESIZING)
    resized = tensor(pillow(first[0]).resize((size, size), Image.Resampling.BILINEAR))
    close(ours[0], resized, 1.01 * STEP)  # Pillow rounds after rows and after columns, half a step each


def test_enlarging_is_plain_bilinear():
    x = floats(3, 11, 17)
    box = torch.tensor([[0, 0, 11, 17]] * 3)
    close(
        pixels.crop(x, box, 40, no_flip(3)), F.interpolate(x, (40, 40), mode="bilinear", align_corners=False), RESIZING
    )


def test_the_whole_image_at_its_size_is_itself():
    x = floats(5, 24, 24)
    box = torch.tensor([[0, 0, 24, 24]] * 5)
    assert torch.equal(pixels.crop(x, box, 24, no_flip(5)), x)
    mirrored = pixels.crop(x, box, 24, ~no_flip(5))
    assert torch.equal(mirrored, x.flip(3))
    assert torch.equal(pixels.crop(mirrored, box, 24, ~no_flip(5)), x)


@quick
@given(st.integers(-4, 4), st.integers(-4, 12), st.booleans())
def test_padded_crop(top, left, flip):
    x = floats(1, 32, 40)
    ours = pixels.crop(x, torch.tensor([[top, left, 32, 32]]), 32, torch.tensor([flip]))
    cut = F.pad(x, (4, 4, 4, 4))[:, :, top + 4 : top + 36, left + 4 : left + 36]
    assert torch.equal(ours, cut.flip(3) if flip else cut)


KORNIA = {
    BRIGHTNESS: kornia.enhance.adjust_brightness_accumulative,
    CONTRAST: kornia.enhance.adjust_contrast_with_mean_subtraction,
    SATURATION: kornia.enhance.adjust_saturation_with_gray_subtraction,
}
PILLOW = {BRIGHTNESS: ImageEnhance.Brightness, CONTRAST: ImageEnhance.Contrast, SATURATION: ImageEnhance.Color}


@pytest.mark.parametrize("operation", KORNIA)
@quick
@given(sides, sides, st.lists(st.floats(0, 2.5), min_size=3, max_size=3), seeds)
def test_brightness_contrast_saturation(operation, height, width, factors, seed):
    x, factors = floats(3, height, width, seed), torch.tensor(factors, dtype=torch.float32)
    ours = pixels.adjust(x, torch.full((3,), operation), factors)
    close(ours, torchvision_adjust(x, operation, factors), ROUNDING)
    close(ours, KORNIA[operation](x, factors), 3e-4)
    # Pillow truncates its result (a step), and rounds the grey image or its mean (half a step, times |1 - factor|)
    for image, factor, mine in zip(x, factors, ours, strict=True):
        theirs = tensor(PILLOW[operation](pillow(image)).enhance(float(factor)))
        close(mine, theirs, (1.01 + 0.6 * abs(1 - float(factor))) * STEP)


@quick
@given(sides, sides, st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), seeds)
def test_hue(height, width, shifts, seed):
    x, shifts = floats(3, height, width, seed), torch.tensor(shifts, dtype=torch.float32)
    ours = pixels.hue(x, shifts)
    close(ours, torchvision_hue(x, shifts), ROUNDING)
    close(ours, kornia.enhance.adjust_hue(x, shifts * 2 * torch.pi), 1e-5)  # it goes through radians
    close(torch.stack(ours.aminmax(dim=1)), torch.stack(x.aminmax(dim=1)), ROUNDING)


def test_hue_against_pythons_own():
    """colorsys, in doubles, over a grid that has every tie between channels."""
    level = torch.tensor([0.0, 0.2, 0.5, 0.500001, 1.0])
    x = torch.cartesian_prod(level, level, level).T.reshape(1, 3, 5, 25)
    for shift in (-0.5, -0.25, -0.1, 0.0, 1 / 6, 0.4999, 0.5):
        ours = pixels.hue(x, torch.tensor([shift]))[0].flatten(1).T
        for mine, (r, g, b) in zip(ours.tolist(), x[0].flatten(1).T.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(r, g, b)
            assert mine == pytest.approx(colorsys.hsv_to_rgb((h + shift) % 1, s, v), abs=ROUNDING)


def jitter_twin(x, factors, order):
    for operation in pixels.ORDERS[order]:
        factor = factors[operation : operation + 1]
        x = torchvision_hue(x, factor) if operation == HUE else torchvision_adjust(x, operation, factor)
    return x


def test_jitter_takes_every_order():
    n = len(pixels.ORDERS)
    x = floats(1, 19, 23).expand(n, -1, -1, -1).contiguous()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([[1.4, 0.6, 1.4, 0.1]]).repeat(n, 1) + torch.linspace(-0.1, 0.1, n)[:, None]
    ours = pixels.jitter(x, factors, order)
    twins = torch.cat([jitter_twin(x[i : i + 1], factors[i], int(order[i])) for i in range(n)])
    # a hue computed after other steps sees rounded channels, and its slope is up to 6 * 2.5 per unit of them
    close(ours, twins, 2e-5)
    assert min((a - b).abs().max() for i, a in enumerate(twins) for b in twins[:i]) > 1e-3  # so that order matters


def test_identity_parameters():
    x = floats(6, 21, 18)
    one, zero = torch.ones(6), torch.zeros(6)
    for operation in (BRIGHTNESS, CONTRAST, SATURATION):
        assert torch.equal(pixels.adjust(x, torch.full((6,), operation), one), x)
    assert torch.equal(pixels.adjust(x, torch.full((6,), HUE), 3 * one), x)
    close(pixels.hue(x, zero), x, ROUNDING)
    close(pixels.hue(pixels.hue(x, 0.3 * one), -0.3 * one), x, 1e-5)
    close(pixels.blur(x, torch.full((6,), 0.05), 6), x, ROUNDING)
    assert torch.equal(pixels.normalise(x, (0.0,) * 3, (1.0,) * 3), x)
    assert torch.equal(pixels.solarise(x, 1.1), x)


def test_grey():
    x = floats(4, 13, 17)
    ours = pixels.grey(x)
    close(ours, torchvision_grey(x).expand_as(x), ROUNDING)
    for mine, image in zip(ours, x, strict=True):
        close(mine[:1], tensor(pillow(image).convert("L").convert("RGB"))[:1], 0.6 * STEP)
    close(pixels.grey(ours), 0.9999 * ours, ROUNDING)  # idempotent but for the weights' sum
    close(pixels.adjust(x, torch.full((4,), SATURATION), torch.zeros(4)), ours, ROUNDING)


@quick
@given(
    st.integers(2, 41),
    st.integers(2, 41),
    st.lists(st.floats(0.1, 3), min_size=3, max_size=3),
    st.integers(1, 9),
    seeds,
)
def test_blur(height, width, sigmas, radius, seed):
    x, sigma = floats(3, height, width, seed), torch.tensor(sigmas, dtype=torch.float32)
    radius = min(radius, height - 1, width - 1)
    ours = pixels.blur(x, sigma, radius)
    for mine, image, s in zip(ours, x, sigma.tolist(), strict=True):
        theirs = image.double().numpy()
        for axis in (1, 2):
            theirs = ndimage.gaussian_filter1d(theirs, s, axis=axis, mode="mirror", radius=radius)
        close(mine, torch.from_numpy(theirs).float(), ROUNDING)
    taps = (2 * radius + 1, 2 * radius + 1)
    close(ours, kornia.filters.gaussian_blur2d(x, taps, sigma[:, None].expand(3, 2), "reflect"), ROUNDING)


def test_the_blur_is_wide_enough():
    """Truncation at 3 sigma changes no pixel by a step of 8 bits."""
    x, sigma = floats(4, 32, 32), torch.full((4,), 2.0)
    radius = pixels.blur_radius(2.0, 32)
    assert [radius, pixels.blur_radius(2.0, 5), pixels.blur_radius(2.0, 1)] == [6, 4, 0]
    close(pixels.blur(x, sigma, radius), pixels.blur(x, sigma, 16), STEP)
    with pytest.raises(ValueError, match="radius 6 cannot be reflected in images of 6 x 9"):
        pixels.blur(floats(1, 6, 9), sigma[:1], 6)


def test_solarise_on_8_bits():
    x = torch.arange(256).byte().repeat(3, 1).view(1, 3, 16, 16).float() / 255
    close(pixels.solarise(x)[0], tensor(ImageOps.solarize(pillow(x[0]), 128)), 1e-7)


def view_twin(image, p, view):
    """One sample's view, one step after the other, by torchvision's order and formulas."""
    top, left, h, w = p.boxes[0].tolist()
    x = image.float()[None] / 255
    if view.crop == "resized":
        x = F.interpolate(x[:, :, top : top + h, left : left + w], (view.size,) * 2, mode="bilinear", antialias=True)
    else:
        d = view.padding
        x = F.pad(x, (d, d, d, d))[:, :, top + d : top + d + view.size, left + d : left + d + view.size]
    if p.jittered:
        x = jitter_twin(x, p.factors[0], int(p.order))
    if p.grey:
        x = torchvision_grey(x).expand_as(x)
    if p.blur:
        radius = pixels.blur_radius(view.sigma[1], view.size)
        x = kornia.filters.gaussian_blur2d(x, (2 * radius + 1,) * 2, p.sigma[:, None].expand(1, 2), "reflect")
    if p.solarise:
        x = torch.where(x >= 0.5, 1 - x, x)
    if p.flip:
        x = x.flip(3)
    return (x - torch.tensor(view.mean).view(3, 1, 1)) / torch.tensor(view.std).view(3, 1, 1)


VIEWS = {
    "strong": strong(32, MEAN, STD),
    "weak": weak(32, MEAN, STD),
    "padded": weak(32, MEAN, STD, crop="padded"),
    "everything": View(size=20, jitter=(0.8, 0.8, 0.8, 0.2), jitter_p=1.0, grey=0.3, blur=1.0, sigma=(0.5, 4.0)),
    "tiny": View(size=3, blur=1.0),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (37, 26)])
def test_whole_views_follow_the_steps(name, height, width):
    view, n = VIEWS[name], 64
    images, indices = photos(n, height, width), torch.arange(n) * 7919
    ours = make_view(images, indices, view, 5, 6, 1)
    drawn = parameters(indices, height, width, view, 5, 6, 1)
    twins = [view_twin(images[i], Parameters(*(p[i : i + 1] for p in drawn)), view) for i in range(n)]
    close(ours, torch.cat(twins), 5e-5 / min(view.std))


def test_solarised_views_follow_the_steps():
    """Apart, as a value at the threshold may fall on either side of it: a few pixels may differ."""
    view, n = View(solarise=0.5, blur=0.0, jitter_p=0.0), 32
    images, indices = photos(n, 32, 32), torch.arange(n)
    drawn = parameters(indices, 32, 32, view, 0, 0, 0)
    twins = [view_twin(images[i], Parameters(*(p[i : i + 1] for p in drawn)), view) for i in range(n)]
    ours = make_view(images, indices, view, 0, 0, 0)
    off = (ours - torch.cat(twins)).abs()
    assert (off > 5e-5).float().mean() < 1e-3
    assert (ours - render(images, drawn._replace(solarise=no_flip(n)), view)).abs().max() > 0.5


def test_a_view_does_not_depend_on_its_batch():
    """Parameters are equal to the last bit; matrix products of another batch may round differently."""
    images, indices = photos(50, 32, 32), torch.arange(50) + 1000
    view = VIEWS["strong"]
    whole = make_view(images, indices, view, 1, 2, 0)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    for size in (1, 7, 50):
        parts = [make_view(images[i], indices[i], view, 1, 2, 0) for i in order.split(size)]
        close(torch.cat(parts), whole[order], 2e-5)
    assert torch.equal(whole, make_view(images, indices, view, 1, 2, 0))


def test_parts_of_a_large_batch(monkeypatch):
    images, indices = photos(50, 32, 32), torch.arange(50)
    whole = make_view(images, indices, VIEWS["strong"], 1, 2, 0)
    monkeypatch.setattr("marginlens.data.views._VALUES", 9 * 3 * 32 * 32)
    close(make_view(images, indices, VIEWS["strong"], 1, 2, 0), whole, 2e-5)


def test_devices_other_than_the_cpu_compute_all_and_choose(monkeypatch):
    """The branch that a GPU takes, on this machine: the same views."""
    images, indices = photos(40, 32, 32), torch.arange(40)
    view = View(solarise=0.5)
    expected = make_view(images, indices, view, 1, 2, 0)
    monkeypatch.setattr("marginlens.data.views._lookup_is_free", lambda chosen: False)
    got = make_view(images, indices, view, 1, 2, 0)
    assert ((got - expected).abs() > 2e-5).float().mean() < 1e-3  # pixels at the threshold of solarise


def test_seed_epoch_number_and_index_all_matter():
    images = photos(1, 32, 32).expand(4, -1, -1, -1)
    view, indices = VIEWS["strong"], torch.arange(4)
    views = [make_view(images, indices, view, *key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    every = torch.cat(views)
    assert min((a - b).abs().max() for i, a in enumerate(every) for b in every[:i]) > 0.05


def test_images_are_not_changed_and_dtype_is_as_asked():
    images, indices = photos(9, 32, 32), torch.arange(9)
    before = images.clone()
    full = make_view(images, indices, VIEWS["strong"], 0, 0, 0)
    assert torch.equal(images, before)
    assert full.dtype == torch.float32
    half = make_view(images, indices, VIEWS["strong"], 0, 0, 0, dtype=torch.bfloat16)
    assert torch.equal(half, full.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(make_view(images, indices, VIEWS["strong"], 0, 0, 0), full)
    empty = make_view(images[:0], indices[:0], VIEWS["strong"], 0, 0, 0)
    assert empty.shape == (0, 3, 32, 32)


def test_one_pixel_is_an_image():
    image = torch.full((2, 3, 1, 1), 51, dtype=torch.uint8)
    view = View(jitter_p=0.0, grey=0.0, blur=1.0)
    close(make_view(image, torch.arange(2), view, 0, 0, 0), torch.full((2, 3, 32, 32), 0.2), ROUNDING)


def test_recipes():
    """ReSSL's small-image settings."""
    assert strong(64, MEAN, STD) == View(
        size=64, crop="resized", scale=(0.2, 1.0), ratio=(0.75, 4 / 3), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1),
        jitter_p=0.8, grey=0.2, blur=0.5, sigma=(0.1, 2.0), solarise=0.0, mean=MEAN, std=STD,
    )  # fmt: skip
    plain = weak(32, MEAN, STD)
    assert (plain.scale, plain.flip, plain.jitter_p, plain.grey, plain.blur) == ((0.2, 1.0), 0.5, 0.0, 0.0, 0.0)
    assert weak(32, MEAN, STD, crop="padded").crop == "padded"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 0}, "View: size is 0; it must be a whole number from 1"),
        ({"size": 32.0}, "View: size is 32.0"),
        ({"padding": -1}, "View: padding is -1"),
        ({"crop": "centre"}, "View: crop is 'centre'; it must be 'resized' or 'padded'"),
        ({"scale": (0.5, 0.2)}, "View: scale is (0.5, 0.2); the smaller number must"),
        ({"scale": (0.2, 1.5)}, "View: scale is 1.5; it must be a number from 1e-06 to 1"),
        ({"scale": 0.2}, "View: scale is 0.2; it must be a tuple of 2 numbers"),
        ({"ratio": (0.0, 1.0)}, "View: ratio is 0.0"),
        ({"flip": 1.1}, "View: flip is 1.1; it must be a number from 0 to 1"),
        ({"grey": True}, "View: grey is True"),
        ({"blur": float("nan")}, "View: blur is nan"),
        ({"sigma": (0.0, 2.0)}, "View: sigma is 0.0"),
        ({"jitter": (0.4, 0.4, 0.4)}, "View: jitter is (0.4, 0.4, 0.4); it must be a tuple of 4 numbers"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "View: jitter's hue is 0.6; it must be a number from 0 to 0.5"),
        ({"std": (1.0, 0.0, 1.0)}, "View: std is 0.0"),
        ({"mean": (0.5, 0.5)}, "View: mean is (0.5, 0.5); it must be a tuple of 3 numbers"),
    ],
)
def test_bad_views(change, words):
    with pytest.raises(ValueError) as caught:
        View(**change)
    assert words in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 8, 8), "images are torch.float32 of shape (2, 3, 8, 8); they must be torch.uint8"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "of shape (2, 1, 8, 8)"),
        (torch.zeros(2, 3, 0, 8, dtype=torch.uint8), "of shape (2, 3, 0, 8)"),
        (torch.zeros(3, 3, 8, 8, dtype=torch.uint8), "there are 3 images but 2 indices"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "images are 8 x 8, even with a padding of 4 smaller than"),
    ],
)
def test_bad_images(images, words):
    with pytest.raises(ValueError) as caught:
        make_view(images, torch.arange(2), VIEWS["padded"], 0, 0, 0)
    assert words in str(caught.value).splitlines()[-1]
