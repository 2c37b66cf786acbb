"""Settings of each command: typed, frozen, final. What is printed is what runs.

A field that is not given takes the recipe's value: the data set's (`RECIPES`), else the method's (`METHOD_DEFAULTS`),
else the one written here. The recipe is ReSSL's small-image one, on which the paper builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import marginlens as ml
from marginlens.methods import METHODS
from marginlens.methods.byol import check_effect
from marginlens.nets.parts import divides
from marginlens.nets.resnet import ENCODERS, STEMS
from marginlens.parameters import hint

SMALLEST, LARGEST = 8, 512
"""Sides of images, in pixels."""


def _side(size: int) -> int:
    """Checks an image's side where 0 stands for that of pre-training."""
    if size and not SMALLEST <= size <= LARGEST:
        raise ValueError(f"size is {size}; it must be from {SMALLEST} to {LARGEST} pixels")
    return size


def _scale(scale: tuple[float, float]) -> tuple[float, float]:
    """Checks a range of shares of an image's area."""
    low, high = scale
    if not 1e-6 <= low <= high <= 1:
        raise ValueError(f"crop_scale is {low:g} {high:g}; it must be two numbers in (0, 1], the smaller first")
    return scale


def _count(value: Any) -> int:
    """The whole number above 0 that a value stands for, as pydantic reads it; 0 for all else (refused later)."""
    try:
        return max(0, int(float(value))) if float(value).is_integer() else 0
    except (TypeError, ValueError, OverflowError):
        return 0


Amp = Literal["auto", "off", "bf16", "fp16"]
Size = Annotated[int, AfterValidator(_side)]
Scale = Annotated[tuple[float, float], AfterValidator(_scale)]

RECIPES: dict[str, dict[str, Any]] = {
    "stl10": {"split": "train+unlabeled", "size": 64, "ema": 0.996},
    "tinyimagenet": {"size": 64, "ema": 0.996},
    "shapes": {
        "encoder": "tiny",
        "batch": 64,
        "lr": 0.2,
        "ema": 0.9,
        "hidden": 256,
        "out": 64,
        "predictor_bn": False,
        "warmup": 1,
        "crop_scale": (0.5, 1.0),
    },
}
"""What a data set asks for. `shapes`: what a CPU learns from in minutes (docs/laboratory.md has the measurements)."""

PROBE_RECIPES: dict[str, dict[str, Any]] = {
    "shapes": {"epochs": 20, "batch": 16, "lr": 0.5, "crop_scale": (0.5, 1.0)},
}
"""What a data set asks of a probe on it; the paper's data sets ask for what `Probe` has."""

METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "mocov3": {"last_bn": True, "predictor_bn": True, "bn_splits": 4},
    "simclr": {},
    "byol": {"tau": 0.5, "beta": 0.0},
}
"""What a method asks for, at the recipe's batch. `bn_splits` keeps the size of its parts where the batch is another."""

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


class Settings(BaseModel):
    """Frozen, strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _switches(cls, given: Any) -> Any:
        """YAML reads `seed: yes` as true, which Python would take for 1, and `amp: off` as false."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            field = cls.model_fields.get(name)
            if value is False and field is not None and "off" in get_args(field.annotation):
                given = {**given, name: "off"}
            elif isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} is {'yes' if value else 'no'}; it is not a switch: give its value")
        return given


class Pretrain(Settings):
    """What determines the result of a pre-training, and nothing else."""

    method: str = Field("mocov3", description=f"One of {', '.join(METHODS)}.")
    data: str = Field("cifar10", description="A prepared data set: shapes, cifar10, ..., or a folder's name.")
    effect: str = Field("plain", description="Effect of the loss, e.g. 'emphasis(s=5) * ratio(m1=0.4)'.")
    epochs: int = Field(200, ge=1, description="Passes over the training images.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of weights, order and views.")
    encoder: str = Field("resnet18", description="tiny, resnet18, resnet34 or resnet50.")
    stem: str = Field("auto", description="small, small-pool, imagenet, or auto: what suits the image size.")
    size: int = Field(32, ge=SMALLEST, le=LARGEST, description="Side of the views in pixels.")
    split: str = Field("train", description="Images to learn from; several splits are joined by +.")
    limit: int = Field(0, ge=0, description="Learn from the first so many images only; 0: from all.")
    weights: str = Field("", description="Start from these backbone weights (safetensors, torchvision's names).")
    tau: float = Field(0.25, ge=1e-4, description="Temperature.")
    beta: float = Field(1.0, ge=0, le=1, description="Weight of the loss's denominator.")
    hidden: int = Field(2048, ge=1, description="Width of projector and predictor.")
    out: int = Field(128, ge=1, description="Dimension of the embeddings.")
    last_bn: bool = Field(False, description="End the projector in a batch norm without affine parameters.")
    bias: bool = Field(True, description="Biases in the linear layers of the heads.")
    predictor_bn: bool = Field(False, description="End the predictor in such a batch norm too (mocov3, byol).")
    bn_splits: int = Field(
        1,
        ge=1,
        description="Parts of a batch that the backbone's batch norms see one at a time; "
        "not given, mocov3: of 64 images, where such parts fill the batch.",
    )
    symmetric: bool = Field(False, description="Add the loss with the two views exchanged (mocov3, byol).")
    two_tau: bool = Field(False, description="Multiply the loss by 2 tau, as the official MoCo v3 does.")
    ema: float = Field(0.99, ge=0, le=1, description="Momentum of the teacher (mocov3, byol).")
    ema_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="Keep the teacher's momentum, or raise it to 1 by a cosine."
    )
    batch: int = Field(256, ge=2, description="Images in a batch; a last partial batch is left out.")
    lr: float = Field(0.06, ge=0, description="Learning rate after the warm-up; a cosine takes it to 0.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(5e-4, ge=0, description="Weight decay.")
    decay_all: bool = Field(True, description="Decay all parameters; otherwise none of norms and biases.")
    warmup: int = Field(5, ge=0, description="Epochs of linear warm-up; not given: at most a quarter of the epochs.")
    clip: float = Field(0.0, ge=0, description="Clip the gradient's norm to this; 0: not.")
    crop_scale: Scale = Field((0.2, 1.0), description="Share of the area in a crop of either view.")
    weak_crop: Literal["resized", "padded"] = Field("resized", description="The weak view's crop.")
    blur: float = Field(0.5, ge=0, le=1, description="Probability of blur in the strong view.")
    amp: Amp = Field("auto", description="Half precision on CUDA; auto: bf16, or fp16 where bf16 is only emulated.")

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, given: Any) -> Any:
        """Fills in what the recipe says of a data set and of a method."""
        if not isinstance(given, Mapping):
            return given
        method = str(given.get("method", cls.model_fields["method"].default))
        data = RECIPES.get(str(given.get("data", cls.model_fields["data"].default)), {})
        data = {name: value for name, value in data.items() if method in METHODS and takes(method, name)}
        recipe = METHOD_DEFAULTS.get(method, {}) | data
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
            check_effect(ml.effect(self.effect), METHODS[self.method].__name__)
        elif self.beta == 0.0:
            raise ValueError(f"beta is 0, which leaves {self.method} without negatives; that is byol: --method byol")
        return self


class Probe(Settings):
    """A linear layer on a frozen backbone: the paper's evaluation."""

    epochs: int = Field(100, ge=1, description="Passes over the training images, each with fresh crops.")
    batch: int = Field(256, ge=1, description="Images in a batch.")
    lr: float = Field(1.0, ge=0, description="Learning rate; a cosine takes it to 0.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum (Nesterov's).")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of the layer.")
    crop_scale: Scale = Field((0.08, 1.0), description="Share of the area in a training crop.")
    holdout: int = Field(0, ge=0, description="Test on so many images kept back from training, not on the test set.")
    resize: int = Field(0, ge=0, description="Resize test images to this before the central crop; 0: to the crop.")
    size: Size = Field(0, description="Side of test images in pixels; 0: as in pre-training.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of the layer, order and crops.")


class Knn(Settings):
    """Nearest neighbours among training images, by cosine, weighted exp(cos / temperature)."""

    k: int = Field(200, ge=1, description="Neighbours that vote.")
    temperature: float = Field(0.1, ge=1e-3, description="How fast a neighbour's vote fades with its distance.")
    holdout: int = Field(0, ge=0, description="Test on so many images kept back from training, not on the test set.")
    resize: int = Field(0, ge=0, description="Resize images to this before the central crop; 0: to the crop.")
    size: Size = Field(0, description="Side of the images in pixels; 0: as in pre-training.")


def build(model: type[Settings], values: Mapping[str, Any]) -> Any:
    """The settings, or one line that says what is wrong with the values."""
    for key in values:
        if key not in model.model_fields:
            raise ValueError(f"there is no setting {key!r}; {hint(str(key), model.model_fields)}")
    try:
        return model(**values)
    except ValidationError as error:
        raise ValueError("; ".join(_line(found) for found in error.errors())) from None


def known(kind: str, name: str, table: Mapping[str, Any]) -> str:
    """Checks a name, and suggests one."""
    if name not in table:
        raise ValueError(f"there is no {kind} {name[:80]!r}; {hint(name[:80], table)}")
    return name


def _line(found: Any) -> str:
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    where = ".".join(str(part) for part in found["loc"])[:80]
    given = repr(found["input"])
    given = given if len(given) <= 100 else f"{given[:90]}... ({len(given)} characters)"
    if found["type"] == "too_short" and not found["input"]:
        return f"{where} is empty; give at least {found['ctx']['min_length']}"
    said = (
        found["msg"].replace("Input should be", "it must be").replace("Input", "it").replace("a valid tuple", "a list")
    )
    return f"{where} is {given}; {said}"
