"""A link: messages between two processes in order, none lost and none repeated, over connections that may break.

ZeroMQ connects again when a connection breaks, but forgets messages that were on their way. Each message has a number,
and its sender keeps it until the receiver has acknowledged it. A heartbeat has the number of the last message that was
sent before it: a receiver that does not have this message knows that messages were lost, and asks for them again.

This module does no input or output, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

Frames: TypeAlias = list[bytes]
BEATS_BEFORE_REPEAT = 10
"""Heartbeats after which lost messages are asked for once more. All of them are sent again, which may take long."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; its content is in the frames that follow."""

    session: str
    number: int
    received: int
    """The number of the last message that the sender has received."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A heartbeat."""

    session: str
    sent: int
    """The number of the last message that was sent."""
    received: int
    """The number of the last message that was received."""
    time: float
    """When it was sent, on the sender's monotonic clock."""
    echo: float = 0.0
    """The time of the last heartbeat that was received, plus the time since then on the sender's clock."""


class Missing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Messages after this number were lost: send them again."""

    session: str
    received: int


Header: TypeAlias = Data | Beat | Missing


class Link:
    """One end of a link."""

    def __init__(
        self,
        session: str,
        transmit: Callable[[Header, Frames], None],
        acknowledged: Callable[[Frames], None] = lambda frames: None,
    ) -> None:
        """`session` names the link: messages of other links are ignored. `transmit` sends frames to the peer, or
        loses them. `acknowledged` is called with every message that the peer has received, in order."""
        self.session = session
        self._transmit = transmit
        self._acknowledged = acknowledged
        self._sent = 0
        self._received = 0
        self._kept: deque[tuple[int, Frames]] = deque()
        """Messages that the peer has not acknowledged."""
        self._kept_bytes = 0
        self._asked_after = -1
        """The last message that had been received when lost ones were last asked for."""
        self._beats_since = 0
        """Heartbeats since then that showed a loss."""

    @property
    def unacknowledged_bytes(self) -> int:
        """The size of the messages that the peer has not acknowledged."""
        return self._kept_bytes

    @property
    def all_acknowledged(self) -> bool:
        return not self._kept

    def send(self, *frames: bytes) -> None:
        self._sent += 1
        self._kept.append((self._sent, list(frames)))
        self._kept_bytes += _size(frames)
        self._transmit(Data(self.session, self._sent, self._received), list(frames))

    def restart(self, session: str, *first: bytes) -> None:
        """Continue with a new peer: send `first`, and then all messages that the earlier peer has not acknowledged."""
        kept = [frames for _, frames in self._kept]
        self.session = session
        self._sent = self._received = self._kept_bytes = self._beats_since = 0
        self._asked_after = -1
        self._kept.clear()
        self.send(*first)
        for frames in kept:
            self.send(*frames)

    def beat(self, time: float, echo: float = 0.0) -> None:
        """Send a heartbeat."""
        self._transmit(Beat(self.session, self._sent, self._received, time, echo), [])

    def receive(self, header: Header, frames: Frames) -> Frames | None:
        """Handle what has arrived. Returns the content of a message that is the next one."""
        if header.session != self.session:
            return None
        self._acknowledge(header.received)
        if isinstance(header, Missing):
            for number, kept in list(self._kept):
                self._transmit(Data(self.session, number, self._received), kept)
        elif isinstance(header, Beat):
            if header.sent > self._received:
                self._ask_again()
        elif header.number == self._received + 1:
            self._received += 1
            return frames
        return None  # a message that arrived before, or after a lost one: the next heartbeat shows the loss

    def _ask_again(self) -> None:
        """Ask for lost messages: once, and again if none of them has arrived after several heartbeats."""
        if self._asked_after == self._received and self._beats_since < BEATS_BEFORE_REPEAT:
            self._beats_since += 1
            return
        self._asked_after, self._beats_since = self._received, 0
        self._transmit(Missing(self.session, self._received), [])

    def _acknowledge(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            frames = self._kept.popleft()[1]
            self._kept_bytes -= _size(frames)
            self._acknowledged(frames)


def _size(frames: Frames | tuple[bytes, ...]) -> int:
    return sum(map(len, frames))


class ClockEstimate:
    """The difference between the clocks of two machines, from the times of heartbeats.

    A heartbeat that returns at once gives the difference up to half of its travel time. The one that travelled for the
    shortest time counts.
    """

    def __init__(self) -> None:
        self._best: float | None = None
        self.offset = 0.0
        """Seconds to add to the peer's clock to get the own clock."""

    @property
    def error(self) -> float | None:
        """The largest possible error of `offset`, in seconds; None before the first heartbeat returned."""
        return None if self._best is None else self._best / 2

    def add(self, sent: float, peer_time: float, returned: float) -> None:
        """A heartbeat was sent at `sent`, the peer answered at `peer_time` on its clock, and it returned."""
        travelled = returned - sent
        if travelled >= 0 and (self._best is None or travelled < self._best):
            self._best = travelled
            self.offset = (sent + returned) / 2 - peer_time
