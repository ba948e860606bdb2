"""The files of a run on an agent's machine, on their way to the coordinator: records, logs and models.

An agent sends what is new in its folder (`FileSender`), and the coordinator writes it into the folder of the run
(`FileReceiver`). Files that grow are sent by offset, so that a chunk is never written twice. Other files are replaced
atomically.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.engines.processes.remote.outbox import PART_BYTES
from shoal.engines.processes.remote.protocol import FileData
from shoal.errors import DiskFullError, MessageError
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import RecordFile, RunFolder, writing_to
from shoal.types import NodeId

CHUNK_BYTES = PART_BYTES
"""The most bytes of a file in one message."""
GROWING = re.compile(r"nodes/[0-9]+\.jsonl|averages\.jsonl|nodes\.log")
"""Files that are only appended to."""
REPLACED = re.compile(
    r"data\.json|checkpoints/([0-9]+\.npy|round-[0-9]+/[0-9]+\.safetensors|latest/[0-9]+-[0-9]+\.safetensors)"
)
"""Files that are written as a whole."""
MODELS = "checkpoints"
DATA = "data.json"
KEPT_STATES = 3
"""The latest states of each node that are kept, where nodes do not wait for each other."""
UNFINISHED = ".part"
MAX_WAITING_BYTES = 2**26
"""The most bytes of each agent that the coordinator keeps in memory while its disk is full. An agent stops earlier,
when the window of its link is full; this limit is for one that does not."""


class FileSender:
    """Finds what is new in the folder of a run.

    It reads a chunk when the chunk is asked for. Several iterators may be under way: a chunk of a growing file is
    yielded once, by the iterator that comes first.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._states = Checkpoints(folder)
        self._sent: dict[str, int] = {}
        """The bytes of each growing file that were sent."""
        self._whole_files: dict[str, tuple[int, int]] = {}
        """The size and the time of the last change of each other file that was sent."""

    def chunks(self) -> Iterator[tuple[FileData, bytes]]:
        """Yield what is new in records, logs and models. What is written meanwhile is in the next call."""
        for path in [*sorted((self._folder / "nodes").glob("*")), *sorted(self._folder.glob("*"))]:
            if GROWING.fullmatch(self._name(path)):
                yield from self._new_bytes(path)
        # Every machine has the data of all nodes: the machine of node 0 sends it.
        data = [self._folder / DATA] if (self._folder / "nodes" / "0.jsonl").exists() else []
        for path in [*data, *sorted((self._folder / MODELS).glob("*"))]:
            if REPLACED.fullmatch(self._name(path)):
                yield from self._whole(path)

    def checkpoint_chunks(self, node: NodeId, round: int) -> Iterator[tuple[FileData, bytes]]:
        """Yield what is new in the records of a node, and the state that it saved after `round`."""
        records = self._folder / "nodes" / f"{node}.jsonl"
        if records.exists():
            yield from self._new_bytes(records)
        for path in (self._states.state(round, node), self._states.latest_state(round, node)):
            yield from self._whole(path)

    def forget_state(self, node: NodeId, round: int) -> bool:
        """Forget a state. Returns whether it was sent: a node may have removed it before."""
        paths = self._states.state(round, node), self._states.latest_state(round, node)
        return any(self._whole_files.pop(self._name(path), None) is not None for path in paths)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _new_bytes(self, path: Path) -> Iterator[tuple[FileData, bytes]]:
        name = self._name(path)
        if path.stat().st_size <= self._sent.get(name, 0):
            return
        with path.open("rb") as file:
            while True:
                offset = file.seek(self._sent.get(name, 0))
                chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return
                self._sent[name] = offset + len(chunk)
                yield FileData(name, offset, grows=True), chunk

    def _whole(self, path: Path) -> Iterator[tuple[FileData, bytes]]:
        name = self._name(path)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return  # replaced or removed meanwhile
        with file:  # it is never changed: another file takes its place
            status = os.fstat(file.fileno())
            state = status.st_size, status.st_mtime_ns
            if self._whole_files.get(name) == state:
                return
            for offset in range(0, max(1, status.st_size), CHUNK_BYTES):
                last = offset + CHUNK_BYTES >= status.st_size
                yield FileData(name, offset, grows=False, last=last), file.read(CHUNK_BYTES)
            self._whole_files[name] = state


class FileReceiver:
    """Writes the files of one agent into the folder of the run. Several agents may append to the same file.

    While the disk is full, chunks wait in memory, at most `MAX_WAITING_BYTES`.
    """

    def __init__(self, folder: RunFolder, records_before: dict[NodeId, int] | None = None) -> None:
        """`records_before`, of a coordinator that continues the run of an earlier one: the bytes of each node's records
        that the agent does not have. The agent sends again what the earlier coordinator has not acknowledged."""
        self._folder = folder.path
        self._received: dict[str, int] = {}
        self._continued = None if records_before is None else _Continued(folder, records_before)
        self._waiting: deque[tuple[FileData, bytes]] = deque()
        self._waiting_bytes = 0

    @property
    def waits(self) -> bool:
        """Whether chunks wait for space on the disk."""
        return bool(self._waiting)

    def write(self, data: FileData, content: bytes) -> None:
        """Write a chunk, now or later. Raises `MessageError` for a path outside of the run's files, and `StorageError`.

        Raises `DiskFullError` only if too many chunks wait.
        """
        _check(data)
        if self._continued is not None:
            path = self._folder / data.path
            with writing_to(path):
                rest, offset = self._continued.rest(data, path, content)
            if data.path not in self._received or offset > data.offset:
                self._received[data.path] = offset
            if content and not rest:
                return
            data, content = msgspec.structs.replace(data, offset=offset), rest
        if data.offset != self._received.get(data.path, 0):
            raise MessageError(f"a chunk of {data.path!r} that does not follow the chunk before")
        self._received[data.path] = data.offset + len(content)
        if data.last:
            del self._received[data.path]
        self._waiting.append((data, content))
        self._waiting_bytes += len(content)
        exceeds = self._waiting_bytes > MAX_WAITING_BYTES
        if len(self._waiting) == 1 or exceeds:
            try:
                self.write_waiting()
            except DiskFullError:
                if exceeds:
                    raise

    def write_waiting(self) -> None:
        """Write the chunks that wait. Raises `DiskFullError`."""
        while self._waiting:
            data, content = self._waiting[0]
            _write(data, self._folder / data.path, content)
            self._waiting.popleft()
            self._waiting_bytes -= len(content)


def _write(data: FileData, path: Path, content: bytes) -> None:
    """Write all of a chunk, or nothing."""
    target = path if data.grows else path.with_name(path.name + UNFINISHED)
    with writing_to(path):
        path.parent.mkdir(exist_ok=True)
        if not data.grows and not data.offset:
            target.unlink(missing_ok=True)
        file = RecordFile(target)
        try:
            file.append(content)
        finally:
            file.close()
        if data.last:
            target.replace(path)
            _remove_older(path)


class _Continued:
    """The files that an earlier coordinator has received in part. It has written every chunk that it acknowledged."""

    def __init__(self, folder: RunFolder, records_before: dict[NodeId, int]) -> None:
        self._folder = folder
        self._records_before = records_before
        self._begun: set[str] = set()
        """Files of which a chunk has arrived since."""

    def rest(self, data: FileData, path: Path, content: bytes) -> tuple[bytes, int]:
        """The part of a chunk that is not written yet, and its offset."""
        if path.parent.name == "nodes":
            return self._rest_of_records(data, path, content)
        if data.path not in self._begun and not data.grows:
            _cut(path, data.offset)
        self._begun.add(data.path)
        if path == self._folder.averages and path.exists() and content in path.read_bytes():
            return b"", data.offset + len(content)  # every line is different: this one was written
        return content, data.offset

    def _rest_of_records(self, data: FileData, path: Path, content: bytes) -> tuple[bytes, int]:
        before = self._records_before.get(int(path.stem), 0)
        have = (path.stat().st_size if path.exists() else before) - before
        skipped = min(max(0, have - data.offset), len(content))
        return content[skipped:], data.offset + skipped


def _cut(path: Path, size: int) -> None:
    """Set the unfinished copy of a file back to its first bytes. The earlier coordinator may have finished it."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.parent.mkdir(exist_ok=True)
    if not unfinished.exists() and path.exists():
        shutil.copyfile(path, unfinished)
    unfinished.touch()
    os.truncate(unfinished, size)


def _remove_older(path: Path) -> None:
    """Remove older states of a node whose latest state has arrived, as the node does on its machine."""
    if path.parent.name == "latest":
        states = path.parent.glob(f"{path.stem.partition('-')[0]}-*.safetensors")
        for state in sorted(states, key=lambda state: int(state.stem.partition("-")[2]))[:-KEPT_STATES]:
            state.unlink(missing_ok=True)


def _check(data: FileData) -> None:
    """Raise `MessageError` if an agent may not write this file."""
    if (GROWING if data.grows else REPLACED).fullmatch(data.path) is None:
        raise MessageError(f"an agent sent the file {data.path[:100]!r}, which is no file of a run")
