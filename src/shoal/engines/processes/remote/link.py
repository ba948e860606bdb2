"""A link: messages between two processes, none lost and none repeated, over connections that may break.

ZeroMQ connects again when a connection breaks, but forgets messages that were on their way. Each message has a number,
and its sender keeps it until the receiver has acknowledged it. A heartbeat has the number of the last message that was
sent before it: a receiver that does not have this message knows that messages were lost, and asks for them again.

Small messages are sent at once. Large messages wait in an outbox, and are sent in parts: at most `WINDOW_BYTES` of them
are not acknowledged. So a small message or a heartbeat never waits for more than that, and memory is bounded.

This module does no input or output, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from shoal.engines.processes.remote.outbox import (
    MAX_PART_BYTES,
    MESSAGE_END,
    SMALL_BYTES,
    WHOLE,
    Assembly,
    Frames,
    LatestReports,
    Outbox,
    Part,
    Stream,
    size,
    split,
)

BEATS_BEFORE_REPEAT = 10
"""Heartbeats after which lost messages are asked for once more. All of them are sent again, which may take long."""
WINDOW_BYTES = 2**20
"""The most bytes of large messages that are sent before the peer has acknowledged them."""
ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4
"""Bytes that may arrive before they are acknowledged."""
MAX_REPORT_BYTES = 2**18
"""While the peer has not acknowledged so many bytes of small messages, reports wait and replace each other."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message, or a part of one; its content is in the frames that follow.

    With the number 0 it has no content, and only acknowledges.
    """

    session: str
    number: int
    received: int
    """The number of the last message that the sender has received."""
    part: Part = WHOLE


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


@dataclass(frozen=True)
class _Kept:
    """A message, or a part of one, that the peer has not acknowledged."""

    number: int
    part: Part
    frames: Frames
    message: Frames
    """The whole message, which a new peer needs."""
    large: bool


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
        self.received_bytes = 0
        """The size of all messages that have arrived."""
        self._transmit = transmit
        self._acknowledged = acknowledged
        self._sent = 0
        self._received = 0
        self._handled = 0
        """The last message that is acknowledged to the peer."""
        self.holds = False
        """Whether messages that arrive are not acknowledged, because what they contain is not on the disk yet."""
        self._kept: deque[_Kept] = deque()
        self._small_bytes = self._large_bytes = 0
        """The size of the messages in `_kept`."""
        self._first: Frames | None = None
        """The first message since a restart."""
        self._outbox = Outbox()
        self._reports = LatestReports()
        self._assembly = Assembly()
        self._to_acknowledge = 0
        """Bytes that have arrived since this end sent something."""
        self._asked_after = -1
        """The last message that had been received when lost ones were last asked for."""
        self._beats_since = 0
        """Heartbeats since then that showed a loss."""

    @property
    def unacknowledged_bytes(self) -> int:
        """The size of the messages that were sent and that the peer has not acknowledged."""
        return self._small_bytes + self._large_bytes

    @property
    def waiting_bytes(self) -> int:
        """The size of the messages in memory that were not sent yet."""
        return self._outbox.bytes

    @property
    def all_sent(self) -> bool:
        """Whether nothing waits."""
        return not self._outbox and not self._reports

    @property
    def all_acknowledged(self) -> bool:
        return self.all_sent and not self._kept

    def waits(self, stream: Stream) -> bool:
        """Whether messages of a stream may wait."""
        return stream in self._outbox

    def send(self, *frames: bytes, stream: Stream = None) -> None:
        """Send a message: at once if it is small and no message of its stream waits."""
        if stream not in self._outbox and size(frames) <= SMALL_BYTES:
            self._send_whole(list(frames), large=False)
        else:
            self._outbox.add(stream, list(frames))

    def send_later(self, source: Iterable[Frames], stream: Stream) -> None:
        """Send messages that are read from `source` when the window is not full."""
        self._outbox.add_source(stream, source)

    def send_report(self, kind: Hashable, *frames: bytes) -> None:
        """Send a small message. It replaces an earlier one of this kind that was not sent yet."""
        self._reports[kind] = list(frames)
        self._send_reports()

    def pump(self) -> None:
        """Send what waits, until the window is full. Raises what a source raises."""
        self._send_reports()
        while self._large_bytes + MAX_PART_BYTES <= WINDOW_BYTES:
            if (part := self._outbox.next_part()) is None:
                return
            self._send_now(*part, message=self._outbox.message, large=True)

    def restart(self, session: str, *first: bytes) -> None:
        """Continue with a new peer: send `first`, and then all messages that the earlier peer has not acknowledged.

        The first message for the earlier peer is not sent again.
        """
        skipped = self._outbox.restart_message(), self._first
        messages = {id(kept.message): kept for kept in self._kept if not any(kept.message is m for m in skipped)}
        self.session = session
        self._sent = self._received = self._handled = self._small_bytes = self._large_bytes = self._beats_since = 0
        self._asked_after = -1
        self._kept.clear()
        self._assembly = Assembly()
        self._first = list(first)
        self._send_whole(self._first, large=False)
        for kept in messages.values():
            self._send_whole(kept.message, kept.large)

    def beat(self, time: float, echo: float = 0.0) -> None:
        """Send a heartbeat."""
        self._to_acknowledge = 0
        self._transmit(Beat(self.session, self._sent, self._handled, time, echo), [])

    def receive(self, header: Header, frames: Frames) -> Frames | None:
        """Handle what has arrived. Returns the content of a message that is the next one, and is complete.

        Call `handled` when the content is handled: only then is it acknowledged.

        Raises `MessageError` if the message is too large.
        """
        if header.session != self.session:
            return None
        self._acknowledge(header.received)
        if isinstance(header, Missing):
            for kept in list(self._kept):
                self._transmit(Data(self.session, kept.number, self._handled, kept.part), kept.frames)
        elif isinstance(header, Beat):
            if header.sent > self._received:
                self._ask_again()
        elif header.number == self._received + 1:
            self._received += 1
            self.received_bytes += size(frames)
            self._to_acknowledge += size(frames)
            content = self._assembly.add(header.part, frames)
            if content is None:
                self.handled()  # the peer keeps the whole message
            return content
        return None  # a message that arrived before, or after a lost one: the next heartbeat shows the loss

    def _send_whole(self, message: Frames, large: bool) -> None:
        for part, frames in split(message):
            self._send_now(part, frames, message, large)

    def _send_now(self, part: Part, frames: Frames, message: Frames, large: bool) -> None:
        self._sent += 1
        self._kept.append(_Kept(self._sent, part, frames, message, large))
        self._change_kept(size(frames), large)
        self._to_acknowledge = 0
        self._transmit(Data(self.session, self._sent, self._handled, part), frames)

    def _send_reports(self) -> None:
        while self._reports and self._small_bytes < MAX_REPORT_BYTES:
            self._send_whole(self._reports.pop(), large=False)

    def handled(self) -> None:
        """Acknowledge all messages that have arrived: large amounts at once, because the peer waits for it."""
        if self.holds:
            return
        self._handled = self._received
        if self._to_acknowledge >= ACKNOWLEDGE_BYTES:
            self._to_acknowledge = 0
            self._transmit(Data(self.session, 0, self._handled), [])

    def _ask_again(self) -> None:
        """Ask for lost messages: once, and again if none of them has arrived after several heartbeats."""
        if self._asked_after == self._received and self._beats_since < BEATS_BEFORE_REPEAT:
            self._beats_since += 1
            return
        self._asked_after, self._beats_since = self._received, 0
        self._transmit(Missing(self.session, self._handled), [])

    def _acknowledge(self, number: int) -> None:
        while self._kept and self._kept[0].number <= number:
            kept = self._kept.popleft()
            self._change_kept(-size(kept.frames), kept.large)
            if kept.part in (WHOLE, MESSAGE_END):
                self._acknowledged(kept.message)

    def _change_kept(self, change: int, large: bool) -> None:
        if large:
            self._large_bytes += change
        else:
            self._small_bytes += change


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
