"""The records of a run as columns, for fast reading: a million records take about a second.

    records = read_records(folder)
    records.rounds.loss                        # one item per `round` record
    records.evaluations.scores("accuracy")     # the evaluations that measured this metric

Columns are sorted by node. The records of one node are in the order of its file. If metrics.parquet holds all records
of the run, they are read from it, which is faster. Otherwise they are read from the files of the nodes. An incomplete
last line, as in a run that goes on, is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.results.records import (
    COUNT_KEY_IN_OLD_RUNS,
    REJOINED,
    Average,
    End,
    Evaluation,
    Event,
    Record,
    Round,
    RunFolder,
    decode_lines,
)
from shoal.types import NodeId

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Rounds:
    """The `round` records. All columns have one item per record."""

    row: Integers
    """The number of the record among all records of the run, from 0."""
    node: Integers
    round: Integers
    time: Floats
    loss: Floats
    """NaN if the record has none."""
    bytes_sent: Integers
    """As in the record: since the node started. `total_sent` also counts what it sent before it rejoined."""
    messages_sent: Integers


@dataclass(frozen=True)
class Scores:
    """One metric of the evaluations that measured it."""

    node: Integers
    round: Integers
    tick: Integers
    """-1 if the evaluation belongs to a round."""
    time: Floats
    score: Floats
    """NaN if the model diverged."""


@dataclass(frozen=True)
class Evaluations:
    """The `evaluation` records. All columns have one item per record."""

    row: Integers
    node: Integers
    round: Integers
    tick: Integers
    """-1 if the evaluation belongs to a round."""
    time: Floats
    values: Mapping[str, tuple[Integers, Floats]]
    """For each metric, the indices of the records that measured it, and its scores."""

    @property
    def metrics(self) -> list[str]:
        """The metrics that were measured, in the order of the records."""
        return list(self.values)

    def scores(self, metric: str) -> Scores:
        """Return the scores of one metric; no items if it was not measured."""
        at, score = self.values.get(metric, (np.empty(0, np.int64), np.empty(0)))
        return Scores(self.node[at], self.round[at], self.tick[at], self.time[at], score)


class NodeEvent(NamedTuple):
    """An `event` record of a node."""

    row: int
    node: NodeId
    event: Event


class NodeEnd(NamedTuple):
    """The `end` record of a node."""

    row: int
    node: NodeId
    end: End


@dataclass(frozen=True)
class RunRecords:
    """All records of a run."""

    rounds: Rounds
    evaluations: Evaluations
    events: Sequence[NodeEvent]
    ends: Sequence[NodeEnd]
    averages: Sequence[Average]
    """In the order of the file: averages are evaluated in parallel, so the last need not be the latest."""
    last_times: Mapping[NodeId, float]
    """The time of the last record of each node."""
    size: int
    """The number of records of all nodes, without averages."""

    def node_slice(self, node: NodeId) -> slice:
        """Return where the `round` records of a node are."""
        first, last = np.searchsorted(self.rounds.node, (node, node + 1))
        return slice(int(first), int(last))

    def total_sent(self) -> tuple[Integers, Integers]:
        """Return the bytes and messages that the node of each `round` record had sent since the start of the run.

        A node that rejoins starts to count from zero; this adds what it had sent before.
        """
        sent, messages = self.rounds.bytes_sent.copy(), self.rounds.messages_sent.copy()
        for row, node, event in self.events:
            if event.what == REJOINED:
                where = self.node_slice(node)
                at = where.start + int(np.searchsorted(self.rounds.row[where], row))
                for total, count in ((sent, self.rounds.bytes_sent), (messages, self.rounds.messages_sent)):
                    before = total[at - 1] if at > where.start else 0
                    total[at : where.stop] = count[at : where.stop] + before
        return sent, messages


class _RoundRow(msgspec.Struct, tag="round", tag_field="kind", frozen=True, gc=False):
    """The fields of `Round` that are columns. Decoding only these is faster."""

    round: int
    time: float
    loss: float | None
    bytes_sent: int
    messages_sent: int


ROUNDS = (_RoundRow, Round)
_decoder = msgspec.json.Decoder(_RoundRow | Evaluation | Average | Event | End)


@dataclass
class RecordColumns:
    """Collects the records of nodes as columns."""

    _rounds: list[tuple[Integers | Floats, ...]] = field(default_factory=list)
    _evaluations: list[tuple[int, NodeId, int, int]] = field(default_factory=list)
    _evaluation_times: array[float] = field(default_factory=lambda: array("d"))
    _scores: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    _events: list[NodeEvent] = field(default_factory=list)
    _ends: list[NodeEnd] = field(default_factory=list)
    _last_times: dict[NodeId, float] = field(default_factory=dict)
    _size: int = 0

    def add(self, node: NodeId, records: Sequence[Record | _RoundRow]) -> None:
        """Add all records of a node; nodes must come in ascending order."""
        if records:
            self._last_times[node] = records[-1].time
        rounds = [record for record in records if isinstance(record, ROUNDS)]
        if len(rounds) < len(records):
            self._add_others(node, records)
            at = [i for i, record in enumerate(records, self._size) if isinstance(record, ROUNDS)]
        else:
            at = list(range(self._size, self._size + len(records)))
        self._size += len(records)
        self._rounds.append((
            np.array(at, np.int64),
            np.full(len(rounds), node, np.int64),
            np.array([record.round for record in rounds], np.int64),
            np.array([record.time for record in rounds], np.float64),
            np.array([record.loss for record in rounds], np.float64),  # None becomes NaN
            np.array([record.bytes_sent for record in rounds], np.int64),
            np.array([record.messages_sent for record in rounds], np.int64),
        ))  # fmt: skip

    def _add_others(self, node: NodeId, records: Iterable[Record | _RoundRow]) -> None:
        for row, record in enumerate(records, self._size):
            if isinstance(record, Evaluation):
                for name, score in record.scores.items():
                    at, scores = self._scores.setdefault(name, (array("q"), array("d")))
                    at.append(len(self._evaluations))
                    scores.append(score)
                tick = -1 if record.tick is None else record.tick
                self._evaluations.append((row, node, record.round, tick))
                self._evaluation_times.append(record.time)
            elif isinstance(record, Event):
                self._events.append(NodeEvent(row, node, record))
            elif isinstance(record, End):
                self._ends.append(NodeEnd(row, node, record))

    def finish(self, averages: Sequence[Average] = ()) -> RunRecords:
        """Return all records that were added."""
        types = (np.int64, np.int64, np.int64, np.float64, np.float64, np.int64, np.int64)
        parts = zip(*self._rounds, strict=True) if self._rounds else ((),) * len(types)
        rounds = [np.concatenate([*part, np.empty(0, kind)]) for part, kind in zip(parts, types, strict=True)]
        row, node, round, tick = np.array(self._evaluations, np.int64).reshape(-1, 4).T
        values = {name: (np.array(at), np.array(scores)) for name, (at, scores) in self._scores.items()}
        evaluations = Evaluations(row, node, round, tick, np.array(self._evaluation_times), values)
        return RunRecords(
            Rounds(*rounds), evaluations, self._events, self._ends, averages, self._last_times, self._size
        )


def read_records(folder: RunFolder) -> RunRecords:
    """Read all records of a run. Raises `DataError` if a file is damaged."""
    columns = RecordColumns()
    for node in folder.recorded_nodes():
        try:
            columns.add(node, _read_file(folder.node(node)))
        except OverflowError as error:
            raise DataError(f"{folder.node(node)} has a number that is too large: the file is damaged") from error
    return columns.finish([record for record in folder.read_averages() if isinstance(record, Average)])


def _read_file(path: Path) -> Sequence[Record | _RoundRow]:
    content = path.read_bytes()
    content = content[: content.rfind(b"\n") + 1]
    found = None if COUNT_KEY_IN_OLD_RUNS in content else _decode_fast(content)
    return list(decode_lines(content.split(b"\n")[:-1], path)) if found is None else found


def _decode_fast(content: bytes) -> Sequence[Record | _RoundRow] | None:
    """Decode all lines at once; None if a line is damaged, or needs `decode`, such as that of a diverged model."""
    try:
        return _decoder.decode_lines(content)
    except (msgspec.MsgspecError, RecursionError):
        return None
