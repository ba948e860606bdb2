"""The socket on which an agent talks to its nodes and to the network process, for the coordinator.

Nothing that arrives is trusted. Messages are decoded by type, and a message is accepted only from the connection that
may send it. Where links are sealed, the sender's key decides which node it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.sealing import KEY_WAIT_SECONDS, NETWORK_PROCESS, Seal, authenticated_sender
from shoal.engines.processes.transport import MESSAGES_PER_TURN
from shoal.errors import MessageError
from shoal.experiment import ProcessesPlan
from shoal.types import NodeId, Params

LOOPBACK = "127.0.0.1"
REJECTIONS_SHOWN = 5
"""Rejections that are shown to the user one by one; further ones are only counted."""
FINAL_MESSAGES = 64 * MESSAGES_PER_TURN
"""How many messages to read in search of the last ones of a process that exited: every sender has its turn."""
MIN_MESSAGE_BYTES = 2**20
"""A message may have at least this size, however small models are. Tracebacks are the longest."""
ENDPOINT = re.compile(r"tcp://(.+):([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class ControlMessage:
    """A message from a process that may send it."""

    message: control.FromNode
    params: Params | None = None
    """The parameters of a `ModelSnapshot`."""


@dataclass(frozen=True)
class ServerSettings:
    """What the control server must know about the run."""

    run: str
    """The run's identifier, which processes of the run know."""
    plan: ProcessesPlan
    nodes: int
    """The number of nodes of the run, on all machines."""
    with_network: bool
    """Whether this agent starts the run's network process."""
    key_pair: KeyPair | None = None
    """The key pair of the socket, where links are sealed."""
    public_keys: Mapping[NodeId, bytes] = field(default_factory=dict)
    """The keys of nodes, where they are known before the nodes start."""
    host: str = LOOPBACK
    """The address at which other machines reach processes of this agent."""


class ControlServer:
    """Receives from and sends to the nodes of one agent, and the network process if it is there."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ServerSettings,
        bind: Callable[[zmq.Socket[bytes]], str],
        node_host: Callable[[NodeId], str | None],
        notify: Callable[[str], None],
    ) -> None:
        """Opens the socket, which `context` closes when it is destroyed.

        `bind` binds it where nodes reach it, and returns the endpoint. `node_host` is the address at which a node must
        listen; None: the one of `settings`. `notify` is called with a text for the user.
        """
        self._context = context
        self._settings = settings
        self._node_host = node_host
        self._notify = notify
        self._starting: set[NodeId] = set()
        """Nodes whose processes were requested, and that do not listen yet."""
        self._routes: dict[NodeId, bytes] = {}
        """The identity of each node's connection on the socket."""
        self._network_route: bytes | None = None
        self.model_parameters = 0
        """How many parameters a `ModelSnapshot` must have."""
        self._rejected = 0
        self._rejected_by_network = 0
        self._socket = self._open_socket()
        self._seal = self._secure_socket()
        self.endpoint = bind(self._socket)

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, MESSAGES_PER_TURN)  # per connection; further messages wait, none is lost
        largest = self._settings.plan.max_message_bytes(None)  # the size of the model is not known yet
        socket.setsockopt(zmq.MAXMSGSIZE, max(MIN_MESSAGE_BYTES, largest))
        socket.setsockopt(zmq.BACKLOG, 4096)
        return socket

    def _secure_socket(self) -> Seal | None:
        pair = self._settings.key_pair
        if pair is None:
            return None
        # A node may connect before the announcement of its new key is read here. Keys from a folder are known.
        key_wait = KEY_WAIT_SECONDS if self._settings.plan.keys is None else 0.0
        seal = Seal(self._context, pair, self._reject, time.monotonic, key_wait)
        seal.secure_server(self._socket)
        seal.allow_all({str(node): key for node, key in self._settings.public_keys.items()})
        return seal

    # Connections

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll: when one of them is readable, call `answer_connections` and `receive`."""
        return [self._socket, *(() if self._seal is None else self._seal.sockets)]

    @property
    def public_key(self) -> bytes | None:
        """The key of this socket, where links are sealed."""
        return None if self._seal is None else self._seal.pair.public

    @property
    def unauthenticated_connections(self) -> int:
        """Connections and messages that this socket or the network process rejected."""
        return self._rejected + self._rejected_by_network

    def allow_key(self, node: NodeId | None, key: bytes) -> None:
        """Accept connections with this public key from the node, or, for None, from the network process."""
        assert self._seal is not None
        self._seal.allow(NETWORK_PROCESS if node is None else str(node), key)

    def expect(self, nodes: Collection[NodeId]) -> None:
        """Accept new processes of these nodes, which are about to start."""
        self._starting.update(nodes)

    def answer_connections(self) -> None:
        """Decide on processes that want to connect. Call it after the zygote's reports, which announce keys."""
        if self._seal is not None:
            self._seal.answer_pending()

    def disconnect(self, node: NodeId) -> None:
        """Accept nothing more from the node's present process."""
        self._routes.pop(node, None)
        self._starting.discard(node)

    def count_remaining(self) -> None:
        """Count connections that never authenticated: every process of the run has connected, or never will."""
        if self._seal is not None:
            self._seal.count_remaining()

    # Sending

    def send(self, nodes: Collection[NodeId], message: control.ToNode) -> None:
        """Send to every node in `nodes` that is connected."""
        encoded = control.encode(message)
        for node in nodes:
            if node in self._routes:
                self._socket.send_multipart([self._routes[node], encoded])

    def send_network(self, message: control.ToNode) -> None:
        """Send to the network process, if there is one."""
        if self._network_route is not None:
            self._socket.send_multipart([self._network_route, control.encode(message)])

    # Receiving

    def receive(self, limit: int = MESSAGES_PER_TURN) -> Iterator[ControlMessage]:
        """Messages that have arrived, without waiting. Reads at most `limit` messages, valid or not."""
        for _ in range(limit):
            try:
                name, frame, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = control.decode_from_node(frame.buffer)
                self._check_sender(message, frame)
                params = self._read_model(message, rest)
                self._check_endpoint(message)
            except zmq.Again:
                return
            except MessageError as error:
                self._reject(str(error))
                continue
            except control.DECODE_ERRORS:
                continue  # an unknown program on the port
            if self._accept(message, name.bytes):
                if isinstance(message, control.NodeFailed | control.NodeExiting):
                    self._socket.send_multipart([name.bytes, control.encode(control.LastMessageRead())])
                yield ControlMessage(message, params)

    def _check_sender(self, message: control.FromNode, frame: zmq.Frame) -> None:
        """Where links are sealed, check that the sender's key is the named node's. Raises `MessageError`."""
        if self._seal is None:
            return
        named = NETWORK_PROCESS if isinstance(message, control.FromNetwork) else str(message.node)
        if (sender := authenticated_sender(frame)) != named:
            raise MessageError(f"{sender!r} sent a message in the name of {named!r}")

    def _read_model(self, message: control.FromNode, rest: list[zmq.Frame]) -> Params | None:
        """The parameters that follow a `ModelSnapshot`. Raises `MessageError` if they are no model of this run."""
        if not isinstance(message, control.ModelSnapshot):
            return None
        if [len(frame.buffer) for frame in rest] != [4 * self.model_parameters]:
            raise MessageError(f"a message in the name of node {message.node} contains no model of this run")
        return np.frombuffer(rest[0].buffer, np.float32)

    def _check_endpoint(self, message: control.FromNode) -> None:
        """Check the endpoint that others will connect to. Raises `MessageError`."""
        plan = self._settings.plan
        if isinstance(message, control.NetworkListening):
            host = self._settings.host
        elif isinstance(message, control.NodeListening) and message.node in self._starting:
            host = self._node_host(message.node) or plan.announce or plan.host
        else:
            return
        match = ENDPOINT.fullmatch(message.endpoint)
        if match is None or match[1] != host or int(match[2]) > 65535:
            raise MessageError(f"a process announced that it listens at {message.endpoint[:100]!r}")

    def _accept(self, message: control.FromNode, route: bytes) -> bool:
        """Whether the process behind this connection may send the message now."""
        if isinstance(message, control.NetworkHeartbeat):
            return route == self._network_route
        if isinstance(message, control.UnauthenticatedConnections):
            return self._note_network_report(message, route)
        if isinstance(message, control.NetworkListening):
            expected = self._settings.with_network and self._network_route is None
            if accepted := expected and message.run == self._settings.run:
                self._network_route = route
            return accepted
        if not 0 <= message.node < self._settings.nodes:
            return False
        if isinstance(message, control.NodeListening):
            if accepted := message.node in self._starting and message.run == self._settings.run:
                self._routes[message.node] = route
                self._starting.discard(message.node)
            return accepted
        known = self._routes.get(message.node)
        if known is None:  # a node may fail before it listens
            return isinstance(message, control.NodeFailed) and message.run == self._settings.run
        return known == route

    def _note_network_report(self, report: control.UnauthenticatedConnections, route: bytes) -> bool:
        """Note a report of the network process. Returns whether it is valid."""
        if report.run != self._settings.run or route != self._network_route:
            return False
        if report.count > self._rejected_by_network < REJECTIONS_SHOWN:
            self._notify(f"the network process rejected an unauthenticated connection: {report.last}")
        self._rejected_by_network = report.count
        return True

    def _reject(self, detail: str) -> None:
        self._rejected += 1
        if self._rejected <= REJECTIONS_SHOWN:
            self._notify(f"the coordinator rejected an unauthenticated connection: {detail}")
