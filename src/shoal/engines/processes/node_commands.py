"""Commands of the coordinator to nodes while they run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.engines.processes import control
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.processes.run_times import RunTimes
from shoal.results.records import Event
from shoal.types import NodeId


class NodeCommands:
    """Commands to nodes: some are messages to their processes, some are requests to their agents."""

    def __init__(
        self,
        registry: NodeRegistry,
        agents: AgentGroup,
        times: RunTimes,
        evaluation_seconds: float | None = None,
    ) -> None:
        """`evaluation_seconds` is the interval of evaluations, where models are evaluated by the clock."""
        self._registry = registry
        self._agents = agents
        self._times = times
        self._evaluation_seconds = evaluation_seconds

    def kill(self, nodes: Collection[NodeId]) -> None:
        """Kill the processes of these nodes."""
        self._agents.kill(nodes)

    def stop(self, nodes: Collection[NodeId]) -> None:
        """Have nodes save their models and exit, although their algorithm has not ended."""
        self._agents.send(nodes, self._finish(stopped=True))

    def finish_all(self) -> control.Finish:
        """Have all nodes write their remaining records and exit; returns what was sent."""
        finish = self._finish()
        self._agents.send(self._registry.present, finish)
        return finish

    def finish_network(self) -> None:
        self._agents.send_network(self._finish())

    def set_online(self, node: NodeId, online: bool) -> None:
        if self._registry[node].present:
            self._agents.send([node], control.SetOnline(online))

    def inject(self, nodes: Collection[NodeId], fault: control.InjectFault) -> None:
        self._agents.send(nodes, fault)

    def record(self, events: Sequence[tuple[NodeId, Event]]) -> None:
        """Append events to the records of nodes that cannot write them."""
        self._agents.record(events)

    def announce_failure(self, node: NodeId) -> None:
        """Notify all other nodes and the network process that the node failed."""
        message = control.PeerFailed(node, self._times.monotonic())
        self._agents.send_network(message)
        self._agents.send(self._registry.present, message)

    def _finish(self, stopped: bool = False) -> control.Finish:
        """Where models are evaluated by the clock, the end is one more evaluation tick."""
        now, seconds = self._times.now(), self._evaluation_seconds
        return control.Finish(stopped, None if seconds is None else int(now / seconds) + 1, now)
