"""Laws of every encoder: shapes, gradients, independence, determinism, and the ways to run it."""

import shutil

import pytest
import torch
from torch import nn

from marginlens.nets import ENCODERS, STEMS, ResNet, default_stem, encoder, feature_dim
from marginlens.nets.resnet import Architecture, Bottleneck

FEATURES = {"tiny": 128, "resnet18": 512, "resnet34": 512, "resnet50": 2048}
SLIM = Architecture(Bottleneck, (1, 2, 1, 1), width=16, stem="imagenet")
compiles = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)


def images(n=4, size=32, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def seeded(name, **options):
    """An encoder by name, or ResNet-50's blocks at a size for tests."""
    torch.manual_seed(0)
    return ResNet(SLIM, "imagenet") if name == "slim" else encoder(name, **options)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_features(name, stem):
    with torch.device("meta"):
        model = encoder(name, stem=stem)
        assert model(torch.empty(3, 3, 64, 64)).shape == (3, FEATURES[name])
        assert model(torch.empty(3, 3, 33, 47)).shape == (3, model.features)
    assert (model.features, model.stem) == (FEATURES[name], stem)


@pytest.mark.parametrize(
    ("stem", "sides"), [("small", (32, 16, 8, 4)), ("small-pool", (16, 8, 4, 2)), ("imagenet", (8, 4, 2, 1))]
)
@pytest.mark.parametrize("name", ["tiny", "resnet50"])
def test_a_stem_sets_the_resolution(name, stem, sides):
    seen = []
    with torch.device("meta"):
        model = encoder(name, stem=stem)
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            stage.register_forward_hook(lambda _, __, y: seen.append(y.shape[-1]))
        model(torch.empty(2, 3, 32, 32))
    assert tuple(seen) == sides


def test_the_three_by_three_of_a_bottleneck_strides():
    with torch.device("meta"):
        block = encoder("resnet50").layer2[0]
    assert [c.stride for c in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


def test_default_stems():
    table = {32: "small", 64: "small-pool", 96: "small-pool", 224: "imagenet"}
    for name in ("resnet18", "resnet34", "resnet50"):
        assert {size: default_stem(name, size) for size in table} == table
    assert {default_stem("tiny", size) for size in table} == {"small-pool"}
    assert [encoder(name).stem for name in ("tiny", "resnet18")] == ["small-pool", "small"]


@pytest.mark.parametrize("name", ["tiny", "slim", "resnet18"])
def test_gradients_reach_every_parameter_and_the_images(name):
    model, x = seeded(name), images(4).requires_grad_()
    (model(x) * torch.randn(4, model.features)).sum().backward()
    for key, p in model.named_parameters():
        assert p.grad.isfinite().all(), key
        assert p.grad.abs().max() > 0, key
    assert (x.grad.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize("name", ["tiny", "slim", "resnet18"])
def test_eval_mode_treats_each_image_alone(name):
    model, x = seeded(name).eval(), images(5, 16)
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(x[i : i + 1]) for i in range(5)])
        shuffled = model(x.flip(0)).flip(0)
    assert (together - alone).abs().max() <= 1e-5 * together.abs().max()
    assert (together - shuffled).abs().max() <= 1e-5 * together.abs().max()


def test_train_mode_does_not():
    model, x = seeded("tiny"), images(4)
    with torch.no_grad():
        assert (model(x)[:2] - model(x[:2])).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["tiny", "resnet18"])
def test_a_seed_fixes_the_weights(name):
    one, same = seeded(name).state_dict(), seeded(name).state_dict()
    other = encoder(name).state_dict()
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_zero_init_residual_starts_without_the_branches():
    """Every branch ends in 0, so weights inside of it cannot be seen."""
    model, x = seeded("tiny", zero_init_residual=True), images()
    before = model(x)
    nn.init.normal_(model.layer3[0].conv1.weight)
    assert torch.equal(before, model(x))


@pytest.mark.parametrize("name", ["tiny", "slim", "resnet18"])
def test_channels_last(name):
    model, x = seeded(name).double(), images(8, 16).double()
    want = model(x)
    model.to(memory_format=torch.channels_last)
    got = model(x.contiguous(memory_format=torch.channels_last))
    assert (got - want).abs().max() <= 1e-10 * want.abs().max()


def test_bf16_autocast():
    model, x = seeded("tiny"), images(16)
    want = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(x)
    assert got.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(got.float(), want).min() > 0.99
    got.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def compiled_equals_eager(module, twin, x, **options):
    """Output and gradients; one graph, or torch.compile refuses."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, **options)
    got, want = compiled(x), twin(x)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    for y in (got, want):
        y.square().mean().backward()
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-3 * b.grad.abs().max()
    for a, b in zip(module.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tiny", "slim"])
def test_training_is_one_graph(name):
    """Traced as for inductor and run by torch: the whole encoder without a compiler's minutes."""
    compiled_equals_eager(seeded(name), seeded(name), images(8), backend="aot_eager")


@pytest.mark.slow
@compiles
def test_a_block_compiles():
    torch._dynamo.reset()
    block, x = seeded("tiny").layer2[0].eval(), torch.rand(4, 16, 8, 8)
    with torch.no_grad():
        got, want = torch.compile(block, fullgraph=True)(x), block(x)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@compiles
@pytest.mark.slow
def test_an_encoder_compiles():
    compiled_equals_eager(seeded("tiny"), seeded("tiny"), images(8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encoder("resnet81"), "there is no encoder 'resnet81'; did you mean 'resnet18'?"),
        (lambda: encoder("ResNet50"), "there is no encoder 'ResNet50'; did you mean 'resnet50'?"),
        (lambda: encoder("vit"), "there is no encoder 'vit'; there are tiny, resnet18, resnet34, resnet50"),
        (lambda: encoder("tiny", stem="imagnet"), "there is no stem 'imagnet'; did you mean 'imagenet'?"),
        (lambda: encoder("tiny", stem=""), "there is no stem ''; there are small, small-pool, imagenet"),
        (lambda: default_stem("tony", 32), "there is no encoder 'tony'; did you mean 'tiny'?"),
        (lambda: default_stem("tiny", 0), "size is 0; it must be a number of pixels, at least 1"),
        (lambda: feature_dim(encoder("tiny"), -1), "size is -1; it must be a number of pixels, at least 1"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message
