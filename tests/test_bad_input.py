"""Invalid arguments raise one line with the argument, its value and the allowed values."""

import math
import re
import traceback
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import marginlens as ml
from marginlens import Attenuation, Emphasis, Margin, Ratio
from tests.catalogue import gradients, random

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
    "tau is -0.5; it must be above 0, from 1e-06 to 1e+06; learn its logarithm instead, which stays in range: "
    "tau=log_tau.exp()": (ValueError, lambda: ml.info_nce(Q, K, tau=torch.tensor(-0.5, requires_grad=True))),
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
    "one element, not a torch.float32 tensor of shape (2,)": (TypeError, lambda: ml.info_nce(Q, K, tau=torch.ones(2))),
    "one element, not a torch.int64 tensor of shape ()": (TypeError, lambda: ml.InfoNCE(tau=torch.tensor(1))),
    "beta is 1.5; it must be in [0, 1]": (ValueError, lambda: ml.nt_xent(Q, K, beta=1.5)),
    "beta is -0.1": (ValueError, lambda: ml.NTXent(beta=-0.1)),
    "beta is nan": (ValueError, lambda: ml.info_nce(Q, K, beta=math.nan)),
    "beta must be a number, not 'x'": (TypeError, lambda: ml.info_nce(Q, K, beta="x")),
    "beta must be a number, not True": (TypeError, lambda: ml.info_nce(Q, K, beta=True)),
    "Emphasis: s is -1; it must be from 0 to 1e+06": (ValueError, lambda: Emphasis(s=-1)),
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
    "Emphasis: s is -1; it must be from 0 to": (
        ValueError,
        lambda: ml.positive_only(Q, K, effect=spoilt(), check=True),
    ),
    "Emphasis: s is -1; it must be from 0": (ValueError, lambda: ml.nt_xent(Q, K, effect=spoilt(), check=True)),
    "q has dtype torch.float8_e4m3fn; embeddings must be floating, 16 bits or more": (
        TypeError,
        lambda: ml.info_nce(Q.to(torch.float8_e4m3fn), K),
    ),
    "unsupported operand type(s) for *": (TypeError, lambda: Emphasis(s=2) * Margin),
    "Margin: m1 is -0.1; it must be in [0, pi]": (ValueError, lambda: Margin(m1=-0.1)),
    "Margin: m1 is 3.2; it must be in [0, pi]": (ValueError, lambda: Margin(m1=3.2)),
    "Margin: m2 is inf; it must be from -1e+06 to 1e+06": (ValueError, lambda: Margin(m2=math.inf)),
    "Margin: m2 is -inf; it must be from": (ValueError, lambda: Margin(m2=-math.inf)),
    "Margin: m2 is nan; it must be from": (ValueError, lambda: Margin(m2=math.nan)),
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
    "positives has shape (4, 4) and dtype torch.bool; it takes one index per row of q, so (4,) integers": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.eye(4).bool()),
    ),
    "supports one positive per row, neither a mask nor several indices": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.zeros(4, 2, dtype=torch.long)),
    ),
    "from 3 to 9; indices of k's rows go from 0 to 3, and class labels are not such indices": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.tensor([3, 9, 9, 3])),
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
    "tau is 1e-39; it must be above 0, from 1e-06 to 1e+06": (ValueError, lambda: ml.nt_xent(Q, K, tau=1e-39)),
    "tau is 9.9e-07; it must be above 0, from 1e-06": (ValueError, lambda: ml.info_nce(Q, K, tau=9.9e-7)),
    "tau is 1000000.0000001; it must be above 0, from 1e-06 to 1e+06": (
        ValueError,
        lambda: ml.info_nce(Q, K, tau=1e6 + 1e-7),
    ),
    "..., beyond the largest float; it must be above 0, from 1e-06 to 1e+06": (
        ValueError,
        lambda: ml.info_nce(Q, K, tau=10**400),
    ),
    "tau is Fraction(1000": (ValueError, lambda: ml.InfoNCE(tau=Fraction(10**400))),
    "not Decimal('0.3')": (TypeError, lambda: ml.positive_only(Q, K, tau=Decimal("0.3"))),
    "beta is -1000": (ValueError, lambda: ml.rows(Q, K, beta=-(10**400))),
    "beta is 0.333333; layout 'positive_only' has no negatives": (
        ValueError,
        lambda: ml.rows(Q, K, layout="positive_only", beta=Fraction(1, 3)),
    ),
    "Emphasis: s is 1e+39; it must be from 0 to 1e+06": (ValueError, lambda: Emphasis(s=1e39)),
    "Emphasis: c is 1e+38; it must be above 0, from 1e-09 to 1e+09, or inf: no curvature": (
        ValueError,
        lambda: Emphasis(c=torch.tensor(1e38)),
    ),
    "Emphasis: c is 1e-46; it must be above 0": (ValueError, lambda: Emphasis(c=1e-46)),
    "Margin: m2 is 3e+38; it must be from -1e+06 to 1e+06": (ValueError, lambda: Margin(m2=3e38)),
    "emphasis(s=10000) * plain * emphasis(s=10000): its s multiply to 1e+08": (
        ValueError,
        lambda: Emphasis(s=1e4) * ml.Plain() * Emphasis(s=torch.tensor(1e4)),
    ),
    "check must be True or False, not 'no'": (TypeError, lambda: ml.nt_xent(Q, K, check="no")),
    "in_batch must be True or False, not 2": (TypeError, lambda: ml.InfoNCE(in_batch=2)),
    "reduction is array([1, 2]); it must be one of": (
        ValueError,
        lambda: ml.info_nce(Q, K, reduction=np.array([1, 2])),
    ),
    "q has layout torch.sparse_coo; it must be dense: use .to_dense()": (
        TypeError,
        lambda: ml.info_nce(Q.to_sparse(), K),
    ),
    "positives has layout torch.sparse_coo": (
        TypeError,
        lambda: ml.info_nce(Q, K, positives=torch.arange(4).to_sparse()),
    ),
    "Margin: m1 has layout torch.sparse_coo": (TypeError, lambda: Margin(m1=torch.tensor(0.3).to_sparse())),
    "z2 is uninitialized, as a lazy module's are": (TypeError, lambda: ml.nt_xent(Q, nn.UninitializedParameter())),
    "k is a FakeTensor outside of its FakeTensorMode": (
        TypeError,
        lambda: ml.info_nce(Q, FakeTensorMode().from_tensor(K)),
    ),
    "q is on the meta device, so check=True has no values to look at": (
        ValueError,
        lambda: ml.info_nce(Q.to("meta"), K.to("meta"), check=True),
    ),
    "tau is on the meta device, so check=True": (
        ValueError,
        lambda: ml.InfoNCE(tau=torch.tensor(0.3, device="meta"), check=True),
    ),
    "tau is on cpu and learns, but the embeddings are on meta": (
        ValueError,
        lambda: ml.info_nce(Q.to("meta"), K.to("meta"), tau=nn.Parameter(torch.tensor(0.3))),
    ),
    "q is batched by torch.vmap, so check=True": (
        ValueError,
        lambda: torch.func.vmap(lambda q: ml.info_nce(q, K, check=True))(Q[None]),
    ),
    "z1 has no entry above 1e-31 in 1 of 4 rows: 2; no gradient is finite there": (
        ValueError,
        lambda: ml.nt_xent(
            torch.eye(4)[[0, 1, 2, 3]] * torch.tensor([1, 1, 1e-40, 1])[:, None], torch.eye(4), check=True
        ),
    ),
    "positives goes, read as int64, from -1 to 2": (
        ValueError,
        lambda: ml.info_nce(Q, K, positives=torch.tensor([0, 1, 2, 2**64 - 1], dtype=torch.uint64)),
    ),
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


class Odd:
    """A stranger's object, which cannot even be shown."""

    def __repr__(self):
        raise RuntimeError


VALUES = {
    **{repr(x): x for x in (0, -0.0, 5e-324, 1e-46, 1e-39, 1e-12, 1e-6, 0.3, 1, 1e6, 1e12, 1e38, 1e39, 1e300)},
    **{repr(x): x for x in (-1e-39, -1e38, -1e39, -1e300, math.nan, math.inf, -math.inf, None, True, 1j, "0.3", b"1")},
    **{repr(x): x for x in ([0.3], {}, float, Fraction(1, 3), Fraction(1, 10**400), Decimal("0.3"), Decimal("nan"))},
    **{repr(x): x for x in (np.float32(0.3), np.float64(1e39), np.int64(1), np.bool_(True), np.array([1, 2]))},
    "10**400": 10**400,
    "-10**400": -(10**400),
    "10**5000": 10**5000,
    "Fraction(10**400)": Fraction(10**400),
    "two lines": np.zeros((2, 2)),
    "long": "x" * 10**4,
    "odd": Odd(),
}
KINDS = {
    **{f"of {x:g}": lambda t, x=x: torch.full_like(t, x) for x in (1e-45, 1e-39, 1e38, -1e38, 0.0, math.nan, math.inf)},
    **{f"of {x:g}, float64": lambda t, x=x: torch.full_like(t, x, dtype=torch.float64) for x in (1e-310, 1e39, 1e300)},
    **{
        str(d): lambda t, d=d: t.to(d)
        for d in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    **{str(d): lambda t, d=d: t.to(d) for d in (torch.float16, torch.bfloat16, torch.float64)},
    "sparse": lambda t: t.to_sparse(),
    "CSR": lambda t: torch.eye(4, 3).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t.flatten()]),
    "jagged": lambda t: torch.nested.nested_tensor([t.flatten()], layout=torch.jagged),
    "MKL-DNN": lambda t: t.reshape(-1, 1).to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "meta": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "uninitialized": lambda t: nn.UninitializedParameter(),
    "negative view": lambda t: torch._neg_view(-t),
    "imaginary part of a conjugate": lambda t: torch.complex(t, -t).conj().imag,
    "expanded": lambda t: t.flatten()[0].expand(t.shape),
    "learns": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: nn.Parameter(t.clone()),
    "one element": lambda t: t.flatten()[:1],
    "two elements": lambda t: torch.ones(2),
    "empty": lambda t: t.reshape(-1)[:0],
    "no rows": lambda t: t[:0] if t.dim() else t,
    "no columns": lambda t: t[..., :0] if t.dim() else t,
    "one row": lambda t: t[:1] if t.dim() else t,
    "three dimensions": lambda t: t[None],
    "class": lambda t: torch.Tensor,
}
NUMBERS = {
    "tau": lambda q, k, x: [
        ml.info_nce(q, k, tau=x),
        ml.nt_xent(q, k, tau=x),
        ml.positive_only(q, k, tau=x),
        ml.InfoNCE(tau=x)(q, k),
        *([] if x is None else ml.rows(q, k, tau=x)),
    ],
    "beta": lambda q, k, x: [ml.info_nce(q, k, beta=x), ml.NTXent(beta=x)(q, k)],
    **{
        name: lambda q, k, x, make=make: [
            ml.info_nce(q, k, effect=(effect := make(x))),
            ml.nt_xent(q, k, effect=effect),
            *ml.rows(q, k, effect=effect),
            *([] if effect.needs_negatives else [ml.positive_only(q, k, effect=effect)]),
        ]
        for name, make in {
            "s": lambda x: Emphasis(s=x),
            "c": lambda x: Emphasis(c=x) * Margin(m1=0.3),
            "m1": lambda x: Margin(m1=x),
            "m2": lambda x: Margin(m2=x) * Emphasis(s=20, c=2.5),
            " m1": lambda x: Ratio(m1=x, scope="row"),
            "alpha": Attenuation,
        }.items()
    },
}
WORDS = {
    "effect": lambda q, k, x: [ml.info_nce(q, k, effect=x)],
    " effect": lambda q, k, x: [ml.effect(x)],
    "reduction": lambda q, k, x: [ml.info_nce(q, k, reduction=x)],
    "impl": lambda q, k, x: [ml.NTXent(impl=x)(q, k)],
    "check": lambda q, k, x: [ml.positive_only(q, k, check=x)],
    "in_batch": lambda q, k, x: [ml.InfoNCE(in_batch=x)(q, k, queue=k)],
    "layout": lambda q, k, x: [ml.rows(q, k, layout=x).loss],
    "scope": lambda q, k, x: [Ratio(m1=0.3, scope=x)],
    "kind": lambda q, k, x: [Attenuation(0.3, kind=x)],
}
EMBEDDINGS = {
    "q": lambda q, k, x, check: [ml.info_nce(x, k, check=check), ml.InfoNCE(check=check)(x, k)],
    "k": lambda q, k, x, check: [ml.info_nce(q, x, check=check)],
    "queue": lambda q, k, x, check: [] if x is None else [ml.info_nce(q, k, queue=x, check=check)],
    "z1": lambda q, k, x, check: [ml.nt_xent(x, k, check=check)],
    "z2": lambda q, k, x, check: [ml.nt_xent(q, x, check=check)],
    "p": lambda q, k, x, check: [ml.positive_only(x, k, check=check)],
    "z": lambda q, k, x, check: [ml.positive_only(q, x, check=check)],
}


def refused_or_finite(names, call, x):
    """A `ValueError` or `TypeError` of ours that names the argument on one short line, or finite numbers throughout."""
    q, k = (t.float().requires_grad_() for t in (Q, K))
    try:
        given = call(q, k, x)
    except (ValueError, TypeError) as error:
        line, where = str(error), traceback.extract_tb(error.__traceback__)[-1].filename
        assert any(re.search(rf"(?<![\w'.]){name.strip()}\b", line) for name in names), line
        assert "marginlens" in where, where
        assert "\n" not in line
        assert len(line) < 700
        return
    values = [value for value in given if isinstance(value, torch.Tensor)]
    leaves = [q, k, *([x] if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf else [])]
    for value in values:
        where = value == -math.inf if len(values) > 1 and len(given) > 1 else torch.zeros_like(value, dtype=torch.bool)
        assert torch.isfinite(value[~where]).all()
        if value.requires_grad:
            grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
            assert all(g is None or torch.isfinite(g).all() for g in grads)


def odd(kind, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and betas, which torch warns of
        return KINDS[kind](x)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [*NUMBERS, *WORDS])
def test_a_hostile_value_is_refused_by_name_or_harmless(name, value):
    refused_or_finite([name], (NUMBERS | WORDS)[name], VALUES[value])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*NUMBERS, *WORDS])
def test_a_hostile_tensor_in_the_place_of_a_number_or_a_word(name, kind):
    refused_or_finite([name], (NUMBERS | WORDS)[name], odd(kind, torch.tensor(0.3)))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_hostile_tensor_in_the_place_of_embeddings(name, kind, check):
    """Those of NaN, and those too short for a finite gradient, are looked for on request."""
    if not check and kind in ("of nan", "of inf", "of 1.4013e-45", "of 1e-39", "of 1e-310, float64"):
        pytest.skip("values are not looked at")
    names = {"queue": ["queue"], "q": ["q", "k"], "k": ["k", "q"]}.get(name, [name, "z1", "z2", "z", "beta"])
    call = EMBEDDINGS[name]
    refused_or_finite([*names, "positives"], lambda q, k, x: call(q, k, x, check), odd(kind, Q.float()))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_what_is_no_tensor_in_the_place_of_embeddings(name):
    for x in VALUES.values():
        refused_or_finite([name], lambda q, k, x: EMBEDDINGS[name](q, k, x, False), x)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_tensor_in_the_place_of_positives(kind, check):
    call = lambda q, k, x: [ml.info_nce(q, k, positives=x, check=check)]
    for index in (torch.arange(4), torch.arange(4.0), torch.tensor([0, 1, 2, 4]), torch.tensor([0, -1, 2, 3])):
        try:
            x = odd(kind, index)
        except (RuntimeError, TypeError):  # there is none of these integers
            x = odd(kind, index.float())
        refused_or_finite(["positives"], call, x)


def test_positives_of_every_integer_type():
    want = ml.info_nce(Q, K, positives=torch.tensor([3, 1, 0, 2]))
    for bits in (8, 16, 32, 64):
        for kind in ("int", "uint"):
            index = torch.tensor([3, 1, 0, 2]).to(getattr(torch, f"{kind}{bits}"))
            assert ml.info_nce(Q, K, positives=index, check=True) == want


@pytest.mark.parametrize(
    "view", [lambda x: torch._neg_view(-x), lambda x: torch.complex(x, -x).conj().imag, lambda x: x[:1].expand(4, 3)]
)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_views_count_as_what_they_show(view, impl):
    x = view(Q)
    for loss in (ml.info_nce, ml.nt_xent):
        want, wanted = gradients(lambda q: loss(q, K, effect=Margin(0.3), impl=impl), x.contiguous())
        got, found = gradients(lambda q: loss(view(q), K, effect=Margin(0.3), impl=impl), Q)
        torch.testing.assert_close(got, want)
        assert torch.isfinite(found[0]).all()
        assert torch.isfinite(wanted[0]).all()


def test_numbers_of_every_kind_are_the_float_that_they_are():
    for x in (Fraction(1, 4), np.float32(0.25), np.float64(0.25), np.float16(0.25), np.longdouble(0.25)):
        assert ml.info_nce(Q, K, tau=x) == ml.info_nce(Q, K, tau=0.25)
        assert ml.info_nce(Q, K, beta=x) == ml.info_nce(Q, K, beta=0.25)
        assert "tau=0.25, beta=0.25, effect=margin(m1=0.25)" in repr(ml.NTXent(tau=x, beta=x, effect=Margin(m1=x)))
        for effect in (Emphasis(s=x, c=x), Margin(m1=x, m2=x), Ratio(m1=x), Attenuation(alpha=x)):
            assert ml.effect(str(effect)) == effect
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    for make in (ml.MoCoV3, ml.SimCLR, ml.BYOL):
        method = make(backbone, size=2, hidden=4, tau=Fraction(1, 4))
        assert (method.tau, type(method.tau)) == (0.25, float)
        with pytest.raises(ValueError, match=r"tau is 1000.*\.\.\., beyond the largest float"):
            make(backbone, size=2, hidden=4, tau=10**400)
    assert ml.MoCoV3(backbone, size=2, hidden=4, tau=Fraction(1, 4), two_tau=True).scale == 0.5


def test_a_bound_rounded_to_its_dtype_is_no_trespass():
    """pi in float32 is above pi, and 1e-6 in bfloat16 below 1e-6."""
    assert torch.isfinite(ml.info_nce(Q, K, effect=Margin(m1=torch.tensor(math.pi))))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.isfinite(ml.info_nce(Q, K, tau=torch.tensor(1e-6, dtype=dtype)))
    with pytest.raises(ValueError, match=r"Attenuation: alpha is 1\.0000001"):
        Attenuation(torch.tensor(1 + 2**-23))


@pytest.mark.parametrize("value", [-1.0, 1e38, math.nan])
def test_a_tensor_that_left_its_range_is_refused_where_it_can_be_read(value):
    tensor = torch.tensor(0.5)
    for name, effect in {
        "s": Emphasis(s=tensor),
        "c": Emphasis(s=2) * Emphasis(c=tensor),
        "m1": Margin(m1=tensor),
        "alpha": Attenuation(tensor),
    }.items():
        tensor.fill_(0.5)
        ml.info_nce(Q, K, effect=effect)
        tensor.fill_(value)
        with pytest.raises(ValueError, match=rf": {name} is (-1|1e\+38|nan); it must be"):
            ml.info_nce(Q, K, effect=effect)
    scales = torch.tensor(2.0), torch.tensor(2.0)
    effect = Emphasis(s=scales[0]) * Emphasis(s=scales[1])
    for s in scales:
        s.fill_(1e4)
    with pytest.raises(ValueError, match=r"its s multiply to 1e\+08"):
        ml.info_nce(Q, K, effect=effect)


def test_a_temperature_too_small_is_nan_where_it_is_not_looked_at():
    taus = torch.tensor([1e-39, 1e-6, 0.25], dtype=torch.float32)
    found = torch.func.vmap(lambda t: ml.info_nce(Q.float(), K.float(), tau=t, impl="reference"))(taus)
    assert found.isnan().tolist() == [True, False, False]


def test_shapes_without_values():
    """Numbers that cannot be read are taken on trust, and shown as "?"."""
    tau, s = (torch.tensor(0.3, device="meta") for _ in range(2))
    module = ml.InfoNCE(tau=tau, effect=Emphasis(s=s, c=2.5))
    assert "tau=?, beta=1.0, effect=emphasis(s=?, c=2.5)" in repr(module)
    assert module(Q.to("meta"), K.to("meta")).shape == ()
    with pytest.raises(ValueError, match=r"emphasis\(s=\?\): without negatives s multiplies"):
        ml.BYOL(nn.Flatten(), features=3, effect=Emphasis(s=s))
    mode = FakeTensorMode()
    real = torch.tensor(0.3)
    q, k, t = (mode.from_tensor(x) for x in (Q, K, real))
    with mode:
        assert ml.info_nce(q, k, tau=t, effect=Emphasis(s=t), reduction="none").shape == (4,)
        assert ml.rows(q, k, layout="nt_xent", effect=Margin(m1=t)).f.shape == (8,)
        with pytest.raises(TypeError, match="of k and q one is a FakeTensor; pass the other through"):
            ml.info_nce(q, K)
        with pytest.raises(TypeError, match="of tau and the embeddings one is a FakeTensor"):
            ml.info_nce(q, k, tau=real)
        with pytest.raises(ValueError, match="q is a FakeTensor, so check=True"):
            ml.info_nce(q, k, check=True)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_temperature_is_traced_and_not_read(mode):
    call = lambda q, k, t, m: ml.info_nce(q, k, tau=t, effect=Margin(m1=m), impl="reference")
    numbers = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    graph = make_fx(call, tracing_mode=mode)(Q, K, *numbers)
    other = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    torch.testing.assert_close(graph(Q, K, *other), call(Q, K, *other))
