"""Measure the floor under a training step on a GPU: every convolution alone, and the bytes that the rest must move.

    python benchmarks/floor.py            a MoCo v3 step of ResNet-18 at batch 256, 32 and 64 px, bf16, channels-last

Each convolution's forward pass, data gradient and weight gradient is timed alone, and the times are summed. Bytes of
batch norm, additions, ReLU and parameters are divided by the measured memory rate. The real step is timed beside this,
whole and in parts. Writes results/floor_gpu.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import machine
import torch
from torch import nn

from marginlens.data.views import make_view, strong, weak
from marginlens.methods import MoCoV3
from marginlens.nets import default_stem, encoder

BATCH = 256
DTYPE = torch.bfloat16
OUT = Path(__file__).parents[1] / "results" / "floor_gpu.json"


def milliseconds(call, repeats=30):
    """Return the median time of a call on the GPU, by events, after a warm-up."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def captured(call, repeats=20):
    """Return the median time of calls captured in one graph: the GPU's time without the host's launches."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return milliseconds(graph.replay, 10) / repeats


def rates():
    """Measure matrix products in TFLOP/s and copies in GB/s."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=DTYPE) for _ in range(2))
    x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    product, copy = milliseconds(lambda: a @ b), milliseconds(lambda: y.copy_(x))
    return {"matmul_tflops": 2 * n**3 / product / 1e9, "copy_gb_per_s": 2 * 2**30 / copy / 1e6}


def layers(size):
    """Return every convolution and batch norm of the encoder with its input's shape."""
    model = encoder("resnet18", stem=default_stem("resnet18", size)).cuda().to(memory_format=torch.channels_last)
    found = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(lambda m, x, y: found.append((m, tuple(x[0].shape), tuple(y.shape))))
    with torch.no_grad(), torch.autocast("cuda", dtype=DTYPE):
        model(torch.randn(BATCH, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last))
    return found


def convolution(module, shape, out, first):
    """Time forward, data gradient and weight gradient of one convolution, each alone."""
    x = torch.randn(shape, device="cuda", dtype=DTYPE).contiguous(memory_format=torch.channels_last)
    g = torch.randn(out, device="cuda", dtype=DTYPE).contiguous(memory_format=torch.channels_last)
    w = module.weight.detach().to(DTYPE).contiguous(memory_format=torch.channels_last)
    rest = (None, module.stride, module.padding, module.dilation, False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward

    def gradient(mask):
        return captured(lambda: backward(g, x, w, None, *rest[1:], output_mask=mask))

    flops = 2 * out[0] * out[1] * out[2] * out[3] * w[0].numel()
    return {
        "in": shape,
        "out": out,
        "gflop": flops / 1e9,
        "forward": captured(lambda: torch.conv2d(x, w, None, module.stride, module.padding)),
        "data": 0.0 if first else gradient([True, False, False]),
        "weight": gradient([False, True, False]),
    }


def step(size):
    """Time the eager step, whole and in parts."""
    method = (
        MoCoV3(encoder("resnet18", stem=default_stem("resnet18", size))).cuda().to(memory_format=torch.channels_last)
    )
    learning = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, 0.06, 0.9, weight_decay=5e-4)
    images = torch.randint(0, 256, (BATCH, 3, size, size), dtype=torch.uint8, device="cuda")
    index, moments = torch.arange(BATCH, device="cuda"), ((0.5,) * 3, (0.5,) * 3)
    looks = [strong(size, *moments), weak(size, *moments)]

    def views():
        found = [make_view(images, index, view, 0, 0, number) for number, view in enumerate(looks)]
        return [view.contiguous(memory_format=torch.channels_last) for view in found]

    made = views()

    def learn():
        with torch.autocast("cuda", dtype=DTYPE):
            loss = method.loss(made)
        optimizer.zero_grad()
        loss.backward()

    def whole():
        nonlocal made
        made = views()
        learn()
        optimizer.step()
        method.after_step()

    parts = {"views": views, "loss and gradient": learn, "SGD": optimizer.step, "EMA": method.after_step}
    return {"whole": milliseconds(whole), **{name: milliseconds(call) for name, call in parts.items()}}


def measure(size, speeds):
    found = layers(size)
    convs = [(m, i, o) for m, i, o in found if isinstance(m, nn.Conv2d)]
    rows = [convolution(*conv, first=n == 0) for n, conv in enumerate(convs)]
    # student forward and both gradients, teacher forward
    total = sum(2 * row["forward"] + row["data"] + row["weight"] for row in rows)
    gflop = sum(row["gflop"] * (4 if n else 3) for n, row in enumerate(rows))
    # a batch norm that is not fused reads x twice and writes y forward, reads x and dy twice and writes dx backward
    values = sum(o[0] * o[1] * o[2] * o[3] for m, _, o in found if isinstance(m, nn.BatchNorm2d))
    norm = values * 2 * (2 * 3 + 5)
    return {
        "size": size,
        "batch": BATCH,
        "convolutions_ms": total,
        "convolutions_tflops": gflop / total,
        "batch_norm_gb": norm / 1e9,
        "batch_norm_ms_at_copy_rate": norm / speeds["copy_gb_per_s"] / 1e6,
        "eager_ms": step(size),
        "layers": rows,
    }


def main():
    if not torch.cuda.is_available():
        sys.exit("this measures a CUDA GPU, and there is none")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
    speeds = rates()
    facts = machine.facts("cuda")
    result = {**facts, **speeds, "floors": [measure(size, speeds) for size in (32, 64)]}
    machine.save(OUT, result)
    for floor in result["floors"]:
        print({key: value for key, value in floor.items() if key != "layers"})
    print(facts, speeds)


if __name__ == "__main__":
    main()
