"""Weights move to torchvision and timm and back, if those can be imported."""

import pytest
import torch

from marginlens.nets import encoder, load_backbone

torchvision = pytest.importorskip("torchvision", reason="torchvision cannot be imported here", exc_type=ImportError)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_torchvision_and_timm(name):
    timm = pytest.importorskip("timm", reason="timm cannot be imported here", exc_type=ImportError)
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(weights=None).eval()
    ours = encoder(name, stem="imagenet").eval()
    load_backbone(ours, theirs.state_dict())
    third = timm.create_model(name, pretrained=False, num_classes=0).eval()
    third.load_state_dict(ours.state_dict(), strict=True)
    theirs.fc = torch.nn.Identity()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours(x), third(x))
    fresh = getattr(torchvision.models, name)(weights=None)
    missing, unexpected = fresh.load_state_dict(ours.state_dict(), strict=False)
    assert (missing, unexpected) == (["fc.weight", "fc.bias"], [])
