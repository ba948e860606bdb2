"""Folders of runs with given scores, for tests of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from shoal.results.records import Average, End, Evaluation, Record, RecordFile, Round, RunFolder

SECONDS = 10.0
"""The time of a round, unless a test sets another."""


def write_run(
    root: Path,
    means: Sequence[float],
    sharing: str = "full",
    seed: int = 1,
    *,
    seconds: float = SECONDS,
    metric: str = "accuracy",
    averages: bool = False,
    ended: bool = True,
    table: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Create a run of two nodes, with a score of `means` after each round: 0.1 less for node 0, 0.1 more for node 1.

    In each round, each node sends 1000 bytes.
    """
    folder = RunFolder.create(root, "made")
    experiment = {"name": "made", "seed": seed, "engine": "simulation", "nodes": 2, "sharing": {"name": sharing}}
    folder.experiment.write_text(tomli_w.dumps({**experiment, **(table or {})}))
    for node, distance in ((0, -0.1), (1, 0.1)):
        records: list[Record] = []
        for round, mean in enumerate(means):
            time = seconds * (round + 1)
            records.append(Round(round, time, 1.0 / (round + 1), 1000 * (round + 1), round + 1))
            records.append(Evaluation(round, time, {metric: mean + distance}))
        if ended:
            records.append(End(seconds * len(means), "digest", 1000 * len(means), len(means), 0, 0))
        _write(folder.node(node), records)
    if averages:
        _write(
            folder.averages,
            [Average(r, seconds * (r + 1), 2, 4.0 / (r + 1), {metric: mean + 0.2}) for r, mean in enumerate(means)],
        )
    return folder


def _write(path: Path, records: Sequence[Record]) -> None:
    file = RecordFile(path)
    for record in records:
        file.write(record)
    file.close()
