"""A lens on a live model: what a loss sees and does, recorded in anyone's training loop.

Numbers gather in a few tensors on the device of the embeddings. Nothing is read, and no device is waited for, before
`Lens.read`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from marginlens import checks
from marginlens.autodiff import full_precision
from marginlens.checks import EffectLike, as_effect
from marginlens.effects import PLAIN, Row, plain_logit
from marginlens.layouts import _sine, _unit
from marginlens.lens.parts import multiplier, plain_logs, row_of
from marginlens.loss import Layout, Rows
from marginlens.parameters import Number, as_float

OTHERS = (
    "margin(m1=0.4)",
    "margin(m2=0.2)",
    "emphasis(s=20)",
    "emphasis(c=1)",
    "ratio(m1=0.4)",
    "attenuation(alpha=1)",
)
"""Effects whose weights on the same rows are recorded beside those of the loss."""
ANGLES, SHARES = 36, 20
"""Bins of an angle, over [0, pi], and of a probability, over [0, 1]."""
MOST = 1024
"""Rows that one sample looks at. More are thinned out evenly, and all keys are kept."""
FORMAT = 1
_CHUNK = 256
_EPSILON = 1e-7
"""RankMe's: it is added to each singular value's share."""

Sums: TypeAlias = dict[str, Tensor]


class Lens:
    """Records what a loss sees of its rows and does to their gradients, at some calls.

    Call `observe` after each step, or `observe_rows`, and `read` from time to time. For example:

        lens = ml.Lens(effect="margin(m1=0.4)", tau=0.25)
        for q, k in steps:
            loss = ml.info_nce(q, k, tau=0.25, effect="margin(m1=0.4)")
            ...
            lens.observe(q, k)
        print(lens.read()["alignment"])

    Args:
        effect: The effect of the loss.
        tau: The temperature of the loss.
        beta: The weight of the denominator in the loss.
        layout: The loss: "info_nce", "nt_xent" or "positive_only".
        every: Look at the first call, and at every `every`-th call after it.
        others: Effects whose weights on the same rows are recorded too.
    """

    def __init__(
        self,
        effect: EffectLike = PLAIN,
        *,
        tau: Number | None = None,
        beta: float | None = None,
        layout: Layout = "info_nce",
        every: int = 50,
        others: Sequence[EffectLike] = OTHERS,
    ) -> None:
        checks.one_of("layout", layout, ("info_nce", "nt_xent", "positive_only"))
        checks.whole("every", every)
        alone = layout == "positive_only"
        self.effect, self.layout, self.every = as_effect(effect), layout, every
        self.tau = checks.temperature((0.5 if alone else 0.25) if tau is None else tau, check=True)
        self.beta = checks.share((0.0 if alone else 1.0) if beta is None else beta)
        if alone and self.beta != 0.0:
            raise ValueError(f"beta is {self.beta:g}; layout 'positive_only' has no negatives, so it must be 0")
        if alone and self.effect.needs_negatives:
            checks.negatives(0, 0.0, self.effect, "positive_only has none by definition")
        known = {str(effect): effect for effect in map(as_effect, others)}
        self.others = {name: one for name, one in known.items() if not (alone and one.needs_negatives)}
        self.calls = 0
        self.sums: Sums = {}

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> None:
        """Look at embeddings as the loss gets them, (n, d) each, and at the backbone's features (n, f) if given.

        Args:
            q: The queries; for `nt_xent` the embeddings of one view, for `positive_only` the predictions.
            k: The keys; row i is the positive of row i of q.
            features: What the linear probe will see; needed for the effective rank and the size of features.
        """
        if not self._due():
            return
        checks.embeddings(False, q=q, k=k)
        if self.layout != "info_nce" or len(q) > len(k):
            checks.same_shape(q=q, k=k)
        others = {"info_nce": len(k) - 1, "nt_xent": len(q) - 1, "positive_only": 0}[self.layout]
        checks.negatives(others, self.beta, self.effect, "a lens needs two rows or more")
        if features is not None and features.dim() != 2:
            raise ValueError(f"features has shape {tuple(features.shape)}; it must be (n, f)")
        with full_precision(q):
            self._embeddings(*(_unit(x, torch.promote_types(x.dtype, torch.float32)).float() for x in (q, k)))
            if features is not None:
                self._features(features)

    @torch.no_grad()
    def observe_rows(self, rows: Rows) -> None:
        """Look at rows that `marginlens.rows` or `method.rows` gave; negatives and features are then not seen."""
        if not self._due():
            return
        self._rows(*row_of(rows))

    def read(self) -> dict[str, Any]:
        """Return what was seen since the beginning or the last `reset`, as plain JSON; waits for the device."""
        sums = {name: total.cpu() for name, total in self.sums.items()}
        if not sums:
            raise ValueError("the lens has seen nothing yet; call observe(q, k) in the training loop")
        if bad := int(sums["bad"]):
            raise ValueError(f"{bad} of {bad + int(sums['rows'])} rows were not finite; look at check=True of the loss")
        if self.effect.needs_negatives and (alone := int(sums["rows"] - sums["with_negatives"])):
            what = f"{self.effect}: {self.effect.needs_negatives} acts through negatives"
            raise ValueError(f"{what}, and {alone} of {int(sums['rows'])} rows have none")
        if "features.gram" in sums and not bool(sums["features.gram"].isfinite().all()):
            raise ValueError("the features hold NaN or infinity, or are too large; give the lens finite features")
        return _summary(self, sums)

    def reset(self) -> None:
        """Forget all rows seen so far. The count of calls stays."""
        self.sums = {}

    def merge(self, other: Lens) -> None:
        """Add what another lens saw, such as that of another process."""
        if self._key != other._key:
            raise ValueError(f"cannot merge a lens on {other._key} with one on {self._key}; make both alike")
        for name, total in other.sums.items():
            self._add(name, total)

    @property
    def _key(self) -> tuple[Any, ...]:
        return str(self.effect), as_float(self.tau), self.beta, self.layout, tuple(self.others)

    def _due(self) -> bool:
        self.calls += 1
        return (self.calls - 1) % self.every == 0

    def _add(self, name: str, value: Tensor) -> None:
        kept = self.sums.get(name)
        self.sums[name] = value if kept is None else kept + value.to(kept.device)

    def _rows(self, row: Row, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Add facts of rows; return log |dL/dc| and log dL/dA of each."""
        bad = ~row.cos.isfinite() | row.A.isnan()
        row, weight = _cleaned(row, bad), (~bad).double()
        a = plain_logit(row)
        share = torch.where(row.A.isneginf(), torch.nan, torch.sigmoid(a - row.A))
        log_positive, log_negative = plain_logs(row, beta)
        own = multiplier(self.effect, row, beta)
        self._add("samples", torch.ones((), dtype=torch.float64, device=bad.device))
        self._add("bad", bad.sum())
        for name, value in {
            "rows": torch.ones_like(row.cos),
            "angle": row.theta,
            "alignment": 2.0 - 2.0 * row.cos,
            "q": share.nan_to_num(1.0),
            "with_negatives": (~row.A.isneginf()).double(),
            "repelled": (own.sign < 0).double(),
            "plain.positive": log_positive.exp() * row.sin,
            "plain.negative": log_negative.exp(),
            "own.positive": (log_positive + own.log_positive).exp() * row.sin,
            "own.negative": (log_negative + own.log_negative).exp(),
        }.items():
            self._add(name, (value * weight).sum())
        for name, effect in self.others.items():
            part = multiplier(effect, row, beta)
            self._add(f"{name}.positive", ((log_positive + part.log_positive).exp() * row.sin * weight).sum())
            self._add(f"{name}.negative", ((log_negative + part.log_negative).exp() * weight).sum())
            self._add(f"{name}.repelled", ((part.sign < 0) * weight).sum())
        place = _bin(row.theta / math.pi, ANGLES) * SHARES + _bin(share.nan_to_num(1.0), SHARES)
        self._add("joint", _counts(place, weight, ANGLES * SHARES))
        return log_positive + own.log_positive, log_negative + own.log_negative

    def _embeddings(self, u: Tensor, v: Tensor) -> None:
        """Add facts of rows and of pairs."""
        n = len(u)
        positive = torch.arange(n, device=u.device)
        drop = positive[:, None]
        if self.layout == "nt_xent":
            u = v = torch.cat([u, v])
            drop = torch.stack([torch.arange(2 * n, device=u.device)] * 2, 1)
            drop[:, 1] = drop[:, 1].roll(n)
            positive = drop[:, 1]
        some = torch.arange(0, len(u), max(1, -(-len(u) // MOST)), device=u.device)
        x, y = u[some], v[positive[some]]
        cos, sin = (x * y).sum(-1).double(), _sine(x, y).clamp(min=torch.finfo(x.dtype).eps).double()
        scale = self._scale(u.device)
        A, pull = torch.full_like(cos, -math.inf), None
        if self.layout != "positive_only" and drop.shape[1] < len(v):
            A, pull = self._negatives(x, v, drop[some], scale)
        row = Row(cos, sin, A, scale.expand_as(cos))
        log_positive, log_negative = self._rows(row, torch.full_like(cos, self.beta))
        self._add("pull.positive", _total(log_positive.exp() * sin))
        if pull is not None:
            self._add("pull.negative", _total(log_negative.exp() * scale * pull))
        near = (x @ x.T).double()
        spread = torch.exp(4.0 * near - 4.0).sum() - torch.exp(4.0 * near.diagonal() - 4.0).sum()
        self._add("uniformity", torch.nan_to_num(spread))
        self._add("pairs", _number(len(x) * (len(x) - 1), u.device))

    def _negatives(self, x: Tensor, v: Tensor, drop: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Add facts of negatives; return each row's log-sum-exp and how hard its negatives pull, tangentially."""
        sums, pulls = [], []
        for part, left_out in zip(x.split(_CHUNK), drop.split(_CHUNK), strict=True):
            cos = part @ v.T
            kept = torch.ones_like(cos).scatter_(1, left_out, 0.0)
            logits = (cos * scale.float()).masked_fill_(kept == 0.0, -math.inf)
            total = logits.logsumexp(1)
            shares = torch.exp(logits - total[:, None])
            mean = (shares * logits.masked_fill(kept == 0.0, 0.0)).sum(1)
            self._add("effective", _total((total - mean).double().exp()))
            self._add("effective_rows", _number(len(part), part.device))
            angles = torch.acos(cos.clamp(-1.0, 1.0))
            finite = kept * cos.isfinite()
            self._add("negatives", _counts(_bin(angles / math.pi, ANGLES).flatten(), finite.flatten(), ANGLES))
            self._add("negative_angle", (angles.nan_to_num() * finite).sum().double())
            self._add("negative_pairs", finite.sum().double())
            centre = shares @ v
            along = (centre * part).sum(1, keepdim=True)
            pulls.append(torch.linalg.vector_norm(centre - along * part, dim=1).double())
            sums.append(total.double())
        return torch.cat(sums), torch.cat(pulls)

    def _features(self, features: Tensor) -> None:
        """Add the Gram matrix of features, (f, f) in float64, and their norms."""
        x = features.detach().double()
        self._add("features.gram", x.T @ x)
        self._add("features.norm", torch.linalg.vector_norm(x, dim=1).sum())
        self._add("features.rows", _number(len(x), x.device))

    def _scale(self, device: torch.device) -> Tensor:
        """Return 1 / tau, (), without a copy to the device if tau is a plain number."""
        if isinstance(self.tau, Tensor):
            return (1.0 / self.tau.detach()).reshape(()).to(device=device, dtype=torch.float64)
        return _number(1.0 / self.tau, device)


def _cleaned(row: Row, bad: Tensor) -> Row:
    """Return the rows with harmless numbers in the place of bad ones, which are counted and left out."""
    return row._replace(
        cos=row.cos.masked_fill(bad, 0.0), sin=row.sin.masked_fill(bad, 1.0), A=row.A.masked_fill(bad, 0.0)
    )


def _number(value: float, device: torch.device) -> Tensor:
    """Return a number on a device. It is filled in there, because a copy from the host would wait for the device."""
    return torch.full((), value, dtype=torch.float64, device=device)


def _total(values: Tensor) -> Tensor:
    """Return the sum of the finite values."""
    return torch.where(values.isfinite(), values, 0.0).sum()


def _bin(share: Tensor, bins: int) -> Tensor:
    """Return the bin of numbers in [0, 1]."""
    return (share.nan_to_num() * bins).long().clamp(0, bins - 1)


def _counts(place: Tensor, weight: Tensor, bins: int) -> Tensor:
    """Return how much weight is in each bin, without waiting for the device as `torch.bincount` does."""
    return torch.zeros(bins, dtype=torch.float64, device=place.device).scatter_add_(0, place, weight.double())


def lens_of(method: Any) -> Lens:
    """Return a lens on the loss of a method, which looks at every call."""
    named = {name: method.settings[name] for name in ("tau", "beta") if name in method.settings}
    return Lens(method.settings["effect"], layout=layout_of(method), every=1, **named)


def embedded(method: Any, views: Sequence[Tensor]) -> tuple[list[Sequence[Tensor]], Tensor]:
    """Return the pairs of embeddings that a method's loss compares, and the features of its backbone (n, f)."""
    features: list[Tensor] = []
    hook = method.backbone.register_forward_hook(lambda *given: features.append(given[-1].detach()))
    try:
        queries, keys = method.queries(views), method.keys(views)
    finally:
        hook.remove()
    pairs = list(zip(queries, keys, strict=True)) if keys else [queries]
    return pairs, torch.cat(features).float()


def layout_of(method: Any) -> Layout:
    """Return the layout of a method's loss: with a teacher's negatives, among all embeddings, or with none."""
    if "beta" not in method.settings:
        return "positive_only"
    return "info_nce" if hasattr(method, "teacher") else "nt_xent"


def rank_of(gram: Tensor) -> float:
    """Return RankMe of features Z by Z^T Z: exp of the entropy of the singular values' shares (arXiv 2210.02885)."""
    values = torch.linalg.eigvalsh(gram).clamp(min=0.0).sqrt()
    share = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny) + _EPSILON
    return float(torch.exp(-(share * share.log()).sum()))


def _summary(lens: Lens, sums: Sums) -> dict[str, Any]:
    """Return means of what was added up."""
    total = {name: float(value) for name, value in sums.items() if value.dim() == 0}
    rows = total["rows"]

    def times(name: str, side: str) -> float | None:
        plain, weighed = total[f"plain.{side}"], total[f"{name}.{side}"]
        found = weighed / plain if plain else math.nan
        return found if math.isfinite(found) else None

    found: dict[str, Any] = {
        "format": FORMAT,
        "effect": str(lens.effect),
        "tau": as_float(lens.tau),
        "beta": lens.beta,
        "layout": lens.layout,
        "samples": int(total["samples"]),
        "rows": int(rows),
        "angle": total["angle"] / rows,
        "alignment": total["alignment"] / rows,
        "repelled": total["repelled"] / rows,
        "times": {side: times("own", side) for side in ("positive", "negative")},
        "others": {
            name: {side: times(name, side) for side in ("positive", "negative")}
            | {"repelled": total[f"{name}.repelled"] / rows}
            for name, effect in lens.others.items()
            if not effect.needs_negatives or total["with_negatives"] == rows
        },
        "joint": {
            "theta": [math.pi * i / ANGLES for i in range(ANGLES + 1)],
            "q": [i / SHARES for i in range(SHARES + 1)],
            "counts": sums["joint"].reshape(ANGLES, SHARES).round().long().tolist(),
        },
    }
    if total["with_negatives"]:
        found["probability"] = total["q"] / rows
    if "uniformity" in total and total["pairs"]:
        found["uniformity"] = math.log(total["uniformity"] / total["pairs"])
    if "negative_pairs" in total:
        found["effective_negatives"] = total["effective"] / total["effective_rows"]
        found["negative_angle"] = total["negative_angle"] / total["negative_pairs"]
        found["negatives"] = {"theta": found["joint"]["theta"], "counts": sums["negatives"].round().long().tolist()}
        both = total["pull.positive"] + total["pull.negative"]
        found["pull"] = {side: total[f"pull.{side}"] / both if both else None for side in ("positive", "negative")}
    if "features.gram" in sums:
        found["features"] = {
            "rank": rank_of(sums["features.gram"]),
            "norm": total["features.norm"] / total["features.rows"],
            "dimension": len(sums["features.gram"]),
        }
    return found
