"""Print text, tables and progress; names from files never reach a terminal as control characters.

Functions import rich when they need it, because the loss alone works without it.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, changes of the writing direction, and bytes that are not UTF-8."""


def legible(text: str) -> str:
    """Return a text with its control characters spelled out: an escape in a file's name is shown as \\x1b."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, error: bool = False, flush: bool = False) -> None:
    """Print a text to standard output, or to standard error; skip a closed stream."""
    stream = sys.stderr if error else sys.stdout
    if stream is None:
        return
    known = legible(text)
    coding = getattr(stream, "encoding", None) or "utf-8"
    print(known.encode(coding, "backslashreplace").decode(coding), file=stream, flush=flush)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 image", "1,200 images"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def complain(line: str) -> None:
    """Print an error as one line, even if a file's name in it has several."""
    say("marginlens: " + line.replace("\n", "\\n"), error=True)


def say_json(text: str) -> None:
    """Print JSON. Of the control characters, it leaves only DEL to escape."""
    say(text.replace("\x7f", "\\u007f"))


def show(table: Table, **options: Any) -> None:
    """Print a table. Its cells are plain text, never rich's markup."""
    from rich.console import Console

    Console(**PLAIN).print(plain(table), **options)


PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""Options of a console that prints text from files."""


def plain(table: Table) -> Table:
    """Return the table with legible cells."""
    if isinstance(table.title, str):
        table.title = legible(table.title)
    for column in table.columns:
        column._cells = [legible(cell) if isinstance(cell, str) else cell for cell in column._cells]
    return table


EVERY = 10.0
"""Seconds between plain lines; there is also one for each tenth of the run."""
_REFRESH = 0.25


def errors(quiet: bool = False) -> Console:
    """Return a console on standard error, for messages during work."""
    from rich.console import Console

    return Console(file=cast(TextIO, _Errors()), quiet=quiet, highlight=False)


class _Errors(io.TextIOBase):
    """The current standard error. A failed write to it is ignored: a full disk under the log must not end a run."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        stream = _stream()
        if stream is not None:
            with mute(stream):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        stream = _stream()
        if stream is not None:
            with mute(stream):
                stream.flush()

    def isatty(self) -> bool:
        ask = getattr(_stream(), "isatty", None)
        return bool(ask and ask())


def _stream() -> Any:
    """Return standard error, or None if it is closed; rich's stand-in during a bar would print to the console again."""
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


@contextmanager
def mute(stream: Any) -> Iterator[None]:
    """Send a stream nowhere from the first write that fails."""
    try:
        yield
    except OSError:
        with suppress(OSError, AttributeError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Display:
    """Progress of one run, in steps."""

    def __init__(self, what: str, total: int = 1, epochs: int = 1, quiet: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.console = errors(quiet)
        self.total, self.epochs, self.knn = total, epochs, ""
        self.begin, self.first, self.last, self.shown = time.monotonic(), 0, 0.0, 0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        times = (TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(elapsed_when_finished=False))
        self.bar = Progress(*columns, *times, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(what, total=total, said="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin_at(self, done: int) -> None:
        """Start the bar after steps of an earlier start."""
        self.first = self.shown = done
        self.bar.update(self.task, completed=done)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(legible(line), markup=False, soft_wrap=True)

    def step(self, done: int, loss: Callable[[], float], rate: Callable[[], float]) -> None:
        """Count a step. Loss and rate are computed only if they are shown."""
        now = time.monotonic()
        if self.console.is_terminal and (now - self.last > _REFRESH or done == self.total):
            self.last = now
            self.bar.update(self.task, completed=done, said=f"loss {loss():.3f}  {rate():,.0f} images/s{self.knn}")

    def epoch(self, done: int, number: int, metrics: dict[str, Any], rate: float) -> None:
        """Show the end of an epoch."""
        if "knn" in metrics:
            self.knn = f"  kNN {metrics['knn']:.1f} % (epoch {number})"
        loss = f"loss {metrics['loss']:.4f}"
        self.bar.update(self.task, said=f"{loss}  {rate:,.0f} images/s{self.knn}")
        now = time.monotonic()
        due = now - self.last >= EVERY or done - self.shown >= self.total / 10 or done == self.total
        if not self.console.is_terminal and due:
            self.last, self.shown = now, done
            left = (now - self.begin) / max(done - self.first, 1) * (self.total - done)
            eta = f"ETA {int(left) // 60}:{int(left) % 60:02d}"
            self.say(f"epoch {number}/{self.epochs}  {loss}  {rate:,.0f} images/s  {eta}{self.knn}")
