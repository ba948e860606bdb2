"""What the page shows about one node, and about the experiment of a run."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.dashboard.feed import MAX_METRICS
from shoal.dashboard.files import opened_file
from shoal.dashboard.runs import read_experiment, read_summary
from shoal.dashboard.tail import RecordTail
from shoal.dashboard.views import numbers
from shoal.errors import DataError
from shoal.results.node_data import read_node_data
from shoal.results.records import Evaluation, Event, Round, RunFolder
from shoal.types import NodeId

LATEST_RECORDS = 100
MAX_EVENTS = 500
MAX_POINTS = 2_000

AnyRecord = TypeVar("AnyRecord", Round, Evaluation)


def node_details(folder: RunFolder, node: NodeId, offset: int) -> dict[str, Any]:
    """Return the curves, the latest records, and the events of a node, from a byte of its file on.

    Raises `DataError` if it has no records.
    """
    records, end_offset = RecordTail(folder).read_node(node, offset)
    if not records and not offset:
        raise DataError(f"{folder.path.name}: node {node} has no records")
    rounds = _thinned([record for record in records if isinstance(record, Round)])
    evaluations = _thinned([record for record in records if isinstance(record, Evaluation)])
    events = [record for record in records if isinstance(record, Event)]
    names = list(dict.fromkeys(name for record in evaluations for name in record.scores))[:MAX_METRICS]
    return {
        "node": node,
        "offset": end_offset,
        "rounds": {
            "round": [record.round + 1 for record in rounds],
            "time": numbers(np.array([record.time for record in rounds])),
            "loss": numbers(np.array([np.nan if record.loss is None else record.loss for record in rounds])),
            "bytes": [record.bytes_sent for record in rounds],
            "messages": [record.messages_sent for record in rounds],
        },
        "evaluations": {
            "round": [record.round + 1 for record in evaluations],
            "time": numbers(np.array([record.time for record in evaluations])),
            "scores": {
                name: numbers(np.array([record.scores.get(name, np.nan) for record in evaluations])) for name in names
            },
        },
        "events": [msgspec.to_builtins(event) for event in events[-MAX_EVENTS:]],
        "records": [msgspec.json.encode(record).decode() for record in records[-LATEST_RECORDS:]],
        "count": len(records),
        "data": None if offset else _node_data(folder, node),
    }


def experiment_details(folder: RunFolder) -> dict[str, Any]:
    """Return the experiment and the summary of a run, and why one of them cannot be read."""
    found: dict[str, Any] = {"experiment": {}, "summary": {}, "problems": []}
    for name, read in (("experiment", read_experiment), ("summary", read_summary)):
        try:
            found[name] = read(folder)
        except DataError as error:
            found["problems"].append(str(error))
    return found


def _node_data(folder: RunFolder, node: NodeId) -> dict[str, Any] | None:
    """Return the number of training samples of a node, and of each class; None if they are not known."""
    try:
        with opened_file(folder.data):  # no link to somewhere else
            data = read_node_data(folder)
    except (OSError, DataError):
        return None
    if node >= len(data.samples):
        return None  # a server has no data
    counts = data.class_counts[node] if data.class_counts is not None else []
    return {"samples": data.samples[node], "classes": {str(c): count for c, count in enumerate(counts) if count}}


def _thinned(records: list[AnyRecord]) -> list[AnyRecord]:
    """Return at most `MAX_POINTS` of them, with the last one."""
    step = -(-len(records) // MAX_POINTS)
    return records[::-1][:: max(step, 1)][::-1]
