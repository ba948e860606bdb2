"""Writes the records of one process, and keeps them in memory while the disk is full."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shoal.errors import DiskFullError, StorageError
from shoal.results.records import Event, Record, RecordFile, Round, RunFolder, decode, encode
from shoal.results.thinning import Thinning, join_rounds
from shoal.types import NodeId

RETRY_SECONDS = 2.0
"""Seconds between two attempts to write to a full disk."""
END_SECONDS = 60.0
"""How long a process that ends waits for space on a full disk."""
MAX_BYTES = 8 * 2**20
"""The most bytes of records that a process keeps in memory while the disk is full, without dropping any."""
RECORDS_DROPPED = "records dropped"
"""The event of a node whose records did not fit in memory while the disk was full."""

Owner: TypeAlias = NodeId | None
"""The node that a file belongs to; None: the file of averages."""


@dataclass(frozen=True)
class PauseReport:
    """Records are paused, because the disk is full, or are written again."""

    paused: bool
    text: str
    """For the user."""
    dropped: int = 0
    """Records of rounds that were dropped since the pause began."""

    @property
    def described(self) -> str:
        return f"{self.text}; {self.dropped} records of rounds were dropped" if self.dropped else self.text


class _Line(NamedTuple):
    text: bytes
    time: float | None
    """The time of a record that may be dropped; None: it is never dropped."""


class _Pending:
    """The records of one file that are still in memory."""

    __slots__ = ("_dropped", "_fixed", "lines", "thinning")

    def __init__(self) -> None:
        self.thinning = Thinning()
        self.lines: list[_Line] = []
        self._fixed = 0
        """The first lines, which are not dropped: a checkpoint has their size."""
        self._dropped = 0
        """Records that were dropped after the fixed lines. The next line is the event with their number."""

    def add(self, record: Record) -> int:
        """Add a record as far as it is written, and return the bytes."""
        size = 0
        for written in self.thinning.add(record):
            text = encode(written)
            self.lines.append(_Line(text, written.time if isinstance(written, Round) else None))
            size += len(text)
        return size

    def end(self) -> None:
        """Add the records that were held back."""
        self.lines += [_Line(encode(record), None) for record in self.thinning.rest()]

    def fix(self) -> int:
        """Keep all lines, and return their size in the file."""
        self._fixed, self._dropped = len(self.lines), 0
        return sum(len(line.text) + 1 for line in self.lines)

    def drop(self) -> int:
        """Drop every second record of a round, and return their number. The latest one stays."""
        first = self._fixed + (1 if self._dropped else 0)
        rounds = [i for i in range(first, len(self.lines)) if self.lines[i].time is not None]
        dropped = set(rounds[-2::-2])
        for i in dropped:
            self._join_to_next_round(i)
        if dropped:
            self._dropped += len(dropped)
            last = self.lines[max(dropped)].time
            assert last is not None
            event = Event(RECORDS_DROPPED, last, "records of rounds: the disk was full", self._dropped)
            kept = [self.lines[i] for i in range(first, len(self.lines)) if i not in dropped]
            self.lines[self._fixed :] = [_Line(encode(event), None), *kept]
        return len(dropped)

    def _join_to_next_round(self, dropped: int) -> None:
        following = next(i for i in range(dropped + 1, len(self.lines)) if self.lines[i].time is not None)
        first, second = (decode(self.lines[i].text) for i in (dropped, following))
        assert isinstance(first, Round)
        assert isinstance(second, Round)
        joined = join_rounds(first, second)
        self.lines[following] = _Line(encode(joined), joined.time)

    def clear(self) -> None:
        self.lines.clear()
        self._fixed = self._dropped = 0


class RecordWriter:
    """The record files of one process.

    Each record is handed to the operating system at once or, with an `interval`, every few seconds: ten thousand files
    take long to append to. While the disk is full, records stay in memory, and writing is tried again every few
    seconds. If they exceed `max_bytes`, every second record of a round in memory is dropped, and an event
    has their number. Other records are not dropped.

    Raises `StorageError` if a file cannot be written for another reason.
    """

    MAX_SHARE = 1 / 50
    """The largest share of the time that writing may take, if there is an `interval`."""

    def __init__(
        self,
        folder: RunFolder,
        report: Callable[[PauseReport], None],
        interval: float = 0.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`report` is called when records are paused, and when they are written again."""
        self._folder = folder
        self._report = report
        self._interval = interval
        self._max_bytes = max_bytes
        self._files: dict[Owner, _Pending] = {}
        self._open: dict[Owner, RecordFile] = {}
        self._size = 0
        self._due = time.monotonic() + interval
        self._dropped = 0
        self._paused = False

    def open(self, owner: Owner) -> None:
        """Open a file now, and keep it open. Others are opened whenever they are written."""
        self._open[owner] = RecordFile(self._path(owner))

    @property
    def paused(self) -> bool:
        """Whether records are kept in memory because the disk is full."""
        return self._paused

    def size(self, owner: NodeId) -> int:
        """The size of a file in bytes, with the records that are still in memory."""
        path, pending = self._path(owner), self._files.get(owner)
        written = path.stat().st_size if path.exists() else 0
        return written + (0 if pending is None else pending.fix())

    def write(self, owner: Owner, record: Record) -> None:
        pending = self._files.get(owner)
        if pending is None:
            pending = self._files[owner] = _Pending()
        self._size += pending.add(record)
        if self._size > self._max_bytes:
            self._reduce()
        elif not self._interval:
            self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write the records in memory if it is time to. A full disk is no error."""
        if self._size and time.monotonic() >= self._due:
            self._try_flush()

    def flush(self) -> None:
        """Write the records in memory. Raises `DiskFullError`."""
        started = time.monotonic()
        try:
            for owner, pending in self._files.items():
                if pending.lines:
                    self._append(owner, pending)
        except DiskFullError:
            self._due = time.monotonic() + RETRY_SECONDS
            if not self._paused:
                self._paused = True
                self._report(PauseReport(True, _pause_text(self._folder.path)))
            raise
        self._size = 0
        ended = time.monotonic()
        self._due = ended + max(self._interval, (ended - started) / self.MAX_SHARE) if self._interval else ended
        if self._paused:
            self._paused = False
            dropped, self._dropped = self._dropped, 0
            self._report(PauseReport(False, f"records are written again in {self._folder.path}", dropped))

    def finish(self) -> None:
        """Write everything that is left, because the process ends. Raises `DiskFullError`; can be called again."""
        for pending in self._files.values():
            pending.end()
        self.flush()

    def _try_flush(self) -> bool:
        try:
            self.flush()
        except DiskFullError:
            return False
        return True

    def _reduce(self) -> None:
        """Write the records in memory or, if the disk is full, drop some of them."""
        if (not self._paused or time.monotonic() >= self._due) and self._try_flush():
            return
        self._dropped += sum(pending.drop() for pending in self._files.values())
        self._size = sum(len(line.text) for pending in self._files.values() for line in pending.lines)
        # If only records are left that are not dropped, do not look for others before they have doubled.
        self._max_bytes = max(self._max_bytes, 2 * self._size if self._size > self._max_bytes else 0)

    def _append(self, owner: Owner, pending: _Pending) -> None:
        """Write the records of one file. Only those that did not fit on the disk stay in memory."""
        try:
            file = self._open.get(owner) or RecordFile(self._path(owner))
            try:
                file.write_all([line.text for line in pending.lines])
            finally:
                if owner not in self._open:
                    file.close()
        except DiskFullError:
            raise
        except StorageError:
            pending.clear()  # the other files can still be written
            raise
        pending.clear()

    def _path(self, owner: Owner) -> Path:
        return self._folder.averages if owner is None else self._folder.node(owner)


def _pause_text(path: Path) -> str:
    disk = next(p for p in (path.resolve(), *path.resolve().parents) if os.path.ismount(p))
    return (
        f"records are paused, because the disk at {str(disk)!r} or its quota is full: the run goes on and keeps its "
        f"records in memory; free some space for {path}"
    )


class FinalWrite:
    """Writes something at the end of a run, if necessary again and again, until there is space on the disk."""

    def __init__(self, write: Callable[[], None], notice: Callable[[str], None], seconds: float = END_SECONDS) -> None:
        """`write` may raise `DiskFullError`; it is called again for at most `seconds`. `notice` informs the user."""
        self._write = write
        self._notice = notice
        self._seconds = seconds
        self._until: float | None = None

    def attempt(self) -> DiskFullError | None:
        """Return None if it is written, or the reason to try again. Raises `DiskFullError` if the time is over."""
        try:
            self._write()
        except DiskFullError as error:
            if self._until is None:
                self._until = time.monotonic() + self._seconds
                reason = str(error).partition(":")[0]
                self._notice(f"{reason}: free some space in the next {self._seconds:g} s, or it is lost")
            if time.monotonic() >= self._until:
                raise
            return error
        return None


def write_finally(write: Callable[[], None], notice: Callable[[str], None], seconds: float = END_SECONDS) -> None:
    """Write something at the end of a run: as `FinalWrite`, until it is done. Ctrl-C ends the wait with the error."""
    final = FinalWrite(write, notice, seconds)
    while (error := final.attempt()) is not None:
        try:
            time.sleep(min(RETRY_SECONDS, seconds))
        except KeyboardInterrupt:
            raise error from None
