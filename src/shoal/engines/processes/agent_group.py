"""All agents of a run, as one: requests about nodes go to the agents that run them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.agent import Agent, Report
from shoal.results.coordinator_file import AgentShare
from shoal.results.records import Event
from shoal.types import NodeId


class Connections(Protocol):
    """The connections to agents on other machines."""

    def register(self, poller: zmq.Poller) -> None:
        """Register with `poller` what becomes ready when something has arrived."""
        ...

    def pump(self) -> None:
        """Pass on to the agents what has arrived, and send heartbeats."""
        ...


class AgentGroup:
    """The agents of a run, and which of them runs each node. The first agent runs the network process."""

    def __init__(
        self, agents: Sequence[Agent], placement: Mapping[NodeId, int], connections: Connections | None = None
    ) -> None:
        """`placement` is the position in `agents` of the agent of each node."""
        self._agents = list(agents)
        self._placement = placement
        self._connections = connections
        self.clock_error = 0.0
        """How many seconds the clocks of machines may differ."""

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def agents(self) -> Sequence[Agent]:
        return self._agents

    def shares(self) -> list[AgentShare] | None:
        """What another coordinator needs to continue the run on these agents; None if it cannot be continued."""
        nodes: list[list[NodeId]] = [[] for _ in self._agents]
        for node, position in sorted(self._placement.items()):
            nodes[position].append(node)
        shares = [agent.share(own) for agent, own in zip(self._agents, nodes, strict=True)]
        return None if None in shares else [share for share in shares if share is not None]

    def agent_of(self, node: NodeId) -> Agent:
        return self._agents[self._placement[node]]

    # Requests

    def prepare(self, request: control.Prepare) -> None:
        """Have every agent build what its nodes share."""
        for agent in self._agents:
            agent.send(request)

    def start(self, request: control.StartNodes) -> None:
        """Have the nodes of `request` started, each by its agent. Agents whose nodes are all late get it too."""
        placed, late = self._by_position(request.nodes), self._by_position(request.late_nodes)
        network = {0} if request.with_network else set()  # the first agent starts the network process
        for position in sorted(placed.keys() | late.keys() | network):
            self._agents[position].send(
                msgspec.structs.replace(
                    request,
                    nodes=placed.get(position, []),
                    late_nodes=late.get(position, []),
                    with_network=position in network,
                    clock_error=self.clock_error,
                )
            )

    def kill(self, nodes: Collection[NodeId]) -> None:
        """Kill the processes of these nodes."""
        for agent, own in self._by_agent(nodes):
            agent.send(control.KillNodes(own))

    def evaluate(self, request: control.EvaluateAverage) -> None:
        """Have an averaged model evaluated, by the first agent that is not lost."""
        next((agent for agent in self._agents if not agent.is_lost), self._agents[0]).send(request)

    def record(self, events: Sequence[tuple[NodeId, Event]]) -> None:
        """Append events to the records of nodes that cannot write them."""
        by_node: dict[NodeId, list[tuple[NodeId, Event]]] = {}
        for node, event in events:
            by_node.setdefault(node, []).append((node, event))
        for agent, nodes in self._by_agent(by_node):
            agent.send(control.RecordEvents([event for node in nodes for event in by_node[node]]))

    def send(self, nodes: Collection[NodeId], message: control.ToNode) -> None:
        """Send a message to these nodes, as far as they are connected."""
        for agent, own in self._by_agent(nodes):
            agent.send(control.ToNodes(own, message))

    def send_network(self, message: control.ToNode) -> None:
        """Send a message to the network process, if there is one."""
        self._agents[0].send(control.ToNetwork(message))

    def _by_agent(self, nodes: Collection[NodeId]) -> Iterator[tuple[Agent, list[NodeId]]]:
        for position, own in sorted(self._by_position(nodes).items()):
            yield self._agents[position], own

    def _by_position(self, nodes: Collection[NodeId]) -> dict[int, list[NodeId]]:
        own: dict[int, list[NodeId]] = {}
        for node in sorted(nodes):
            own.setdefault(self._placement[node], []).append(node)
        return own

    # Reports

    def wait(self, seconds: float) -> None:
        """Wait until an agent has something to report, or can take more requests."""
        poller = zmq.Poller()
        if self._connections is not None:
            self._connections.register(poller)
        for agent in self._agents:
            agent.register(poller)
        poller.poll(int(seconds * 1000))

    def reports(self) -> Iterator[tuple[Agent, Report]]:
        """What all agents report, without waiting."""
        if self._connections is not None:
            self._connections.pump()
        for agent in self._agents:
            for report in agent.reports():
                yield agent, report

    @property
    def any_waits_for_space(self) -> bool:
        return any(agent.waits_for_space for agent in self._agents)

    def waiting_for_space(self) -> Iterator[NodeId]:
        """The nodes whose messages may not arrive because the disk of the coordinator is full."""
        if self.any_waits_for_space:
            yield from (node for node, position in self._placement.items() if self._agents[position].waits_for_space)

    @property
    def unauthenticated_connections(self) -> int:
        return sum(agent.unauthenticated_connections for agent in self._agents)

    def collect(self) -> None:
        """All nodes have exited: bring the files of the run into its folder, until `collected` is true."""
        for agent in self._agents:
            agent.collect()

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived from other machines."""
        return sum(agent.received_bytes for agent in self._agents)

    @property
    def collected(self) -> bool:
        return all(agent.collected for agent in self._agents)

    def count_remaining(self) -> None:
        for agent in self._agents:
            agent.count_remaining()

    def kill_all(self) -> None:
        """Kill every process of all agents at once. Safe in a signal handler."""
        for agent in self._agents:
            agent.kill()

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
