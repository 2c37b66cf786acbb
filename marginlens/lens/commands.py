"""`marginlens lens figures` and `lens run`: docstrings are what --help prints."""

from __future__ import annotations

import json as jsons
from pathlib import Path

from tyro.conf import Positional

from marginlens import output
from marginlens.files import check_replaceable, deliver, expanded, writing
from marginlens.lens import claims, trained
from marginlens.lens.figures import FIGURES, MARKS, save


def figures(out: Positional[Path]) -> None:
    """Draw Figs. 1, 2 and 8 of the paper, and a page that checks its claims about margins.

    Each figure is written as PNG, SVG and PDF. For example:

        marginlens lens figures lens

    Args:
        out: The folder to write.
    """
    out = expanded(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder")
    page = out / "claims.md"
    check_replaceable(page, MARKS["md"])
    with writing(out, "OUT"):
        out.mkdir(parents=True, exist_ok=True)
    drawings = {f"claim-{name}": claim.drawing for name, claim in claims.CLAIMS.items()}
    paths = save(out, FIGURES | drawings)
    with writing(page, "OUT"):
        deliver(page, claims.page().encode(), MARKS["md"])
    output.say(f"wrote {len(paths)} files of {len(FIGURES)} figures and {len(drawings)} claims, and {page}")


def run(
    run: Positional[Path],
    *,
    data: str = "",
    effect: tuple[str, ...] = (),
    device: str = "auto",
    json: bool = False,
) -> None:
    """Say what a margin does to the gradients of a trained run, in sentences with numbers.

    For example:

        marginlens lens run runs/mocov3-shapes-tiny-plain-seed0-1a2b3c4d5e

        marginlens lens run RUN --effect "margin(m1=0.4, m2=0.2)" "emphasis(s=20, c=1)" --json

    Args:
        run: The run's folder, or one of its checkpoints.
        data: Another prepared data set than the run's own.
        effect: Effects to look at; not given: the run's own and margin(m1=0.4).
        device: auto, cpu, cuda or cuda:1.
        json: Print the numbers as JSON.
    """
    found = trained.look(run, effect, data, device)
    if json:
        output.say_json(jsons.dumps(found, indent=1))
    else:
        output.say("\n".join(trained.sentences(found)))
