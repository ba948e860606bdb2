"""Reads the records of a run while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.errors import DataError
from shoal.results.records import Record, RunFolder, decode_lines
from shoal.types import NodeId


class RecordReader:
    """Returns every record once. By default, it begins after the records that are there when it is created."""

    def __init__(self, folder: RunFolder, from_start: bool = False) -> None:
        self._folder = folder
        self._from_start = from_start
        self._nodes = {} if from_start else {node: _Tail(folder.node(node)) for node in folder.recorded_nodes()}
        self._averages = _Tail(folder.averages, from_start)

    def new_records(self, most_bytes: int = -1) -> Iterator[tuple[NodeId, Record]]:
        """Yield the records of nodes that were written since the last call, node by node.

        With `most_bytes`, read about as much of each file, so that the nodes of a long run advance together.
        """
        for node in self._folder.recorded_nodes():
            if node not in self._nodes:
                self._nodes[node] = _Tail(self._folder.node(node), from_start=True)
            for record in self._nodes[node].read(most_bytes):
                yield node, record

    def new_averages(self) -> Iterator[Record]:
        """Yield the evaluations of the averaged model that were written since the last call."""
        return self._averages.read(-1)


class _Tail:
    """The part of a file that was not read yet."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size
        self._lines = 0

    def read(self, most_bytes: int) -> Iterator[Record]:
        """Yield the next records of the file, without a last line that is incomplete."""
        lines = self._next_lines(most_bytes)
        first, self._lines = self._lines + 1, self._lines + len(lines)
        yield from decode_lines(lines, self._path, first)

    def _next_lines(self, most_bytes: int) -> list[bytes]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
        with file:
            if file.seek(0, 2) < self._offset:
                raise DataError(
                    f"{self._path} has fewer records than before: the run was resumed from a checkpoint; start "
                    "again to read it from its beginning"
                )
            file.seek(self._offset)
            content = file.read(most_bytes)
            if most_bytes >= 0:
                content += file.readline()
        whole = content.rfind(b"\n") + 1  # the rest is a record that is being written
        self._offset += whole
        return content[:whole].splitlines()
