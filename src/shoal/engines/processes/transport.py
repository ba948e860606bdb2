"""TCP between nodes, over ZeroMQ: one socket to listen on, one to each peer, opened when first needed.

A message is encoded and copied once, however many peers it goes to; ZeroMQ counts the references. Arrays that come
in are views of ZeroMQ's memory. Nothing here knows where a peer runs: it has an endpoint.

A message may have a ticket, in its address. The receiver sends it back, with nothing but the run's name behind it, as
the receipt that `transmit` waits for; receipts are no messages, and nobody counts them. Where messages are shaped by
the model, tickets are what the network's process knows them by, and nobody returns them.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import zmq

from shoal.engines.processes.sealing import Seal, authenticated_sender
from shoal.errors import LaunchError, MessageError
from shoal.message import Message, address, decode, ticket_of
from shoal.types import NodeId

# ZeroMQ's flags as plain numbers: pyzmq's own are enumerations, whose arithmetic shows in a profile.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
NO_ENDPOINT = ""
"""The endpoint of a peer that has died."""
MESSAGES_PER_TURN = 256
"""Messages that are taken in before others have their turn: a flood must not keep the node from its work."""
MAX_LATE_RECEIPTS = 1000
"""Receipts that wait until a peer takes them; of more the last ones. Who waits for so many does not read them."""
NO_ADDRESS = (zmq.EINVAL, zmq.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO)
"""What ZeroMQ says of an endpoint that it cannot connect to, ever."""
LINGER_MS = 30_000
"""How long a closed connection still tries to deliver what was handed to it."""
SLOWEST = 12_500.0
"""Bytes per second: a receipt is waited for as long as the message takes at this pace, beside the usual patience."""


class Transport:
    """A node's sockets. `deliver` is called with every good message, `reject` with the reason for every other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        id: NodeId,
        run: str,
        host: str,
        announce: str | None = None,
        port: int | None,
        max_message_bytes: int,
        connections: int,
        send_timeout: float,
        deliver: Callable[[Message], None],
        reject: Callable[[str], None],
        seal: Seal | None = None,
    ) -> None:
        self._context = context
        self._id = id
        self._run = run
        self._name = run.encode()
        self._connections = connections
        self._send_timeout = send_timeout
        self._deliver = deliver
        self._reject = reject
        self._seal = seal
        self._endpoints: list[str] = []
        self._open: OrderedDict[NodeId, zmq.Socket[bytes]] = OrderedDict()
        self._stalled: set[NodeId] = set()
        self._gone: set[NodeId] = set()
        self.redeem: Callable[[Message, int], None] | None = None
        """Takes messages in place of `deliver`, with their tickets, where all messages have one."""
        self.unsent = 0
        """Messages given up because their peer took nothing for `send_timeout` seconds."""
        self._tickets = time.monotonic_ns()  # higher than all of a node that died and had the same id
        self._receipts: dict[int, tuple[NodeId, asyncio.Future[bool]]] = {}
        """The tickets of what was transmitted: to whom, and whether it is there."""
        self._late: dict[NodeId, tuple[asyncio.Task[None], deque[int]]] = {}
        """The tickets of receipts that could not be sent at once, and who sees to that: one task for each peer, for a
        peer that reads none of them would have the node do nothing else."""
        self._turn: asyncio.Handle | None = None
        """When more messages have come than are taken in at once."""
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.BACKLOG, 4096)
        if seal is not None:
            seal.secure_server(self._inbox)
        try:
            self._inbox.bind(f"tcp://{host}:{port if port is not None else '*'}")
        except zmq.ZMQError as error:
            self._inbox.close()
            where = f"{host}:{port if port is not None else '(any port)'}"
            raise LaunchError(
                f"cannot listen on {where}: {error.strerror}; processes.host must be an address of this machine, "
                "and processes.base_port the first of a free range, or absent to let the system choose"
            ) from error
        bound = self._inbox.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self.endpoint = f"tcp://{announce or host}:{bound.rpartition(':')[2]}"
        """Where other nodes find this one."""

    def start(self, endpoints: Sequence[str]) -> None:
        """Begin to take messages in; `endpoints` is where each node listens."""
        self._endpoints = list(endpoints)
        asyncio.get_running_loop().add_reader(self._inbox.FD, self._drain)
        self._drain()

    async def send(self, to: NodeId, message: Message, ticket: int | None = None) -> bool:
        """Whether ZeroMQ has taken the message, in the end. A ticket travels in its address."""
        if to in self._gone:
            return False
        frames = [zmq.Frame(address(to, ticket), copy=True), *_frames(message)]
        if self._try(to, frames):
            self._stalled.discard(to)
            return True
        if await self._insist(to, frames):
            return True
        if to not in self._gone:
            self.unsent += 1
        return False

    async def transmit(self, to: NodeId, message: Message) -> bool:
        """As `send`, and wait for the peer's receipt: it has read the last of the message.

        False when the peer dies first, or nothing comes from it for long.
        """
        self._tickets += 1
        ticket = self._tickets
        receipt: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._receipts[ticket] = to, receipt
        try:
            if not await self.send(to, message, ticket):
                return False
            async with asyncio.timeout(self._send_timeout + message.wire_size / SLOWEST):
                return await receipt
        except TimeoutError:
            self.unsent += 1
            return False
        finally:
            del self._receipts[ticket]

    def mark_failed(self, node: NodeId) -> None:
        """`node` has died: drop what was to be sent to it."""
        self._gone.add(node)
        self.move(node, NO_ENDPOINT)

    def mark_rejoined(self, node: NodeId) -> None:
        """`node` is spoken to again."""
        self._gone.discard(node)
        self._stalled.discard(node)

    def move(self, node: NodeId, endpoint: str) -> None:
        """`node` listens elsewhere from now on."""
        socket = self._open.pop(node, None)
        if socket is not None:
            socket.close(linger=0)
        if node in self._late and self._endpoints[node] != NO_ENDPOINT:  # else they wait for where it listens
            self._late.pop(node)[0].cancel()
        if node < len(self._endpoints):
            self._endpoints[node] = endpoint
        for to, receipt in self._receipts.values():
            if to == node and not receipt.done():
                receipt.set_result(False)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.FD)
        if self._turn is not None:
            self._turn.cancel()
        for task, _ in self._late.values():
            task.cancel()
        self._inbox.close()
        for socket in self._open.values():
            socket.close(linger=0)
        self._open.clear()

    def _socket(self, to: NodeId) -> zmq.Socket[bytes]:
        """The open connection to a peer, or a new one. Raises `ZMQError` where no more can be opened just now."""
        socket = self._open.get(to)
        if socket is None:
            if len(self._open) >= self._connections:
                self._open.popitem(last=False)[1].close(linger=LINGER_MS)
            socket = self._context.socket(zmq.PUSH)
            try:
                if self._seal is not None:
                    self._seal.secure_client(socket, self._seal.key(to))
                socket.connect(self._endpoints[to])
            except BaseException:
                socket.close(linger=0)  # or it would hold a place for good
                raise
            self._open[to] = socket
        self._open.move_to_end(to)
        return socket

    def _try(self, to: NodeId, frames: list[zmq.Frame]) -> bool:
        """Hand the frames over, unless the queue to the peer is full, or closed connections still hold their places, or
        the peer has spoken up before it was said where it listens."""
        if self._endpoints[to] == NO_ENDPOINT:
            return False
        try:
            socket = self._socket(to)
            for frame in frames[:-1]:
                socket.send(frame, NOBLOCK_MORE, copy=False)
            socket.send(frames[-1], NOBLOCK, copy=False)  # only the first part can be refused
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EMFILE):
                raise
            return False
        return True

    async def _insist(self, to: NodeId, frames: list[zmq.Frame]) -> bool:
        """Try until the peer has the frames, is dead, or has taken nothing for `send_timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + self._send_timeout
        while to not in self._stalled:
            await asyncio.sleep(0.005)
            if to in self._gone:
                return False
            if self._try(to, frames):
                return True
            if asyncio.get_running_loop().time() > deadline:
                self._stalled.add(to)
        return False

    def _acknowledge(self, sender: NodeId, ticket: int) -> None:
        if sender in self._late:
            self._late[sender][1].append(ticket)  # after those before it
            return
        try:
            sent = self._try(sender, self._receipt(sender, ticket))
        except zmq.ZMQError as error:
            if error.errno not in NO_ADDRESS:
                raise
            return  # it listens nowhere, and gets none
        if not sent and sender not in self._gone and sender not in self._stalled:
            tickets = deque([ticket], maxlen=MAX_LATE_RECEIPTS)
            self._late[sender] = asyncio.get_running_loop().create_task(self._catch_up(sender, tickets)), tickets

    async def _catch_up(self, to: NodeId, tickets: deque[int]) -> None:
        """Send the receipts that are late, and those that are by then, until the peer takes no more."""
        try:
            while tickets:
                frames = self._receipt(to, tickets.popleft())
                if not self._try(to, frames) and not await self._insist(to, frames):
                    return
        finally:
            if to in self._late and self._late[to][1] is tickets:  # else the peer has moved, and there are others
                del self._late[to]

    def _receipt(self, to: NodeId, ticket: int) -> list[zmq.Frame]:
        return [zmq.Frame(address(to, ticket), copy=True), zmq.Frame(self._name, copy=True)]

    def _settle(self, ticket: int, sender: str | None) -> None:
        """The receipt for a ticket has come; maybe nobody waits for it any longer."""
        to, receipt = self._receipts.get(ticket, (None, None))
        if receipt is None or receipt.done():
            return
        if sender is not None and sender != str(to):
            raise MessageError(f"a receipt of node {sender}'s for what was sent to node {to}")
        receipt.set_result(True)

    def _drain(self) -> None:
        """Take in all that has come. ZeroMQ signals once for many messages, so stop only when there are none: after so
        many that others should have their turn, or when something is raised, go on in the next one."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        is_empty = False
        try:
            is_empty = self._take_in()
        finally:
            if not is_empty and not self._inbox.closed:
                self._turn = asyncio.get_running_loop().call_soon(self._drain)

    def _take_in(self) -> bool:
        """Some hundreds of messages; whether there are no more."""
        receive, run = self._inbox.recv, self._run
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = [receive(NOBLOCK, copy=False)]
            except zmq.Again:
                return True
            while frames[-1].more:
                frames.append(receive(NOBLOCK, copy=False))  # the parts of a message come all at once
            try:
                sender = None if self._seal is None else authenticated_sender(frames[0])
                ticket = ticket_of(frames.pop(0).bytes, self._id)
                if ticket is not None and len(frames) == 1 and frames[0].bytes == self._name:
                    self._settle(ticket, sender)
                    continue
                message = decode([frame.bytes if i == 0 else frame.buffer for i, frame in enumerate(frames)], run)
                if message.sender >= len(self._endpoints):
                    raise MessageError(f"there is no node {message.sender}")
                if sender is not None and sender != str(message.sender):
                    raise MessageError(f"a message of node {sender}'s that says it is node {message.sender}'s")
                if ticket is None and self.redeem is not None:
                    raise MessageError("the message has no ticket")
            except MessageError as error:
                self._reject(str(error))
                continue
            if ticket is None:
                self._deliver(message)
            elif self.redeem is not None:
                self.redeem(message, ticket)
            else:
                self._acknowledge(message.sender, ticket)
                self._deliver(message)
        return False


def _frames(message: Message) -> list[zmq.Frame]:
    """The message in ZeroMQ's memory: copied there for the first recipient, shared by the others."""
    if message.encoded is None:
        message.encoded = [zmq.Frame(frame, copy=True) for frame in message.frames()]
    frames: list[zmq.Frame] = message.encoded
    return frames
