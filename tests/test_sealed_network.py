"""The network process with sealed links: senders are authenticated, and other connections counted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from conftest import until
from local_transports import LONG, RUN, eventually
from sealed_peers import Peer, connected_peers, new_message, run_async, small
from shoal.engines.processes import control, sealing
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.network_process import NetworkProcess, NodeReports
from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.shaper import (
    NetworkAddress,
    Registration,
    Shaper,
    Submission,
    encode,
    identity,
)
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup

pytestmark = pytest.mark.usefixtures("no_process_is_left")


# The network process


def from_socket(*messages: list[bytes]) -> Any:
    """A socket from which exactly these messages can be read."""
    left = [[zmq.Frame(frame) for frame in message] for message in messages]

    def receive(*_: Any, **__: Any) -> list[zmq.Frame]:
        if not left:
            raise zmq.Again
        return left.pop(0)

    return SimpleNamespace(recv_multipart=receive)


def test_a_flood_of_messages_does_not_keep_the_network_process_from_its_other_work() -> None:
    flood = from_socket(*[[b"x", b"garbage"]] * 20_000)
    assert NodeReports(flood, 4, "run", cast(Any, None), None, lambda reason: None).read() == []
    assert flood.recv_multipart(), "the rest waits for another turn"


def secure_client(socket: zmq.Socket[Any], pair: KeyPair, key: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, key


class Network:
    """A sealed network process in a thread. The run has started, and it knows the nodes' keys."""

    def __init__(self, pairs: list[KeyPair]) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._coordinator = self.context.socket(zmq.ROUTER)
        seal = Seal(self.context, KeyPair.fresh(), print, time.monotonic)
        seal.secure_server(self._coordinator)
        port = self._coordinator.bind_to_random_port("tcp://127.0.0.1")
        start = control.StartNodes([], RUN, control_endpoint=f"tcp://127.0.0.1:{port}", control_key=seal.pair.public)
        self.pair = KeyPair.fresh()
        seal.allow(sealing.NETWORK_PROCESS, self.pair.public)
        setup = Setup(Experiment.from_table({**small().to_table(), "network": {"name": "uniform", "latency": 0.001}}))
        process = NetworkProcess(setup, start, self.pair)
        self._thread = threading.Thread(target=process.serve, daemon=True)
        self._thread.start()
        until(lambda: seal.answer_pending() or self._coordinator.poll(0))
        self._line, hello = self._coordinator.recv_multipart()
        self.endpoint = control.decode_from_node(hello).endpoint
        self.address = NetworkAddress(self.endpoint, self.pair.public)
        self._seal = seal
        self._send(control.Start([], time.monotonic(), public_keys=[pair.public for pair in pairs]))

    def receive(self) -> control.FromNode:
        """The next message to the coordinator that is not a heartbeat."""
        while True:
            assert self._coordinator.poll(LONG * 1000)
            message = control.decode_from_node(self._coordinator.recv_multipart()[1])
            if not isinstance(message, control.NetworkHeartbeat):
                return message

    def finish(self) -> control.FromNode:
        self._send(control.Finish())
        return self.receive()

    def close(self) -> None:
        self._send(control.Finish())
        self._thread.join(LONG)
        self._seal.close()
        self.context.destroy(linger=0)

    def _send(self, what: control.ToNode) -> None:
        self._coordinator.send_multipart([self._line, control.encode(what)])


def test_the_network_process_reports_all_unauthenticated_connections_at_the_end() -> None:
    def connect() -> None:
        with socket.create_connection(("127.0.0.1", int(network.endpoint.rpartition(":")[2])), LONG) as raw:
            raw.sendall(bytes(100))
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(1000):  # until the connection is closed
                    pass

    with contextlib.closing(Network([])) as network:
        connect()
        first = network.receive()
        assert isinstance(first, control.UnauthenticatedConnections)
        assert (first.count, first.final) == (1, False)
        connect()  # within the interval between two reports
        last = network.finish()
        assert isinstance(last, control.UnauthenticatedConnections)
        assert (last.count, last.final) == (2, True)


def test_a_node_that_claims_another_identity_at_the_network_process_neither_receives_nor_sends_for_it() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as found:
            pairs = [peer.seal.pair for peer in found if peer.seal is not None]
            with contextlib.closing(Network(pairs)) as network:
                await check(network, pairs, *found)

    async def check(network: Network, pairs: list[KeyPair], receiver: Peer, sender: Peer, forger: Peer) -> None:
        shapers = [
            Shaper(p.context, p.id, RUN, network.address, p.transport, p.received.append, seal=p.seal)
            for p in (receiver, sender)
        ]
        for peer, shaper in zip((receiver, sender), shapers, strict=True):
            peer.transport.require_tickets(shaper.receive)
        assert await shapers[1].send_and_wait(0, new_message(1, round=0))
        for round, name in enumerate(
            (identity(1, RUN), identity(1, "another run"), identity(2, "another run"), b"n1"), 1
        ):
            with forger.context.socket(zmq.DEALER) as forging:
                forging.setsockopt(zmq.IDENTITY, name)
                secure_client(forging, pairs[2], network.pair.public)
                forging.connect(network.endpoint)
                forging.send(encode(Registration(time.monotonic())))
                forging.send(encode(Submission(7, 0, 100, time.monotonic(), True)))
                assert not forging.poll(200), "it is neither node 1 nor node 2"
                assert await shapers[1].send_and_wait(0, new_message(1, round=round))
                await eventually(lambda: len(receiver.received) == round + 1)  # noqa: B023
                assert not shapers[0].is_missing(1, 7)
                assert not shapers[0].is_missing(2, 7)
        for shaper in shapers:
            shaper.close()

    run_async(body)
