"""Runs that stop after a checkpoint, without the cost of a process: a finished run, set back to one of its checkpoints.

A run that is killed leaves its records, its checkpoints and no summary. `stopped_after` makes such a folder of a run
that has ended; its records contain everything that the nodes did after the checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from shoal.experiment import Experiment
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import RESUMED, End, Event, Record, Round, RunFolder

SETTINGS: dict[str, Any] = {
    "nodes": 6,
    "seed": 5,
    "partition": {"name": "shards", "per_node": 2},
    "model": {"name": "logistic"},
    "training": {"lr": 0.1, "batch_size": 50},
    "evaluation": {"every": 2},
    "simulation": {"batching": "off"},
    "checkpoint": {"every": 1, "keep": 100},
}


def experiment(**changed: Any) -> Experiment:
    return Experiment(**{**SETTINGS, **changed})


def stopped_after(run: RunFolder, round: int, to: Path) -> RunFolder:
    """Copy a run to `to`, as it would be if it had been killed before the checkpoint after `round` was complete."""
    shutil.copytree(run.path, to)
    folder = RunFolder(to)
    folder.summary.unlink(missing_ok=True)
    folder.metrics.unlink(missing_ok=True)
    Checkpoints(folder).remove_after(round)
    return folder


def records_of(folder: RunFolder, times: bool = True, spans: bool = True) -> dict[int, list[Record]]:
    """The records of every node, without resumptions and processor times. Without `times`, all times are 0."""
    found: dict[int, list[Record]] = {}
    for node, record in folder.read_all():
        if isinstance(record, Event) and record.what == RESUMED:
            continue
        if isinstance(record, End):
            record = msgspec.structs.replace(
                record, train_cpu_s=None, total_cpu_s=None, uss_mib=None, pss_mib=None, padded_s=None
            )
        if isinstance(record, Round | End) and not (times and spans):
            record = msgspec.structs.replace(record, spans=[])
        found.setdefault(node, []).append(record if times else msgspec.structs.replace(record, time=0.0))
    return found


MEASURED = ("time", "memory", "events", "batching", "first_round_s", "signal")
"""What differs between two runs of one experiment."""


REAL_TIME = ("best", "time_to_target", "consensus_distance")
"""What differs between two runs with processes, in addition: times, and sums of models that arrive in any order."""


def comparable(summary: dict[str, Any]) -> dict[str, Any]:
    ignored = (*MEASURED, *REAL_TIME) if summary["engine"] == "processes" else MEASURED
    return {key: value for key, value in summary.items() if key not in ignored}
