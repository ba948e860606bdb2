"""Sealed links: messages cannot be read, changed or replayed, and only listed keys can connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from local_transports import LONG, RUN, eventually
from sealed_peers import SECRET, Peer, connected, connected_peers, new_message, run_async
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.sealing import HandshakeCounter, authenticated_sender
from shoal.errors import MessageError
from shoal.mailbox import Filter, Mailbox
from shoal.message import address

pytestmark = pytest.mark.usefixtures("no_process_is_left")


class Wire:
    """A proxy that records a TCP connection and can change its bytes: a man in the middle."""

    def __init__(self) -> None:
        self.seen = bytearray()
        """The bytes that clients sent on all connections."""
        self.connections = 0
        self.ended = 0
        self.change: Callable[[bytes], bytes] | None = None
        """Changes the next bytes of a client; then it is None again."""
        self._listener = socket.create_server(("127.0.0.1", 0))

    def to(self, endpoint: str) -> str:
        self._port = int(endpoint.rpartition(":")[2])
        threading.Thread(target=self._serve, daemon=True).start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._port))
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if forward:
                    self.seen += data
                    if (change := self.change) is not None:
                        self.change = None
                        data = change(data)
                target.sendall(data)
        self.ended += 1
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # the other thread still reads from it
            each.close()


@pytest.fixture
def wire() -> Any:
    wire = Wire()
    yield wire
    wire.close()


# Eavesdropping, changed and replayed messages


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_an_eavesdropper_can_read_a_plain_link_but_not_a_sealed_link(wire: Wire, sealed: bool) -> None:
    async def body() -> None:
        async with connected_peers(sealed, through=wire.to) as (receiver, sender):
            assert await sender.transport.send(0, new_message(1))
            await eventually(lambda: receiver.received)
            np.testing.assert_array_equal(receiver.received[0].payload.arrays["params"], SECRET)

    run_async(body)
    for open_text in (SECRET.tobytes(), SECRET[:4].tobytes(), RUN.encode(), b"model"):
        assert (open_text in wire.seen) is not sealed


def test_a_changed_message_is_rejected_and_the_next_message_arrives(wire: Wire) -> None:
    def flipped(data: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in data)  # a single bit may change only a frame's header

    async def body() -> None:
        async with connected_peers(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            wire.change = flipped
            await sender.transport.send(0, new_message(1, round=1))
            while len(receiver.received) < 2:  # over the next connection; messages of the last one are lost
                await sender.transport.send(0, new_message(1, round=2))
                await asyncio.sleep(0.05)
            assert wire.connections == 2
            for message in receiver.received:
                np.testing.assert_array_equal(message.payload.arrays["params"], SECRET)
            assert not receiver.rejected
            assert not receiver.unauthenticated

    run_async(body)


def test_replayed_bytes_are_rejected(wire: Wire) -> None:
    async def body() -> None:
        async with connected_peers(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, new_message(1, round=0, values=SECRET[:10]))
            await eventually(lambda: receiver.received)
            wire.change = lambda data: data + data  # one small message, and the same bytes once more
            await sender.transport.send(0, new_message(1, round=1, values=SECRET[:10]))
            await eventually(lambda: wire.ended and len(receiver.received) > 1)
            assert [m.round for m in receiver.received] == [0, 1]

    run_async(body)


# Unauthenticated connections


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("no key", "no key, or an invalid handshake"),
        ("an unknown key", "not on the list of keys"),
        ("a wrong server key", "no key, or an invalid handshake"),
    ],
)
def test_unauthenticated_connections_are_rejected_and_counted_and_listed_keys_are_not(who: str, why: str) -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            assert receiver.seal is not None
            assert sender.seal is not None
            keys = {
                "no key": (None, None),
                "an unknown key": (KeyPair.fresh(), receiver.seal.pair.public),
                "a wrong server key": (sender.seal.pair, KeyPair.fresh().public),
            }
            with connected(receiver.transport.endpoint, *keys[who]) as push:
                push.send_multipart([address(0), *new_message(1, round=7).frames()], zmq.NOBLOCK)
                await eventually(lambda: any(why in connection for connection in receiver.unauthenticated))
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            assert [message.round for message in receiver.received] == [0]
            assert receiver.rejected == []

    run_async(body)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0", b"", bytes(1000)], ids=repr)
def test_connections_that_do_not_use_zeromq_are_counted_and_change_nothing(first: bytes) -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            port = int(receiver.transport.endpoint.rpartition(":")[2])
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(first)
                await sender.transport.send(0, new_message(1, round=1))
                await eventually(lambda: len(receiver.received) == 2)
            await eventually(lambda: receiver.unauthenticated)
            assert len(receiver.unauthenticated) == 1

    run_async(body)


ACCEPTED, AUTHENTICATED, DISCONNECTED = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_failed_handshakes_are_counted_eventually_and_never_too_early(connections: Any, random: Any) -> None:
    """A connection: whether it authenticates, and if so, whether it ends before the test."""
    steps: list[tuple[float, int, int]] = []
    for number, (authenticated, leaves) in enumerate(connections):
        moments = sorted(random.uniform(0, 20) for _ in range(3))
        steps.append((moments[0], ACCEPTED, number))
        if authenticated:
            steps.append((moments[1], AUTHENTICATED, number))
        if leaves or not authenticated:
            steps.append((moments[2], DISCONNECTED, number))
    counter, counted, unauthenticated = HandshakeCounter(), 0, 0
    for now, event, number in sorted(steps, key=lambda step: step[0]):
        counter.note(event, 0 if event == AUTHENTICATED else number, now)
        counted += counter.newly_failed(now)
        if event == DISCONNECTED and not connections[number][0]:
            unauthenticated += 1
        assert counted <= unauthenticated, "a connection that has authenticated, or still may, is counted"
    counted += counter.newly_failed(100.0)
    assert counted == unauthenticated == sum(not authenticated for authenticated, _ in connections)


def test_a_listed_node_cannot_send_messages_in_the_name_of_another() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (receiver, sender, forger):
            await forger.transport.send(0, new_message(1))
            await eventually(lambda: receiver.rejected)
            assert receiver.rejected == ["node 2 sent a message in the name of node 1"]
            await sender.transport.send(0, new_message(1))
            await eventually(lambda: receiver.received)
            assert len(receiver.received) == 1

    run_async(body)


def test_a_listed_node_cannot_return_receipts_in_the_name_of_another() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (sender, receiver, forger):
            tickets: list[int] = []
            receiver.transport.require_tickets(lambda message, ticket: tickets.append(ticket))  # and sends no receipts
            sending = asyncio.create_task(sender.transport.send_and_wait(1, new_message()))
            await eventually(lambda: tickets)
            assert sender.seal is not None
            assert forger.seal is not None
            (ticket,) = tickets
            with connected(sender.transport.endpoint, forger.seal.pair, sender.seal.pair.public) as push:
                push.send_multipart([address(0, ticket), RUN.encode()])
                await eventually(lambda: sender.rejected)
            assert sender.rejected == ["node 2 returned a receipt for a message to node 1"]
            assert not sending.done()
            sending.cancel()

    run_async(body)


def test_a_message_addressed_to_another_node_is_dropped() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (receiver, sender, _):
            assert receiver.seal is not None
            assert sender.seal is not None
            with connected(receiver.transport.endpoint, sender.seal.pair, receiver.seal.pair.public) as push:
                push.send_multipart([address(2), *new_message(1).frames()])
                push.send_multipart([address(0), *new_message(1).frames()])
                await eventually(lambda: receiver.received)
            assert receiver.rejected == ["a message for node 2, and this is node 0"]
            assert len(receiver.received) == 1

    run_async(body)


def test_a_message_that_its_sender_repeats_is_received_once() -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            for round in (0, 0, 1):
                await sender.transport.send(0, new_message(1, round))
            await eventually(lambda: len(receiver.received) == 3)
            mailbox = Mailbox()
            for message in receiver.received:
                mailbox.put(message)
            got = [mailbox.start_receive(Filter("model", round, (1,)), lambda: None).messages for round in (0, 1)]
            assert [[m.round for m in messages] for messages in got] == [[0], [1]]
            assert mailbox.repeated == 1

    run_async(body)


# Without an answer no connection is accepted


def test_without_a_zap_handler_no_connection_is_accepted() -> None:
    async def body() -> None:
        receiver, sender = (Peer(id, KeyPair.fresh()) for id in range(2))
        assert receiver.seal is not None
        assert sender.seal is not None
        pairs = [receiver.seal.pair, sender.seal.pair]
        endpoints = [receiver.transport.endpoint, sender.transport.endpoint]
        try:
            sender.start(endpoints, pairs)
            receiver.transport.start(endpoints)  # it reads messages, but answers no ZAP requests
            await sender.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert receiver.received == []
            receiver.start(endpoints, pairs)
            await asyncio.wait_for(eventually(lambda: receiver.received), LONG)
        finally:
            receiver.close()
            sender.close()

    run_async(body)


def test_after_the_seal_is_closed_no_connection_is_accepted() -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            assert receiver.seal is not None
            receiver.seal.close()
            await sender.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert receiver.received == []

    run_async(body)


def test_a_sealed_sender_sends_nothing_to_a_plain_listener() -> None:
    async def body() -> None:
        plain, sealed = Peer(0, None), Peer(1, KeyPair.fresh())
        try:
            plain.start([plain.transport.endpoint, sealed.transport.endpoint], [])
            sealed.start([plain.transport.endpoint, sealed.transport.endpoint], [KeyPair.fresh(), KeyPair.fresh()])
            await sealed.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert (plain.received, plain.rejected) == ([], [])
        finally:
            plain.close()
            sealed.close()

    run_async(body)


def test_a_frame_of_a_plain_link_has_no_authenticated_sender() -> None:
    with pytest.raises(MessageError, match="not sealed"):
        authenticated_sender(zmq.Frame(b"x"))
