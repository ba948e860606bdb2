"""metrics.parquet: all records of a run as one table, with a column for each field and each metric.

The metadata of the file tells whether it has all records: it has a hash of the sizes of the record files. A run that
is resumed appends to these files, so the hash differs until the run ends again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shoal.results.frames import (
    Evaluations,
    NodeEnd,
    NodeEvent,
    RecordColumns,
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

AnyRecord = TypeVar("AnyRecord", Average, Event, End)


def write_metrics(folder: RunFolder, records: RunRecords | None = None) -> None:
    """Write all records as columns; fields that a kind of record does not have are null.

    `records` are those of the run, if they have been read before.
    """
    if records is None:
        records = read_lines(folder)
    averaged = (name for average in records.averages for name in average.scores)
    names = dict.fromkeys([*records.evaluations.metrics, *averaged])
    # The loss of rounds and the score "loss" are one column.
    columns = {name: f"score.{name}" if name in NO_METRICS - {"loss"} else name for name in names}
    metadata = {SIZES: _hash_sizes(records.file_sizes), METRICS: msgspec.json.encode(columns)}
    parts = _tables(records, columns)
    first = _rows(parts, 0)
    with (
        replacing(folder.metrics) as unfinished,
        pq.ParquetWriter(unfinished, first.schema.with_metadata(metadata)) as writer,
    ):
        writer.write_table(first)
        for start in range(ROWS_AT_ONCE, records.size + len(records.averages), ROWS_AT_ONCE):
            writer.write_table(_rows(parts, start))


def read_metrics(folder: RunFolder) -> RunRecords | None:
    """Read all records of a run; None if the file is missing or damaged, or lacks records of the run."""
    try:
        with pq.ParquetFile(folder.metrics) as file:
            metadata = file.schema_arrow.metadata or {}
            if metadata.get(SIZES) != _hash_sizes(sizes := _file_sizes(folder)):
                return None
            return _read_table(file, msgspec.json.decode(metadata[METRICS], type=dict[str, str]), sizes)
    except (OSError, pa.ArrowException, msgspec.MsgspecError, KeyError):
        return None


def _file_sizes(folder: RunFolder) -> dict[str, int]:
    """Return the size of each file of records."""
    files = [*(folder.node(node) for node in folder.recorded_nodes()), folder.averages]
    return {file.name: file.stat().st_size if file.exists() else 0 for file in files}


def _hash_sizes(sizes: Mapping[str, int]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sizes, order="sorted")).hexdigest().encode()


def _tables(records: RunRecords, columns: Mapping[str, str]) -> list[pa.Table]:
    """Return a table for each kind of record. Its column `row` is sorted."""
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
    return [part for part in parts if len(part)] or parts[:1]


def _rows(tables: Sequence[pa.Table], start: int) -> pa.Table:
    """Return some rows of the file, from `start` on: the records in the order of their files, the averages last."""
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
    known = set(file.schema_arrow.names)
    wanted = {
        "round": ROUND_COLUMNS,
        "evaluation": (*EVALUATION_COLUMNS, *columns.values()),
        "average": ("node", *Average.__struct_fields__, *columns.values()),
        "event": ("node", *Event.__struct_fields__),
        "end": ("node", *End.__struct_fields__),
    }
    parts: dict[str, list[pa.Table]] = {}
    last_times: dict[NodeId, float] = {}
    first = 0
    for number in range(file.num_row_groups):
        table = file.read_row_group(number)
        table = table.append_column("row", [np.arange(first, first + len(table))])
        first += len(table)
        last_times.update(_last_times(table))
        for kind, names in wanted.items():
            is_kind = pc.equal(table["kind"], kind)
            if pc.any(is_kind).as_py():
                part = table.select(["row", *(name for name in dict.fromkeys(names) if name in known)])
                parts.setdefault(kind, []).append(part.filter(is_kind))
    tables = {kind: pa.concat_tables(several) for kind, several in parts.items()}
    averages = [record for _, _, record in _small_records(tables.get("average"), Average, columns)]
    return RunRecords(
        _rounds(tables.get("round")),
        _evaluations(tables.get("evaluation"), columns),
        [NodeEvent(*row) for row in _small_records(tables.get("event"), Event, {})],
        [NodeEnd(*row) for row in _small_records(tables.get("end"), End, {})],
        averages,
        last_times,
        first - len(averages),
        sizes,
    )


def _last_times(table: pa.Table) -> dict[NodeId, float]:
    """Return the time of the last record of each node in a part of the file; the records of a node are adjacent."""
    table = table.select(["node", "time"]).filter(pc.is_valid(table["node"]))
    nodes, times = table["node"].to_numpy(), table["time"].to_numpy()
    nodes, last = last_of_each(nodes)
    return dict(zip(nodes.tolist(), times[last].tolist(), strict=True))


def _rounds(table: pa.Table | None) -> Rounds:
    if table is None:
        return RecordColumns().finish().rounds
    numbers = {name: table[name].to_numpy() for name in ("row", *ROUND_COLUMNS) if name != "loss"}
    return Rounds(**numbers, loss=pc.fill_null(table["loss"].cast(pa.float64()), math.nan).to_numpy())


def _evaluations(table: pa.Table | None, columns: Mapping[str, str]) -> Evaluations:
    if table is None:
        return RecordColumns().finish().evaluations
    values = {}
    for metric, column in columns.items():
        scores = table[column].cast(pa.float64())
        if len(at := np.flatnonzero(scores.is_valid().to_numpy())):
            values[metric] = (at, scores.drop_null().to_numpy())
    numbers = {name: table[name].to_numpy() for name in ("row", *EVALUATION_COLUMNS) if name != "tick"}
    return Evaluations(**numbers, tick=pc.fill_null(table["tick"], -1).to_numpy(), values=values)


def _small_records(
    table: pa.Table | None, record_type: type[AnyRecord], columns: Mapping[str, str]
) -> Iterator[tuple[int, NodeId, AnyRecord]]:
    """Yield the rows, nodes and records of a kind of which there are few."""
    if table is None:
        return
    names: list[str] = [name for name in record_type.__struct_fields__ if name in table.column_names]
    for row in table.select(["row", "node", *names, *columns.values()]).to_pylist():
        fields = {name: row[name] for name in names}
        if record_type is Average:
            fields["scores"] = {metric: row[at] for metric, at in columns.items() if row[at] is not None}
        yield row["row"], row["node"], msgspec.convert(fields, record_type)
