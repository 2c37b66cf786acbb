"""docs/guides/your-loop.md, run: all its blocks. docs/reference/methods.md: its tables of defaults and of effects."""

import copy
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import marginlens as ml
from marginlens.methods import BYOL, METHODS, MoCoV3, SimCLR
from tests.catalogue import random

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "methods.md"
LOOPS = DOCS / "guides" / "your-loop.md"
CLASSES = (MoCoV3, SimCLR, BYOL)
BATCHES = 3
HEADINGS = re.findall(r"^## (.*)$", LOOPS.read_text(), flags=re.M)


def block(heading, place=0):
    """The Python block at this place below a heading of the guide."""
    section = re.split(r"^## ", LOOPS.read_text(), flags=re.M)[HEADINGS.index(heading) + 1]
    return re.findall(r"```python\n(.*?)```", section, flags=re.S)[place]


def table(heading):
    """Rows of the first table below a heading, without its own."""
    below = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    lines = re.search(r"\n((?:\|.*\n)+)", below).group(1).splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def loader():
    """Batches of two views of sixteen images."""
    views = [random(16 * BATCHES, 3, 12, 12, seed=seed, dtype=torch.float32) for seed in (1, 2)]
    return DataLoader(TensorDataset(*views), batch_size=16)


def narrow(backbone, **options):
    """As the page has it, but with heads that take no time; the first copy is kept to compare with."""
    method = MoCoV3(backbone, hidden=16, out=8, **options)
    narrow.made.append((method, copy.deepcopy(method.state_dict())))
    return method


def execute(code):
    """The names that a block leaves."""
    names = {}
    exec(compile(code, str(LOOPS), "exec"), names)
    return names


def run(code):
    """The block's names, its method, and the state that the method began with."""
    narrow.made = []
    names = {"loader": loader(), "narrow": narrow}
    torch.manual_seed(0)
    code, count = re.subn(r"= MoCoV3\(", "= narrow(", code)
    assert count == 1
    exec(compile(code, str(LOOPS), "exec"), names)
    [(method, before)] = narrow.made
    return names, method, before


def moved(method, before, part):
    return [not torch.equal(p, before[name]) for name, p in method.named_parameters() if name.startswith(part)]


def plain_loop():
    return run(block("A whole method"))


def lightning_loop(monkeypatch):
    """With a Trainer for a test: on the CPU, one epoch, and nothing written."""
    import lightning.pytorch as L

    forced = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    forced |= {"enable_progress_bar": False, "enable_model_summary": False}
    real = L.Trainer
    monkeypatch.setattr(L, "Trainer", lambda **given: real(**(given | forced)))
    return run(block("With Lightning"))


@pytest.mark.parametrize("page", [PAGE, LOOPS], ids=lambda page: page.name)
def test_lines_fit(page):
    assert all(len(line) <= 120 for line in page.read_text().splitlines())


def test_the_loop_is_short():
    assert LOOPS.read_text().count("```python") == 6
    assert 10 <= len([line for line in block("A whole method").splitlines() if line]) <= 18


def test_the_loss_alone():
    names = execute(block("The loss alone"))
    assert names["q"].grad.isfinite().all()
    assert names["k"].grad is None
    assert names["seen"].theta.shape == (256,)


def test_a_backbone_that_returns_an_object():
    class Model(nn.Module):
        def forward(self, images):
            return SimpleNamespace(pooler_output=images.mean((2, 3)))

    backbone = execute(block("A whole method", 1))["Pooled"](Model())
    method = MoCoV3(backbone, hidden=16, out=8)
    assert method.loss([random(4, 3, 8, 8, seed=seed, dtype=torch.float32) for seed in (1, 2)]).isfinite()


def test_a_temperature_that_learns():
    names = execute(block("A temperature that learns"))
    assert names["log_tau"].grad.isfinite()
    assert names["log_tau"].grad != 0


def test_a_schedule_is_compiled_once(monkeypatch):
    compiled, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda step, **options: compiled(step, backend=backend, **options))
    names = execute(block("Schedules and `torch.compile`"))
    assert names["s"] == 19.0
    assert names["q"].grad.isfinite().all()
    plain = names["q"].detach().requires_grad_()
    ml.info_nce(plain, names["k"], tau=0.25, effect=ml.Emphasis(s=19)).backward()
    torch.testing.assert_close(names["q"].grad, plain.grad)
    assert len(graphs) == 1


def test_the_plain_loop():
    names, method, before = plain_loop()
    assert names["loss"].isfinite()
    assert names["features"].shape == (16, 64)
    assert all(moved(method, before, "student."))
    assert all(moved(method, before, "predictor."))
    assert all(moved(method, before, "teacher."))


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*does not have many workers",
)
def test_the_lightning_module_trains_as_the_plain_loop_does(monkeypatch):
    """To the same weights: so its hooks are called when they should be, the teacher's among them."""
    _, wanted, _ = plain_loop()
    names, method, before = lightning_loop(monkeypatch)
    assert names["trainer"].global_step == BATCHES
    assert names["trainer"].callback_metrics["loss"].isfinite()
    assert all(moved(method, before, "student."))
    assert all(moved(method, before, "teacher."))
    ours = method.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


def test_the_defaults():
    heading, *rows = table("Options")
    assert heading[1:4] == [cls.__name__ for cls in CLASSES]
    for cls, column in zip(CLASSES, (1, 2, 3), strict=True):
        told = {row[0]: row[column] for row in rows if row[column] != "-"}
        known = dict(list(inspect.signature(cls).parameters.items())[1:])
        assert told == {name: str(parameter.default) for name, parameter in known.items()}


@pytest.mark.parametrize("row", table("Which effects")[1:], ids=lambda row: row[0])
def test_the_effects(row):
    effect, *told = row
    for cls, word in zip(CLASSES, told, strict=True):
        try:
            cls(nn.Flatten(), features=3, hidden=4, out=4, effect=effect)
            found = "yes"
        except ValueError:
            found = "refused"
        assert found == word, cls.__name__


def test_every_method_has_a_column():
    assert tuple(METHODS.values()) == CLASSES
