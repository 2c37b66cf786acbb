"""Markdown made from the code when the site is built: the commands, and the settings with their defaults."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tyro.extras
from pydantic_core import PydanticUndefined

from marginlens import evals
from marginlens.cli import COMMANDS, _docstring, _function
from marginlens.options import _text
from marginlens.runs.config import Pretrain
from marginlens.settings import Settings

WORDS = {"True": "yes", "False": "no", "None": "none"}
"""Defaults as the command line writes them."""


def commands() -> str:
    """Return a section for each command: its help, and a table of its options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # because tyro has no other way to its parser
        return "\n\n".join(_command(name) for name in COMMANDS)


def _command(name: str) -> str:
    parser = tyro.extras.get_parser(_function(name))
    text = re.split(r"\n+Args:\n", _docstring(name))[0]
    actions = [action for action in parser._actions if "--help" not in action.option_strings]
    arguments = [str(action.dest).upper() for action in actions if not action.option_strings]
    usage = " ".join(["marginlens", name, *arguments, *["[OPTIONS]"][: len(actions) > len(arguments)]])
    rows = [(_spelling(action), *_help_and_default(action)) for action in actions]
    table = _table(("argument or option", "meaning", "default"), rows) if rows else ""
    return "\n\n".join([f"## {name}", f"    {usage}", text, table])


def _spelling(action: Any) -> str:
    """Return how an option is written, with the kind of its value."""
    if not action.option_strings:
        return f"`{str(action.dest).upper()}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return f"{names} `{action.metavar}`" if action.metavar else names


def _help_and_default(action: Any) -> tuple[str, str]:
    """Split tyro's help, which ends with the default in parentheses."""
    text, _, last = str(action.help or "").rpartition("(")
    default = last.removesuffix(")").removeprefix("default:").strip()
    return text.strip(), WORDS.get(default, default)


def settings() -> str:
    """Return a section for each kind of settings: names, defaults, exceptions of data sets and methods."""
    models = dict.fromkeys([Pretrain, *(evals.get(name).settings for name in evals.MODULES)])
    return "\n\n".join(f"## {model.__name__}\n\n{_first(model)}\n\n{_fields(model)}" for model in models)


def _first(model: type[Settings]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _fields(model: type[Settings]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{_text(field.default)}`"
        own = {key: recipe[name] for key, recipe in model.recipes.items() if name in recipe}
        rows.append((f"`{name}`", field.description or "", default, _exceptions(own)))
    return _table(("setting", "meaning", "default", "exceptions"), rows)


def _exceptions(own: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: `{_text(value)}`" for key, value in own.items())


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text as a cell of a table, where a bar would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


MAKERS: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings}
"""Markers of pages, and the functions that fill them."""
