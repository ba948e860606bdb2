"""The files of a run on an agent's machine, on their way to the coordinator: records, logs and models.

An agent sends what is new in its folder (`FileSender`), and the coordinator writes it into the folder of the run
(`FileReceiver`). Files that grow are sent by offset, so that a chunk is never written twice. Other files are replaced
atomically.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from shoal.engines.processes.remote.protocol import FileData
from shoal.errors import DiskFullError, MessageError
from shoal.results.records import RecordFile, RunFolder, writing_to
from shoal.types import NodeId

CHUNK_BYTES = 2**18
"""The most bytes of a file in one message."""
GROWING = re.compile(r"nodes/[0-9]+\.jsonl|averages\.jsonl|nodes\.log")
"""Files that are only appended to."""
REPLACED = re.compile(r"checkpoints/([0-9]+\.npy|round-[0-9]+/[0-9]+\.safetensors|latest/[0-9]+-[0-9]+\.safetensors)")
"""Files that are written as a whole."""
MODELS = "checkpoints"
KEPT_STATES = 3
"""The latest states of each node that are kept, where nodes do not wait for each other."""
UNFINISHED = ".part"
MAX_WAITING_BYTES = 2**26
"""The most bytes of each agent that the coordinator keeps in memory while its disk is full."""


class FileSender:
    """Finds what is new in the folder of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._sent: dict[str, int] = {}
        """The bytes of each growing file that were sent."""
        self._models: dict[str, tuple[int, int]] = {}
        """The size and the time of the last change of each other file that was sent."""

    def chunks(self) -> Iterator[tuple[FileData, bytes]]:
        """Yield what is new, in chunks. What is written meanwhile is in the next call."""
        for path in [*sorted((self._folder / "nodes").glob("*")), *sorted(self._folder.glob("*"))]:
            if GROWING.fullmatch(self._name(path)):
                yield from self._new_bytes(path)
        models = {
            name: path for path in (self._folder / MODELS).rglob("*") if REPLACED.fullmatch(name := self._name(path))
        }
        self._models = {name: state for name, state in self._models.items() if name in models}
        for _, path in sorted(models.items()):
            yield from self._whole(path)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def chunks_of(self, node: NodeId) -> Iterator[tuple[FileData, bytes]]:
        """Yield what is new in the records and the saved states of one node."""
        records = self._folder / "nodes" / f"{node}.jsonl"
        if records.exists():
            yield from self._new_bytes(records)
        for pattern in (f"round-*/{node}.safetensors", f"latest/{node}-*.safetensors"):
            for path in sorted((self._folder / MODELS).glob(pattern)):
                yield from self._whole(path)

    def _new_bytes(self, path: Path) -> Iterator[tuple[FileData, bytes]]:
        name = self._name(path)
        sent = self._sent.get(name, 0)
        if path.stat().st_size <= sent:
            return
        with path.open("rb") as file:
            file.seek(sent)
            while chunk := file.read(CHUNK_BYTES):
                self._sent[name] = sent + len(chunk)
                yield FileData(name, sent, grows=True), chunk
                sent += len(chunk)

    def _whole(self, path: Path) -> Iterator[tuple[FileData, bytes]]:
        name = self._name(path)
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                state = status.st_size, status.st_mtime_ns
                if self._models.get(name) == state:
                    return
                content = file.read()
        except FileNotFoundError:
            return  # replaced or removed meanwhile
        self._models[name] = state
        for offset in range(0, max(1, len(content)), CHUNK_BYTES):
            chunk = content[offset : offset + CHUNK_BYTES]
            yield FileData(name, offset, grows=False, last=offset + len(chunk) == len(content)), chunk


class FileReceiver:
    """Writes the files of one agent into the folder of the run. Several agents may append to the same file.

    While the disk is full, chunks wait in memory, at most `MAX_WAITING_BYTES`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._received: dict[str, int] = {}
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
