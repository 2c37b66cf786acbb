"""Markdown made from the code when the site is built: the commands, and the settings with their defaults."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from marginlens import evals
from marginlens.cli import COMMANDS, _docstring, _function
from marginlens.options import _text
from marginlens.runs.config import Pretrain
from marginlens.settings import Settings


def commands() -> str:
    """Return a section for each command: its help, and a table of its options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro's parser has no other way in
        return "\n\n".join(_command(name) for name in COMMANDS)


def _command(name: str) -> str:
    import tyro.extras

    parser = tyro.extras.get_parser(_function(name))
    said = re.split(r"\n+Args:\n", _docstring(name))[0]
    actions = [action for action in parser._actions if "--help" not in action.option_strings]
    words = [f"marginlens {name}", *(str(action.dest).upper() for action in actions if not action.option_strings)]
    rows = [(_spelled(action), *_help(action)) for action in actions]
    parts = [f"## {name}", f"```\n{' '.join(words)}{' [OPTIONS]' * (len(rows) >= len(words))}\n```", said]
    return "\n\n".join([*parts, _table(("argument or option", "default", "what it does"), rows)])


def _spelled(action: Any) -> str:
    """Return how an option is written, with the kind of its value."""
    names = ", ".join(action.option_strings) or str(action.dest).upper()
    return f"`{names} {action.metavar}`" if action.metavar and action.option_strings else f"`{names}`"


def _help(action: Any) -> tuple[str, str]:
    """Return the default of an option and its help."""
    text, _, default = str(action.help or "").rpartition("(")
    default = default.rstrip(")").removeprefix("default:").strip()
    return default, text.strip()


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
        rows.append((f"`{name}`", default, _exceptions(own), field.description or ""))
    return _table(("setting", "default", "exceptions", "what it is"), rows)


def _exceptions(own: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: `{_text(value)}`" for key, value in own.items())


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heading), ["---"] * len(list(heading)), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text as a cell of a table: a bar would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


MAKERS: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings}
