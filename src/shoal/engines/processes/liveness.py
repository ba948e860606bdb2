"""Detect nodes that do not start, hang or do not finish, and end them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.start_monitor import StartMonitor
from shoal.types import NodeId

MIN_START_SECONDS = 60.0
"""Lower bound of the start timeout, which is the longest allowed time without a new node that listens."""
MIN_FINISH_SECONDS = 60.0
"""Lower bound of the finish timeout: the time that a node has, after its algorithm has ended, to write its records and
exit."""
HEARTBEAT_DELAY_SECONDS = 5.0
"""Added to the hang timeout, because heartbeats are late on a loaded machine."""
STOP_SECONDS = 10.0
"""How long nodes may take to exit when they are asked to stop."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds after which the coordinator ends nodes."""

    start: float
    """Maximum time in which no further node reports that it listens."""
    hang: float
    """Maximum time in which no node computes or sends."""
    finish: float
    """Maximum time between the end of the run and the exit of a node that is done."""

    @classmethod
    def from_hang_timeout(cls, seconds: float) -> Timeouts:
        """Compute all timeouts from the hang timeout, which is derived from `processes.receive_timeout`."""
        hang = HEARTBEAT_DELAY_SECONDS + seconds
        return cls(max(MIN_START_SECONDS, hang), hang, max(MIN_FINISH_SECONDS, hang))


class LivenessMonitor:
    """Ends nodes that make no progress. First asks them to stop, then kills them."""

    def __init__(
        self,
        registry: NodeRegistry,
        training_nodes: frozenset[NodeId],
        start_monitor: StartMonitor,
        commands: NodeCommands,
        timeouts: Timeouts,
        log: str,
    ) -> None:
        """`log` is the path of the log file, shown in error messages."""
        self._registry = registry
        self._training_nodes = training_nodes
        self._start_monitor = start_monitor
        self._commands = commands
        self._timeouts = timeouts
        self._log = log

    @property
    def start_timeout(self) -> float:
        return self._timeouts.start

    def end_nodes_that_do_not_start(self) -> None:
        timeout = self.start_timeout
        if overdue := self._start_monitor.overdue(time.monotonic(), timeout):
            for node in overdue:
                self._registry[node].fail(f"did not report within {timeout:g} s that it listens; see {self._log}")
            self._commands.kill(overdue)

    def end_hung_nodes(self, offline_forever: Callable[[set[NodeId]], bool]) -> None:
        """End the training nodes if no node has been busy for the hang timeout.

        The messages that they wait for will not arrive. Service nodes may have nothing to do for a long time. They
        finish when no training node is left.
        """
        working = self._registry.working
        learning = working & self._training_nodes
        if not learning or self._start_monitor.nodes:
            return
        if offline_forever(learning):
            self._end_after(0.0, HEARTBEAT_DELAY_SECONDS, learning, "it is offline and will not come online again")
        idle = time.monotonic() - max(self._registry[node].last_busy for node in working)
        self._end_after(self._timeouts.hang, idle, learning, "it waited {:g} s and no node computed or sent anything")

    def end_nodes_that_do_not_finish(self, finishing_since: float) -> None:
        """End nodes that are still running after their timeout.

        It is `hang` after the request to finish or, for nodes that are done, `finish` after the last time that any of
        them was busy.
        """
        present, done = self._registry.present, self._registry.done
        seconds = time.monotonic() - finishing_since
        self._end_after(self._timeouts.hang, seconds, present - done, "it was asked to finish and did not in {:g} s")
        last_busy = max((self._registry[node].last_busy for node in present & done), default=finishing_since)
        idle = min(seconds, time.monotonic() - last_busy)
        self._end_after(self._timeouts.finish, idle, present & done, "it did not finish in {:g} s")

    def last_sign_of_progress(self) -> float:
        """When the last node was busy, on the monotonic clock."""
        return max(entry.last_busy for entry in self._registry)

    def _end_after(self, timeout: float, seconds: float, nodes: set[NodeId], reason: str) -> None:
        if seconds > timeout and any(self._registry[node].failure is None for node in nodes):
            for node in nodes:
                self._registry[node].fail(f"hung: {reason.format(timeout)}")
            self._commands.stop(nodes)  # a node that still responds saves its model
        elif nodes and seconds > timeout + STOP_SECONDS:
            self._commands.kill(nodes)
