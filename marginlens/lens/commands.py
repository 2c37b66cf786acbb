"""`marginlens lens ...`: draw how a margin changes gradients."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from marginlens.files import check_replaceable, deliver, expanded, is_stream, spoken, writing
from marginlens.lens import page as pages
from marginlens.output import legible, say
from marginlens.runs.run import open_run


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
        raise ValueError(f"{out} is a folder; name a file in it: marginlens lens page {out / 'lens.html'}")
    if not out.parent.is_dir():
        raise ValueError(f"the folder {out.parent} does not exist; create it first, or name a file elsewhere")
    check_replaceable(out, pages.MARK)
