"""The losses as `nn.Module`s. A `tau` that is an `nn.Parameter` learns; one that is a tensor moves with the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from marginlens import checks
from marginlens.checks import EffectLike
from marginlens.effects import PLAIN
from marginlens.loss import Impl, Reduction, info_nce, nt_xent
from marginlens.parameters import Number


class InfoNCE(nn.Module):
    """`info_nce` with fixed settings: `InfoNCE(tau=0.25, effect=Emphasis(s=20))(q, k)`."""

    def __init__(
        self,
        *,
        tau: Number = 0.25,
        beta: float = 1.0,
        effect: EffectLike = PLAIN,
        in_batch: bool = True,
        reduction: Reduction = "mean",
        impl: Impl = "auto",
        check: bool = False,
    ) -> None:
        super().__init__()
        self.tau: Any = _tau(self, tau, check)
        self.settings = _settings(beta, effect, reduction, impl, check) | {"in_batch": in_batch}

    def forward(self, q: Tensor, k: Tensor, *, positives: Tensor | None = None, queue: Tensor | None = None) -> Tensor:
        return info_nce(q, k, tau=self.tau, positives=positives, queue=queue, **self.settings)

    def extra_repr(self) -> str:
        return _spell(self.tau, self.settings)


class NTXent(nn.Module):
    """`nt_xent` with fixed settings: `NTXent(tau=0.25, effect=Margin(m1=0.4))(z1, z2)`."""

    def __init__(
        self,
        *,
        tau: Number = 0.25,
        beta: float = 1.0,
        effect: EffectLike = PLAIN,
        reduction: Reduction = "mean",
        impl: Impl = "auto",
        check: bool = False,
    ) -> None:
        super().__init__()
        self.tau: Any = _tau(self, tau, check)
        self.settings = _settings(beta, effect, reduction, impl, check)

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return nt_xent(z1, z2, tau=self.tau, **self.settings)

    def extra_repr(self) -> str:
        return _spell(self.tau, self.settings)


def _tau(module: nn.Module, tau: Number, check: bool) -> Number:
    checks.temperature(tau, check)
    if isinstance(tau, Tensor) and not isinstance(tau, nn.Parameter):
        module.register_buffer("tau", tau)
    return tau


def _settings(beta: float, effect: EffectLike, reduction: str, impl: str, check: bool) -> dict[str, Any]:
    checks.options(reduction, impl)
    return {
        "beta": checks.share(beta),
        "effect": checks.as_effect(effect),
        "reduction": reduction,
        "impl": impl,
        "check": check,
    }


def _spell(tau: Number, settings: dict[str, Any]) -> str:
    return f"tau={float(tau):g}, " + ", ".join(f"{name}={value}" for name, value in settings.items())
