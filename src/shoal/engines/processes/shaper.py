"""A node's end of the network model, where nodes are processes.

Messages themselves cross the machine at once. The network's own process works out what the model does to each, and
the receiver keeps a message until it is due: nobody needs to be root, and whatever links the model has, those in the
middle of the network too, are shared as the simulation shares them. While a node trains, its event loop goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import secrets
import time
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
import zmq

from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.transport import Transport
from shoal.engines.rejoining import REJOIN_KINDS
from shoal.message import Message
from shoal.message_budget import MessageBudget
from shoal.types import NodeId

MAX_ANNOUNCED = 100_000
"""Of so many messages of a sender it is remembered when they are due though they are not here yet. That is more than
sockets hold between two nodes: what was told before was given up by its sender, or never sent."""
PROMPT = 0.02
"""Seconds: a message that a task hands over so soon after its last one had left follows it without a gap. What it takes
to learn that the last one has left is the shaper's time, not the node's."""


class Registration(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A node listens: what is said to it before that finds nobody."""

    since: float
    """When it began, on the machine's monotonic clock."""


class Submission(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A node has sent a message."""

    ticket: int
    to: NodeId
    size: Annotated[int, msgspec.Meta(ge=0)]
    since: float
    """When, on the machine's monotonic clock."""
    waits: bool
    """Whether the sender wants to know when it has left."""


class Departure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the sender: the last of a message has left; or it did not get out."""

    ticket: int
    time: float
    was_sent: bool


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the receiver: a message is there at a time; or it never will be."""

    sender: NodeId
    ticket: int
    time: float | None
    """Infinite as long as all that is known is that the message is on its way."""


NodeReport: TypeAlias = Registration | Submission
NetworkReport: TypeAlias = Departure | Arrival
encode = msgspec.msgpack.Encoder().encode
decode_node_report = msgspec.msgpack.Decoder(NodeReport).decode
decode_network_reports = msgspec.msgpack.Decoder(list[NetworkReport]).decode


class Shaper:
    """Sends by the model, and delivers by it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        id: NodeId,
        network: str,
        transport: Transport,
        deliver: Callable[[Message], None],
        seal: Seal | None = None,
        key: bytes | None = None,
        budget: MessageBudget | None = None,
    ) -> None:
        """`key` is that of the network's process, where links are sealed. `budget` is for what it has not told of."""
        self._transport = transport
        self._deliver = deliver
        self._budget = budget
        self.dropped = 0
        """Messages that the network did not tell of, and for which there was no room."""
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        # ZeroMQ gives a name to whoever takes it last. Where links are sealed nobody else can know this node's.
        name = identity(id) if seal is None else identity(id) + secrets.token_bytes(16)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if seal is not None:
            seal.secure_client(self._socket, key)
        self._socket.connect(network)
        self._socket.send(encode(Registration(self._loop.time())))
        self._tickets = time.monotonic_ns()  # higher than all of a node that died and had the same id
        self._leaving: dict[int, asyncio.Future[Departure]] = {}
        """Messages whose senders wait until they have left."""
        self._left: tuple[asyncio.Task[object] | None, float] = (None, 0.0)
        """Which task's message left last, and when."""
        self._here: dict[tuple[NodeId, int], Message] = {}
        """Messages of which nothing is known yet, and maybe never will be: anybody can make up a ticket."""
        self._under_way: dict[tuple[NodeId, int], Message] = {}
        """Messages that are here, and in the model on their way; how many these are is the model's business."""
        self._told = _Told()
        """When messages are due that are not here yet."""
        self._waiting: list[tuple[float, int, tuple[NodeId, int], Message]] = []
        """Messages that are here and not yet due: a heap."""
        self._lost: set[tuple[NodeId, int]] = set()
        """Those among them that got lost after all."""
        self._deaths: dict[NodeId, int] = {}
        """When nodes died, as tickets count."""
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._socket.FD, self._drain)
        self._drain()  # ZeroMQ signals that something has come to those only that have looked for it in vain

    async def send(self, to: NodeId, message: Message) -> bool:
        ticket = self._post(to, message, self._loop.time(), waits=False)
        return await self._transport.send(to, message, ticket)

    async def transmit(self, to: NodeId, message: Message) -> bool:
        now = self._loop.time()
        task, left = self._left
        prompt = task is asyncio.current_task() and now - left < PROMPT
        ticket = self._post(to, message, left if prompt else now, waits=True)
        future = self._leaving[ticket] = self._loop.create_future()
        try:
            if not await self._transport.send(to, message, ticket):
                return False
            said: Departure = await future
        finally:
            del self._leaving[ticket]
        self._left = asyncio.current_task(), said.time
        return said.was_sent

    def take(self, message: Message, ticket: int) -> None:
        """A message has come over the machine."""
        key = message.sender, ticket
        if key in self._told:
            self._place(key, message, self._told.pop(key))
            return
        self._here[key] = message
        if self._budget is not None and self._budget.may_exceed(message):
            self._drain()  # word of some of them may have come
            kept = set(map(id, self._budget.select(list(self._here.values()), ())))
            self.dropped += len(self._here) - len(kept)
            self._here = {key: message for key, message in self._here.items() if id(message) in kept}

    def mark_failed(self, node: NodeId, at: float) -> None:
        """`node` has died: what it sent arrives, but nobody counts on it because it asked for that before.

        `at` is when, on the machine's monotonic clock: word of it may come after the node is back.
        """
        self._deaths[node] = int(at * 1e9)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        if self._timer is not None:
            self._timer.cancel()

    def _post(self, to: NodeId, message: Message, since: float, waits: bool) -> int:
        if self._budget is not None:
            self._budget.expect(message.wire_size)  # what this node says, others say to it
        self._tickets += 1
        self._socket.send(encode(Submission(self._tickets, to, message.wire_size, since, waits)))
        self._loop.call_soon(self._drain)  # sending may have swallowed the signal that something has come
        return self._tickets

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for said in decode_network_reports(frame):
                if isinstance(said, Arrival):
                    self._hear(said)
                elif (future := self._leaving.get(said.ticket)) is not None and not future.done():
                    future.set_result(said)

    def _hear(self, said: Arrival) -> None:
        key = said.sender, said.ticket
        message = self._under_way.pop(key, None) or self._here.pop(key, None)
        if message is not None:
            self._place(key, message, said.time)
        elif said.time is not None or key in self._told:
            self._told.note(key, said.time)
        elif any(key == waiting for _, _, waiting, _ in self._waiting):
            self._lost.add(key)
        else:
            self._told.note(key, None)

    def _place(self, key: tuple[NodeId, int], message: Message, due: float | None) -> None:
        """Keep a message until it is due, if it ever is."""
        if due == math.inf:
            self._under_way[key] = message
        elif due is not None:
            self._keep(key, message, due)

    def _keep(self, key: tuple[NodeId, int], message: Message, due: float) -> None:
        self._arrivals += 1
        heapq.heappush(self._waiting, (due, self._arrivals, key, message))
        self._hand_over()

    def _hand_over(self) -> None:
        """Deliver what is due, and see to the rest in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0][0] <= self._loop.time():
            _, _, key, message = heapq.heappop(self._waiting)
            if key in self._lost:
                self._lost.discard(key)
            elif message.kind not in REJOIN_KINDS or key[1] > self._deaths.get(message.sender, 0):
                self._deliver(message)
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._hand_over)


class _Told:
    """Due times of messages that are not here yet, by sender and ticket: the last `MAX_ANNOUNCED` of each sender."""

    def __init__(self) -> None:
        self._times: dict[NodeId, dict[int, float | None]] = {}

    def __contains__(self, key: tuple[NodeId, int]) -> bool:
        sender, ticket = key
        return ticket in self._times.get(sender, ())

    def note(self, key: tuple[NodeId, int], due: float | None) -> None:
        sender, ticket = key
        times = self._times.setdefault(sender, {})
        times[ticket] = due
        if len(times) > MAX_ANNOUNCED:
            del times[next(iter(times))]

    def pop(self, key: tuple[NodeId, int]) -> float | None:
        sender, ticket = key
        return self._times[sender].pop(ticket)


def identity(node: NodeId) -> bytes:
    """A node's name on the network's socket; ZeroMQ keeps names that begin with a zero byte for itself."""
    return b"n%d" % node
