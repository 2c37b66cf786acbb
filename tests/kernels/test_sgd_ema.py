"""The flat step against its slow twin: torch's SGD, the EMA update and a cast."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from marginlens.devices import placed
from marginlens.kernels.sgd_ema import BLOCK, Flat
from marginlens.methods import MoCoV3, SimCLR
from marginlens.nets import encoder
from marginlens.nets.ema import ema_update
from marginlens.runs import checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = 2**-8 if DEVICE.type == "cuda" else 2**-7
"""bfloat16's relative error: the interpreter cuts where a GPU rounds."""


class Small(nn.Module):
    """A student with every kind of parameter, and perhaps its teacher and a predictor."""

    def __init__(self, teacher):
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 401))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        if teacher:
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.predictor = nn.Linear(401, 8)


def sgd(method, weight_decay=5e-2):
    learning = [p for p in method.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.dim() > 1]},
        {"params": [p for p in learning if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, 0.1, 0.9, weight_decay=weight_decay)


def pair(teacher=True, precision=torch.bfloat16):
    torch.manual_seed(0)
    twin = placed(Small(teacher), DEVICE)
    method = copy.deepcopy(twin)
    slow, fast = sgd(twin), sgd(method)
    return twin, slow, method, Flat(method, fast, precision), fast


def scalar(x):
    return torch.tensor(x, device=DEVICE)


def gradients(flat, method, dtypes=(torch.bfloat16, torch.float32)):
    found = dict(method.named_parameters())
    return [torch.randn_like(found[name]).to(dtypes[i % len(dtypes)]).detach() for i, name in enumerate(flat.names)]


def twin_step(twin, optimizer, grads, lr, ema, factor=1.0):
    for p, g in zip([p for p in twin.parameters() if p.requires_grad], grads, strict=True):
        p.grad = None if g is None else g.to(torch.float32) * factor
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    if hasattr(twin, "teacher"):
        ema_update(twin.teacher, twin.student, ema)


def assert_same(twin, method, flat):
    """A few float32 roundings apart after any number of steps; half copies are roundings of what they copy."""
    for (name, a), b in zip(method.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6, msg=lambda m: f"{name}: {m}")
        if name in flat.half:
            torch.testing.assert_close(
                flat.half[name].float(), a.detach(), rtol=2**-8 if DEVICE.type == "cuda" else 2**-7, atol=0
            )
            assert flat.half[name].stride() == a.stride()


def odd_sizes(flat, method):
    """Parameters whose gradients would be read beyond their end, in units of eight."""
    found = {name for name, p in method.named_parameters() if name in flat.names and p.numel() % 8}
    assert 0 < len(found) < len(flat.names)
    return found


@pytest.mark.parametrize("teacher", [True, False])
def test_many_steps_as_sgd_and_ema(teacher):
    twin, slow, method, flat, _ = pair(teacher)
    for step in range(12):
        lr, ema = 0.1 / (step + 1), 0.9 + 0.005 * step
        grads = gradients(
            flat, method, (torch.bfloat16, torch.float32) if step % 2 else (torch.float32, torch.bfloat16)
        )
        twin_step(twin, slow, grads, lr, ema)
        flat.step(scalar(lr), scalar(1 - ema), grads)
        assert set(flat.copied) == odd_sizes(flat, method)
    assert_same(twin, method, flat)


@pytest.mark.parametrize("ema", [0.5, 0.996, 0.99999, 1.0 - 1e-9, 1.0])
def test_a_momentum_near_one_keeps_its_digits(ema):
    """The teacher takes over what it takes in float64, but for one rounding of the share and one of the product."""
    twin, _, method, flat, _ = pair()
    exact = twin.student.double()
    method.teacher.load_state_dict({name: torch.zeros_like(x) for name, x in method.teacher.state_dict().items()})
    flat.step(scalar(0.0), scalar(1 - ema), gradients(flat, method))
    for (name, slow), fast in zip(method.teacher.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(slow.double(), (1 - ema) * fast, rtol=2**-23, atol=0, msg=lambda m: f"{name}: {m}")


def test_padding_stays_zero_and_blocks_align():
    _, _, method, flat, _ = pair()
    for _ in range(2):
        flat.step(scalar(0.1), scalar(1 - 0.9), gradients(flat, method))
    used = torch.zeros_like(flat._parameters)
    for name, p in method.named_parameters():
        if p.requires_grad:
            start = p.storage_offset()
            assert start % BLOCK == 0, name
            used[start : start + p.numel()] = 1
    for buffer in (flat._parameters, flat._momenta):
        assert not buffer[used == 0].any()
    assert not flat._teacher[used[: len(flat._teacher)] == 0].any()


def test_a_factor_multiplies_gradients_and_none_leaves_a_parameter():
    twin, slow, method, flat, _ = pair()
    for _ in range(3):
        grads = gradients(flat, method)
        grads[2] = None
        twin_step(twin, slow, grads, 0.1, 0.9, 0.25)
        flat.step(scalar(0.1), scalar(1 - 0.9), grads, scalar(0.25))
    assert_same(twin, method, flat)


def test_gradients_that_lie_differently_are_copied():
    twin, slow, method, flat, _ = pair()
    names = [name for name in flat.names if name.endswith("0.weight")]
    for _ in range(2):
        grads = gradients(flat, method)
        at = flat.names.index(names[0])
        grads[at] = grads[at].contiguous()
        odd = flat.names.index("predictor.weight")
        room = torch.zeros(grads[odd].numel() + 1, dtype=grads[odd].dtype, device=DEVICE)[1:]
        grads[odd] = room.view(grads[odd].shape).copy_(grads[odd])  # in order, but not at a multiple of 16 bytes
        twin_step(twin, slow, grads, 0.1, 0.9)
        flat.step(scalar(0.1), scalar(1 - 0.9), grads)
        assert set(flat.copied) == {names[0], "predictor.weight"} | odd_sizes(flat, method)
    assert_same(twin, method, flat)


def test_bound_gradients_are_read_where_they_are():
    twin, slow, method, flat, _ = pair()
    grads = gradients(flat, method)
    flat.bind(grads)
    for _ in range(3):
        for g in grads:
            g.copy_(torch.randn_like(g))
        twin_step(twin, slow, grads, 0.1, 0.9)
        flat.step(scalar(0.1), scalar(1 - 0.9))
    assert_same(twin, method, flat)


def test_float32_has_no_copies_and_no_half_gradients():
    twin, slow, method, flat, _ = pair(precision=torch.float32)
    assert flat.half == {}
    grads = gradients(flat, method, (torch.float32,))
    twin_step(twin, slow, grads, 0.1, 0.9)
    flat.step(scalar(0.1), scalar(1 - 0.9), grads)
    assert_same(twin, method, flat)
    with pytest.raises(ValueError, match="gradient of temperature"):
        flat.step(scalar(0.1), scalar(1 - 0.9), gradients(flat, method, (torch.bfloat16,)))


def test_a_checkpoint_goes_out_and_comes_in(tmp_path):
    """As the trainer does it: tensors by name, filled in place."""

    def state(method, optimizer):
        momenta = {
            f"m{i}": optimizer.state[p]["momentum_buffer"] for i, p in enumerate(method.parameters()) if p.requires_grad
        }
        return {**method.state_dict(), **momenta}

    _, _, method, flat, optimizer = pair()
    grads = [gradients(flat, method) for _ in range(3)]
    flat.step(scalar(0.1), scalar(1 - 0.9), grads[0])
    path = checkpoint.write(tmp_path, 1, state(method, optimizer), {})
    after = []
    for _ in range(2):
        checkpoint.fill(state(method, optimizer), checkpoint.read(path))
        flat.refresh()
        for g in grads[1:]:
            flat.step(scalar(0.1), scalar(1 - 0.9), g)
        after.append(
            {
                k: v.clone()
                for k, v in {**state(method, optimizer), **{f"h.{k}": v for k, v in flat.half.items()}}.items()
            }
        )
    for name, value in after[0].items():
        assert torch.equal(value, after[1][name]), name
    other = placed(Small(True), DEVICE)
    other.load_state_dict(method.state_dict())
    for (name, a), b in zip(method.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_optimizer_itself_still_works():
    """Its state is the flat one: a step of torch's own may follow."""
    twin, slow, method, flat, fast = pair()
    grads = gradients(flat, method, (torch.float32,))
    twin_step(twin, slow, grads, 0.1, 0.9)
    flat.step(scalar(0.1), scalar(1 - 0.9), grads)
    for who, optimizer in ((twin, slow), (method, fast)):
        twin_step(who, optimizer, grads, 0.1, 0.9)
    flat.refresh()
    assert_same(twin, method, flat)


@pytest.mark.parametrize("make", [MoCoV3, SimCLR])
def test_methods_keep_their_state_and_their_half_copies_cover_them(make):
    torch.manual_seed(0)
    method = placed(make(encoder("tiny"), hidden=32, out=16), DEVICE)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    flat = Flat(method, sgd(method), torch.bfloat16)
    for name, value in method.state_dict().items():
        assert torch.equal(value, before[name]), name
    layers = {
        f"{name}.{kind}"
        for name, module in method.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
        for kind, _ in module.named_parameters()
    }
    assert set(flat.half) == layers


def test_bad_input():
    _, _, method, flat, _ = pair()
    learning = [p for p in method.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="step has no gradients"):
        flat.step(scalar(0.1), scalar(1 - 0.9))
    with pytest.raises(ValueError, match="there are 1 gradients"):
        flat.bind([None])
    with pytest.raises(ValueError, match="lr is"):
        flat.step(scalar(0.1).double(), scalar(1 - 0.9), gradients(flat, method))
    with pytest.raises(ValueError, match="without nesterov"):
        Flat(method, torch.optim.SGD(learning, 0.1, 0.9, nesterov=True), torch.float32)
    with pytest.raises(ValueError, match="not those of the method"):
        Flat(method, torch.optim.SGD([method.temperature], 0.1, 0.9), torch.float32)
    method.student[2].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"counterpart of student\.2\.weight"):
        Flat(method, sgd(method), torch.float32)
