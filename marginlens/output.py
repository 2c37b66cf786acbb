"""Standard output and standard error of the commands: names from files never reach a terminal as control characters."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, changes of the writing direction, and bytes that are not UTF-8."""


def legible(text: str) -> str:
    """Return a text whose control characters are spelled out: an escape sequence in a file's name is shown as \\x1b."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, error: bool = False, flush: bool = False) -> None:
    """Print a text to standard output, or to standard error; a stream that is closed hears nothing."""
    stream = sys.stderr if error else sys.stdout
    if stream is None:
        return
    known = legible(text)
    coding = getattr(stream, "encoding", None) or "utf-8"
    print(known.encode(coding, "backslashreplace").decode(coding), file=stream, flush=flush)


def complain(line: str) -> None:
    """Print what went wrong to standard error: one line, though a file's name in it has several."""
    say("marginlens: " + line.replace("\n", "\\n"), error=True)


def say_json(text: str) -> None:
    """Print JSON, in which only DEL is left to escape."""
    say(text.replace("\x7f", "\\u007f"))


def show(table: Table, **options: Any) -> None:
    """Print a table. Its cells are text, never rich's markup."""
    from rich.console import Console

    Console(**PLAIN).print(plain(table), **options)


PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""How a console takes text that comes from files."""


def plain(table: Table) -> Table:
    """Return the table with legible cells."""
    if isinstance(table.title, str):
        table.title = legible(table.title)
    for column in table.columns:
        column._cells = [legible(cell) if isinstance(cell, str) else cell for cell in column._cells]
    return table
