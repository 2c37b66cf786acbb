"""A grid: values for some settings, and every combination of them.

--grid "effect=emphasis(s=1)|emphasis(s=5)" --grid "seed=0|1|2"        six runs
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from marginlens.parameters import quoted
from marginlens.runs.config import Pretrain
from marginlens.settings import MOST, Settings, build, hint

LARGEST = 10_000
"""The most runs of a grid, even with --yes; more is a mistake."""


def parse(grids: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting, from texts such as "seed=0|1|2"."""
    axes: dict[str, list[Any]] = {}
    for text in grids:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"--grid {quoted(text)} has no '='; write it as --grid \"seed=0|1|2\"")
        if name not in Pretrain.model_fields:
            near = hint(name, Pretrain.model_fields)
            raise ValueError(f"--grid {quoted(text)}: there is no setting {quoted(name)}; {near}")
        if name in axes:
            raise ValueError(f"--grid has {name!r} twice; give all of its values in one, with | between them")
        axes[name] = [_value(name, part.strip()) for part in values.split("|")]
        if "" in axes[name]:
            raise ValueError(f'--grid {quoted(text)} has an empty value; write it as --grid "seed=0|1|2"')
    return axes


def size(axes: Mapping[str, Sequence[Any]]) -> int:
    """Count the combinations without making them."""
    return math.prod(len(values) for values in axes.values())


def expand(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> list[Pretrain]:
    """Return the settings of every combination: the grid's values, else the base's, else the recipe's."""
    if size(axes) > LARGEST:
        raise ValueError(f"the grid has {size(axes):,} runs, and the most is {LARGEST:,}; make it smaller")
    found: dict[Pretrain, dict[str, Any]] = {}
    for chosen in _combinations(axes):
        settings = _settings(base, chosen)
        if settings in found:
            one, other = _said(found[settings]), _said(chosen)
            raise ValueError(f"the grid's {one} and {other} are the same run; give each value once")
        found[settings] = chosen
    return list(found)


def common(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return all settings that the runs of a grid share, with the recipe's: as a base they give the same runs."""
    first, *others = (run.model_dump(mode="json") for run in expand(base, axes))
    return {n: v for n, v in first.items() if n not in axes and all(other[n] == v for other in others)}


def _settings(base: Mapping[str, Any], chosen: Mapping[str, Any]) -> Pretrain:
    try:
        settings: Pretrain = build(Pretrain, {**base, **chosen})
        check_counts(settings)
    except ValueError as error:
        listed = any(isinstance(value, str) and "," in value and "(" not in value for value in chosen.values())
        between = "; values have | between them" if listed else ""
        raise ValueError(f"the grid's {_said(chosen)} cannot be run: {error}{between}") from None
    return settings


def _said(chosen: Mapping[str, Any]) -> str:
    """Return the settings of a combination for an error, long values cut off."""
    texts = {name: str(value) for name, value in chosen.items()}
    return ", ".join(f"{name}={text if len(text) <= 80 else f'{text[:77]}...'}" for name, text in texts.items())


def check_counts(settings: Settings) -> None:
    """Raise for a count that is larger than any record allows."""
    for name, value in settings:
        if isinstance(value, int) and value > MOST and name != "seed":
            raise ValueError(f"{name} is {quoted(value)}; the most is {MOST:,}")


def _combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _value(name: str, text: str) -> Any:
    """Return a value as `build` takes it: `build` parses numbers and booleans, but not pairs."""
    if get_origin(Pretrain.model_fields[name].annotation) is tuple:
        return tuple(text.replace(",", " ").split()) or ""
    return text
