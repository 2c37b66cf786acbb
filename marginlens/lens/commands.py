"""`marginlens lens ...`: docstrings are what --help prints."""

from __future__ import annotations

import json as jsons
import shlex
from pathlib import Path

from tyro.conf import Positional

from marginlens.files import check_replaceable, deliver, expanded, is_stream, spoken, writing
from marginlens.lens import claims, trained
from marginlens.lens import page as pages
from marginlens.lens.figures import FIGURES, MARKS, save
from marginlens.output import legible, say, say_json
from marginlens.runs.run import open_run


def figures(out: Positional[Path]) -> None:
    """Draw the figures of the paper's theory, and write a page that checks its claims about margins.

    These are its Figs. 1, 2 and 8. Each is written as PNG, SVG and PDF. For example:

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
    say(f"wrote {len(paths)} files of {len(FIGURES)} figures and {len(drawings)} claims, and {page}")


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
        say_json(jsons.dumps(found, indent=1))
    else:
        say("\n".join(trained.sentences(found)))


def page(out: Positional[Path], *, run: tuple[Path, ...] = ()) -> None:
    """Write an interactive page of how a margin weights gradients: one HTML file that needs no network.

    For example:

        marginlens lens page lens.html

        marginlens lens page lens.html --run runs/mocov3-shapes-tiny-margin-m1-0.4-seed0-0123456789

    Args:
        out: The HTML file to write.
        run: Folders of runs whose recorded angles and probabilities are laid over the maps.
    """
    out = expanded(out)
    _check_place(out)
    text = legible(pages.page([open_run(folder) for folder in run]))
    with writing(out, "OUT"):
        deliver(out, text.encode(), pages.MARK)
    over = f" with {len(run)} run{'s' * (len(run) != 1)} laid over" if run else ""
    say(f"wrote {out}{over} ({spoken(len(text.encode()))}); open it in a browser", error=is_stream(out))


def _check_place(out: Path) -> None:
    """Raise, before anything is computed, if the page cannot be written there."""
    if out.is_dir():
        raise ValueError(
            f"{out} is a folder; name a file in it: marginlens lens page {shlex.quote(str(out / 'lens.html'))}"
        )
    if not out.parent.is_dir():
        raise ValueError(f"the folder {out.parent} does not exist; create it first, or name a file elsewhere")
    check_replaceable(out, pages.MARK)
