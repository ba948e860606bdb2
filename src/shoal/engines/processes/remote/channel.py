"""The socket between coordinator and agents: it listens or dials out, and it is sealed unless it stays on loopback."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import zmq

from shoal.engines.processes import control
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.handshakes import DialledConnection, HandshakeProblem, RejectionNotices
from shoal.engines.processes.sealing import Seal, authenticated_sender
from shoal.errors import LaunchError, MessageError

MAX_FRAME_BYTES = 2**20
"""A link splits messages into smaller parts."""
MESSAGES_PER_TURN = 256
ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+|\*):(?P<port>\d{1,5})")


def bracketed(host: str) -> str:
    """An address of IPv6 in brackets, as an address with a port needs them."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT. Raises `LaunchError`."""
        match = ADDRESS.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65535:
            raise LaunchError(f"{text!r}: expected an address HOST:PORT, such as 10.0.0.2:7700")
        return cls(match["host"], int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of this machine."""
        return self.host in ("*", "0.0.0.0", "[::]")

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Trust:
    """The keys of a coordinator or an agent."""

    pair: KeyPair | None = None
    """The own key pair; None: links stay on loopback addresses and are not sealed."""
    trusted: Mapping[str, bytes] = field(default_factory=dict)
    """The public keys of the processes that may connect, or that this process connects to, by name."""

    def require(self, address: Address, own: str, other: str) -> None:
        """Raise `LaunchError` if `address` is not on the loopback and keys are missing."""
        if self.pair is None and not self.trusted and address.is_loopback:
            return
        if self.pair is None or not self.trusted:
            raise LaunchError(
                f"{address}: machines authenticate each other by keys, which are optional only on loopback addresses; "
                f"make them with 'shoal keys make keys --name coordinator --name agent', and give --key "
                f"keys/{own}.key_secret --trust keys/{other}.key"
            )


@dataclass(frozen=True)
class Received:
    """What has arrived."""

    route: bytes
    """The connection that it came from; empty where there is only one."""
    header: protocol.Header
    frames: list[bytes]


class Channel:
    """One socket, to one peer that was dialled or to all that dial in."""

    def __init__(self, trust: Trust, notify: Callable[[str], None]) -> None:
        """`notify` shows unauthenticated connections to the user."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._rejected = RejectionNotices(notify)
        self._seal = None if trust.pair is None else Seal(self._context, trust.pair, self._rejected, time.monotonic)
        self._trust = trust
        self._socket: zmq.Socket[bytes] | None = None
        self._dialled: DialledConnection | None = None
        self._endpoint = ""
        self._listens = False

    def listen(self, address: Address) -> int:
        """Accept connections at `address`, and return the port; port 0 is any free one. Raises `LaunchError`."""
        socket = self._open(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._seal is not None:
            self._seal.secure_server(socket)
            self._seal.allow_all(self._trust.trusted)
        try:
            socket.bind(f"tcp://{address.host}:{address.port or '*'}")
        except zmq.ZMQError as error:
            raise LaunchError(
                f"cannot listen at {address}: {error.strerror}; choose another address or port"
            ) from error
        self._listens = True
        bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return int(bound.decode().rstrip("\0").rpartition(":")[2])

    def dial(self, address: Address, key: bytes | None, identity: bytes, watched: bool = False) -> None:
        """Connect to `address`, whose public key is `key`, and again whenever the connection breaks.

        `watched`: `handshake_problem` is called regularly.
        """
        socket = self._open(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if self._seal is not None:
            self._seal.secure_client(socket, key)
        if watched:
            self._dialled = DialledConnection(self._context, socket)
        self._endpoint = address.endpoint
        socket.connect(self._endpoint)

    def handshake_problem(self) -> HandshakeProblem | None:
        """Why the peer that was dialled makes no connection, if it has shown since the last call. Connects again."""
        problem = None if self._dialled is None else self._dialled.latest_problem()
        if problem is not None:
            self._opened.disconnect(self._endpoint)  # else ZeroMQ would not connect a second time
            self._opened.connect(self._endpoint)
        return problem

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._opened, zmq.POLLIN)
        for socket in () if self._seal is None else self._seal.sockets:
            poller.register(socket, zmq.POLLIN)

    def send(self, route: bytes, header: protocol.Header, frames: list[bytes]) -> None:
        """Send, or lose what cannot be sent: the peer is not connected."""
        head = [route] if self._listens else []
        try:
            self._opened.send_multipart([*head, protocol.encode(header), *frames], zmq.NOBLOCK)
        except zmq.Again:
            return  # the link sends it again
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> Iterator[Received]:
        """What has arrived, without waiting. Malformed messages are dropped."""
        if self._seal is not None:
            self._seal.answer_pending()
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._opened.recv_multipart(zmq.NOBLOCK, copy=False)
                route = frames.pop(0).bytes if self._listens else b""
                if self._seal is not None and self._listens:
                    authenticated_sender(frames[0])  # raises an error if the link is not sealed
                header = protocol.decode_header(frames[0].buffer)
            except zmq.Again:
                return
            except (MessageError, IndexError, *control.DECODE_ERRORS, msgspec.ValidationError):
                continue
            yield Received(route, header, [frame.bytes for frame in frames[1:]])

    def show_rejected(self) -> None:
        """Show how many connections were rejected since the last call."""
        self._rejected.end_period()

    def close(self, linger: float = 0.0) -> None:
        """Close the socket; wait at most `linger` seconds until what was sent has left."""
        if self._dialled is not None:
            self._dialled.close()
        if self._socket is not None:
            self._socket.close(linger=int(linger * 1000))
        if self._seal is not None:
            self._seal.close()
        self._context.term()
        self.show_rejected()

    @property
    def _opened(self) -> zmq.Socket[bytes]:
        assert self._socket is not None
        return self._socket

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        self._socket = socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket
