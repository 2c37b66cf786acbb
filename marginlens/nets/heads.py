"""The two-layer heads behind an encoder (docs/reference/methods.md): width 2048, output 128, batch norm before ReLU.

The linear layers keep `nn.Linear`'s initialisation. `bias` gives both of a head's linear layers a bias, or neither. In
front of a batch norm it changes nothing, for the norm subtracts it again; what it does change is the predictor's last
layer. True is what the measured prototype had; MoCo v3's official heads have none.
"""

from __future__ import annotations

from torch import Tensor, nn

from marginlens.checks import whole
from marginlens.nets import fast


class Head(nn.Sequential):
    """Linear, batch norm, ReLU, linear, and maybe a batch norm; in their places the fast form takes other norms too."""

    def forward(self, x: Tensor) -> Tensor:
        if fast.on():
            kinds = [type(layer) for layer in self]
            if len(kinds) not in (4, 5) or [kinds[0], *kinds[2:4]] != [nn.Linear, nn.ReLU, nn.Linear]:
                names = ", ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"a head of {names} has no fast form; run its method with --engine eager")
            return fast.head(self, x)
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out


def projector(in_dim: int, *, hidden: int = 2048, out: int = 128, last_bn: bool = True, bias: bool = True) -> nn.Module:
    """Linear, batch norm, ReLU, linear: features (n, in_dim) to embeddings (n, out).

    `last_bn` ends it in a batch norm without affine parameters, as MoCo v3 does: with it emphasis s = 20 gains, without
    it s = 20 falls below s = 1.
    """
    return _two_layers(in_dim, hidden, out, last_bn, bias)


def predictor(dim: int = 128, *, hidden: int = 2048, last_bn: bool = False, bias: bool = True) -> nn.Module:
    """Linear, batch norm, ReLU, linear: the student's embeddings (n, dim) to its guess of the teacher's (n, dim).

    `last_bn` ends it as it ends the projector. MoCo v3 has it with a ViT and not with a ResNet.
    """
    return _two_layers(dim, hidden, dim, last_bn, bias)


def _two_layers(inputs: int, hidden: int, outputs: int, last_bn: bool, bias: bool) -> Head:
    for what, size in (("input", inputs), ("hidden", hidden), ("output", outputs)):
        whole(f"the head's {what} size", size)
    head = Head(
        nn.Linear(inputs, hidden, bias=bias),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs, bias=bias),
    )
    if last_bn:
        head.append(nn.BatchNorm1d(outputs, affine=False))
    return head
