"""torchvision's names, shapes, counts and initialisation, copied from its public tables, without importing it."""

import math

import pytest
import torch

from marginlens.nets import ENCODERS, STEMS, encoder, load_backbone, parameters

# depths, expansion, parameters of the whole torchvision model with its 1000-way fc, entries in its state dict
TORCHVISION = {
    "resnet18": ((2, 2, 2, 2), 1, 11_689_512, 122),
    "resnet34": ((3, 4, 6, 3), 1, 21_797_672, 218),
    "resnet50": ((3, 4, 6, 3), 4, 25_557_032, 320),
}


def norm(name, n):
    return {f"{name}.{k}": (n,) for k in ("weight", "bias", "running_mean", "running_var")} | {
        f"{name}.num_batches_tracked": ()
    }


def torchvision_state(name):
    """Key -> shape of `torchvision.models.<name>().state_dict()`, in its order, by way of the architecture table."""
    depths, expansion, _, _ = TORCHVISION[name]
    shapes = {"conv1.weight": (64, 3, 7, 7)} | norm("bn1", 64)
    inputs = 64
    for stage, depth in enumerate(depths):
        w = (64, 128, 256, 512)[stage]
        for i in range(depth):
            at, outputs = f"layer{stage + 1}.{i}", w * expansion
            if expansion == 1:
                kernels = [(w, inputs, 3, 3), (w, w, 3, 3)]
            else:
                kernels = [(w, inputs, 1, 1), (w, w, 3, 3), (outputs, w, 1, 1)]
            for j, shape in enumerate(kernels, 1):
                shapes |= {f"{at}.conv{j}.weight": shape} | norm(f"{at}.bn{j}", shape[0])
            if i == 0 and inputs != outputs:
                shapes |= {f"{at}.downsample.0.weight": (outputs, inputs, 1, 1)} | norm(f"{at}.downsample.1", outputs)
            inputs = outputs
    return shapes | {"fc.weight": (1000, inputs), "fc.bias": (1000,)}


def weights(name, seed=0):
    torch.manual_seed(seed)
    state = {key: torch.rand(shape) for key, shape in torchvision_state(name).items()}
    return {k: torch.tensor(7) if k.endswith("tracked") else v for k, v in state.items()}


@pytest.mark.parametrize("name", TORCHVISION)
def test_keys_shapes_and_order_are_torchvisions(name):
    expected = torchvision_state(name)
    assert len(expected) == TORCHVISION[name][3]
    with torch.device("meta"):
        ours = {key: tuple(x.shape) for key, x in encoder(name, stem="imagenet").state_dict().items()}
    assert list(ours.items()) == [item for item in expected.items() if not item[0].startswith("fc.")]


@pytest.mark.parametrize("name", TORCHVISION)
def test_parameter_counts_are_torchvisions(name):
    with torch.device("meta"):
        model = encoder(name, stem="imagenet")
    assert parameters(model) + 1000 * model.features + 1000 == TORCHVISION[name][2]


@pytest.mark.parametrize("stem", ["small", "small-pool"])
def test_a_small_stem_changes_one_shape_and_no_name(stem):
    with torch.device("meta"):
        small, large = (encoder("resnet18", stem=s).state_dict() for s in (stem, "imagenet"))
    assert list(small) == list(large)
    assert [k for k in small if small[k].shape != large[k].shape] == ["conv1.weight"]
    assert small["conv1.weight"].shape == (64, 3, 3, 3)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_follows_the_naming_scheme(name, stem):
    with torch.device("meta"):
        keys = set(encoder(name, stem=stem).state_dict())
    assert keys <= set(torchvision_state("resnet50" if name == "resnet50" else "resnet34"))
    assert {"conv1.weight", "bn1.running_var", "layer4.0.downsample.1.num_batches_tracked"} <= keys


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvisions_state_dict_loads_both_ways(name):
    state, model = weights(name), encoder(name, stem="imagenet")
    load_backbone(model, state)
    back = model.state_dict()
    assert all(torch.equal(back[key], state[key]) for key in back)
    assert set(state) - set(back) == {"fc.weight", "fc.bias"}


def test_weights_without_the_batch_counter_load():
    """As in torchvision's oldest files: 102 entries for ResNet-18 in place of 122."""
    state = {k: v for k, v in weights("resnet18").items() if not k.endswith("tracked")}
    model = encoder("resnet18", stem="imagenet")
    model.bn1.num_batches_tracked.fill_(5)
    load_backbone(model, state)
    assert model.bn1.num_batches_tracked == 0
    assert torch.equal(model.bn1.running_var, state["bn1.running_var"])


def without(*keys):
    return lambda s: {k: v for k, v in s.items() if k not in keys}


MISFITS = {
    "missing: layer2.0.conv1.weight": without("layer2.0.conv1.weight"),
    "missing: bn1.running_mean, bn1.running_var": without("bn1.running_mean", "bn1.running_var"),
    "unexpected: head.weight": lambda s: s | {"head.weight": torch.zeros(1)},
    "unexpected: fcx": lambda s: s | {"fcx": torch.zeros(1)},
    "unexpected: module.conv1.weight, module.bn1.weight, module.bn1.bias and": lambda s: {
        f"module.{k}": v for k, v in s.items()
    },
    "wrong shape: bn1.weight is (3,), not (16,)": lambda s: s | {"bn1.weight": torch.zeros(3)},
    "wrong shape: bn1.weight is list, not (16,)": lambda s: s | {"bn1.weight": [0.0] * 16},
    "conv1.weight is (16, 3, 7, 7), not (16, 3, 3, 3); a stem fits": lambda s: (
        s | {"conv1.weight": torch.zeros(16, 3, 7, 7)}
    ),
}


@pytest.mark.parametrize("message", MISFITS, ids=lambda m: m[:40])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(message):
    model = encoder("tiny")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_backbone(model, MISFITS[message]({k: v + 1 for k, v in before.items()}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["tiny", "resnet18"])
def test_initialisation_is_torchvisions(name):
    """Convolutions ~ N(0, 2 / fan_out), fan_out = outputs x kernel area; batch norm 1 and 0."""
    torch.manual_seed(0)
    for key, value in encoder(name, stem="imagenet").named_parameters():
        if value.dim() == 4:
            n, std = value.numel(), math.sqrt(2 / (value.shape[0] * value.shape[2] * value.shape[3]))
            assert abs(value.std().item() / std - 1) < 5 / math.sqrt(2 * n), key
            assert abs(value.mean().item()) < 5 * std / math.sqrt(n), key
        else:
            assert (value == (1 if key.endswith("weight") else 0)).all(), key


@pytest.mark.parametrize(("name", "last"), [("tiny", "bn2"), ("resnet50", "bn3")])
def test_zero_init_residual_zeroes_the_last_norm_of_each_block(name, last):
    model = encoder(name, zero_init_residual=True)
    zeroed = {key for key, p in model.named_parameters() if key.endswith("weight") and (p == 0).all()}
    assert zeroed == {key for key, _ in model.named_parameters() if key.endswith(f"{last}.weight") and "layer" in key}
