"""The records and summaries of many runs as data frames of pandas or polars.

loaded = load("runs")
loaded.summaries.groupby("group")["accuracy.mean"].mean()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa

from shoal.errors import DataError
from shoal.results.groups import Group, group_runs
from shoal.results.metrics_file import metrics_table
from shoal.results.records import RunFolder, runs_below
from shoal.results.summary import read_or_summarize

FrameKind: TypeAlias = Literal["pandas", "polars"]
"""The library of a data frame."""


def load(path: str | os.PathLike[str] = "runs", frame: FrameKind = "pandas") -> LoadedRuns:
    """Load the run at `path`, and all runs below it, as data frames of pandas or polars.

    `path` may also be the name of an experiment in `runs`. Runs may be in progress. Warns of runs of different
    versions. Raises `DataError` if there is no run, or if the library is not installed.
    """
    if frame not in get_args(FrameKind):
        raise DataError(f"frame = {frame!r}; expected one of {', '.join(map(repr, get_args(FrameKind)))}")
    _import_library(frame)
    folders = sorted(runs_below(Path(path)), key=lambda folder: folder.path)
    if not folders:
        raise DataError(f"there is no run in {str(path)!r}; start one with 'shoal run FILE'")
    return LoadedRuns(tuple(folders), frame)


@dataclass(frozen=True)
class LoadedRuns:
    """Runs as data frames. Each frame is read when it is used first."""

    folders: tuple[RunFolder, ...]
    frame: FrameKind

    @functools.cached_property
    def summaries(self) -> Any:
        """One row per run: its folder, group and seed, the keys that differ between groups, and its summary.

        Keys of tables in the summary are joined by a dot, such as `accuracy.mean`.
        """
        rows = [
            {**self._place(group, folder), **group.settings, **dict(_flatten(read_or_summarize(folder)))}
            for group, folder in self._runs
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: _column([row.get(name) for row in rows]) for name in names}
        return to_frame(pa.table(columns), self.frame)

    @functools.cached_property
    def records(self) -> Any:
        """One row per record of a node or of the averaged model, with the folder, group and seed of its run."""
        tables = []
        for group, folder in self._runs:
            table = metrics_table(folder).replace_schema_metadata()
            place = {name: _repeat(value, len(table)) for name, value in self._place(group, folder).items()}
            tables.append(pa.table({**place, **dict(zip(table.column_names, table.columns, strict=True))}))
        return to_frame(pa.concat_tables(tables, promote_options="permissive").unify_dictionaries(), self.frame)

    @functools.cached_property
    def _runs(self) -> list[tuple[Group, RunFolder]]:
        groups = {folder: group for group in group_runs(self.folders) for folder in group.runs}
        return [(groups[folder], folder) for folder in self.folders]

    def _place(self, group: Group, folder: RunFolder) -> dict[str, Any]:
        seed = folder.read_experiment().get("seed")
        return {"run": str(folder.path), "group": group.label, "seed": seed if isinstance(seed, int) else None}


def to_frame(table: pa.Table, frame: FrameKind) -> Any:
    """Return a table as a data frame. Raises `DataError` if the library is not installed."""
    _import_library(frame)
    if frame == "pandas":
        return table.to_pandas()
    import polars

    return polars.from_arrow(table)


def _import_library(frame: FrameKind) -> None:
    try:
        __import__(frame)
    except ImportError as error:
        raise DataError(
            f"a data frame of {frame} needs the package {frame}, which is not installed: "
            f"pip install 'shoal[{frame}]'; shoal.open_run(path).table is a pyarrow.Table and needs neither"
        ) from error


def _repeat(value: str | int | None, count: int) -> pa.Array:
    """Return a column of equal values; a text is stored once."""
    if isinstance(value, str):
        return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), count), [value])
    return pa.array([value] * count, pa.int64())


def _column(values: Sequence[Any]) -> pa.Array:
    """Return a column of a summary; as text if runs of other versions have other types."""
    try:
        return pa.array(values)
    except pa.ArrowException:
        return pa.array([None if value is None else str(value) for value in values])


def _flatten(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a summary and of the tables in it; of `lost`, the number of nodes."""
    for key, value in summary.items():
        if f"{prefix}{key}" == "lost":
            yield key, len(value)
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
