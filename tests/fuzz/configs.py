"""Files for --config: JSON and YAML that is damaged, has odd types, or grows when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.fuzz import mutate
from tests.fuzz.harness import Case
from tests.runs.conftest import records, settings

PLAIN = {
    "method": "simclr",
    "data": "shapes",
    "epochs": 3,
    "lr": 0.1,
    "amp": "off",
    "crop_scale": [0.2, 1.0],
    "last_bn": True,
}
SCALARS = (
    "yes", "off", "~", ".nan", ".inf", "0o17", "1:30", "1_000", "2026-01-01", "2026-13-45",
    "!!python/object/apply:os.system ['touch x']",
    "!!python/name:os.system", "!!binary aGk=", "!!binary x", "!!int x", "!!float x", "!!timestamp x", "!!set {a, b}",
    "!!omap [a: 1]", "!!pairs [a: 1]", "!x y", "&a *a", "*missing", "&a [*a]", "{a: 1", "[1, 2", '"\\ud800"', '"\\x00"',
    "|\n  many\n  lines", "1e400", "9" * 5000, "0x" + "f" * 5000, "- x", "? x", "@x", "`x", "%x", "'", '"',
    "190:20:30.15",
    "9" * 9 + ":1" * 3000, "1" + ":59" * 5000, "<<: x", "a: b: c", "\tx", "\x85", "\u2028", "\x1b[2J",
    "\ufeff", "=", "!!value =",
)  # fmt: skip


def case(rng: Random, folder: Path) -> Case:
    """Return a file of settings and the command that prints them."""
    suffix = rng.choice((".yaml", ".yaml", ".json"))
    label, content = (_json if suffix == ".json" or rng.random() < 0.3 else _yaml)(rng)
    path = folder / f"x{suffix}"
    path.write_bytes(content)
    pick = rng.random()
    if pick < 0.8:
        words = ["pretrain", "--config", str(path), "--print-config"]
    elif pick < 0.9:
        words = ["sweep", "--config", str(path), "--print-config"]
    else:
        words = ["reproduce", "tab2", "--config", str(path), "--print-config"]
    return Case(f"{suffix} {label}", words, most_output=1 << 20)


def _json(rng: Random) -> tuple[str, bytes]:
    """Spoil settings, or a run's config.json, as JSON, which YAML reads too."""
    if rng.random() < 0.3:
        return mutate.bad_json(rng, json.loads(records(settings())["config.json"]))
    return mutate.bad_json(rng, PLAIN)


def _yaml(rng: Random) -> tuple[str, bytes]:
    """Spoil settings as YAML: by its own means, or as bytes."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in PLAIN.items()]
    at = rng.randrange(len(lines))
    name = lines[at].partition(":")[0]
    pick = rng.randrange(6)
    if pick == 0:
        label, value = _bomb(rng, name)
        lines = value if rng.random() < 0.5 else lines[:at] + value + lines[at + 1 :]
    elif pick == 1:
        lines[at], label = f"{rng.choice(SCALARS)}: 1", "odd key"
    elif pick == 2:
        label, lines = "again", [*lines, lines[at], *rng.choice(([], ["--- 1"], ["...", "x"]))]
    elif pick == 3:
        content = "\n".join(lines)
        odd = {"latin": content.replace("a", "\xe4").encode("latin-1"), "utf-16": content.encode("utf-16")}
        odd |= {
            "bom": b"\xef\xbb\xbf" + content.encode(),
            "nul": content.encode() + b"\0",
            "utf-32": content.encode("utf-32"),
        }
        return rng.choice(list(odd.items()))
    elif pick == 4:
        return mutate.spoiled(rng, "\n".join(lines).encode())
    else:
        lines[at], label = f"{name}: {rng.choice(SCALARS)}", f"odd {name}"
    return label, "\n".join(lines).encode(errors="surrogatepass")


def _bomb(rng: Random, name: str) -> tuple[str, list[str]]:
    """Return lines that are short in the file and huge once they are read."""
    levels, width = rng.choice((3, 8, 25)), rng.choice((2, 9))
    laughs = [f"a0: &a0 [{', '.join(['lol'] * width)}]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    merged = ["a0: &a0 {k: 1}"]
    merged += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * width)}]}}" for i in range(1, levels)]
    deep = rng.choice((100, 400, 5000, 100_000))
    kinds = {
        "laughs": [*laughs, f"{name}: *a{levels - 1}"],
        "laughs within": [f"{name}:", *(f"  {line}" for line in laughs)],
        "merge": [*merged, f"<<: *a{levels - 1}"],
        "merge itself": ["&a", f"{name}: 1", "<<: *a"],
        "deep list": [f"{name}: " + "[" * deep + "]" * deep],
        "deep object": [f"{name}: " + "{a: " * deep + "1" + "}" * deep],
        "deep lines": ["\n".join(" " * i + "a:" for i in range(min(deep, 1500)))],
        "deep open": ["[" * deep],
        "deep dashes": ["- " * deep + "x"],
        "many": [f"k{i}: 1" for i in range(5000)],
        "long key": [f"{'k' * deep}: 1"],
        "anchors": [f"{name}: [{', '.join(f'&b{i} {i}' for i in range(5000))}]"],
    }
    label = rng.choice(list(kinds))
    return label, kinds[label]
