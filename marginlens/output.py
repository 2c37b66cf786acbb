"""What commands and runs say: names from files never reach a terminal as control characters.

The loss alone has no rich: it is imported where it is needed.
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


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 image", "1,200 images"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


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


EVERY = 10.0
"""Seconds between plain lines, and at least one for each tenth of the run."""
_REFRESH = 0.25


def errors(quiet: bool = False) -> Console:
    """Standard error, for what is said while there is work to do."""
    from rich.console import Console

    return Console(file=cast(TextIO, _Errors()), quiet=quiet, highlight=False)


class _Errors(io.TextIOBase):
    """Standard error as it is now, which may break: work must not die of its log, whose disk is full, say."""

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
    """Not what rich puts there while a bar lives, which would print to the console again; None, if it is closed."""
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


@contextmanager
def mute(stream: Any) -> Iterator[None]:
    """From the first line on that cannot be written to a stream, what is said there goes nowhere."""
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
        """So many steps were done before."""
        self.first = self.shown = done
        self.bar.update(self.task, completed=done)

    def say(self, line: str) -> None:
        """A line of its own."""
        self.console.print(legible(line), markup=False, soft_wrap=True)

    def step(self, done: int, loss: Callable[[], float], rate: Callable[[], float]) -> None:
        """One step more; loss and rate are only asked for when they are shown."""
        now = time.monotonic()
        if self.console.is_terminal and (now - self.last > _REFRESH or done == self.total):
            self.last = now
            self.bar.update(self.task, completed=done, said=f"loss {loss():.3f}  {rate():,.0f} images/s{self.knn}")

    def epoch(self, done: int, number: int, metrics: dict[str, Any], rate: float) -> None:
        """An epoch's end."""
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
