"""The records of a run, typed: the contents of each file in its folder, and reading and writing them.

A record may come from anywhere, and JSON bounds neither numbers nor texts. So everything is checked on reading, and the
first thing that no run writes is reported with its file and line. Keys from later versions are kept.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, KeysView, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from marginlens import evals
from marginlens.evals.features import CLASSES, worse_than_guessing
from marginlens.files import MIB, flush, parse, put, read, reason, text
from marginlens.runs.config import NUMERICS
from marginlens.settings import MOST, Settings, build, quoted_input, wrong

MOST_BYTES = 1024 * MIB
"""Largest file of lines: a million epochs."""
FORMAT = 1

R = TypeVar("R", bound="Record")


def _measurable(value: float) -> float:
    if 0 < value < 1e-12:
        raise ValueError(f"{value:g} is too small to be measured")
    return value


Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Bounded, so that its square is a number, too."""
Amount = Annotated[float, Field(ge=0, le=1e100), AfterValidator(_measurable)]
Percent = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Triple = Annotated[list[Number], Field(min_length=3, max_length=3)]


class Record(BaseModel):
    """A frozen, strict record. It can also be read as the mapping in its file: record["loss"]."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.model_fields_set

    def keys(self) -> KeysView[str]:
        """Return the names in the file."""
        every = (*type(self).model_fields, *(self.model_extra or {}))
        return dict.fromkeys(name for name in every if name in self).keys()

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a value, or `otherwise` if the file does not have it."""
        return getattr(self, name) if name in self else otherwise

    def plain(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return self.model_dump(mode="json", exclude_unset=True)


class Config(Record):
    """config.json: the settings that were asked for."""

    format: int
    id: str
    settings: dict[str, Any]
    data: str
    mean: Triple
    std: Triple
    identity: dict[str, Any] = {}


class Start(Record):
    """A line of environment.jsonl, and the place and time of an evaluation."""

    time: str
    device: str
    numerics: int = NUMERICS
    step: int = 0
    precision: str = ""


class Epoch(Record):
    """A line of metrics.jsonl: any measured numbers."""

    __pydantic_extra__: dict[str, Number] = Field(init=False)

    epoch: int
    step: int = 0
    loss: Number
    lr: Number | None = None
    spread: Number | None = None
    """Spread of the features of 256 images drawn from all; records made before commit add0d3b have the first 256."""
    embedding_spread: Number | None = None
    ema: Number | None = None
    knn: Percent | None = None


class Speed(Record):
    """A line of speed.jsonl."""

    __pydantic_extra__: dict[str, Amount] = Field(init=False)

    epoch: int
    seconds: Amount
    images_per_second: Amount


class Joint(Record):
    """How many rows had which angle of the positive and which probability."""

    theta: Annotated[list[Annotated[float, Field(ge=0, le=3.1416)]], Field(min_length=2, max_length=1000)]
    q: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2, max_length=1000)]
    counts: list[list[Annotated[int, Field(ge=0, le=10**15)]]]

    @model_validator(mode="after")
    def _shaped(self) -> Self:
        for name, edges in (("theta", self.theta), ("q", self.q)):
            if any(a >= b for a, b in pairwise(edges)):
                raise ValueError(f"the edges of {name} must grow")
        if [len(row) for row in self.counts] != [len(self.q) - 1] * (len(self.theta) - 1):
            raise ValueError("counts has another shape than its edges")
        return self


class Look(Record):
    """A line of lens.jsonl: what a lens saw in an epoch."""

    epoch: int = 0
    step: Annotated[int, Field(ge=0, le=10**15)]
    joint: Joint
    angle: Number | None = None
    pull: dict[str, Number | None] | None = None
    features: dict[str, Number | None] | None = None


class Result(Record):
    """result.json: the result of pre-training."""

    epochs: Count
    steps: Count
    images: Count
    loss: Number
    knn: Percent | None = None
    spread: Number | None = None
    embedding_spread: Number | None = None
    seconds: Amount | None = None
    images_per_second: Amount | None = None


class Failure(Record):
    """failure.json: why the last start ended early."""

    line: str


class Evaluation(Record):
    """A file of evaluations/."""

    kind: str
    run: str
    data: str
    data_fingerprint: str
    settings: SerializeAsAny[Settings]
    top1: Percent
    top5: Percent | None = None
    loss: Number | None = None
    neighbours: Count | None = None
    feature_norm: Number | None = None
    train_images: Count | None = None
    test_images: Count | None = None
    classes: Count | None = None
    seconds: Amount
    environment: Start
    lost: list[float] = []
    """Learning rates, tried beside this one, that diverged to NaN."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("kind"), str) or "settings" not in given:
            return given
        return given | {"settings": _settings(given["kind"], given["settings"])}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in evals.get(self.kind).needs:
            if self.get(name) is None:
                raise ValueError(f"{name} is missing")
        return self

    @property
    def diverged(self) -> bool:
        """True if a layer ended worse than guessing. Its accuracy then says nothing about the backbone."""
        classes = self.classes or CLASSES.get(self.data, 1)
        return self.loss is not None and worse_than_guessing(self.loss, classes)

    @property
    def time(self) -> str:
        """Time of the evaluation, in UTC."""
        return self.environment.time

    @property
    def numerics(self) -> int:
        """Version of the numerics that made it."""
        return self.environment.numerics

    @property
    def rate(self) -> float | None:
        """Its learning rate, or None."""
        return getattr(self.settings, "lr", None)

    @property
    def odd(self) -> dict[str, Any]:
        """Settings that differ from the recipe for its kind and data."""
        usual = evals.usual(self.kind, self.data).model_dump(mode="json")
        return {name: value for name, value in self.settings.model_dump(mode="json").items() if value != usual[name]}

    @property
    def name(self) -> str:
        """Kind and data: probe on shapes, transfer to cifar10."""
        return f"{self.kind} {'to' if evals.get(self.kind).elsewhere else 'on'} {self.data}"


def _settings(kind: str, given: Any) -> Settings:
    """Return an evaluation's settings. Raise unless this version writes them so, each with its own type."""
    if isinstance(given, Settings):
        return given
    unknown = "this version of marginlens does not know such an evaluation, but a later one may"
    try:
        model = evals.get(kind).settings
        if not isinstance(given, dict):
            raise ValueError(f"settings is {quoted_input(given)}; it must be an object")
        if missing := [name for name in model.model_fields if name not in given and name not in model.neutral]:
            raise ValueError(f"settings has no {missing[0]}")
        found: Settings = build(model, {**model.neutral, **given})
        known = found.model_dump(mode="json")
        for name, value in given.items():
            if known[name] != value or isinstance(value, bool) or (isinstance(value, int) and value >= 1 << 63):
                raise ValueError(f"{name} is {quoted_input(value)}")
    except ValueError as error:
        raise ValueError(f"{unknown}: {error}") from None
    return found


def one(model: type[R], path: Path) -> R:
    """Return the record in a JSON file."""
    return checked(model, read_json(path), str(path))


def lines(model: type[R], path: Path) -> list[R]:
    """Return the records in a file's lines, except for a last line that a killed process left half-written."""
    whole = _whole_lines(path)
    if not whole:
        return []
    try:  # all at once and without Python objects, because a store has hundreds of thousands of lines
        return TypeAdapter(list[model]).validate_json(b"[" + whole.replace(b"\n", b",") + b"]")  # type: ignore[valid-type]
    except ValidationError:
        pass
    found = []
    for number, line in enumerate(whole.split(b"\n"), 1):
        try:
            held = _parsed(line.decode())
        except ValueError as error:
            raise ValueError(f"{path} cannot be read (line {number}: {reason(error)})") from None
        found.append(checked(model, held, f"{path}, line {number}"))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = _parsed(text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold an object")
    return found


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a temporary file and rename it."""
    put(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def append(path: Path, line: Mapping[str, Any], before: int | None = None) -> int:
    """Add a line of JSON to a file, wait until it is on disk, and return the file's length.

    `before` is the length that the file must have. A file that another process wrote, emptied or replaced is left
    alone.
    """
    gone = os.O_CREAT if before else 0  # because a file that had lines must not be created again

    def opener(name: str, flags: int) -> int:
        return os.open(name, (flags | os.O_NONBLOCK) & ~gone, 0o666)

    with open(path, "ab", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        if before not in (None, size):
            raise OSError(errno.ESTALE, f"it has {size} bytes, and had {before} when this run last wrote to it")
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        flush(file)
        return os.fstat(file.fileno()).st_size


def length(path: Path) -> int:
    """Return a file's length, or 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def rewind(path: Path, length: int | None = None) -> None:
    """Remove the lines written after a checkpoint; without a length, only a half-written last line."""
    held = read(path, MOST_BYTES) if path.exists() else b""
    kept = held.rfind(b"\n") + 1 if length is None else length
    if len(held) < kept:
        lost = f"it has {len(held)} bytes of {kept}"
        raise ValueError(f"{path} lost lines that the checkpoint relies on ({lost}); remove its folder to start over")
    if len(held) > kept:
        os.truncate(path, kept)


def _whole_lines(path: Path) -> bytes:
    try:
        return read(path, MOST_BYTES).rpartition(b"\n")[0]
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None


def checked(model: type[R], held: Any, where: str) -> R:
    """Return an object as a record. `where` names its file and line."""
    if not isinstance(held, dict):
        raise ValueError(f"{where} does not hold an object")
    try:
        return model.model_validate(held)
    except ValidationError as error:
        raise ValueError(f"{where}: {wrong(error, most=1)}; no run wrote this") from None


def _parsed(said: str) -> Any:
    """Parse JSON. Raise if it holds half a character, which cannot be written to a file."""
    found = parse(said)
    if "\\ud" in said or "\\uD" in said:
        json.dumps(found, ensure_ascii=False).encode()
    return found
