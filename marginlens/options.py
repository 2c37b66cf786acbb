"""Turn settings into options of a command, and options and a configuration file into settings.

OPTIONS = options(Pretrain, PretrainPlace)          a type for tyro, with an optional key for each field
settings, place = settle((Pretrain, PretrainPlace), "settings.yaml", {"lr": 0.03})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import yaml
from tyro.conf import arg

from marginlens import output
from marginlens.files import MIB, expanded, reason, text
from marginlens.settings import Settings, _text, build, default, hint

Recipe = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns the usual values of other settings, given some of them."""
COMMON = {
    "config": (str, "JSON or YAML file of settings by name; options override it."),
    "print_config": (bool, "Print all settings as JSON, which --config reads, and stop."),
    "json": (bool, "Print the result as JSON."),
}
"""Options that every command with settings takes."""

MaybePath = Annotated[Path | None, arg(metavar="PATH")]
"""A path that may be left out: tyro alone would show it as {None}|PATH."""


def options(*models: type[Settings]) -> Any:
    """Return a type whose optional keys are the fields of these models and the options of `COMMON`."""
    fields: dict[str, Any] = {}
    for model in models:
        for name, field in model.model_fields.items():
            asked = arg(help=field.description, help_behavior_hint=default(model, name))
            fields[name] = Annotated[field.annotation, asked]
    for name, (kind, said) in COMMON.items():
        fields[name] = Annotated[kind, arg(help=said, help_behavior_hint=f"(default: {_text(kind())})")]
    make: Any = TypedDict
    return Annotated[make("Options", fields, total=False), arg(name="")]  # named, --help has "settings options"


def perform(
    models: Sequence[type[Settings]],
    given: dict[str, Any],
    act: Callable[..., dict[str, Any]],
    say: Callable[[dict[str, Any]], str],
    recipe: Recipe = lambda given: {},
) -> None:
    """Print the settings, or do the work and print its result, as text or as JSON."""
    overrides = {name: value for name, value in given.items() if name not in COMMON}
    settings = settle(models, given.get("config", ""), overrides, recipe)
    if given.get("print_config"):
        output.say_json(show(*settings))
        return
    found = act(*settings)
    if given.get("json"):
        output.say_json(json.dumps(found, indent=1, allow_nan=False))
    else:
        output.say(say(found))


def settle(
    models: Sequence[type[Settings]],
    config: str,
    overrides: dict[str, Any],
    recipe: Recipe = lambda given: {},
) -> list[Any]:
    """Return each model's settings: from the command line, else the file, else the recipe, else the defaults."""
    given = (read_config(Path(config), models) if config else {}) | overrides
    given = {**recipe(given), **given}
    every = [name for model in models for name in model.model_fields]
    for name in given:
        if name not in every:
            raise ValueError(f"{config}: there is no setting {name!r}; {hint(name, every)}")
    for model in models:
        for name, field in model.model_fields.items():
            if field.is_required() and name not in given:
                raise ValueError(f"--{name.replace('_', '-')} is missing: {field.description}")
    return [build(model, {n: v for n, v in given.items() if n in model.model_fields}) for model in models]


def read_config(path: Path, models: Sequence[type[Settings]] = ()) -> dict[str, Any]:
    """Return settings from a JSON or YAML file, or from the config.json of a run."""
    json_file, place = path.suffix == ".json", expanded(path)
    try:
        said = text(place, MOST_BYTES)
        found = json.loads(said, object_pairs_hook=_once) if json_file else yaml.load(said, _Yaml)
        if isinstance(found, dict) and "format" in found and isinstance(found.get("settings"), dict):
            neutral = {name: value for model in models for name, value in model.neutral.items()}
            found = neutral | found["settings"]  # because an older version acted so before a setting existed
        if isinstance(found, dict):
            return _once([(_plain_name(name), _plain(name, value)) for name, value in found.items()])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None
    except _TwiceError as error:
        raise ValueError(f"{path} has {error} twice; keep one") from None
    except _NestedError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; it must hold settings by name, such as 'epochs: 20'") from None
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {'JSON' if json_file else 'YAML'}: {_first(error)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not {'JSON' if json_file else 'YAML'}: it is not UTF-8 text") from None
    except Exception as error:  # because PyYAML believes any tag, and raises whatever its constructor raises
        said = f" ({error})" if str(error).startswith("it is") else ""
        raise ValueError(f"{path} holds a value that cannot be read{said}; see --print-config") from None
    raise ValueError(f"{path} must hold settings by name, such as 'epochs: 20'")


class _TwiceError(ValueError):
    """Report a name that comes twice."""


class _NestedError(ValueError):
    """Report a value that is more than a list of plain ones."""


def _plain_name(name: Any) -> str:
    """Return the name of a setting."""
    if not isinstance(name, str | int | float | None) or len(str(name)) > LONGEST_NAME:
        raise _NestedError(f"{str(name)[:20]!r}... is not the name of a setting")
    return str(name).replace("-", "_")


def _plain(name: Any, value: Any) -> Any:
    """Return a setting's value if it is plain or a list of plain values: a nested one may be endless to print."""
    several = value if isinstance(value, list) else [value]
    if len(several) > MOST_VALUES or any(isinstance(x, list | dict | set | tuple) for x in several):
        raise _NestedError(f"{name} must be one value, or a list of at most {MOST_VALUES}")
    return value


MOST_BYTES = MIB
"""Of a file of settings."""
MOST_VALUES = 1000
LONGEST_NAME = 100
_MOST_NAMES = 10_000
"""Of one mapping, with all that is merged into it."""


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object whose names differ."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(name)
        found[name] = value
    return found


class _Yaml(yaml.SafeLoader):
    """YAML without duplicate names, except where a name overrides a merged one (<<)."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_NAMES:
            raise _NestedError(f"merging (<<) gives more than {_MOST_NAMES:,} names")

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        _once([(name.value, None) for name in names if name.tag != "tag:yaml.org,2002:merge"])
        return node


def show(*settings: Settings) -> str:
    """Return all settings as JSON, for --config to read."""
    return json.dumps({k: v for part in settings for k, v in part.model_dump(mode="json").items()}, indent=1)


def _first(error: Exception) -> str:
    """Return what is wrong with a file, in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        said = f"{error.problem} in line {error.problem_mark.line + 1}"
    return said.replace("unhashable key", "a key that is not a plain value")[:200]
