"""Each method against its definition: heads written out, an explicit matrix of similarities, cross-entropy, autograd.

Only the backbone comes from the package. All is float64, so a difference is a wrong rule and not rounding.
"""

import copy
import math
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marginlens import Emphasis, Margin
from marginlens.methods import BYOL, METHODS, MoCoV3, SimCLR
from marginlens.nets import encoder
from marginlens.nets.split_norm import apart, count_once, in_parts, together
from tests.catalogue import EFFECTS, random

N, HIDDEN, OUT = 8, 16, 8
TEACHERS = [MoCoV3, BYOL]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}

EVERY = [
    {},
    {"last_bn": True},
    {"last_bn": False},
    {"bias": False},
    {"bias": False, "last_bn": True},
    {"bn_splits": 2},
    {"bn_splits": 4, "last_bn": True},
    {"tau": 0.1},
    {"effect": "margin(m1=0.4)"},
    {"effect": "emphasis(c=2.5)"},
    {"effect": "emphasis(c=0.5) * margin(m1=0.3)"},
]
WITH_NEGATIVES = [
    {"beta": 0.5},
    {"beta": 0.3, "effect": "margin(m1=0.4, m2=0.2)"},
    {"beta": 0.6, "effect": "emphasis(s=5)"},
    {"effect": "margin(m1=0.4, m2=0.2)"},
    {"effect": "margin(m2=0.3)"},
    {"effect": "emphasis(s=5)"},
    {"effect": "emphasis(s=20, c=2.5)", "tau": 0.2},
    {"effect": "ratio(m1=0.4)"},
    {"effect": "ratio(m1=0.8, scope=row)"},
    {"effect": "attenuation(alpha=0.5)"},
    {"effect": "attenuation(alpha=1, kind=II)"},
    {"effect": "emphasis(s=3, c=1) * margin(m1=0.4, m2=0.2)"},
    {"effect": "emphasis(s=5) * ratio(m1=0.4) * attenuation(alpha=0.5)"},
    {"effect": "emphasis(s=5)", "impl": "reference"},
    {"effect": "emphasis(s=5)", "impl": "chunked"},
]
WITH_TEACHER = [
    {"symmetric": True},
    {"symmetric": True, "last_bn": True, "effect": "margin(m1=0.2)"},
    {"symmetric": True, "bn_splits": 2},
    {"predictor_bn": True},
    {"predictor_bn": False},
    {"predictor_bn": True, "bias": False},
    {"predictor_bn": False, "bias": False, "last_bn": True},
]
MOCO = [
    {"two_tau": True},
    {"two_tau": True, "tau": 0.1, "beta": 0.5},
    {"two_tau": True, "symmetric": True, "effect": "emphasis(s=5)", "bias": False},
]
CASES = [
    *((MoCoV3, options) for options in EVERY + WITH_NEGATIVES + WITH_TEACHER + MOCO),
    *((SimCLR, options) for options in EVERY + WITH_NEGATIVES),
    *((BYOL, options) for options in EVERY + WITH_TEACHER),
]


def named(value):
    """An id of a test."""
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "default"
    return value.__name__ if isinstance(value, type) else str(value)


def make(cls, **options):
    """A method in float64, its teacher away from its student, or an exchange of the two would not show."""
    torch.manual_seed(0)
    method = cls(encoder("tiny"), hidden=HIDDEN, out=OUT, **options).double()
    if hasattr(method, "teacher"):
        with torch.no_grad():
            for p in method.teacher.parameters():
                p.add_(0.2 * p.std().nan_to_num(1.0) * torch.randn_like(p))
    return method


def images(n=N):
    """A strong and a weak view: of the same images, unlike enough for an exchange to show."""
    weak = random(n, 3, 16, 16, seed=1)
    return [1.5 * weak + random(n, 3, 16, 16, seed=2) + 0.3, weak]


def head(layers, x, last_bn, bias):
    """Linear, batch norm, ReLU, linear, and perhaps a batch norm without affine parameters, from their tensors."""
    first, norm, _, second, *rest = layers
    assert len(rest) == last_bn
    assert all((layer.bias is not None) == bias for layer in (first, second))
    x = F.relu(normed(norm, F.linear(x, first.weight, first.bias), norm.weight, norm.bias))
    x = F.linear(x, second.weight, second.bias)
    return normed(rest[0], x) if rest else x


def normed(norm, x, weight=None, bias=None):
    norm.num_batches_tracked += 1
    return F.batch_norm(x, norm.running_mean, norm.running_var, weight, bias, training=True)


def read(effect):
    """'emphasis(s=5) * ratio(m1=0.4)' -> {'emphasis': {'s': '5'}, 'ratio': {'m1': '0.4'}}"""
    found = {}
    for factor in effect.split(" * "):
        name, _, inside = factor.rstrip(")").partition("(")
        found[name] = dict(pair.split("=") for pair in inside.split(", ") if pair)
    return found


def times(weight, x):
    """x, whose gradient is multiplied."""
    return weight.detach() * x - (weight.detach() - 1) * x.detach()


def contrast(logits, index, tau, beta, effect):
    """Mean over rows of -b + beta * log sum e^logits, where b is the entry `index`; by the paper's pseudo-code.

    Entries that are -inf are left out of the sum.
    """
    asked, here = read(effect), F.one_hot(index, logits.shape[1]).bool()
    c = logits[here] * tau
    theta = torch.arccos(c)
    with torch.no_grad():
        plain = torch.logsumexp(logits, 1)
        positive, row = torch.ones_like(c), torch.ones_like(c)
        if "emphasis" in asked:
            s, curve = (float(asked["emphasis"].get(key, default)) for key, default in (("s", 1), ("c", math.inf)))
            gamma = torch.ones_like(c) if math.isinf(curve) else (1 - (theta / math.pi) ** curve) ** (1 / curve)
            positive = positive * s * gamma
        if "ratio" in asked:
            shifted = torch.where(here, (torch.cos(theta + float(asked["ratio"]["m1"])) / tau)[:, None], logits)
            ratio = torch.exp(plain - torch.logsumexp(shifted, 1))
            positive, row = (positive, row * ratio) if "scope" in asked["ratio"] else (positive * ratio, row)
        if "attenuation" in asked:
            factor = 1 / (1 - float(asked["attenuation"]["alpha"]) * torch.exp(c / tau - plain))
            positive, row = (positive * factor, row) if "kind" in asked["attenuation"] else (positive, row * factor)
    margin = {key: float(value) for key, value in asked.get("margin", {}).items()}
    b = torch.cos(theta + margin.get("m1", 0.0)) - margin.get("m2", 0.0) if margin else c
    b = times(positive, b / tau)
    moved = torch.where(here, b[:, None], logits)
    values = F.cross_entropy(moved, index, reduction="none") if beta == 1 else beta * moved.logsumexp(1) - b
    return times(row, values).mean()


def moco_loss(q, k, tau=0.25, beta=1.0, effect="plain"):
    logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).T / tau
    return contrast(logits, torch.arange(len(q)), tau, beta, effect)


def simclr_loss(z1, z2, tau=0.25, beta=1.0, effect="plain"):
    z, n = F.normalize(torch.cat([z1, z2]), dim=1), len(z1)
    logits = (z @ z.T / tau).masked_fill(torch.eye(2 * n, dtype=torch.bool), -math.inf)
    return contrast(logits, torch.arange(2 * n).roll(n), tau, beta, effect)


def byol_loss(p, z, tau=0.5, effect="plain"):
    """One entry to a row, its positive, and beta = 0."""
    logits = (F.normalize(p, dim=1) * F.normalize(z, dim=1)).sum(1, keepdim=True) / tau
    return contrast(logits, torch.zeros(len(p), dtype=torch.long), tau, 0.0, effect)


def by_hand(
    twin, views, last_bn=None, bias=True, predictor_bn=None, bn_splits=1, symmetric=False, two_tau=False, **rest
):
    """The loss of a copy of a method, of which nothing but the backbones is called."""
    cls, (strong, weak) = type(twin), views
    last_bn, predictor_bn = (cls is MoCoV3 if given is None else given for given in (last_bn, predictor_bn))
    rest.pop("impl", None)
    near, far = torch.arange(N).chunk(bn_splits), [torch.arange(N)[i::bn_splits] for i in range(bn_splits)]

    def embed(net, x, parts):
        """Each part passes alone, and every image finds its place again."""
        features = torch.cat([net["backbone"](x[part]) for part in parts])
        return head(net["projector"], features[torch.cat(list(parts)).argsort()], last_bn, bias)

    if cls is SimCLR:
        return simclr_loss(embed(twin.student, strong, near), embed(twin.student, weak, far), **rest)
    total = 0.0
    for seen, other in [(strong, weak), (weak, strong)] if symmetric else [(strong, weak)]:
        with torch.no_grad():
            target = embed(twin.teacher, other, far)
        guess = head(twin.predictor, embed(twin.student, seen, near), predictor_bn, bias)
        total = total + (moco_loss if cls is MoCoV3 else byol_loss)(guess, target, **rest)
    return total * 2 * rest.get("tau", 0.25) if two_tau else total


@pytest.mark.parametrize(("cls", "options"), CASES, ids=named)
def test_a_step_is_what_the_definition_says(cls, options):
    method, views = make(cls, **options), images()
    twin = copy.deepcopy(method)
    loss, want = method.loss(views), by_hand(twin, views, **options)
    torch.testing.assert_close(loss, want, **CLOSE)
    loss.backward()
    want.backward()
    ours, theirs = dict(method.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        if name.startswith("teacher."):
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, theirs[name].grad, **CLOSE, msg=lambda text: f"{name}: {text}")
    assert max(p.grad.abs().max() for p in method.backbone.parameters()) > 1e-3
    seen = dict(twin.named_buffers())
    for name, buffer in method.named_buffers():
        torch.testing.assert_close(buffer, seen[name], **CLOSE, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("cls", TEACHERS, ids=named)
@pytest.mark.parametrize(
    ("own", "given", "momentum"),
    [
        ({}, None, 0.99),
        ({"momentum": 0.6}, None, 0.6),
        ({"momentum": 0.6}, 0.9, 0.9),
        ({}, 0.0, 0.0),
        ({}, torch.tensor(0.9, dtype=torch.float64), 0.9),
        ({}, torch.tensor(0.75), 0.75),
    ],
)
def test_the_teacher_follows_the_student(cls, own, given, momentum):
    method = make(cls, **own)
    method.loss(images()).backward()
    with torch.no_grad():
        for p in method.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    before = copy.deepcopy(method.state_dict())
    method.after_step() if given is None else method.after_step(given)
    parameters = {name for name, _ in method.named_parameters()}
    for name, value in method.state_dict().items():
        if name.startswith("teacher.") and name in parameters:
            trailing = momentum * before[name] + (1 - momentum) * before[name.replace("teacher", "student")]
            assert (value - trailing).abs().max() < 1e-10
            assert not torch.equal(value, before[name])
        else:
            assert torch.equal(value, before[name]), name


def test_simclr_has_no_teacher_to_move():
    method = make(SimCLR)
    before = copy.deepcopy(method.state_dict())
    method.after_step()
    method.after_step(0.5)
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())
    assert not hasattr(method, "teacher")


@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_what_learns(cls):
    method = make(cls)
    learning = {name.split(".")[0] for name, p in method.named_parameters() if p.requires_grad}
    resting = {name.split(".")[0] for name, p in method.named_parameters() if not p.requires_grad}
    assert learning == {"student", "predictor"} & dict(method.named_children()).keys()
    assert resting == {"teacher"} & dict(method.named_children()).keys()
    assert all(p.requires_grad for p in method.backbone.parameters())
    for _ in range(2):
        method.loss(images()).backward()
        method.after_step()
    if hasattr(method, "teacher"):
        assert not any(p.requires_grad or p.grad is not None for p in method.teacher.parameters())


@pytest.mark.parametrize("cls", TEACHERS, ids=named)
def test_a_new_teacher_is_its_student(cls):
    method = cls(encoder("tiny"), hidden=HIDDEN, out=OUT)
    for ours, theirs in zip(method.student.state_dict().values(), method.teacher.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("cls", "tau", "last_bn"), [(MoCoV3, 0.25, True), (SimCLR, 0.25, False), (BYOL, 0.5, False)], ids=named
)
def test_defaults(cls, tau, last_bn):
    method = cls(nn.Flatten(), features=3)
    norms = [m for m in method.student["projector"] if isinstance(m, nn.BatchNorm1d)]
    assert [norm.affine for norm in norms] == ([True, False] if last_bn else [True])
    assert method.settings["tau"] == tau
    assert str(method.settings["effect"]) == "plain"
    assert [m.out_features for m in method.student["projector"] if isinstance(m, nn.Linear)] == [2048, 128]
    assert cls is BYOL or method.settings["beta"] == 1.0
    if cls is not SimCLR:
        assert [m.out_features for m in method.predictor if isinstance(m, nn.Linear)] == [2048, 128]
        assert method.momentum == 0.99
        assert not method.symmetric


class SplitBatchNorm(nn.BatchNorm1d):
    """As MoCo's code for CIFAR has it: every k-th row makes a part, and running statistics take the parts' mean."""

    def __init__(self, width, parts):
        super().__init__(width)
        self.parts = parts

    def forward(self, x):
        mean, var = self.running_mean.repeat(self.parts), self.running_var.repeat(self.parts)
        affine = (self.weight.repeat(self.parts), self.bias.repeat(self.parts))
        out = F.batch_norm(x.reshape(-1, x.shape[1] * self.parts), mean, var, *affine, True, self.momentum, self.eps)
        self.running_mean.copy_(mean.view(self.parts, -1).mean(0))
        self.running_var.copy_(var.view(self.parts, -1).mean(0))
        return out.view_as(x)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_are_those_of_a_split_batch_norm(parts):
    """To the last digit in what comes out, and to second order of the momentum in running statistics."""
    ours, theirs, rows = nn.BatchNorm1d(5), SplitBatchNorm(5, parts), random(40, 64, 5, seed=0, dtype=torch.float32)
    count_once(ours, parts)
    for x in rows:
        found = together(in_parts(ours, apart(3 * x + 2, parts), 64 // parts), parts)
        torch.testing.assert_close(found, theirs(3 * x + 2))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=0.02, atol=0.02)


def test_one_method_after_another_divides_a_momentum_once():
    norm = nn.BatchNorm1d(5)
    for parts in (8, 8, 2, 1):
        count_once(norm, parts)
        assert norm.momentum == 0.1 / parts
    norm.momentum = 0.3
    count_once(norm, 4)
    assert norm.momentum == 0.3 / 4


@pytest.mark.parametrize(("n", "parts"), [(64, 8), (256, 8), (16, 4), (8, 2)])
def test_two_parts_share_as_few_images_as_by_chance(n, parts):
    there = apart(torch.arange(n), parts)
    assert torch.equal(together(there, parts), torch.arange(n))
    shared = torch.zeros(parts, parts, dtype=torch.long)
    shared.index_put_((torch.arange(n) * parts // n, there.argsort() * parts // n), torch.tensor(1), accumulate=True)
    assert (shared == n // parts**2).all()


def test_parts_keep_the_layout_of_the_images():
    x = random(8, 3, 4, 4, seed=0, dtype=torch.float32)
    for form in (torch.contiguous_format, torch.channels_last):
        assert apart(x.contiguous(memory_format=form), 2).is_contiguous(memory_format=form)


IN_PARTS = [cls for cls in METHODS.values() if "bn_splits" in signature(cls).parameters]


@pytest.mark.parametrize("cls", IN_PARTS, ids=named)
def test_parts_that_do_not_fit(cls):
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"bn_splits is .*; it must be a whole number, at least 1"):
            make(cls, bn_splits=wrong)
    for wrong in (3, 8):
        with pytest.raises(ValueError, match=f"there are 8 images; bn_splits={wrong} must cut them into equal parts"):
            make(cls, bn_splits=wrong).loss(images())


class Named(nn.Module):
    """A backbone whose `features` is its convolutions, as torchvision's VGG has it."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(12, 5)

    def forward(self, x):
        return self.features(x.flatten(1))


BACKBONES = {
    "by a dry run": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 5)), {"size": 6}, (3, 6, 6)),
    "as said": (lambda: nn.Linear(7, 5), {"features": 5}, (7,)),
    "features is a module": (Named, {"size": 2}, (3, 2, 2)),
    "as it says": (lambda: encoder("tiny"), {}, (3, 16, 16)),
}


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_any_backbone(cls, kind):
    build, options, shape = BACKBONES[kind]
    backbone = build()
    method = cls(backbone, hidden=HIDDEN, out=OUT, **options)
    assert method.backbone is backbone
    views = [random(N, *shape, seed=i, dtype=torch.float32) for i in (1, 2)]
    method.loss(views).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in backbone.parameters())


@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_a_backbone_that_does_not_fit(cls):
    with pytest.raises(ValueError, match=r"cannot read images of shape \(2, 3, 32, 32\)"):
        cls(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)))
    with pytest.raises(ValueError, match="pool and flatten"):
        cls(nn.Conv2d(3, 4, 3))


class Output:
    """As Hugging Face's models return one: fields, and no tensor."""

    def __init__(self, tokens):
        self.last_hidden_state, self.pooler_output = tokens, tokens[:, 0]


class Foreign(nn.Module):
    """A backbone of tokens, whose output is not a tensor."""

    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(12, 5)

    def forward(self, images):
        return self.form(self.linear(images.flatten(1).view(len(images), -1, 12)))


FORMS = {
    ".pooler_output": Output,
    "['pooler_output']": lambda tokens: {"last_hidden_state": tokens, "pooler_output": tokens[:, 0]},
    "['last_hidden_state'].mean(1)": lambda tokens: {"mask": None, "last_hidden_state": tokens},
    "[0].mean(1)": lambda tokens: (tokens, tokens[:, 0]),
    "[1].mean((2, 3))": lambda tokens: [None, tokens[:, :, :, None].transpose(1, 2)],
}


@pytest.mark.parametrize("features", [None, 5])
@pytest.mark.parametrize("taken", FORMS)
@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_a_backbone_without_a_tensor_gets_a_wrapper_that_works(cls, taken, features):
    backbone, views = Foreign(FORMS[taken]), [random(N, 3, 4, 4, seed=i, dtype=torch.float32) for i in (1, 2)]
    with pytest.raises(ValueError, match=r"the encoder returns a \w+; it must return a tensor .* wrap it") as caught:
        cls(backbone, size=4, features=features).loss(views)  # by a dry run, or when it is used
    assert taken in str(caught.value)
    assert "size=" not in str(caught.value)
    names = {"torch": torch, "backbone": backbone}
    exec(str(caught.value).partition("\n\n")[2], names)
    method = cls(names["backbone"], size=4, hidden=HIDDEN, out=OUT)
    method.loss(views).backward()
    assert backbone.linear.weight.grad.isfinite().all()


def test_a_backbone_whose_output_holds_no_features():
    for form in (lambda tokens: {"mask": None}, lambda tokens: None, lambda tokens: (tokens.long(),)):
        with pytest.raises(ValueError, match=r"it must return a tensor of features \(n, d\); wrap it in a module"):
            SimCLR(Foreign(form), size=4)


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("cls", [MoCoV3, SimCLR], ids=named)
def test_with_negatives_every_effect_is_taken(cls, effect):
    """As an object and in its string form, to the same gradient."""
    found = []
    for spelling in (effect, str(effect)):
        torch.manual_seed(0)
        method = cls(nn.Linear(6, 5), features=5, hidden=HIDDEN, out=OUT, effect=spelling).double()
        method.loss([random(N, 6, seed=1), random(N, 6, seed=2)]).backward()
        found.append(method.backbone.weight.grad)
    assert found[0].isfinite().all()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("effect", "reason"),
    [
        ("ratio(m1=0.4)", "m1 acts through negatives, and BYOL has none"),
        ("ratio(m1=0.4, scope=row)", "m1 acts through negatives, and BYOL has none"),
        ("attenuation(alpha=0.5)", "alpha acts through negatives, and BYOL has none"),
        ("attenuation(alpha=0.5, kind=II)", "alpha acts through negatives, and BYOL has none"),
        ("margin(m2=0.1)", "m2 acts through negatives, and BYOL has none"),
        ("margin(m1=0.4, m2=0.1)", "m2 acts through negatives, and BYOL has none"),
        (Margin(m2=torch.tensor(0.1)), "m2 acts through negatives, and BYOL has none"),
        ("emphasis(s=5)", "s multiplies the whole gradient, so it is only a learning rate"),
        ("emphasis(s=5, c=2.5)", "s multiplies the whole gradient, so it is only a learning rate"),
        (Emphasis(s=torch.tensor(5.0)), "s multiplies the whole gradient, so it is only a learning rate"),
        ("emphasis(c=2.5) * ratio(m1=0.4)", "m1 acts through negatives, and BYOL has none"),
        ("margin(m1=0.4) * emphasis(s=2)", "s multiplies the whole gradient, so it is only a learning rate"),
    ],
    ids=str,
)
def test_byol_refuses_what_means_nothing_without_negatives(effect, reason):
    with pytest.raises(ValueError) as caught:
        BYOL(encoder("tiny"), effect=effect)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(str(effect))


@pytest.mark.parametrize(
    "effect", ["plain", "margin(m1=0.4)", "emphasis(c=2.5)", "emphasis(s=1)", "margin(m1=0.4) * emphasis(c=1)"]
)
def test_byol_takes_the_rest(effect):
    assert str(BYOL(nn.Flatten(), features=3, effect=effect).settings["effect"])


def test_byol_has_the_gradient_of_two_minus_two_cos():
    method, views = make(BYOL), images()
    twin = copy.deepcopy(method)
    loss = method.loss(views)
    loss.backward()
    p, z = twin.queries(views)[0], twin.keys(views)[0]
    theirs = (F.normalize(p, dim=1) - F.normalize(z, dim=1)).square().sum(1).mean()
    theirs.backward()
    torch.testing.assert_close(2 + loss, theirs, **CLOSE)
    for ours, other in zip(method.student.parameters(), twin.student.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"effect": "margin(m1=0.4)"}, {"effect": "emphasis(c=2.5)"}], ids=named)
@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_rows_are_those_of_the_loss(cls, options):
    method, views = make(cls, **options), images()
    want = method.loss(views).detach()
    counted = {name: int(b) for name, b in method.named_buffers() if name.endswith("num_batches_tracked")}
    found = method.rows(views)
    assert found.loss.shape == ((2 * N,) if cls is SimCLR else (N,))
    torch.testing.assert_close(found.loss.mean(), want, **CLOSE)
    assert not any(field.requires_grad for field in found)
    for name, b in method.named_buffers():
        if name in counted:
            assert int(b) == counted[name] + (2 if cls is SimCLR else 1)


@pytest.mark.parametrize("cls", TEACHERS, ids=named)
def test_rows_of_both_ways(cls):
    """Rows are not scaled: 2 tau multiplies the loss, not what is seen of a row."""
    options = {"two_tau": True, "tau": 0.2} if cls is MoCoV3 else {}
    method, views = make(cls, symmetric=True, **options), images()
    found, one_way = method.rows(views).loss, make(cls, **options).rows(views).loss
    assert found.shape == (2 * N,)
    torch.testing.assert_close(found[:N], one_way, **CLOSE)
    torch.testing.assert_close(
        method.loss(views), (0.4 if cls is MoCoV3 else 1.0) * (found[:N].mean() + found[N:].mean()), **CLOSE
    )


@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
@pytest.mark.parametrize("ask", ["loss", "rows"])
def test_views_that_do_not_pair_up(cls, ask):
    method, (strong, weak) = make(cls), images()
    for views, said in (
        ([strong], "1 views"),
        ([], "0 views"),
        ([strong, weak, weak], "3 views"),
        ([strong, weak[:-1]], f"the views have {N} and {N - 1} images"),
    ):
        with pytest.raises(ValueError, match=said):
            getattr(method, ask)(views)


@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tau": 0.0}, ValueError, "tau is 0"),
        ({"tau": -1.0}, ValueError, "tau is -1"),
        ({"effect": "emphasise(s=5)"}, ValueError, "emphasise"),
        ({"effect": 5}, TypeError, "effect must be"),
        ({"hidden": 0}, ValueError, "hidden size is 0"),
        ({"out": -1}, ValueError, "output size is -1"),
    ],
    ids=str,
)
def test_refused_at_the_door(cls, options, error, said):
    with pytest.raises(error, match=said):
        cls(nn.Flatten(), features=3, **options)


@pytest.mark.parametrize("cls", METHODS.values(), ids=named)
def test_a_backbone_is_a_module(cls):
    """The laboratory takes names, and a class of it may be thought to."""
    with pytest.raises(TypeError, match=r"an nn.Module, not str: marginlens.nets.encoder\('resnet18'\) makes one"):
        cls("resnet18")
    with pytest.raises(TypeError, match=r"the backbone must be an nn.Module, not NoneType$"):
        cls(None)


@pytest.mark.parametrize("cls", [MoCoV3, SimCLR], ids=named)
def test_a_beta_that_is_no_share(cls):
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        cls(nn.Flatten(), features=3, beta=1.5)


@pytest.mark.parametrize("cls", TEACHERS, ids=named)
@pytest.mark.parametrize("momentum", [1.5, -0.1, math.nan, torch.tensor(2.0), torch.ones(1)], ids=str)
def test_a_momentum_that_is_none(cls, momentum):
    method = cls(nn.Linear(4, 3), features=3, hidden=HIDDEN, out=OUT)
    with pytest.raises(ValueError, match="momentum is"):
        method.after_step(momentum)


@pytest.mark.parametrize("name", METHODS)
def test_called_as_a_module_it_is_the_loss(name):
    """So that DistributedDataParallel, which wraps `forward`, works."""
    torch.manual_seed(0)
    method = METHODS[name](encoder("tiny"), hidden=16, out=8).eval()
    views = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    assert torch.equal(method(views), method.loss(views))


@pytest.mark.parametrize("name", METHODS)
def test_a_margin_that_learns_is_a_parameter_of_the_method(name):
    m1 = nn.Parameter(torch.tensor(0.2))
    method = METHODS[name](encoder("tiny"), hidden=16, out=8, effect=Margin(m1=m1))
    assert any(p is m1 for p in method.parameters())
    method.loss([torch.randn(4, 3, 16, 16) for _ in range(2)]).backward()
    assert m1.grad.isfinite()


ODD = {
    "momentum is 1.5; it must be in": {"momentum": 1.5},
    "impl is 'nonsense'": {"impl": "nonsense"},
    "features is 7.0; it must be a whole number": {"features": 7.0},
    "tau is 0; it must be above 0": {"tau": 0.0},
}


@pytest.mark.parametrize("line", ODD)
@pytest.mark.parametrize("name", METHODS)
def test_arguments_are_refused_where_they_are_given(name, line):
    if not ODD[line].keys() <= signature(METHODS[name]).parameters.keys():
        pytest.skip(f"{name} has no {', '.join(ODD[line])}")
    with pytest.raises(ValueError) as caught:
        METHODS[name](encoder("tiny"), hidden=16, out=8, **ODD[line])
    assert line in str(caught.value)
    with pytest.raises(TypeError, match="tau must be a number here"):
        METHODS[name](encoder("tiny"), hidden=16, out=8, tau=nn.Parameter(torch.tensor(0.2)))
