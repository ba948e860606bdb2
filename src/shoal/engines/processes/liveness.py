"""Which nodes never start, hang, or do not finish, and ending them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.start_monitor import StartMonitor
from shoal.types import NodeId

MIN_START_SECONDS = 60.0
"""The shortest start timeout: the time until the next of the starting nodes listens."""
MIN_FINISH_SECONDS = 60.0
"""The shortest time in which a node that is done must write its remaining records and exit."""
HEARTBEAT_DELAY_SECONDS = 5.0
"""Added to the hang timeout, because heartbeats are late on a loaded machine."""
STOP_SECONDS = 10.0
"""How long nodes may take to exit when they are asked to stop."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a node is given up."""

    start: float
    """Without another node that listens."""
    hang: float
    """Without a sign that any node computes."""
    finish: float
    """Between the end of the run and the exit of a node that is done."""

    @classmethod
    def from_hang_timeout(cls, seconds: float) -> Timeouts:
        """All timeouts, from `processes.hang_timeout`."""
        hang = HEARTBEAT_DELAY_SECONDS + seconds
        return cls(max(MIN_START_SECONDS, hang), hang, max(MIN_FINISH_SECONDS, hang))


class LivenessMonitor:
    """Ends nodes that make no progress. First asks them to stop, then kills them."""

    def __init__(
        self,
        registry: NodeRegistry,
        learners: frozenset[NodeId],
        starts: StartMonitor,
        commands: NodeCommands,
        timeouts: Timeouts,
        log: str,
    ) -> None:
        """`learners` are the nodes that train; `log` is the file that users are referred to."""
        self._registry = registry
        self._learners = learners
        self._starts = starts
        self._commands = commands
        self._timeouts = timeouts
        self._log = log

    @property
    def start_timeout(self) -> float:
        return self._timeouts.start

    def end_nodes_that_do_not_start(self) -> None:
        timeout = self.start_timeout
        if overdue := self._starts.overdue(time.monotonic(), timeout):
            for node in overdue:
                self._registry[node].fail(f"did not report within {timeout:g} s that it listens; see {self._log}")
            self._commands.kill(overdue)

    def end_hung_nodes(self, offline_forever: Callable[[set[NodeId]], bool]) -> None:
        """End the learners when no node has been busy for a while: nothing will wake them.

        Service nodes may have nothing to do for a long time. They finish when no learner is left.
        """
        working = self._registry.working
        learning = working & self._learners
        if not learning or self._starts.nodes:
            return
        if offline_forever(learning):
            self._end_after(0.0, HEARTBEAT_DELAY_SECONDS, learning, "it is offline and never online again")
        idle = time.monotonic() - max(self._registry[node].last_busy for node in working)
        self._end_after(self._timeouts.hang, idle, learning, "it waited {:g} s and no node computed or sent anything")

    def end_nodes_that_do_not_finish(self, finishing_since: float) -> None:
        """End nodes that still run long after they were asked to finish, or after their last sign of progress."""
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
