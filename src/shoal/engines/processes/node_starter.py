"""Starting nodes at the beginning of a run, and failed or late ones when the fault schedule starts them.

A node starts in three steps. The agent forks its process; the process reports that it listens; the coordinator sends
`Start` once every node that starts with it listens, so that all of them know each other's endpoints.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from shoal.engines.processes import control
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.node_registry import NodeRegistry, NodeState
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.processes.start_monitor import StartMonitor
from shoal.engines.processes.watch_clock import WatchClock
from shoal.engines.run_tracker import RunTracker
from shoal.types import NodeId


class NodeStarter:
    """Starts and restarts nodes, and sends the endpoints of restarted nodes to running ones."""

    def __init__(
        self,
        registry: NodeRegistry,
        agents: AgentGroup,
        tracker: RunTracker,
        times: RunTimes,
        clock: WatchClock,
    ) -> None:
        self._registry = registry
        self._agents = agents
        self._tracker = tracker
        self._times = times
        self._sealed = tracker.experiment.processes.sealed
        self._request: control.StartNodes | None = None
        self._clock = clock
        self.monitor = StartMonitor(clock)
        self.network_endpoint: str | None = None
        """Where the network process listens, once it does."""
        self._network_key: bytes | None = None

    def start_all(self, request: control.StartNodes) -> None:
        """Have the agents start all nodes."""
        self._request = request = msgspec.structs.replace(request, incarnations=dict(self._tracker.incarnations))
        self._agents.start(request)
        for node in request.nodes:
            self._registry[node].state = NodeState.STARTING
        self.monitor.expect(request.nodes)

    def restore(self, request: control.StartNodes, network: tuple[str | None, bytes | None]) -> None:
        """Continue with nodes that an earlier coordinator has started. Send again what it may not have sent."""
        self._request = request
        self.network_endpoint, self._network_key = network
        self.monitor.expect(self._registry.in_state(NodeState.STARTING))
        self.release_restarted()

    def announce_again(self, nodes: Collection[NodeId]) -> None:
        """Send the endpoints of nodes that have been restarted to the others, which may not know them."""
        for node in sorted(nodes):
            self._announce(node, self._registry.present - {node})

    def restart(self, nodes: Collection[NodeId]) -> None:
        """Have nodes started that failed or have not joined."""
        if not nodes:
            return
        assert self._request is not None
        for node in nodes:
            self._tracker.node_restarted(node)
            self._registry[node].start_again(self._clock.seconds)
        self.monitor.expect(nodes)
        self._agents.start(
            msgspec.structs.replace(
                self._request,
                nodes=sorted(nodes),
                late_nodes=[],
                restarted=True,
                incarnations={node: self._tracker.incarnations[node] for node in nodes},
                with_network=False,
            )
        )

    def set_key(self, node: NodeId | None, key: bytes) -> None:
        """Note the public key of a node that is about to start, or, for None, of the network process."""
        if node is None:
            self._network_key = key
        else:
            self._registry[node].public_key = key

    def node_listening(self, message: control.NodeListening) -> None:
        entry = self._registry[message.node]
        entry.state = NodeState.LISTENING
        entry.endpoint = message.endpoint
        self.monitor.settle(message.node)

    @property
    def all_listening(self) -> bool:
        """Whether every node waits for its `Start`."""
        return all(entry.state is NodeState.LISTENING for entry in self._registry if entry.present)

    def send_start(self) -> None:
        """Start the algorithm on all nodes.

        The message contains whether the node is offline at first. A separate message could arrive after the node has
        begun.
        """
        self._agents.send_network(self._start_message())
        for offline in (False, True):
            nodes = [entry.id for entry in self._registry if entry.offline == offline]
            self._agents.send(nodes, msgspec.structs.replace(self._start_message(), offline=offline))
        for entry in self._registry:
            if entry.present:
                entry.run(self._clock.seconds)
                if entry.slowdown is not None:  # since before the checkpoint of a resumed run
                    self._agents.send([entry.id], msgspec.structs.replace(entry.slowdown, recorded=True))

    def release_restarted(self) -> None:
        """Start the algorithm on restarted nodes that listen, and send their endpoints to the other nodes.

        Waits for all restarted nodes, so that nodes that restart together know each other's endpoints.
        """
        if self.monitor.nodes:
            return
        restarted = sorted(self._registry.in_state(NodeState.LISTENING))
        for node in restarted:
            self._announce(node, self._registry.present.difference(restarted))
        for node in restarted:
            entry = self._registry[node]
            ended = sorted(self._tracker.lost.keys() | self._registry.done)
            start = msgspec.structs.replace(self._start_message(), failed_nodes=ended, offline=entry.offline)
            self._agents.send([node], start)
            if entry.slowdown is not None:
                self._agents.send([node], entry.slowdown)
            entry.run(self._clock.seconds)
            joins = self._tracker.incarnations[node] == 0
            self._tracker.listener.notice(f"node {node} {'joins' if joins else 'was restarted'}")

    def _announce(self, node: NodeId, receivers: Collection[NodeId]) -> None:
        entry = self._registry[node]
        update = control.PeerRestarted(node, entry.endpoint, entry.public_key, self._tracker.incarnations[node])
        self._agents.send_network(update)
        self._agents.send(receivers, update)

    def _start_message(self) -> control.Start:
        return control.Start(
            [entry.endpoint for entry in self._registry],
            self._times.epoch,
            self.network_endpoint,
            sorted(self._tracker.lost),
            public_keys=self._registry.public_keys() if self._sealed else [],
            network_key=self._network_key,
            incarnations={node: count for node, count in self._tracker.incarnations.items() if count},
        )
