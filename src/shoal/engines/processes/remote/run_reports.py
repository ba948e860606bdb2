"""What a run on an agent's machine sends to the coordinator: reports, messages of nodes, checkpoints and files.

Heartbeats and progress reports are sent at once, or replace each other while the coordinator is away. Other messages of
a node stay in order: the state of a checkpoint arrives before the report that it was saved. Files stay on the disk
until the link can take them. Models that wait for more than `MAX_WAITING_BYTES` of memory do so too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.engines.processes import control
from shoal.engines.processes.control_server import ControlMessage
from shoal.engines.processes.remote import protocol
from shoal.engines.processes.remote.files import MODELS, FileSender
from shoal.engines.processes.remote.link import Link
from shoal.engines.processes.remote.outbox import Frames, Stream
from shoal.results.records import RunFolder
from shoal.types import NodeId

SCAN_SECONDS = 0.5
"""How often the files of a run are searched for new content."""
FILES = "files"
"""The stream of files."""
NETWORK = "network"
"""The stream of the network process."""
KEPT_CHECKPOINTS = 3
"""Saved states of each node that stay on this machine after the coordinator got them."""
MAX_WAITING_BYTES = 2**24
"""While so much waits in memory, further models wait on the disk."""
WAITING = "waiting"
"""The folder of models that wait, in the folder of the run."""


class RunReports:
    """Passes on what one run has to report."""

    def __init__(self, link: Link, folder: RunFolder) -> None:
        self._link = link
        self._folder = folder.path
        self._files = FileSender(folder)
        self._scan_at = 0.0
        self._models = 0
        """How many models have waited on the disk."""
        self._collecting = self._searched = self._collected = False

    def report(self, report: protocol.FromRemote) -> None:
        """Send a report of the agent. A report on a node stays behind the node's messages."""
        stream: Stream = None
        if isinstance(report, control.NodeExited | control.KeyAnnounced):
            stream = NETWORK if report.node is None else report.node
        elif isinstance(report, control.NetworkExited):
            stream = NETWORK
        self._link.send(protocol.encode(report), stream=stream)

    def pass_on(self, received: ControlMessage) -> None:
        """Send a message of a node or of the network process."""
        message = received.message
        encoded = protocol.encode(protocol.FromNode(message))
        if (kind := _kind_of_report(message)) is not None:
            self._link.send_report(kind, encoded)
        elif isinstance(message, control.FromNetwork):
            self._link.send(encoded, stream=NETWORK)
        elif isinstance(message, control.CheckpointSaved) and message.saved is not None:
            self._link.send_later(self._checkpoint(message.node, message.saved.round, encoded), message.node)
        elif received.params is not None:
            self._send_model(message.node, encoded, received.params.tobytes())
        else:
            self._link.send(encoded, stream=message.node)

    def collect(self) -> None:
        """Send the rest of all files: no node writes any more. A new coordinator may ask for it once more."""
        self._collecting, self._searched, self._collected = True, False, False

    def advance(self, now: float) -> None:
        """Search for new files if it is time, and send what the link can take. Raises `OSError`."""
        due = now >= self._scan_at or (self._collecting and not self._searched)
        if due and not self._link.waits(FILES):
            self._scan_at = now + SCAN_SECONDS
            self._searched = self._collecting
            self._link.send_later(self._new_files(), FILES)
        self._link.pump()

    def collected(self) -> bool:
        """Whether everything has been sent, after `collect`. True once."""
        if self._collected or not (self._searched and self._link.all_sent):
            return False
        self._collected = True
        return True

    def _new_files(self) -> Iterator[Frames]:
        for data, content in self._files.chunks():
            yield [protocol.encode(data), content]

    def _checkpoint(self, node: NodeId, round: int, report: bytes) -> Iterator[Frames]:
        """The records and the state of a node, and then its report that the state was saved."""
        for data, content in self._files.checkpoint_chunks(node, round):
            yield [protocol.encode(data), content]
        if self._files.forget_state(node, round):  # otherwise the node has removed it, and saved a later one
            yield [report]
        self._remove_old_states(node, round)

    def _remove_old_states(self, node: NodeId, round: int) -> None:
        """Remove old states, except those that were not sent yet."""
        sent = []
        for path in (self._folder / MODELS).glob(f"round-*/{node}.safetensors"):
            saved = int(path.parent.name.removeprefix("round-"))
            if saved <= round:
                sent.append((saved, path))
        for _, path in sorted(sent)[:-KEPT_CHECKPOINTS]:
            path.unlink(missing_ok=True)

    def _send_model(self, node: NodeId, encoded: bytes, params: bytes) -> None:
        if self._link.waiting_bytes + len(params) > MAX_WAITING_BYTES:
            path = self._folder / WAITING / str(self._models)
            self._models += 1
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(params)
            except OSError:  # the disk is full: it waits in memory
                path.unlink(missing_ok=True)
            else:
                self._link.send_later(_model(encoded, path), node)
                return
        self._link.send(encoded, params, stream=node)


def _model(encoded: bytes, path: Path) -> Iterator[Frames]:
    """A model that waits on the disk."""
    params = path.read_bytes()
    path.unlink()
    yield [encoded, params]


def _kind_of_report(message: control.FromNode) -> tuple[object, ...] | None:
    """The kind of a report of which only the latest matters; None for other messages."""
    if isinstance(message, control.Heartbeat):
        return "heartbeat", message.node, message.busy
    if isinstance(message, control.ProgressReport):
        return "progress", message.node, message.evaluated is None
    if isinstance(message, control.NetworkHeartbeat):
        return ("network heartbeat",)
    return None
