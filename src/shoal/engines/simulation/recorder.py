"""What a simulation writes: the nodes' records, their final models, and the evaluated averages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from shoal.engines.averaging import ModelAverage
from shoal.engines.end_record import end_record
from shoal.engines.run_tracker import RunTracker
from shoal.engines.simulation.kernel import Kernel
from shoal.environment.faults import FaultEvent
from shoal.errors import DiskFullError
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.node import Node
from shoal.results.checkpoints import Manifest, SavedNode
from shoal.results.progress import main_score
from shoal.results.record_writer import PauseReport, RecordWriter, write_finally
from shoal.results.records import DIVERGED, Average, Evaluation, Event, Record, RunFolder
from shoal.types import NodeId, Params

FLUSH_SECONDS = 5.0
"""Seconds between two writes of all records, at least."""
MAX_RECORD_BYTES = 256 * 2**20
"""The most bytes of records in memory."""


class Recorder:
    """Writes records with the time of the virtual clock."""

    def __init__(self, folder: RunFolder, setup: Setup, tracker: RunTracker, kernel: Kernel) -> None:
        self._folder = folder
        self._setup = setup
        self._tracker = tracker
        self._kernel = kernel
        self._records = RecordWriter(folder, self._report_pause, FLUSH_SECONDS, MAX_RECORD_BYTES)
        self._records.open(None)
        self._unsaved: dict[NodeId, Params] = {}
        """Final models that could not be written, because the disk was full."""
        self._resumed: Manifest | None = None
        self._saved: dict[NodeId, SavedNode] = {}
        self._start_times: dict[NodeId, float] = {}

    def skip_repeated(self, resumed: Manifest, start_times: Mapping[NodeId, float]) -> None:
        """In a resumed run: do not write again what the checkpoint has.

        The first nodes start before the others. What happens to the others until they start is in their records.
        """
        self._resumed = resumed
        self._saved = {saved.node: saved for saved in resumed.nodes}
        self._start_times = dict(start_times)

    def size(self, node: NodeId) -> int:
        """The size of a node's records in bytes."""
        return self._records.size(node)

    @property
    def paused(self) -> bool:
        """Whether records are kept in memory because the disk is full."""
        return self._records.paused

    def write(self, node: NodeId, record: Record) -> None:
        if self._resumed is not None and self._is_repeated(node, record):
            return
        self._records.write(node, record)
        if isinstance(record, Evaluation):
            self._tracker.add_score(record.tick or record.round, main_score(record.scores))
        elif isinstance(record, Event) and record.what == DIVERGED:
            self._tracker.node_diverged(node, record.detail)
        if self._tracker.listener.wants_records:
            self._tracker.listener.add_records([(node, record)])

    def write_fault(self, node: NodeId, fault: FaultEvent) -> None:
        self.write(node, Event("fault", self._kernel.now, str(fault)))

    def write_complete_averages(self) -> None:
        for average in self._tracker.complete_averages():
            self.write_average(average, self._kernel.now)

    def write_average(self, average: ModelAverage, time: float, tick: int | None = None) -> None:
        """Evaluate the average of models, and write the result."""
        if self._resumed is not None and tick is not None and tick <= self._resumed.ticks:
            return
        scores = self._setup.evaluate(average.mean)
        self._records.write(None, Average(average.round, time, average.nodes, average.consensus_distance, scores, tick))

    def write_end(self, node: Node, mailbox: Mailbox) -> None:
        """Write a node's totals, and its final model if the experiment keeps it."""
        self.write(node.id, end_record(node, mailbox, self._kernel.now))
        if self._setup.experiment.checkpoint.final:
            self._unsaved[node.id] = node.params
            if len(self._unsaved) == 1:  # otherwise the disk is full, and `close` tries again
                with contextlib.suppress(DiskFullError):
                    self._save_models()

    def _is_repeated(self, node: NodeId, record: Record) -> bool:
        """Whether the records of a resumed run already have this record."""
        assert self._resumed is not None
        saved = self._saved.get(node)
        if saved is None:
            return False
        if isinstance(record, Evaluation) and record.tick is not None:
            return record.tick <= (self._resumed.ticks if self._resumed.same_start else saved.ticks)
        return isinstance(record, Event) and record.time < self._start_times[node]

    def flush(self) -> None:
        """Raises `DiskFullError`."""
        self._records.flush()

    def flush_if_due(self) -> None:
        self._records.flush_if_due()

    def close(self) -> None:
        """Write all records and models that are left. If the disk is full, wait for space: see `write_finally`."""
        write_finally(self._write_rest, self._tracker.listener.notice)

    def _write_rest(self) -> None:
        self._save_models()
        self._records.finish()

    def _save_models(self) -> None:
        for node, params in list(self._unsaved.items()):
            self._folder.save_model(node, params)
            del self._unsaved[node]

    def _report_pause(self, report: PauseReport) -> None:
        self._tracker.listener.notice(report.described)
