"""What the page shows about one node, and about the experiment of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from shoal.dashboard.runs import read_experiment, read_summary
from shoal.dashboard.tail import RecordTail
from shoal.dashboard.views import numbers
from shoal.errors import DataError
from shoal.results.records import End, Evaluation, Event, Round, RunFolder
from shoal.types import NodeId

LATEST_RECORDS = 100
MAX_EVENTS = 500
MAX_POINTS = 2_000


def node_details(folder: RunFolder, node: NodeId) -> dict[str, Any]:
    """Return the curves, the latest records, and the events of a node. Raises `DataError` if it has no records."""
    records = RecordTail(folder).read_node(node)
    if not records:
        raise DataError(f"{folder.path.name}: node {node} has no records")
    rounds = _thinned([record for record in records if isinstance(record, Round)])
    evaluations = [record for record in records if isinstance(record, Evaluation)]
    events = [record for record in records if isinstance(record, Event)]
    end = next((record for record in reversed(records) if isinstance(record, End)), None)
    names = dict.fromkeys(name for record in evaluations for name in record.scores)
    return {
        "node": node,
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
        "end": None if end is None else msgspec.to_builtins(end),
        "records": [msgspec.json.encode(record).decode() for record in records[-LATEST_RECORDS:]],
        "count": len(records),
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


def _thinned(rounds: list[Round]) -> list[Round]:
    """Return at most `MAX_POINTS` of them, with the last one."""
    step = -(-len(rounds) // MAX_POINTS)
    return rounds[::-1][:: max(step, 1)][::-1]
