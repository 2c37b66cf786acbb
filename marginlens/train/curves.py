"""The metrics once more for TensorBoard, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marginlens.train.stop import disk


class Curves:
    """Scalars by step; nothing where tensorboard is not installed. What was written beyond `step` is forgotten."""

    def __init__(self, folder: Path, step: int) -> None:
        self.writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with disk(folder, "nothing was lost"):
            self.writer = SummaryWriter(str(folder), purge_step=step)

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, metrics: dict[str, Any]) -> None:
        """One point for each number."""
        if self.writer is not None:
            for name, value in metrics.items():
                if name not in ("epoch", "step"):
                    self.writer.add_scalar(name, value, metrics["step"])
            self.writer.flush()
