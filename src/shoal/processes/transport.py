"""TCP between nodes, over ZeroMQ: one socket to listen on, one to each peer, opened when first needed.

A message is encoded and copied once, however many peers it goes to; ZeroMQ counts the references. Arrays that come
in are views of ZeroMQ's memory. Nothing here knows where a peer runs: it has an endpoint.
"""

from __future__ import annotations

import asyncio
import errno
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence

import zmq

from shoal.errors import LaunchError, MessageError
from shoal.message import Message, decode
from shoal.topologies.graph import NodeId

# ZeroMQ's flags as plain numbers: pyzmq's own are enumerations, whose arithmetic shows in a profile.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
TICKET = struct.Struct("<Q")
NOWHERE = ""
"""The endpoint of a peer that has died."""
LINGER_MS = 30_000
"""How long a closed connection still tries to deliver what was handed to it."""


class Transport:
    """A node's sockets. `deliver` is called with every good message, `reject` with the reason for every other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        run: str,
        host: str,
        announce: str | None = None,
        port: int | None,
        max_message_bytes: int,
        connections: int,
        send_timeout: float,
        deliver: Callable[[Message], None],
        reject: Callable[[str], None],
    ) -> None:
        self._context = context
        self._run = run
        self._connections = connections
        self._send_timeout = send_timeout
        self._deliver = deliver
        self._reject = reject
        self._endpoints: list[str] = []
        self._open: OrderedDict[NodeId, zmq.Socket[bytes]] = OrderedDict()
        self._stalled: set[NodeId] = set()
        self._gone: set[NodeId] = set()
        self.redeem: Callable[[Message, int], None] | None = None
        """Takes messages in place of `deliver`, with their tickets, where all messages have one."""
        self.unsent = 0
        """Messages given up because their peer took nothing for `send_timeout` seconds."""
        self._inbox = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.BACKLOG, 4096)
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
        """Whether ZeroMQ has taken the message, in the end. A ticket travels in front of it."""
        if to in self._gone:
            return False
        frames = _frames(message)
        if ticket is not None:
            frames = [zmq.Frame(TICKET.pack(ticket), copy=True), *frames]
        if self._try(to, frames):
            self._stalled.discard(to)
            return True
        deadline = asyncio.get_running_loop().time() + self._send_timeout
        while to not in self._stalled:
            await asyncio.sleep(0.005)
            if to in self._gone:
                return False
            if self._try(to, frames):
                return True
            if asyncio.get_running_loop().time() > deadline:
                self._stalled.add(to)
        self.unsent += 1
        return False

    def lose(self, node: NodeId) -> None:
        """`node` has died: drop what was to be sent to it."""
        self._gone.add(node)
        self.move(node, NOWHERE)

    def regain(self, node: NodeId) -> None:
        """`node` is spoken to again."""
        self._gone.discard(node)
        self._stalled.discard(node)

    def move(self, node: NodeId, endpoint: str) -> None:
        """`node` listens elsewhere from now on."""
        socket = self._open.pop(node, None)
        if socket is not None:
            socket.close(linger=0)
        if node < len(self._endpoints):
            self._endpoints[node] = endpoint

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.FD)
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
            socket.connect(self._endpoints[to])
            self._open[to] = socket
        self._open.move_to_end(to)
        return socket

    def _try(self, to: NodeId, frames: list[zmq.Frame]) -> bool:
        """Hand the frames over, unless the queue to the peer is full, or closed connections still hold their places, or
        the peer has spoken up before it was said where it listens."""
        if self._endpoints[to] == NOWHERE:
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

    def _drain(self) -> None:
        """Take in all that has come. ZeroMQ signals once for many messages, so stop only when there are none."""
        receive, run = self._inbox.recv, self._run
        while True:
            try:
                frames = [receive(NOBLOCK, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(receive(NOBLOCK, copy=False))  # the parts of a message come all at once
            try:
                ticket = _ticket(frames.pop(0)) if self.redeem is not None else 0
                message = decode([frame.bytes if i == 0 else frame.buffer for i, frame in enumerate(frames)], run)
                if message.sender >= len(self._endpoints):
                    raise MessageError(f"there is no node {message.sender}")
            except MessageError as error:
                self._reject(str(error))
                continue
            if self.redeem is not None:
                self.redeem(message, ticket)
            else:
                self._deliver(message)


def _ticket(frame: zmq.Frame) -> int:
    try:
        number: int = TICKET.unpack(frame.bytes)[0]
    except struct.error:
        raise MessageError("the message has no ticket") from None
    return number


def _frames(message: Message) -> list[zmq.Frame]:
    """The message in ZeroMQ's memory: copied there for the first recipient, shared by the others."""
    if message.encoded is None:
        message.encoded = [zmq.Frame(frame, copy=True) for frame in message.frames()]
    frames: list[zmq.Frame] = message.encoded
    return frames
