"""metrics.parquet: all records of a run as one table, with a column for each field and each metric.

The metadata of the file shows whether it has all records: it has a hash of the sizes of the record files. A run that
is resumed appends to these files, so the hash differs until the run ends again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shoal.results.frames import (
    Evaluations,
    Integers,
    NodeEnd,
    NodeEvent,
    Rounds,
    RunRecords,
    last_of_each,
    read_lines,
)
from shoal.results.records import Average, End, Evaluation, Event, Record, Round, RunFolder, replacing
from shoal.types import NodeId

SIZES = b"shoal.sizes"
"""The key of the hash of the sizes of the record files."""
METRICS = b"shoal.metrics"
"""The key of the column of each metric, as JSON."""
ROWS_AT_ONCE = 1 << 17
"""The rows of the file that are read at once."""
ROUND_COLUMNS = ("node", "round", "time", "loss", "bytes_sent", "messages_sent")
EVALUATION_COLUMNS = ("node", "round", "tick", "time")
NO_METRICS = {"node", "kind"}.union(*(kind.__struct_fields__ for kind in (Round, Evaluation, Average, Event, End)))
"""The names of columns that are not metrics."""
NO_COLUMNS = ("scores", "spans")
"""Fields that hold several values: scores have their own columns, `activity.py` reads spans from the records."""

INTEGERS = ("row", "node", "round", "tick", "bytes_sent", "messages_sent")
"""The columns of whole numbers, of those above."""
RECORDS: dict[str, type[Average | Event | End]] = {"average": Average, "event": Event, "end": End}
"""The kinds of which there are few records."""

AnyRecord = TypeVar("AnyRecord", Average, Event, End)
Values: TypeAlias = tuple[NDArray[Any], NDArray[np.bool_]]
"""The values of a column, and which of them are not null."""


def write_metrics(folder: RunFolder, records: RunRecords | None = None) -> None:
    """Write all records as columns; fields that a kind of record does not have are null.

    `records` are those of the run, if they have been read before.
    """
    parts = _chunks(read_lines(folder) if records is None else records)
    first = next(parts)
    with replacing(folder.metrics) as unfinished, pq.ParquetWriter(unfinished, first.schema) as writer:
        for part in itertools.chain([first], parts):
            writer.write_table(part)


def metrics_table(folder: RunFolder) -> pa.Table:
    """Return the content of metrics.parquet, or what it would be if it does not have all records of the run."""
    with _complete_file(folder) as file:
        if file is not None:
            return file.read()
    return pa.concat_tables(_chunks(read_lines(folder)))


def read_metrics(folder: RunFolder) -> RunRecords | None:
    """Read all records of a run; None if the file is missing or damaged, or lacks records of the run."""
    with _complete_file(folder) as file:
        if file is None:
            return None
        columns = msgspec.json.decode(file.schema_arrow.metadata[METRICS], type=dict[str, str])
        return _read_table(file, columns, _file_sizes(folder))


@contextlib.contextmanager
def _complete_file(folder: RunFolder) -> Iterator[pq.ParquetFile | None]:
    """Open the file; None if it is missing or damaged, or lacks records of the run."""
    try:
        file = pq.ParquetFile(folder.metrics)
    except (OSError, pa.ArrowException):
        yield None
        return
    with file:
        metadata = file.schema_arrow.metadata or {}
        yield file if metadata.get(SIZES) == _hash_sizes(_file_sizes(folder)) else None


def _file_sizes(folder: RunFolder) -> dict[str, int]:
    """Return the size of each file of records."""
    files = [*(folder.node(node) for node in folder.recorded_nodes()), folder.averages]
    return {file.name: file.stat().st_size if file.exists() else 0 for file in files}


def _hash_sizes(sizes: Mapping[str, int]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sizes, order="sorted")).hexdigest().encode()


def _chunks(records: RunRecords) -> Iterator[pa.Table]:
    """Yield at least one part of the table: the records in the order of their files, the averages last."""
    averaged = (name for average in records.averages for name in average.scores)
    names = dict.fromkeys([*records.evaluations.metrics, *averaged])
    # The loss of rounds and the score "loss" are one column.
    columns = {name: f"score.{name}" if name in NO_METRICS - {"loss"} else name for name in names}
    metadata = {SIZES: _hash_sizes(records.file_sizes), METRICS: msgspec.json.encode(columns)}
    tables = _tables(records, columns)
    for start in range(0, max(1, records.size + len(records.averages)), ROWS_AT_ONCE):
        yield _rows(tables, start).replace_schema_metadata(metadata)


def _tables(records: RunRecords, columns: Mapping[str, str]) -> list[pa.Table]:
    """Return a table for rounds, and for each other kind that there are records of. Its column `row` is sorted."""
    rounds, evaluations = records.rounds, records.evaluations
    numbers = {name: pa.array(getattr(rounds, name)) for name in ("row", *ROUND_COLUMNS) if name != "loss"}
    loss = pa.array(rounds.loss, mask=np.isnan(rounds.loss))
    ticks = pa.array(evaluations.tick, mask=evaluations.tick < 0)
    scored = {name: pa.array(getattr(evaluations, name)) for name in ("row", *EVALUATION_COLUMNS) if name != "tick"}
    for metric, (at, scores) in evaluations.values.items():
        index = np.full(len(evaluations.row), -1)
        index[at] = np.arange(len(at))
        scored[columns[metric]] = pa.array(scores).take(pa.array(index, mask=index < 0))
    parts = [
        _with_kind("round", {**numbers, "loss": loss}),
        _with_kind("evaluation", {**scored, "tick": ticks}),
        _average_table(records.averages, records.size, columns),
        _small_table("event", records.events, Event),
        _small_table("end", records.ends, End),
    ]
    return [parts[0], *(part for part in parts[1:] if len(part))]  # a file has the columns of rounds in any case


def _rows(tables: Sequence[pa.Table], start: int) -> pa.Table:
    """Return some rows of the file, from `start` on."""
    parts = []
    for table in tables:
        begin, end = np.searchsorted(table["row"].to_numpy(), (start, start + ROWS_AT_ONCE)).tolist()
        parts.append(table.slice(begin, end - begin))
    rows = pa.concat_tables(parts, promote_options="default")
    names = dict.fromkeys(["node", "kind", "round", "time", *(name for name in rows.column_names if name != "row")])
    return rows.select(list(names)).take(rows["row"].to_numpy().argsort())


def _with_kind(kind: str, columns: Mapping[str, Any]) -> pa.Table:
    return pa.table({**columns, "kind": pa.repeat(kind, len(columns["row"]))})


def _small_table(kind: str, rows: Sequence[tuple[int, NodeId | None, Record]], record_type: type[Record]) -> pa.Table:
    """Return records of a kind of which there are few, without scores."""
    types = {int: pa.int64(), int | None: pa.int64(), str: pa.string()}
    found = {"row": pa.array([row for row, _, _ in rows], pa.int64())}
    found["node"] = pa.array([node for _, node, _ in rows], pa.int64())
    for field in msgspec.structs.fields(record_type):
        if field.name not in NO_COLUMNS:
            values = [getattr(record, field.name) for _, _, record in rows]
            found[field.name] = pa.array(values, types.get(field.type, pa.float64()))
    return _with_kind(kind, found)


def _average_table(averages: Sequence[Average], first: int, columns: Mapping[str, str]) -> pa.Table:
    """Return the averages; `first` is the row of the first one, `columns` are those of the metrics."""
    table = _small_table("average", [(first + i, None, average) for i, average in enumerate(averages)], Average)
    for metric, column in columns.items():
        scores = pa.array([average.scores.get(metric) for average in averages], pa.float64())
        table = table.append_column(column, scores)
    return table


def _read_table(file: pq.ParquetFile, columns: Mapping[str, str], sizes: Mapping[str, int]) -> RunRecords:
    names = dict.fromkeys([*ROUND_COLUMNS, *EVALUATION_COLUMNS, *columns.values()])
    known = [name for name in names if name in file.schema_arrow.names]
    rounds, evaluations = _Numbers(ROUND_COLUMNS), _Numbers((*EVALUATION_COLUMNS, *columns.values()))
    few: dict[str, list[tuple[int, NodeId, Any]]] = {kind: [] for kind in RECORDS}
    last_times: dict[NodeId, float] = {}
    first = 0
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        numbers = {name: _values(table[name]) for name in known}
        for kind, rows in _rows_of_kinds(table):
            if kind in RECORDS:
                few[kind] += _small_records(table, rows, first, RECORDS[kind], columns)
            else:
                (rounds if kind == "round" else evaluations).add(rows, first, numbers)
        (nodes, is_node), (times, _) = numbers["node"], numbers["time"]
        nodes, last = last_of_each(nodes[is_node])  # the records of a node are adjacent
        last_times.update(zip(nodes.tolist(), times[is_node][last].tolist(), strict=True))
        first += len(table)
    averages = [record for _, _, record in few["average"]]
    return RunRecords(
        _rounds(rounds),
        _evaluations(evaluations, columns),
        [NodeEvent(*row) for row in few["event"]],
        [NodeEnd(*row) for row in few["end"]],
        averages,
        last_times,
        first - len(averages),
        sizes,
    )


def _rows_of_kinds(table: pa.Table) -> Iterator[tuple[str, Integers]]:
    """Yield the kinds of records, and the rows of each."""
    kinds = table["kind"].combine_chunks().dictionary_encode()
    codes = np.from_dlpack(kinds.indices)
    for code, kind in enumerate(kinds.dictionary.to_pylist()):
        yield kind, np.flatnonzero(codes == code)


def _values(column: pa.ChunkedArray) -> Values:
    """Return a column of numbers: the values, and which of them are not null; a null is 0.

    `to_numpy` would import pandas if it is installed, which takes longer than to read the records.
    """
    array = column.combine_chunks()
    if array.type == pa.null():
        array = array.cast(pa.float64())
    if not array.null_count:
        return np.from_dlpack(array), np.ones(len(array), bool)
    valid = np.from_dlpack(array.is_valid().cast(pa.uint8())).view(bool)
    given = np.from_dlpack(array.drop_null())
    values = np.zeros(len(array), given.dtype)
    values[valid] = given
    return values, valid


class _Numbers:
    """The columns of numbers of one kind of records, from several parts of the file."""

    def __init__(self, names: Sequence[str]) -> None:
        self._parts: dict[str, list[Values]] = {name: [] for name in ("row", *names)}

    def add(self, rows: Integers, first: int, numbers: Mapping[str, Values]) -> None:
        """Add some rows of a part of the file that begins at the row `first`."""
        for name, parts in self._parts.items():
            values, valid = (rows + first, rows >= 0) if name == "row" else (a[rows] for a in numbers[name])
            parts.append((values, valid))

    def column(self, name: str) -> Values:
        """Return the values, and which of them are not null."""
        parts = self._parts[name]
        no_values = np.empty(0, np.int64 if name in INTEGERS else np.float64)
        values = np.concatenate([no_values, *(values for values, _ in parts)])
        return values, np.concatenate([np.empty(0, bool), *(valid for _, valid in parts)])


def _rounds(found: _Numbers) -> Rounds:
    numbers = {name: found.column(name)[0] for name in ("row", *ROUND_COLUMNS) if name != "loss"}
    loss, has_loss = found.column("loss")
    return Rounds(**numbers, loss=np.where(has_loss, loss, math.nan))


def _evaluations(found: _Numbers, columns: Mapping[str, str]) -> Evaluations:
    numbers = {name: found.column(name)[0] for name in ("row", *EVALUATION_COLUMNS) if name != "tick"}
    tick, has_tick = found.column("tick")
    values = {}
    for metric, column in columns.items():
        scores, measured = found.column(column)
        if measured.any():
            values[metric] = (np.flatnonzero(measured), scores[measured])
    return Evaluations(**numbers, tick=np.where(has_tick, tick, -1), values=values)


def _small_records(
    table: pa.Table, rows: Integers, first: int, record_type: type[AnyRecord], columns: Mapping[str, str]
) -> Iterator[tuple[int, NodeId, AnyRecord]]:
    """Yield the rows, nodes and records of a kind of which there are few."""
    names: list[str] = [name for name in record_type.__struct_fields__ if name in table.column_names]
    scores: Mapping[str, str] = columns if record_type is Average else {}
    wanted = table.select(list(dict.fromkeys(["node", *names, *scores.values()])))
    indices = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
    for number, row in zip(rows.tolist(), wanted.take(indices).to_pylist(), strict=True):
        fields = {name: row[name] for name in names}
        if record_type is Average:
            fields["scores"] = {metric: row[at] for metric, at in scores.items() if row[at] is not None}
        yield first + number, row["node"], msgspec.convert(fields, record_type)
