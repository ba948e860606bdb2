"""Reads the records of a run as they are appended: each byte is read once."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from shoal.dashboard.files import READ_FLAGS, opened_folder
from shoal.results.records import Record, RunFolder, decode
from shoal.types import NodeId

CHUNK_BYTES = 8 * 2**20
"""The most bytes of a file that are read at once. A longer line is damaged."""
READ_BYTES = 8 * CHUNK_BYTES
"""The most bytes of a file that one call reads. The next call goes on after them."""
MAX_NODES = 100_000
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for text that is not a record."""

_FILE = re.compile(r"(\d{1,9})\.jsonl")
_decoder = msgspec.json.Decoder(Record)


@dataclass(slots=True)
class _Position:
    """How much of a file was read."""

    offset: int = 0
    inode: int | None = None


class RecordTail:
    """The records of the nodes and of the averaged model that were appended since the last call."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._nodes: dict[NodeId, tuple[str, _Position]] = {}
        self._listed = 0
        self._averages = _Position()
        self.damaged = 0
        """Lines that are no records."""
        self.replaced = False
        """Whether a file was cut or replaced, as when a run is resumed: everything must be read again."""

    def read(self) -> Iterator[tuple[NodeId | None, list[Record]]]:
        """Yield new records of each node; None is the averaged model. An incomplete last line is left for later."""
        yield None, self._new_records(self._averages, str(self._folder.averages), None)
        try:
            with opened_folder(self._folder.path / "nodes") as folder:
                self._list_nodes(folder)
                for node, (name, position) in self._nodes.items():
                    if records := self._new_records(position, name, folder):
                        yield node, records
        except OSError:
            return  # no folder of records, or a link to somewhere else

    def read_node(self, node: NodeId, offset: int = 0) -> tuple[list[Record], int]:
        """Return the records of one node from a byte of its file on, and the byte after them."""
        position = _Position(offset)
        try:
            with opened_folder(self._folder.path / "nodes") as folder:
                return self._new_records(position, f"{node}.jsonl", folder), position.offset
        except OSError:
            return [], offset  # no folder of records, or a link to somewhere else

    def _list_nodes(self, folder: int) -> None:
        """Find the nodes that have a file, if the folder has changed."""
        changed = os.fstat(folder).st_mtime_ns
        if changed != self._listed:
            self._listed = changed
            found = sorted(int(match[1]) for name in os.listdir(folder) if (match := _FILE.fullmatch(name)))
            for node in found[:MAX_NODES]:
                self._nodes.setdefault(node, (f"{node}.jsonl", _Position()))

    def _new_records(self, position: _Position, path: str, folder: int | None) -> list[Record]:
        """Return the records of a file after a position, and move the position behind them."""
        try:
            found = os.stat(path, dir_fd=folder, follow_symlinks=False)
        except OSError:
            self.replaced |= position.offset > 0
            return []
        if found.st_size < position.offset or (position.inode != found.st_ino and position.inode is not None):
            self.replaced = True
        if self.replaced or found.st_size == position.offset or not stat.S_ISREG(found.st_mode):
            return []
        position.inode = found.st_ino
        try:
            file = os.open(path, READ_FLAGS, dir_fd=folder)
        except OSError:
            return []
        try:
            return self._read_from(file, position, found.st_size)
        except OSError:
            return []  # it is not a regular file any longer
        finally:
            os.close(file)

    def _read_from(self, file: int, position: _Position, size: int) -> list[Record]:
        records: list[Record] = []
        size = min(size, position.offset + READ_BYTES)
        while position.offset < size:
            content = os.pread(file, min(CHUNK_BYTES, size - position.offset), position.offset)
            whole = content.rfind(b"\n") + 1
            if not whole and len(content) < CHUNK_BYTES:
                break  # a line that is being written
            position.offset += whole or len(content)
            self.damaged += not whole
            records += self._decode(content[:whole])
        return records

    def _decode(self, lines: bytes) -> list[Record]:
        try:
            return _decoder.decode_lines(lines)
        except DAMAGED:
            return list(self._decode_each(lines))

    def _decode_each(self, lines: bytes) -> Iterator[Record]:
        for line in lines.splitlines():
            try:
                yield decode(line)
            except (*DAMAGED, AttributeError):  # AttributeError: JSON that is not an object
                self.damaged += 1
