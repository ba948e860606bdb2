"""The coordinator's socket: it accepts a message only from the process that may send it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from conftest import until
from shoal.engines.processes import control
from shoal.engines.processes.control_server import ControlMessage, ControlServer, ServerSettings
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.transport import MESSAGES_PER_TURN
from shoal.experiment import ProcessesPlan

RUN = "run"
NODES = 4
PARAMETERS = 3
ENDPOINT = "tcp://127.0.0.1:65535"


class Setting:
    """A control server, its nodes, which are all starting, and clients that connect to it."""

    def __init__(self, plan: ProcessesPlan, with_network: bool = True, key_pair: KeyPair | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._clients: zmq.Context[Any] = zmq.Context()
        self.notices: list[str] = []
        self.hosts: dict[int, str] = {}
        settings = ServerSettings(RUN, plan, NODES, with_network, key_pair)
        self.server = ControlServer(self._context, settings, self._bind, self._host, self.notices.append)
        self.server.model_parameters = PARAMETERS
        self.server.expect(range(NODES))

    def _bind(self, socket: zmq.Socket[Any]) -> str:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def _host(self, node: int) -> str | None:
        return self.hosts.get(node)

    def client(self, name: bytes, pair: KeyPair | None = None) -> zmq.Socket[Any]:
        client = self._clients.socket(zmq.DEALER)
        client.setsockopt(zmq.IDENTITY, name)
        client.setsockopt(zmq.LINGER, 0)
        if pair is not None:
            assert self.server.public_key is not None
            client.setsockopt(zmq.CURVE_SERVERKEY, self.server.public_key)
            client.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            client.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        client.connect(self.server.endpoint)
        return client

    def send(self, client: zmq.Socket[Any], *messages: control.FromNode, rest: tuple[bytes, ...] = ()) -> None:
        for message in messages:
            client.send_multipart([control.encode(message), *rest])

    def received_until(self, last: type) -> list[ControlMessage]:
        """What the server accepts, up to the first message of this type."""
        accepted: list[ControlMessage] = []

        def look() -> bool:
            self.server.answer_connections()
            accepted.extend(self.server.receive())
            return any(isinstance(received.message, last) for received in accepted)

        until(look)
        return accepted

    def close(self) -> None:
        self._clients.destroy(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture
def make() -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(*arguments: Any, **options: Any) -> Setting:
        made.append(Setting(*arguments, **options))
        return made[-1]

    yield make
    for setting in made:
        setting.close()


@pytest.fixture
def setting(make: Callable[..., Setting]) -> Setting:
    return make(ProcessesPlan())


def test_a_connection_that_is_open_at_the_end_and_never_authenticated_is_counted(make: Callable[..., Setting]) -> None:
    setting = make(ProcessesPlan(sealed=True), key_pair=KeyPair.fresh())
    host, _, port = setting.server.endpoint.removeprefix("tcp://").rpartition(":")

    def counted() -> bool:
        setting.server.count_remaining()
        return setting.server.unauthenticated_connections == 1

    with socket.create_connection((host, int(port))):
        setting.server.answer_connections()
        assert setting.server.unauthenticated_connections == 0, "it may still authenticate"
        until(counted, seconds=20.0)


def test_a_node_cannot_send_in_the_name_of_another(make: Callable[..., Setting]) -> None:
    setting = make(ProcessesPlan(sealed=True), key_pair=KeyPair.fresh())
    pairs = [KeyPair.fresh() for _ in range(2)]
    for node, pair in enumerate(pairs):
        setting.server.allow_key(node, pair.public)
    client = setting.client(b"0", pairs[1])
    forged = [
        control.NodeListening(0, RUN, ENDPOINT),
        control.NodeDone(0),
        control.NodeFailed(0, RUN, ""),
        control.NetworkListening(RUN, ENDPOINT),
        control.UnauthenticatedConnections(RUN, 9, ""),
    ]
    setting.send(client, *forged, control.NodeListening(1, RUN, ENDPOINT), control.NodeDone(1))
    accepted = setting.received_until(control.NodeDone)
    assert [r.message for r in accepted] == [control.NodeListening(1, RUN, ENDPOINT), control.NodeDone(1)]
    assert setting.server.unauthenticated_connections == len(forged)
    assert "'1' sent a message in the name of '0'" in setting.notices[0]


def test_a_connection_cannot_send_for_a_node_that_connected_before(setting: Setting) -> None:
    node, other = setting.client(b"node"), setting.client(b"other")
    setting.send(node, control.NodeListening(0, RUN, ENDPOINT))
    setting.received_until(control.NodeListening)
    setting.send(other, control.NodeListening(0, RUN, ENDPOINT), control.NodeDone(0), control.NodeFailed(0, RUN, ""))
    setting.send(other, control.NodeDone(1), control.NodeFailed(1, "another run", ""), control.NodeFailed(1, RUN, ""))
    (accepted,) = setting.received_until(control.NodeFailed)
    assert accepted.message == control.NodeFailed(1, RUN, ""), "a node may fail before it listens"


@pytest.mark.parametrize("rest", [[], [b""], [b"x" * 11], [b"x" * 16], [b"x" * 12, b""]], ids=repr)
def test_a_model_of_another_size_is_dropped_and_counted(setting: Setting, rest: list[bytes]) -> None:
    client = setting.client(b"0")
    setting.send(client, control.NodeListening(0, RUN, ENDPOINT))
    good = np.arange(PARAMETERS, dtype=np.float32)
    setting.send(client, control.ModelSnapshot(0, 0, 0.0), rest=tuple(rest))
    setting.send(client, control.ModelSnapshot(0, 1, 0.0), rest=(good.tobytes(),))
    *_, last = setting.received_until(control.ModelSnapshot)
    assert last.message == control.ModelSnapshot(0, 1, 0.0)
    assert last.params is not None
    assert last.params.tobytes() == good.tobytes()
    assert setting.server.unauthenticated_connections == 1


INVALID_ENDPOINTS = [
    "", "garbage", "tcp://", "tcp://:1", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:0", "tcp://127.0.0.1:*",
    "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999999", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:01", "tcp://127.0.0.1:１",
    "tcp://127.0.0.1:1\n", "tcp://127.0.0.2:1", "tcp://eth0;127.0.0.1:1", "ipc://x:1", "inproc://127.0.0.1:1",
]  # fmt: skip


@pytest.mark.parametrize("endpoint", INVALID_ENDPOINTS)
def test_an_endpoint_that_nodes_cannot_connect_to_is_rejected_and_counted(setting: Setting, endpoint: str) -> None:
    client = setting.client(b"0")
    setting.send(client, control.NodeListening(0, RUN, endpoint), control.NetworkListening(RUN, endpoint))
    setting.send(client, control.NodeListening(0, RUN, ENDPOINT))
    (accepted,) = setting.received_until(control.NodeListening)
    assert accepted.message == control.NodeListening(0, RUN, ENDPOINT)
    assert setting.server.unauthenticated_connections == 2


@pytest.mark.parametrize(
    ("plan", "hosts", "endpoint"),
    [
        (ProcessesPlan(host="0.0.0.0", announce="ten.example"), {}, "tcp://ten.example:1"),
        (ProcessesPlan(host="[::1]"), {}, "tcp://[::1]:1"),
        (ProcessesPlan(), {2: "10.0.0.3"}, "tcp://10.0.0.3:1"),
    ],
    ids=["announced", "IPv6", "namespaces"],
)
def test_a_node_must_listen_at_the_address_of_the_plan_or_of_its_agent(
    make: Callable[..., Setting], plan: ProcessesPlan, hosts: dict[int, str], endpoint: str
) -> None:
    setting = make(plan)
    setting.hosts = hosts
    client = setting.client(b"2")
    setting.send(client, *[control.NodeListening(unknown, RUN, endpoint) for unknown in (-5, NODES, 2**60)])
    setting.send(client, *[control.NodeListening(2, RUN, each) for each in ("tcp://127.0.0.1:1", endpoint)])
    (accepted,) = setting.received_until(control.NodeListening)
    assert accepted.message == control.NodeListening(2, RUN, endpoint)
    assert setting.server.unauthenticated_connections == 1


def test_only_nodes_that_are_starting_may_report_that_they_listen(setting: Setting) -> None:
    setting.server.disconnect(0)
    client = setting.client(b"0")
    setting.send(client, control.NodeListening(0, RUN, ENDPOINT), control.NodeListening(1, "another run", ENDPOINT))
    setting.send(client, control.NodeListening(1, RUN, ENDPOINT))
    (accepted,) = setting.received_until(control.NodeListening)
    assert accepted.message == control.NodeListening(1, RUN, ENDPOINT)


def test_a_run_without_a_network_process_accepts_none(make: Callable[..., Setting]) -> None:
    setting = make(ProcessesPlan(), with_network=False)
    client = setting.client(b"network")
    setting.send(client, control.NetworkListening(RUN, ENDPOINT), control.NodeListening(0, RUN, ENDPOINT))
    (accepted,) = setting.received_until(control.NodeListening)
    assert accepted.message == control.NodeListening(0, RUN, ENDPOINT)


def test_only_the_network_process_reports_its_rejected_connections(setting: Setting) -> None:
    network, other = setting.client(b"network"), setting.client(b"other")
    setting.send(network, control.NetworkListening(RUN, ENDPOINT))
    setting.received_until(control.NetworkListening)
    rejected = lambda: setting.server.unauthenticated_connections  # noqa: E731
    setting.send(other, control.UnauthenticatedConnections(RUN, 9, "", final=True), control.NodeFailed(1, RUN, ""))
    setting.received_until(control.NodeFailed)
    assert rejected() == 0
    for report in (
        control.UnauthenticatedConnections(RUN, 1, "one"),
        control.UnauthenticatedConnections(RUN, 3, "another", final=True),
    ):
        setting.send(network, report)
        (accepted,) = setting.received_until(control.UnauthenticatedConnections)
        assert accepted.message == report
    assert rejected() == 3


def test_one_sender_gets_a_bounded_number_of_messages_per_turn(setting: Setting) -> None:
    client = setting.client(b"flood")
    for _ in range(20 * MESSAGES_PER_TURN):
        setting.send(client, control.NodeFailed(1, RUN, ""))
    turns = []

    def receive_all() -> bool:
        turns.append(len(list(setting.server.receive())))
        return sum(turns) == 20 * MESSAGES_PER_TURN

    until(receive_all)
    assert max(turns) <= MESSAGES_PER_TURN
