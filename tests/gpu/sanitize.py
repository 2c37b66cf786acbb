"""Every GPU kernel once, on small and ragged cases, for NVIDIA's compute-sanitizer to watch:

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize

and so with racecheck, initcheck and synccheck. Each tensor has memory of its own here, none of it from PyTorch's cache:
an access beyond its end is then one beyond an allocation, which the sanitizer sees.
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
from marginlens.nets import fused
from marginlens.train.flat import Flat
from marginlens.train.model import placed

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


def norm(shape, add=False, fork=False, relu=True):
    bn = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1]).to(DEVICE)
    form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    x, other = (torch.randn(shape, device=DEVICE).to(BF16, memory_format=form).requires_grad_() for _ in "ab")
    added = other if add else None
    assert fused.supported(x, bn, added), shape
    found = fused.norm_act(x, bn, added, relu, fork)
    outputs = list(found) if fork else [found]
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    grads = [x.grad, *([other.grad] if add else []), bn.weight.grad, bn.bias.grad]
    return [*outputs, *grads, bn.running_mean, bn.running_var]


def stem(n, height, width, channels):
    x = torch.randn(n, 3, height, width, device=DEVICE).to(BF16, memory_format=torch.channels_last)
    weight = torch.randn(channels, 3, 3, 3, device=DEVICE).to(BF16, memory_format=torch.channels_last).requires_grad_()
    assert fused.stem_supported(x, weight)
    y = fused.stem_conv(x, weight)
    y.backward(torch.randn_like(y))
    return [y, weight.grad]


class Tiny(nn.Module):
    """Tensors of one element, of less and of more than a block, with and without a teacher."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Conv2d(4, 7, 3, bias=False), nn.BatchNorm2d(7), nn.Linear(7, 401))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(401, 6)
        self.temperature = nn.Parameter(torch.tensor(0.5))


def flat(precision, clip):
    method = placed(Tiny(), DEVICE)
    learning = [p for p in method.parameters() if p.requires_grad]
    whole = Flat(method, torch.optim.SGD(learning, 0.1, 0.9, weight_decay=1e-4), precision)
    grads = [torch.randn_like(p).to(precision if p.dim() > 1 else torch.float32) for p in learning]
    lr, ema, factor = (torch.tensor(x, device=DEVICE) for x in (0.1, 0.9, 0.5))
    whole.step(lr, ema, grads, factor if clip else None)
    return [*method.parameters(), *whole.half.values()]


def loss(which, dtype, both=True):
    q, k = (torch.randn(300, 48, device=DEVICE).to(dtype) for _ in range(2))
    q.requires_grad_()
    k.requires_grad_(both)
    value = which(q, k, impl="triton")
    value.backward()
    return [value, q.grad, *([k.grad] if both else [])]


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
    (stem, (3, 16, 16, 64)),
    (stem, (2, 9, 7, 32)),
    *((flat, (precision, clip)) for precision in (BF16, torch.float32) for clip in (False, True)),
    *((loss, (ml.info_nce, dtype, both)) for dtype in (BF16, torch.float32) for both in (False, True)),
    *((loss, (ml.nt_xent, dtype)) for dtype in (BF16, torch.float32)),
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
