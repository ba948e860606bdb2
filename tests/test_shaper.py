"""A node's end of the network model: limits of unannounced messages and of announcements without messages."""

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
from shoal.engines.rejoining import REJOIN_REQUEST
from shoal.message import Message, Payload
from shoal.message_budget import MessageBudget

LONG = 60.0
"""Seconds: a generous timeout for operations that are fast on an idle machine."""
VALUES = np.zeros(25_000, np.float32)
NODES = 3


def new_message(sender: int, round: int = 0) -> Message:
    return Message(sender, "model", round, Payload({"params": VALUES}))


class Discarding:
    """A transport that sends nothing."""

    async def send(self, to: int, message: Message, ticket: int) -> bool:
        return True


class ShapedNode:
    """A node's shaper, and the socket of a network process that reports to it."""

    def __init__(self, context: zmq.Context[Any], budget: MessageBudget) -> None:
        self.received: list[Message] = []
        self._network = context.socket(zmq.ROUTER)
        port = self._network.bind_to_random_port("tcp://127.0.0.1")
        address, transport = NetworkAddress(f"tcp://127.0.0.1:{port}"), cast(Transport, Discarding())
        self.shaper = Shaper(context, 0, "run", address, transport, self.received.append, budget)
        self._name: bytes | None = None

    def report(self, *arrivals: Arrival) -> None:
        if self._name is None:
            self._name, _ = self._network.recv_multipart()
        self._network.send_multipart([self._name, encode(arrivals)])

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not condition():  # noqa: ASYNC110 - sockets set no event
                await asyncio.sleep(0.01)


def with_shaper(body: Callable[[ShapedNode], Coroutine[Any, Any, None]], usual: int = VALUES.nbytes) -> None:
    async def run() -> None:
        with zmq.Context() as context:
            node = ShapedNode(context, MessageBudget(usual, NODES))
            try:
                await body(node)
            finally:
                node.shaper.close()
                context.destroy(linger=0)

    asyncio.run(run())


def test_unannounced_messages_stay_within_the_budget() -> None:
    size, flood = MessageBudget(VALUES.nbytes, NODES).size, 1000

    async def body(node: ShapedNode) -> None:
        shaper = node.shaper
        shaper.receive(new_message(2), 7)
        for ticket in range(flood):
            shaper.receive(new_message(1, ticket), ticket)
            assert shaper.held_bytes <= size
        assert flood * VALUES.nbytes > 2 * size, "the flood must exceed the budget"
        assert shaper.dropped + shaper.unannounced == flood + 1
        node.report(Arrival(2, 7, 0.0))
        await node.until(lambda: node.received)
        assert [message.sender for message in node.received] == [2], "other senders keep their messages"

    with_shaper(body)


@pytest.mark.parametrize("reports_first", [True, False])
def test_messages_in_transit_through_the_model_are_never_dropped(reports_first: bool) -> None:
    """For example, nodes send more than the network carries, and messages wait in the model."""
    count = 1000

    async def body(node: ShapedNode) -> None:
        shaper = node.shaper
        for first in range(0, count, 50):
            tickets = range(first, first + 50)
            if reports_first:
                node.report(*(Arrival(1, ticket, math.inf) for ticket in tickets))
                await node.until(lambda last=tickets[-1]: shaper.is_missing(1, last))
            for ticket in tickets:
                shaper.receive(new_message(1, ticket), ticket)
            if not reports_first:
                node.report(*(Arrival(1, ticket, math.inf) for ticket in tickets))
                await node.until(lambda: not shaper.unannounced)
        assert shaper.held_bytes > 2 * MessageBudget(VALUES.nbytes, NODES).size
        node.report(*(Arrival(1, ticket, 0.0) for ticket in range(count)))
        await node.until(lambda: len(node.received) == count)
        assert [message.round for message in node.received] == list(range(count))
        assert not shaper.dropped
        assert not shaper.held_bytes

    with_shaper(body)


def test_messages_about_rejoining_from_before_a_failure_are_ignored() -> None:
    """Tickets are times in nanoseconds: see `Shaper.mark_failed`."""
    failed_at = 5.0
    before, after = int(4.9e9), int(5.1e9)

    async def body(node: ShapedNode) -> None:
        node.shaper.mark_failed(1, failed_at)
        for ticket in (before, after):
            node.shaper.receive(Message(1, REJOIN_REQUEST, ticket, Payload({})), ticket)
            node.shaper.receive(new_message(1, ticket + 1), ticket + 1)
            node.report(Arrival(1, ticket, 0.0), Arrival(1, ticket + 1, 0.0))
        await node.until(lambda: not node.shaper.held_bytes)
        assert [message.round for message in node.received] == [before + 1, after, after + 1]

    with_shaper(body)


def test_reports_that_have_arrived_are_read_before_messages_are_dropped() -> None:
    count = 1000

    async def body(node: ShapedNode) -> None:
        node.report(*(Arrival(1, ticket, math.inf) for ticket in range(count)))
        # The report has arrived, and the event loop has not read it. Every public way to see that would read it.
        assert node.shaper._socket.poll(1000 * LONG)
        for ticket in range(count):
            node.shaper.receive(new_message(1, ticket), ticket)
        assert not node.shaper.dropped

    with_shaper(body)


def test_repeated_messages_with_one_ticket_stay_within_the_budget() -> None:
    count = 1000

    async def body(node: ShapedNode) -> None:
        shaper = node.shaper
        for ticket in range(count):
            shaper.receive(new_message(1), ticket)
        node.report(*(Arrival(1, ticket, math.inf) for ticket in range(count)))
        for ticket in range(count):
            shaper.receive(new_message(1), ticket)
        node.report(*(Arrival(1, ticket, 0.0) for ticket in range(count)))
        await node.until(lambda: node.received)
        await asyncio.sleep(0.05)
        assert shaper.held_bytes <= MessageBudget(VALUES.nbytes, NODES).size

    with_shaper(body)


def test_the_budget_grows_with_the_longest_message_that_the_node_sends() -> None:
    async def body(node: ShapedNode) -> None:
        assert await node.shaper.send(1, new_message(0))
        for number in range(2 * NODES):
            node.shaper.receive(new_message(1 + number % 2, number), number)
        assert not node.shaper.dropped

    with_shaper(body, usual=0)


def test_announcements_of_missing_messages_are_limited_for_each_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shaper_module, "MAX_ANNOUNCED", 10)

    async def body(node: ShapedNode) -> None:
        shaper = node.shaper
        node.report(Arrival(2, 7, 0.0))
        node.report(*(Arrival(1, ticket, 0.0) for ticket in range(1000)))
        await node.until(lambda: shaper.is_missing(1, 999))
        assert [ticket for ticket in range(1000) if shaper.is_missing(1, ticket)] == list(range(990, 1000))
        shaper.receive(new_message(2), 7)
        shaper.receive(new_message(1, 5), 995)
        assert [(message.sender, message.round) for message in node.received] == [(2, 0), (1, 5)]

    with_shaper(body)
