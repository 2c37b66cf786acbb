"""The losses as `nn.Module`s.

A `tau`, `m1` or `m2` that is an `nn.Parameter` becomes a parameter of the module. The module always uses its present
one: after `load_state_dict(assign=True)`, under `torch.func.functional_call`, in a replica. A `tau` that is a plain
tensor becomes a buffer. Plain tensors in an effect stay outside, for a schedule to change.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn

from marginlens import checks
from marginlens.checks import EffectLike
from marginlens.effects import PLAIN, Effect, Product, factors
from marginlens.loss import Impl, Reduction, info_nce, nt_xent
from marginlens.parameters import Number, as_float, valueless


class Setting:
    """A read-only attribute of a module; assigning to it raises, because the loss would ignore the new value."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        return self if module is None else settings_of(module)[self.name]

    def __set__(self, module: nn.Module, value: object) -> None:
        or_tensor = ", or give it an effect whose number is a tensor, and change that" if self.name == "effect" else ""
        raise AttributeError(
            f"the {self.name} of {type(module).__name__} is fixed when it is made: make another one{or_tensor}"
        )


class InfoNCE(nn.Module):
    """`info_nce` as a module with fixed settings; `positives` and `queue` are given at each call.

    Args:
        tau: Temperature, from 1e-6 to 1e6. An `nn.Parameter` learns with the module.
        beta: Weight of the denominator, from 0 to 1.
        effect: An effect, or its string form. An `m1` or `m2` that is an `nn.Parameter` learns with the module.
        in_batch: True if the other rows of k are negatives.
        reduction: "mean" of all rows, or "none".
        impl: Kernel for the negatives; see `info_nce`.
        check: True to look for bad values, also on a GPU; see `info_nce`.

    Example:
        >>> loss = ml.InfoNCE(tau=0.25, effect="emphasis(s=20)")
        >>> loss(torch.eye(4), torch.eye(4))
        tensor(0.0535)
    """

    beta, effect, in_batch, reduction, impl, check = (Setting() for _ in range(6))

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
        checks.switch("in_batch", in_batch)
        self.settings = _settings(beta, effect, reduction, impl, check) | {"in_batch": in_batch}
        register_effect(self, self.settings["effect"])

    def forward(self, q: Tensor, k: Tensor, *, positives: Tensor | None = None, queue: Tensor | None = None) -> Tensor:
        """Return the loss of q (n, d) against k (m, d); `positives` are row indices of k. See `info_nce`."""
        return info_nce(q, k, tau=self.tau, positives=positives, queue=queue, **settings_of(self))

    def extra_repr(self) -> str:
        return _spell(self)


class NTXent(nn.Module):
    """`nt_xent` as a module with fixed settings.

    Args:
        tau: Temperature, from 1e-6 to 1e6. An `nn.Parameter` learns with the module.
        beta: Weight of the denominator, from 0 to 1.
        effect: An effect, or its string form. An `m1` or `m2` that is an `nn.Parameter` learns with the module.
        reduction: "mean" of all rows, or "none".
        impl: Kernel for the negatives; see `info_nce`.
        check: True to look for bad values, also on a GPU; see `info_nce`.

    Example:
        >>> loss = ml.NTXent(effect=ml.Margin(m1=0.4, m2=0.2))
        >>> loss(torch.eye(4), torch.eye(4)).isfinite()
        tensor(True)
    """

    beta, effect, reduction, impl, check = (Setting() for _ in range(5))

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
        register_effect(self, self.settings["effect"])

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Return the loss of two views z1 and z2, (n, d) each. See `nt_xent`."""
        return nt_xent(z1, z2, tau=self.tau, **settings_of(self))

    def extra_repr(self) -> str:
        return _spell(self)


def _tau(module: nn.Module, tau: Number, check: bool) -> Number:
    tau = checks.temperature(tau, check)
    if isinstance(tau, Tensor) and not isinstance(tau, nn.Parameter):
        module.register_buffer("tau", tau)
    return tau


def register_effect(module: nn.Module, effect: Effect) -> None:
    """Register an effect's learnable numbers as parameters of the module: `effect_m1`, `effect_m2`."""
    for name, (i, field) in _learnable(effect).items():
        module.register_parameter(name, getattr(factors(effect)[i], field))
    owner: Any = module
    owner.registered = effect


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings, its effect with the parameters that the module has now."""
    owner: Any = module
    settings: dict[str, Any] = owner.settings
    found = _learnable(settings["effect"])
    if not found or settings["effect"] is not owner.registered:  # because a new effect was assigned
        return settings
    parts = list(factors(settings["effect"]))
    for name, (i, field) in found.items():
        parts[i] = replace(parts[i], **{field: getattr(module, name)})  # type: ignore[type-var]
    return settings | {"effect": Product(tuple(parts)) if len(parts) > 1 else parts[0]}


def _learnable(effect: Effect) -> dict[str, tuple[int, str]]:
    """Return the factor and the field of each number that is a parameter, by its name in a module.

    If two factors have a parameter of the same name, the factor's index is added: `effect0_m1`, `effect1_m1`.
    """
    found = [
        (i, field.name)
        for i, factor in enumerate(factors(effect))
        for field in fields(factor)  # type: ignore[arg-type]
        if isinstance(getattr(factor, field.name), nn.Parameter)
    ]
    names = [field for _, field in found]
    return {f"effect{i if names.count(field) > 1 else ''}_{field}": (i, field) for i, field in found}


def _settings(beta: float, effect: EffectLike, reduction: str, impl: str, check: bool) -> dict[str, Any]:
    checks.options(reduction, impl, check)
    return {
        "beta": checks.share(beta),
        "effect": checks.as_effect(effect),
        "reduction": reduction,
        "impl": impl,
        "check": check,
    }


def _spell(module: InfoNCE | NTXent) -> str:
    try:
        settings = settings_of(module)
    except ValueError:  # because a number learned out of its range, and its value explains why
        settings = module.settings
    tau = module.tau
    text = "?" if isinstance(tau, Tensor) and valueless(tau) else f"{as_float(tau):g}"
    return f"tau={text}, " + ", ".join(f"{name}={value}" for name, value in settings.items())
