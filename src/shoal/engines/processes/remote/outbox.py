"""What waits to be sent over a link: large messages, file by file and part by part, and the latest reports of nodes.

Messages of one stream stay in order. Streams take turns, one message at a time. A source of messages is read when its
turn comes, so files wait on the disk and not in memory.

This module does no input or output, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Literal, TypeAlias

from shoal.errors import MessageError

Frames: TypeAlias = list[bytes]
Stream: TypeAlias = Hashable
"""Names a sequence of messages that stay in order."""
Part: TypeAlias = Literal[0, 1, 2, 3]
WHOLE: Part = 0
"""A complete message."""
IN_FRAME: Part = 1
"""A part of a frame; the same frame continues in the next part."""
FRAME_END: Part = 2
"""The end of a frame; another frame of the same message follows."""
MESSAGE_END: Part = 3
"""The end of the last frame of a message."""
SMALL_BYTES = 2**14
"""A message of at most this size is small."""
PART_BYTES = 2**17
"""The most bytes of a frame in one part."""
MAX_PART_BYTES = PART_BYTES + SMALL_BYTES
"""The most bytes of a part: a message of this size is not split."""
MAX_MESSAGE_BYTES = 2**30


class Outbox:
    """Large messages that wait, as parts."""

    def __init__(self) -> None:
        self._streams: dict[Stream, deque[Iterator[Frames]]] = {}
        """The sources of each stream that is not empty. The first stream is next."""
        self._parts: Iterator[tuple[Part, Frames]] = iter(())
        """The rest of the message whose turn it is."""
        self.message: Frames = []
        """The message that the latest part belongs to."""
        self._unfinished = False
        """Whether parts of it are left."""
        self.bytes = 0
        """The size of the messages that wait in memory."""

    def __contains__(self, stream: Stream) -> bool:
        """Whether messages of a stream may wait."""
        return stream in self._streams

    def __bool__(self) -> bool:
        return bool(self._streams)

    def add(self, stream: Stream, frames: Frames) -> None:
        """Add a message."""
        self.bytes += size(frames)
        self.add_source(stream, self._from_memory(frames))

    def add_source(self, stream: Stream, source: Iterable[Frames]) -> None:
        """Add messages, which are read from `source` when their turn comes."""
        self._streams.setdefault(stream, deque()).append(iter(source))

    def next_part(self) -> tuple[Part, Frames] | None:
        """The next part; None if nothing waits. Raises what a source raises."""
        while (part := next(self._parts, None)) is None:
            if not self._streams:
                return None
            self._parts = self._next_message()
        self._unfinished = part[0] not in (WHOLE, MESSAGE_END)
        return part

    def restart_message(self) -> Frames | None:
        """Begin again with the message of which some parts were taken. Returns it; None if there is none."""
        if not self._unfinished:
            return None
        self._parts = split(self.message)
        return self.message

    def _next_message(self) -> Iterator[tuple[Part, Frames]]:
        stream = next(iter(self._streams))
        sources = self._streams.pop(stream)
        frames = next(sources[0], None)
        if frames is None:
            sources.popleft()
        if sources:
            self._streams[stream] = sources  # it has the last turn now
        if frames is None:
            return iter(())
        self.message = frames
        return split(frames)

    def _from_memory(self, frames: Frames) -> Iterator[Frames]:
        self.bytes -= size(frames)
        yield frames


def split(frames: Frames) -> Iterator[tuple[Part, Frames]]:
    """Yield the parts of a message."""
    if size(frames) <= MAX_PART_BYTES:
        yield WHOLE, frames
        return
    for position, frame in enumerate(frames):
        for offset in range(0, max(1, len(frame)), PART_BYTES):
            kind = IN_FRAME
            if offset + PART_BYTES >= len(frame):
                kind = FRAME_END if position < len(frames) - 1 else MESSAGE_END
            yield kind, [frame[offset : offset + PART_BYTES]]


class Assembly:
    """Joins the parts of messages. At most one message is incomplete at a time."""

    def __init__(self) -> None:
        self._frames: Frames = []
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, kind: Part, frames: Frames) -> Frames | None:
        """Add a part. Returns the message if it is complete. Raises `MessageError` if it is too large."""
        if kind == WHOLE:
            return frames
        self._bytes += size(frames)
        if self._bytes > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message has more than {MAX_MESSAGE_BYTES // 2**20} MiB")
        self._parts += frames
        if kind == IN_FRAME:
            return None
        self._frames.append(b"".join(self._parts))
        self._parts = []
        if kind == FRAME_END:
            return None
        message, self._frames, self._bytes = self._frames, [], 0
        return message


class LatestReports:
    """Reports of which only the latest of each kind matters."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Frames] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __setitem__(self, kind: Hashable, frames: Frames) -> None:
        """Add a report. It replaces a report of the same kind that waits."""
        self._waiting[kind] = frames

    def pop(self) -> Frames:
        """Take the report whose kind waits for the longest time."""
        return self._waiting.pop(next(iter(self._waiting)))


def size(frames: Iterable[bytes]) -> int:
    return sum(map(len, frames))
