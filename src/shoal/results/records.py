"""The files of a run.

    runs/<name>/<run id>/
      experiment.toml      the resolved experiment, with the versions of the software
      mapping.json         the nodes on each machine
      data.json            the number of training samples, by class, of each node (see node_data.py)
      nodes/<id>.jsonl     the records of each node, one JSON object per line, appended; see thinning.py
      averages.jsonl       the average of all models and the nodes' distance to it, at each evaluation
      nodes.log            what the code of the nodes printed
      checkpoints/         the final models, <id>.npy, and the states of nodes (see checkpoints.py)
      metrics.parquet      all records as columns
      summary.json         the summary of the run

Records are only appended, so those of an interrupted run can be read too. A record refers to another one only in
`Round.sent_to`, which is omitted if it has not changed.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import secrets
import shutil
import time
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from shoal.errors import DataError, DiskFullError, LaunchError, StorageError
from shoal.results.spans import Span
from shoal.types import NodeId, Params

ROOT = Path("runs")
"""The folder of all runs, unless a command names another."""


class Round(msgspec.Struct, tag="round", tag_field="kind", frozen=True, omit_defaults=True):
    """A round that a node finished. Bytes and messages are counted since the node started."""

    round: int
    time: float
    loss: float | None
    bytes_sent: int
    messages_sent: int
    sent_to: list[NodeId] | None = None
    """The nodes, in order, that the node sent models to since its previous round. None, which is omitted from the line:
    the same nodes as in the latest record that has them, or unknown if no record has them (a run of an earlier
    version)."""
    spans: list[Span] = []
    """What the node did since its previous record, in order of time and without overlaps: see `spans.py`. It is omitted
    if it is empty, as in a run of an earlier version."""


class Evaluation(msgspec.Struct, tag="evaluation", tag_field="kind", frozen=True, omit_defaults=True):
    """The scores of a node's model on its test samples or, with `evaluation.split`, validation samples."""

    round: int
    time: float
    scores: dict[str, float]
    tick: int | None = None
    """The number of the evaluation, from 1, if all nodes are evaluated every few seconds; None if by rounds. None is
    omitted from the line: a null would be read as NaN."""


class Average(msgspec.Struct, tag="average", tag_field="kind", frozen=True, omit_defaults=True):
    """The scores of the average of all models, and the root mean square distance of the nodes to it."""

    round: int
    time: float
    nodes: int
    consensus_distance: float
    scores: dict[str, float]
    tick: int | None = None
    """As in `Evaluation`."""

    @property
    def moment(self) -> int:
        """The number of the tick, or else of the round."""
        return self.round if self.tick is None else self.tick


class Event(msgspec.Struct, tag="event", tag_field="kind", frozen=True, omit_defaults=True):
    """A fault, a rejected message or another event that is not part of a normal round."""

    what: str
    time: float
    detail: str
    count: int = 1
    """The number of events that the record stands for: this one, and those since the record before that have none."""


class End(msgspec.Struct, tag="end", tag_field="kind", frozen=True):
    """A node reached the end of its algorithm. A value that the engine cannot measure is None."""

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
    """Seconds that were added to training, so that the node is as slow as its device."""
    repeated_messages: int = 0
    unauthenticated_connections: int = 0
    """Connections that the node rejected because their peer was not authenticated, if links are sealed."""
    spans: list[Span] = []
    """What the node did since its last round, as in `Round`."""


Record: TypeAlias = Round | Evaluation | Average | Event | End

RESUMED = "resumed"
"""The event of a node that continues from a checkpoint."""
JOINED = "joined"
"""The event of a late node that begins where its peers are."""
NOT_JOINED = "has not joined the run"
"""Why a late node is not there.

The text is part of the format of checkpoints and of coordinator files: a run that is resumed or continued knows by it
which nodes still join. To change the text, change the format.
"""
DIVERGED = "diverged"
"""The event of a node whose training loss is not finite for the first time."""
NOT_TRAINED = "not trained"
"""The event of a training that did not change the model: all its steps were left out (`training.precision`)."""
REJOINED = "rejoined"
"""The event of a restarted node that continues where its peers are."""

_COUNT = "unauthenticated_connections"
_COUNT_IN_OLD_RUNS = "strangers"
"""The name of `unauthenticated_connections` in `end` records and summaries of earlier versions."""
_COUNT_KEY, COUNT_KEY_IN_OLD_RUNS = (f'"{name}":'.encode() for name in (_COUNT, _COUNT_IN_OLD_RUNS))

_decoder = msgspec.json.Decoder(Record)
encode = msgspec.json.Encoder().encode


def decode(line: bytes) -> Record:
    """Decode one line. JSON has neither NaN nor infinity: they are written as null and read as NaN."""
    if COUNT_KEY_IN_OLD_RUNS in line:
        _warn_of_old_run()
        line = line.replace(COUNT_KEY_IN_OLD_RUNS, _COUNT_KEY)
    try:
        record: Record = _decoder.decode(line)
    except msgspec.ValidationError:
        record = msgspec.convert(_null_to_nan(msgspec.json.decode(line)), Record)
    return record


def decode_lines(lines: Iterable[bytes], path: Path, first: int = 1) -> Iterator[Record]:
    """Decode the lines of a file, from the line `first` on. Raises `DataError` if a line is damaged."""
    for number, line in enumerate(lines, start=first):
        try:
            yield decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number} is damaged and not a record: {error}; remove this line to read the others"
            ) from error


def _null_to_nan(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace every null in the record of a diverged model."""
    replaced = {key: math.nan if value is None else value for key, value in fields.items()}
    if isinstance(fields.get("scores"), dict):
        replaced["scores"] = {k: math.nan if v is None else v for k, v in fields["scores"].items()}
    return replaced


@contextmanager
def writing_to(path: str | Path) -> Iterator[None]:
    """Turn an `OSError` while a file of a run is written into a `StorageError` with the remedy."""
    try:
        yield
    except OSError as error:
        where, kept = repr(str(path)), "'shoal show' can read the records that were written before"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"{where} cannot be written, because the disk or the quota is full: free some space, or choose "
            raise DiskFullError(f"{reason}another disk with --out, and start the run again; {kept}") from error
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
            raise StorageError(
                f"{where} cannot be written, because its folder was removed or moved during the run: start the run "
                "again, and keep its folder until it ends"
            ) from error
        reason = error.strerror or str(error)
        raise StorageError(f"{where} cannot be written: {reason}; choose another folder with --out; {kept}") from error


AnyPath = TypeVar("AnyPath", str, Path)


@contextmanager
def replacing(path: AnyPath) -> Iterator[AnyPath]:
    """Write a file of a run atomically: a reader sees the file as it was before, or all of it.

    Yields the path to write to. Raises `StorageError` if it cannot be written.
    """
    unfinished = type(path)(os.path.splitext(path)[0] + ".tmp")
    with writing_to(path):
        try:
            yield unfinished
            os.replace(unfinished, path)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)  # it takes space on a full disk
            raise


class RecordFile:
    """One file of records. Each record is handed to the operating system before `write` returns.

    Raises `StorageError` if the file cannot be written. It contains only whole records even then.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with writing_to(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: Record) -> None:
        self.write_all([encode(record)])

    def write_all(self, lines: list[bytes]) -> None:
        self.append(b"\n".join([*lines, b""]))

    def append(self, content: bytes) -> None:
        """Append all of `content`, or nothing."""
        left = memoryview(content)
        with writing_to(self._path):
            size = os.fstat(self._file).st_size
            written = 0
            try:
                while left:
                    written += (part := os.write(self._file, left))
                    left = left[part:]
            except OSError:
                if os.fstat(self._file).st_size == size + written:  # else another process has written to it too
                    os.ftruncate(self._file, size)  # a part of a record would corrupt the next one
                raise

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """Create the folder `root/name/<run id>`. Raises `LaunchError` if it cannot be written.

        Only its owner may read it: it holds models and addresses.
        """
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = cls(root / name / run_id)
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=0o700)
            for part in ("nodes", "checkpoints"):
                (folder.path / part).mkdir()
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
    def data(self) -> Path:
        return self.path / "data.json"

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

    def remove(self) -> None:
        """Remove the folder, and the folder of all runs of this name if it has no other run."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it has other runs
            self.path.parent.rmdir()

    def check(self) -> None:
        """Raise `StorageError` if the folder does not exist any longer."""
        with writing_to(self.summary):
            os.stat(self.path)

    def save_model(self, node: NodeId, params: Params) -> None:
        with replacing(self.model(node)) as unfinished, unfinished.open("wb") as file:
            np.save(file, params)

    def read(self, node: NodeId) -> Iterator[Record]:
        """Read the records of one node."""
        return _read(self.node(node))

    def recorded_nodes(self) -> list[NodeId]:
        """Return the nodes that have a file of records."""
        names = (file.stem for file in (self.path / "nodes").glob("*.jsonl"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def read_all(self) -> Iterator[tuple[NodeId, Record]]:
        """Read the records of all nodes, node by node."""
        for node in self.recorded_nodes():
            for record in self.read(node):
                yield node, record

    def read_averages(self) -> Iterator[Record]:
        """Read the evaluations of the averaged model."""
        return _read(self.averages)

    def read_experiment(self) -> dict[str, Any]:
        """Read the resolved experiment as plain data; empty if the run did not write it."""
        try:
            return tomllib.loads(self.experiment.read_text()) if self.experiment.exists() else {}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise DataError(f"{self.experiment} cannot be read: {error}") from error

    def read_summary(self) -> dict[str, Any]:
        """Read the summary. Raises `DataError` if it is missing or damaged."""
        try:
            summary: dict[str, Any] = msgspec.json.decode(self.summary.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, OSError) as error:
            raise DataError(f"{self.summary} cannot be read: {error}; its records may be intact") from error
        if _COUNT_IN_OLD_RUNS in summary:
            _warn_of_old_run()
            summary[_COUNT] = summary.pop(_COUNT_IN_OLD_RUNS)
        return summary


def latest_run(path: Path) -> RunFolder | None:
    """Return the run at `path`, or the latest run below it; None if there is none. It may be in progress.

    A path that does not exist may be the name of an experiment, whose runs are in `runs`.
    """
    return next(iter(runs_below(path)), None)


def runs_below(path: Path) -> list[RunFolder]:
    """Return the run at `path`, and the runs below it, the latest first. `path` is that of `latest_run`."""
    if not path.exists() and len(path.parts) == 1:
        path = ROOT / path
    files = [*path.rglob("summary.json"), *path.rglob("experiment.toml")] if path.is_dir() else []
    folders = {file.parent for file in files if file.name == "summary.json" or (file.parent / "nodes").is_dir()}
    return sorted((RunFolder(folder) for folder in folders), key=_last_change, reverse=True)


def _last_change(run: RunFolder) -> float:
    """When the run wrote its summary, or else when it was created."""
    return (run.summary if run.summary.exists() else run.experiment).stat().st_mtime


def _warn_of_old_run() -> None:
    warnings.warn(
        f"a run of an earlier version: its key {_COUNT_IN_OLD_RUNS!r} is read as {_COUNT!r}",
        FutureWarning,
        stacklevel=3,
    )


def _read(path: Path) -> Iterator[Record]:
    """Read the records in `path` without an incomplete last line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from decode_lines(itertools.takewhile(lambda line: line.endswith(b"\n"), file), path)
