"""Warm-up and capture, which all captured steps share."""

import torch

from marginlens.kernels.launch import capture


def test_warm_steps_are_executed_and_the_captured_one_is_not():
    x, resets = torch.zeros(5, device="cuda"), []

    def step():
        x.add_(1.0)
        return x * 2.0

    def reset():
        resets.append(int(x[0]))

    graph, found = capture(step, 3, reset)
    assert resets == [0, 1, 2]
    assert (x == 3.0).all()
    for i in (4.0, 5.0):
        graph.replay()
        assert (x == i).all()
        assert (found == 2.0 * i).all()
    x.fill_(7.0)
    graph.replay()
    assert (found == 16.0).all()
    assert len(resets) == 3


def test_it_follows_what_the_current_stream_has_under_way():
    side, x = torch.cuda.Stream(), torch.zeros(2**20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.fill_(1.0)
        graph, _ = capture(lambda: x.mul_(2.0), 1)
        assert (x == 2.0).all()
        graph.replay()
        assert (x == 4.0).all()
