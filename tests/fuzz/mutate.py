"""Damage bytes and JSON; each function returns the name of the change and the result."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

CONTROL = "\x1b]0;title\x07\x1b[31mred\x1b[2J"
STRINGS = [
    "", " ", "x", "a\nb", "a\r\nb", "a\tb", CONTROL, "\x00", "\x7f\x9b31m", "[/b]", "[bold red]x", "[link=file:///etc]y",
    "\u202etxt.exe", "\ud800", "../../x", "/etc/passwd", "~", "~nobody/x", "-", "--help", "*", "a/b", ".", "..",
    ".hidden",
    "e\u0301" * 50, "x" * 300, "x" * 100_000, "\U0001f600", "nan", "inf", "-1", "1e999", "0x10", "null", "None", "{}",
    "%s%n",
    "{0.__class__}", "$(touch x)", "'; ls", '"', "\\", "</script><script>x()</script>", "|", "a|b", "\ufeffx", "\u2028",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30,
    [], {}, [[]], [{}], {"": 0}, [None], [0] * 3, [1e308] * 3, ["x"], [1, [2, [3]]], list(range(2000)), {"a": {"b": 1}},
]  # fmt: skip
TOKENS = [
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 5000, "1e-400", '"\\ud800"', '"\\u0000"',
    '"\\u001b[2J"',
    "[" * 500 + "]" * 500, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 100_000,
    "tru", "",
    '{"a": 1, "a": 2}', "'x'", "0x10", "01", "1.", "--1",
]  # fmt: skip
"""Raw text in the place of a value, because Python would never write it."""
_MARK = "\u2603mark\u2603"


def scalar(rng: Random) -> Any:
    """Return a value that nobody expects."""
    return rng.choice(STRINGS) if rng.random() < 0.4 else copy.deepcopy(rng.choice(VALUES))


def spoiled(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Change bytes in one to four places, or cut them off."""
    made = content
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name, change = rng.choice(_BYTES)
        names.append(name)
        made = change(rng, made)
    return "+".join(names), made


def _at(rng: Random, content: bytes) -> int:
    """Return a place, often near the beginning or the end, where formats keep what matters."""
    n = max(1, len(content))
    return min(rng.choice((rng.randrange(n), rng.randrange(min(n, 64)), n - 1 - rng.randrange(min(n, 64)))), n - 1)


def _flip(rng: Random, content: bytes) -> bytes:
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 20))):
        if made:
            made[_at(rng, content)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(made)


def _cut(rng: Random, content: bytes) -> bytes:
    return content[: _at(rng, content)]


def _insert(rng: Random, content: bytes) -> bytes:
    at, piece = _at(rng, content), rng.randbytes(rng.choice((1, 4, 100))) * rng.choice((1, 1, 50))
    return content[:at] + piece + content[at:]


def _remove(rng: Random, content: bytes) -> bytes:
    at = _at(rng, content)
    return content[:at] + content[at + rng.choice((1, 4, 512)) :]


def _number(rng: Random, content: bytes) -> bytes:
    """Write a huge or an odd number over some bytes."""
    width, order = rng.choice((2, 4, 8)), rng.choice(("little", "big"))
    value = rng.choice((0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1), 0x7FFF, 65500)) % (1 << 8 * width)
    at = _at(rng, content)
    return content[:at] + value.to_bytes(width, order) + content[at + width :]


def _repeat(rng: Random, content: bytes) -> bytes:
    first, last = sorted((_at(rng, content), _at(rng, content)))
    return content[:last] + content[first:last][:10_000] * rng.choice((1, 20)) + content[last:]


def _whole(rng: Random, content: bytes) -> bytes:
    choices = (b"", content[:1], b"\0" * min(len(content), 10_000), content[::-1], content * 2, b"\xff" * 10)
    return rng.choice((*choices, rng.randbytes(50), content[len(content) // 2 :]))


_BYTES: list[tuple[str, Callable[[Random, bytes], bytes]]] = [
    ("flip", _flip), ("flip", _flip), ("cut", _cut), ("insert", _insert), ("remove", _remove), ("number", _number),
    ("repeat", _repeat), ("whole", _whole),
]  # fmt: skip


def bad_json(rng: Random, value: Any) -> tuple[str, bytes]:
    """Spoil JSON: its bytes, its text, or what it says."""
    pick = rng.random()
    if pick < 0.2:
        return spoiled(rng, json.dumps(value).encode())
    if pick < 0.35:
        return _bad_text(rng, json.dumps(value, indent=1))
    name, made = edited(rng, value)
    return name, text(made)


def edited(rng: Random, value: Any, times: int = 0) -> tuple[str, Any]:
    """Change one or two places of a value; `Token` objects stand for raw text."""
    made, names = copy.deepcopy(value), []
    for _ in range(times or rng.choice((1, 1, 2))):
        places = list(_places(made))
        if not places:
            return "top", rng.choice((scalar(rng), Token(rng.choice(TOKENS))))
        holder, key = rng.choice(places)
        names.append(_edit(rng, holder, key))
    return "+".join(names), made


class Token(str):
    """Raw text in JSON."""

    __slots__ = ()


def text(value: Any) -> bytes:
    """Write JSON with the tokens in their places."""
    tokens: list[str] = []

    def plain(one: Any) -> Any:
        if isinstance(one, Token):
            tokens.append(str(one))
            return f"{_MARK}{len(tokens) - 1}{_MARK}"
        if isinstance(one, dict):
            return {key: plain(held) for key, held in one.items()}
        return [plain(held) for held in one] if isinstance(one, list | tuple) else one

    written = json.dumps(plain(value))
    for i, token in enumerate(tokens):
        written = written.replace(json.dumps(f"{_MARK}{i}{_MARK}"), token)
    return written.encode(errors="surrogatepass")


def _edit(rng: Random, holder: Any, key: Any) -> str:
    """Change one place, and return the name of the change."""
    old, kind = holder[key], rng.choice(("delete", "value", "value", "token", "type", "add", "scale", "swap"))
    if kind == "delete":
        del holder[key]
    elif kind == "value":
        holder[key] = scalar(rng)
    elif kind == "token":
        holder[key] = Token(rng.choice(TOKENS))
    elif kind == "type":
        holder[key] = rng.choice(([old], {"a": old}, str(old), None, [old] * 1000, repr(old) * 3))
    elif kind == "add" and isinstance(holder, dict):
        holder[rng.choice(STRINGS)] = scalar(rng)
    elif kind == "scale" and isinstance(old, int | float):
        holder[key] = rng.choice((-old, old * 10**12, old + 0.5, old + 1, old - 1, float(old), str(old)))
    elif isinstance(holder, dict):
        other = rng.choice(list(holder))
        holder[key], holder[other] = holder[other], old
    else:
        holder.extend([old] * rng.choice((1, 1000)))
    return f"{kind} {key!r:.20}"


def _places(value: Any) -> Any:
    """Yield every place below a value, as its holder and key."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in list(inside):
        yield value, key
        yield from _places(held)


def _bad_text(rng: Random, written: str) -> tuple[str, bytes]:
    at = rng.randrange(len(written))
    cut = written[:at] + rng.choice(TOKENS) + written[at:]
    plain = {
        "bom": b"\xef\xbb\xbf" + written.encode(), "utf-16": written.encode("utf-16"), "nul": written.encode() + b"\0",
        "latin": written.replace("a", "\xe4").encode("latin-1"), "two": (written * 2).encode(), "token": cut.encode(),
        "blank": b" " * 1000, "crlf": written.replace("\n", "\r\n").encode(), "top": rng.choice(TOKENS).encode(),
        "comma": written.replace("}", ",}").encode(), "comment": f"// x\n{written}".encode(),
    }  # fmt: skip
    name = rng.choice(list(plain))
    return name, plain[name]
