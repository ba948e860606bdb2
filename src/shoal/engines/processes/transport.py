"""TCP between nodes, over ZeroMQ: one socket to listen on, and one to each peer, opened when it is first needed.

A message is encoded and copied once, however many peers receive it: ZeroMQ counts the references. Arrays of received
messages are views of ZeroMQ's memory. The transport knows a peer only by its endpoint, not by the machine it runs on.

A message may have a ticket, in its address. The receiver returns the ticket, followed only by the run's name, as the
receipt that `send_and_wait` waits for. Receipts are not messages, and are not counted. Where the network model shapes
messages, the network process knows them by their tickets, and receivers return none.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from shoal.engines.processes.sealing import Seal, authenticated_sender
from shoal.errors import LaunchError, MessageError, NodeError, NoFreePortError
from shoal.message import Message, address, decode, ticket_of
from shoal.types import NodeId

# ZeroMQ's flags as plain integers: pyzmq's are enumerations, whose arithmetic shows in a profile.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
NO_ENDPOINT = ""
"""The endpoint of a failed peer."""
MESSAGES_PER_TURN = 256
"""Messages that are read before other tasks run: a flood must not keep the node from its work."""
MAX_LATE_RECEIPTS = 1000
"""Receipts that wait until a peer accepts them; older ones are dropped. A peer with so many does not read them."""
UNUSABLE_ENDPOINT_ERRORS = (zmq.EINVAL, zmq.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO)
"""ZeroMQ's error numbers for an endpoint that it can never connect to."""
LINGER_MS = 30_000
"""How long a closed connection still tries to deliver its messages."""
MIN_BYTES_PER_SECOND = 12_500.0
"""The rate of the slowest link: a receipt may take `send_timeout`, and the time of the message at this rate."""


NO_FREE_PORT = (
    "the system has no free port left; use fewer nodes, end other programs, extend the range of ports (Linux: sysctl "
    "net.ipv4.ip_local_port_range), or, for nodes, set processes.base_port to a port outside of that range"
)


def bind_to_any_port(socket: zmq.Socket[bytes], host: str) -> None:
    """Have a socket listen at a port that the system chooses. Raises `NoFreePortError` and `ZMQError`."""
    try:
        socket.bind(f"tcp://{host}:*")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise NoFreePortError(f"cannot listen on {host}: {NO_FREE_PORT}") from error
        raise


@dataclass(frozen=True)
class TransportSettings:
    """Where a node listens, and the limits of its sockets."""

    run: str
    """The run's identifier, which every message carries."""
    host: str
    """The address at which the node listens."""
    max_message_bytes: int
    connections: int
    """The most connections to peers that are open at the same time."""
    send_timeout: float
    """Seconds after which a message that its peer does not accept is dropped."""
    port: int | None = None
    """The port at which the node listens; None: any free port."""
    announce: str | None = None
    """The address at which peers connect to the node; None: `host`."""


class Transport:
    """A node's sockets. Calls `deliver` with every valid message, and `reject` with the reason for every other one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        id: NodeId,
        settings: TransportSettings,
        *,
        deliver: Callable[[Message], None],
        reject: Callable[[str], None],
        seal: Seal | None = None,
    ) -> None:
        self._context = context
        self._id = id
        self._run = settings.run
        self._name = settings.run.encode()
        self._connections = settings.connections
        self._send_timeout = settings.send_timeout
        self._max_message_bytes = settings.max_message_bytes
        self._deliver = deliver
        self._reject = reject
        self._seal = seal
        self._endpoints: list[str] = []
        self._open: OrderedDict[NodeId, zmq.Socket[bytes]] = OrderedDict()
        self._stalled: set[NodeId] = set()
        self._failed: set[NodeId] = set()
        self._deliver_with_ticket: Callable[[Message, int], None] | None = None
        self.unsent = 0
        """Messages dropped because their peer accepted nothing for `send_timeout` seconds."""
        self._tickets = time.monotonic_ns()  # higher than every ticket of a failed node that had the same id
        self._receipts: dict[int, tuple[NodeId, asyncio.Future[bool]]] = {}
        """The receipts that `send_and_wait` waits for, by ticket: the receiver, and whether the message has arrived."""
        self._late: dict[NodeId, tuple[asyncio.Task[None], deque[int]]] = {}
        """The tickets of receipts that could not be sent at once, and the task that sends them. One task per peer: a
        peer that reads no receipts must not occupy the node."""
        self._next_turn: asyncio.Handle | None = None
        """Reads further messages, where more have arrived than are read in one turn."""
        self._inbox = self._listen(settings)
        bound = self._inbox.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self.endpoint = f"tcp://{settings.announce or settings.host}:{bound.rpartition(':')[2]}"
        """Where other nodes connect to this node."""

    def _listen(self, settings: TransportSettings) -> zmq.Socket[bytes]:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.BACKLOG, 4096)
        if self._seal is not None:
            self._seal.secure_server(inbox)
        host, port = settings.host, settings.port
        try:
            if port is None:
                bind_to_any_port(inbox, host)
            else:
                inbox.bind(f"tcp://{host}:{port}")
        except NoFreePortError:
            inbox.close()
            raise
        except zmq.ZMQError as error:
            inbox.close()
            raise LaunchError(
                f"cannot listen on {host}:{port or '(any port)'}: {error.strerror}; processes.host must be an address "
                "of this machine, and processes.base_port the first of a free range, or absent to let the system "
                "choose"
            ) from error
        return inbox

    def require_tickets(self, deliver: Callable[[Message, int], None]) -> None:
        """Deliver every message with its ticket, send no receipts, and reject messages without a ticket."""
        self._deliver_with_ticket = deliver

    def start(self, endpoints: Sequence[str]) -> None:
        """Start to receive messages; node i listens at `endpoints[i]`."""
        self._endpoints = list(endpoints)
        asyncio.get_running_loop().add_reader(self._inbox.FD, self._drain)
        self._drain()

    async def send(self, to: NodeId, message: Message, ticket: int | None = None) -> bool:
        """Hand a message to ZeroMQ, with the ticket in its address. Returns False if it was dropped.

        Raises `NodeError` if the message is larger than its receivers accept: they would disconnect this node.
        """
        if to in self._failed:
            return False
        if message.wire_size > self._max_message_bytes:
            raise NodeError(
                f"a message of {message.wire_size / 2**20:.3g} MiB, and its receivers accept at most "
                f"{self._max_message_bytes / 2**20:.3g}; set processes.max_message_mib to a larger value"
            )
        frames = [zmq.Frame(address(to, ticket), copy=True), *_frames(message)]
        if self._try(to, frames):
            self._stalled.discard(to)
            return True
        if await self._retry(to, frames):
            return True
        if to not in self._failed:
            self.unsent += 1
        return False

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        """Send a message, and wait for the receipt of the peer, which has then read all of it.

        Returns False if the peer fails before that, or if the receipt does not arrive in time.
        """
        self._tickets += 1
        ticket = self._tickets
        receipt: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._receipts[ticket] = to, receipt
        try:
            if not await self.send(to, message, ticket):
                return False
            async with asyncio.timeout(self._send_timeout + message.wire_size / MIN_BYTES_PER_SECOND):
                return await receipt
        except TimeoutError:
            self.unsent += 1
            return False
        finally:
            del self._receipts[ticket]

    def mark_failed(self, node: NodeId) -> None:
        """Drop the messages to `node` that are not sent yet, and send it no more."""
        self._failed.add(node)
        self.move(node, NO_ENDPOINT)

    def mark_rejoined(self, node: NodeId) -> None:
        """Send messages to `node` again."""
        self._failed.discard(node)
        self._stalled.discard(node)

    def move(self, node: NodeId, endpoint: str) -> None:
        """Connect to `node` at a new endpoint from now on."""
        socket = self._open.pop(node, None)
        if socket is not None:
            socket.close(linger=0)
        if node in self._late and self._endpoints[node] != NO_ENDPOINT:  # else they wait for the endpoint
            self._late.pop(node)[0].cancel()
        if node < len(self._endpoints):
            self._endpoints[node] = endpoint
        for to, receipt in self._receipts.values():
            if to == node and not receipt.done():
                receipt.set_result(False)

    @property
    def open_connections(self) -> int:
        """The number of peers that the node has a connection to. For tests."""
        return len(self._open)

    @property
    def stalled_peers(self) -> frozenset[NodeId]:
        """The peers that accepted nothing for `send_timeout` seconds. For tests."""
        return frozenset(self._stalled)

    def late_receipts(self, node: NodeId) -> list[int]:
        """The tickets of receipts that wait until `node` accepts them, the oldest first. For tests."""
        return list(self._late[node][1]) if node in self._late else []

    def close(self) -> None:
        if self._inbox.closed:
            return
        asyncio.get_running_loop().remove_reader(self._inbox.FD)
        if self._next_turn is not None:
            self._next_turn.cancel()
        for task, _ in self._late.values():
            task.cancel()
        self._inbox.close()
        for socket in self._open.values():
            socket.close(linger=0)
        self._open.clear()

    def _socket(self, to: NodeId) -> zmq.Socket[bytes]:
        """Return the open connection to a peer, or open one. Raises `ZMQError` if none can be opened at present."""
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
                socket.close(linger=0)  # an open socket would count towards ZeroMQ's limit until the end
                raise
            self._open[to] = socket
        self._open.move_to_end(to)
        return socket

    def _try(self, to: NodeId, frames: list[zmq.Frame]) -> bool:
        """Hand the frames to ZeroMQ, unless the queue to the peer is full, closed connections still linger, or the
        peer's endpoint is not known yet, though it has sent a message."""
        if self._endpoints[to] == NO_ENDPOINT:
            return False
        try:
            socket = self._socket(to)
            for frame in frames[:-1]:
                socket.send(frame, NOBLOCK_MORE, copy=False)
            socket.send(frames[-1], NOBLOCK, copy=False)  # ZeroMQ rejects only first parts
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EMFILE):
                raise
            return False
        return True

    async def _retry(self, to: NodeId, frames: list[zmq.Frame]) -> bool:
        """Retry until the peer accepts the frames, fails, or has accepted nothing for `send_timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + self._send_timeout
        while to not in self._stalled:
            await asyncio.sleep(0.005)
            if to in self._failed:
                return False
            if self._try(to, frames):
                return True
            if asyncio.get_running_loop().time() > deadline:
                self._stalled.add(to)
        return False

    def _acknowledge(self, sender: NodeId, ticket: int) -> None:
        if sender in self._late:
            self._late[sender][1].append(ticket)  # after the earlier ones
            return
        try:
            sent = self._try(sender, self._receipt(sender, ticket))
        except zmq.ZMQError as error:
            if error.errno not in UNUSABLE_ENDPOINT_ERRORS:
                raise
            return  # the peer's endpoint is unusable: it gets no receipts
        if not sent and sender not in self._failed and sender not in self._stalled:
            tickets = deque([ticket], maxlen=MAX_LATE_RECEIPTS)
            self._late[sender] = (
                asyncio.get_running_loop().create_task(self._send_late_receipts(sender, tickets)),
                tickets,
            )

    async def _send_late_receipts(self, to: NodeId, tickets: deque[int]) -> None:
        """Send the receipts that are late, and those added meanwhile, until the peer accepts no more."""
        try:
            while tickets:
                frames = self._receipt(to, tickets.popleft())
                if not self._try(to, frames) and not await self._retry(to, frames):
                    return
        finally:
            if to in self._late and self._late[to][1] is tickets:  # else the peer has moved, and has a new queue
                del self._late[to]

    def _receipt(self, to: NodeId, ticket: int) -> list[zmq.Frame]:
        return [zmq.Frame(address(to, ticket), copy=True), zmq.Frame(self._name, copy=True)]

    def _settle(self, ticket: int, sender: str | None) -> None:
        """Complete the `send_and_wait` that waits for this receipt, if it still waits."""
        to, receipt = self._receipts.get(ticket, (None, None))
        if receipt is None or receipt.done():
            return
        if sender is not None and sender != str(to):
            raise MessageError(f"node {sender} returned a receipt for a message to node {to}")
        receipt.set_result(True)

    def _drain(self) -> None:
        """Read all messages that have arrived.

        ZeroMQ signals once for many messages. So reading stops only when there are none; after `MESSAGES_PER_TURN`
        messages, or after an exception, it continues when other tasks have run.
        """
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        is_empty = False
        try:
            is_empty = self._read_some()
        finally:
            if not is_empty and not self._inbox.closed:
                self._next_turn = asyncio.get_running_loop().call_soon(self._drain)

    def _read_some(self) -> bool:
        """Read up to `MESSAGES_PER_TURN` messages. Returns whether there are no more."""
        receive, run = self._inbox.recv, self._run
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = [receive(NOBLOCK, copy=False)]
            except zmq.Again:
                return True
            while frames[-1].more:
                frames.append(receive(NOBLOCK, copy=False))  # all parts of a message arrive together
            try:
                sender = None if self._seal is None else authenticated_sender(frames[0])
                ticket = ticket_of(frames.pop(0).bytes, self._id)
                if ticket is not None and len(frames) == 1 and frames[0].bytes == self._name:
                    self._settle(ticket, sender)
                    continue
                message = decode([frame.bytes if i == 0 else frame.buffer for i, frame in enumerate(frames)], run)
                if message.sender >= len(self._endpoints):
                    raise MessageError(f"the sender is node {message.sender}, which does not exist")
                if sender is not None and sender != str(message.sender):
                    raise MessageError(f"node {sender} sent a message in the name of node {message.sender}")
                if ticket is None and self._deliver_with_ticket is not None:
                    raise MessageError("the message has no ticket")
            except MessageError as error:
                self._reject(str(error))
                continue
            if ticket is None:
                self._deliver(message)
            elif self._deliver_with_ticket is not None:
                self._deliver_with_ticket(message, ticket)
            else:
                self._acknowledge(message.sender, ticket)
                self._deliver(message)
        return False


def _frames(message: Message) -> list[zmq.Frame]:
    """Return the message in ZeroMQ's memory: copied for the first receiver, shared by the others."""
    if message.encoded is None:
        message.encoded = [zmq.Frame(frame, copy=True) for frame in message.frames()]
    frames: list[zmq.Frame] = message.encoded
    return frames
