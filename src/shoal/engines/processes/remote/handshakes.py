"""Connections that fail in the handshake: connections that this process has rejected, and its own to a peer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_SHOWN = 20
"""The most descriptions of rejected connections that are shown and counted one by one in a period. Further ones are
counted together: the peer chooses the key."""
PERIOD_SECONDS = 3600.0
"""After so long, the counts are shown with the next rejected connection, and counting starts anew."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
_ENDPOINT = "inproc://shoal.dialled"


class RejectionNotices:
    """Shows the first rejected connection of each address and key in a period, and how many there were at its end."""

    def __init__(self, notify: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a clock."""
        self._notify = notify
        self._now = now
        self._counts: Counter[str] = Counter()
        self._period_began = 0.0

    def __call__(self, detail: str) -> None:
        """Note a rejected connection. `detail` has its address and key."""
        if self._counts and self._now() - self._period_began >= PERIOD_SECONDS:
            self.end_period()
        if not self._counts:
            self._period_began = self._now()
        if detail not in self._counts and len(self._counts) >= MAX_SHOWN:
            detail = "other addresses or keys"
        self._counts[detail] += 1
        if self._counts[detail] == 1:
            self._notify(f"rejected an unauthenticated connection: {detail} (further ones are only counted)")

    def end_period(self) -> None:
        """Show how often connections were rejected that have been shown only once, and start counting anew."""
        for detail, count in self._counts.items():
            if count > 1:
                self._notify(f"rejected {count} unauthenticated connections: {detail}")
        self._counts.clear()


class HandshakeProblem(Enum):
    """Why a peer that was dialled, and that answers, makes no connection."""

    NOT_ACCEPTED = auto()
    """The peer does not accept the key of this process."""
    CLOSED = auto()
    """The connection is closed during the handshake. Only a forwarder listens at the address, the peer has another key
    than expected, or one of the two processes has no key."""


class DialledConnection:
    """Watches the handshakes of a socket that dials out."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """`socket` has not connected yet."""
        self._socket = socket
        socket.monitor(_ENDPOINT, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(_ENDPOINT)
        self._established = False

    def latest_problem(self) -> HandshakeProblem | None:
        """The problem of the handshakes since the last call. ZeroMQ may not connect again after it."""
        problem: HandshakeProblem | None = None
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return problem
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established, problem = True, None
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                problem = HandshakeProblem.NOT_ACCEPTED
            elif self._established:
                self._established = False
            elif problem is None:
                problem = HandshakeProblem.CLOSED

    def close(self) -> None:
        """Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
