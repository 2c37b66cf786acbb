"""What can be asked of a run: fields by name, conditions on them, an order by one of them.

effect=emphasis*    epochs>=100    state=complete    seed!=0    started>=2026-01-01
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import marginlens as ml
from marginlens.parameters import hint
from marginlens.runs.entry import STATES, Entry, when
from marginlens.train.accuracy import diverged
from marginlens.train.config import PROBE_RECIPES, Knn, Pretrain, Probe, build, known
from marginlens.train.identity import NEUTRAL_EVALUATION

Value = str | int | float | bool | None
Test = Callable[[Entry], bool]

_OF_STORE: dict[str, Callable[[Entry], Value]] = {
    "name": lambda entry: entry.name,
    "id": lambda entry: entry.run.id if entry.run else None,
    "state": lambda entry: entry.state,
    "epochs_done": lambda entry: entry.epochs_done,
    "loss": lambda entry: entry.last.get("loss"),
    "knn": lambda entry: _top1(entry, "knn"),
    "knn_by": lambda entry: _by(entry, "knn"),
    "probe": lambda entry: _top1(entry, "probe"),
    "probe_by": lambda entry: _by(entry, "probe"),
    "diverged": lambda entry: (found := _measured(entry, "probe")) is not None and diverged(found),
    "device": lambda entry: entry.device,
    "started": lambda entry: entry.started,
    "bytes": lambda entry: entry.size_bytes,
    "has_weights": lambda entry: entry.weights,
}
FIELDS = (*_OF_STORE, *Pretrain.model_fields)
"""The store's own, and every setting of a pre-training."""

RECIPE = "recipe"
"""What `probe_by` and `knn_by` say of an evaluation as the recipe has it, or of the kNN at a training's end."""

ALWAYS = ("method", "data", "effect", "epochs", "seed")
"""Settings that are always spelled out."""

_NUMBERS = {"epochs_done", "loss", "knn", "probe", "bytes"}
_NUMBERS |= {name for name, field in Pretrain.model_fields.items() if field.annotation in (int, float)}
_FLAGS = {"has_weights", "diverged"} | {
    name for name, field in Pretrain.model_fields.items() if field.annotation is bool
}
_WORDS = {"yes": True, "true": True, "no": False, "false": False}
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([\w-]+)\s*(>=|<=|!=|==|=|>|<)(.*)", flags=re.S)


def value(entry: Entry, field: str) -> Value:
    """What a run has in a field; None where it has nothing, as an unfinished run has no probe."""
    if field in _OF_STORE:
        return _OF_STORE[field](entry)
    found = getattr(entry.run.settings, field) if entry.run else None
    return " ".join(f"{x:g}" for x in found) if isinstance(found, tuple) else found


def row(entry: Entry) -> dict[str, Value]:
    """Every field of a run."""
    return {field: value(entry, field) for field in FIELDS}


def conditions(texts: Iterable[str]) -> Test:
    """Whether a run meets all of them."""
    tests = [_condition(text) for text in texts]
    return lambda entry: all(test(entry) for test in tests)


def ordered(entries: Iterable[Entry], field: str, reverse: bool = False) -> list[Entry]:
    """By a field, then by name; those that have nothing in it come last either way."""
    name = _field(field)
    chosen = sorted(entries, key=lambda entry: entry.name)
    have = [entry for entry in chosen if value(entry, name) is not None]
    have.sort(key=lambda entry: _comparable(value(entry, name)), reverse=reverse)
    return have + [entry for entry in chosen if value(entry, name) is None]


def _condition(text: str) -> Test:
    found = _CONDITION.fullmatch(text)
    if found is None or not found[3].strip():
        raise ValueError(f"--where {text!r} is not a condition; write field=value, such as 'epochs>=100' in quotes")
    field, sign, wanted = _field(found[1]), found[2], found[3].strip()
    if sign in _ORDERS:
        return _order(field, sign, wanted)
    same = _equal(field, wanted)
    return (lambda entry: not same(entry)) if sign == "!=" else same


def _order(field: str, sign: str, wanted: str) -> Test:
    if field in _FLAGS:
        raise ValueError(f"--where: {field} is yes or no, and has no order; write {field}=yes")
    limit: Any = _number(field, wanted) if field in _NUMBERS else wanted

    def test(entry: Entry) -> bool:
        has = value(entry, field)
        return has is not None and _ORDERS[sign](has, limit)

    return test


def _equal(field: str, wanted: str) -> Test:
    if field in _FLAGS:
        word = known(f"value of {field}", wanted.lower(), _WORDS)
        return lambda entry: value(entry, field) == _WORDS[word]
    if field in _NUMBERS:
        number = _number(field, wanted)
        return lambda entry: value(entry, field) == number
    if field == "state" and not set(wanted) & set("*?"):
        known("state", wanted, dict.fromkeys(STATES))
    pattern = (_effect(wanted) if field == "effect" else wanted).replace("[", "[[]")
    return lambda entry: fnmatchcase(str(value(entry, field)), pattern)


def _effect(wanted: str) -> str:
    """An effect's one spelling; as it is, where it is a pattern."""
    try:
        return str(ml.effect(wanted))
    except ValueError:
        return wanted


def _number(field: str, wanted: str) -> float:
    try:
        found = float(wanted)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise ValueError(f"--where: {field} is a number, and {wanted!r} is none; write {field}>=10, say")
    return found


def _field(name: str) -> str:
    plain = name.replace("-", "_")
    if plain not in FIELDS:
        raise ValueError(f"a run has no field {name!r}; {hint(plain, FIELDS)}")
    return plain


def _comparable(has: Value) -> Any:
    return has.lower() if isinstance(has, str) else has


def spelled(settings: Pretrain) -> dict[str, Any]:
    """The settings that must be given to get all of them: what is not the recipe's own value, and `ALWAYS`."""
    wanted = settings.model_dump(mode="json")
    given = {name: wanted[name] for name in ALWAYS}
    of = [wanted[name] for name in ALWAYS if name != "seed"]
    base = _recipe(*of, wanted["batch"]) | {"batch": _recipe(*of).get("batch")}
    return given | {name: value for name, value in wanted.items() if name not in given and base.get(name) != value}


def apart(settings: Pretrain) -> str:
    """The settings that are not the recipe's own, in a few words: lr=0.1 tau=0.5."""
    return words({name: setting for name, setting in spelled(settings).items() if name not in ALWAYS})


def words(settings: Mapping[str, Any]) -> str:
    """Settings in a few words: lr=0.1 tau=0.5."""
    return " ".join(f"{name}={plain(setting)}" for name, setting in settings.items())


def odd(one: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation that are not the recipe's for its kind and data."""
    usual = Knn() if one["kind"] == "knn" else Probe(**PROBE_RECIPES.get(one["data"], {}))
    expected = usual.model_dump(mode="json")
    given = one["settings"]
    missing = {name: value for name, value in NEUTRAL_EVALUATION.items() if name in expected and name not in given}
    return {name: value for name, value in (given | missing).items() if value != expected.get(name)}


def _measured(entry: Entry, kind: str) -> dict[str, Any] | None:
    """The evaluation of a kind that a run is known by: the nearest to the recipe, of these the latest.

    Of several learning rates beside each other, which are measured at once, the lowest.
    """
    found = [one for one in entry.evaluations if one["kind"] == kind and not one["settings"].get("holdout")]
    return max(found, key=lambda one: (-len(odd(one)), when(one), -one["settings"].get("lr", 0)), default=None)


def _top1(entry: Entry, kind: str) -> float | None:
    """On the test set of the data it learned from."""
    found = _measured(entry, kind)
    if kind in entry.last and (found is None or odd(found)):
        return float(entry.last[kind])  # nearest neighbours are looked at while it learns, by the recipe
    return None if found is None else float(found["top1"])


def _by(entry: Entry, kind: str) -> str | None:
    """How that was measured: by the recipe, or what was set otherwise."""
    if kind in entry.last:
        return RECIPE
    found = _measured(entry, kind)
    return None if found is None else words(odd(found)) or RECIPE


def plain(setting: Any, between: str = ",") -> str:
    """A setting in words; a whole number with all its digits."""
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, list):
        return between.join(map(plain, setting))
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


@lru_cache(maxsize=1024)
def _recipe(method: str, data: str, effect: str, epochs: int, batch: int | None = None) -> dict[str, Any]:
    """What every setting is where only these are given: those that others may follow from."""
    try:
        given = {"method": method, "data": data, "effect": effect, "epochs": epochs}
        given |= {} if batch is None else {"batch": batch}
        found: dict[str, Any] = build(Pretrain, given).model_dump(mode="json")
    except ValueError:  # these alone do not go together: everything is spelled out
        return {}
    return found
