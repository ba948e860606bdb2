"""A node's end of the network model: what it keeps of messages that nobody told it of, and of word without messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest
import zmq

from shoal.engines.processes import shaper as shaper_module
from shoal.engines.processes.shaper import Arrival, NetworkAddress, Shaper, encode
from shoal.engines.processes.transport import Transport
from shoal.message import Message, Payload
from shoal.message_budget import MessageBudget

LONG = 60.0
"""Seconds for what takes a moment on a machine that has time."""
VALUES = np.zeros(25_000, np.float32)
NODES = 3


def said(sender: int, round: int = 0) -> Message:
    return Message(sender, "model", round, Payload({"params": VALUES}))


class Discarding:
    """A transport that sends nothing."""

    async def send(self, to: int, message: Message, ticket: int) -> bool:
        return True


class Place:
    """A node's shaper, and what the network says to it."""

    def __init__(self, context: zmq.Context[Any], budget: MessageBudget) -> None:
        self.came: list[Message] = []
        self._network = context.socket(zmq.ROUTER)
        port = self._network.bind_to_random_port("tcp://127.0.0.1")
        address, transport = NetworkAddress(f"tcp://127.0.0.1:{port}"), cast(Transport, Discarding())
        self.shaper = Shaper(context, 0, address, transport, self.came.append, budget)
        self._name: bytes | None = None

    def tell(self, *words: Arrival) -> None:
        if self._name is None:
            self._name, _ = self._network.recv_multipart()
        self._network.send_multipart([self._name, encode(words)])

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not condition():  # noqa: ASYNC110 - sockets set no event
                await asyncio.sleep(0.01)


def on_a_shaper(body: Callable[[Place], Coroutine[Any, Any, None]], usual: int = VALUES.nbytes) -> None:
    async def run() -> None:
        with zmq.Context() as context:
            place = Place(context, MessageBudget(usual, NODES))
            try:
                await body(place)
            finally:
                place.shaper.close()
                context.destroy(linger=0)

    asyncio.run(run())


def test_of_what_is_never_posted_no_more_is_kept_than_a_mailbox_would_keep() -> None:
    size, flood = MessageBudget(VALUES.nbytes, NODES).size, 1000

    async def body(place: Place) -> None:
        shaper = place.shaper
        shaper.receive(said(2), 7)
        for ticket in range(flood):
            shaper.receive(said(1, ticket), ticket)
            assert shaper.held_bytes <= size
        assert flood * VALUES.nbytes > 2 * size, "or it would not have been too much"
        assert shaper.dropped + shaper.unannounced == flood + 1
        place.tell(Arrival(2, 7, 0.0))
        await place.until(lambda: place.came)
        assert [message.sender for message in place.came] == [2], "the others keep what is theirs"

    on_a_shaper(body)


@pytest.mark.parametrize("word_first", [True, False])
def test_however_much_is_on_its_way_in_the_model_nothing_of_it_is_dropped(word_first: bool) -> None:
    """As where nodes hand more to the network than it carries, and it waits there."""
    count = 1000

    async def body(place: Place) -> None:
        shaper = place.shaper
        for first in range(0, count, 50):
            tickets = range(first, first + 50)
            if word_first:
                place.tell(*(Arrival(1, ticket, math.inf) for ticket in tickets))
                await place.until(lambda last=tickets[-1]: shaper.is_missing(1, last))
            for ticket in tickets:
                shaper.receive(said(1, ticket), ticket)
            if not word_first:
                place.tell(*(Arrival(1, ticket, math.inf) for ticket in tickets))
                await place.until(lambda: not shaper.unannounced)
        assert shaper.held_bytes > 2 * MessageBudget(VALUES.nbytes, NODES).size
        place.tell(*(Arrival(1, ticket, 0.0) for ticket in range(count)))
        await place.until(lambda: len(place.came) == count)
        assert [message.round for message in place.came] == list(range(count))
        assert not shaper.dropped
        assert not shaper.held_bytes

    on_a_shaper(body)


def test_word_that_has_come_is_read_before_anything_is_dropped() -> None:
    count = 1000

    async def body(place: Place) -> None:
        place.tell(*(Arrival(1, ticket, math.inf) for ticket in range(count)))
        assert place.shaper._socket.poll(1000 * LONG)  # it is there, and the loop has not got to it
        for ticket in range(count):
            place.shaper.receive(said(1, ticket), ticket)
        assert not place.shaper.dropped

    on_a_shaper(body)


def test_what_comes_twice_with_one_ticket_is_not_kept_for_ever() -> None:
    count = 1000

    async def body(place: Place) -> None:
        shaper = place.shaper
        for ticket in range(count):
            shaper.receive(said(1), ticket)
        place.tell(*(Arrival(1, ticket, math.inf) for ticket in range(count)))
        for ticket in range(count):
            shaper.receive(said(1), ticket)
        place.tell(*(Arrival(1, ticket, 0.0) for ticket in range(count)))
        await place.until(lambda: place.came)
        await asyncio.sleep(0.05)
        assert shaper.held_bytes <= MessageBudget(VALUES.nbytes, NODES).size

    on_a_shaper(body)


def test_the_longest_that_a_node_sends_is_usual() -> None:
    async def body(place: Place) -> None:
        assert await place.shaper.send(1, said(0))
        for number in range(2 * NODES):
            place.shaper.receive(said(1 + number % 2, number), number)
        assert not place.shaper.dropped

    on_a_shaper(body, usual=0)


def test_word_of_messages_that_do_not_come_is_forgotten_by_and_by_and_for_each_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shaper_module, "MAX_ANNOUNCED", 10)

    async def body(place: Place) -> None:
        shaper = place.shaper
        place.tell(Arrival(2, 7, 0.0))
        place.tell(*(Arrival(1, ticket, 0.0) for ticket in range(1000)))
        await place.until(lambda: shaper.is_missing(1, 999))
        assert [ticket for ticket in range(1000) if shaper.is_missing(1, ticket)] == list(range(990, 1000))
        shaper.receive(said(2), 7)
        shaper.receive(said(1, 5), 995)
        assert [(message.sender, message.round) for message in place.came] == [(2, 0), (1, 5)]

    on_a_shaper(body)
