"""Write the metrics for TensorBoard, too, if it is installed.

Written directly, without the thread of torch's `SummaryWriter`, so that a disk error is raised where it happens.
"""

from __future__ import annotations

import time
from io import FileIO
from pathlib import Path
from typing import Any

from marginlens.errors import disk


class Curves:
    """Scalars by step. Does nothing if tensorboard is not installed. Points after `step` are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self.file: FileIO | None = None
        try:
            from tensorboard.compat.proto.event_pb2 import SessionLog
        except ImportError:
            return
        with disk(folder, "nothing was lost"):
            folder.mkdir(exist_ok=True)
            # one file per start; their names sort in the order of starts
            self.file = (folder / f"events.out.tfevents.{time.time_ns()}").open("wb", buffering=0)
            self._write(file_version="brain.Event:2")
            self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, metrics: dict[str, Any]) -> None:
        """Add one point for each number."""
        if self.file is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=k, simple_value=v) for k, v in metrics.items() if k not in ("epoch", "step")]
            self._write(step=metrics["step"], summary=Summary(value=values))

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self.file is not None
        RecordWriter(self.file).write(Event(wall_time=time.time(), **event).SerializeToString())
