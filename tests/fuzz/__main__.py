"""`python -m tests.fuzz`: try hostile input by the thousand, print a table of failures.

python -m tests.fuzz --seconds 600                              all classes
python -m tests.fuzz --count 500 --only archives images         that number of each
python -m tests.fuzz --only archives --seed 0 --case 17         one again, in this process
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

CLASSES = ("archives", "images", "stores", "records", "checkpoints", "configs", "words", "specials", "names")
ROOT = Path(__file__).parents[2]
CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
MOST_MEMORY = 6 << 30
"""Bytes of memory beyond which a child process is killed."""
SILENCE = 60.0
"""Seconds without a finished case after which a child process is killed."""


def main() -> None:
    """Run the classes one after another and print what failed."""
    reader = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    reader.add_argument("--count", type=int, default=0, help="cases of each class; not given: as many as there is time")
    reader.add_argument("--seconds", type=float, default=600.0, help="time for all classes together, without --count")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--only", nargs="+", default=CLASSES, choices=CLASSES, metavar="CLASS")
    reader.add_argument("--case", type=int, help="run this case of one class, and print all about it")
    reader.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    os.environ |= CPU
    if asked.case is not None:
        print(json.dumps(_one(asked.only[0], asked.seed, asked.case), indent=1))
    elif asked.child:
        _child(asked, first=int(asked.child[0]), log=Path(asked.child[1]))
    else:
        share = asked.seconds / len(asked.only)
        found = {name: watched(name, asked.seed, asked.count, share) for name in asked.only}
        _table(found)
        _reasons(found, asked.seed)
        sys.exit(any(line["reason"] for _, lines in found.values() for line in lines))


def _one(name: str, seed: int, number: int, log: IO[str] | None = None) -> dict[str, Any]:
    """Run one case and return its facts as a dictionary."""
    from tests.fuzz import harness

    def begun(case: harness.Case) -> None:
        words = [w if len(w) < 200 else f"{w[:50]}... ({len(w)} characters)" for w in map(plain, case.words)]
        known.update(name=case.name, words=words)
        if log:
            log.write(json.dumps({"begun": True} | known) + "\n")

    def plain(text: str) -> str:
        return text.replace(str(harness.scratch() / "case"), "CASE")

    known: dict[str, Any] = {"case": number, "name": "", "words": []}
    _, outcome = harness.run(importlib.import_module(f"tests.fuzz.{name}"), seed, number, begun)
    known |= {"code": outcome.code, "reason": outcome.reason, "detail": plain(outcome.detail)[:400]}
    return known | {"seconds": round(outcome.seconds, 3), "growth_mb": outcome.growth >> 20}


def _child(asked: argparse.Namespace, first: int, log: Path) -> None:
    """Run cases, and write a line before and after each: any of them may be the last."""
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    end, number = time.monotonic() + asked.seconds, first
    with log.open("a", buffering=1) as lines:
        while number < asked.count if asked.count else time.monotonic() < end:
            lines.write(json.dumps(_one(asked.only[0], asked.seed, number, lines)) + "\n")
            number += 1


def watched(name: str, seed: int, count: int, seconds: float = 0.0) -> tuple[float, list[dict[str, Any]]]:
    """Run a class in child processes; return the seconds that took and a dictionary for each case.

    A child that dies or is killed is a failure, and another one continues after it.
    """
    begin, found, first = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while count == 0 or first < count:
            log, left = Path(folder) / f"{first}.jsonl", seconds - (time.monotonic() - begin)
            if not count and left <= 0:
                break
            words = [sys.executable, "-m", "tests.fuzz", "--only", name, "--seed", str(seed), "--count", str(count)]
            words += ["--seconds", str(max(left, 0.0)), "--child", str(first), str(log)]
            with log.with_suffix(".err").open("w") as said:
                place: dict[str, Any] = {"cwd": ROOT, "env": os.environ | CPU | {"TMPDIR": folder}}
                child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **place)
            why = _wait(child, log)
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            found += [line for line in lines if "begun" not in line]
            if not why:
                break
            if not lines:
                raise SystemExit(f"{name}: no case could be run: {log.with_suffix('.err').read_text()[-2000:]}")
            found.append(lines[-1] | {"reason": why, "detail": log.with_suffix(".err").read_text()[-300:]})
            first = lines[-1]["case"] + 1
    return time.monotonic() - begin, found


def _wait(child: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for a child process to end; return the reason if it failed, else ""."""
    why, size, since = "", -1, time.monotonic()
    while child.poll() is None:
        time.sleep(0.05)
        now = log.stat().st_size if log.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        try:
            memory = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
        if memory > MOST_MEMORY or time.monotonic() - since > SILENCE:
            why = "killed: it took too much memory" if memory > MOST_MEMORY else "killed: it hung"
            child.kill()
    if not why and child.returncode:
        number = -child.returncode
        why = f"the process died of {signal.Signals(number).name}" if number > 0 else f"exit code {child.returncode}"
    return why


def _table(found: dict[str, tuple[float, list[dict[str, Any]]]]) -> None:
    print(f"{'class':12} {'tried':>7} {'failures':>9} {'seconds':>8}")
    for name, (seconds, lines) in found.items():
        print(f"{name:12} {len(lines):7} {sum(bool(line['reason']) for line in lines):9} {seconds:8.1f}")


def _reasons(found: dict[str, tuple[float, list[dict[str, Any]]]], seed: int) -> None:
    """Print each distinct reason with its count and its first case."""
    for name, (_, lines) in found.items():
        grouped = defaultdict(list)
        for line in lines:
            if line["reason"]:
                grouped[line["reason"]].append(line)
        for reason, some in sorted(grouped.items(), key=lambda item: -len(item[1])):
            first = some[0]
            print(f"\n{name}: {len(some)} x {reason[:300].encode('unicode_escape').decode()}")
            print(f"  --only {name} --seed {seed} --case {first['case']}   {first['name']}")
            print(f"  {first['words']!r:.300}\n  {first['detail']!r:.400}")


if __name__ == "__main__":
    main()
