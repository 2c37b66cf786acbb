"""Query runs: fields by name, conditions on them, sorting by one of them.

effect=emphasis*    epochs>=100    state=complete    seed!=0    started>=2026-01-01
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any

import marginlens as ml
from marginlens import evals
from marginlens.parameters import hint
from marginlens.runs.config import Pretrain
from marginlens.runs.records import Evaluation
from marginlens.runs.run import STATES, Run
from marginlens.settings import build, known

Value = str | int | float | bool | None
Test = Callable[[Run], bool]
RECIPE = "recipe"
"""Value of `probe_by` for an evaluation by the recipe, and of `knn_by` for the kNN at a training's end."""
ALWAYS = ("method", "data", "effect", "epochs", "seed")
"""Settings that are always spelled out."""
_NUMBERS = {"epochs_done", "loss", "bytes", *evals.titles()}
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


def value(run: Run, field: str) -> Value:
    """Return a run's value in a field. None means none yet, such as the probe of an unfinished run."""
    if field in _OF_STORE:
        return _OF_STORE[field](run)
    found = getattr(run.settings, field)
    return " ".join(f"{x:g}" for x in found) if isinstance(found, tuple) else found


def row(run: Run) -> dict[str, Value]:
    """Return every field of a run."""
    return {field: value(run, field) for field in FIELDS}


def conditions(texts: Iterable[str]) -> Test:
    """Return a test that is True if a run meets all conditions."""
    tests = [_condition(text) for text in texts]
    return lambda run: all(test(run) for test in tests)


def ordered(runs: Iterable[Run], field: str, reverse: bool = False) -> list[Run]:
    """Sort runs by a field, then by name. Runs without a value come last in either direction."""
    name = _field(field)
    chosen = sorted(runs, key=lambda run: run.name)
    have = [run for run in chosen if value(run, name) is not None]
    have.sort(key=lambda run: _comparable(value(run, name)), reverse=reverse)
    return have + [run for run in chosen if value(run, name) is None]


def _condition(text: str) -> Test:
    found = _CONDITION.fullmatch(text)
    if found is None or not found[3].strip():
        raise ValueError(f"--where {text!r} is not a condition; write field=value, such as 'epochs>=100' in quotes")
    field, sign, wanted = _field(found[1]), found[2], found[3].strip()
    if sign in _ORDERS:
        return _order(field, sign, wanted)
    same = _equal(field, wanted)
    return (lambda run: not same(run)) if sign == "!=" else same


def _order(field: str, sign: str, wanted: str) -> Test:
    if field in _FLAGS:
        raise ValueError(f"--where: {field} is yes or no, and has no order; write {field}=yes")
    limit: Any = _number(field, wanted) if field in _NUMBERS else wanted

    def test(run: Run) -> bool:
        has = value(run, field)
        return has is not None and _ORDERS[sign](has, limit)

    return test


def _equal(field: str, wanted: str) -> Test:
    if field in _FLAGS:
        word = known(f"value of {field}", wanted.lower(), _WORDS)
        return lambda run: value(run, field) == _WORDS[word]
    if field in _NUMBERS:
        number = _number(field, wanted)
        return lambda run: value(run, field) == number
    if field == "state" and not set(wanted) & set("*?"):
        known("state", wanted, dict.fromkeys(STATES))
    pattern = (_effect(wanted) if field == "effect" else wanted).replace("[", "[[]")
    return lambda run: fnmatchcase(str(value(run, field)), pattern)


def _effect(wanted: str) -> str:
    """Return an effect in its one spelling. Patterns are returned unchanged."""
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
        raise ValueError(f"--where: {field} needs a number, got {wanted!r}; write {field}>=10, say")
    return found


def _field(name: str) -> str:
    plain = name.replace("-", "_")
    if plain not in FIELDS:
        raise ValueError(f"a run has no field {name!r}; {hint(plain, FIELDS)}")
    return plain


def _comparable(has: Value) -> Any:
    return has.lower() if isinstance(has, str) else has


def spelled(settings: Pretrain) -> dict[str, Any]:
    """Return the settings to give to get all of them: those that differ from the recipe, and `ALWAYS`."""
    wanted = settings.model_dump(mode="json")
    given = {name: wanted[name] for name in ALWAYS}
    of = [wanted[name] for name in ALWAYS if name != "seed"]
    base = _recipe(*of, wanted["batch"]) | {"batch": _recipe(*of).get("batch")}
    return given | {name: value for name, value in wanted.items() if name not in given and base.get(name) != value}


def apart(settings: Pretrain) -> str:
    """Return the settings that differ from the recipe, in a few words: lr=0.1 tau=0.5."""
    return words({name: setting for name, setting in spelled(settings).items() if name not in ALWAYS})


def words(settings: Mapping[str, Any]) -> str:
    """Return settings in a few words: lr=0.1 tau=0.5."""
    return " ".join(f"{name}={plain(setting)}" for name, setting in settings.items())


def _measured(run: Run, kind: str) -> Evaluation | None:
    """Return the evaluation of a kind that stands for a run: the nearest to the recipe, then the latest.

    Of several learning rates measured together, return the lowest.
    """
    found = [one for one in run.evaluations if one.kind == kind and not getattr(one.settings, "holdout", 0)]
    return max(found, key=lambda one: (-len(one.odd), one.time, -(one.rate or 0)), default=None)


def _top1(run: Run, kind: str) -> float | None:
    """Return the accuracy on the test set of the run's own data."""
    found, last = _measured(run, kind), run.last.get(kind) if run.last else None
    if last is not None and (found is None or found.odd):
        return float(last)  # kNN is measured during training, by the recipe
    return None if found is None else found.top1


def _by(run: Run, kind: str) -> str | None:
    """Return how `_top1` was measured: "recipe", or the settings that differ from it."""
    if run.last is not None and kind in run.last:
        return RECIPE
    found = _measured(run, kind)
    return None if found is None else words(found.odd) or RECIPE


def plain(setting: Any, between: str = ",") -> str:
    """Write a setting. Whole numbers keep all digits."""
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, list):
        return between.join(map(plain, setting))
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


@lru_cache(maxsize=1024)
def _recipe(method: str, data: str, effect: str, epochs: int, batch: int | None = None) -> dict[str, Any]:
    """Return every setting's value if only these are given, from which others may follow."""
    try:
        given = {"method": method, "data": data, "effect": effect, "epochs": epochs}
        given |= {} if batch is None else {"batch": batch}
        found: dict[str, Any] = build(Pretrain, given).model_dump(mode="json")
    except ValueError:  # these alone are not valid, so everything is spelled out
        return {}
    return found


def _of_store() -> dict[str, Callable[[Run], Value]]:
    """Return a reader for each field that is not a setting. Evaluations come after the loss."""
    found: dict[str, Callable[[Run], Value]] = {
        "name": lambda run: run.name,
        "id": lambda run: run.id,
        "state": lambda run: run.state,
        "epochs_done": lambda run: run.epochs_done,
        "loss": lambda run: run.last.loss if run.last else None,
    }
    for kind in evals.titles():
        found |= {kind: partial(_top1, kind=kind), f"{kind}_by": partial(_by, kind=kind)}
    return found | {
        "diverged": lambda run: any(one.diverged for kind in evals.titles() if (one := _measured(run, kind))),
        "device": lambda run: run.device,
        "started": lambda run: run.started,
        "bytes": lambda run: run.size_bytes,
        "has_weights": lambda run: run.weights,
    }


_OF_STORE = _of_store()
FIELDS = (*_OF_STORE, *Pretrain.model_fields)
"""The store's own fields, and every setting of a pre-training."""
