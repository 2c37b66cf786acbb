"""The scripts in examples/, run with the real packages."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import marginlens as ml

EXAMPLES = Path(__file__).parents[1] / "examples"
BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def example(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(nn.Module):
    """Two heads on noise, and their loss, in the form that both trainers take."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.seen = nn.Linear(6, 4), nn.Linear(6, 4), []

    def forward(self, x):
        q, k = self.left(x), self.right(x)
        self.seen.append((q.detach(), k.detach()))
        return {"loss": ml.info_nce(q, k, tau=0.25), "q": q, "k": k, "features": x}


def expected(seen):
    """Return the numbers of a lens that looks at these batches by hand."""
    lens = ml.Lens(every=2)
    for x, (q, k) in zip(BATCHES, seen, strict=True):
        lens.observe(q, k, x)
    return lens.read()


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("lens_*.py")))
def test_a_callback_is_short(name):
    (found,) = (x for x in ast.parse((EXAMPLES / f"{name}.py").read_text()).body if isinstance(x, ast.ClassDef))
    assert found.end_lineno - found.lineno < 30


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_lightning_callback():
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, index):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback, module = example("lens_lightning").LensCallback(every=2), Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    (look,) = callback.looks
    assert look == {"epoch": 0, **expected(module.model.seen)}
    assert float(trainer.callback_metrics["lens/alignment"]) == pytest.approx(look["alignment"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_transformers_callback(tmp_path):
    import transformers

    callback, model = example("lens_transformers").LensCallback(every=2), Model()
    rows = [{"x": row} for batch in BATCHES for row in batch]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(rows)

    asked = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "use_cpu": True, "report_to": [], "seed": 0}
    told = transformers.TrainingArguments(
        str(tmp_path),
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **asked,
    )
    InOrder(model=model, args=told, train_dataset=rows, callbacks=[callback]).train()
    (look,) = callback.looks
    assert look == {"epoch": 1.0, **expected(model.seen)}
    assert not model._forward_hooks
