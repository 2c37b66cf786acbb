"""A Hugging Face Trainer callback that watches training by a lens: `Trainer(callbacks=[LensCallback(tau=0.05)])`.

The model returns a dictionary with `loss` and the embeddings `q` and `k` that the loss got.
"""

from typing import Any

from transformers import TrainerCallback

import marginlens as ml


class LensCallback(TrainerCallback):
    """Reads a lens at the end of each epoch, into `looks`."""

    def __init__(self, **settings: Any) -> None:
        self.lens, self.looks = ml.Lens(**settings), []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.hook = model.register_forward_hook(self._see)

    def _see(self, model: Any, given: Any, out: Any) -> None:
        if model.training:
            self.lens.observe(out["q"].detach(), out["k"].detach(), out.get("features"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.lens.sums:
            self.looks.append({"epoch": state.epoch, **self.lens.read()})
            self.lens.reset()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.remove()
