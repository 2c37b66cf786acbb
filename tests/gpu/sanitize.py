"""Run every GPU kernel once, on small and ragged cases, under NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize

The same with racecheck, initcheck and synccheck. Here each tensor has its own memory, outside PyTorch's cache. So an
access beyond a tensor's end is beyond an allocation, and the sanitizer reports it.
"""

import copy
import math
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch allocates anything

import torch
from torch import nn

import marginlens as ml
from marginlens.data.fused import draw_parameters, make_views
from marginlens.data.views import View, strong
from marginlens.devices import placed
from marginlens.kernels.batchnorm import norm_act, supported
from marginlens.kernels.linear import linear, linear_supported
from marginlens.kernels.pool import pool, pool_supported
from marginlens.kernels.sgd_ema import Flat
from marginlens.kernels.stem import stem_conv, stem_supported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16


def draws(height, width):
    view = View(size=32, solarise=0.5)
    drawn = draw_parameters(torch.arange(300, device=DEVICE), height, width, (view, view), 3, 4)
    return [x.float() for view in drawn for x in view]


def views(size, height, width):
    """Of the first and the last of 5 images, with everything that a view can have."""
    busy = View(size, jitter_p=1.0, grey=0.5, blur=1.0, solarise=0.5)
    padded = View(size, crop="padded", padding=max(4, (size - min(height, width) + 1) // 2), blur=0.0)
    images = torch.randint(256, (5, 3, height, width), dtype=torch.uint8, device=DEVICE)
    chosen, epoch = torch.tensor([4, 0], device=DEVICE), torch.tensor(7, device=DEVICE)
    return make_views(images, chosen, (busy, padded, strong(size, (0.5,) * 3, (0.2,) * 3)), epoch, epoch)


def norm(shape, add=False, fork=False, relu=True, groups=1):
    bn = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1]).to(DEVICE)
    form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    x, other = (torch.randn(shape, device=DEVICE).to(BF16, memory_format=form).requires_grad_() for _ in "ab")
    added = other if add else None
    assert supported(x, bn, added, groups), shape
    found = norm_act(x, bn, added, relu, fork, groups)
    outputs = list(found) if fork else [found]
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    grads = [x.grad, *([other.grad] if add else []), bn.weight.grad, bn.bias.grad]
    return [*outputs, *grads, bn.running_mean, bn.running_var]


def stem(n, height, width, channels):
    x = torch.randn(n, 3, height, width, device=DEVICE).to(BF16, memory_format=torch.channels_last)
    weight = torch.randn(channels, 3, 3, 3, device=DEVICE).to(BF16, memory_format=torch.channels_last).requires_grad_()
    assert stem_supported(x, weight)
    y = stem_conv(x, weight)
    y.backward(torch.randn_like(y))
    return [y, weight.grad]


def means(shape):
    x = torch.randn(shape, device=DEVICE).to(BF16, memory_format=torch.channels_last).requires_grad_()
    assert pool_supported(x)
    y = pool(x)
    y.backward(torch.randn_like(y))
    return [y, x.grad]


def layer(n, inputs, outputs, dtype):
    x, weight, bias = (torch.randn(s, device=DEVICE).to(dtype) for s in ((n, inputs), (outputs, inputs), (outputs,)))
    given = [t.requires_grad_() for t in (x, weight, bias)]
    assert linear_supported(*given)
    y = linear(*given)
    y.backward(torch.randn_like(y))
    return [y, *(t.grad for t in given)]


class Tiny(nn.Module):
    """Tensors of one element, of less and of more than a block, with and without a teacher."""

    def __init__(self, teacher):
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(4, 7, 3, bias=False), nn.BatchNorm2d(7), nn.Linear(7, 401))
        if teacher:
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(401, 6)
        self.temperature = nn.Parameter(torch.tensor(0.5))


def flat(precision, clip, teacher=True):
    method = placed(Tiny(teacher), DEVICE)
    learning = [p for p in method.parameters() if p.requires_grad]
    whole = Flat(method, torch.optim.SGD(learning, 0.1, 0.9, weight_decay=1e-4), precision)
    grads = [torch.randn_like(p).to(precision if p.dim() > 1 else torch.float32) for p in learning]
    lr, share, factor = (torch.tensor(x, device=DEVICE) for x in (0.1, 0.1, 0.5))
    whole.step(lr, share, grads, factor if clip else None)
    return [*method.parameters(), *whole.half.values()]


def loss(which, dtype, both=True, n=300, d=48, queue=0):
    """With a long queue, keys are cut into splits, which another kernel joins: once with the slope, once without."""
    q, k = (torch.randn(n, d, device=DEVICE).to(dtype) for _ in range(2))
    q.requires_grad_()
    k.requires_grad_(both)
    more = {"queue": torch.randn(queue, d, device=DEVICE).to(dtype)} if queue else {}
    value = which(q, k, impl="triton", **more)
    value.backward()
    with torch.no_grad():
        alone = which(q, k, impl="triton", **more)
    return [value, alone, q.grad, *([k.grad] if both else [])]


CASES = [
    (draws, (32, 32)),
    (draws, (40, 56)),
    *((views, shape) for shape in ((32, 32, 32), (64, 64, 64), (64, 96, 96), (20, 40, 56), (9, 17, 5))),
    *(
        (norm, (shape, add, fork))
        for shape in ((4, 64, 16, 16), (5000, 64))
        for add in (False, True)
        for fork in (False, True)
    ),
    (norm, ((4, 64, 16, 16), True, True, False)),
    (norm, ((2500, 16), True, True)),
    (norm, ((256, 128),)),
    (norm, ((77, 48), False, False, False)),
    (norm, ((6, 64, 14, 15), True, False, True, 2)),
    (norm, ((200, 32), True, True, True, 2)),
    (stem, (3, 16, 16, 64)),
    (stem, (2, 9, 7, 32)),
    *((means, (shape,)) for shape in ((3, 64, 4, 4), (2, 48, 5, 7))),
    *((layer, (n, 24, 48, dtype)) for n, dtype in ((5, BF16), (300, torch.float32))),
    *((flat, (precision, clip)) for precision in (BF16, torch.float32) for clip in (False, True)),
    (flat, (BF16, False, False)),
    *((loss, (ml.info_nce, dtype, both)) for dtype in (BF16, torch.float32) for both in (False, True)),
    *((loss, (ml.nt_xent, dtype)) for dtype in (BF16, torch.float32)),
    *((loss, (ml.info_nce, dtype, True, 40, 48, 2500)) for dtype in (BF16, torch.float32)),
    *((loss, (which, BF16, True, 70, 300)) for which in (ml.info_nce, ml.nt_xent)),
]


def main():
    if DEVICE.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("tests.gpu.sanitize needs a CUDA GPU, or TRITON_INTERPRET=1")
    torch.manual_seed(0)
    for case, given in CASES:
        found = case(*given)
        total = math.fsum(float(x.detach().double().abs().sum()) for x in found)  # which waits for the kernels, too
        words = ", ".join(getattr(x, "__name__", str(x)) for x in given)
        print(f"{case.__name__:6} {words:42} {total:.6g}", flush=True)
        assert math.isfinite(total), (case.__name__, given)


if __name__ == "__main__":
    main()
