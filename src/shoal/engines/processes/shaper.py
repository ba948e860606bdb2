"""A node's end of the network model, where nodes are processes.

TCP carries messages across the machine at once. The network process computes what the network model does to each of
them, and the receiver keeps a message until it is due. This needs no root, and all links of the model are shared as in
the simulation, including those in the middle of the network. The event loop keeps running while the node trains.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import zmq

from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.timed_queue import TimedQueue
from shoal.engines.processes.transport import Transport
from shoal.engines.rejoining import REJOIN_KINDS
from shoal.errors import MessageError
from shoal.message import Message
from shoal.message_budget import MessageBudget
from shoal.types import NodeId

IDENTITY = re.compile(rb"n([0-9]{1,9}) (.*) .{8}", re.DOTALL)
MAX_ANNOUNCED = 100_000
"""Announced messages of one sender that are remembered while they are not here. Sockets between two nodes hold fewer:
the sender of an older one has given up on it, or never sent it."""
PROMPT_SECONDS = 0.02
"""A message that a task sends so soon after its last message has left follows it without a gap: the time to learn that
the last message has left is the shaper's time, not the node's."""


class Registration(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Node to network process: the node listens from now on. Earlier messages to it are lost."""

    since: float
    """When it began to listen, on the coordinator's monotonic clock."""


class Submission(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Node to network process: the node has sent a message."""

    ticket: int
    to: NodeId
    size: Annotated[int, msgspec.Meta(ge=0)]
    since: float
    """When it was sent, on the coordinator's monotonic clock."""
    waits: bool
    """Whether the sender waits until the message has left."""


class Departure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Network process to sender: the last byte of a message has left, or the message was dropped before it left."""

    ticket: int
    time: float
    was_sent: bool


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Network process to receiver: when a message arrives."""

    sender: NodeId
    ticket: int
    time: float | None
    """On the coordinator's monotonic clock; infinite: in transit, with no time known yet; None: lost."""


NodeReport: TypeAlias = Registration | Submission
NetworkReport: TypeAlias = Departure | Arrival
encode = msgspec.msgpack.Encoder().encode
decode_node_report = msgspec.msgpack.Decoder(NodeReport).decode
decode_network_reports = msgspec.msgpack.Decoder(list[NetworkReport]).decode

MessageKey: TypeAlias = tuple[NodeId, int]
"""Sender and ticket of a message."""


@dataclass(frozen=True)
class NetworkAddress:
    """Where the network process listens."""

    endpoint: str
    key: bytes | None = None
    """Its public key, where links are sealed."""


class _Pending:
    """What is known of one message that is not delivered yet.

    | message | announced | due      | state                                                            |
    |---------|-----------|----------|------------------------------------------------------------------|
    | here    | no        |          | unannounced: the network process may never report it             |
    | missing | yes       | any      | announced: it is on its way through TCP, or was never sent       |
    | here    | yes       | infinite | in transit through the network model                             |
    | here    | yes       | finite   | queued until it is due                                           |

    A message that is here and lost is not pending any longer.
    """

    __slots__ = ("announced", "due", "message")

    def __init__(self, message: Message | None = None, announced: bool = False) -> None:
        self.message = message
        self.announced = announced
        self.due: float | None = None

    @property
    def queued(self) -> bool:
        return self.message is not None and self.announced and self.due is not None and self.due < math.inf


class Shaper:
    """Reports the node's messages to the network process, and delivers its peers' messages when they are due."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        id: NodeId,
        run: str,
        network: NetworkAddress,
        transport: Transport,
        deliver: Callable[[Message], None],
        budget: MessageBudget | None = None,
        seal: Seal | None = None,
    ) -> None:
        """`run` is the run's secret identifier. `budget` limits the memory of unannounced messages."""
        self._transport = transport
        self._deliver = deliver
        self._budget = budget
        self.dropped = 0
        """Messages beyond the budget that the network process has not reported, and repetitions of messages."""
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity(id, run))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if seal is not None:
            seal.secure_client(self._socket, network.key)
        self._socket.connect(network.endpoint)
        self._socket.send(encode(Registration(self._loop.time())))
        self._tickets = int(self._loop.time() * 1e9)  # higher than every ticket of a failed node that had the same id
        self._departures: dict[int, asyncio.Future[Departure]] = {}
        """Tickets of the messages whose sender waits until they have left."""
        self._last_departure: tuple[asyncio.Task[object] | None, float] = (None, 0.0)
        """The task whose message left last, and when."""
        self._pending: dict[MessageKey, _Pending] = {}
        """All messages that are not delivered yet. The budget limits the unannounced ones, which anyone can invent,
        `MAX_ANNOUNCED` limits the missing ones, and the network model limits the others."""
        self._missing: dict[NodeId, dict[int, None]] = {}
        """The tickets of announced messages that are not here, by sender and in order of announcement."""
        self._queue: TimedQueue[tuple[MessageKey, _Pending]] = TimedQueue(self._release)
        self._failure_tickets: dict[NodeId, int] = {}
        """When nodes failed, on the scale of tickets."""
        self._loop.add_reader(self._socket.FD, self._drain)
        self._drain()  # ZeroMQ signals arrivals only after a read that found nothing

    async def send(self, to: NodeId, message: Message) -> bool:
        ticket = self._submit(to, message, self._loop.time(), waits=False)
        return await self._transport.send(to, message, ticket)

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        now = self._loop.time()
        task, left = self._last_departure
        prompt = task is asyncio.current_task() and now - left < PROMPT_SECONDS
        ticket = self._submit(to, message, left if prompt else now, waits=True)
        future = self._departures[ticket] = self._loop.create_future()
        try:
            if not await self._transport.send(to, message, ticket):
                return False
            departure: Departure = await future
        finally:
            del self._departures[ticket]
        self._last_departure = asyncio.current_task(), departure.time
        return departure.was_sent

    def receive(self, message: Message, ticket: int) -> None:
        """Take a message that has arrived over TCP."""
        key = message.sender, ticket
        pending = self._pending.get(key)
        if pending is None or not pending.announced:
            self._pending[key] = _Pending(message)  # replaces an unannounced message with the same ticket
            self._limit_unannounced(message)
        elif pending.message is None:
            del self._missing[message.sender][ticket]
            pending.message = message
            self._schedule(key, pending)
        else:
            self.dropped += 1  # a repetition

    def mark_failed(self, node: NodeId, at: float) -> None:
        """Ignore messages about rejoining that `node` sent before it failed. All its other messages arrive.

        `at` is the time of the failure on the coordinator's monotonic clock: the node may have restarted since.
        """
        self._failure_tickets[node] = int(at * 1e9)

    @property
    def held_bytes(self) -> int:
        """Bytes of all messages that are here and not delivered yet. For tests."""
        return sum(pending.message.wire_size for pending in self._pending.values() if pending.message is not None)

    @property
    def unannounced(self) -> int:
        """Messages that are here and that the network process has not reported. For tests."""
        return sum(not pending.announced for pending in self._pending.values())

    def is_missing(self, sender: NodeId, ticket: int) -> bool:
        """Whether a message is announced and not here. For tests."""
        return ticket in self._missing.get(sender, ())

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._queue.close()

    def _submit(self, to: NodeId, message: Message, since: float, waits: bool) -> int:
        if self._budget is not None:
            self._budget.expect(message.wire_size)  # peers send what this node sends
        self._tickets += 1
        self._socket.send(encode(Submission(self._tickets, to, message.wire_size, since, waits)))
        self._loop.call_soon(self._drain)  # sending may consume ZeroMQ's signal that a message has arrived
        return self._tickets

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for report in decode_network_reports(frame):
                if isinstance(report, Arrival):
                    self._announce(report)
                elif (future := self._departures.get(report.ticket)) is not None and not future.done():
                    future.set_result(report)

    def _announce(self, arrival: Arrival) -> None:
        key = arrival.sender, arrival.ticket
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(announced=True)
            self._limit_missing(arrival.sender, arrival.ticket)
        elif pending.queued and arrival.time is not None:
            return  # it is due already
        pending.announced = True
        pending.due = arrival.time
        if pending.message is not None:
            self._schedule(key, pending)

    def _schedule(self, key: MessageKey, pending: _Pending) -> None:
        """Deliver an announced message when it is due, or forget it if it is lost."""
        if pending.due is None:
            del self._pending[key]
        elif pending.due < math.inf:
            self._queue.put(pending.due, (key, pending))

    def _release(self, item: tuple[MessageKey, _Pending]) -> None:
        key, pending = item
        if self._pending.get(key) is not pending or pending.message is None:
            return  # it was lost after all
        del self._pending[key]
        sender, ticket = key
        if pending.message.kind not in REJOIN_KINDS or ticket > self._failure_tickets.get(sender, 0):
            self._deliver(pending.message)

    def _limit_unannounced(self, message: Message) -> None:
        """Evict unannounced messages beyond the budget, one of which is `message`."""
        if self._budget is None or not self._budget.may_exceed(message):
            return
        self._drain()  # reports of some of them may have arrived
        unannounced = [
            (key, pending.message)
            for key, pending in self._pending.items()
            if not pending.announced and pending.message is not None
        ]
        kept = set(map(id, self._budget.select([message for _, message in unannounced], ())))
        for key, message in unannounced:
            if id(message) not in kept:
                del self._pending[key]
                self.dropped += 1

    def _limit_missing(self, sender: NodeId, ticket: int) -> None:
        """Remember that a message is missing, and forget the sender's oldest missing message beyond the limit."""
        tickets = self._missing.setdefault(sender, {})
        tickets[ticket] = None
        if len(tickets) > MAX_ANNOUNCED:
            oldest = next(iter(tickets))
            del tickets[oldest]
            del self._pending[sender, oldest]


def identity(node: NodeId, run: str) -> bytes:
    """The node's ZeroMQ identity at the network process; ZeroMQ reserves identities that begin with a zero byte.

    It contains the run's secret: a process that does not belong to the run can neither report in the name of a node nor
    take over its identity. It ends with random bytes, because a restarted node needs another identity than the failed
    one, whose connection may still be open.
    """
    return b"n%d %s " % (node, run.encode()) + secrets.token_bytes(8)


def node_of(identity: bytes, run: str) -> NodeId:
    """The node with this identity. Raises `MessageError` if it does not contain the run's secret."""
    match = IDENTITY.fullmatch(identity)
    if match is None or not hmac.compare_digest(match[2], run.encode()):
        raise MessageError("a connection without the secret of this run")
    return int(match[1])
