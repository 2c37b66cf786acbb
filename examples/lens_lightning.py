"""A Lightning callback that watches training by a lens: `Trainer(callbacks=[LensCallback(tau=0.25)])`.

The module's `training_step` returns a dictionary with `loss` and the embeddings `q` and `k` that the loss got, and
`features` if their rank and size are wanted.
"""

from typing import Any

import lightning.pytorch as L

import marginlens as ml


class LensCallback(L.Callback):
    """Reads a lens at the end of each epoch: into `looks`, and its plain numbers into the logger."""

    def __init__(self, **settings: Any) -> None:
        self.lens, self.looks = ml.Lens(**settings), []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.lens.observe(outputs["q"].detach(), outputs["k"].detach(), outputs.get("features"))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.lens.sums:
            self.looks.append({"epoch": trainer.current_epoch, **self.lens.read()})
            module.log_dict({f"lens/{name}": x for name, x in self.looks[-1].items() if isinstance(x, float)})
            self.lens.reset()
