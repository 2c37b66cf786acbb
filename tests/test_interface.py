"""Public names, their arguments, and the options of every command change only deliberately.

`tests/interface.json` lists them. After a deliberate change, and a line in CHANGELOG.md:

    python -m tests.test_interface > tests/interface.json
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import marginlens as ml
from marginlens.cli import COMMANDS, _function

KEPT = Path(__file__).with_name("interface.json")


def interface() -> dict[str, Any]:
    """Return public names with their arguments, and commands with their options and defaults."""
    return {
        "names": {name: arguments(getattr(ml, name)) for name in ml.__all__ if name != "Run"},
        "run": [name for name in (*ml.Run.__annotations__, *vars(ml.Run)) if not name.startswith("_")],
        "commands": {name: options(name) for name in sorted(COMMANDS)},
    }


def arguments(public: Any) -> dict[str, str]:
    """Return the arguments of a function or class, each with its kind and default."""
    return {
        name: f"{parameter.kind.name.lower()}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
        for name, parameter in inspect.signature(public).parameters.items()
    }


def options(command: str) -> dict[str, str]:
    """Return the options of a command, each with the default that --help shows."""
    import tyro.extras

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(_function(command))
    return {
        " ".join(action.option_strings) or str(action.dest): _default(action)
        for action in parser._actions
        if "--help" not in action.option_strings
    }


def _default(action: Any) -> str:
    found = re.findall(r"\((?:default|required|repeatable).*\)", str(action.help))
    return found[-1] if found else ""


def test_names_and_options_are_as_before() -> None:
    found, kept = interface(), json.loads(KEPT.read_text())
    assert found["names"] == kept["names"]
    assert found["commands"] == kept["commands"]
    assert set(kept["run"]) <= set(dir(ml.Run)) | set(found["run"])


if __name__ == "__main__":
    print(json.dumps(interface(), indent=1))
