"""Evaluations: an oracle for each number, an unchanged backbone, and a test set that --holdout never touches."""

import itertools
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import marginlens as ml
from marginlens.data import draw, feed
from marginlens.data.views import View, make_view
from marginlens.errors import Stopped
from marginlens.evals import Task, features, knn, probe
from marginlens.evals import features as metrics
from marginlens.evals.features import accuracy
from marginlens.nets import encoder
from marginlens.output import Display
from marginlens.runs import config, work
from marginlens.runs import evaluate as evaluate_
from marginlens.runs import work as lock
from marginlens.runs.model import fingerprint, load_backbone_of, load_method_of
from marginlens.runs.records import Evaluation
from marginlens.runs.run import open_run
from marginlens.runs.store import drop_weights
from tests.train.conftest import settings

CPU = torch.device("cpu")
SHORT = ml.Probe(epochs=2, batch=8, lr=0.1)


def probed(backbone, feed, settings):
    """What a probe finds."""
    task = Task(backbone, feed, 8, torch.float32, quiet())
    return probe.measure(task, [settings])[settings]


def quiet():
    return Display("", quiet=True)


def little():
    return feed.open_feed("little", CPU)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (5, 0.1), (20, 0.5), (200, 0.07)])
def test_votes_equal_scikit_learn_s(k, temperature):
    rng = np.random.default_rng(k)
    bank, asked, labels = rng.normal(size=(60, 7)), rng.normal(size=(33, 7)), rng.integers(0, 4, 60)
    k = min(k, 60)
    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature))
    shares = theirs.fit(bank, labels).predict_proba(asked)
    found = knn.vote(torch.tensor(bank), torch.tensor(labels), torch.tensor(asked), 4, k, temperature)
    np.testing.assert_allclose((found / found.sum(1, keepdim=True)).numpy(), shares, atol=1e-9)


def test_accuracy_equals_scikit_learn_s():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(200, 12)), rng.integers(0, 12, 200)
    for top in (1, 5):
        theirs = 100 * top_k_accuracy_score(labels, scores, k=top, labels=range(12))
        assert accuracy(torch.tensor(scores), torch.tensor(labels), top) == pytest.approx(theirs)
    assert accuracy(torch.eye(3), torch.arange(3), 5) == 100.0


def test_knn_of_a_run_is_the_vote_on_its_features(whole):
    found = ml.knn(whole, ml.Knn(k=5), quiet=True)
    data, backbone = little(), load_backbone_of(whole)
    x, y = (
        features.features(backbone, features.plain_images(data, s, torch.arange(n), 8), torch.float32)
        for s, n in (("train", 32), ("test", 16))
    )
    scores = knn.vote(x, data.labels("train"), y, 4, 5, 0.1)
    assert found["top1"] == accuracy(scores, data.labels("test"))
    assert whole.result["knn"] == ml.knn(whole, quiet=True)["top1"]


def test_the_probe_equals_a_plain_loop(whole):
    """Every epoch's crops from `make_view`, torch's own SGD and cosine."""
    chosen = ml.Probe(epochs=3, batch=8, lr=0.3, weight_decay=1e-3, crop_scale=(0.3, 0.9), seed=4)
    found = ml.probe(whole, chosen, quiet=True)
    data, backbone = little(), load_backbone_of(whole)
    images, labels = data.store.split("train").to("cpu")
    torch.manual_seed(4)
    layer = nn.Linear(backbone.features, 4)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), 0.3, 0.9, weight_decay=1e-3, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 4)
    view = View(8, scale=(0.3, 0.9), jitter_p=0, grey=0, blur=0, mean=data.mean, std=data.std)
    for epoch in range(3):
        losses = []
        order = draw.order(32, 4, epoch)
        for some in order.split(8):
            with torch.no_grad():
                x = backbone(make_view(images[some], some, view, 4, epoch, 2))
            loss = nn.functional.cross_entropy(layer(x), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    test = next(features.plain_images(data, "test", torch.arange(16), 8))
    with torch.no_grad():
        scores = layer(backbone(test))
    assert found["top1"] == accuracy(scores, data.labels("test"))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert (found["train_images"], found["test_images"]) == (32, 16)


def test_the_backbone_is_untouched_bit_for_bit():
    """Parameters, batch norm's statistics and every module's mode; and the check that says so can fail."""
    net = encoder("tiny")
    net.layer1.eval()
    modes = [m.training for m in net.modules()]
    before, state = fingerprint(net), {k: v.clone() for k, v in net.state_dict().items()}
    probed(net, little(), SHORT)
    knn.knn_accuracy(net, little(), ml.Knn(), 8, torch.float32)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert fingerprint(net) == before
    assert [m.training for m in net.modules()] == modes
    assert all(p.grad is None for p in net.parameters())
    net.bn1.running_mean += 1e-7
    assert fingerprint(net) != before


def test_an_evaluation_that_touches_the_backbone_is_not_recorded(whole, monkeypatch):
    def careless(task, several):
        task.backbone.bn1.num_batches_tracked += 1
        return {several[0]: {"top1": 100.0}}

    monkeypatch.setattr(probe, "EVALUATION", replace(probe.EVALUATION, measure=careless))
    with pytest.raises(RuntimeError, match="changed the backbone"):
        ml.probe(whole, ml.Probe(epochs=9), quiet=True)
    assert not any(found.kind == "probe" and found.settings.epochs == 9 for found in whole.evaluations)


def test_crops_are_fresh_each_epoch_and_the_last_epoch_counts(monkeypatch):
    seen, epochs = [], []
    honest = features.features

    def spy(backbone, batches, precision):
        batches = list(batches)
        seen.append(torch.cat(batches))
        return honest(backbone, batches, precision)

    monkeypatch.setattr(probe, "features", spy)
    monkeypatch.setattr(probe, "accuracy", lambda scores, labels, top: epochs.append(top) or 50.0)
    found = probed(encoder("tiny"), little(), ml.Probe(epochs=3))
    test, *train = seen
    assert [len(x) for x in train] == [32, 32, 32]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(train))
    assert len(test) == 16
    assert epochs == [1, 5]  # measured once, at the end: there is no best epoch to choose
    assert found["top1"] == 50.0


def test_separable_features_are_separated():
    class Label(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot((x.mean((1, 2, 3)) > 0).long(), 2).float()

    data, two = little(), {s: torch.arange(n) % 2 for s, n in (("train", 32), ("test", 16))}
    data._held = {s: (y * 255).byte()[:, None, None, None].expand(len(y), 3, 8, 8) for s, y in two.items()}
    data.labels, data.classes = two.get, ("dark", "bright")
    assert probed(Label(), data, SHORT)["top1"] == 100.0


@given(st.integers(2, 400), st.data())
def test_holding_out_splits_the_training_set(count, data):
    kept = data.draw(st.integers(1, count - 1))
    chosen = metrics.parts(Labels(count), kept)
    assert len(chosen.test) == kept
    assert chosen.tested == "train"
    assert torch.cat([chosen.train, chosen.test]).sort().values.equal(torch.arange(count))
    assert chosen.labels.equal(chosen.train % 3)
    assert chosen.test_labels.equal(chosen.test % 3)


class Labels:
    name, splits = "made up", ("train",)

    def __init__(self, count):
        self.count = count

    def labels(self, split):
        assert split == "train"
        return torch.arange(self.count) % 3


def test_holding_out_never_meets_the_test_set(whole, monkeypatch):
    def guarded(answer):
        def asked(split, *args, **kwargs):
            assert split == "train"
            return answer(split, *args, **kwargs)

        return asked

    data = little()
    for name in ("labels", "images"):
        monkeypatch.setattr(data, name, guarded(getattr(data, name)))
    monkeypatch.setattr(evaluate_, "open_feed", lambda *_: data)
    found = ml.probe(whole, ml.Probe(epochs=1, holdout=10), quiet=True)
    assert (found["train_images"], found["test_images"]) == (22, 10)
    assert 0 <= ml.knn(whole, ml.Knn(holdout=10), quiet=True)["top1"] <= 100
    with pytest.raises(AssertionError):
        ml.probe(whole, ml.Probe(epochs=1), quiet=True)


def test_a_result_is_kept_and_found_again(whole, capsys):
    first = ml.probe(whole, SHORT)
    capsys.readouterr()
    assert ml.probe(whole, SHORT) == first
    assert "measured before" in capsys.readouterr().err
    again = ml.probe(whole, SHORT, again=True, quiet=True)
    assert {k: again[k] for k in ("top1", "top5", "loss")} == {k: first[k] for k in ("top1", "top5", "loss")}
    other = ml.probe(whole, SHORT.model_copy(update={"lr": 0.2}), quiet=True)
    assert other["settings"]["lr"] == 0.2
    assert again in [one.plain() for one in whole.evaluations]
    assert first["backbone_sha256"] == fingerprint(load_backbone_of(whole))


RATES = (0.05, 0.2, 2.0)
TOLD = ("top1", "top5", "loss", "feature_norm", "settings")


def test_rates_beside_are_the_probes_that_they_are(whole, tmp_path):
    """Each alone, in a copy of the run, gives the same record, to the last digit."""
    other = open_run(shutil.copytree(whole.path, tmp_path / whole.path.name))
    shutil.rmtree(other.path / "evaluations", ignore_errors=True)
    found = ml.probe(other, SHORT, beside=RATES, quiet=True)
    kept = {one["settings"]["lr"]: one for one in (kept.plain() for kept in other.evaluations)}
    assert set(kept) == {SHORT.lr, *RATES}
    assert found["beside"] == {f"{lr:g}": kept[lr]["top1"] for lr in RATES}
    lost = {f"{lr:g}" for lr in RATES if Evaluation.model_validate(kept[lr]).diverged}
    assert set(found.get("beside_diverged", ())) == lost
    assert {k: v for k, v in found.items() if not k.startswith("beside")} == kept[SHORT.lr]
    for lr, one in kept.items():
        alone = ml.probe(whole, SHORT.model_copy(update={"lr": lr}), again=True, quiet=True)
        assert {name: one[name] for name in TOLD} == {name: alone[name] for name in TOLD}


def test_only_rates_that_are_missing_are_measured(whole, monkeypatch, capsys):
    seen = []

    def counted(task, several):
        seen.append([one.lr for one in several])
        return probe.measure(task, several)

    monkeypatch.setattr(probe, "EVALUATION", replace(probe.EVALUATION, measure=counted))
    chosen = ml.Probe(epochs=1, lr=0.11)
    ml.probe(whole, chosen, beside=(0.12,), quiet=True)
    found = ml.probe(whole, chosen, beside=(0.12, 0.11, 0.13), quiet=True)
    assert seen == [[0.11, 0.12], [0.13]]
    assert set(found["beside"]) == {"0.12", "0.13"}
    assert ml.probe(whole, chosen, beside=(0.13,))["beside"].keys() == {"0.13"}
    assert "measured before" in capsys.readouterr().err
    assert len(seen) == 2


def test_a_rate_that_was_lost_is_not_tried_again(whole, capsys):
    chosen = ml.Probe(epochs=2, lr=0.17)
    ml.probe(whole, chosen, beside=(1e38,))
    assert "became nan" in capsys.readouterr().err
    ml.probe(whole, chosen, beside=(1e38,))
    err = capsys.readouterr().err
    assert "measured before" in err
    assert "became nan" not in err
    ml.probe(whole, chosen, beside=(1e38,), again=True)
    assert "became nan" in capsys.readouterr().err
    assert open_run(whole.path).evaluations  # and its record can be read


def test_a_rate_beside_that_is_too_high_is_left_out(whole, capsys):
    found = ml.probe(whole, ml.Probe(epochs=2, lr=0.14), beside=(1e38, 0.15))
    assert set(found["beside"]) == {"0.15"}
    assert re.search(r"warning: the probe diverged.* nan in epoch 2.*\(1e\+38\)", capsys.readouterr().err)
    assert found["lost"] == [1e38]
    for _ in range(2):  # the second time it is only looked up
        with pytest.raises(Stopped, match=r"probe diverged \(NaN\) at this learning rate, but not at another"):
            ml.probe(whole, ml.Probe(epochs=2, lr=1e38), beside=(0.16,), quiet=True)
    assert {0.15, 0.16} <= {one.rate for one in whole.evaluations}
    with pytest.raises(ValueError, match=r"beside\.0 is -1"):
        ml.probe(whole, SHORT, beside=(-1,), quiet=True)


def test_transfer_is_a_probe_on_other_data(whole, prepared):
    rng = np.random.default_rng(1)
    batch = ml.data.store.Batch(rng.integers(0, 256, (20, 3, 24, 24), dtype=np.uint8), np.arange(20) % 2)
    ml.data.store.write("other", {"train": [batch], "test": [batch]}, ["x", "y"], prepared)
    found = ml.transfer(whole, "other", SHORT, quiet=True)
    assert (found["kind"], found["data"], found["train_images"]) == ("transfer", "other", 20)
    data = feed.open_feed("other", CPU)
    honest = probed(load_backbone_of(whole), data, SHORT)
    assert found["top1"] == honest["top1"]
    assert next(features.plain_images(data, "test", torch.arange(3), 8)).shape == (3, 3, 8, 8)


def test_the_method_comes_back_whole(whole):
    method, tensors = load_method_of(whole), whole.checkpoint().tensors
    assert all(torch.equal(v, tensors[f"method.{k}"]) for k, v in method.state_dict().items())


def test_test_images(prepared):
    """Resize and central crop as documented; images of the right size are left alone."""
    images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).remainder(251).byte()
    assert feed.middle(images, 16, 0) is images
    assert feed.middle(images, 8, 16).equal(images[:, :, 4:12, 4:12])
    half = feed.middle(images, 8, 0)
    theirs = nn.functional.interpolate(images.float(), 8, mode="bilinear", antialias=True).round().byte()
    assert (half.int() - theirs.int()).abs().max() <= 1
    with pytest.raises(ValueError, match="resize is 8, smaller than the crop of 16 px"):
        next(features.plain_images(little(), "test", torch.arange(2), 16, 8))


REFUSED = {
    "is not complete": lambda run: ml.probe(settings_run(run)),
    "holdout is 32; it must be less than the 32": lambda run: ml.probe(run, ml.Probe(holdout=32)),
    "there is no data set 'nowhere'": lambda run: ml.transfer(run, "nowhere"),
    "does not exist": lambda run: ml.probe("no/such/run"),
    "there is no device 'quantum'; there are auto, cpu": lambda run: ml.knn(run, ml.Knn(k=3), device="quantum"),
}


def settings_run(run):
    """A run that was never begun."""
    return work.make_run(settings(seed=99), little(), run.path.parent)


@pytest.mark.parametrize("line", REFUSED)
def test_refused(whole, line):
    with pytest.raises(ValueError) as caught:
        REFUSED[line](whole)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_probe_that_is_not_finite_is_not_recorded(whole):
    with pytest.raises(Stopped, match=r"the probe diverged.* nan in epoch \d.*\(1e\+38\)"):
        ml.probe(whole, ml.Probe(epochs=2, lr=1e38), quiet=True)
    assert not any(found.rate == 1e38 for found in whole.evaluations)


def test_a_probe_that_diverged_says_so(tmp_path, capsys):
    run = ml.pretrain(settings(lr=0.01), runs=tmp_path)
    ml.probe(run, ml.Probe(epochs=2, lr=1e3))
    assert re.search(r"warning: the probe diverged: .* guessing .*\(1000\)", capsys.readouterr().err)
    ml.probe(run, ml.Probe(epochs=2, lr=1e-3))
    assert "diverged" not in capsys.readouterr().err


def test_a_new_option_of_an_evaluation_orphans_none():
    class Later(ml.Probe):
        neutral = ml.Probe.neutral | {"new": False}
        new: bool = False

    name = config.evaluation_name("probe", "little", "f", ml.Probe())
    assert config.evaluation_name("probe", "little", "f", Later()) == name
    assert config.evaluation_name("probe", "little", "f", Later(new=True)) != name
    assert config.evaluation_name("probe", "little", "f", ml.Probe(holdout=3)) != name


def test_data_that_changed_are_not_probed(tmp_path, monkeypatch, prepared):
    store = ml.data.store
    images = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8)
    write = lambda x: store.write("fickle", {s: [store.Batch(x, np.arange(16) % 2)] for s in ("train", "test")}, "ab")
    write(images)
    run = ml.pretrain(settings(data="fickle", limit=0, epochs=1), runs=tmp_path, quiet=True)
    write(255 - images)
    with pytest.raises(ValueError, match="the content of fickle has changed since"):
        ml.probe(run)


def test_data_without_labels(tmp_path, prepared):
    store = ml.data.store
    images = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8)
    store.write("bare", {"train": [store.Batch(images, np.full(16, -1))]}, [])
    run = ml.pretrain(settings(data="bare", limit=0, epochs=1), runs=tmp_path, quiet=True)
    assert "knn" not in run.result
    with pytest.raises(ValueError, match="has no labels"):
        ml.probe(run, quiet=True)
    store.write("untested", {"train": [store.Batch(images, np.arange(16) % 2)]}, "ab")
    run = ml.pretrain(settings(data="untested", limit=0, epochs=1), runs=tmp_path, quiet=True)
    with pytest.raises(ValueError, match="has no test split; give --holdout"):
        ml.knn(run, quiet=True)
    assert ml.knn(run, ml.Knn(holdout=4), quiet=True)["kind"] == "knn"


def bare(run, folder):
    """A copy of a run without what was measured of it."""
    kept = shutil.copytree(run.path, folder / run.path.name, ignore=shutil.ignore_patterns("evaluations"))
    return ml.open_run(kept)


def test_a_run_that_is_evaluated_is_in_use(tmp_path, whole, monkeypatch):
    """Nobody removes its weights meanwhile or measures the same, and what was measured before can be had."""
    run = bare(whole, tmp_path)
    with lock.locked(run), pytest.raises(lock.InUse, match=f"is in use by process {os.getpid()} on .*; wait for"):
        ml.probe(run, SHORT, quiet=True)
    refused = []

    def measure(task, several):
        for other in (lambda: ml.probe(run, SHORT, quiet=True), lambda: drop_weights(run)):
            with pytest.raises(lock.InUse) as caught:
                other()
            refused.append(caught.value)
        return probe.measure(task, several)

    monkeypatch.setattr(probe, "EVALUATION", replace(probe.EVALUATION, measure=measure))
    found = ml.probe(run, SHORT, quiet=True)
    assert len(refused) == 2
    with lock.locked(run):
        assert ml.probe(run, SHORT, quiet=True) == found


def test_what_another_process_measured_while_we_waited_is_taken(tmp_path, whole, monkeypatch):
    run = bare(whole, tmp_path)
    found = ml.probe(run, SHORT, quiet=True)
    (path,) = (run.path / "evaluations").iterdir()
    path.rename(tmp_path / "aside")
    honest = lock.locked

    @contextmanager
    def late(run):
        with honest(run) as hold:
            (tmp_path / "aside").rename(path)
            yield hold

    monkeypatch.setattr(lock, "locked", late)
    monkeypatch.setattr(probe, "EVALUATION", replace(probe.EVALUATION, measure=None))
    assert ml.probe(run, SHORT, quiet=True) == found


def test_a_lock_that_is_kept(whole):
    """Between two parts of a job its run stays its own, and it can lock it as often as it likes."""
    with lock.keeping():
        with lock.locked(whole):
            pass
        with lock.locked(whole), pytest.raises(lock.InUse):
            _in_a_thread(lambda: lock.locked(whole).__enter__())
    with lock.locked(whole):
        pass


def _in_a_thread(do):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()
