"""A node's connections to its peers."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from shoal.engines.processes import control
from shoal.engines.processes.delay import Delay
from shoal.engines.processes.namespaces import address
from shoal.engines.processes.sealing import KEY_WAIT_SECONDS, Seal
from shoal.engines.processes.shaper import NetworkAddress, Shaper
from shoal.engines.processes.transport import Transport, TransportSettings
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.message_budget import MessageBudget
from shoal.types import NodeId

MIN_CONNECTIONS = 64
"""Connections that a node keeps open at the least, unless the experiment sets their number."""


class NodeNetwork:
    """A node's mailbox and transport, and the shaper or the delay where messages are shaped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        setup: Setup,
        id: NodeId,
        start: control.StartNodes,
        reject: Callable[[str], None],
        seal: Seal | None,
    ) -> None:
        """Listen for peers. `reject` is called with the reason for every rejected message."""
        plan = setup.experiment.processes
        host = address(id) if start.namespaces else start.host or plan.host
        self._context = context
        self._setup = setup
        self._id = id
        self._run = start.run
        self._seal = seal
        self._expects_new_keys = start.key_folder is None and setup.environment.restarts
        self.mailbox = Mailbox(self._budget())
        self.shaper: Shaper | None = None
        self._restarted: dict[NodeId, tuple[int, str]] = {}
        """The incarnation and the endpoint of each node that has been restarted."""
        self._delay = self._kernel_delay()
        settings = TransportSettings(
            run=start.run,
            host=host,
            max_message_bytes=plan.max_message_bytes(None if setup.experiment.adds_data else setup.initial.nbytes),
            connections=plan.connections or max(MIN_CONNECTIONS, self._first_round_peers()),
            send_timeout=plan.hang_timeout,
            port=None if plan.base_port is None else plan.base_port + id,
            announce=start.announce or (None if start.host else plan.announce),
        )
        deliver = self.mailbox.put if self._delay is None else self._delay.receive
        self.transport = Transport(context, id, settings, deliver=deliver, reject=reject, seal=seal)

    def start(self, message: control.Start) -> None:
        """Exchange messages with the peers that `message` lists."""
        if self._seal is not None:
            self._seal.allow_all({str(node): key for node, key in enumerate(message.public_keys)})
            self._seal.key_wait = KEY_WAIT_SECONDS if self._expects_new_keys else 0.0
        if message.network_endpoint is not None:
            self.shaper = Shaper(
                self._context,
                self._id,
                self._run,
                NetworkAddress(message.network_endpoint, message.network_key),
                self.transport,
                self.mailbox.put,
                self._budget(),
                self._seal,
            )
            self.transport.require_tickets(self.shaper.receive)
        self._restarted = {node: (count, message.endpoints[node]) for node, count in message.incarnations.items()}
        self.transport.start(message.endpoints)

    def mark_failed(self, node: NodeId, at: float) -> None:
        """`at` is the time of the failure on the coordinator's monotonic clock."""
        self.mailbox.mark_failed(node)
        self.transport.mark_failed(node)
        if self.shaper is not None:
            self.shaper.mark_failed(node, at)
        if self._delay is not None:
            self._delay.mark_failed(node)

    def mark_restarted(self, message: control.PeerRestarted) -> None:
        """Connect to the new process of a node that failed.

        A new coordinator announces nodes again. A connection to the same process stays: it may have messages to send.
        """
        process = message.incarnation, message.endpoint
        if self._restarted.get(message.node) == process:
            return
        self._restarted[message.node] = process
        if self._seal is not None and message.key is not None:
            self._seal.allow(str(message.node), message.key)
        self.transport.move(message.node, message.endpoint)

    @property
    def late_messages(self) -> int:
        """Messages that arrived too late, or were dropped because the memory budget was exceeded."""
        dropped = 0 if self.shaper is None else self.shaper.dropped
        return self.mailbox.late + self.mailbox.dropped + dropped

    def close(self) -> None:
        self.transport.close()
        if self.shaper is not None:
            self.shaper.close()

    def _budget(self) -> MessageBudget:
        return MessageBudget(self._setup.initial.nbytes, self._setup.experiment.size)

    def _kernel_delay(self) -> Delay | None:
        """Latency, jitter and loss, which the kernel does not simulate where it shapes messages."""
        environment = self._setup.environment
        if environment.access_links is None or environment.timeline is None:
            return None
        return Delay(environment.timeline.initial_state, self._id, self._setup.experiment.seed, self.mailbox.put)

    def _first_round_peers(self) -> int:
        """How many peers the node has in its first round; all nodes are a server's peers."""
        nodes = self._setup.experiment.nodes
        return len(self._setup.mixing.peers(self._id, 0).receivers) if self._id < nodes else nodes
