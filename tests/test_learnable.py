"""Learned numbers: a module uses its parameters, and none silently trains outside its range."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import marginlens as ml
from marginlens.effects import Emphasis, Margin, Ratio
from marginlens.methods import BYOL, MoCoV3, SimCLR
from tests.catalogue import random

Q, K = random(6, 4, seed=0), random(6, 4, seed=1)


def parameter(x):
    return nn.Parameter(torch.tensor(x, dtype=torch.float64))


class Half(nn.Module):
    def forward(self, x):
        return x / 2


def assign(module):
    module.load_state_dict({"effect_m1": torch.tensor(1.0, dtype=torch.float64)}, assign=True)


def replace(module):
    module.effect_m1 = parameter(1.0)


def parametrised(module):
    with torch.no_grad():
        module.effect_m1.fill_(2.0)
    parametrize.register_parametrization(module, "effect_m1", Half())


@pytest.mark.parametrize("change", [assign, replace, parametrised])
@pytest.mark.parametrize("make", [ml.InfoNCE, ml.NTXent])
@pytest.mark.parametrize("build", [lambda x: Margin(m1=x), lambda x: Emphasis(s=3) * Margin(m1=x) * Ratio(m1=0.4)])
def test_a_module_learns_by_the_parameter_that_it_has(make, build, change):
    module = make(effect=build(parameter(0.3)))
    change(module)
    value = module(Q, K)
    assert value == make(effect=build(1.0))(Q, K)
    value.backward()
    assert all(p.grad is not None and p.grad != 0 for p in module.parameters())
    assert "m1=1" in repr(module)


def test_a_copy_has_its_own():
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.3)))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.effect_m1.fill_(1.0)
    assert module(Q, K) == ml.info_nce(Q, K, effect=Margin(m1=0.3))
    assert other(Q, K) == ml.info_nce(Q, K, effect=Margin(m1=1.0))


def test_functional_call():
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.3), m2=parameter(0.1)))
    given = {"effect_m1": torch.tensor(1.0, dtype=torch.float64), "effect_m2": torch.tensor(0.2, dtype=torch.float64)}
    found = torch.func.grad(lambda p: torch.func.functional_call(module, p, (Q, K)))(given)
    wanted = torch.func.grad(lambda p: ml.info_nce(Q, K, effect=Margin(m1=p["effect_m1"], m2=p["effect_m2"])))(given)
    assert found == wanted
    assert found["effect_m1"] != 0


def test_a_replica_learns():
    """As DataParallel makes one: a shallow copy whose parameters are tensors with a history."""
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.3)))
    replica = module._replicate_for_data_parallel()
    replica.effect_m1 = module.effect_m1 * 2
    replica(Q, K).backward()
    assert module.effect_m1.grad != 0


@pytest.mark.parametrize("method", [MoCoV3, SimCLR, BYOL])
def test_methods_too(method):
    made = method(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), effect=Margin(m1=parameter(0.3)), size=2, hidden=4)
    made.double()
    views = [random(8, 12, seed=i).view(8, 3, 2, 2) for i in range(2)]
    before = made.loss(views).detach()
    made.load_state_dict(made.state_dict() | {"effect_m1": torch.tensor(1.0, dtype=torch.float64)}, assign=True)
    loss = made.loss(views)
    assert loss.detach() != before
    loss.backward()
    assert made.effect_m1.grad != 0
    assert made.rows(views).f.shape[0] >= 8


def test_two_numbers_of_one_name_are_two_parameters():
    margin, ratio = parameter(0.3), nn.Parameter(torch.tensor(0.4, dtype=torch.float64), requires_grad=False)
    module = ml.InfoNCE(effect=Margin(m1=margin) * Ratio(m1=ratio))
    assert dict(module.named_parameters()) == {"effect0_m1": margin, "effect1_m1": ratio}
    assert module(Q, K) == ml.info_nce(Q, K, effect=Margin(m1=0.3) * Ratio(m1=0.4))


def test_a_margin_that_leaves_its_range_is_refused():
    """What minimises the loss moves margins down: below 0 they would make it easier."""
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.01)))
    module(Q, K).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"Margin: m1 is -0\.\d+; it must be in \[0, pi\]"):
        module(Q, K)


def test_a_temperature_that_leaves_its_range_is_told_to_learn_its_logarithm():
    """The advice works: the same step leaves that one in its range."""
    tau, log_tau = parameter(0.25), parameter(math.log(0.25))
    module, near = ml.InfoNCE(tau=tau), Q + 0.5 * K
    module(Q, near).backward()
    ml.info_nce(Q, near, tau=log_tau.exp()).backward()
    assert tau.grad > 0
    torch.optim.SGD([tau, log_tau], lr=1 / tau.grad.item()).step()
    with pytest.raises(ValueError, match=r"tau is -0\.75; .* learn its logarithm .* tau=log_tau\.exp\(\)"):
        module(Q, near)
    assert ml.info_nce(Q, near, tau=log_tau.exp()).isfinite()


def test_a_module_out_of_range_can_be_looked_at():
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.3)))
    module.effect_m1.data.fill_(-0.25)
    assert "m1=-0.25" in repr(module)


@pytest.mark.parametrize("name", ["beta", "effect", "in_batch", "reduction", "impl", "check"])
def test_a_setting_is_read_and_not_set(name):
    """Set, it would be ignored."""
    module = ml.InfoNCE(effect="emphasis(s=2)", beta=0.5)
    assert getattr(module, name) == module.settings[name]
    with pytest.raises(AttributeError, match=f"the {name} of InfoNCE is fixed when it is made: make another one"):
        setattr(module, name, module.settings[name])


@pytest.mark.parametrize("make", [MoCoV3, SimCLR, BYOL], ids=lambda cls: cls.__name__)
def test_a_method_s_settings_are_read_and_not_set(make):
    method = make(nn.Flatten(), features=3, effect="emphasis(c=2.5)")
    for name, held in method.settings.items():
        assert getattr(method, name) == held
        with pytest.raises(AttributeError, match=f"the {name} of {make.__name__} is fixed"):
            setattr(method, name, held)


def test_an_effect_that_learns_is_read_as_it_is_now():
    module = ml.NTXent(effect=Margin(m1=parameter(0.5)))
    with torch.no_grad():
        module.effect_m1.fill_(0.25)
    assert module.effect.m1.item() == 0.25


def test_an_effect_that_was_put_there_later_is_used():
    module = ml.InfoNCE(effect=Margin(m1=parameter(0.3)))
    module.settings["effect"] = Margin(m1=parameter(0.5))
    assert module(Q, K) == ml.info_nce(Q, K, effect=Margin(m1=0.5))
    plain = ml.InfoNCE()
    plain.settings["effect"] = Margin(m1=parameter(0.5))
    assert plain(Q, K) == module(Q, K)


@pytest.mark.parametrize("layout", [ml.info_nce, ml.nt_xent])
@pytest.mark.parametrize("tau", [0.0, -0.25])
def test_a_temperature_that_cannot_be_is_nan_where_it_cannot_be_looked_at(layout, tau):
    """Negative, it would train an inverted loss, which falls."""
    batched = torch.func.vmap(lambda t: layout(Q, K, tau=t, impl="reference"))
    found = batched(torch.tensor([tau, 0.25], dtype=torch.float64))
    assert found[0].isnan()
    assert found[1] == layout(Q, K, tau=0.25, impl="reference")
