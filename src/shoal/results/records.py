"""What a run writes down.

    runs/<name>/<run id>/
      experiment.toml      the experiment as it was resolved, with versions
      nodes/<id>.jsonl     what each node recorded, one JSON object a line, appended and flushed
      averages.jsonl       the average of all models and the nodes' distance to it, at each evaluation
      nodes.log            whatever the nodes' code printed
      checkpoints/         the final models, <id>.npy
      metrics.parquet      all records, columnar
      summary.json         the run in a few numbers

Records are append-only and self-contained: a run that was cut off can still be read.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from shoal.errors import DataError, LaunchError
from shoal.types import NodeId, Params


class Round(msgspec.Struct, tag="round", tag_field="kind", frozen=True):
    """A round that a node finished. Bytes and messages are counted since the start of the run."""

    round: int
    time: float
    loss: float | None
    bytes_sent: int
    messages_sent: int


class Evaluation(msgspec.Struct, tag="evaluation", tag_field="kind", frozen=True, omit_defaults=True):
    """A node's model on the test data."""

    round: int
    time: float
    scores: dict[str, float]
    tick: int | None = None
    """The number of the moment, from 1, when all nodes are looked at every so many seconds; None when by rounds.
    Then it is left out of the line: a null in it would be read as NaN."""


class Average(msgspec.Struct, tag="average", tag_field="kind", frozen=True, omit_defaults=True):
    """The average of all nodes' models on the test data, and their root mean square distance to it."""

    round: int
    time: float
    nodes: int
    consensus_distance: float
    scores: dict[str, float]
    tick: int | None = None
    """As in `Evaluation`."""


class Event(msgspec.Struct, tag="event", tag_field="kind", frozen=True):
    """Something out of the ordinary."""

    what: str
    time: float
    detail: str


class End(msgspec.Struct, tag="end", tag_field="kind", frozen=True):
    """A node that reached the end of its algorithm. What the engine cannot know is None."""

    time: float
    digest: str
    bytes_sent: int
    messages_sent: int
    bad_messages: int
    late_messages: int
    unsent_messages: int = 0
    train_cpu_s: float | None = None
    total_cpu_s: float | None = None
    uss_mib: float | None = None
    pss_mib: float | None = None
    padded_s: float | None = None
    """How long training was drawn out to be as slow as the node's device."""
    repeated_messages: int = 0
    unauthenticated_connections: int = 0
    """Connections that were refused, where links are sealed."""


Record: TypeAlias = Round | Evaluation | Average | Event | End

OLD_NAME, NEW_NAME = "strangers", "unauthenticated_connections"
"""A key of `end` records and of summaries, as versions up to 0.1 wrote it, and its name now."""

_decoder = msgspec.json.Decoder(Record)
encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Record:
    """The record in `line`. JSON has no NaN and no infinity: the null that stands for them is read as NaN."""
    line = line.replace(f'"{OLD_NAME}":'.encode(), f'"{NEW_NAME}":'.encode())
    try:
        record: Record = _decoder.decode(line)
    except msgspec.ValidationError:
        record = msgspec.convert(_without_null(msgspec.json.decode(line)), Record)
    return record


def _without_null(fields: dict[str, Any]) -> dict[str, Any]:
    """For the records of a model that diverged."""
    scores = {name: _or_nan(score) for name, score in fields.get("scores", {}).items()}
    return {**{key: _or_nan(value) for key, value in fields.items()}, "scores": scores}


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value


class RecordFile:
    """One file of records, each on disk before the next is made."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: Record) -> None:
        self.write_all([encode(record)])

    def write_all(self, lines: list[bytes]) -> None:
        left = memoryview(b"\n".join([*lines, b""]))
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        os.close(self._file)


class BufferedRecordFiles:
    """The files of many nodes of one process: gathered in memory and appended every few seconds.

    Ten thousand files take a while to append to: that may take one part in fifty of the time, and no more.
    """

    SECONDS = 5.0
    SHARE = 1 / 50
    BYTES = 256 * 2**20

    def __init__(self, folder: RunFolder, nodes: int) -> None:
        self._folder = folder
        self._waiting: list[list[bytes]] = [[] for _ in range(nodes)]
        self._size = 0
        self._due = time.monotonic() + self.SECONDS

    def write(self, node: NodeId, record: Record) -> None:
        line = encode(record)
        self._waiting[node].append(line)
        self._size += len(line)

    def flush_if_due(self) -> None:
        if self._size > self.BYTES or time.monotonic() > self._due:
            self.flush()

    def flush(self) -> None:
        started = time.monotonic()
        for node, lines in enumerate(self._waiting):
            if lines:
                file = RecordFile(self._folder.node(node))
                file.write_all(lines)
                file.close()
                lines.clear()
        self._size = 0
        ended = time.monotonic()
        self._due = ended + max(self.SECONDS, (ended - started) / self.SHARE)


@dataclass(frozen=True)
class RunFolder:
    """Where one run lies."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """A new, empty folder `root/name/<run id>`."""
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = cls(root / name / run_id)
        try:
            for part in ("nodes", "checkpoints"):
                (folder.path / part).mkdir(parents=True)
        except OSError as error:
            raise LaunchError(
                f"cannot write to the output folder {str(root)!r}: {error.strerror}; choose another with --out"
            ) from error
        return folder

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.toml"

    @property
    def averages(self) -> Path:
        return self.path / "averages.jsonl"

    @property
    def mapping(self) -> Path:
        return self.path / "mapping.json"

    @property
    def log(self) -> Path:
        return self.path / "nodes.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.parquet"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def node(self, node: NodeId) -> Path:
        return self.path / "nodes" / f"{node}.jsonl"

    def model(self, node: NodeId) -> Path:
        return self.path / "checkpoints" / f"{node}.npy"

    def save_model(self, node: NodeId, params: Params) -> None:
        np.save(self.model(node), params)

    def read(self, node: NodeId) -> Iterator[Record]:
        return _read(self.node(node))

    def read_averages(self) -> Iterator[Record]:
        return _read(self.averages)

    def read_summary(self) -> dict[str, Any]:
        try:
            summary: dict[str, Any] = msgspec.json.decode(self.summary.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, OSError) as error:
            raise DataError(f"{self.summary} cannot be read: {error}; the records beside it may be whole") from error
        if OLD_NAME in summary:
            summary[NEW_NAME] = summary.pop(OLD_NAME)
        return summary


def _read(path: Path) -> Iterator[Record]:
    """The whole records in `path`; a last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield decode(line)
