"""FLOPs and parameters against public numbers, and a dry run without side effects."""

from pathlib import Path

import pytest
import torch
from torch import nn

from marginlens.nets import count, encoder, facts, feature_dim, flops, parameters

# torchvision's model pages: billions of multiply-adds of one 224 px image, with the 1000-way fc
TORCHVISION = {"resnet18": 1.814, "resnet34": 3.664, "resnet50": 4.089}
# our tables, in FLOPs: small-image stems
EXACT = {
    ("tiny", 32): (307_536, 128),
    ("resnet18", 32): (11_168_832, 512),
    ("resnet18", 64): (11_168_832, 512),
    ("resnet34", 32): (21_276_992, 512),
    ("resnet50", 32): (23_500_352, 2048),
}


def by_hand(model, size):
    """Two FLOPs for each weight of a convolution and each place it is applied to."""
    total = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda m, _, y: total.append(2 * m.weight.numel() * y.shape[2] * y.shape[3]))
    model(torch.empty(1, 3, size, size, device="meta"))
    return sum(total)


@pytest.mark.parametrize("name", TORCHVISION)
def test_multiply_adds_are_torchvisions(name):
    seen = facts(name, 224)
    assert seen.stem == "imagenet"
    assert round((seen.flops / 2 + 1000 * seen.features) / 1e9, 3) == TORCHVISION[name]


def test_the_papers_encoder_takes_1_11_gflop():
    """As a prototype was counted: a multiply-add is two FLOPs."""
    assert round(facts("resnet18", 32).flops / 1e9, 2) == 1.11


@pytest.mark.parametrize(("name", "size"), EXACT)
def test_counts(name, size):
    seen = facts(name, size)
    assert (seen.parameters, seen.features) == EXACT[name, size]
    with torch.device("meta"):
        assert seen.flops == by_hand(encoder(name, stem=seen.stem), size)


def test_a_linear_layer():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    assert flops(model, 8) == 2 * 3 * 8 * 8 * 5
    assert parameters(model) == 3 * 8 * 8 * 5 + 5


def test_the_documents_table_is_the_functions():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "encoders.md").read_text()
    assert count.markdown(count.table()) in page


class Restless(nn.Module):
    """Changes everything it can while it runs: buffers in place and by name, batch statistics, random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.last = x.mean((1, 2, 3))
        self.norm.train()
        return self.norm(x + torch.rand_like(x)).mean((2, 3))


@pytest.mark.parametrize("make", [lambda: encoder("tiny"), Restless, lambda: nn.Sequential(Restless())])
@pytest.mark.parametrize("look", [feature_dim, flops])
def test_the_dry_run_leaves_no_trace(make, look):
    model = make()
    next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d)).eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [part.training for part in model.modules()]
    random = torch.get_rng_state()
    look(model, 16)
    assert torch.equal(random, torch.get_rng_state())
    assert flags == [part.training for part in model.modules()]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_facts_leave_the_generator_alone():
    random = torch.get_rng_state()
    facts("tiny", 32)
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_module_can_be_an_encoder(dtype):
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(dtype)
    assert feature_dim(model, 20) == 7
    assert feature_dim(nn.Flatten(), 4) == 48


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv2d(3, 7, 3), "the encoder maps 2 images to shape (2, 7, 14, 14); it must be (2, d): pool and flatten"),
        (nn.Flatten(0), "the encoder maps 2 images to shape (1536,)"),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(0, (1, 2))), "to shape (1, 2, 768)"),
        (nn.Sequential(nn.Flatten(2), nn.Flatten(0, 1)), "to shape (6, 256)"),
        (nn.MaxPool2d(2, return_indices=True), "the encoder returns a tuple; it must return a tensor"),
        (nn.Conv2d(1, 7, 3), "the encoder cannot read images of shape (2, 3, 16, 16): Given groups=1"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "the encoder has lazy parameters"),
    ],
)
def test_what_is_no_encoder_is_refused(module, message):
    training = module.training
    with pytest.raises(ValueError) as caught:
        feature_dim(module, 16)
    assert message in str(caught.value)
    assert module.training == training
