"""Settings of each command: typed, frozen, final. What is printed is what runs.

A field that is not given takes the recipe's value: the data set's (`data/sources.py`), else the method's (its class),
else the one written here. The recipe is ReSSL's small-image one, on which the paper builds.
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

from pydantic import Field, field_validator, model_validator

import marginlens as ml
from marginlens.data.sources import recipes
from marginlens.files import expanded, opened, reason
from marginlens.methods import METHODS
from marginlens.methods.protocol import check_no_negatives
from marginlens.nets.resnet import ENCODERS, STEMS
from marginlens.nets.split_norm import divides
from marginlens.settings import LARGEST, SMALLEST, Scale, Settings, build, known


def _count(value: Any) -> int:
    """The whole number above 0 that a value stands for, as pydantic reads it; 0 for all else (refused later)."""
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
"""Settings that are for a method to take, and its argument that says whether it does."""


def takes(method: str, name: str) -> bool:
    """Whether a setting means something to a method: one that is its to take must be among its arguments."""
    return name not in METHOD_SETTINGS or METHOD_SETTINGS[name] in _arguments(METHODS[method])  # type: ignore[arg-type]


@cache
def _arguments(method: type) -> frozenset[str]:
    return frozenset(signature(method).parameters)


_OF_DATA = recipes("pretrain")


def method_recipe(name: str) -> dict[str, Any]:
    """Return the settings that a method asks for."""
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
"""Settings that are left out of the hash at this value. A frozen meaning, whatever a default may become."""


class Pretrain(Settings):
    """What determines the result of a pre-training, and nothing else."""

    neutral = NEUTRAL
    recipes = {name: method_recipe(name) for name in METHODS} | recipes("pretrain")

    method: str = Field("mocov3", description=f"One of {', '.join(METHODS)}.")
    data: str = Field("cifar10", description="A prepared data set: shapes, cifar10, ..., or a folder's name.")
    effect: str = Field("plain", description="Effect of the loss, such as 'emphasis(s=5) * ratio(m1=0.4)'.")
    epochs: int = Field(200, ge=1, description="Passes over the training images.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of initial weights, image order and views.")
    encoder: str = Field("resnet18", description="tiny, resnet18, resnet34 or resnet50.")
    stem: str = Field("auto", description="First layers: small, small-pool or imagenet; auto chooses by image size.")
    size: int = Field(32, ge=SMALLEST, le=LARGEST, description="Height and width of the views in pixels.")
    split: str = Field("train", description="Split to learn from; join several by +, as in train+unlabeled.")
    limit: int = Field(0, ge=0, description="Number of images to learn from, the first ones of the split; 0: all.")
    weights: str = Field("", description="File of backbone weights to start from (safetensors, torchvision's names).")
    tau: float = Field(0.25, ge=1e-4, description="Temperature of the loss: cosines are divided by it.")
    beta: float = Field(1.0, ge=0, le=1, description="Weight of the loss's denominator; 1 is InfoNCE.")
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
        """Fills in what the recipe says of a data set and of a method."""
        if not isinstance(given, Mapping):
            return given
        method = str(given.get("method", cls.model_fields["method"].default))
        data = _OF_DATA.get(str(given.get("data", cls.model_fields["data"].default)), {})
        data = {name: value for name, value in data.items() if method in METHODS and takes(method, name)}
        recipe = method_recipe(method) | data
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
        """One spelling for one effect."""
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


NUMERICS = 1
"""Raised when the same settings come to mean other numbers: views, initialisation, loss, schedule, order."""


def evaluation_name(kind: str, data: str, fingerprint: str, settings: Settings) -> str:
    """The file of an evaluation: its kind, its data, and ten digits of what determines it."""
    known = digits([kind, fingerprint, NUMERICS, _telling(settings)])
    return f"{kind}-{data}-{known}.json"


def facts(settings: Pretrain, fingerprint: str) -> dict[str, Any]:
    """What is hashed: settings that are not neutral, the data's and the weights' content, the numerics' version."""
    kept = _telling(settings)
    if not takes(settings.method, "ema"):
        del kept["ema"]  # it has no teacher
    if settings.weights:
        kept["weights"] = digest(expanded(settings.weights))
    return {"settings": kept, "data": fingerprint, "numerics": NUMERICS}


def _telling(settings: Settings) -> dict[str, Any]:
    """The settings that are not at their neutral value."""
    values, neutral = settings.model_dump(mode="json"), settings.neutral
    return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


def identify(settings: Pretrain, fingerprint: str) -> str:
    """The run's id: ten digits of its facts."""
    return digits(facts(settings, fingerprint))


def digits(known: Any) -> str:
    """Ten hexadecimal digits that stand for what JSON can hold."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]


def changed(settings: Pretrain, fingerprint: str, id_: str, held: Mapping[str, Any]) -> str:
    """What was changed since these facts were held: an id is their hash, and they are those of settings and data."""
    if (proper := digits(held)) != id_:
        return f"its id is {id_[:100]!r}, and its identity's is {proper}"
    if held.get("data") != fingerprint or not isinstance(held.get("numerics"), int):
        return "its data are not those of its identity"
    return "" if _same_settings(settings, held.get("settings")) else "its settings are not those of its identity"


def _same_settings(settings: Pretrain, held: Any) -> bool:
    """Whether what was hashed is what these settings say; weights are hashed by their content, which may be gone."""
    if not isinstance(held, dict) or ("weights" in held) != bool(settings.weights):
        return False
    plain = settings.model_copy(update={"weights": ""}) if settings.weights else settings
    kept = {name: value for name, value in held.items() if name != "weights"}
    if facts(plain, "")["settings"] == kept:
        return True
    try:  # as this version reads it: an older one may have spelled an effect otherwise
        return bool(build(Pretrain, NEUTRAL | {"ema": plain.ema} | kept) == plain)
    except ValueError:
        return False


def run_name(settings: Pretrain, fingerprint: str) -> str:
    """The name of its folder."""
    return name_of(settings, identify(settings, fingerprint))


def name_of(settings: Pretrain, id_: str) -> str:
    """A folder's name that says what the run is: mocov3-shapes-tiny-emphasis-s5-seed0-1a2b3c4d5e."""
    effect = re.sub(r"[^\w.]+", "-", settings.effect.replace("=", "")).strip("-")
    words = (settings.method, settings.data, settings.encoder, effect[:40], f"seed{settings.seed}")
    return "-".join([*words, id_])


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({reason(error)}); say where it is with --weights") from None
