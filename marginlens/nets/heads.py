"""The two-layer heads behind an encoder (docs/reference/methods.md): width 2048, output 128, batch norm before ReLU.

The linear layers keep `nn.Linear`'s initialisation. `bias` applies to both linear layers of a head. A bias in front of
a batch norm changes nothing, because the norm subtracts it again. It matters only in the predictor's last layer. The
measured prototype had biases; MoCo v3's official heads do not.
"""

from __future__ import annotations

from torch import Tensor, nn

from marginlens.checks import whole
from marginlens.nets import fast


class Head(nn.Sequential):
    """Linear, batch norm, ReLU, linear, and perhaps a batch norm. The fast form accepts other norms in their place."""

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
    """Return linear, batch norm, ReLU, linear: features (n, in_dim) to embeddings (n, out).

    `last_bn` appends a batch norm without affine parameters, as MoCo v3 does. With it emphasis s = 20 gains; without
    it, s = 20 falls below s = 1.
    """
    return _two_layers(in_dim, hidden, out, last_bn, bias)


def predictor(dim: int = 128, *, hidden: int = 2048, last_bn: bool = False, bias: bool = True) -> nn.Module:
    """Return linear, batch norm, ReLU, linear: the student's embeddings (n, dim) to a guess of the teacher's (n, dim).

    `last_bn` appends the projector's last batch norm. MoCo v3 does so with a ViT, but not with a ResNet.
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
