"""Everything refused, with a line that names the argument, its value and what is allowed."""

import math

import pytest
import torch

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Ratio
from tests.catalogue import random

Q, K = random(4, 3, seed=0), random(4, 3, seed=1)
NAN = Q.clone()
NAN[2, 0] = math.nan


def spoilt():
    """An effect whose schedule went astray."""
    s = torch.tensor(2.0)
    effect = Emphasis(s=s)
    s.fill_(-1.0)
    return effect


CASES = {
    "q must be a tensor, not list": (TypeError, lambda: ml.info_nce([[1.0]], K)),
    "q must be a tensor, not NoneType": (TypeError, lambda: ml.info_nce(None, K)),
    "k must be a tensor, not NoneType": (TypeError, lambda: ml.rows(Q, None)),
    "z2 must be a tensor, not NoneType": (TypeError, lambda: ml.NTXent()(Q, None)),
    "z must be a tensor, not NoneType": (TypeError, lambda: ml.positive_only(Q, None)),
    "in_batch must be True or False, not 'no'": (TypeError, lambda: ml.info_nce(Q, K, in_batch="no")),
    "'ratio(m1=1)' is a string; write * marginlens.effect('ratio(m1=1)')": (
        TypeError,
        lambda: Emphasis(s=2) * "ratio(m1=1)",
    ),
    "k must be a tensor, not ndarray": (TypeError, lambda: ml.info_nce(Q, K.numpy())),
    "q has shape (3,); it must be (rows, dim)": (ValueError, lambda: ml.info_nce(Q[0], K)),
    "k has shape (1, 4, 3); it must be (rows, dim)": (ValueError, lambda: ml.info_nce(Q, K[None])),
    "q has dtype torch.int64; embeddings must be floating": (TypeError, lambda: ml.info_nce(Q.long(), K)),
    "z2 has dtype torch.complex64": (TypeError, lambda: ml.nt_xent(Q, K.to(torch.complex64))),
    "k has dimension 2 and q 3; they must be equal": (ValueError, lambda: ml.info_nce(Q, K[:, :2])),
    "its rows have no dimension": (ValueError, lambda: ml.info_nce(Q[:, :0], K[:, :0])),
    "queue has dimension 2 and q 3": (ValueError, lambda: ml.info_nce(Q, K, queue=K[:, :2])),
    "q is an empty batch, of shape (0, 3)": (ValueError, lambda: ml.info_nce(Q[:0], K)),
    "z1 is an empty batch": (ValueError, lambda: ml.nt_xent(Q[:0], K[:0])),
    "p is an empty batch": (ValueError, lambda: ml.positive_only(Q[:0], K[:0])),
    "k is on meta and q on cpu; move one": (ValueError, lambda: ml.info_nce(Q, K.to("meta"))),
    "q has 4 rows and k only 2": (ValueError, lambda: ml.info_nce(Q, K[:2])),
    "z1 has shape (4, 3) and z2 (3, 3); they must pair up": (ValueError, lambda: ml.nt_xent(Q, K[:3])),
    "p has shape (4, 3) and z (3, 3); they must pair up": (ValueError, lambda: ml.positive_only(Q, K[:3])),
    "beta is 1 but no row has a negative; give a larger k": (ValueError, lambda: ml.info_nce(Q[:1], K[:1])),
    "beta is 0.5 but no row has a negative; nt_xent needs two": (
        ValueError,
        lambda: ml.nt_xent(Q[:1], K[:1], beta=0.5),
    ),
    "beta is 1 but no row has a negative; without in_batch, give a queue=": (
        ValueError,
        lambda: ml.info_nce(Q, K, in_batch=False),
    ),
    "ratio(m1=0.2): m1 acts through negatives, and no row has one": (
        ValueError,
        lambda: ml.info_nce(Q[:1], K[:1], beta=0, effect=Ratio(0.2)),
    ),
    "tau is 0; it must be above 0": (ValueError, lambda: ml.info_nce(Q, K, tau=0)),
    "tau is -1; it must be above 0": (ValueError, lambda: ml.info_nce(Q, K, tau=torch.tensor(-1.0))),
    "tau is inf": (ValueError, lambda: ml.info_nce(Q, K, tau=math.inf)),
    "tau is nan": (ValueError, lambda: ml.info_nce(Q, K, tau=math.nan)),
    "tau must be a number or a floating tensor of one element, not '0.1'": (
        TypeError,
        lambda: ml.info_nce(Q, K, tau="0.1"),
    ),
    "tau must be a number or a floating tensor of one element, not True": (
        TypeError,
        lambda: ml.info_nce(Q, K, tau=True),
    ),
    "not torch.float32 of shape (2,)": (TypeError, lambda: ml.info_nce(Q, K, tau=torch.ones(2))),
    "not torch.int64 of shape ()": (TypeError, lambda: ml.InfoNCE(tau=torch.tensor(1))),
    "beta is 1.5; it must be in [0, 1]": (ValueError, lambda: ml.nt_xent(Q, K, beta=1.5)),
    "beta is -0.1": (ValueError, lambda: ml.NTXent(beta=-0.1)),
    "beta is nan": (ValueError, lambda: ml.info_nce(Q, K, beta=math.nan)),
    "beta must be a number, not 'x'": (TypeError, lambda: ml.info_nce(Q, K, beta="x")),
    "beta must be a number, not True": (TypeError, lambda: ml.info_nce(Q, K, beta=True)),
    "Emphasis: s is -1; it must be finite and at least 0": (ValueError, lambda: Emphasis(s=-1)),
    "Emphasis: s is inf": (ValueError, lambda: Emphasis(s=math.inf)),
    "Emphasis: s is nan": (ValueError, lambda: Emphasis(s=math.nan)),
    "Emphasis: c is 0; it must be above 0": (ValueError, lambda: Emphasis(c=0)),
    "Emphasis: c is -2; it must be above 0": (ValueError, lambda: Emphasis(c=torch.tensor(-2.0))),
    "Emphasis: s must be a number or a 0-d floating tensor, not '3'": (TypeError, lambda: Emphasis(s="3")),
    "Emphasis: s must be a number or a 0-d floating tensor, not True": (TypeError, lambda: Emphasis(s=True)),
    "Emphasis: s must be a number or a 0-d floating tensor, not a torch.float32 tensor of shape (1,)": (
        TypeError,
        lambda: Emphasis(s=torch.ones(1)),
    ),
    "Emphasis: s requires a gradient, and a declared weight has none; pass s.detach()": (
        ValueError,
        lambda: Emphasis(s=torch.tensor(2.0, requires_grad=True)),
    ),
    "Attenuation: alpha requires a gradient": (
        ValueError,
        lambda: Attenuation(torch.nn.Parameter(torch.tensor(0.5))),
    ),
    "Emphasis: s is on meta and the embeddings on cpu": (
        ValueError,
        lambda: ml.info_nce(Q, K, effect=Emphasis(s=torch.tensor(2.0, device="meta"))),
    ),
    "tau is on meta and the embeddings on cpu": (
        ValueError,
        lambda: ml.positive_only(Q, K, tau=torch.tensor(0.2, device="meta")),
    ),
    "tau is on meta and the embeddings": (
        ValueError,
        lambda: ml.nt_xent(Q, K, tau=torch.tensor(0.2, device="meta")),
    ),
    "Emphasis: c is on meta and the embeddings on cpu": (
        ValueError,
        lambda: ml.positive_only(Q, K, effect=Emphasis(c=torch.tensor(2.0, device="meta"))),
    ),
    "Margin: m1 is on meta and the embeddings on cpu": (
        ValueError,
        lambda: ml.nt_xent(Q, K, effect=Margin(m1=torch.tensor(2.0, device="meta"))),
    ),
    "Emphasis: s is -1; it must be finite and": (
        ValueError,
        lambda: ml.positive_only(Q, K, effect=spoilt(), check=True),
    ),
    "Emphasis: s is -1; it must be finite": (ValueError, lambda: ml.nt_xent(Q, K, effect=spoilt(), check=True)),
    "q has dtype torch.float8_e4m3fn; embeddings must be floating, 16 bits or more": (
        TypeError,
        lambda: ml.info_nce(Q.to(torch.float8_e4m3fn), K),
    ),
    "unsupported operand type(s) for *": (TypeError, lambda: Emphasis(s=2) * Margin),
    "Margin: m1 is -0.1; it must be in [0, pi]": (ValueError, lambda: Margin(m1=-0.1)),
    "Margin: m1 is 3.2; it must be in [0, pi]": (ValueError, lambda: Margin(m1=3.2)),
    "Margin: m2 is inf; it must be finite": (ValueError, lambda: Margin(m2=math.inf)),
    "Margin: m2 is -inf; it must be finite": (ValueError, lambda: Margin(m2=-math.inf)),
    "Margin: m2 is nan; it must be finite": (ValueError, lambda: Margin(m2=math.nan)),
    "Ratio: m1 is 4; it must be in [0, pi]": (ValueError, lambda: Ratio(m1=4)),
    "Ratio: scope is 'all'; it must be 'positive' or 'row'": (ValueError, lambda: Ratio(m1=1, scope="all")),
    "Attenuation: alpha is 1.1; it must be in [0, 1]": (ValueError, lambda: Attenuation(1.1)),
    "Attenuation: alpha is -0.5": (ValueError, lambda: Attenuation(-0.5)),
    "Attenuation: kind is 'III'; it must be 'I' or 'II'": (ValueError, lambda: Attenuation(1, kind="III")),
    "margin(m1=1) * margin(m2=1): both move": (ValueError, lambda: Margin(m1=1) * Margin(m2=1)),
    "both move the positive's logit": (ValueError, lambda: Margin(m1=1) * Emphasis(s=2) * Margin(m2=1)),
    "effect must be an effect such as Emphasis(s=20)": (TypeError, lambda: ml.info_nce(Q, K, effect=20)),
    "or its string form, not <class": (TypeError, lambda: ml.info_nce(Q, K, effect=Emphasis)),
    "ratio(m1=0.2): m1 acts through negatives": (ValueError, lambda: ml.positive_only(Q, K, effect=Ratio(0.2))),
    "attenuation(alpha=1): alpha acts through negatives": (
        ValueError,
        lambda: ml.positive_only(Q, K, effect=Attenuation(1)),
    ),
    "margin(m2=0.1): m2 acts through negatives": (ValueError, lambda: ml.positive_only(Q, K, effect=Margin(m2=0.1))),
    "emphasis(c=2) * ratio(m1=1): m1 acts through negatives": (
        ValueError,
        lambda: ml.positive_only(Q, K, effect=Emphasis(c=2) * Ratio(1)),
    ),
    "reduction is 'sum'; it must be one of 'mean', 'none'": (ValueError, lambda: ml.info_nce(Q, K, reduction="sum")),
    "impl is 'fast'; it must be one of 'auto', 'reference', 'chunked'": (
        ValueError,
        lambda: ml.nt_xent(Q, K, impl="fast"),
    ),
    "layout is 'clip'": (ValueError, lambda: ml.rows(Q, K, layout="clip")),
    "positives, queue and in_batch belong to layout 'info_nce'": (
        ValueError,
        lambda: ml.rows(Q, K, layout="nt_xent", queue=K),
    ),
    "beta is 0.5; layout 'positive_only' has no negatives": (
        ValueError,
        lambda: ml.rows(Q, K, layout="positive_only", beta=0.5),
    ),
    "positives must be a tensor of indices, not list": (
        TypeError,
        lambda: ml.info_nce(Q, K, positives=[0, 1, 2, 3]),
    ),
    "positives has dtype torch.float64; it must hold integers": (
        TypeError,
        lambda: ml.info_nce(Q, K, positives=torch.arange(4).double()),
    ),
    "positives has dtype torch.bool": (TypeError, lambda: ml.info_nce(Q, K, positives=torch.ones(4).bool())),
    "positives has shape (3,); it must be (4,)": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.arange(3)),
    ),
    "positives is on meta and q on cpu": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.arange(4, device="meta")),
    ),
    "positives goes from 1 to 4; indices of k's rows go from 0 to 3": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.arange(1, 5)),
    ),
    "positives goes from -1 to 2": (ValueError, lambda: ml.info_nce(Q, K, positives=torch.arange(-1, 3))),
    "q has NaN or infinity in 1 of 4 rows: 2": (ValueError, lambda: ml.info_nce(NAN, K, check=True)),
    "z2 has NaN or infinity in 1 of 4 rows": (ValueError, lambda: ml.nt_xent(Q, NAN, check=True)),
    "z has NaN or infinity in 1 of 4 rows": (ValueError, lambda: ml.positive_only(Q, NAN, check=True)),
    "positive_only has none by definition": (ValueError, lambda: ml.positive_only(Q, K, effect=Ratio(0.2))),
    "queue has NaN or infinity in 8 of 8 rows: 0, 1, 2, 3, 4, ...": (
        ValueError,
        lambda: ml.info_nce(Q, K, queue=torch.cat([Q, Q]) * math.inf, check=True),
    ),
}


@pytest.mark.parametrize("line", CASES)
def test_refused(line):
    kind, call = CASES[line]
    with pytest.raises(kind) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_allowed_at_the_border():
    q, k = Q[:1], K[:1]
    ml.info_nce(q, k, beta=0)
    ml.info_nce(q, k, beta=0, effect=Emphasis(c=2))
    ml.info_nce(q, k, queue=K)
    ml.info_nce(Q, K, queue=K[:0])
    ml.nt_xent(q, k, beta=0)
    ml.positive_only(q, k, effect=Margin(m1=math.pi))
    ml.info_nce(Q, K, positives=torch.arange(4, dtype=torch.int32))
    ml.info_nce(Q, K, positives=torch.arange(4).to(torch.uint16))
    ml.info_nce(NAN, K)
    ml.info_nce(Q, K, tau=torch.ones(1), check=True)
    assert Emphasis(s=Q.numpy()[0, 0] ** 2).s == float(Q[0, 0] ** 2)


def test_a_single_key_with_a_queue_has_only_the_queue_for_negatives():
    one = ml.info_nce(Q, K[:1], positives=torch.zeros(4, dtype=torch.long), queue=Q)
    two = ml.info_nce(Q, torch.cat([K[:1], Q]), positives=torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(one, two)
