"""A node's sockets when peers misbehave: the door stays attended, and nobody takes the node's time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq

from shoal.engines.processes import transport as transport_module
from shoal.engines.processes.transport import Transport
from shoal.message import RUN_LENGTH, Message, Payload, address

RUN = "r" * RUN_LENGTH
LONG = 60.0
"""Seconds for what takes a moment on a machine that has time."""
ME, PEER, OTHER = range(3)


class Place:
    """A node, and a socket of two peers of its own to speak to it."""

    def __init__(self, deliver: Callable[[Message], None] | None = None, send_timeout: float = LONG) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.came: list[Message] = []
        self.rejected: list[str] = []
        self.transport = Transport(
            self.context,
            id=ME,
            run=RUN,
            host="127.0.0.1",
            port=None,
            max_message_bytes=2**20,
            connections=8,
            send_timeout=send_timeout,
            deliver=deliver or self.came.append,
            reject=self.rejected.append,
        )
        self._line = self.context.socket(zmq.PUSH)
        self._line.setsockopt(zmq.SNDHWM, 0)
        self._line.connect(self.transport.endpoint)

    def hear(self, sender: int, round: int, ticket: int | None = None) -> None:
        """A message for the node."""
        said = Message(sender, "model", round, Payload({}), RUN)
        self._line.send_multipart([address(ME, ticket), *map(bytes, said.frames())])

    def close(self) -> None:
        if not self.transport._inbox.closed:
            self.transport.close()
        self.context.destroy(linger=0)


async def soon(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():  # noqa: ASYNC110 - sockets set no event
            await asyncio.sleep(0.01)


def on(place: Callable[[], Place], body: Callable[[Place], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
    """Run something on a node; returns what its event loop had to complain of."""
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        found = place()
        try:
            await body(found)
        finally:
            found.close()

    asyncio.run(run())
    return complaints


@pytest.mark.parametrize("endpoint", ["garbage", "", "tcp://", "foo://x", "udp://127.0.0.1:1", "tcp://127.0.0.1:*"])
def test_a_peer_whose_address_is_none_gets_no_receipts_and_all_are_heard(endpoint: str) -> None:
    async def body(place: Place) -> None:
        place.transport.start([place.transport.endpoint, endpoint, place.transport.endpoint])
        for round in range(200):
            place.hear(PEER, round, ticket=round)
            place.hear(OTHER, round)
        await soon(lambda: len(place.came) == 400)
        assert not place.transport._open, "a socket for each receipt is one too many"

    assert not on(Place, body)


def test_what_is_raised_by_one_message_is_told_and_the_rest_is_taken_in() -> None:
    came: list[int] = []

    def deliver(message: Message) -> None:
        if message.round == 3:
            raise ZeroDivisionError("an error of our own")
        came.append(message.round)

    async def body(place: Place) -> None:
        place.transport.start([place.transport.endpoint] * 3)  # first: it takes in what is there by then, and raises
        for round in range(10):
            place.hear(OTHER, round)
        await soon(lambda: len(came) == 9)
        place.hear(OTHER, 10)
        await soon(lambda: len(came) == 10)

    (complaint,) = on(lambda: Place(deliver), body)
    assert isinstance(complaint["exception"], ZeroDivisionError)


def test_a_transport_that_is_closed_by_what_it_delivers_reads_no_more() -> None:
    place: Place

    def deliver(message: Message) -> None:
        place.transport.close()

    async def body(found: Place) -> None:
        nonlocal place
        place = found
        place.transport.start([place.transport.endpoint] * 3)
        for round in range(3):
            place.hear(OTHER, round)
        await soon(lambda: place.transport._inbox.closed)
        await asyncio.sleep(0.1)

    assert len(on(lambda: Place(deliver), body)) == 1, "it complains once, and does not go on for ever"


def unread() -> socket.socket:
    """A listener that takes connections and never speaks: what is sent to it stays in its sender's queue."""
    return socket.create_server(("127.0.0.1", 0))


def endpoint_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_peer_that_reads_no_receipts_takes_one_task_and_little_memory() -> None:
    flood = 3 * transport_module.MAX_LATE_RECEIPTS

    async def body(place: Place) -> None:
        before = len(asyncio.all_tasks())
        with unread() as listener:
            place.transport.start([place.transport.endpoint, endpoint_of(listener), place.transport.endpoint])
            for round in range(flood):
                place.hear(PEER, round, ticket=round)
            await soon(lambda: len(place.came) == flood)
            assert len(asyncio.all_tasks()) == before + 1
            _, tickets = place.transport._late[PEER]
            assert len(tickets) <= transport_module.MAX_LATE_RECEIPTS
            assert tickets[-1] == flood - 1
            place.transport.mark_failed(PEER)
            await soon(lambda: len(asyncio.all_tasks()) == before)
            assert not place.transport._late

    assert not on(Place, body)


def test_receipts_that_were_late_are_sent_when_the_peer_reads_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_LATE_RECEIPTS", 10_000)
    count = 3000

    async def body(place: Place) -> None:
        peer = place.context.socket(zmq.PULL)
        peer.bind("tcp://127.0.0.1:*")
        endpoint = peer.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        peer.unbind(endpoint)  # nobody is there yet: what is sent stays in its sender's queue
        place.transport.start([place.transport.endpoint, endpoint, place.transport.endpoint])
        for round in range(count):
            place.hear(PEER, round, ticket=round)
        await soon(lambda: len(place.came) == count)
        assert PEER in place.transport._late
        peer.bind(endpoint)
        got: list[bytes] = []

        def read() -> bool:
            while peer.poll(0):
                got.append(peer.recv_multipart()[0])
            return len(got) == count

        await soon(read)
        assert got == [address(PEER, ticket) for ticket in range(count)]
        await soon(lambda: not place.transport._late)
        peer.close(linger=0)

    assert not on(Place, body)


def test_after_a_peer_has_moved_it_gets_receipts_for_what_it_sends_from_then_on() -> None:
    count = 3 * transport_module.MAX_LATE_RECEIPTS

    async def body(place: Place) -> None:
        peer = place.context.socket(zmq.PULL)
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        with unread() as listener:
            place.transport.start([place.transport.endpoint, endpoint_of(listener), place.transport.endpoint])
            for round in range(count):
                place.hear(PEER, round, ticket=round)
            await soon(lambda: len(place.came) == count and PEER in place.transport._late)
            place.transport.move(PEER, f"tcp://127.0.0.1:{port}")
            place.hear(PEER, 0, ticket=count + 7)
            await soon(lambda: peer.poll(0))
            assert peer.recv_multipart()[0] == address(PEER, count + 7)
            assert not place.transport._late
        peer.close(linger=0)

    assert not on(Place, body)


def test_a_peer_that_took_nothing_for_long_is_not_insisted_on_for_every_receipt() -> None:
    async def body(place: Place) -> None:
        before = len(asyncio.all_tasks())
        with unread() as listener:
            place.transport.start([place.transport.endpoint, endpoint_of(listener), place.transport.endpoint])
            count = 0
            while PEER not in place.transport._stalled:
                place.hear(PEER, count, ticket=count)
                count += 1
                await asyncio.sleep(0.0 if count % 500 else 0.01)
            await soon(lambda: len(place.came) == count)
            await soon(lambda: not place.transport._late)
            place.hear(PEER, 0, ticket=count)
            await soon(lambda: len(place.came) == count + 1)
            assert len(asyncio.all_tasks()) == before

    assert not on(lambda: Place(send_timeout=0.05), body)
