"""TensorBoard: one event file for this site, rebuilt when the node starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightyear_node.integrations.tracking import OutOfStep
from lightyear_node.integrations.tracking.flat_rows import series
from lightyear_node.storage.history import Entry

VERSION = "brain.Event:2"


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path, site: str) -> None:
        self._folder = folder
        self._suffix = f".{site}.lightyear"
        self._out: Any = None
        self._path: Path | None = None
        self._round = -1

    def resume(self, recent: Sequence[Entry]) -> bool:
        return False  # an event file cannot be compared cheaply

    def rebuild(self, rounds: Sequence[Entry]) -> None:
        """Write a new file and delete our old ones: charts would show every round twice."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob(f"events.out.tfevents.*{self._suffix}"):
            old.unlink(missing_ok=True)
        # The name contains the time, so that a reader of the old file notices the new one.
        self._path = self._folder / f"events.out.tfevents.{time.time_ns()}{self._suffix}"
        self._out = RecordWriter(self._path.open("wb"))
        self._round = -1
        self._out.write(Event(wall_time=time.time(), file_version=VERSION).SerializeToString())
        for entry in rounds:
            self._write(entry)
        self._out.flush()

    def add(self, entry: Entry) -> None:
        if self._path is None or not self._path.exists() or entry["round"] <= self._round:
            raise OutOfStep
        self._write(entry)
        self._out.flush()

    def _write(self, entry: Entry) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in series(entry).items()
        ]
        event = Event(wall_time=entry["time"], step=entry["round"], summary=Summary(value=values))
        self._out.write(event.SerializeToString())
        self._round = entry["round"]

    def close(self) -> None:
        if self._out is not None:
            out, self._out = self._out, None
            with contextlib.suppress(OSError):  # unwritten data on a full disk
                out.close()
