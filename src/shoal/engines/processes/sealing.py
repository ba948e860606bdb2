"""Sealed links: CURVE (RFC 26) on every socket of a process, and the one who decides whom they let in.

A process has one key pair. Its listening sockets are CURVE servers: to speak to one, a peer needs its public key, and a
key of its own that is on the list. ZeroMQ asks for the list by ZAP (RFC 27), on a socket inside the process; it is
answered in the process's own event loop, without a thread. Nobody is let in unasked: no answer, no link.

What comes off a link bears the name of the key's owner, which nobody else can put there.
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
"""Any name will do; without one ZeroMQ would let everybody in where nobody answers."""
NETWORK_PROCESS = "network"
"""The name of the network's process."""
KEY_WAIT_SECONDS = 5.0
"""Seconds for which one with an unknown key waits where nodes are given new keys when they are started: word of a key
may come after its owner."""
LOOK_AGAIN = 1.0
"""Seconds until those that wait are looked at again."""
HANDSHAKE_SECONDS = 30.0
"""How long a greeting may take; then ZeroMQ hangs up."""
MAX_WAITING = 10_000
"""Those whose key may yet be told. More get no answer: ZeroMQ hangs up after a while, and they knock again."""
STEPS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""What is watched to know of those that do not even get to show a key. Not what ZeroMQ says of errors in the protocol:
where that is watched, libzmq 4.3 leaves a connection open, and stuck, whose bytes were changed on the way."""


class Seal:
    """The key pair of a process, and those that it lets in."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pair: KeyPair,
        refuse: Callable[[str], None],
        now: Callable[[], float],
        key_wait: float = 0.0,
    ) -> None:
        """`refuse` is told of every stranger; `now` is a clock."""
        self.pair = pair
        self._context = context
        self._refuse = refuse
        self._now = now
        self.key_wait = key_wait
        """Seconds for which one with an unknown key waits, in case word of the key is still on its way."""
        self._owners: dict[bytes, str] = {}
        """Public keys as text, and whose they are. Who knocks shows 32 bytes, and these are converted rather than the
        list: few knock, and each of a thousand nodes has a thousand keys on it."""
        self._keys: dict[str, bytes] = {}
        self._waiting: deque[tuple[float, list[bytes], bytes, str]] = deque()
        """Requests that are not answered yet, the oldest first: since when, what the answer begins with, and whose they
        are."""
        self._zap = context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP)
        self._listening: list[zmq.Socket[bytes]] = []
        self._told = 0
        """Refused by an answer, and not yet known to be gone."""
        self._doors: dict[zmq.Socket[Any], _HandshakeCounter] = {}
        self._where = ""
        self._knock = asyncio.Event()
        """Set when `serve` has to look."""
        self._leave = ExitStack()
        """What ends `serve`: done once, and while the sockets are open. Afterwards their numbers may be others'."""
        self.sockets: list[zmq.Socket[Any]] = [self._zap]
        """What to wait for: when something comes on one of them, `answer_pending`."""

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Seal a socket that is about to be bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        self._listening.append(socket)
        # Without a limit: where one is reached ZeroMQ's thread waits for us, and we, to close the socket, for it.
        steps = f"inproc://shoal.steps.{len(self._listening)}"
        socket.monitor(steps, STEPS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(steps)
        self.sockets.append(monitor)
        self._doors[monitor] = _HandshakeCounter()

    def secure_client(self, socket: zmq.Socket[bytes], key: bytes | None) -> None:
        """Seal a socket that is about to be connected to the one with this public key, and nobody else.

        Raises `LaunchError` where the key is not known: nothing is said in the clear for want of one.
        """
        if key is None:
            raise LaunchError("links are sealed, and the key of one that is to be spoken to is not known")
        socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)

    def allow(self, name: str, key: bytes) -> None:
        """Let the owner of this public key in, under this name, and with no other key."""
        self.allow_all({name: key})

    def allow_all(self, keys: Mapping[str, bytes]) -> None:
        """As `allow`, for many."""
        for name, key in keys.items():
            before = self._keys.get(name)
            if before is not None and self._owners.get(before) == name:  # else it is another's by now
                del self._owners[before]
            self._keys[name] = key
            self._owners[key] = name
        self._decide_again(len(self._waiting))
        self._knock.set()  # to answer may have swallowed the signal that others knock

    def key(self, node: NodeId) -> bytes:
        return self._keys[str(node)]

    async def serve(self) -> None:
        """Attend for good. Nothing is done while nobody knocks: a thousand nodes that looked once a second would take a
        good part of a core."""
        loop = asyncio.get_running_loop()
        for socket in self.sockets:
            loop.add_reader(door := int(socket.FD), self._knock.set)
            self._leave.callback(loop.remove_reader, door)
        try:
            while True:
                self._knock.clear()
                self.answer_pending()
                with suppress(TimeoutError):
                    # Those that wait in vain are to be told, though nobody else comes.
                    async with asyncio.timeout(LOOK_AGAIN if self._waiting else None):
                        await self._knock.wait()
        finally:
            self._leave.close()

    def answer_pending(self) -> None:
        """Answer whoever knocks, and count those that could not even do that."""
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
        self._watch()

    def count_remaining(self) -> None:
        """Count all that came in vain: nobody who belongs here is still on the way in."""
        self._watch(over=True)

    def close(self) -> None:
        self._leave.close()
        for socket in self._listening:
            if not socket.closed:
                socket.disable_monitor()
        for own in self.sockets:
            own.close(linger=0)

    def _decide_again(self, count: int) -> None:
        """On the oldest requests of those that are not answered yet."""
        for _ in range(count):
            self._decide(*self._waiting.popleft())

    def _decide(self, since: float, envelope: list[bytes], key: bytes, address: str) -> None:
        name, waited = self._owners.get(key), self._now() - since
        if name is None and waited < self.key_wait:
            # Whom ZeroMQ has hung up on is not there any longer to hear of it, and asks anew.
            if waited < HANDSHAKE_SECONDS and len(self._waiting) < MAX_WAITING:
                self._waiting.append((since, envelope, key, address))
            return
        verdict = [b"400", b"not on the list", b""] if name is None else [b"200", b"", name.encode()]
        self._zap.send_multipart([*envelope, *verdict, b""])
        if name is None:
            self._told += 1
            self._refuse(f"one at {address} with the key {key.decode() or 'of no kind'}, which is not on the list")

    def _watch(self, over: bool = False) -> None:
        for monitor, door in self._doors.items():
            while not monitor.closed:
                try:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                door.note(event["event"], event["value"], self._now())
                self._where = event["endpoint"].decode()
            for _ in range(door.turned_away(self._now(), over)):
                if self._told:
                    self._told -= 1
                else:
                    self._refuse(f"one on {self._where} that showed no key, or took us for somebody else")


class _HandshakeCounter:
    """Counts those that came to a socket, and left without having been let in.

    ZeroMQ does not say which of those at the door it has let in, only that it was one of them. So of one that leaves
    while others are there it may not be known at once which kind it was.
    """

    def __init__(self) -> None:
        self._here: dict[int, float] = {}
        """Connections that may not have been let in yet, and since when they are there."""
        self._left = 0
        """Those that were among them."""
        self._let_in = 0
        """How many of all these have been let in."""
        self._counted = 0
        """How many of those that left are known not to have been."""

    def note(self, event: int, connection: int, now: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._here[connection] = now
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._let_in += 1
        elif connection in self._here:
            del self._here[connection]
            self._left += 1
        self._forget_if_all_is_known()

    def turned_away(self, now: float, over: bool = False) -> int:
        """How many more are known to have left without having been let in. `over`: nobody waits at the door now."""
        for connection, since in list(self._here.items()):
            if now - since > HANDSHAKE_SECONDS + 1.0:  # else it would not be there any longer
                del self._here[connection]
                self._let_in -= 1
        not_let_in = self._left - self._let_in + (len(self._here) if over else 0)
        more = max(0, not_let_in - self._counted)
        self._counted += more
        self._forget_if_all_is_known()
        return more

    def _forget_if_all_is_known(self) -> None:
        if len(self._here) + self._left - self._let_in == self._counted:
            self._here.clear()
            self._left = self._let_in = self._counted = 0


def authenticated_sender(frame: zmq.Frame) -> str:
    """Whose key the frame came with. Raises `MessageError` where it came without."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError as error:
        raise MessageError("it came over a link that is not sealed") from error
