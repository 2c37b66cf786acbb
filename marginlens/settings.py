"""Settings: typed, frozen, final. The printed settings are those that run."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from marginlens.parameters import hint as nearest

SMALLEST, LARGEST = 8, 512
"""Sides of images, in pixels."""
MOST = 1 << 53
"""Largest count of images, steps or epochs in a record."""


_SYNONYMS = {
    "amp": "precision mixed_precision fp16 bf16 half dtype",
    "batch": "batch_size batchsize bs b",
    "checkpoint_seconds": "save_every save_freq checkpoint_every",
    "clip": "clip_grad grad_clip gradient_clip clip_norm max_norm",
    "data": "dataset data_set data_dir data_path root",
    "device": "gpu gpus gpu_id cuda accelerator",
    "effect": "loss criterion margin",
    "ema": "ema_momentum ema_decay teacher_momentum moco_m m",
    "encoder": "arch architecture model backbone net network a",
    "epochs": "epoch num_epochs n_epochs max_epochs total_epochs e",
    "from": "path dir root data_dir data_path folder source",
    "hidden": "hidden_dim hidden_size mlp_dim proj_hidden_dim",
    "k": "neighbors neighbours n_neighbors knn_k",
    "limit": "max_samples num_samples n_samples subset",
    "lr": "learning_rate base_lr eta",
    "method": "algorithm algo ssl framework",
    "resume": "continue resume_from",
    "seed": "random_seed random_state manual_seed",
    "size": "image_size img_size imsize input_size crop_size resolution",
    "tau": "temperature temp t moco_t",
    "warmup": "warmup_epochs warm_up num_warmup_epochs",
    "weight_decay": "wd decay l2",
    "weights": "pretrained checkpoint ckpt init",
    "workers": "num_workers n_workers threads j",
}
"""Names of our settings and options in other packages."""
_PLACES = "output output_dir out_dir outdir output_path save_dir save_path log_dir logdir results_dir o"
_WIDTHS = "dim embed_dim embedding_dim proj_dim projection_dim out_dim feature_dim"


def hint(name: str, names: Iterable[str]) -> str:
    """Return the setting that was probably meant, or all there are."""
    names = list(names)
    ours = synonym(name, names)
    return f"did you mean {ours!r}?" if ours else nearest(name, names)


def synonym(name: str, names: Collection[str]) -> str:
    """Return which of the names stands for another package's name of a setting; "" if none does."""
    theirs = name.strip("-").replace("-", "_").lower()
    wide = "hidden" in names  # because `out` is a width beside `hidden`, and a file or a folder otherwise
    known = _SYNONYMS | {"runs": _PLACES, "out": _WIDTHS} if wide else {**_SYNONYMS, "out": _PLACES, "runs": _PLACES}
    return next((ours for ours, others in known.items() if theirs in others.split() and ours in names), "")


def _side(size: int) -> int:
    """Return an image's side if it is valid; 0 stands for the side in pre-training."""
    if size and not SMALLEST <= size <= LARGEST:
        raise ValueError(f"size is {size}; it must be from {SMALLEST} to {LARGEST} pixels")
    return size


def _scale(scale: tuple[float, float]) -> tuple[float, float]:
    """Return a range of shares of an image's area if it is valid."""
    low, high = scale
    if not 1e-6 <= low <= high <= 1:
        raise ValueError(f"crop_scale is {low:g} {high:g}; it must be two numbers in (0, 1], the smaller first")
    return scale


Size = Annotated[int, AfterValidator(_side)]
Scale = Annotated[tuple[float, float], AfterValidator(_scale)]


class Settings(BaseModel):
    """Frozen settings with fixed names, read as `settings.lr` or `settings["lr"]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, Any]] = {}
    """Values at which a setting is left out of a hash, because records from before the setting acted so."""
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values that a data set or a method uses instead of the defaults, by its name."""

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Give `help` a docstring with every setting, and a signature without the bounds that pydantic puts into it."""
        fields = [(name, field.description) for name, field in cls.model_fields.items() if field.description]
        listed = "\n".join(f"{name} {default(cls, name)}\n    {said}" for name, said in fields)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{listed}".strip()
        cls.__signature__ = inspect.Signature(
            [x.replace(annotation=cls.model_fields[x.name].annotation) for x in cls.__signature__.parameters.values()]
        )

    @model_validator(mode="before")
    @classmethod
    def _switches(cls, given: Any) -> Any:
        """Handle booleans of YAML, which reads `seed: yes` as true, so 1 in Python, and `amp: off` as false."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            field = cls.model_fields.get(name)
            if value is False and field is not None and "off" in get_args(field.annotation):
                given = {**given, name: "off"}
            elif isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} is {'yes' if value else 'no'}; it is not a switch: give its value")
        return given

    def __init__(self, /, **values: Any) -> None:
        for name in values:
            if name not in type(self).model_fields:
                raise ValueError(f"there is no setting {name!r}; {hint(name, type(self).model_fields)}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(wrong(error)) from None

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a setting, or the other value if there is no setting of that name."""
        return getattr(self, name) if name in type(self).model_fields else otherwise


def build(model: type[Settings], values: Mapping[str, Any]) -> Any:
    """Return the settings; raise a ValueError of one line if a value is invalid."""
    return model(**{str(name): value for name, value in values.items()})


def default(model: type[Settings], name: str) -> str:
    """Return a field's default, with those of data sets and methods that have another."""
    field = model.model_fields[name]
    if field.is_required():
        return "(required)"
    said = [f"default: {_text(field.default)}"]
    said += [f"{key}: {_text(own[name])}" for key, own in model.recipes.items() if name in own]
    return f"({'; '.join(said)})"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def known(kind: str, name: str, table: Mapping[str, Any]) -> str:
    """Return a name if the table has it; raise a ValueError with the closest one otherwise."""
    if name not in table:
        raise ValueError(f"there is no {kind} {name[:80]!r}; {hint(name[:80], table)}")
    return name


def wrong(error: ValidationError, most: int = 100) -> str:
    """Return a line with the first `most` errors."""
    return "; ".join(_line(found) for found in error.errors()[:most])


def quoted_input(value: object) -> str:
    """Return a value for a message, a long one cut off."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:60]}... ({len(said)} characters)"


def _line(found: Any) -> str:
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    where = ".".join(str(part) for part in found["loc"])[:80]
    if found["type"] == "missing":
        return f"{where} is missing"
    if found["type"] == "too_short" and not found["input"]:
        return f"{where} is empty; give at least {found['ctx']['min_length']}"
    said = (
        found["msg"].replace("Input should be", "it must be").replace("Input", "it").replace("a valid tuple", "a list")
    )
    return f"{where} is {quoted_input(found['input'])}; {said}"


Rates = tuple[Annotated[float, Field(ge=0)], ...]


class Machine(Settings):
    """Device and worker processes."""

    device: str = Field("auto", description="auto, cpu, cuda, or one GPU, such as cuda:1.")
    workers: int = Field(2, ge=0, description="Processes that decode the images of a folder.")
