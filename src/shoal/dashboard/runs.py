"""Finds the runs in a folder, and what the list of runs shows about each. A run is named by its path in the folder."""

from __future__ import annotations

import itertools
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.dashboard.files import read_file
from shoal.dashboard.tail import DAMAGED
from shoal.errors import DataError
from shoal.results.progress import main_metric
from shoal.results.records import RunFolder

MAX_DEPTH = 8
"""Levels of folders below the folder of all runs."""
MAX_RUNS = 10_000
EXPERIMENT_BYTES = 4 * 2**20
SUMMARY_BYTES = 64 * 2**20
SCAN_SECONDS = 1.5
"""How long a list of runs is used before the folder is searched again."""
SCAN_SHARE = 0.1
"""The largest share of the time that searching the folder may take."""
RECENT_SECONDS = 30.0
"""A run without a summary that wrote a record in these seconds is going on: its lock may be on another machine."""
LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class RunInfo:
    """What the list of runs shows about a run."""

    id: str
    """The path in the folder of all runs; "." is this folder itself."""
    name: str
    status: str
    """A `shoal.results.progress.Status`, "running" or "damaged"."""
    created: float
    """Seconds since 1970."""
    engine: str = ""
    nodes: int | None = None
    seed: int | None = None
    rounds: int | None = None
    """Finished rounds of a run with a summary, else all rounds of the algorithm."""
    metric: str | None = None
    score: float | None = None
    """The mean over the nodes at the end."""
    problem: str = ""
    """Why the run is damaged."""


class Runs:
    """The runs in a folder. Links are not followed, so a run is never outside of the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._folders: dict[str, Path] = {}
        self._scanned: float | None = None
        self._scan_cost = 0.0
        self._known: dict[str, tuple[object, RunInfo]] = {}

    def find(self, id: str) -> RunFolder:
        """Return the run with this id. Raises `DataError` if the folder has none."""
        if id not in self._folders:
            self._scan(max_age=0.0)
        path = self._folders.get(id)
        if path is None or not path.is_dir() or path.resolve() != path:
            raise DataError(f"there is no run {id!r} in {str(self.root)!r}")
        return RunFolder(path)

    def all(self) -> list[RunInfo]:
        """Return all runs, the newest first."""
        self._scan(SCAN_SECONDS)
        locked = _locked_folders()
        found = [self._info(id, path, locked) for id, path in self._folders.items()]
        return sorted(found, key=lambda info: (-info.created, info.id))

    def info(self, id: str) -> RunInfo:
        return self._info(id, self.find(id).path, _locked_folders())

    def _scan(self, max_age: float) -> None:
        now = time.monotonic()
        if self._scanned is None or now - self._scanned > max(max_age, self._scan_cost / SCAN_SHARE):
            found = itertools.islice(_runs_in(self.root, MAX_DEPTH), MAX_RUNS)
            self._folders = {path.relative_to(self.root).as_posix(): path for path in found}
            self._known = {id: known for id, known in self._known.items() if id in self._folders}
            self._scanned, self._scan_cost = now, time.monotonic() - now

    def _info(self, id: str, path: Path, locked: frozenset[int]) -> RunInfo:
        state = (_change(path / "summary.json"), _change(path / "experiment.toml"))
        known = self._known.get(id)
        if known is None or known[0] != state:
            self._known[id] = known = (state, _read_info(id, RunFolder(path)))
        info = known[1]
        return replace(info, status="running") if info.status == "unfinished" and _is_running(path, locked) else info


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs in a folder and below, without entering runs or links."""
    try:
        with os.scandir(folder) as entries:
            shown = (entry for entry in entries if _is_shown(entry.name) and not entry.is_symlink())
            found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in shown}
    except OSError:
        return  # removed in the meantime, or another user's
    if "summary.json" in found or ("experiment.toml" in found and found.get("nodes")):
        yield folder
    elif depth:
        for name in sorted((name for name, is_folder in found.items() if is_folder), reverse=True):
            yield from _runs_in(folder / name, depth - 1)


def _is_shown(name: str) -> bool:
    """Whether a folder or file may be a run or part of one: no hidden folder, no packages, and a name in UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith(".") and name != "node_modules"


def _read_info(id: str, folder: RunFolder) -> RunInfo:
    name = Path(id).parent.as_posix()
    info = RunInfo(id, folder.path.name if name == "." else name, "unfinished", _created(folder))
    try:
        info = _from_experiment(info, read_experiment(folder))
        return info if _change(folder.summary) is None else _from_summary(info, read_summary(folder))
    except DataError as error:
        problem = str(error).replace(f"{folder.path}{os.sep}", "")
        return replace(info, status="damaged", problem=problem)


def _from_experiment(info: RunInfo, experiment: Mapping[str, Any]) -> RunInfo:
    algorithm = experiment.get("algorithm")
    return replace(
        info,
        name=str(experiment.get("name", info.name)),
        engine=str(experiment.get("engine", "")),
        nodes=_integer(experiment.get("nodes")),
        seed=_integer(experiment.get("seed")),
        rounds=_integer(algorithm.get("rounds")) if isinstance(algorithm, dict) else None,
    )


def _from_summary(info: RunInfo, summary: Mapping[str, Any]) -> RunInfo:
    metrics = summary.get("metrics")
    metric = main_metric(metrics) if isinstance(metrics, dict) and metrics else None
    statistics = metrics.get(metric) if isinstance(metrics, dict) and metric else None
    score = statistics.get("mean") if isinstance(statistics, dict) else None
    return replace(
        info,
        status=str(summary.get("status", "unfinished")),
        engine=str(summary.get("engine", info.engine)),
        nodes=_integer(summary.get("nodes")) or info.nodes,
        seed=_integer(summary.get("seed")),
        rounds=_integer(summary.get("rounds")),
        metric=metric,
        score=float(score) if isinstance(score, int | float) else None,
    )


def read_experiment(folder: RunFolder) -> dict[str, Any]:
    """Read the resolved experiment; empty if there is none. Raises `DataError`."""
    try:
        return tomllib.loads(read_file(folder.experiment, EXPERIMENT_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no TOML
        raise DataError(f"{folder.experiment} cannot be read: {error}") from error


def read_summary(folder: RunFolder) -> dict[str, Any]:
    """Read the summary; empty if there is none. Raises `DataError`."""
    try:
        return msgspec.json.decode(read_file(folder.summary, SUMMARY_BYTES), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{folder.summary} cannot be read: {error}; its records may be intact") from error


def _created(folder: RunFolder) -> float:
    """When the run was created, or else when it last changed."""
    try:
        return time.mktime(time.strptime(folder.path.name[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        found = _change(folder.experiment) or _change(folder.summary)
        return 0.0 if found is None else found[0] / 1e9


def _change(path: Path) -> tuple[int, int] | None:
    """Return the time of the last change and the size; None if there is no file."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _is_running(path: Path, locked: frozenset[int]) -> bool:
    """Whether a process writes to the run. Its lock is looked up, not tried: a run that starts could fail over it."""
    try:
        if os.stat(path).st_ino in locked:
            return True
    except OSError:
        return False
    changes = (_change(path / name) for name in ("averages.jsonl", "nodes", "nodes/0.jsonl"))
    return any(found is not None and time.time() - found[0] / 1e9 < RECENT_SECONDS for found in changes)


def _locked_folders() -> frozenset[int]:
    """Return the inodes of files and folders that processes of this machine have locked."""
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(int(fields[5].rsplit(":", 1)[-1]) for line in lines if len(fields := line.split()) > 5)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
