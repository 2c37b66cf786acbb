"""docs/guides/migrate.md, run: the lines to replace and the lines that replace them agree, value and gradient.

lightly cannot be imported beside a torch without torchvision, and the official MoCo v3 is no package: their formulas
are transcribed.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses
from torch import nn

import marginlens as ml
from tests.catalogue import close, gradients, random

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "migrate.md"
N, RANK = 6, 1


class LightlyNTXent:
    """lightly's NTXentLoss: four blocks of similarities without the diagonals, or the bank alone."""

    def __init__(self, temperature, bank=None):
        self.temperature, self.bank = temperature, bank

    def __call__(self, out0, out1):
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        n = len(out0)
        if self.bank is not None:
            positive = torch.einsum("nc,nc->n", out0, out1)[:, None]
            negative = torch.einsum("nc,ck->nk", out0, F.normalize(self.bank, dim=1).T)
            logits = torch.cat([positive, negative], dim=1) / self.temperature
            return F.cross_entropy(logits, torch.zeros(n, dtype=torch.long))
        eye = torch.eye(n, dtype=torch.bool)
        l00, l01, l10, l11 = (
            torch.einsum("nc,mc->nm", a, b) / self.temperature
            for a, b in ((out0, out0), (out0, out1), (out1, out0), (out1, out1))
        )
        l00, l11 = l00[~eye].view(n, -1), l11[~eye].view(n, -1)
        logits = torch.cat([torch.cat([l01, l00], 1), torch.cat([l10, l11], 1)], 0)
        return F.cross_entropy(logits, torch.arange(n).repeat(2))


class Lightly:
    """What the page's snippets name `lightly`."""

    class loss:  # noqa: N801
        @staticmethod
        def NTXentLoss(temperature, memory_bank_size=None):
            return LightlyNTXent(temperature, None if memory_bank_size is None else queue())


def queue():
    return random(9, 4, seed=9)


def world():
    """The names that the snippets use; ranks are stood in for by a batch of keys that is twice as long."""

    class distributed:  # noqa: N801
        get_rank = staticmethod(lambda: RANK)

    class FakeTorch:
        distributed = None

        def __getattr__(self, name):
            return getattr(torch, name)

    fake = FakeTorch()
    fake.distributed = distributed
    other = random(N, 4, seed=8)
    return {
        "torch": fake,
        "nn": nn,
        "F": F,
        "ml": ml,
        "losses": losses,
        "lightly": Lightly,
        "T": 0.2,
        "N": N,
        "queue": queue(),
        "concat_all_gather": lambda k: torch.cat([F.normalize(other, dim=1), k]),
    }


def snippets():
    for block in re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.S):
        yield tuple("\n".join(x[1:] for x in block.splitlines() if x[0] == sign) for sign in "-+")


def run(code, a, b):
    names = world() | {"z1": a, "z2": b, "q": a, "k": b, "p": a, "z": b}
    code = code.replace(".cuda()", "").replace("(4096, 128)", "(9, 4)")
    exec(code, names)
    return names["loss"]


def test_the_page_has_all_five():
    assert len(list(snippets())) == 5


@pytest.mark.parametrize("pair", list(snippets()), ids=lambda pair: pair[0].splitlines()[0][:40])
def test_before_and_after_are_equal(pair):
    a, b = random(N, 4, seed=1), random(N, 4, seed=2)
    want, wanted = gradients(lambda a, b: run(pair[0], a, b), a, b)
    got, found = gradients(lambda a, b: run(pair[1], a, b), a, b)
    assert want != 0
    close(got, want, 1e-12)
    for x, y in zip(found, wanted, strict=True):
        close(x, y, 1e-9)


@pytest.mark.parametrize("n", [2, 7, 40])
@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_pytorch_metric_learning_agrees_on_plain_nt_xent(n, tau):
    theirs = losses.NTXentLoss(temperature=tau)
    a, b = random(n, 5, seed=1), random(n, 5, seed=2)
    labels = torch.arange(n).repeat(2)
    want, wanted = gradients(lambda a, b: theirs(torch.cat([a, b]), labels), a, b)
    for impl in ("reference", "chunked"):
        got, found = gradients(lambda a, b: ml.nt_xent(a, b, tau=tau, impl=impl), a, b)
        close(got, want, 1e-10)
        for x, y in zip(found, wanted, strict=True):
            close(x, y, 1e-9)
