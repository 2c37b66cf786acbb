"""The string form: parsed, written back exactly, refused with a suggestion."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Plain, Ratio, effects
from marginlens.effects import Composes, LogWeights, plain_logit
from marginlens.parameters import Number, like, log
from tests.catalogue import EFFECTS
from tests.test_laws import single

SPELLINGS = {
    "plain": Plain(),
    "margin": Margin(),
    "margin(m1=0.4, m2=-0.2)": Margin(0.4, -0.2),
    "emphasis(s=20, c=2.5) * ratio(m1=0.4)": Emphasis(20, 2.5) * Ratio(0.4),
    "emphasis(s=20)": Emphasis(s=20),
    "emphasis(c=1e-07)": Emphasis(c=1e-7),
    "emphasis(s=1e-301)": Emphasis(s=1e-301),
    "ratio(m1=0, scope=row)": Ratio(0, scope="row"),
    "attenuation(alpha=1, kind=II)": Attenuation(1, kind="II"),
}
READ_ONLY = {
    "plain()": Plain(),
    "  Emphasis( c = 1/3 )  ": Emphasis(c=1 / 3),
    "emphasis(s=1, c=inf)": Emphasis(),
    "ratio(m1=0.4, scope='row')": Ratio(0.4, scope="row"),
    'ratio(scope="positive", m1=4e-1)': Ratio(0.4),
    "(plain * margin(m1=1)) * (emphasis(s=2))": Plain() * Margin(1) * Emphasis(2),
}
REFUSED = {
    "emphasys(s=20)": "there is no effect 'emphasys'; did you mean 'emphasis'?",
    "emphasis(s=two)": "emphasis's s must be a number, not 'two'",
    "emphasis(s=nan)": "emphasis's s must be a number, not 'nan'",
    "emphasis(**x)": "emphasis takes its parameters by name",
    "zzz": "there is no effect 'zzz'; there are plain, margin, emphasis, ratio, attenuation",
    "emphasis(S=20)": "emphasis has no parameter 'S'",
    "attenuation(alhpa=1)": "attenuation has no parameter 'alhpa'; did you mean 'alpha'?",
    "ratio": "ratio needs m1",
    "ratio(scope=row)": "ratio needs m1",
    "ratio(m1=0.4, scope=rows)": "scope is 'rows'; it must be 'positive' or 'row'",
    "emphasis(20)": "emphasis takes its parameters by name",
    "emphasis(s=20": "it does not read as",
    "": "it does not read as",
    "emphasis(s=) * plain": "it does not read as",
    "emphasis(s=20) + plain": "it must be effects joined by *",
    "emphasis(s=2)(s=3)": "it must be effects joined by *",
    "3 * plain": "it must be effects joined by *",
    "emphasis(s=True)": "emphasis's s must be a number or a word, not 'True'",
    "emphasis(s=1/0)": "emphasis's s must be a number or a word, not '1/0'",
    "emphasis(s=-x)": "emphasis's s must be a number or a word, not '-x'",
    "emphasis(s=1j)": "must be a number or a word",
    "emphasis(s=__import__('os'))": "must be a number or a word",
    "emphasis(s=-1)": "Emphasis: s is -1; it must be from 0 to 1e+06",
    "margin(m1=1) * margin(m1=1)": "both move",
    "emphasis(s=20, s=3)": "emphasis is given s twice",
    "emphasis(s=1" + "0" * 400 + ")": "beyond the largest float; write inf for infinity",
    "emphasis(c=-0x1" + "0" * 400 + ")": "emphasis's c is '0x1000",
    "emphasis(s=" + "~" * 400 + "x)": "must be a number or a word",
    "emphasis(s=1e400)": "emphasis's s is '1e400', beyond the largest float",
    "emphasis(c=1e400)": "emphasis's c is '1e400', beyond the largest float",
    "emphasis(c=1e308/1e-308)": "emphasis's c must be a number or a word, not '1e308/1e-308'",
    "emphasis(c=inf/inf)": "emphasis's c must be a number or a word, not 'inf/inf'",
    "emphasis(s=inf)": "Emphasis: s is inf; it must be from 0 to 1e+06",
    "emphasis(s=1e39)": "Emphasis: s is 1e+39; it must be from 0 to 1e+06",
    "emphasis(c=1e-39)": "Emphasis: c is 1e-39; it must be above 0, from 1e-09 to 1e+09, or inf",
    "margin(m2=-1e39)": "Margin: m2 is -1e+39; it must be from -1e+06 to 1e+06",
    "emphasis(s=1e4) * emphasis(s=1e4)": "its s multiply to 1e+08; their product must be at most 1e+06",
    "plain * " * 200 + "plain": "at most 500 are read",
    "(" * 400: "it does not read as",
    "-" * 400 + "1": "it must be effects joined by *",
    "plain\x00": "it does not read as",
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_read_and_written_back(text):
    assert ml.effect(text) == SPELLINGS[text]
    assert str(ml.effect(text)) == text


@pytest.mark.parametrize("text", READ_ONLY)
def test_read_leniently(text):
    assert ml.effect(text) == READ_ONLY[text]


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_every_effect_survives_its_own_name(effect):
    assert ml.effect(str(effect)) == effect


@given(factors=st.lists(single.filter(lambda e: not isinstance(e, Margin)), min_size=1, max_size=4))
def test_random_products_survive_exactly(factors):
    effect = math.prod(factors[1:], start=factors[0])
    assert ml.effect(str(effect)) == effect


@pytest.mark.parametrize("text", REFUSED, ids=lambda t: t[:30])
def test_refused(text):
    with pytest.raises(ValueError) as caught:
        ml.effect(text)
    assert REFUSED[text] in str(caught.value)


def test_only_text_is_read():
    with pytest.raises(TypeError, match="must be a string"):
        ml.effect(3)
    with pytest.raises(TypeError):
        Emphasis(s=2) * 3


def test_equal_effects_hash_alike_and_changeable_ones_not_at_all():
    assert {ml.effect(str(e)): 1 for e in EFFECTS} == dict.fromkeys(EFFECTS, 1)
    with pytest.raises(TypeError, match="holds a tensor"):
        hash(Emphasis(s=torch.tensor(3.0)))
    assert Emphasis(s=torch.tensor(3.0)) == Emphasis(s=3)


@dataclass(frozen=True)
class Focus(Composes):
    """An effect as docs/reference/effects.md asks for one: the row's gradient times 1 + g."""

    g: Number = 0.0
    angular = moves_logit = False
    needs_negatives = ""

    def logit(self, row):
        return plain_logit(row)

    def log_weights(self, row):
        return LogWeights(row=log(1.0 + like(self.g, row.cos)))


@dataclass(frozen=True)
class Worded(Plain):
    g: float
    way: Literal["up", "down"]
    name: str


def test_words_that_have_no_default(monkeypatch):
    monkeypatch.setitem(effects.EFFECTS, "worded", Worded)
    made = Worded(g=2.0, way="up", name="x")
    assert ml.effect(str(made)) == made
    with pytest.raises(ValueError, match="worded's g must be a number, not 'up'"):
        ml.effect("worded(g=up, way=up, name=x)")


@pytest.mark.parametrize("number", [2.0, torch.tensor(2.0)])
def test_a_new_effect_takes_tensors_too(number):
    """As a captured step gives it its numbers."""
    z, w = torch.randn(2, 8, 4, dtype=torch.float64).requires_grad_()
    plain, focused = (torch.autograd.grad(ml.info_nce(z, w, effect=e), z)[0] for e in (Plain(), Focus(g=number)))
    torch.testing.assert_close(focused, 3 * plain)


def test_a_new_effect_is_one_class_and_one_name(monkeypatch):
    monkeypatch.setitem(effects.EFFECTS, "focus", Focus)
    assert str(Focus(g=2.0)) == "focus(g=2)"
    assert ml.effect("focus(g=2)") == Focus(g=2.0)
    for both in (Focus(g=2.0) * ml.Emphasis(s=3), ml.Emphasis(s=3) * Focus(g=2.0)):
        assert ml.effect(str(both)) == both
    assert len({Focus(g=2.0), Focus(g=2), Focus()}) == 2
    z, w = torch.randn(2, 8, 4, dtype=torch.float64).requires_grad_()
    plain, focused = (torch.autograd.grad(ml.info_nce(z, w, effect=effect), z)[0] for effect in ("plain", "focus(g=2)"))
    torch.testing.assert_close(focused, 3 * plain)


@pytest.mark.parametrize(
    ("text", "idle", "unbounded"),
    [
        ("plain", False, False),
        ("margin", True, False),
        ("margin(m1=0.4)", False, False),
        ("emphasis", True, False),
        ("emphasis(s=2)", False, False),
        ("ratio(m1=0.4)", False, True),
        ("attenuation(alpha=1)", False, True),
        ("emphasis(s=2) * ratio(m1=0.4)", False, True),
        ("emphasis(s=2) * emphasis(c=3)", False, False),
    ],
)
def test_what_an_effect_says_of_itself(text, idle, unbounded):
    """Idle: it takes numbers, and has none that do anything. Unbounded: its weights are, where beta is below 1."""
    effect = ml.effect(text)
    assert (effect.idle, effect.unbounded) == (idle, unbounded)
