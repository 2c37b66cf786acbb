"""Check the claims of Sec. 4 and the appendix about margins by numbers, and draw each."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from marginlens.lens import theory
from marginlens.lens.figures import CAPTIONS, Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M1 = (0.2, 0.4, 0.8, 1.6, 3.1)
"""The angular margins of the paper's Fig. 7."""
TAU = 0.25
_THETA = math.pi * (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
_TICKS = [0.0, math.pi / 2, math.pi], ["0", r"$\pi/2$", r"$\pi$"]


class Claim(NamedTuple):
    """A sentence of the paper, and how it is checked."""

    where: str
    text: str
    check: Callable[[], tuple[bool, str]]
    """Returns True if the claim holds, and what the numbers say."""
    drawing: Drawing


def _ratios(m1: float, q: float = 0.9) -> torch.Tensor:
    return theory.sum_ratio(_THETA, q, m1, 0.0, TAU)


def _peak() -> tuple[bool, str]:
    off = max(abs(float(_THETA[_ratios(m1, q).argmax()] - theory.peak_angle(m1))) for m1 in M1 for q in (0.1, 0.5, 0.9))
    return off < 2e-3, f"The peak is within {off:.1e} radians of that angle, for m1 in {M1} and three probabilities."


def _draw_peak(figure: Figure) -> None:
    axes = figure.subplots()
    for m1 in M1:
        (line,) = axes.plot(_THETA, _ratios(m1), label=f"m1 = {m1:g}")
        axes.axvline(float(theory.peak_angle(m1)), color=line.get_color(), ls=":", lw=1)
    axes.axhline(1.0, color="black", lw=0.6)
    axes.set(xlabel="angle of the positive", ylabel="ratio at probability 0.9", yscale="log")
    axes.set_xticks(*_TICKS)
    axes.legend(fontsize=8, frameon=False)


def _broadens() -> tuple[bool, str]:
    shares = [float((_ratios(m1) > 1.0).double().mean()) for m1 in M1]
    said = ", ".join(f"{share:.2f}" for share in shares)
    growing = all(a < b for a, b in pairwise(shares))
    return growing, f"The share of angles at which the ratio exceeds 1 is {said} for m1 = {', '.join(map(str, M1))}."


def _draw_broadens(figure: Figure) -> None:
    axes = figure.subplots()
    m1 = torch.linspace(0.01, math.pi, 100, dtype=torch.float64)
    axes.plot(m1, theory.emphasised_share(m1))
    axes.plot(M1, [float((_ratios(x) > 1.0).double().mean()) for x in M1], "o")
    axes.set(xlabel="m1", ylabel="share of angles with a ratio above 1", ylim=(0, 1))


def _centre() -> tuple[bool, str]:
    at = [float(_THETA[_ratios(m1).argmax()]) for m1 in M1]
    falling = all(a > b for a, b in pairwise(at))
    return falling, f"The ratio is largest at {', '.join(f'{x:.2f}' for x in at)} radians for these m1."


def _grows() -> tuple[bool, str]:
    q = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    found = {t: theory.attenuation(t, q, 0.8, 0.0, TAU) for t in (1.0, 2.5, 3.0)}
    rising = {t: bool((value.diff() > 0).all()) for t, value in found.items()}
    limit = math.pi - 0.4
    said = ", ".join(f"{'grows' if up else 'falls'} at {t:g}" for t, up in rising.items())
    return all(rising.values()), (
        f"With m1 = 0.8 and m2 = 0 the factor {said} radians. It falls beyond pi - m1 / 2, which is {limit:.2f} here. "
        f"A large enough m2 undoes that."
    )


def _draw_grows(figure: Figure) -> None:
    axes = figure.subplots()
    q = torch.linspace(0.0, 0.99, 200, dtype=torch.float64)
    for angle in (1.0, 2.5, 2.9, 3.0):
        axes.plot(q, theory.attenuation(angle, q, 0.8, 0.0, TAU), label=f"angle {angle:g}")
    axes.axhline(1.0, color="black", lw=0.6)
    axes.set(xlabel="probability of the positive", ylabel="factor, m1 = 0.8, m2 = 0", yscale="log")
    axes.legend(fontsize=8, frameon=False)


def _limit() -> tuple[bool, str]:
    theta, q = _THETA[::50, None], torch.tensor([[0.1, 0.5, 0.9]], dtype=torch.float64)
    off = (theory.margin_gradient(theta, q, 0.4, 10.0, TAU) - theory.limit_gradient(theta, 0.4, TAU)).abs().max()
    return bool(off < 1e-9), f"At m2 = 10 the largest difference from the limit is {float(off):.0e}."


def _draw_limit(figure: Figure) -> None:
    axes = figure.subplots()
    for m2 in (0.0, 0.2, 0.5, 1.0, 2.0):
        axes.plot(_THETA, theory.margin_gradient(_THETA, 0.9, 0.4, m2, TAU), label=f"m2 = {m2:g}")
    axes.plot(_THETA, theory.limit_gradient(_THETA, 0.4, TAU), "k--", lw=1, label="limit")
    axes.axhline(0.0, color="black", lw=0.6)
    axes.set(xlabel="angle of the positive", ylabel="gradient at probability 0.9, m1 = 0.4")
    axes.set_xticks(*_TICKS)
    axes.legend(fontsize=8, frameon=False)


def _small_angles() -> tuple[bool, str]:
    factor = theory.angular_factor(_THETA, 0.4)
    falls, below = bool((factor.diff() < 0).all()), float((factor < 0).double().mean())
    return falls, (
        f"With m1 = 0.4 the factor falls from {float(factor[0]):.0f} near 0 to 0 at pi - m1. The paper does not say "
        f"that it is negative beyond: in the last {below:.0%} of the angles the positive is repelled."
    )


def _draw_small_angles(figure: Figure) -> None:
    axes = figure.subplots()
    for m1 in M1:
        axes.plot(_THETA, theory.angular_factor(_THETA, m1).clamp(-5.0, 10.0), label=f"m1 = {m1:g}")
    axes.axhline(1.0, color="black", lw=0.6)
    axes.axhspan(-5.0, 0.0, color="0.9")
    axes.text(0.1, -4.2, "repelled", fontsize=8)
    axes.set(xlabel="angle of the positive", ylabel="sin(theta + m1) / sin(theta)", ylim=(-5, 10))
    axes.set_xticks(*_TICKS)
    axes.legend(fontsize=8, frameon=False)


def _one_ratio() -> tuple[bool, str]:
    theta, q = 1.0, torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    off = {
        beta: float(
            (theory.ratio(theta, q, 0.8, tau=TAU, beta=beta) / theory.sum_ratio(theta, q, 0.8, tau=TAU) - 1).abs().max()
        )
        for beta in (1.0, 0.5)
    }
    return off[0.5] < 1e-9, (
        f"They agree to {off[1.0]:.0e} at beta = 1, as Lemma 4.2 assumes. At beta = 0.5 they are up to {off[0.5]:.0%} "
        f"apart."
    )


def _draw_one_ratio(figure: Figure) -> None:
    axes = figure.subplots()
    q = torch.linspace(0.01, 0.99, 200, dtype=torch.float64)
    axes.plot(q, theory.sum_ratio(1.0, q, 0.8, tau=TAU), "k", label="Alg. 4, any beta")
    for beta in (1.0, 0.7, 0.5):
        axes.plot(q, theory.ratio(1.0, q, 0.8, tau=TAU, beta=beta), "--", label=f"Sec. 5.4, beta = {beta:g}")
    axes.set(xlabel="probability of the positive", ylabel="ratio at angle 1, m1 = 0.8", yscale="log")
    axes.legend(fontsize=8, frameon=False)


def _becomes_byol() -> tuple[bool, str]:
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    pull = 1e6 * theory.gradient(1.0, q, 1.0, TAU)
    apart = float(pull.max() / pull.min())
    return apart < 1.01, (
        f"Three rows at one angle, with probabilities 0.1, 0.5 and 0.9, differ by a factor of {apart:.3g} at any s; in "
        f"BYOL they are equal. Each row keeps its factor, one minus the probability."
    )


def _draw_becomes_byol(figure: Figure) -> None:
    axes = figure.subplots()
    q = torch.linspace(0.0, 0.99, 100, dtype=torch.float64)
    for s in (1.0, 5.0, 20.0):
        axes.plot(q, s * theory.gradient(1.0, q, 1.0, TAU), label=f"MoCo, s = {s:g}")
    axes.axhline(float(theory.gradient(1.0, 0.0, 1.0, TAU)), color="black", ls="--", lw=1, label="BYOL")
    axes.set(xlabel="probability of the positive", ylabel="pull on the positive, angle 1", yscale="log")
    axes.legend(fontsize=8, frameon=False)


def _as_printed() -> tuple[bool, str]:
    q = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    eta = theory.eta(1.0, 0.8, 0.0, TAU)
    right, printed = theory.sum_ratio(1.0, q, 0.8, tau=TAU), _printed(1.0, q, 0.8)
    with_right_q = float((1.0 / (q * eta + 1.0 - q) / right - 1.0).abs().max())
    return bool((printed / right - 1.0).abs().max() < 1e-9), (
        f"With the probability without margins, as in the paper's proof, both sides agree to {with_right_q:.0e}. As "
        f"printed they are up to {float((printed / right - 1.0).abs().max()):.0%} apart."
    )


def _printed(angle: float, q: torch.Tensor, m1: float) -> torch.Tensor:
    """Return the ratio as its lemma prints it, with q in the place of q~."""
    with_margins = theory.probability(angle, q, m1, 0.0, TAU)
    return 1.0 / (with_margins * theory.eta(angle, m1, 0.0, TAU) + 1.0 - with_margins)


def _draw_as_printed(figure: Figure) -> None:
    axes = figure.subplots()
    q = torch.linspace(0.01, 0.99, 200, dtype=torch.float64)
    axes.plot(q, theory.sum_ratio(1.0, q, 0.8, tau=TAU), label="the ratio of sums")
    axes.plot(q, _printed(1.0, q, 0.8), "--", label="as printed")
    axes.set(xlabel="probability without margins", ylabel="ratio at angle 1, m1 = 0.8", yscale="log")
    axes.legend(fontsize=8, frameon=False)


_SIZE = (5.2, 3.2)
CLAIMS: dict[str, Claim] = {
    "peak": Claim(
        "Sec. 4.1",
        "The ratio's weight increases as the angle approaches (pi - m1) / 2.",
        _peak,
        (_draw_peak, _SIZE),
    ),
    "centre": Claim("Appendix B", "As m1 increases, the centre of emphasis lowers.", _centre, (_draw_peak, _SIZE)),
    "broadens": Claim(
        "Appendix B", "As m1 increases, the emphasising area broadens.", _broadens, (_draw_broadens, _SIZE)
    ),
    "small-angles": Claim(
        "Sec. 4.1",
        "The angular margin makes networks focus on positives with small angles.",
        _small_angles,
        (_draw_small_angles, _SIZE),
    ),
    "grows": Claim(
        "Sec. 4.2, Lemma 4.3",
        "The factor of Lemma 4.3 increases with the positive's probability.",
        _grows,
        (_draw_grows, _SIZE),
    ),
    "limit": Claim(
        "Lemma 4.4",
        "As m2 grows, the positive's gradient becomes sin(theta + m1) / tau, whatever its probability.",
        _limit,
        (_draw_limit, _SIZE),
    ),
    "one-ratio": Claim(
        "Sec. 5.4 and Alg. 4",
        "The ratio of Sec. 5.4 is the ratio of sums that the pseudo-code computes.",
        _one_ratio,
        (_draw_one_ratio, _SIZE),
    ),
    "as-printed": Claim(
        "Lemma 4.2",
        "The ratio equals the expression in q that the lemma prints.",
        _as_printed,
        (_draw_as_printed, _SIZE),
    ),
    "byol": Claim(
        "Sec. 5.2", "As s grows, the gradient of MoCo becomes that of BYOL.", _becomes_byol, (_draw_becomes_byol, _SIZE)
    ),
}


def page() -> str:
    """Return a Markdown page of all claims: what the paper says, whether it holds, and the picture."""
    parts = [
        "# Claims of the paper, checked",
        "",
        "Which claims about margins hold? Each verdict below is computed, and `marginlens lens figures OUT` draws the",
        "pictures. tau is 0.25 unless the picture says otherwise. The paper's figures of theory come last.",
        "",
        "| claim | where | holds |",
        "|---|---|---|",
    ]
    checked = {name: claim.check() for name, claim in CLAIMS.items()}
    parts += [
        f"| {claim.text} | {claim.where} | {'yes' if checked[name][0] else 'no'} |" for name, claim in CLAIMS.items()
    ]
    for name, claim in CLAIMS.items():
        holds, said = checked[name]
        parts += ["", f"## {claim.text}", "", f"{claim.where}: {'it holds' if holds else 'it does not hold'}. {said}"]
        parts += ["", f"![{claim.text}](claim-{name}.svg)"]
    parts += ["", "## The paper's figures"]
    for name, caption in CAPTIONS.items():
        parts += ["", f"![{name}]({name}.png)", "", caption]
    return "\n".join(parts) + "\n"
