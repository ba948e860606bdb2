"""Export a run: what it has now, or everything until its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path

from shoal.errors import DataError
from shoal.results.exports.points import Point, RunPoints
from shoal.results.exports.run_info import RunInfo
from shoal.results.exports.target import load_target
from shoal.results.records import RunFolder
from shoal.results.run_lock import is_locked
from shoal.results.summary import read_or_summarize
from shoal.types import NodeId

INTERVAL = 1.0
"""Seconds between two looks at a run in progress."""


def export_run(
    folder: RunFolder,
    target: str,
    out: Path,
    nodes: Collection[NodeId] = (),
    follow: bool = False,
    exported: Callable[[int, bool], object] = lambda points, in_progress: None,
) -> str:
    """Export a run to `target`. Return where it is now.

    `nodes` are exported one by one too. With `follow`, continue until the run ends. `exported` is called
    with the number of points so far, and whether the run is in progress.

    Raises `DataError` if the run was exported there before, is damaged, or if the library of the target is missing.
    """
    info = RunInfo.read(folder)
    points, count = RunPoints(folder, info.nodes, info.evaluated, nodes), 0

    def counted(new: Iterator[Point]) -> Iterator[Point]:
        nonlocal count
        for point in new:
            count += 1
            exported(count, in_progress)
            yield point

    cls = load_target(target)
    try:
        with closing(cls(out, info)) as opened:
            while True:
                in_progress = is_locked(folder)
                opened.write(counted(points.read(in_progress)))
                exported(count, in_progress)
                if not (follow and in_progress):
                    break
                time.sleep(INTERVAL)
            if not in_progress:
                opened.finish(read_or_summarize(folder))
    except cls.errors as error:
        raise DataError(f"--to {target}: {error}") from error
    return opened.place
