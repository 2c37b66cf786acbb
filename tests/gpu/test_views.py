"""The fused views on a GPU against their slow twins on the CPU: parameters to the bit, pixels to 1e-5 of their range.

Also faults that only a GPU shows: writes beyond `out`, reads beyond the images, races, and stale graph replays.
"""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from marginlens.data.fused import draw_parameters, empty_views, make_views
from marginlens.data.views import View, make_view, parameters, strong, weak
from marginlens.kernels.launch import capture
from tests.data.operations import ALONE, MEAN, STD

CUDA = torch.device("cuda")
PIXEL = 1e-5
SHAPES = [(size, *shape) for size in (20, 32, 64) for shape in ((32, 32), (64, 64), (96, 96), (40, 56))]
AT_THE_EDGE = [(20, 40, 56), (32, 32, 32), (64, 96, 96)]
JOBS = [
    *((shape, torch.float32, False, 4096) for shape in SHAPES),
    ((20, 40, 56), torch.float32, False, 4099),
    ((32, 32, 32), torch.bfloat16, False, 4096),
    ((32, 32, 32), torch.bfloat16, True, 4096),
]
PLAIN = View(size=32, flip=0.0, jitter_p=0.0, grey=0.0, blur=0.0)
SLIVERS = View(size=17, scale=(0.01, 1.0), ratio=(0.01, 100.0), jitter=(0.0, 1.5, 10.0, 0.5), solarise=0.3)
DRAWN = {
    "strong": (strong(32, MEAN, STD), 32, 32),
    "not square": (strong(32, MEAN, STD), 40, 56),
    "weak": (weak(64, MEAN, STD), 96, 96),
    "padded": (weak(32, MEAN, STD, crop="padded"), 32, 37),
    "hardly a box fits": (SLIVERS, 9, 251),
    "no box fits": (View(scale=(0.9, 1.0), ratio=(5.0, 6.0)), 31, 33),
}


def photos(n, height, width, seed=0):
    """uint8 images, smooth or noisy, with grey, black and white parts."""
    g = torch.Generator().manual_seed(seed)
    x = F.interpolate(torch.rand(n, 3, 5, 5, generator=g), (height, width), mode="bilinear")
    x += (torch.rand(n, 3, height, width, generator=g) - 0.5) * (torch.rand(n, 1, 1, 1, generator=g) > 0.5)
    x[:, :, : height // 4] = x[:, :1, : height // 4]
    return (x.clamp(0, 1) * 1.4 - 0.2).clamp(0, 1).mul(255).round().byte()


def views_of(size, height, width):
    """Every kind of view of such images."""
    short = max(4, (size - min(height, width) + 1) // 2)
    busy = View(size, flip=1.0, jitter=(0.8, 0.8, 0.8, 0.5), jitter_p=1.0, grey=0.0, blur=1.0, solarise=0.5)
    padded = replace(busy, crop="padded", padding=short, flip=0.5, blur=0.5, mean=MEAN, std=STD)
    return strong(size, MEAN, STD), weak(size, MEAN, STD), busy, padded


def window(n, views, dtype, guard):
    """Room for views between two guards, all of it NaN."""
    size = views[0].size
    whole = torch.full((len(views) * n * size * size * 3 + 2 * guard,), math.nan, dtype=dtype, device=CUDA)
    return whole, whole[guard:-guard].view(len(views), n, size, size, 3).permute(0, 1, 4, 2, 3)


def close(ours, theirs, view, dtype=torch.float32):
    assert ours.shape == theirs.shape
    assert ours.dtype == dtype
    off = (ours.float().cpu() - theirs).abs()
    room = PIXEL / torch.tensor(view.std).view(3, 1, 1)
    if dtype == torch.bfloat16:
        room = room + theirs.abs() * 2.0**-8
    assert (off <= room).all(), f"differ by {off.max():.3g}"


def all_close(images, chosen, views, seed, epoch, first=0):
    """Pixels of one launch against the twin's, view by view."""
    ours = make_views(images.to(CUDA), chosen.to(CUDA), views, seed, epoch, first, dtype=torch.float32)
    for k, view in enumerate(views):
        close(ours[k], make_view(images[chosen], chosen, view, seed, epoch, first + k), view)


def compile_job(job):
    (size, height, width), dtype, held, guard = job
    moment = torch.zeros((), dtype=torch.int64, device=CUDA) if held else 0
    views, images = views_of(size, height, width), photos(2, height, width).to(CUDA)
    _, out = window(2, views, dtype, guard)
    make_views(images, torch.arange(2, device=CUDA), views, moment, moment, dtype=dtype, out=out)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All variants of the kernel, into Triton's cache on disk: one after the other they take most of a minute."""
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, JOBS))


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    ("seed", "epoch", "first"), [(0, 0, 0), (2**32 - 1, 2**32 - 1, 3), (2**64 - 1, 2**31, 2**24 - 1), (7 << 40, 1, 250)]
)
def test_parameters_are_equal_to_the_bit(name, seed, epoch, first):
    view, height, width = DRAWN[name]
    far = torch.randint(1 << 62, (10_000,), generator=torch.Generator().manual_seed(first))
    indices = torch.cat([torch.arange(10_000), far])
    (ours,) = draw_parameters(indices.to(CUDA), height, width, (view,), seed, epoch, first)
    twins = parameters(indices, height, width, view, seed, epoch, first)
    assert [k for k, a, b in zip(twins._fields, ours, twins, strict=True) if not torch.equal(a.cpu(), b)] == []


@pytest.mark.parametrize(("size", "height", "width"), SHAPES)
def test_pixels(size, height, width):
    images = photos(40, height, width)
    chosen = torch.randint(40, (24,), generator=torch.Generator().manual_seed(size))
    all_close(images, chosen, views_of(size, height, width), 5 + (1 << 33), 6, 1)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("crop", ["resized", "padded"])
def test_each_operation_alone(name, crop):
    view = replace(PLAIN, crop=crop, padding=7, **ALONE[name])
    all_close(photos(24, 32, 32), torch.arange(24), (view,), 8, 1)


def test_bfloat16():
    images, chosen = photos(64, 32, 32), torch.arange(64).flip(0)
    views = views_of(32, 32, 32)
    ours = make_views(images.to(CUDA), chosen.to(CUDA), views, 2, 3)
    for k, view in enumerate(views):
        close(ours[k], make_view(images[chosen], chosen, view, 2, 3, k), view, torch.bfloat16)


@pytest.mark.parametrize(("shape", "guard"), [*((shape, 4096) for shape in AT_THE_EDGE), (AT_THE_EDGE[0], 4099)])
def test_out_is_filled_and_nothing_else(shape, guard):
    views, images = views_of(*shape), photos(30, *shape[1:]).to(CUDA)
    chosen = torch.arange(30, device=CUDA).flip(0)
    whole, out = window(30, views, torch.float32, guard)
    make_views(images, chosen, views, 1, 2, dtype=torch.float32, out=out)
    assert whole[:guard].isnan().all()
    assert whole[-guard:].isnan().all()
    assert not out.isnan().any()
    assert torch.equal(out, torch.stack(make_views(images, chosen, views, 1, 2, dtype=torch.float32)))


@pytest.mark.parametrize("shape", AT_THE_EDGE)
def test_what_lies_around_the_images_does_not_matter(shape):
    views, images, chosen = views_of(*shape), photos(9, *shape[1:]), torch.arange(9, device=CUDA)
    found = []
    for around in (0, 255):
        band = torch.full_like(images, around)
        held = torch.cat([band, images, band]).to(CUDA)[9:18]
        found.append(torch.stack(make_views(held, chosen, views, 3, 4, dtype=torch.float32)))
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", AT_THE_EDGE)
def test_images_that_fill_their_memory(shape):
    """From the first to the last byte that the driver has given: a read beyond is a fault where nothing else lies."""
    size, height, width = shape
    step = 3 * height * width
    count = 2**21 // math.gcd(step, 2**21)  # the driver's memory comes in pieces of 2 MiB
    while count * step <= 10 * 2**20:
        count *= 2
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        images = torch.randint(256, (count, 3, height, width), dtype=torch.uint8, device=CUDA)
    held = [(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot()]
    assert (images.data_ptr(), images.nbytes) in held
    chosen = torch.cat([torch.arange(16), torch.arange(count - 16, count)])
    views = views_of(size, height, width)
    ours = make_views(images, chosen.to(CUDA), views, 3, 4, dtype=torch.float32)
    torch.cuda.synchronize()
    some = images[chosen.to(CUDA)].cpu()
    for k, view in enumerate(views):
        close(ours[k], make_view(some, chosen, view, 3, 4, k), view)


@pytest.mark.parametrize("shape", [(32, 32, 32), (64, 64, 64)])
def test_a_thousand_repeats_are_equal(shape):
    views, images, chosen = views_of(*shape), photos(256, *shape[1:]).to(CUDA), torch.arange(256, device=CUDA)
    first = torch.stack(make_views(images, chosen, views, 3, 4, dtype=torch.float32))
    out = empty_views(256, views, torch.float32, CUDA)
    different = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(1000):
        out.fill_(math.nan)
        make_views(images, chosen, views, 3, 4, dtype=torch.float32, out=out)
        different += (out != first).any()
    assert int(different) == 0


def test_replays_are_direct_calls_and_never_repeat():
    views = (replace(strong(32, MEAN, STD), jitter_p=1.0), weak(32, MEAN, STD))
    images = photos(500, 32, 32).to(CUDA)
    seed, epoch = (torch.zeros((), dtype=torch.int64, device=CUDA) for _ in range(2))
    chosen, out = torch.arange(64, device=CUDA), empty_views(64, views, torch.bfloat16, CUDA)
    graph, _ = capture(lambda: make_views(images, chosen, views, seed, epoch, out=out), 1)
    seen = []
    for s, e, start in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 2, 100), (2**63 - 1, 2**32 - 1, 436)]:
        seed.fill_(s)
        epoch.fill_(e)
        chosen.copy_(torch.arange(start, start + 64))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, torch.stack(make_views(images, chosen, views, s, e)))
        seen.append(out.clone())
    jittered = torch.stack([x[0] for x in seen]).flatten(0, 1).flatten(1)  # (replays * samples, values)
    assert len(torch.unique(jittered, dim=0)) == len(jittered)
    assert len(torch.unique(torch.stack([x[1] for x in seen]).flatten(1), dim=0)) == len(seen)
