"""Connections that fail because of keys: connections that this process has rejected, and its own to a peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_SHOWN = 20
"""The most descriptions of rejected connections that are shown and counted one by one. Further ones are counted
together: the peer chooses the key."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
_ENDPOINT = "inproc://shoal.dialled"


class RejectedConnections:
    """Shows the first rejected connection of each address and key, and how many there were at the end."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._counts: Counter[str] = Counter()

    def __call__(self, detail: str) -> None:
        """Note a rejected connection. `detail` has its address and key."""
        if detail not in self._counts and len(self._counts) >= MAX_SHOWN:
            detail = "other addresses or keys"
        self._counts[detail] += 1
        if self._counts[detail] == 1:
            self._notify(f"rejected an unauthenticated connection: {detail} (further ones are only counted)")

    def show_counts(self) -> None:
        """Show how often connections were rejected that have been shown only once. Starts counting anew."""
        for detail, count in self._counts.items():
            if count > 1:
                self._notify(f"rejected {count} unauthenticated connections: {detail}")
        self._counts.clear()


class KeyProblem(Enum):
    """Why a peer that was dialled, and that answers, makes no connection."""

    NOT_ACCEPTED = auto()
    """The peer does not accept the key of this process."""
    CLOSED = auto()
    """The peer closes the connection during the handshake. It has another key than expected, or one of the two
    processes has no key."""


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

    def latest_problem(self) -> KeyProblem | None:
        """The problem of the handshakes since the last call. ZeroMQ may not connect again after it."""
        problem: KeyProblem | None = None
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return problem
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established, problem = True, None
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                problem = KeyProblem.NOT_ACCEPTED
            elif self._established:
                self._established = False
            elif problem is None:
                problem = KeyProblem.CLOSED

    def close(self) -> None:
        """Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
