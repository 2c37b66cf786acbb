"""Write run folders like those of real runs, without training."""

import json

from marginlens import evals
from marginlens.runs.config import Pretrain, digits, evaluation_name, facts, identify, run_name
from marginlens.settings import build

CONTENT = {"cifar10": "c10" * 20, "cifar100": "c100" * 15, "shapes": "5a" * 30}
ENVIRONMENT = {
    "time": "2026-11-15T12:00:00Z",
    "marginlens": "0.1.0",
    "numerics": 1,
    "commit": "0123456789ab",
    "python": "3.12.1",
    "torch": "2.11.0",
    "system": "Linux x86_64",
    "device": "NVIDIA H200",
}


def write_run(
    store,
    *,
    probe=None,
    transfer=None,
    done=None,
    failure="",
    probe_settings=None,
    content=None,
    knn=70.0,
    time=ENVIRONMENT["time"],
    **settings,
):
    """A run's folder in a store; `probe`: its top-1; `transfer`: {data: top-1}; `done`: epochs, when not complete."""
    chosen = build(Pretrain, settings)
    fingerprint = content or CONTENT.get(chosen.data, "ab" * 30)
    path = store / run_name(chosen, fingerprint)
    path.mkdir(parents=True)
    known = {"format": 1, "id": identify(chosen, fingerprint), "settings": chosen.model_dump(mode="json")}
    known |= {"data": fingerprint, "mean": [0.5] * 3, "std": [0.25] * 3, "identity": facts(chosen, fingerprint)}
    (path / "config.json").write_text(json.dumps(known))
    epochs = chosen.epochs if done is None else done
    metrics = [_epoch(chosen, epoch, knn) for epoch in range(1, epochs + 1)]
    _lines(path / "metrics.jsonl", metrics)
    _lines(path / "speed.jsonl", [{"epoch": m["epoch"], "seconds": 2.0, "images_per_second": 9e3} for m in metrics])
    _lines(
        path / "environment.jsonl",
        [ENVIRONMENT | {"time": time, "precision": "bfloat16", "engine": "graph", "step": 0}],
    )
    if failure:
        failed = {"time": ENVIRONMENT["time"], "line": failure, "code": 1, "step": 195 * epochs}
        (path / "failure.json").write_text(json.dumps(failed))
    if done is None:
        result = {"epochs": epochs, "steps": 195 * epochs, "images": 50000, "loss": metrics[-1]["loss"], "knn": knn}
        (path / "result.json").write_text(json.dumps(result | {"seconds": 2.0 * epochs, "checkpoint": "gone"}))
    if probe is not None:
        evaluate(path, "probe", chosen.data, fingerprint, probe, probe_settings, time)
    for data, top1 in (transfer or {}).items():
        evaluate(path, "transfer", data, CONTENT.get(data, "cd" * 30), top1, probe_settings, time)
    return path


def settle(path, change):
    """Changes a config.json, and makes its id that of what it then holds; the folder and evaluations follow."""
    known = json.loads((path / "config.json").read_text())
    change(known)
    known["id"] = digits(known["identity"])
    (path / "config.json").write_text(json.dumps(known))
    for one in (path / "evaluations").glob("*.json"):
        one.write_text(json.dumps(json.loads(one.read_text()) | {"run": known["id"]}))
    return path.rename(path.with_name(f"{path.name[:-10]}{known['id']}"))


def _epoch(chosen, epoch, knn):
    share = epoch / chosen.epochs
    found = {"epoch": epoch, "step": 195 * epoch, "loss": 4.0 - 2.0 * share, "lr": chosen.lr * (1 - share)}
    found |= {"spread": 0.6 + 0.1 * share, "embedding_spread": 0.5, "ema": 0.99}
    return found | ({"knn": knn * share} if epoch % 10 == 0 or epoch == chosen.epochs else {})


def evaluate(path, kind, data, fingerprint, top1, settings=None, time=ENVIRONMENT["time"]):
    """An evaluation in a run's folder, under the name that it would have."""
    known = json.loads((path / "config.json").read_text())
    chosen = evals.usual("probe", data, settings)
    found = {"kind": kind, "run": known["id"], "data": data, "data_fingerprint": fingerprint}
    found |= {"settings": chosen.model_dump(mode="json"), "backbone_sha256": "0" * 64, "top1": top1, "top5": 99.0}
    found |= {"loss": 0.5, "train_images": 50000, "test_images": 10000, "seconds": 20.0}
    found |= {"environment": ENVIRONMENT | {"time": time}}
    (path / "evaluations").mkdir(exist_ok=True)
    (path / "evaluations" / evaluation_name(kind, data, fingerprint, chosen)).write_text(json.dumps(found))


def _lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
