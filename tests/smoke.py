"""Check an installed marginlens that has torch and no extras: python -P tests/smoke.py

Run it with the interpreter of a fresh environment into which the wheel was installed. -P keeps tests/ off the path.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import marginlens as ml

EXTRAS = ("pydantic", "rich", "safetensors", "tyro")


def main() -> None:
    """Run all checks; an AssertionError names the first that fails."""
    home = Path(ml.__file__).resolve().parent
    assert home != Path(__file__).resolve().parents[1] / "marginlens", "this is the source tree; install the wheel"
    assert (home / "py.typed").exists(), "py.typed is not in the wheel"
    assert not (extra := [name for name in EXTRAS if find_spec(name)]), f"installed besides torch: {', '.join(extra)}"
    for name in dir(ml):
        getattr(ml, name)  # because a name that is listed must not need an extra
    loss_and_gradient()
    command_line()
    print(f"marginlens {ml.__version__} in {home} works with torch {torch.__version__} alone")


def loss_and_gradient() -> None:
    """Compare InfoNCE with emphasis to softmax cross-entropy whose positives' gradients are scaled by hand."""
    n, tau, s = 8, 0.25, 5.0
    q, k = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q.requires_grad_()
    loss = ml.info_nce(q, k, tau=tau, effect=ml.Emphasis(s=s))
    (gradient,) = torch.autograd.grad(loss, q)

    normalize = torch.nn.functional.normalize
    logits = normalize(q, dim=1) @ normalize(k, dim=1).T / tau
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(n))
    weights = 1.0 + (s - 1.0) * torch.eye(n, dtype=torch.float64)
    slope = (logits.detach().softmax(dim=1) - torch.eye(n, dtype=torch.float64)) / n
    (expected_gradient,) = torch.autograd.grad(logits, q, weights * slope)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def command_line() -> None:
    """Check that --version works, and that a laboratory command names the extra in one line."""
    version = marginlens("--version")
    assert version.returncode == 0, version.stderr
    assert version.stdout.strip() == f"marginlens {ml.__version__}", version.stdout
    refusal = marginlens("pretrain", "--epochs", "1")
    assert refusal.returncode == 2, refusal.stderr
    assert refusal.stdout == "", refusal.stdout
    assert len(refusal.stderr.splitlines()) == 1, refusal.stderr
    assert "pip install 'marginlens[lab]'" in refusal.stderr, refusal.stderr


def marginlens(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = Path(sys.executable).with_name("marginlens")
    return subprocess.run([command, *words], capture_output=True, text=True, check=False, timeout=120)


if __name__ == "__main__":
    main()
