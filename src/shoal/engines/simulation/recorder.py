"""What a simulation writes: the nodes' records, their final models, and the evaluated averages."""

from __future__ import annotations

from shoal.engines.averaging import ModelAverage
from shoal.engines.end_record import end_record
from shoal.engines.run_tracker import RunTracker
from shoal.engines.simulation.kernel import Kernel
from shoal.environment.faults import FaultEvent
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.node import Node
from shoal.results.progress import main_score
from shoal.results.records import Average, BufferedRecordFiles, Evaluation, Event, Record, RecordFile, RunFolder
from shoal.types import NodeId


class Recorder:
    """Writes records with the time of the virtual clock."""

    def __init__(self, folder: RunFolder, setup: Setup, tracker: RunTracker, kernel: Kernel) -> None:
        self._folder = folder
        self._setup = setup
        self._tracker = tracker
        self._kernel = kernel
        self._records = BufferedRecordFiles(folder, setup.experiment.size)
        self._averages = RecordFile(folder.averages)

    def write(self, node: NodeId, record: Record) -> None:
        self._records.write(node, record)
        if isinstance(record, Evaluation):
            self._tracker.add_score(record.tick or record.round, main_score(record.scores))

    def write_fault(self, node: NodeId, fault: FaultEvent) -> None:
        self.write(node, Event("fault", self._kernel.now, str(fault)))

    def write_complete_averages(self) -> None:
        for average in self._tracker.complete_averages():
            self.write_average(average, self._kernel.now)

    def write_average(self, average: ModelAverage, time: float, tick: int | None = None) -> None:
        """Evaluate the average of models, and write the result."""
        scores = self._setup.evaluate(average.mean)
        self._averages.write(Average(average.round, time, average.nodes, average.consensus_distance, scores, tick))

    def write_end(self, node: Node, mailbox: Mailbox) -> None:
        """Write a node's totals, and its final model if the experiment keeps it."""
        self.write(node.id, end_record(node, mailbox, self._kernel.now))
        if self._setup.experiment.checkpoint.final:
            self._folder.save_model(node.id, node.params)

    def flush_if_due(self) -> None:
        self._records.flush_if_due()

    def close(self) -> None:
        self._records.flush()
        self._averages.close()
