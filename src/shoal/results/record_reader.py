"""Reads the records of a run while it goes on."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.results.records import Record, RunFolder, decode
from shoal.types import NodeId


class RecordReader:
    """Returns every record of the nodes once. It begins after the records that are there when it is created."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._read = {node: folder.node(node).stat().st_size for node in folder.recorded_nodes()}
        """The bytes of each file that were read."""

    def new_records(self) -> Iterator[tuple[NodeId, Record]]:
        """Yield the records that were written since the last call, node by node."""
        for node in self._folder.recorded_nodes():
            with self._folder.node(node).open("rb") as file:
                file.seek(self._read.get(node, 0))
                content = file.read()
            whole = content.rfind(b"\n") + 1  # the rest is a record that is being written
            self._read[node] = self._read.get(node, 0) + whole
            for line in content[:whole].splitlines():
                yield node, decode(line)
