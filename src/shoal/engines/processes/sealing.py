"""Sealed links: CURVE (RFC 26) on every socket of a process, and the list of keys that may connect.

A process has one key pair. Its listening sockets are CURVE servers: a peer that connects needs the server's public key,
and a key of its own that is on the list. ZeroMQ asks for a decision by ZAP (RFC 27), on a socket inside the process.
The process answers in its own event loop, without a thread. Without an answer, ZeroMQ makes no connection.

Every frame that arrives over a sealed link carries the name of the key's owner, which no other peer can forge.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shoal.engines.processes.keys import KEY_BYTES, KeyPair
from shoal.errors import LaunchError, MessageError
from shoal.types import NodeId

ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"shoal"
"""Any name; without one, ZeroMQ would accept all connections where no ZAP handler answers."""
NETWORK_PROCESS = "network"
"""The name of the network process."""
KEY_WAIT_SECONDS = 5.0
"""How long a connection with an unknown key waits, where nodes get new keys when they start: a node may connect before
its key is announced."""
RECHECK_SECONDS = 1.0
"""How often waiting requests are checked for their timeout."""
HANDSHAKE_SECONDS = 30.0
"""How long a handshake may take; then ZeroMQ closes the connection."""
MAX_WAITING = 10_000
"""Requests that wait for their key's announcement. Further ones get no answer: ZeroMQ closes the connection after
`HANDSHAKE_SECONDS`, and the peer connects again."""
MONITORED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""The events that count connections which end before they present a key. Not ZeroMQ's events of protocol errors: where
those are monitored, libzmq 4.3 leaves a connection whose bytes were changed open and blocked."""


class Seal:
    """The key pair of a process, and the keys that may connect to it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pair: KeyPair,
        reject: Callable[[str], None],
        now: Callable[[], float],
        key_wait: float = 0.0,
    ) -> None:
        """`reject` is called with a description of every unauthenticated connection; `now` is a clock."""
        self.pair = pair
        self._context = context
        self._reject = reject
        self._now = now
        self.key_wait = key_wait
        """Seconds for which a connection with an unknown key waits for the key's announcement."""
        self._owners: dict[bytes, str] = {}
        """The owner's name of each public key, as text. The 32 bytes of a connection are converted to text, rather than
        the list to bytes: connections are few, and each of a thousand nodes has a thousand keys on its list."""
        self._keys: dict[str, bytes] = {}
        self._waiting: deque[tuple[float, list[bytes], bytes, str]] = deque()
        """Requests without an answer, the oldest first: their time, the answer's first frames, key and address."""
        self._zap = context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP)
        self._listening: list[zmq.Socket[bytes]] = []
        self._rejected_by_answer = 0
        """Connections rejected by an answer whose end is not counted yet."""
        self._counters: dict[zmq.Socket[Any], HandshakeCounter] = {}
        """One for the monitor of each listening socket."""
        self._last_endpoint = ""
        self._activity = asyncio.Event()
        """Set when `serve` has to check the sockets."""
        self._readers = ExitStack()
        """Removes the event loop's readers: once, and while the sockets are open. Afterwards other files may have their
        descriptors."""
        self.sockets: list[zmq.Socket[Any]] = [self._zap]
        """The sockets to poll: when one of them is readable, call `answer_pending`."""

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Encrypt a socket that is about to be bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._listening.append(socket)
        # Without a limit: at a limit ZeroMQ's thread waits for us, and we, to close the socket, wait for it.
        events = f"inproc://shoal.events.{len(self._listening)}"
        socket.monitor(events, MONITORED_EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(events)
        self.sockets.append(monitor)
        self._counters[monitor] = HandshakeCounter()

    def secure_client(self, socket: zmq.Socket[bytes], key: bytes | None) -> None:
        """Encrypt a socket that is about to connect to the owner of this public key, and to no other peer.

        Raises `LaunchError` if the key is not known: a sealed process sends nothing unencrypted.
        """
        if key is None:
            raise LaunchError("links are sealed, and the public key of the peer to connect to is not known")
        socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)

    def allow(self, name: str, key: bytes) -> None:
        """Allow connections with this public key under this name, which no other key can use from now on."""
        self.allow_all({name: key})

    def allow_all(self, keys: Mapping[str, bytes]) -> None:
        """Allow many names and their keys."""
        for name, key in keys.items():
            before = self._keys.get(name)
            if before is not None and self._owners.get(before) == name:  # else it is another name's key by now
                del self._owners[before]
            self._keys[name] = key
            self._owners[key] = name
        self._decide_again(len(self._waiting))
        self._activity.set()  # answering may consume ZeroMQ's signal of further requests

    @property
    def waiting(self) -> int:
        """How many connections wait for the announcement of their key. For tests."""
        return len(self._waiting)

    def key(self, node: NodeId) -> bytes:
        return self._keys[str(node)]

    async def serve(self) -> None:
        """Answer requests until cancelled. Sleeps without requests: a thousand nodes that polled once a second would
        take a good part of a core."""
        loop = asyncio.get_running_loop()
        for socket in self.sockets:
            loop.add_reader(descriptor := int(socket.FD), self._activity.set)
            self._readers.callback(loop.remove_reader, descriptor)
        try:
            while True:
                self._activity.clear()
                self.answer_pending()
                with suppress(TimeoutError):
                    # Waiting requests time out also when no further request arrives.
                    async with asyncio.timeout(RECHECK_SECONDS if self._waiting else None):
                        await self._activity.wait()
        finally:
            self._readers.close()

    def answer_pending(self) -> None:
        """Answer all requests that have arrived, and count connections that ended without one."""
        while self._waiting and self._now() - self._waiting[0][0] >= min(self.key_wait, HANDSHAKE_SECONDS):
            self._decide_again(1)
        while not self._zap.closed:
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            # The route back, an empty frame, version, number, domain, address, identity, mechanism, key.
            route, (version, number, _, address, _, mechanism, *credentials) = frames[:2], frames[2:]
            shown = credentials[0] if mechanism == b"CURVE" and credentials else b""
            key = z85.encode(shown) if len(shown) == KEY_BYTES else b""
            self._decide(self._now(), [*route, version, number], key, address.decode())
        self._count_connections()

    def count_remaining(self) -> None:
        """Count all open connections that have not authenticated: the run is over, and no peer still connects."""
        self._count_connections(final=True)

    def close(self) -> None:
        self._readers.close()
        for socket in self._listening:
            if not socket.closed:
                socket.disable_monitor()
        for own in self.sockets:
            own.close(linger=0)

    def _decide_again(self, count: int) -> None:
        """Decide again on the oldest waiting requests."""
        for _ in range(count):
            self._decide(*self._waiting.popleft())

    def _decide(self, since: float, envelope: list[bytes], key: bytes, address: str) -> None:
        name, waited = self._owners.get(key), self._now() - since
        if name is None and waited < self.key_wait:
            # After `HANDSHAKE_SECONDS` ZeroMQ has closed the connection, and the peer connects again.
            if waited < HANDSHAKE_SECONDS and len(self._waiting) < MAX_WAITING:
                self._waiting.append((since, envelope, key, address))
            return
        decision = [b"400", b"not on the list", b""] if name is None else [b"200", b"", name.encode()]
        self._zap.send_multipart([*envelope, *decision, b""])
        if name is None:
            self._rejected_by_answer += 1
            self._reject(f"address {address}, key {key.decode() or 'missing'}: not on the list of keys")

    def _count_connections(self, final: bool = False) -> None:
        for monitor, counter in self._counters.items():
            while not monitor.closed:
                try:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                counter.note(event["event"], event["value"], self._now())
                self._last_endpoint = event["endpoint"].decode()
            for _ in range(counter.newly_failed(self._now(), final)):
                if self._rejected_by_answer:
                    self._rejected_by_answer -= 1
                else:
                    self._reject(f"endpoint {self._last_endpoint}: no key, or an invalid handshake")


class HandshakeCounter:
    """Counts the connections to a socket that ended without authentication.

    ZeroMQ reports that a handshake succeeded, but not on which connection. So when a connection ends while others are
    still open, it may not be known at once whether it had authenticated.
    """

    def __init__(self) -> None:
        self._open: dict[int, float] = {}
        """Open connections that may not have authenticated yet, and when they were accepted."""
        self._ended = 0
        """Connections that were in `_open` and ended."""
        self._authenticated = 0
        """How many of all these connections have authenticated."""
        self._counted = 0
        """How many of the ended connections are known not to have authenticated."""

    def note(self, event: int, connection: int, now: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._open[connection] = now
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._authenticated += 1
        elif connection in self._open:
            del self._open[connection]
            self._ended += 1
        self._reset_if_all_known()

    def newly_failed(self, now: float, final: bool = False) -> int:
        """How many more connections are known to have ended without authentication.

        `final`: connections that are still open and have not authenticated count as well.
        """
        for connection, since in list(self._open.items()):
            if now - since > HANDSHAKE_SECONDS + 1.0:  # it has authenticated, or ZeroMQ would have closed it
                del self._open[connection]
                self._authenticated -= 1
        failed = self._ended - self._authenticated + (len(self._open) if final else 0)
        more = max(0, failed - self._counted)
        self._counted += more
        self._reset_if_all_known()
        return more

    def _reset_if_all_known(self) -> None:
        if len(self._open) + self._ended - self._authenticated == self._counted:
            self._open.clear()
            self._ended = self._authenticated = self._counted = 0


def authenticated_sender(frame: zmq.Frame) -> str:
    """The name of the key's owner that sent the frame. Raises `MessageError` if the link is not sealed."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError as error:
        raise MessageError("the message came over a link that is not sealed") from error
