"""Train a linear layer on given features: cross-entropy, SGD with Nesterov's momentum.

On a GPU a step takes longer to launch than to compute. So there it is captured once as a CUDA graph and replayed. On
other devices, and for a last partial batch, the same step runs operation by operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from marginlens.devices import seeded
from marginlens.kernels.launch import capture

if TYPE_CHECKING:
    from marginlens.evals.probe import Probe


class Linear:
    """The layer and its momenta."""

    def __init__(self, inputs: int, classes: int, settings: Probe, device: torch.device) -> None:
        """Initialise weights from N(0, 0.01) and the bias at 0."""
        with seeded(settings.seed):
            layer = nn.Linear(inputs, classes)
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        self.layer, self.settings = layer.to(device), settings
        self.learning = list(self.layer.parameters())
        self.momenta = [torch.zeros_like(p) for p in self.learning]
        self.graph: _Graph | None = None

    def epoch(self, x: Tensor, y: Tensor, rates: list[float]) -> Tensor:
        """Train one pass over features (n, d) and labels (n,), with one learning rate per batch. Return the losses."""
        batch, device = self.settings.batch, x.device
        lr, losses = torch.tensor(rates, device=device), torch.zeros(len(rates), device=device)
        whole = len(x) // batch
        if device.type == "cuda" and whole:
            if self.graph is None:
                self.graph = _Graph(self, x, y, whole)
            self.graph.epoch(x, y, lr[:whole], losses[:whole])
        else:
            whole = 0
        for i in range(whole, len(rates)):
            some = slice(i * batch, (i + 1) * batch)
            losses[i] = self.step(x[some], y[some], lr[i])
        return losses

    def step(self, x: Tensor, y: Tensor, lr: Tensor) -> Tensor:
        """Do torch.optim.SGD's step with nesterov=True, with the learning rate on the device."""
        momentum, decay = self.settings.momentum, self.settings.weight_decay
        loss = cross_entropy(self.layer(x), y)
        grads = torch.autograd.grad(loss, self.learning)
        with torch.no_grad():
            for p, speed, g in zip(self.learning, self.momenta, grads, strict=True):
                g = g + decay * p if decay else g
                speed.mul_(momentum).add_(g)
                p.sub_(lr * (g + momentum * speed))
        return loss.detach()


class _Graph:
    """The captured step. It reads its batch, learning rate and position from the device."""

    def __init__(self, linear: Linear, x: Tensor, y: Tensor, steps: int) -> None:
        batch = linear.settings.batch
        self.x, self.y = x[: steps * batch].clone(), y[: steps * batch].clone()
        self.rates, self.losses = (torch.zeros(steps, device=x.device) for _ in range(2))
        self.at = torch.zeros(1, dtype=torch.int64, device=x.device)
        parts = self.x.view(steps, batch, -1), self.y.view(steps, batch)

        def step() -> None:
            x, y = (part.index_select(0, self.at)[0] for part in parts)
            self.losses.index_copy_(0, self.at, linear.step(x, y, self.rates.index_select(0, self.at)[0])[None])
            self.at += 1

        changing = [*linear.learning, *linear.momenta]
        before = [tensor.detach().clone() for tensor in changing]
        self.graph, _ = capture(step, warm=2, reset=self.at.zero_)
        with torch.no_grad():
            for tensor, old in zip(changing, before, strict=True):
                tensor.copy_(old)

    def epoch(self, x: Tensor, y: Tensor, rates: Tensor, losses: Tensor) -> None:
        """Replay the step for every whole batch."""
        self.x.copy_(x[: len(self.x)])
        self.y.copy_(y[: len(self.y)])
        self.rates.copy_(rates)
        self.at.zero_()
        for _ in range(len(rates)):
            self.graph.replay()
        losses.copy_(self.losses)
