"""Event files of TensorBoard, written by its own writer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from shoal.errors import DataError
from shoal.results.exports.points import Point
from shoal.results.exports.run_info import RunInfo, summary_values


class TensorBoardTarget:
    """Writes event files to `out/<name>/<run id>`.

    The time of an event is the start of the run plus the seconds of the run's clock: on TensorBoard's relative axis,
    all curves are over the run's clock.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, out: Path, run: RunInfo) -> None:
        self._run = run
        self._last = Point(0, 0.0, {})
        folder = out / run.name / run.id
        if any(folder.glob("events.out.tfevents.*")):
            raise DataError(
                f"{folder} already has an export of this run; remove this folder to export it again, or choose another "
                "one with --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.place = f"{folder}; show it with: tensorboard --logdir {out}"
        self._writer = EventFileWriter(str(folder))
        self._add(0, 0.0, hparams_pb(dict(run.parameters), trial_id=run.id, start_time_secs=run.began))
        self._add_text("experiment", run.text)

    def write(self, points: Iterable[Point]) -> None:
        for point in points:
            self._last = max(self._last, point, key=lambda point: point.time)
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(point.step, point.time, Summary(value=values))
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._add_text("summary", json.dumps(summary, indent=2))
        self.write([Point(self._last.step, self._last.time, summary_values(summary))])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, seconds: float, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=self._run.began + seconds, step=step, summary=summary))

    def _add_text(self, tag: str, text: str) -> None:
        block = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown shows it as it is
        tensor = TensorProto(dtype="DT_STRING", string_val=[block.encode()])
        value = Summary.Value(tag=tag, metadata=create_summary_metadata(tag, None), tensor=tensor)
        self._add(self._last.step, self._last.time, Summary(value=[value]))
