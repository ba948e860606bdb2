"""The observer of one node process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from shoal.engines.processes import control
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.deferred_evaluations import NOT_EVALUATED, DeferredEvaluations
from shoal.engines.processes.runtime import ProcessRuntime
from shoal.engines.round_faults import RoundFaults
from shoal.errors import NodeError
from shoal.results.progress import main_score
from shoal.results.record_writer import RecordWriter
from shoal.results.records import DIVERGED, Evaluation, Event, Record, Round
from shoal.types import Params

REPORT_INTERVAL = 0.5
"""Seconds between progress reports, unless there is a new evaluation."""


class NodeObserver:
    """Writes a node's records to its file, reports its progress to the coordinator, and injects its faults."""

    def __init__(
        self,
        runtime: ProcessRuntime,
        records: RecordWriter,
        link: CoordinatorLink,
        faults: RoundFaults,
        deferred: DeferredEvaluations | None,
    ) -> None:
        """`deferred` keeps models that are evaluated after the run; None: they are evaluated at once."""
        self._id = runtime.id
        self._runtime = runtime
        self._records = records
        self._link = link
        self._faults = faults
        self._deferred = deferred
        self._first_round_reported = False
        self._reported_at = 0.0
        self._latest: tuple[int, int] = (0, 0)
        """Rounds completed, and bytes sent by then."""
        self._evaluation: Evaluation | None = None
        """The latest evaluation that is not reported yet."""
        self._diverged: str | None = None

    def record(self, record: Record) -> None:
        self._records.write(self._id, record)
        if isinstance(record, Round):
            self._latest = (record.round + 1, record.bytes_sent)
            if record.round == 0 or time.monotonic() - self._reported_at > REPORT_INTERVAL:
                self.report()
        elif isinstance(record, Evaluation):
            self._evaluation = record
            self.report()
        elif isinstance(record, Event) and record.what == DIVERGED:
            self._diverged = record.detail
            self.report()

    def report(self) -> None:
        """Send the node's progress to the coordinator."""
        self._reported_at = time.monotonic()
        evaluation, self._evaluation = self._evaluation, None
        rounds, sent = self._latest
        round = None if evaluation is None else evaluation.round
        score = None if evaluation is None else main_score(evaluation.scores)
        self._link.send(control.ProgressReport(self._id, rounds, sent, round, score, self._diverged))

    def submit_for_average(self, round: int, params: Params, tick: int | None = None) -> None:
        self._link.send(control.ModelSnapshot(self._id, round, self._runtime.now(), tick), params)

    def defer_evaluation(self, round: int, params: Params, progress: tuple[int, int]) -> bool:
        if self._deferred is None:
            return False
        if not self._deferred.keep(round, self._runtime.now(), params, progress=progress):
            self.record(Event(NOT_EVALUATED, self._runtime.now(), f"round {round}: the disk is full"))
        return True

    async def before_round(self, round: int) -> None:
        if not self._first_round_reported:
            self._first_round_reported = True
            self._link.send(control.FirstRoundStarted(self._id))
        if (fault := self._faults.due(round)) is not None:
            self.record(Event("fault", self._runtime.now(), f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            self._runtime.hang()
            await asyncio.Event().wait()  # never set

    def inject_fault(self, fault: control.InjectFault) -> None:
        """Inject a fault that is scheduled by time."""
        if not fault.recorded:
            self.record(Event("fault", self._runtime.now(), fault.detail))
        if fault.kind == "slow":
            if fault.factor is not None:
                self._runtime.slow_down(fault.factor)
        elif fault.kind == "hang":
            self._runtime.hang()
        else:
            self._runtime.fail(NodeError(f"fault on schedule: {fault.detail}"))
