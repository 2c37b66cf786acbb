"""Run a command in process on hostile input, and judge how it ends: done, or refused in one line with code 2."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import marginlens
from marginlens.cli import COMMANDS, main
from marginlens.errors import Stopped
from tests.fuzz import fence, judge

LIMIT = 10.0
"""Seconds that an attempt may take."""
MOST_GROWTH = 1500 << 20
"""Bytes by which memory may grow in an attempt."""
ROOM = 3 << 30
"""Bytes that an attempt can allocate at all."""
PACKAGE = Path(marginlens.__file__).parent


class TooLongError(BaseException):
    """Raised by the alarm when an attempt takes too long."""


@dataclass
class Outcome:
    """How an attempt ended; `reason` says why that is a failure."""

    code: int = 0
    out: str = ""
    err: str = ""
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
    growth: int = 0


@dataclass
class Case:
    """A hostile input, and the command or call that reads it."""

    name: str
    words: Sequence[str] = ()
    call: Callable[[], object] | None = None
    """A function to call in place of a command; ValueError and Stopped are refusals."""
    check: Callable[[Outcome], str] = lambda outcome: ""
    """Return the reason why an outcome is a failure although it looks right."""
    around: Callable[[], Any] = contextlib.nullcontext
    limit: float = LIMIT
    most_output: int = 10 << 20
    spared: Sequence[str] = ("", "data", "runs", "runs/*", "data/*")
    """Folders in which a stranger keeps a file that must stay."""


@functools.cache
def scratch() -> Path:
    """Return a folder for templates, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(
    module: ModuleType, seed: int, number: int, begun: Callable[[Case], None] = lambda case: None
) -> tuple[Case, Outcome]:
    """Make the case with this number, attempt it, and return the case and its outcome.

    `begun` is called with the case before the attempt, which may kill this process.
    """
    rng = random.Random(f"{seed}/{module.__name__.rpartition('.')[2]}/{number}")
    before, folder = Path.cwd(), scratch() / "case"
    folder.mkdir()
    case = Case("none")
    try:
        os.chdir(folder)
        with mock.patch.dict(os.environ, _environment(folder)):
            case = module.case(rng, folder)
            kept = _strangers(folder, case.spared)
            begun(case)
            with case.around():
                outcome = attempt(case.call or case.words, case.limit)
                outcome.reason = outcome.reason or _touched(kept) or _checked(case, outcome)
    except Exception as error:
        outcome = Outcome(reason=f"THE FUZZER FAILED: {error!r}", detail=traceback.format_exc())
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.reason and " at " not in outcome.reason:  # the same line fails whatever led to it
        outcome.reason = f"{'call' if case.call else _command(case.words)}: {outcome.reason}"
    return case, outcome


def attempt(act: Sequence[str] | Callable[[], object], limit_seconds: float = LIMIT) -> Outcome:
    """Run a command or call a function, and judge how it ends."""
    outcome, out, err = Outcome(), _text("strict"), _text("backslashreplace")
    begin, base = time.monotonic(), _memory(reset=True)["VmRSS"]
    with _streams(out, err), warnings.catch_warnings(record=True) as warned, fence.closed(), _bounded(limit_seconds):
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        _end(act, outcome)
    outcome.seconds, outcome.growth = time.monotonic() - begin, _memory()["VmHWM"] - base
    outcome.out, outcome.err = (_content(stream) for stream in (out, err))
    if not outcome.reason:
        outcome.reason, outcome.detail = judge.printed(outcome.code, outcome.out, outcome.err)
    if not outcome.reason and warned:
        outcome.reason, outcome.detail = f"warns: {warned[0].category.__name__}", str(warned[0].message)
    if not outcome.reason and outcome.growth > MOST_GROWTH:
        outcome.reason, outcome.detail = "takes much memory", f"{outcome.growth >> 20} MB"
    return outcome


def _checked(case: Case, outcome: Outcome) -> str:
    """Return why an outcome is wrong for its case, else ""."""
    if len(outcome.out) + len(outcome.err) > case.most_output:
        return f"writes more than {case.most_output >> 20} MB"
    try:
        return case.check(outcome)
    except Exception as error:
        outcome.detail = traceback.format_exc()[-400:]
        return f"leaves something wrong: {type(error).__name__}"


def _end(act: Sequence[str] | Callable[[], object], outcome: Outcome) -> None:
    """Act, and note how that ended."""
    try:
        if callable(act):
            act()
        else:
            main(list(act))
        sys.stdout.flush()
    except SystemExit as end:
        outcome.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if outcome.code not in (0, 1, 2):
            outcome.reason = f"exit code {outcome.code}"
    except (ValueError, Stopped) as error:
        if callable(act):
            outcome.code = 2
            print(f"marginlens: {error}", file=sys.stderr)
        else:
            _note(outcome, error)
    except BaseException as error:
        _note(outcome, error)


def _note(outcome: Outcome, error: BaseException) -> None:
    """Note an uncaught exception and the last frame of marginlens in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(PACKAGE))]
    where = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"
    kind = "hangs" if isinstance(error, TooLongError) else type(error).__name__
    outcome.reason, outcome.detail = f"{kind} at {where}", str(error)[:300]


def _command(words: Sequence[str]) -> str:
    """Return the words of a command line that name the command."""
    return next((name for name in COMMANDS if list(words[: len(name.split())]) == name.split()), "command")


def _text(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, newline="")


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode(errors="backslashreplace")  # type: ignore[attr-defined]


@contextlib.contextmanager
def _streams(out: io.TextIOWrapper, err: io.TextIOWrapper) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("time.sleep"):
        yield


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Stop the block when it takes too long, and refuse it more memory than an attempt may need."""

    def late(number: int, frame: object) -> None:
        used, gone = time.process_time() - worked, time.monotonic() - begun
        if not 0.2 * gone < used < seconds:  # or it works, and others keep the processor from it
            raise TooLongError(f"{seconds:g} seconds are over")

    begun, worked, most = time.monotonic(), time.process_time(), resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_DATA, (_memory()["VmData"] + ROOM, most[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, where a first one was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, most)
        signal.signal(signal.SIGALRM, before)


def _memory(reset: bool = False) -> dict[str, int]:
    """Return this process's memory in bytes; `reset` begins a new peak."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.findall(r"(VmHWM|VmRSS|VmData):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {name: int(size) << 10 for name, size in found}


def _environment(folder: Path) -> dict[str, str]:
    """Return environment variables that keep a command in its folder."""
    return {
        "MARGINLENS_DATA": str(folder / "data"),
        "HOME": str(folder),
        "MPLCONFIGDIR": str(scratch()),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
    }


def _strangers(folder: Path, where: Sequence[str]) -> dict[Path, bytes]:
    """Plant the files of a stranger in these folders, where they exist."""
    folders = {f for pattern in where for f in (folder.glob(pattern) if pattern else [folder]) if _plain(f)}
    kept = {f / name: os.urandom(8) for f in sorted(folders) for name in ("stranger.txt", ".stranger")}
    kept[folder.parent / "stranger.txt"] = os.urandom(8)
    for path, content in kept.items():
        path.write_bytes(content)
    return kept


def _plain(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()


def _touched(kept: dict[Path, bytes]) -> str:
    for path, content in kept.items():
        if not path.is_file() or path.read_bytes() != content:
            return f"a stranger's file in {path.parent.name} was changed or removed"
    return ""
