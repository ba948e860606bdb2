"""Reads the records of a run as they are appended: each byte is read once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.dashboard.files import opened_file, opened_folder
from shoal.results.records import Record, RunFolder, decode
from shoal.types import NodeId

CHUNK_BYTES = 8 * 2**20
"""The most bytes of a file that are read at once. A longer line is damaged."""
MAX_NODES = 100_000
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for text that is not a record."""

_FILE = re.compile(r"(\d{1,9})\.jsonl")
_decoder = msgspec.json.Decoder(Record)


@dataclass
class _Position:
    """How much of a file was read."""

    offset: int = 0
    inode: int | None = None


class RecordTail:
    """The records of the nodes and of the averaged model that were appended since the last call."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._nodes: dict[NodeId, _Position] = {}
        self._averages = _Position()
        self.damaged = 0
        """Lines that are no records."""
        self.replaced = False
        """Whether a file was cut or replaced, as when a run is resumed: everything must be read again."""

    def read(self) -> Iterator[tuple[NodeId | None, list[Record]]]:
        """Yield new records of each node; None is the averaged model. An incomplete last line is left for later."""
        yield from self._read_file(None, self._averages, self._folder.averages, None)
        try:
            with opened_folder(self._folder.path / "nodes") as folder:
                for node in _node_ids(folder):
                    position = self._nodes.setdefault(node, _Position())
                    yield from self._read_file(node, position, f"{node}.jsonl", folder)
        except OSError:
            return  # no folder of records, or a link to somewhere else

    def read_node(self, node: NodeId, offset: int = 0) -> tuple[list[Record], int]:
        """Return the records of one node from a byte of its file on, and the byte after them."""
        position = _Position(offset)
        records: list[Record] = []
        try:
            with opened_folder(self._folder.path / "nodes") as folder:
                for _, found in self._read_file(node, position, f"{node}.jsonl", folder):
                    records += found
        except OSError:
            return [], offset  # no folder of records, or a link to somewhere else
        return records, position.offset

    def _read_file(
        self, node: NodeId | None, position: _Position, path: Path | str, folder: int | None
    ) -> Iterator[tuple[NodeId | None, list[Record]]]:
        try:
            found = os.stat(path, dir_fd=folder, follow_symlinks=False)
        except OSError:
            self.replaced |= position.offset > 0
            return
        if position.inode not in (None, found.st_ino) or found.st_size < position.offset:
            self.replaced = True
        if self.replaced or found.st_size == position.offset:
            return
        position.inode = found.st_ino
        try:
            with opened_file(path, folder) as (file, _):
                while content := os.pread(file, CHUNK_BYTES, position.offset):
                    whole = content.rfind(b"\n") + 1
                    if not whole and len(content) < CHUNK_BYTES:
                        return
                    position.offset += whole or len(content)
                    yield node, self._decode(content[:whole]) if whole else []
        except OSError:
            return

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


def _node_ids(folder: int) -> list[NodeId]:
    """Return the nodes that have a file of records in an opened folder."""
    found = sorted(int(match[1]) for name in os.listdir(folder) if (match := _FILE.fullmatch(name)))
    return found[:MAX_NODES]
