"""Metric events as TensorBoard files, without torch and without TensorFlow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import UsageError
from echelon.events import Configured, Event, Metric

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


def require() -> None:
    """UsageError when the package is missing: asked before anything starts."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tensorboard=true needs the package tensorboard, which is not installed",
            remedy="Install it with `pip install echelon-train[tensorboard]`.",
        )


class TensorBoard:
    """Writes each metric of each step into `folder`, from the moment it is wanted: at once, or when the script said so.

    A Sink; the folder is made with the first metric; close() writes what is still held.
    """

    def __init__(self, folder: Path, *, wanted: bool = False) -> None:
        self.folder, self.wanted = folder, wanted
        self._writer: EventFileWriter | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Configured):
            self.wanted = event.strategy.get("tensorboard") is True
        elif isinstance(event, Metric) and self.wanted:
            self._write(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, metric: Metric) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self.folder))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metric.values.items()]
        self._writer.add_event(Record(wall_time=metric.time, step=metric.step, summary=Summary(value=values)))
