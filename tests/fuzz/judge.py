"""Judge what a command printed: readable lines on standard error, and nothing that controls the terminal."""

from __future__ import annotations

import re
import unicodedata

_INTERNAL = re.compile(
    r"Traceback|RecursionError|(?<!\w)[A-Z]\w*(?:Error|Exception|Warning)\b|<class '|<\w+ object|NoneType|unhashable"
    r"|(?:int|float|str|list|dict|tuple|bool)' object|has no attribute|not subscriptable|not iterable|to unpack"
    r"|invalid literal for|index out of range|unexpected keyword|positional argument|unsupported operand|has no len"
    r"|^marginlens: \S+ codec can't|embedded null|recursion depth|set_int_max_str_digits|cannot convert float"
    r"|empty sequence|indices must be|must be str, not|not supported between",
    flags=re.M,
)
"""Words of the interpreter, which mean nothing to a user."""
_TYRO = re.compile(r"error parsing [^:]*: invalid literal for")
"""tyro's message names the option, so it is allowed."""


def printed(code: int, out: str, err: str) -> tuple[str, str]:
    """Return why what was printed is wrong, or "", and the piece of it that shows it."""
    for name, text in (("standard error", err), ("standard output", out)):
        if odd := next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t\r"), ""):
            return f"control character on {name}", _around(text, odd)
    if words := _INTERNAL.search(_TYRO.sub("", err)):
        return f"says {words[0]!r}", _around(err, words[0])
    lines = re.split("\r\n|[\r\n]", err.removesuffix("\n"))
    first = next((i for i, line in enumerate(lines) if line.startswith("marginlens: ")), None)
    if code and first is None:
        return f"exit code {code} and no line", err[:300]
    if first is not None and any(not line.startswith("marginlens: ") for line in lines[first:]):
        return "a message of several lines", err[:300]
    return "", err[:300]


def _around(text: str, piece: str) -> str:
    at = text.index(piece)
    return text[max(0, at - 150) : at + 100]
