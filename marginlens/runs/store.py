"""A store: a folder of run folders. List, find, add, prune and remove runs.

`run.py` describes a run's folder. Every change renames something whole. So a killed process leaves a run in its old or
its new state, and at most a hidden folder that the next process removes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

from marginlens.data.disk import partial
from marginlens.errors import DataError, Stopped
from marginlens.evals import get
from marginlens.files import MIB, below, expanded, put, read, unique
from marginlens.runs.config import Pretrain, identify
from marginlens.runs.records import Evaluation
from marginlens.runs.run import EVALUATION_FILES, RECORDS, Run, Unreadable, examine, files, open_run, size_of
from marginlens.runs.work import locked
from marginlens.settings import Settings

_NOT_RECORDS = ("checkpoints", "tensorboard", "lock")
RECORD_BYTES = 256 * MIB
"""Largest record of a run. The metrics of 100,000 epochs take a tenth of this."""
_LAST = ("failure.json", "result.json")
"""Written last, in this order, because these two say that the other records are complete."""


def scan(runs: str | Path) -> list[Run | Unreadable]:
    """Return every folder of a store, by name. A bad one is listed and never raises; hidden ones are skipped."""
    folder = expanded(runs)
    try:
        inside = sorted(item.path for item in os.scandir(folder) if _is_folder(item))
    except FileNotFoundError:
        raise ValueError(f"{folder} does not exist; give --runs the folder that holds the runs") from None
    except NotADirectoryError:
        raise ValueError(f"{folder} is a file; give --runs the folder that holds the runs") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}); give --runs another folder") from None
    found = [examine(Path(path)) for path in inside]
    return _without_copies([entry for entry in found if os.path.lexists(entry.path)])  # some may be gone since


def readable(found: Iterable[Run | Unreadable]) -> list[Run]:
    """Return the runs, without folders that could not be read."""
    return [run for run in found if isinstance(run, Run)]


def lookup(found: Iterable[Run | Unreadable], settings: Pretrain, fingerprint: str = "") -> Run | None:
    """Return the run with these settings and, if a fingerprint is given, exactly these data."""
    known: dict[str, str] = {}
    for run in readable(found):
        if run.settings.data == settings.data and fingerprint in ("", run.data):
            if run.data not in known:
                known[run.data] = identify(settings, run.data)
            if known[run.data] == run.id:
                return run
    return None


def evaluation(run: Run, kind: str, data: str, settings: Settings, fingerprint: str = "") -> Evaluation | None:
    """Return the record of an evaluation, or None. If data of this name changed in between, return the latest.

    With a `fingerprint`, the data must be exactly these.
    """
    found = [
        one
        for one in run.evaluations
        if (one.kind, one.data, one.settings) == (kind, data, settings)
        and (get(kind).elsewhere or one.data_fingerprint == run.data)
        and fingerprint in ("", one.data_fingerprint)
    ]
    return max(found, key=lambda one: one.time, default=None)


def records(run: Path) -> dict[str, bytes]:
    """Return a run's files by relative name, without weights, lock, tensorboard and temporary files."""
    try:
        return {name: read(run / name, RECORD_BYTES) for name in files(run) if _is_record(name)}
    except OSError as error:
        raise ValueError(f"{error.filename or run} cannot be read ({error.strerror})") from None


def add(content: Mapping[str, bytes] | Path, runs: Path, name: str) -> Path:
    """Put a run's records into a store, whole or not at all, and return the folder there.

    | the run there | action |
    |---|---|
    | is missing | add all records |
    | is a part of the given one | complete it, join evaluations |
    | is the same, or goes further | keep it, join evaluations |
    | ended early otherwise, without weights | replace it |
    | ended otherwise | raise |
    """
    if isinstance(content, Path) and (linked := _linked(content)):
        raise ValueError(f"{linked} is a symlink, and would not be copied; put the file itself in its place")
    held = dict(content) if isinstance(content, Mapping) else records(content)
    source = str(content) if isinstance(content, Path) else name
    if odd := next((n for n in held if not _is_record(n)), None):
        raise ValueError(f"{source} holds {odd!r}, which is not a record of a run")
    if name.startswith(".") or PurePosixPath(name).name != name:
        raise ValueError(f"{name!r} cannot name a run's folder; give the run's own name")
    folder = expanded(runs)
    _writable(folder)
    final = folder / name
    try:
        with partial(folder, name) as aside:
            _write(aside, held)
            given = examine(aside)
            if isinstance(given, Unreadable):
                raise ValueError(f"{source} is not added: {given.why.replace(str(aside), source)}")
            _check_name(given, name, folder)
            if _named(aside, final):
                return final
        _merge(final, given.id, held)
        return final
    except (OSError, DataError, Stopped) as error:
        raise ValueError(f"{source} is not added: cannot write to {folder} ({_plain(error)})") from None


def drop_weights(run: Run) -> int:
    """Remove a complete run's checkpoints, and return the bytes freed. Its records stay."""
    run = open_run(run.path)  # again, because it may have changed since the store was read
    folder = run.path / "checkpoints"
    if run.complete and not folder.exists() and not _dropped(run.path):
        return 0
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symlink, and is left alone; remove its target, then the symlink")
    with _removing(run.path), locked(run):
        if not run.complete:
            raise ValueError(
                f"{run.path} is not complete: --resume needs its weights; marginlens runs prune removes the run"
            )
        if folder.exists():
            _check_own(run.path, "checkpoints")
            _move_aside(folder, run.path / f".checkpoints.{unique()}", lambda at: _check_own(run.path, at.name))
        freed = 0
        for left in _dropped(run.path):  # includes leftovers of killed processes
            _check_own(run.path, left.name)
            freed += size_of(left)
            shutil.rmtree(left, ignore_errors=True)
            freed -= size_of(left)
    return freed


def remove(run: Run | Unreadable) -> int:
    """Remove a run with its weights, unless it is running, unreadable, or has changed since it was read."""
    if isinstance(run, Unreadable) or run.state == "running":
        raise ValueError(f"{run.path} is {run.state}, and is left alone; {run.why or 'stop it first'}")
    if run.path.is_symlink():
        raise ValueError(f"{run.path} is a symlink, and is left alone; remove it, or prune the store of its target")
    with _removing(run.path), locked(run):
        now = examine(run.path, ours=True)
        if isinstance(now, Unreadable) or (now.id, now.state) != (run.id, run.state):
            raise ValueError(f"{run.path} is now {now.state}, and is left alone; list the runs again")
        _check_own(run.path)
        freed = now.size_bytes
        aside = run.path.with_name(f".{run.name}.{unique()}.removed")
        _move_aside(run.path, aside, _check_own)
        for left in run.path.parent.glob(".*.removed"):  # includes leftovers of killed processes
            if _REMOVED.fullmatch(left.name):
                _check_own(left)
                shutil.rmtree(left, ignore_errors=True)
    return freed


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, Stopped) as error:
        raise ValueError(f"{path} is left as it is: it cannot be removed ({_plain(error)})") from None


def unbegun(path: Path) -> bool:
    """True if a folder holds nothing of a run, because its process was killed before the first file."""
    return path.is_dir() and all(name == "lock" or name.startswith(".config.json.") for name in os.listdir(path))


def _linked(run: Path) -> Path | None:
    """Return a record that is a symlink, which a copy would miss, or None."""
    inside = [run / name for name in (*RECORDS, "evaluations")]
    inside += (run / "evaluations").glob(EVALUATION_FILES)
    return next((path for path in inside if path.is_symlink()), None)


def _dropped(run: Path) -> list[Path]:
    """Return checkpoint folders that were renamed for removal."""
    return [path for path in run.glob(".checkpoints.*") if _DROPPED.fullmatch(path.name)]


_UNIQUE = r"\d+-[0-9a-f]{8}"
"""The form of names from `unique`."""
_REMOVED = re.compile(rf"\..+-[0-9a-f]{{10}}\.{_UNIQUE}\.removed")
_DROPPED = re.compile(rf"\.checkpoints\.{_UNIQUE}")
_RECORD = r"(?:(?:config|result|failure)\.json|(?:environment|metrics|speed|lens)\.jsonl)"
_CHECKPOINT = r"step-\d+-[0-9a-f]{32}\.(?:safetensors(?:\.damaged)?|partial)"
_OWN = re.compile(
    rf"(?:{_RECORD}|lock|\.{_RECORD}\.\d+(?:-[0-9a-f]{{8}})?|{_DROPPED.pattern}(?:/{_CHECKPOINT})?"
    r"|evaluations|evaluations/[a-z]+-[^/]*-[0-9a-f]{10}\.json"
    r"|evaluations/\.[a-z]+-[^/]*-[0-9a-f]{10}\.json\.\d+(?:-[0-9a-f]{8})?"
    rf"|checkpoints|checkpoints/{_CHECKPOINT}"
    r"|tensorboard|tensorboard/events\.out\.tfevents\.\d+)",
    re.S,
)
"""Names of all files that a run writes."""


def _move_aside(path: Path, aside: Path, check: Callable[[Path], None]) -> None:
    """Rename a path for removal, and undo that if another program's file came into it just before."""
    os.rename(path, aside)
    try:
        check(aside)
    except BaseException:
        os.rename(aside, path)
        raise


def _check_own(run: Path, part: str = "") -> None:
    """Raise if a run's folder, or a part of it, holds other files, which would be removed with it."""
    for name in sorted(below(run / part)):
        if not _OWN.fullmatch(f"{part}/{name}" if part else name):
            raise ValueError(f"{run} is left as it is: no run writes {run / part / name}; move that file away first")


def _is_folder(item: os.DirEntry[str]) -> bool:
    """True if an entry may be a run: a visible folder or a symlink, which may be broken."""
    if item.name.startswith("."):
        return False
    return item.is_dir() or (item.is_symlink() and not item.is_file())


def _without_copies(found: list[Run | Unreadable]) -> list[Run | Unreadable]:
    """Mark copies of a run as unreadable, because they would count twice.

    The folder with the proper name is the run.
    """
    proper: dict[str, Run] = {}
    for run in sorted(readable(found), key=lambda run: (not run.name.endswith(f"-{run.id}"), run.name)):
        proper.setdefault(run.id, run)
    kept: list[Run | Unreadable] = []
    for one in found:
        if isinstance(one, Run) and (first := proper[one.id]) is not one:
            why = f"{one.path} is the same run as {first.name}, and would count twice; remove one of them"
            kept.append(Unreadable(one.path, why))
        else:
            kept.append(one)
    return kept


def _is_record(name: str) -> bool:
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and not any(part.startswith(".") for part in parts)
    return plain and parts[0] not in ("/", *_NOT_RECORDS)


def _check_name(run: Run, name: str, store: Path) -> None:
    if not name.endswith(f"-{run.id}"):
        raise ValueError(f"{name} is not added: its name must end in its run's id, {run.id}; rename it")
    others = [p.name for p in store.glob(f"[!.]*-{run.id}") if p.name != name]
    if others:
        raise ValueError(f"{name} is not added: {store / others[0]} is the same run")


def _writable(store: Path) -> None:
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {store} ({error.strerror}); give --runs another folder") from None
    if not os.access(store, os.W_OK):
        raise ValueError(f"cannot write to {store} (no permission); give --runs another folder")


def _write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write files one by one, each by a rename. Files that say how a run ended come last."""
    for name in sorted(content, key=lambda n: (_LAST.index(n) if n in _LAST else -1, n)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, content[name])


def _named(aside: Path, final: Path) -> bool:
    """Rename a folder to its final name, and return True, unless that name exists."""
    if os.path.lexists(final):
        return False
    try:
        os.rename(aside, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another writer was faster
            return False
        raise
    return True


def _merge(final: Path, id_: str, content: Mapping[str, bytes]) -> None:
    """Add the given records to an existing run, or leave it as it is. Raise if their numbers differ."""
    if unbegun(final):
        _write(final, content)
        return
    if linked := _linked(final):
        raise ValueError(f"{final.name} is not added: {linked} is a symlink; put the file itself in its place")
    there = examine(final)
    if isinstance(there, Unreadable) or there.id != id_:
        raise ValueError(f"{final.name} is not added: {there.why or f'{final} is another run'}")
    with locked(there):
        own = records(final)
        further = _progress(content) > _progress(own)
        odd = _conflict(*((own, content) if further else (content, own)))
        if odd and "result.json" in own and not (odd := _differs(content, own)):
            further = False  # the same numbers, measured at another time: the ones that are there stay
        if odd:
            if not _replaces(content, examine(final, ours=True)):
                raise ValueError(f"{final} holds another outcome of the same run: {odd} differs; keep one of them")
            further = True
        if further:
            for name in own.keys() & set(RECORDS if odd else ["failure.json"]) - content.keys():
                (final / name).unlink()
        new = [n for n in content if n not in own and (further or n != "failure.json")]
        new += [n for n in content.keys() & own.keys() - {"config.json"} if further and content[n] != own[n]]
        _write(final, {name: content[name] for name in new})


def _conflict(less: Mapping[str, bytes], more: Mapping[str, bytes]) -> str:
    """Return the name of a record that is not a part of the other's, or ""."""
    for name in sorted(less.keys() & more.keys() - {"config.json", "failure.json", "lens.jsonl"}):
        if less[name] != more[name] and not (name.endswith(".jsonl") and more[name].startswith(less[name])):
            return name
    return ""


_TIMED_RECORDS = ("environment.jsonl", "speed.jsonl", "lens.jsonl", "failure.json")
_TIMED_FIELDS = ("seconds", "images_per_second", "environment", "checkpoint")
"""Fields in which equal outcomes may differ: time, place and speed. A checkpoint's name is a hash that covers the
length of speed.jsonl. lens.jsonl depends on how often the lens looked."""


def _differs(content: Mapping[str, bytes], own: Mapping[str, bytes]) -> str:
    """Return the name of a record whose numbers differ from the existing complete run's, or ""."""
    for name in sorted(content.keys() & own.keys() - {"config.json", *_TIMED_RECORDS}):
        given, kept = content[name], own[name]
        part = given == kept or (name == "metrics.jsonl" and (kept.startswith(given) or given.startswith(kept)))
        if not part and _numbers(name, given) != _numbers(name, kept):
            return name
    return ""


def _numbers(name: str, content: bytes) -> Any:
    """Return a result's or evaluation's fields that do not depend on time or place; for other records, the bytes."""
    path = PurePosixPath(name)
    if name != "result.json" and (path.parts[:-1] != ("evaluations",) or path.suffix != ".json"):
        return content
    try:
        return {field: value for field, value in json.loads(content).items() if field not in _TIMED_FIELDS}
    except (AttributeError, ValueError, RecursionError):  # another program's file
        return content


def _replaces(content: Mapping[str, bytes], there: Run | Unreadable) -> bool:
    """True if another outcome replaces the existing run, which must have ended early and cannot be resumed.

    A result does, and so does a later failure.
    """
    if isinstance(there, Unreadable) or there.state not in ("failed", "interrupted") or there.weights:
        return False
    if "result.json" in content:
        return True
    if "failure.json" not in content:
        return False
    last, now = (_time(held.get("failure.json", b"{}")) for held in (records(there.path), content))
    return now > last


def _time(failure: bytes) -> str:
    return str(json.loads(failure).get("time", ""))


def _progress(content: Mapping[str, bytes]) -> tuple[bool, int, int, bool]:
    """Return a sort key for the progress of a run: of two states, the later one is greater."""
    metrics, starts = (len(content.get(f"{name}.jsonl", b"")) for name in ("metrics", "environment"))
    return "result.json" in content, metrics, starts, "failure.json" in content


def _plain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error).split(";")[0]


def find(words: Sequence[str], runs: str) -> list[Run]:
    """Return the run of each word: a folder, or a name or id in the store, or the unique beginning of one."""
    store: list[Run | Unreadable] | None = None
    found: list[Run] = []
    for word in words:
        path = expanded(word)
        if path.is_dir():
            chosen = examine(path.resolve() if path.name in ("", "..") else path)
        else:
            store = scan(runs) if store is None else store
            chosen = _one(word, store, runs)
        if isinstance(chosen, Unreadable):
            raise ValueError(chosen.why)
        found.append(chosen)
    return found


def _one(word: str, store: list[Run | Unreadable], runs: str) -> Run | Unreadable:
    ids = {run.path: run.id for run in readable(store)}
    exact = [one for one in store if word in (one.name, ids.get(one.path))]
    begun = [one for one in store if one.name.startswith(word) or ids.get(one.path, "").startswith(word)]
    for near in (exact, begun):
        if len(near) == 1:
            return near[0]
        if near:
            raise ValueError(f"{word!r} may be {near[0].name} or {near[1].name} ({len(near)} in all); give more of it")
    close = get_close_matches(word, [one.name for one in store], n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"marginlens runs --runs {shlex.quote(runs)} lists them"
    raise ValueError(f"there is no run {word!r} in {runs}; {hint}")
