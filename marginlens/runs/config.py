"""Settings of each command: typed, frozen and final. Printed settings are the settings that run.

A setting that is not given takes the data set's recipe (`data/sources.py`), else the method's (its class), else the
default here. The defaults follow ReSSL's recipe for small images, on which the paper builds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

import marginlens as ml
from marginlens.data.folder import FolderIndex
from marginlens.data.prepare import open_data, ready
from marginlens.data.sources import SOURCES, recipes
from marginlens.files import expanded, opened, reason
from marginlens.methods import METHODS
from marginlens.methods.protocol import check_no_negatives
from marginlens.nets.resnet import ENCODERS, STEMS, default_stem
from marginlens.nets.split_norm import divides
from marginlens.settings import Scale, Settings, Size, build, known


def _count(value: Any) -> int:
    """Return the whole number above 0 that pydantic would read from a value; 0 for everything else, which is refused
    later.
    """
    try:
        return max(0, int(float(value))) if float(value).is_integer() else 0
    except (TypeError, ValueError, OverflowError):
        return 0


Amp = Literal["auto", "off", "bf16", "fp16"]
METHOD_SETTINGS = {
    **{name: name for name in ("tau", "beta", "effect", "hidden", "out", "last_bn", "bias", "predictor_bn")},
    **{name: name for name in ("bn_splits", "symmetric", "two_tau")},
    "ema": "momentum",
    "ema_schedule": "momentum",
}
"""Settings that only some methods take, with the method's argument that shows whether it does."""


def takes(method: str, name: str) -> bool:
    """True if a setting applies to a method: a method's setting must be among its arguments."""
    return name not in METHOD_SETTINGS or METHOD_SETTINGS[name] in _arguments(METHODS[method])  # type: ignore[arg-type]


@cache
def _arguments(method: type) -> frozenset[str]:
    return frozenset(signature(method).parameters)


_OF_DATA = recipes("pretrain")


def method_recipe(name: str) -> dict[str, Any]:
    """Return a method's own defaults."""
    return dict(getattr(METHODS.get(name), "recipe", {}))


NEUTRAL: dict[str, Any] = {
    "stem": "auto",
    "limit": 0,
    "weights": "",
    "beta": 1.0,
    "bias": True,
    "predictor_bn": False,
    "bn_splits": 1,
    "symmetric": False,
    "two_tau": False,
    "ema_schedule": "constant",
    "decay_all": True,
    "clip": 0.0,
    "weak_crop": "resized",
    "blur": 0.5,
    "amp": "auto",
}
"""Settings left out of the hash at this value. These values never change, even if a default does."""


class Pretrain(Settings):
    """The settings that determine the result of a pre-training, and no others."""

    neutral = NEUTRAL
    recipes = {name: method_recipe(name) for name in METHODS} | recipes("pretrain")

    method: str = Field("mocov3", description=f"One of {', '.join(METHODS)}.")
    data: str = Field(
        "cifar10",
        description="A data set (marginlens data list), or a folder of images, which is prepared first. A name that "
        "both have is the data set's: write ./NAME for the folder.",
    )
    effect: str = Field("plain", description="Effect of the loss, such as 'emphasis(s=5) * ratio(m1=0.4)'.")
    epochs: int = Field(200, ge=1, description="Passes over the training images.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of initial weights, image order and views.")
    encoder: str = Field("resnet18", description="tiny, resnet18, resnet34 or resnet50.")
    stem: str = Field("auto", description="First layers: small, small-pool or imagenet; auto chooses by image size.")
    size: Size = Field(32, description="Side of the views in pixels; of a folder of images, 0: what suits them.")
    split: str = Field("train", description="Split to learn from; join several by +, as in train+unlabeled.")
    limit: int = Field(0, ge=0, description="Number of images to learn from, the first ones of the split; 0: all.")
    weights: str = Field("", description="File of backbone weights to start from (safetensors, torchvision's names).")
    tau: float = Field(0.25, ge=1e-4, description="Temperature of the loss: cosines are divided by it.")
    beta: float = Field(1.0, ge=0, le=1, description="Weight of the loss's denominator; InfoNCE has 1.")
    hidden: int = Field(2048, ge=1, description="Hidden width of projector and predictor.")
    out: int = Field(128, ge=1, description="Dimension of the embeddings.")
    last_bn: bool = Field(False, description="End the projector with a batch norm without affine parameters.")
    bias: bool = Field(True, description="Give the linear layers of projector and predictor biases.")
    predictor_bn: bool = Field(False, description="End the predictor with such a batch norm (mocov3, byol).")
    bn_splits: int = Field(
        1,
        ge=1,
        description="Number of parts that the backbone's batch norms split a batch into; "
        "mocov3's default makes parts of 64 images if the batch is a multiple of 64.",
    )
    symmetric: bool = Field(False, description="Add the loss with the two views swapped (mocov3, byol).")
    two_tau: bool = Field(False, description="Multiply the loss by 2 tau, as the official MoCo v3 does.")
    ema: float = Field(0.99, ge=0, le=1, description="Momentum of the teacher's moving average (mocov3, byol).")
    ema_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="Keep the teacher's momentum constant, or raise it to 1 along a cosine."
    )
    batch: int = Field(256, ge=2, description="Images per batch; a last partial batch is dropped.")
    lr: float = Field(0.06, ge=0, description="Learning rate after the warm-up; it falls to 0 along a cosine.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(5e-4, ge=0, description="Weight decay of SGD.")
    decay_all: bool = Field(True, description="Decay all parameters; without it, spare norms and biases.")
    warmup: int = Field(
        5, ge=0, description="Epochs of linear warm-up; the default is at most a quarter of the epochs."
    )
    clip: float = Field(0.0, ge=0, description="Clip the gradient's norm to this value; 0: do not clip.")
    crop_scale: Scale = Field(
        (0.2, 1.0), description="Smallest and largest share of the image in a crop, for both views."
    )
    weak_crop: Literal["resized", "padded"] = Field(
        "resized", description="Crop of the weak view: a random resized crop, or a padded one."
    )
    blur: float = Field(0.5, ge=0, le=1, description="Probability of blurring the strong view.")
    amp: Amp = Field("auto", description="Half precision on a GPU; auto: bf16, or fp16 if the GPU only emulates bf16.")

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, given: Any) -> Any:
        """Fill in the recipes of the data set and of the method."""
        if not isinstance(given, Mapping):
            return given
        method = str(given.get("method", cls.model_fields["method"].default))
        name = str(given.get("data", cls.model_fields["data"].default))
        data = _OF_DATA.get(name, {})
        data = {name: value for name, value in data.items() if method in METHODS and takes(method, name)}
        recipe = method_recipe(method) | data
        if str(given.get("size")) == "0":  # as if it were not given
            given = {name: value for name, value in given.items() if name != "size"}
        if name not in SOURCES:
            recipe["size"] = 0  # `at_hand` looks at the images
        usual = {name: cls.model_fields[name].default for name in ("batch", "epochs")}
        if "bn_splits" in recipe:
            part = usual["batch"] // recipe["bn_splits"]
            batch = _count(given.get("batch", recipe.get("batch", usual["batch"])))
            recipe["bn_splits"] = batch // part if batch and batch % part == 0 else 1
        if epochs := _count(given.get("epochs", usual["epochs"])):
            recipe["warmup"] = min(recipe.get("warmup", cls.model_fields["warmup"].default), epochs // 4)
        return recipe | dict(given)

    @field_validator("method")
    @classmethod
    def _method(cls, name: str) -> str:
        return known("method", name, METHODS)

    @field_validator("encoder")
    @classmethod
    def _encoder(cls, name: str) -> str:
        return known("encoder", name, ENCODERS)

    @field_validator("stem")
    @classmethod
    def _stem(cls, name: str) -> str:
        return known("stem", name, {"auto": None, **STEMS})

    @field_validator("effect", mode="before")
    @classmethod
    def _effect(cls, value: Any) -> Any:
        """Give each effect one spelling."""
        if not isinstance(value, str) and not hasattr(value, "log_weights"):
            raise ValueError(f"effect is {value!r}; it must be text such as 'emphasis(s=5)'")
        return str(ml.effect(str(value)))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warmup >= self.epochs and self.warmup > 0:
            raise ValueError(f"warmup is {self.warmup} of {self.epochs} epochs; it must be shorter")
        fields = type(self).model_fields
        if not divides(self.bn_splits, self.batch):
            raise ValueError(
                f"bn_splits is {self.bn_splits}; it must cut a batch of {self.batch} into equal parts of two or more"
            )
        for name in METHOD_SETTINGS:
            if name != "beta" and not takes(self.method, name) and getattr(self, name) != fields[name].default:
                raise ValueError(f"{name} means nothing to {self.method}; leave it out")
        if not takes(self.method, "beta"):
            if self.beta != 0.0:
                raise ValueError(f"beta is {self.beta:g}; {self.method} has no negatives, so it must be 0")
            check_no_negatives(ml.effect(self.effect), METHODS[self.method].__name__)
        elif self.beta == 0.0:
            raise ValueError(f"beta is 0, which leaves {self.method} without negatives; that is byol: --method byol")
        return self


SIDES = (224, 96, 64)
"""Sides of views that folders of images get: ImageNet's, and those of STL-10 and Tiny ImageNet in the recipe."""


def at_hand(settings: Pretrain, workers: int = 2) -> tuple[Pretrain, tuple[str, ...]]:
    """Return the settings with data that can be opened by name, and a size; and what was chosen, in lines.

    A folder of images is prepared, and its name takes the place of its path.
    """
    name, notes = ready(settings.data, workers)
    settings = settings.model_copy(update={"data": name})
    if settings.size:
        return settings, notes
    size, why = choose_size(name)
    settings = settings.model_copy(update={"size": size})
    if why:
        stem = default_stem(settings.encoder, size) if settings.stem == "auto" else settings.stem
        net = f"encoder: {settings.encoder} with the stem {stem}, {STEMS[stem].about} (--encoder and --stem set others)"
        notes = (*notes, f"size: {size} px, {why} (--size sets another)", net)
    return settings, notes


def choose_size(data: str) -> tuple[int, str]:
    """Return the side of the views for a data set without a recipe, and the reason if its images decide it.

    A folder gets the largest of `SIDES` at which the median image is enlarged by at most a tenth: 224 px from a short
    side of 202 on, 96 from 87 on, 64 from 58 on. Smaller ones, and arrays, get 32 px as CIFAR.
    """
    found = open_data(data)
    if not isinstance(found, FolderIndex):
        return 32, ""
    side = int(np.median(np.concatenate([part.sizes.min(1) for part in found.splits.values()])))
    size = next((size for size in SIDES if side >= 0.9 * size), 32)
    return size, f"because the median short side of the images is {side} px"


NUMERICS = 1
"""Raised when the same settings start to give other numbers: views, initialisation, loss, schedule, order."""


def evaluation_name(kind: str, data: str, fingerprint: str, settings: Settings) -> str:
    """Return an evaluation's file name: its kind, its data, and ten digits of everything that determines it."""
    known = digits([kind, fingerprint, NUMERICS, _telling(settings)])
    return f"{kind}-{data}-{known}.json"


def facts(settings: Pretrain, fingerprint: str) -> dict[str, Any]:
    """Return the facts to hash: settings that are not neutral, content of data and weights, version of the numerics."""
    kept = _telling(settings)
    if not takes(settings.method, "ema"):
        del kept["ema"]  # it has no teacher
    if settings.weights:
        kept["weights"] = digest(expanded(settings.weights))
    return {"settings": kept, "data": fingerprint, "numerics": NUMERICS}


def _telling(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not neutral."""
    values, neutral = settings.model_dump(mode="json"), settings.neutral
    return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


def identify(settings: Pretrain, fingerprint: str) -> str:
    """Return the run's id: ten digits of its facts."""
    return digits(facts(settings, fingerprint))


def digits(known: Any) -> str:
    """Return ten hexadecimal digits of a JSON value's hash."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]


def changed(settings: Pretrain, fingerprint: str, id_: str, held: Mapping[str, Any]) -> str:
    """Return what changed since these facts were hashed, or "". The id must be their hash, and they must match the
    settings.
    """
    if (proper := digits(held)) != id_:
        return f"its id is {id_[:100]!r}, and its identity's is {proper}"
    if held.get("data") != fingerprint or not isinstance(held.get("numerics"), int):
        return "its data are not those of its identity"
    return "" if _same_settings(settings, held.get("settings")) else "its settings are not those of its identity"


def _same_settings(settings: Pretrain, held: Any) -> bool:
    """True if the hashed settings are these settings. Weights are hashed by content, and their file may be gone."""
    if not isinstance(held, dict) or ("weights" in held) != bool(settings.weights):
        return False
    plain = settings.model_copy(update={"weights": ""}) if settings.weights else settings
    kept = {name: value for name, value in held.items() if name != "weights"}
    if facts(plain, "")["settings"] == kept:
        return True
    try:  # built again, because an older version may have spelled an effect differently
        return bool(build(Pretrain, NEUTRAL | {"ema": plain.ema} | kept) == plain)
    except ValueError:
        return False


def run_name(settings: Pretrain, fingerprint: str) -> str:
    """Return the name of a run's folder."""
    return name_of(settings, identify(settings, fingerprint))


def name_of(settings: Pretrain, id_: str) -> str:
    """Return a folder name that describes the run: mocov3-shapes-tiny-emphasis-s5-seed0-1a2b3c4d5e."""
    effect = re.sub(r"[^\w.]+", "-", settings.effect.replace("=", "")).strip("-")
    words = (settings.method, settings.data, settings.encoder, effect[:40], f"seed{settings.seed}")
    return "-".join([*words, id_])


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({reason(error)}); say where it is with --weights") from None
