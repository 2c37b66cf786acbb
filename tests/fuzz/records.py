"""Run folders with damaged or malicious records, each beside a good run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random
from typing import Any

from marginlens.runs.config import digits
from tests.fuzz import mutate
from tests.fuzz.harness import Case, Outcome
from tests.runs.conftest import evaluation, records, settings, write

KINDS = {
    "complete": {},
    "interrupted": {"complete": False, "done": 1},
    "failed": {"complete": False, "done": 1, "failure": "the loss is nan after epoch 1"},
}
COMMANDS = 5 * ("runs --json",) + 2 * ("runs", "show", "show --json", "compare", "export", "resume", "add", "where")
COMMANDS += ("prune", "prune --weights --yes", "probe", "report", "report --json")


def case(rng: Random, folder: Path) -> Case:
    """Return a store with a good run and a bad one, and a command that reads it."""
    kind = rng.choice(list(KINDS))
    good, bad = folder / "runs" / "good-run", folder / "runs" / "bad-run"
    good_id = _put(good, _records(0, "complete"))
    content = dict(_records(1, kind))
    labels = [_spoil(rng, content) for _ in range(rng.choice((1, 1, 2)))]
    bad_id = _put(bad, content)
    good, bad = (path.rename(path.with_name(f"r-{id_}")) for path, id_ in ((good, good_id), (bad, bad_id)))
    command = rng.choice(COMMANDS)

    def check(outcome: Outcome) -> str:
        if command == "runs --json":
            if good.name not in [row["name"] for row in json.loads(outcome.out)["runs"]]:
                return "does not list the good run"
        elif command.endswith("--json") and not outcome.code:
            json.loads(outcome.out, parse_constant=_refused)
        elif command == "report" and not (folder / "report" / "report.html").exists():
            return "does not write the report"
        return ""

    return Case(f"{kind} {' '.join(labels)}", _words(command, folder, good, bad), check=check)


@functools.cache
def _records(seed: int, kind: str) -> dict[str, bytes]:
    """Return the files of a run, with evaluations of every kind if it is complete."""
    chosen = settings(seed=seed, data="little")
    found: dict[str, bytes] = records(chosen, **KINDS[kind])
    if kind == "complete":
        id_ = json.loads(found["config.json"])["id"]
        held = evaluation("probe", 71.5, run=id_), evaluation("knn", 60.0, run=id_, holdout=0)
        for one in held:
            one["data"] = "little"
            found[f"evaluations/{one['kind']}-little-0123456789.json"] = json.dumps(one).encode()
    return found


def _put(path: Path, content: dict[str, bytes]) -> str:
    """Write a run, and return the id in its config.json, or a made-up one if that is unreadable."""
    write(path, content)
    try:
        return str(json.loads(content["config.json"])["id"])[:10].replace("/", "").replace("\0", "") or "none"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "0123456789"


def _spoil(rng: Random, content: dict[str, bytes]) -> str:
    """Damage or remove one of the files."""
    name = rng.choice(list(content))
    if rng.random() < 0.05:
        del content[name]
        return f"no {name}"
    if name == "config.json" and rng.random() < 0.6:
        label, content[name] = _signed(rng, content[name])
    elif name.endswith(".jsonl"):
        label, content[name] = _lines(rng, content[name])
    else:
        try:
            label, content[name] = mutate.bad_json(rng, json.loads(content[name]))
        except (ValueError, RecursionError):  # it is spoiled already
            label, content[name] = mutate.spoiled(rng, content[name])
    return f"{name}: {label}"


def _lines(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Spoil a line of a file of lines, or the whole file."""
    lines = content.splitlines()
    if rng.random() < 0.3 or not lines:
        return mutate.spoiled(rng, content)
    at = rng.randrange(len(lines))
    try:
        label, line = mutate.bad_json(rng, json.loads(lines[at]))
    except (ValueError, RecursionError):
        label, line = mutate.spoiled(rng, lines[at])
    lines[at : at + 1] = [line] * rng.choice((1, 1, 2, 3000 if len(line) < 1000 else 1))
    return label, b"\n".join(lines) + rng.choice((b"\n", b"\n", b"", b"\n\n"))


def _signed(rng: Random, content: bytes) -> tuple[str, bytes]:
    """Change settings and identity alike, and recompute the id."""
    try:
        known: dict[str, Any] = json.loads(content)
        label, made = mutate.edited(rng, known["settings"] if rng.random() < 0.7 else known["identity"])
        if "data" in made:
            known["settings" if "method" in made else "identity"] = made
        if "method" in made:
            kept = known["identity"]["settings"]
            known["identity"]["settings"] = kept | {n: v for n, v in made.items() if n in kept or n not in known}
        known["id"] = digits(known["identity"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return mutate.spoiled(rng, content)
    return f"signed {label}", mutate.text(known)


def _words(command: str, folder: Path, good: Path, bad: Path) -> list[str]:
    """Return the words of a command on this store."""
    store = ["--runs", str(good.parent)]
    first, _, rest = command.partition(" ")
    words = {
        "runs": ["runs", *store],
        "show": ["runs", "show", str(bad), *store],
        "compare": ["runs", "compare", str(good), str(bad), *store],
        "report": ["report", *store, "--out", str(folder / "report")],
        "prune": ["runs", "prune", *store],
        "export": ["export", str(bad), "--out", str(folder / "x.safetensors")],
        "probe": ["probe", str(bad), "--workers", "0"],
        "resume": ["pretrain", "--config", str(bad / "config.json"), *store, "--print-config"],
        "add": ["runs", "add", str(bad), "--runs", str(folder / "other")],
        "where": ["runs", *store, "--where", "probe>1", "loss<1e9", "--sort", "probe"],
    }
    return [*words[first], *rest.split()]


def _refused(name: str) -> float:
    raise ValueError(f"JSON has no {name}")
