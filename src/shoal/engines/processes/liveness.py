"""Detect nodes that do not start, hang or do not finish, and end them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shoal.engines.processes.agent import Agent
from shoal.engines.processes.node_commands import NodeCommands
from shoal.engines.processes.node_registry import NodeRegistry, NodeState
from shoal.engines.processes.start_monitor import StartMonitor
from shoal.engines.processes.watch_clock import WatchClock
from shoal.errors import RunError
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
        clock: WatchClock,
        log: str,
    ) -> None:
        """`log` is the path of the log file, shown in error messages."""
        self.network_last_message = math.inf
        """When the network process last sent a heartbeat; infinite while it does not have to."""
        self.finishing_since = math.inf
        """When all nodes were asked to finish."""
        self._agents_last_running = 0.0
        self._registry = registry
        self._training_nodes = training_nodes
        self._start_monitor = start_monitor
        self._commands = commands
        self._timeouts = timeouts
        self._clock = clock
        self._log = log

    @property
    def start_timeout(self) -> float:
        return self._timeouts.start

    def end_nodes_that_do_not_start(self) -> None:
        timeout = self.start_timeout
        if overdue := self._start_monitor.overdue(timeout):
            for node in overdue:
                self._registry[node].fail(f"did not report within {timeout:g} s that it listens; see {self._log}")
            self._commands.kill(overdue)

    def check_agents(self, agents: Collection[Agent]) -> None:
        """Raise `RunError` if an agent was stopped for the hang timeout: it can neither start nor kill nodes."""
        if not any(agent.is_stopped for agent in agents):
            self._agents_last_running = self._clock.seconds
        elif self._clock.seconds - self._agents_last_running > self._timeouts.hang:
            raise RunError(
                f"the process that starts nodes was stopped for {self._timeouts.hang:g} s (by SIGSTOP, for example); "
                f"start the run again, or continue a stopped process earlier; see {self._log}"
            )

    def check_network(self) -> None:
        """Raise `RunError` if the network process has sent no heartbeat for the hang timeout."""
        if self._clock.seconds - self.network_last_message > self._timeouts.hang:
            raise RunError(
                f"the network process sent no heartbeat for {self._timeouts.hang:g} s, so it is stopped or blocked, "
                f"and no message arrives; start the run again; see {self._log}"
            )

    def note_full_disk(self, nodes: Iterable[NodeId], network: bool) -> None:
        """The messages of these nodes, and of the network process, may wait for space on the coordinator's disk."""
        for node in nodes:
            if self._registry[node].present:
                self._registry[node].note_message(self._clock.seconds)
                if self.finishing_since < math.inf:
                    self.finishing_since = self._clock.seconds
        if network:
            self.network_last_message = max(self.network_last_message, self._clock.seconds)

    def end_unresponsive_nodes(self) -> None:
        """Kill nodes that have sent no heartbeat for the hang timeout: their processes are stopped or blocked.

        Their peers have waited long enough, and the training slot that such a node may hold becomes free. A node sends
        heartbeats from its start to its exit.
        """
        timeout = self._timeouts.hang
        since = self._clock.seconds - timeout
        unresponsive = self._registry.select(
            lambda entry: entry.state in (NodeState.RUNNING, NodeState.DONE) and entry.last_message < since
        )
        for node in unresponsive:
            self._registry[node].fail(
                f"sent no heartbeat for {timeout:g} s: its process is stopped or blocked; if its code computes for so "
                "long without a pause, set processes.receive_timeout to a longer time"
            )
            self._registry[node].last_message = self._clock.seconds  # kill it again only after one more timeout
        if unresponsive:
            self._commands.kill(unresponsive)

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
        idle = self._clock.seconds - max(self._registry[node].last_busy for node in working)
        self._end_after(self._timeouts.hang, idle, learning, "it waited {:g} s and no node computed or sent anything")

    def end_nodes_that_do_not_finish(self) -> None:
        """End nodes that are still running after their timeout.

        It is `hang` after the request to finish or, for nodes that are done, `finish` after the last time that any of
        them was busy.
        """
        present, done = self._registry.present, self._registry.done
        seconds = self._clock.seconds - self.finishing_since
        self._end_after(self._timeouts.hang, seconds, present - done, "it was asked to finish and did not in {:g} s")
        last_busy = max((self._registry[node].last_busy for node in present & done), default=self.finishing_since)
        idle = min(seconds, self._clock.seconds - last_busy)
        self._end_after(self._timeouts.finish, idle, present & done, "it did not finish in {:g} s")

    def last_sign_of_progress(self) -> float:
        """When the last node was busy, on the `WatchClock`."""
        return max(entry.last_busy for entry in self._registry)

    def _end_after(self, timeout: float, seconds: float, nodes: set[NodeId], reason: str) -> None:
        if seconds > timeout and any(self._registry[node].failure is None for node in nodes):
            for node in nodes:
                self._registry[node].fail(f"hung: {reason.format(timeout)}")
            self._commands.stop(nodes)  # a node that still responds saves its model
        elif nodes and seconds > timeout + STOP_SECONDS:
            self._commands.kill(nodes)
