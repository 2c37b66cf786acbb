"""The command `marginlens`: words choose a function, tyro reads its options, mistakes get one line and exit code 2."""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import importlib
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from marginlens import evals, output

COMMANDS = {
    "data list": "marginlens.data.commands:data_list",
    "data prepare": "marginlens.data.commands:data_prepare",
    "data info": "marginlens.data.commands:data_info",
    "data show": "marginlens.data.commands:data_show",
    "data views": "marginlens.data.commands:data_views",
    "encoders": "marginlens.nets.count:encoders",
    "pretrain": "marginlens.train.commands:pretrain",
    **evals.MODULES,
    "embed": "marginlens.train.commands:embed",
    "export": "marginlens.train.commands:export",
    "sweep": "marginlens.sweep.commands:sweep",
    "reproduce": "marginlens.sweep.commands:reproduce",
    "report": "marginlens.report.commands:report",
    "runs show": "marginlens.runs.commands:show",
    "runs compare": "marginlens.runs.commands:compare",
    "runs prune": "marginlens.runs.commands:prune",
    "runs add": "marginlens.runs.commands:add",
    "runs": "marginlens.runs.commands:runs",
    "lens figures": "marginlens.lens.commands:figures",
    "lens run": "marginlens.lens.commands:run",
    "demo": "marginlens.demo:demo",
}
"""A function for each command; for an evaluation, its module. Its docstring is what --help prints."""


def main(words: list[str] | None = None) -> None:
    """Run the command that the words spell; exit with 2 and one line when the user can repair what went wrong."""
    words = sys.argv[1:] if words is None else words
    try:
        name, options = _command(words)
        with _ended_by_sigterm():
            if name:
                _run(name, options)
            else:
                output.say(_overview(words))
        if sys.stdout is not None:
            sys.stdout.flush()  # or a full disk is found out when nobody can say so
    except Terminated:
        _fail("stopped by SIGTERM", 143)
    except ValueError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # whoever read our output has read enough
        _let_go_of_stdout()
        sys.exit(141)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            _fail("too many files are open; raise the limit: ulimit -n 1024", 1)
        if error.filename is not None:
            _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 2)
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _let_go_of_stdout()
        _fail(f"the output cannot be written ({error.strerror})", 1)
    except Exception as error:
        if not isinstance(code := getattr(error, "code", None), int):
            raise
        _fail(str(error), code)  # a run that stopped, and says why


def _let_go_of_stdout() -> None:
    """So that nothing is written there at the end, when it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, code: int) -> NoReturn:
    output.complain(line)
    sys.exit(code)


class Terminated(BaseException):
    """End a command that SIGTERM asked to end, so that it removes what it has written half of."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless somebody else takes the signal already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _command(words: list[str]) -> tuple[str, list[str]]:
    """The command, and the words that are left for it; no command where help was asked for."""
    for name in COMMANDS:
        if words[: len(name.split())] == name.split():
            left = words[len(name.split()) :]
            if left and not left[0].startswith("-") and any(other.startswith(f"{name} ") for other in COMMANDS):
                break  # `runs` takes options only: a word after it is a command that there is not
            return name, left
    spoken = _spoken(words)
    if words and not spoken and words[0] not in ("-h", "--help", "--version"):
        raise ValueError(f"there is no option {words[0]} before a command; marginlens --help lists the commands")
    if any(name.split()[: len(spoken)] == spoken for name in COMMANDS):
        return "", []
    if spoken[0] in COMMANDS and spoken[1:2] in (["list"], ["ls"]):
        close = spoken[:1]
    else:
        close = get_close_matches(" ".join(spoken[:2]), COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean 'marginlens {close[0]}'?" if close else "marginlens --help lists the commands"
    raise ValueError(f"there is no command {' '.join(spoken[:2])!r}; {hint}")


def _spoken(words: list[str]) -> list[str]:
    """The words before the first option, of which those that follow may be the value."""
    return list(takewhile(lambda word: not word.startswith("-"), words))


def _overview(words: list[str]) -> str:
    if "--version" in words:
        from marginlens import __version__

        return f"marginlens {__version__}"
    asked = _spoken(words)
    lines = ["Contrastive representation learning, seen through margins.", "", "commands (each with --help):"]
    chosen = [name for name in COMMANDS if name.split()[: len(asked)] == asked]
    lines += [f"  marginlens {name:14} {_docstring(name).splitlines()[0]}" for name in chosen]
    return "\n".join(lines)


def _docstring(name: str) -> str:
    """What a command's function says of itself, read and not imported: help should not wait for torch."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        body = ast.parse(source.read_bytes()).body
    except OSError:  # in an archive, or compiled only
        return inspect.getdoc(_function(name)) or ""
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    return ast.get_docstring(functions[function] if function else ast.Module(body, [])) or ""


def _run(name: str, options: list[str]) -> None:
    """Reads the options, then calls the function: what goes wrong in reading is the user's, and gets one line."""
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401  # torch imports it from C, where Ctrl-C would get lost
    with _installed():
        import tyro
    function = _function(name)

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return functools.partial(function, *args, **kwargs)

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call = tyro.cli(bound, args=options, prog=f"marginlens {name}")
    except SystemExit as end:
        if end.code != 2:
            raise
        raise ValueError(f"{_one_line(said.getvalue())}; marginlens {name} --help lists the options") from None
    call()


def _one_line(box: str) -> str:
    """What tyro says in a box, as one line: what is wrong, and the option that was perhaps meant."""
    lines = [line.strip("\u2502\u256d\u256e\u2570\u256f|+ ").strip() for line in box.splitlines()[1:-1]]
    parts = "\n".join("" if set(line) <= {"\u2500", "-"} else line for line in lines).strip().split("\n\n")
    wrong = " ".join(parts[0].split()).rstrip(".")
    meant = next((part for part in parts if part.startswith("Perhaps you meant")), "")
    close = re.search(r"--[\w-]+", meant)
    return f"{wrong[:1].lower()}{wrong[1:]}" + (f" (did you mean {close[0]}?)" if close else "")


def _function(name: str):  # type: ignore[no-untyped-def]
    module, _, function = COMMANDS[name].partition(":")
    with _installed():
        if not function:
            from marginlens.train.commands import evaluation

            return evaluation(name)
        return getattr(importlib.import_module(module), function)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Report in one line an import that fails because the laboratory is not installed, or cannot run here."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "marginlens":
            raise
        missing = (error.name or "").split(".")[0]
        raise ValueError(f"{missing} is not installed; run: pip install 'marginlens[lab]'") from None
    except ImportError as error:
        if error.name != "fcntl":
            raise
        raise ValueError(str(error)) from None
