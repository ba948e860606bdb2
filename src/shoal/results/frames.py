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
from collections.abc import Mapping, Sequence
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
    """As in the record: since the node started. `RunRecords.sent` also counts what it sent before it rejoined."""
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

    def select(self, items: NDArray[np.bool_] | NDArray[np.intp]) -> Scores:
        """Return some of the items, by a mask or by their indices."""
        return Scores(self.node[items], self.round[items], self.tick[items], self.time[items], self.score[items])


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
class Traffic:
    """The bytes and messages that nodes had sent since the start of the run."""

    bytes: Integers
    """At each `round` record, by its node."""
    messages: Integers
    by_node: Mapping[NodeId, tuple[int, int]]
    """Bytes and messages of each node in total."""


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
    file_sizes: Mapping[str, int]
    """The size in bytes of each file of records when it was read."""

    def node_slice(self, node: NodeId) -> slice:
        """Return where the `round` records of a node are."""
        first, last = np.searchsorted(self.rounds.node, (node, node + 1))
        return slice(int(first), int(last))

    def last_rounds(self) -> dict[NodeId, int]:
        """Return the round of the last `round` record of each node."""
        nodes, last = last_of_each(self.rounds.node)
        return dict(zip(nodes.tolist(), self.rounds.round[last].tolist(), strict=True))

    @property
    def duration(self) -> float:
        """The latest time of a record; 0 if there are none."""
        times = [float(column.max()) for column in (self.rounds.time, self.evaluations.time) if len(column)]
        others = [event.time for _, _, event in self.events] + [end.time for _, _, end in self.ends]
        return max([*times, *others], default=0.0)

    def sent(self) -> Traffic:
        """Return what all nodes sent since the start of the run.

        A node that rejoins starts to count from zero; this adds what it had sent before.
        """
        counts = self.rounds.bytes_sent, self.rounds.messages_sent
        totals = counts[0].copy(), counts[1].copy()
        before: dict[NodeId, tuple[int, int]] = {}
        for row, node, event in self.events:
            if event.what == REJOINED:
                where = self.node_slice(node)
                at = where.start + int(np.searchsorted(self.rounds.row[where], row))
                if at > where.start:
                    before[node] = int(totals[0][at - 1]), int(totals[1][at - 1])
                    for total, count, earlier in zip(totals, counts, before[node], strict=True):
                        total[at : where.stop] = count[at : where.stop] + earlier
        nodes, last = last_of_each(self.rounds.node)
        by_node = dict(
            zip(nodes.tolist(), zip(totals[0][last].tolist(), totals[1][last].tolist(), strict=True), strict=True)
        )
        for _, node, end in self.ends:
            earlier_bytes, earlier_messages = before.get(node, (0, 0))
            by_node[node] = earlier_bytes + end.bytes_sent, earlier_messages + end.messages_sent
        return Traffic(*totals, by_node)


def last_of_each(nodes: Integers) -> tuple[Integers, Integers]:
    """Return the nodes in a sorted column, and the index of the last item of each."""
    last = np.flatnonzero(np.diff(nodes, append=-1))
    return nodes[last], last


class RoundColumns(msgspec.Struct, tag="round", tag_field="kind", frozen=True, gc=False):
    """The fields of `Round` that are columns. To decode only these is faster."""

    round: int
    time: float
    loss: float | None
    bytes_sent: int
    messages_sent: int


ColumnRecord: TypeAlias = RoundColumns | Evaluation | Average | Event | End
_decoder = msgspec.json.Decoder(ColumnRecord)


def _only_columns(record: Record) -> ColumnRecord:
    """Return the record without fields that are not columns."""
    if not isinstance(record, Round):
        return record
    return RoundColumns(record.round, record.time, record.loss, record.bytes_sent, record.messages_sent)


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

    def add(self, node: NodeId, records: Sequence[ColumnRecord]) -> None:
        """Add all records of a node; nodes must come in ascending order."""
        if not records:
            return
        self._last_times[node] = records[-1].time
        rounds = [record for record in records if type(record) is RoundColumns]
        others = [at for at, record in enumerate(records) if type(record) is not RoundColumns]
        self._add_others(node, {self._size + at: records[at] for at in others})
        self._rounds.append((
            np.delete(np.arange(self._size, self._size + len(records)), others),
            np.full(len(rounds), node, np.int64),
            np.fromiter([record.round for record in rounds], np.int64),
            np.fromiter([record.time for record in rounds], np.float64),
            np.array([record.loss for record in rounds], np.float64),  # None becomes NaN
            np.fromiter([record.bytes_sent for record in rounds], np.int64),
            np.fromiter([record.messages_sent for record in rounds], np.int64),
        ))  # fmt: skip
        self._size += len(records)

    def _add_others(self, node: NodeId, records: Mapping[int, ColumnRecord]) -> None:
        """Add records that are not rounds, by their rows."""
        first = len(self._evaluations)
        measured: list[dict[str, float]] = []
        for row, record in records.items():
            if isinstance(record, Evaluation):
                self._evaluations.append((row, node, record.round, -1 if record.tick is None else record.tick))
                self._evaluation_times.append(record.time)
                measured.append(record.scores)
            elif isinstance(record, Event):
                self._events.append(NodeEvent(row, node, record))
            elif isinstance(record, End):
                self._ends.append(NodeEnd(row, node, record))
        for name in dict.fromkeys(name for scores in measured for name in scores):
            at, found = self._scores.setdefault(name, (array("q"), array("d")))
            at.extend([i for i, scores in enumerate(measured, first) if name in scores])
            found.extend([scores[name] for scores in measured if name in scores])

    def finish(self, averages: Sequence[Average] = (), file_sizes: Mapping[str, int] | None = None) -> RunRecords:
        """Return all records that were added."""
        types = (np.int64, np.int64, np.int64, np.float64, np.float64, np.int64, np.int64)
        parts = zip(*self._rounds, strict=True) if self._rounds else ((),) * len(types)
        rounds = [np.concatenate([*part, np.empty(0, kind)]) for part, kind in zip(parts, types, strict=True)]
        row, node, round, tick = np.array(self._evaluations, np.int64).reshape(-1, 4).T
        values = {name: (np.array(at), np.array(scores)) for name, (at, scores) in self._scores.items()}
        evaluations = Evaluations(row, node, round, tick, np.array(self._evaluation_times), values)
        others = self._events, self._ends, averages, self._last_times, self._size, file_sizes or {}
        return RunRecords(Rounds(*rounds), evaluations, *others)


def read_records(folder: RunFolder) -> RunRecords:
    """Read all records of a run. Raises `DataError` if a file is damaged."""
    if folder.metrics.exists():
        from shoal.results.metrics_file import read_metrics

        if (found := read_metrics(folder)) is not None:
            return found
    return read_lines(folder)


def read_lines(folder: RunFolder) -> RunRecords:
    """Read all records of a run from the files of its nodes. Raises `DataError` if a file is damaged."""
    columns = RecordColumns()
    sizes: dict[str, int] = {}
    for node in folder.recorded_nodes():
        path = folder.node(node)
        content = path.read_bytes()
        sizes[path.name] = len(content)
        try:
            columns.add(node, _decode_file(content, path))
        except OverflowError as error:
            raise DataError(f"{path} has a number that is too large: the file is damaged") from error
    content = folder.averages.read_bytes() if folder.averages.exists() else b""
    averages = [record for record in _decode_file(content, folder.averages) if isinstance(record, Average)]
    return columns.finish(averages, {**sizes, folder.averages.name: len(content)})


def _decode_file(content: bytes, path: Path) -> Sequence[ColumnRecord]:
    """Decode all lines without an incomplete last one."""
    content = content[: content.rfind(b"\n") + 1]
    end = content.rfind(b'"kind":"end"')  # of a run of an earlier version, this record needs `decode`
    is_old = end >= 0 and COUNT_KEY_IN_OLD_RUNS in content[end:]
    found = None if is_old else _decode_fast(content)
    if found is None:
        found = [_only_columns(record) for record in decode_lines(content.split(b"\n")[:-1], path)]
    return found


def _decode_fast(content: bytes) -> Sequence[ColumnRecord] | None:
    """Decode all lines at once; None if a line is damaged, or needs `decode`, such as that of a diverged model."""
    try:
        return _decoder.decode_lines(content)
    except (msgspec.MsgspecError, RecursionError):
        return None
