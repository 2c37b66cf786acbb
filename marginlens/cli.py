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
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

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
    "lens page": "marginlens.lens.commands:page",
    "lens figures": "marginlens.lens.commands:figures",
    "lens run": "marginlens.lens.commands:run",
    "runs show": "marginlens.runs.commands:show",
    "runs compare": "marginlens.runs.commands:compare",
    "runs prune": "marginlens.runs.commands:prune",
    "runs add": "marginlens.runs.commands:add",
    "runs": "marginlens.runs.commands:runs",
    "demo": "marginlens.demo:demo",
}
"""The function of each command, or the module of an evaluation; --help prints its docstring."""
SYNONYMS = {
    "download": "data prepare",
    "eval": "probe",
    "evaluate": "probe",
    "extract": "embed",
    "features": "embed",
    "finetune": "transfer",
    "linear": "probe",
    "plot": "report",
    "test": "probe",
    "version": "--version",
}
"""Commands for words that other packages use, and that are spelled too differently to be found by likeness."""


def main(words: list[str] | None = None) -> None:
    """Run the command that the words spell; exit with 2 and one line if the user can repair a mistake."""
    words = sys.argv[1:] if words is None else words
    words = [*words[1:], "--help"] if words[:1] == ["help"] else words
    try:
        name, options = _command(words)
        with _ended_by_sigterm():
            if name:
                _run(name, options)
            else:
                output.say(_overview(words))
        if sys.stdout is not None:
            sys.stdout.flush()  # because a full disk can only be reported while we run
    except Terminated:
        _fail("stopped by SIGTERM", 143)
    except ValueError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("stopped by Ctrl-C", 130)
    except BrokenPipeError:  # because the reader of our output stopped, as `head` does
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
        _fail(str(error), code)  # a run that stopped with a reason


def _let_go_of_stdout() -> None:
    """Send further output nowhere: Python flushes at the end, and that would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, code: int) -> NoReturn:
    output.complain(line)
    sys.exit(code)


class Terminated(BaseException):
    """End a command after SIGTERM, so that it removes half-written files."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless the signal has a handler already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # because a second one should end it at once
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _command(words: list[str]) -> tuple[str, list[str]]:
    """Return the command and its options; no command if the words ask for an overview."""
    for name in COMMANDS:
        if words[: len(name.split())] == name.split():
            left = words[len(name.split()) :]
            if left and not left[0].startswith("-") and any(other.startswith(f"{name} ") for other in COMMANDS):
                break  # because `runs` takes options only: the next word is a mistyped command
            return name, left
    spoken = _spoken(words)
    if words and not spoken and words[0] not in ("-h", "--help", "--version"):
        raise ValueError(f"there is no option {words[0]} before a command; marginlens --help lists the commands")
    if any(name.split()[: len(spoken)] == spoken for name in COMMANDS):
        return "", []
    raise ValueError(_no_command(spoken))


def _spoken(words: list[str]) -> list[str]:
    """Return the words before the first option; later ones may be an option's value."""
    return list(takewhile(lambda word: not word.startswith("-"), words))


def _no_command(spoken: list[str]) -> str:
    """Return a line about words that are no command, with the command that was probably meant."""
    first, asked = spoken[0], " ".join(spoken[:2])
    if first in COMMANDS and spoken[1:2] in (["list"], ["ls"]):
        close = first
    else:
        near = get_close_matches(asked, COMMANDS, n=1, cutoff=0.5)
        close = SYNONYMS.get(first) or (near[0] if near else "")
    hint = f"did you mean 'marginlens {close}'?" if close else "marginlens --help lists the commands"
    return f"there is no command {asked!r}; {hint}"


def _overview(words: list[str]) -> str:
    """Return the version, or a line for each command that begins with the words."""
    if "--version" in words:
        from marginlens import __version__

        return f"marginlens {__version__}"
    asked = _spoken(words)
    lines = ["Contrastive learning with margins: losses, a laboratory and a lens.", ""]
    lines += ["Commands; add --help to one of them for its options and examples:", ""]
    chosen = [name for name in COMMANDS if name.split()[: len(asked)] == asked]
    lines += [f"  marginlens {name:14} {_docstring(name).splitlines()[0]}" for name in chosen]
    return "\n".join(lines)


def _docstring(name: str) -> str:
    """Return the docstring of a command's function from its source: importing it would wait for torch."""
    module, _, function = COMMANDS[name].partition(":")
    source = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        body = ast.parse(source.read_bytes()).body
    except OSError:  # because it is in an archive, or only compiled
        return inspect.getdoc(_function(name)) or ""
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    return ast.get_docstring(functions[function] if function else ast.Module(body, [])) or ""


def _run(name: str, options: list[str]) -> None:
    """Read the options, then call the function; a mistake in an option is a ValueError of one line."""
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401  # because torch imports it from C, where Ctrl-C would get lost
    function = _function(name)

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return functools.partial(function, *args, **kwargs)

    vars(bound)["__signature__"] = inspect.signature(vars(bound).pop("__wrapped__"))  # because tyro would unwrap it
    bound.__annotations__ = _annotations(function)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call = _read(name, bound, options)
    except SystemExit as end:
        if end.code != 2:
            raise
        line = _unknown(options, _names(name, bound)) or _one_line(said.getvalue())
        raise ValueError(f"{line}; marginlens {name} --help lists the options") from None
    call()


def _read(name: str, bound: Callable[..., Any], options: list[str]) -> Callable[[], None]:
    """Return the call of a command with its options."""
    with _installed():
        import tyro
    call: Callable[[], None] = tyro.cli(bound, args=options, prog=f"marginlens {name}")
    return call


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's types, so that help says "none" and "no" of defaults as it does of settings."""
    from tyro.conf import arg

    found, plain = get_type_hints(function, include_extras=True), get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        several = get_origin(plain[name]) is tuple and parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.default is None or parameter.default == () or several:
            found[name] = Annotated[found[name], arg(help_behavior_hint="(default: none)")]
        elif parameter.default is False:
            found[name] = Annotated[found[name], arg(help_behavior_hint="(default: no)")]
    return found


def _names(name: str, bound: Callable[..., Any]) -> list[str]:
    """Return the options of a command, as its help lists them."""
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.suppress(SystemExit):
        _read(name, bound, ["--help"])
    return re.findall(r"^[^\w-]*(?:-h, )?--([\w-]+)", heard.getvalue(), re.M)


def _unknown(options: list[str], names: list[str]) -> str:
    """Return a line about the options that a command does not have; "" if it has them all."""
    from marginlens.settings import synonym

    known = {name.replace("-", "_"): name for name in names}
    lines = []
    for option in options:
        asked = option.partition("=")[0].lstrip("-").replace("-", "_")
        if not re.match(r"--?[a-zA-Z]", option) or asked in known or asked.removeprefix("no_") in known:
            continue
        near = [synonym(asked, known), *get_close_matches(asked, known, n=1)]
        meant = next((f" (did you mean --{known[name]}?)" for name in near if name), "")
        lines.append(f"{option.partition('=')[0]}{meant}")
    return f"there is no option {', nor '.join(dict.fromkeys(lines))}" if lines else ""


_PLAINER = {
    r"^Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)": r"\1 needs a whole number, got \2",
    r"^Error parsing (\S+): could not convert string to float: (.*)": r"\1 needs a number, got \2",
    r"^Missing value for argument '(.*?)'\. Expected 1 values?": r"\1 needs a value",
    r"^Missing value for argument '(.*?)'\. Expected (\d+) values?": r"\1 needs \2 values",
    r"^Missing from .*?: (\S+) (.*?)\.? \(required\)": r"an argument is missing: \1 (\2)",
    r"^Invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*)\)": r"\2 is '\1'; it must be one of \3",
    r"^Unrecognized options: ": "unexpected argument: ",
}
"""Lines of tyro, and how we say them."""


def _one_line(box: str) -> str:
    """Return the first paragraph of tyro's box, which says what is wrong, as one line."""
    lines = [line.strip("\u2502\u256d\u256e\u2570\u256f|+ ").strip() for line in box.splitlines()[1:-1]]
    parts = "\n".join("" if set(line) <= {"\u2500", "-"} else line for line in lines).strip().split("\n\n")
    wrong = " ".join(parts[0].split()).rstrip(".")
    for theirs, ours in _PLAINER.items():
        wrong = re.sub(theirs, ours, wrong, flags=re.IGNORECASE)
    return f"{wrong[:1].lower()}{wrong[1:]}"


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
