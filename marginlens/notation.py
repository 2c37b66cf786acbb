"""The string form of an effect: `emphasis(s=20, c=2.5) * ratio(m1=0.4)`.

The command line, configuration files, tables and reports share it. Python's own parser reads it; nothing is evaluated.
"""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import fields
from typing import Any, Literal, get_origin, get_type_hints

from marginlens.effects import EFFECTS, Effect
from marginlens.parameters import hint, quoted

_LONGEST = 500


def effect(text: str) -> Effect:
    """Return the effect that a string describes; `str(effect)` gives the string back.

    Args:
        text: Names of effects with their parameters, joined by `*`. A number may be a fraction such as `1/3`, or `inf`.
            Case does not matter in names.

    Example:
        >>> ml.effect("emphasis(s=20, c=2.5)")
        Emphasis(s=20.0, c=2.5)
        >>> ml.effect("margin(m1=0.4) * attenuation(alpha=1, kind=II)").factors[1]
        Attenuation(alpha=1.0, kind='II')
    """
    if not isinstance(text, str):
        raise TypeError(f"effect must be a string such as 'emphasis(s=20)', not {quoted(text)}")
    if len(text) > _LONGEST:
        raise ValueError(f"effect is {len(text)} characters long; at most {_LONGEST} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text, "it does not read as name(key=value, ...) * name(...)") from None
    return _product(tree, text)


def _product(node: ast.expr, text: str) -> Effect:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(node.left, text) * _product(node.right, text)
    if isinstance(node, ast.Name):
        return _build(node.id, [], text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.args:
            raise _refused(text, f"{node.func.id} takes its parameters by name")
        return _build(node.func.id, node.keywords, text)
    raise _refused(text, "it must be effects joined by *")


def _build(name: str, keywords: list[ast.keyword], text: str) -> Effect:
    name = name.lower()
    if name not in EFFECTS:
        raise _refused(text, f"there is no effect {name!r}", name, list(EFFECTS))
    allowed = [f.name for f in fields(EFFECTS[name])]
    given: dict[str, float | str] = {}
    for keyword in keywords:
        if keyword.arg is None:
            raise _refused(text, f"{name} takes its parameters by name")
        if keyword.arg not in allowed:
            raise _refused(text, f"{name} has no parameter {keyword.arg!r}", keyword.arg, allowed)
        if keyword.arg in given:
            raise _refused(text, f"{name} is given {keyword.arg} twice")
        value = _value(keyword.value, f"{name}'s {keyword.arg}", text)
        if isinstance(value, str) and not _takes_words(EFFECTS[name], keyword.arg):
            raise _refused(text, f"{name}'s {keyword.arg} must be a number, not {value!r}")
        given[keyword.arg] = value
    missing = [p for p in allowed if p not in given and not _has_default(name, p)]
    if missing:
        raise _refused(text, f"{name} needs {', '.join(missing)}")
    return EFFECTS[name](**given)  # type: ignore[arg-type]


def _value(node: ast.expr, what: str, text: str) -> float | str:
    """Return a number, a fraction of two numbers, inf, or a word; raise a ValueError for anything else."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            if abs(number) <= sys.float_info.max:
                return float(number)
            raise _refused(text, f"{what} is {_source(node, text)}, beyond the largest float; write inf for infinity")
        case ast.Constant(value=str(word)):
            return word
        case ast.Name(id="inf"):
            return float("inf")
        case ast.Name(id=word):
            return word
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            if isinstance(size := _value(operand, what, text), float):
                return -size
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            top, bottom = _value(left, what, text), _value(right, what, text)
            if isinstance(top, float) and isinstance(bottom, float) and bottom != 0.0 and math.isfinite(top / bottom):
                return top / bottom
    raise _refused(text, f"{what} must be a number or a word, not {_source(node, text)}")


def _source(node: ast.expr, text: str) -> str:
    """Return the part of `text` that a node was read from, as an error quotes it."""
    return quoted(ast.get_source_segment(text.strip(), node))


def _takes_words(effect: type[Any], name: str) -> bool:
    """True if a parameter is a word: by its default, or by its type if it has no default."""
    if hasattr(effect, name):
        return isinstance(getattr(effect, name), str)
    kind = get_type_hints(effect)[name]
    return kind is str or get_origin(kind) is Literal


def _has_default(name: str, parameter: str) -> bool:
    return hasattr(EFFECTS[name], parameter)


def _refused(text: str, why: str, typo: str = "", known: list[str] | None = None) -> ValueError:
    return ValueError(f"effect {text!r}: {why}{f'; {hint(typo, known)}' if known else ''}")
