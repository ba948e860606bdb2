"""A node's sockets when peers misbehave: other messages still arrive, and no peer occupies the node."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import zmq

from local_transports import LONG, RUN, eventually, new_message, open_transport
from shoal.engines.processes import control
from shoal.engines.processes import transport as transport_module
from shoal.engines.processes.node_network import NodeNetwork
from shoal.engines.processes.transport import Transport
from shoal.errors import NodeError
from shoal.experiment import Experiment, ProcessesPlan
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload, address

ME, PEER, OTHER = range(3)


class LocalNode:
    """A node's transport, and a socket from which two peers send to it."""

    def __init__(self, deliver: Callable[[Message], None] | None = None, send_timeout: float = LONG) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.received: list[Message] = []
        self.rejected: list[str] = []
        self.transport = open_transport(
            self.context,
            ME,
            send_timeout=send_timeout,
            deliver=deliver or self.received.append,
            reject=self.rejected.append,
        )
        self._line = self.context.socket(zmq.PUSH)
        self._line.setsockopt(zmq.SNDHWM, 0)
        self._line.connect(self.transport.endpoint)

    def deliver_to_node(self, sender: int, round: int, ticket: int | None = None) -> None:
        """Send a message to the node."""
        message = Message(sender, "model", round, Payload({}), RUN)
        self._line.send_multipart([address(ME, ticket), *map(bytes, message.frames())])

    def close(self) -> None:
        self.transport.close()
        self.context.destroy(linger=0)


def run_on(
    node: Callable[[], LocalNode], body: Callable[[LocalNode], Coroutine[Any, Any, None]]
) -> list[dict[str, Any]]:
    """Run `body` on a node. Returns the errors that its event loop reported."""
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        found = node()
        try:
            await body(found)
        finally:
            found.close()

    asyncio.run(run())
    return errors


@pytest.mark.parametrize("endpoint", ["garbage", "", "tcp://", "foo://x", "udp://127.0.0.1:1", "tcp://127.0.0.1:*"])
def test_a_peer_with_an_unusable_endpoint_gets_no_receipts_and_all_messages_arrive(endpoint: str) -> None:
    async def body(node: LocalNode) -> None:
        node.transport.start([node.transport.endpoint, endpoint, node.transport.endpoint])
        for round in range(200):
            node.deliver_to_node(PEER, round, ticket=round)
            node.deliver_to_node(OTHER, round)
        await eventually(lambda: len(node.received) == 400)
        assert not node.transport.open_connections, "receipts must not open a socket"

    assert not run_on(LocalNode, body)


def test_an_error_in_one_delivery_is_reported_and_further_messages_arrive() -> None:
    received: list[int] = []

    def deliver(message: Message) -> None:
        if message.round == 3:
            raise ZeroDivisionError("an error of our own")
        received.append(message.round)

    async def body(node: LocalNode) -> None:
        node.transport.start(
            [node.transport.endpoint] * 3
        )  # first: it reads the messages that have arrived, and raises
        for round in range(10):
            node.deliver_to_node(OTHER, round)
        await eventually(lambda: len(received) == 9)
        node.deliver_to_node(OTHER, 10)
        await eventually(lambda: len(received) == 10)

    (error,) = run_on(lambda: LocalNode(deliver), body)
    assert isinstance(error["exception"], ZeroDivisionError)


def test_a_transport_that_is_closed_during_a_delivery_reads_no_more() -> None:
    node: LocalNode
    closed = asyncio.Event()

    def deliver(message: Message) -> None:
        node.transport.close()
        closed.set()

    async def body(found: LocalNode) -> None:
        nonlocal node
        node = found
        node.transport.start([node.transport.endpoint] * 3)
        for round in range(3):
            node.deliver_to_node(OTHER, round)
        await eventually(closed.is_set)
        await asyncio.sleep(0.1)

    assert len(run_on(lambda: LocalNode(deliver), body)) == 1, "it reports one error, and then stops"


def unresponsive_listener() -> socket.socket:
    """A listener that accepts connections and never reads: messages to it stay in their sender's queue."""
    return socket.create_server(("127.0.0.1", 0))


def endpoint_of(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_peer_that_reads_no_receipts_takes_one_task_and_little_memory() -> None:
    flood = 3 * transport_module.MAX_LATE_RECEIPTS

    async def body(node: LocalNode) -> None:
        before = len(asyncio.all_tasks())
        with unresponsive_listener() as listener:
            node.transport.start([node.transport.endpoint, endpoint_of(listener), node.transport.endpoint])
            for round in range(flood):
                node.deliver_to_node(PEER, round, ticket=round)
            await eventually(lambda: len(node.received) == flood)
            assert len(asyncio.all_tasks()) == before + 1
            tickets = node.transport.late_receipts(PEER)
            assert 0 < len(tickets) <= transport_module.MAX_LATE_RECEIPTS
            assert tickets[-1] == flood - 1
            node.transport.mark_failed(PEER)
            await eventually(lambda: len(asyncio.all_tasks()) == before)
            assert not node.transport.late_receipts(PEER)

    assert not run_on(LocalNode, body)


def test_receipts_that_were_late_are_sent_when_the_peer_reads_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_LATE_RECEIPTS", 10_000)
    count = 3000

    async def body(node: LocalNode) -> None:
        peer = node.context.socket(zmq.PULL)
        peer.bind("tcp://127.0.0.1:*")
        endpoint = peer.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        peer.unbind(endpoint)  # no listener yet: messages stay in their sender's queue
        node.transport.start([node.transport.endpoint, endpoint, node.transport.endpoint])
        for round in range(count):
            node.deliver_to_node(PEER, round, ticket=round)
        await eventually(lambda: len(node.received) == count)
        assert node.transport.late_receipts(PEER)
        peer.bind(endpoint)
        got: list[bytes] = []

        def read() -> bool:
            while peer.poll(0):
                got.append(peer.recv_multipart()[0])
            return len(got) == count

        await eventually(read)
        assert got == [address(PEER, ticket) for ticket in range(count)]
        await eventually(lambda: not node.transport.late_receipts(PEER))
        peer.close(linger=0)

    assert not run_on(LocalNode, body)


def test_after_a_peer_has_moved_it_gets_receipts_for_what_it_sends_from_then_on() -> None:
    count = 3 * transport_module.MAX_LATE_RECEIPTS

    async def body(node: LocalNode) -> None:
        peer = node.context.socket(zmq.PULL)
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        with unresponsive_listener() as listener:
            node.transport.start([node.transport.endpoint, endpoint_of(listener), node.transport.endpoint])
            for round in range(count):
                node.deliver_to_node(PEER, round, ticket=round)
            await eventually(lambda: len(node.received) == count and node.transport.late_receipts(PEER))
            node.transport.move(PEER, f"tcp://127.0.0.1:{port}")
            node.deliver_to_node(PEER, 0, ticket=count + 7)
            await eventually(lambda: peer.poll(0))
            assert peer.recv_multipart()[0] == address(PEER, count + 7)
            assert not node.transport.late_receipts(PEER)
        peer.close(linger=0)

    assert not run_on(LocalNode, body)


def test_receipts_to_a_stalled_peer_are_not_retried() -> None:
    async def body(node: LocalNode) -> None:
        before = len(asyncio.all_tasks())
        with unresponsive_listener() as listener:
            node.transport.start([node.transport.endpoint, endpoint_of(listener), node.transport.endpoint])
            count = 0
            while PEER not in node.transport.stalled_peers:
                node.deliver_to_node(PEER, count, ticket=count)
                count += 1
                await asyncio.sleep(0.0 if count % 500 else 0.01)
            await eventually(lambda: len(node.received) == count)
            await eventually(lambda: not node.transport.late_receipts(PEER))
            node.deliver_to_node(PEER, 0, ticket=count)
            await eventually(lambda: len(node.received) == count + 1)
            assert len(asyncio.all_tasks()) == before

    assert not run_on(lambda: LocalNode(send_timeout=0.05), body)


def test_a_message_that_receivers_would_reject_is_an_error_at_its_sender() -> None:
    async def body() -> None:
        context: zmq.Context[Any] = zmq.Context()
        sender = open_transport(context, max_message_bytes=2**20)
        try:
            sender.start([sender.endpoint, "tcp://127.0.0.1:9"])
            assert await sender.send(1, new_message(size=2**19))
            with pytest.raises(NodeError, match=r"accept at most 1; set processes\.max_message_mib"):
                await sender.send(1, new_message(size=2**20))
        finally:
            sender.close()
            context.destroy(linger=0)

    asyncio.run(body())


def test_the_largest_message_follows_from_the_model_unless_it_is_set() -> None:
    assert ProcessesPlan().max_message_bytes(1000) == 2**20
    assert ProcessesPlan().max_message_bytes(2**20) == 16 * 2**20
    assert ProcessesPlan().max_message_bytes(None) == 256 * 2**20, "samples may be larger than the model"
    assert ProcessesPlan(max_message_mib=0.5).max_message_bytes(2**20) == 2**19


# Peers that read nothing


def on_a_transport(body: Callable[[Transport], Coroutine[Any, Any, None]], **options: Any) -> Transport:
    """Run `body` on a transport with unreachable peers: sent messages stay in its queues."""

    async def run() -> Transport:
        context: zmq.Context[Any] = zmq.Context()
        transport = open_transport(context, **{"send_timeout": 10.0, **options})
        transport.start(["tcp://127.0.0.1:9"] * 3)  # the discard port, on which no process listens
        try:
            await asyncio.wait_for(body(transport), 60)
        finally:
            transport.close()
            context.destroy(linger=0)
        return transport

    return asyncio.run(run())


def test_a_peer_that_fails_with_a_full_queue_does_not_fail_its_senders() -> None:
    async def body(transport: Transport) -> None:
        waiting = asyncio.create_task(transport.send(1, new_message()))
        while (await asyncio.wait([waiting], timeout=0.5))[0]:  # until the queue is full
            waiting = asyncio.create_task(transport.send(1, new_message()))
        transport.mark_failed(1)
        assert not await waiting
        assert not await transport.send(1, new_message())

    assert on_a_transport(body).unsent == 0


def test_a_replaced_connection_does_not_fail_a_waiting_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "LINGER_MS", 50)

    async def body(transport: Transport) -> None:
        async def flood() -> None:
            for _ in range(5000):
                await transport.send(1, new_message())

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.2)
        await transport.send(2, new_message())
        await asyncio.sleep(0.1)
        transport.mark_failed(1)
        await flooding

    on_a_transport(body, connections=1)


def test_messages_that_a_peer_does_not_take_in_time_are_dropped_and_counted() -> None:
    async def body(transport: Transport) -> None:
        while not transport.unsent:
            await transport.send(1, new_message())
        await transport.send(1, new_message())  # returns at once because the peer has already timed out

    assert on_a_transport(body, send_timeout=0.05).unsent == 2


def test_a_stalled_peer_that_reads_again_counts_as_any_other() -> None:
    """A full queue is then waited for again, up to the timeout; the messages to a stalled peer are dropped at once."""

    async def body(transport: Transport) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as peer:
            port = peer.bind_to_random_port("tcp://127.0.0.1")
            endpoint = f"tcp://127.0.0.1:{port}"
            peer.unbind(endpoint)  # no listener: messages stay in their sender's queue
            transport.move(1, endpoint)
            while not transport.unsent:
                await transport.send(1, new_message())
            assert transport.stalled_peers == {1}
            peer.bind(endpoint)
            while not await transport.send(1, new_message()):
                while peer.poll(1):
                    peer.recv_multipart()
                await asyncio.sleep(0.001)
            assert not transport.stalled_peers

    on_a_transport(body, send_timeout=0.05)


def test_a_restarted_peer_that_is_announced_again_loses_no_message() -> None:
    """A new coordinator announces it: messages to the process that the node knows stay in the queue."""
    peer = control.PeerRestarted(PEER, "tcp://127.0.0.1:1", incarnation=1)

    async def waiting_after(*announced: control.PeerRestarted, **start: Any) -> int:
        setup = Setup(Experiment(nodes=3, engine="processes"))
        with zmq.Context() as context:
            network = NodeNetwork(context, setup, ME, control.StartNodes([ME], RUN), lambda why: None, None)
            endpoints = ["tcp://127.0.0.1:2", peer.endpoint if start else "tcp://127.0.0.1:3", "tcp://127.0.0.1:4"]
            network.start(control.Start(endpoints, **start))
            if not start:
                network.mark_restarted(peer)
            await network.transport.send(PEER, new_message())
            for message in announced:
                network.mark_restarted(message)
            connections = network.transport.open_connections
            network.close()
            return connections

    again = msgspec.structs.replace(peer, incarnation=2)
    assert asyncio.run(waiting_after(peer)) == 1
    assert asyncio.run(waiting_after(peer, incarnations={PEER: 1})) == 1, "it has learned of the peer with its start"
    assert asyncio.run(waiting_after(again)) == 0, "another process at the same endpoint"
    assert asyncio.run(waiting_after(msgspec.structs.replace(peer, endpoint="tcp://127.0.0.1:5"))) == 0
