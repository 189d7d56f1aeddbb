"""Metric events as TensorBoard files, without torch and without TensorFlow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from echelon.errors import UsageError
from echelon.events import Event, Metric


def require() -> None:
    """UsageError when the package is missing: asked before anything starts."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tensorboard=true needs the package tensorboard, which is not installed",
            remedy="Install it with `pip install echelon-train[tensorboard]`.",
        )


class TensorBoard:
    """Writes each metric of each step into `folder`. A Sink; close() writes what is still held."""

    def __init__(self, folder: Path) -> None:
        require()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Metric):
            return
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in event.values.items()]
        record = Record(wall_time=event.time, step=event.step, summary=Summary(value=values))
        self._writer.add_event(record)

    def close(self) -> None:
        self._writer.close()
