"""Whether records are what a run writes; the first thing that is not is said in one line, which names the file.

JSON bounds neither numbers nor texts, and a record may come from anywhere: what is checked here needs no second look
by whoever lists, plans or reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field, TypeAdapter

from marginlens.files import read
from marginlens.train.config import Knn, Pretrain, Probe, Settings, build
from marginlens.train.files import MOST_BYTES, lines
from marginlens.train.identity import NEUTRAL_EVALUATION

LARGEST = 1e100
"""Of any number: its square is still one."""
SMALLEST = 1e-12
"""Of seconds and images a second, unless they are 0."""
MOST = 1 << 53
"""Of images, steps, epochs and other counts."""

EVALUATIONS: dict[str, type[Settings]] = {"probe": Probe, "transfer": Probe, "knn": Knn}
_NUMBERS = (int, float)
_LINES = TypeAdapter(
    list[dict[str, Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]]]
)


def settings(path: Path, found: Pretrain) -> None:
    """config.json, whose identity was looked at when it was opened."""
    for name, value in found:
        if isinstance(value, int) and value > MOST and name != "seed":
            raise ValueError(f"{path} has {name} {_short(value)}; no run has more than {MOST}")


def result(path: Path, found: Mapping[str, Any]) -> None:
    """result.json."""
    _need(path, found, ("epochs", "loss", "steps", "images"))
    for name in ("epochs", "steps", "images"):
        _number(path, found, name, 1, MOST, whole=True)
    _number(path, found, "loss")
    _optional(path, found, ("spread", "embedding_spread"))
    _optional(path, found, ("knn",), 0, 100)
    _optional(path, found, ("seconds", "images_per_second"), 0)


def failure(path: Path, found: Mapping[str, Any]) -> None:
    """failure.json."""
    _need(path, found, ("line",))
    _text(path, found, "line")


def evaluation(path: Path, found: Mapping[str, Any], run: str, data: str) -> None:
    """A file of evaluations/: of the run with this id, which learned from these data, of a kind that is known."""
    needed = {"kind", "run", "data", "data_fingerprint", "settings", "top1", "seconds", "environment"}
    pictures = ("train_images", "test_images") if found.get("kind") in ("probe", "transfer") else ()
    _need(path, found, sorted({*needed, *pictures}))
    for name in ("kind", "run", "data", "data_fingerprint"):
        _text(path, found, name)
    if found["run"] != run:
        raise ValueError(f"{path} is of the run {_short(found['run'])}, and lies in the folder of {run}")
    if found["kind"] != "transfer" and found["data"] != data:
        raise ValueError(f"{path} is on {_short(found['data'])}, and its run learned from {data}")
    _number(path, found, "top1", 0, 100)
    _number(path, found, "seconds", 0)
    for name in pictures:
        _number(path, found, name, 1, MOST, whole=True)
    _optional(path, found, ("top5",), 0, 100)
    _optional(path, found, ("loss", "neighbours", "feature_norm"))
    _optional(path, found, ("classes",), 1, MOST)
    lost = found.get("lost", [])
    if not isinstance(lost, list) or not all(isinstance(rate, float) for rate in lost):
        raise ValueError(f"{path} has lost {_short(lost)}; it must be a list of learning rates")
    _environment(f"{path}, environment", found["environment"])
    try:
        _evaluated(found["kind"], found["settings"])
    except ValueError as error:
        unknown = "is an evaluation that this version of marginlens does not know, and a later one may"
        raise ValueError(f"{path} {unknown}: {error}") from None


def starts(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """environment.jsonl."""
    for number, line in enumerate(found, 1):
        _environment(f"{path}, line {number},", line)


def metrics(path: Path) -> tuple[int, dict[str, Any]]:
    """metrics.jsonl: numbers, whatever is measured. How many lines there are, and the last of them."""
    found, last = _table(path, ("epoch", "loss"), -LARGEST)
    return len(found), last


def speed(path: Path) -> list[float]:
    """speed.jsonl: images a second, of the epochs in which they were measured."""
    found, _ = _table(path, ("epoch", "seconds", "images_per_second"), 0)
    return [rate for line in found if (rate := line["images_per_second"])]


def _table(path: Path, needed: Sequence[str], low: float) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Lines of numbers, and the last as it is written; read at once, by a parser that looks at each number: a store
    has hundreds of thousands."""
    whole = read(path, MOST_BYTES).rpartition(b"\n")[0] if path.exists() else b""
    if not whole:
        return [], {}
    try:
        found = _LINES.validate_json(b"[" + whole.replace(b"\n", b",") + b"]")
        proper = all(_proper(line, needed, low) for line in found)
    except ValueError:
        proper = False
    if not proper:
        _say(path, lines(path), needed, low)
    return found, json.loads(whole.rpartition(b"\n")[2])


def _evaluated(kind: str, given: Any) -> None:
    """Settings of an evaluation as this version has them, each of its own type."""
    if kind not in EVALUATIONS:
        raise ValueError(f"its kind is {_short(kind)}, and there are {', '.join(EVALUATIONS)}")
    if not isinstance(given, dict):
        raise ValueError("its settings are no object")
    model = EVALUATIONS[kind]
    neutral = {name: value for name, value in NEUTRAL_EVALUATION.items() if name in model.model_fields}
    if missing := [name for name in model.model_fields if name not in given and name not in neutral]:
        raise ValueError(f"its settings lack {', '.join(missing)}")
    known = build(model, neutral | given).model_dump(mode="json")
    for name, value in given.items():
        if known[name] != value or isinstance(value, bool) or (isinstance(value, int) and value >= 1 << 63):
            raise ValueError(f"its {name} is {_short(value)}")


def _environment(where: str, found: Any) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {_short(found)}, and must be an object")
    for name in ("time", "device"):
        if not isinstance(found.get(name), str):
            raise ValueError(f"{where} has no {name}; it is not what a run wrote")
    if type(found.get("numerics", 0)) is not int:
        raise ValueError(f"{where} has numerics {_short(found['numerics'])}, and it must be a whole number")


def _need(path: Path, found: Mapping[str, Any], names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it is not what a run wrote")


def _text(path: Path, found: Mapping[str, Any], name: str) -> None:
    if not isinstance(found[name], str):
        raise ValueError(f"{path} has {name} {_short(found[name])}, and it must be text")


def _optional(
    path: Path, found: Mapping[str, Any], names: Iterable[str], low: float = -LARGEST, high: float = LARGEST
) -> None:
    for name in names:
        if name in found:
            _number(path, found, name, low, high)


def _number(
    path: Path,
    found: Mapping[str, Any],
    name: str,
    low: float = -LARGEST,
    high: float = LARGEST,
    *,
    whole: bool = False,
) -> None:
    value = found[name]
    if type(value) not in _NUMBERS or not low <= value <= high or (whole and type(value) is not int):
        what = "a whole number" if whole else "a number"
        raise ValueError(f"{path} has {name} {_short(value)}, and it must be {what} from {low:g} to {high:g}")


def _proper(line: Mapping[str, float], needed: Sequence[str], low: float) -> bool:
    for name in needed:
        if name not in line:
            return False
    if low == 0 and min(line.values()) < SMALLEST:
        return all(value == 0 or value >= SMALLEST for value in line.values())
    return line["epoch"].is_integer()


def _say(path: Path, found: Sequence[Mapping[str, Any]], needed: Sequence[str], low: float) -> NoReturn:
    """Finds what is wrong in lines of which one is."""
    for number, line in enumerate(found, 1):
        if missing := [name for name in needed if name not in line]:
            raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}; it is not what a run wrote")
        for name, value in line.items():
            one = type(value) in _NUMBERS and -LARGEST <= value <= LARGEST
            if not one or not _proper(dict.fromkeys(needed, 1.0) | {name: float(value)}, needed, low):
                raise ValueError(f"{path}, line {number} has {name} {_short(value)}; it is not what a run wrote")
    raise ValueError(f"{path} cannot be read; it is not what a run wrote")


def _short(value: object) -> str:
    """A value in a line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} characters)"
