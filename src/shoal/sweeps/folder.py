"""The folder of a sweep: its runs, and which of them are done.

A run belongs to a combination if both have the same resolved experiment, with the same plug-in code. So a sweep goes on
where it stopped, however it stopped, and a sweep with more values uses the runs of an earlier one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from shoal.errors import CheckpointError, DataError, ExperimentError, LaunchError
from shoal.experiment.plugin_files import PLUGINS, locate_kept_files
from shoal.experiment.resuming import ENDED
from shoal.experiment.writing import software_versions, table_hash
from shoal.results.checkpoints import Checkpoints
from shoal.results.records import RunFolder, replacing
from shoal.results.run_lock import lock, lock_folder
from shoal.sweeps.plan import Combination
from shoal.sweeps.sweep import Sweep

VERSIONS = "versions"
MARKER = "sweep.toml"
"""The file that a folder of a sweep has: what the sweep runs."""
SHOWN_RUNS = 3


@dataclass(frozen=True)
class FoundRun:
    """A run in the folder of a sweep."""

    folder: RunFolder
    identity: str
    """The hash of its experiment."""
    versions: Mapping[str, str]
    """The software that ran it."""
    status: str | None
    """None if it has not ended: it is going, or was killed."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass
class FolderProgress:
    """What the folder of a sweep has of the combinations."""

    done: dict[str, FoundRun] = field(default_factory=dict)
    """Runs that reached their end, by the identity of the combination."""
    resumable: dict[str, FoundRun] = field(default_factory=dict)
    """Runs that continue from a checkpoint."""
    unfinished: list[FoundRun] = field(default_factory=list)
    """Runs without a checkpoint that have not reached their end. They are started again."""
    other_versions: list[FoundRun] = field(default_factory=list)
    """Runs that reached their end with other software."""


@contextmanager
def opened(out: Path, sweep: Sweep) -> Iterator[None]:
    """Create the folder of a sweep, or open it, and hold its lock. Raises an error if it holds something else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = any(out.iterdir()) and not _is_marked(out)
    except OSError as error:
        problem = f"cannot write to the output folder {str(out)!r}: {error.strerror}; choose another with --out"
        raise LaunchError(problem) from error
    if others:
        problem = (
            f"{str(out)!r} is not empty, and it is not the folder of a sweep; choose a new folder: a sweep removes "
            "unfinished runs from its folder"
        )
        raise ExperimentError([problem], "--out")
    with lock_folder(out, "another sweep uses this folder; wait until it ends, or choose another folder with --out"):
        with replacing(out / MARKER) as unfinished:
            unfinished.write_text(tomli_w.dumps(_without_none(sweep.to_table())))
        yield


def _is_marked(out: Path) -> bool:
    """Whether a sweep has written the marker. A user's own file of this name is not one."""
    try:
        return "folder" in tomllib.loads((out / MARKER).read_text())
    except (OSError, ValueError):  # ValueError: no UTF-8, or no TOML
        return False


def _without_none(value: Any) -> Any:
    """Return plain data as TOML can hold it."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def find_runs(out: Path) -> list[FoundRun]:
    """Return the runs in the folder of a sweep, in the order of their start. Damaged ones are left out."""
    found = []
    for file in sorted(out.glob("*/*/experiment.toml")):
        folder = RunFolder(file.parent)
        try:
            found.append(_found_run(folder))
        except (DataError, KeyError, TypeError, AttributeError, OSError):
            continue  # no run, or a damaged one: it is not of this sweep
    return found


def _found_run(folder: RunFolder) -> FoundRun:
    table = locate_kept_files(folder.read_experiment(), folder.path)
    versions = table.pop(VERSIONS, {})
    table.pop(PLUGINS, None)
    status = None
    if folder.summary.exists():
        try:
            status = str(folder.read_summary().get("status"))
        except DataError:
            status = None  # damaged: the run is repeated
    return FoundRun(folder, table_hash(table, folder.path), versions, status)


def find_progress(combinations: Sequence[Combination], out: Path, any_version: bool = False) -> FolderProgress:
    """Return which combinations are done, and which can be resumed.

    With `any_version`, runs of other versions of the software count as done.
    """
    wanted = {combination.identity for combination in combinations}
    state = FolderProgress()
    for found in (found for found in find_runs(out) if found.identity in wanted):
        same_versions = found.versions == software_versions()
        if found.has_ended:
            if not same_versions:
                state.other_versions.append(found)
            if same_versions or any_version:
                state.done.setdefault(found.identity, found)
        elif same_versions and _has_checkpoint(found.folder):
            state.resumable[found.identity] = found
        else:
            state.unfinished.append(found)
    return state


def remove_unfinished(state: FolderProgress, out: Path, notice: Callable[[str], object]) -> None:
    """Remove the runs that are started again. Raises `CheckpointError` if one of them is still going."""
    for found in state.unfinished:
        _remove(found.folder)
    for part in out.glob("*/*/nodes"):  # a run that was killed before it wrote its experiment
        if not (folder := RunFolder(part.parent)).experiment.exists():
            _remove(folder)
    if count := len(state.unfinished):
        runs, are = ("run", "is") if count == 1 else ("runs", "are")
        notice(f"{count} {runs} that did not reach the end {are} removed and started again")


def _has_checkpoint(folder: RunFolder) -> bool:
    return Checkpoints(folder).latest(lambda _: None) is not None


def _remove(folder: RunFolder) -> None:
    """Remove an unfinished run. Raises `CheckpointError` if it is still going."""
    try:
        with lock(folder):
            folder.remove()
    except CheckpointError:
        raise CheckpointError(f"{folder.path}: this run is still going; wait until it ends, or stop it") from None


def check_versions(state: FolderProgress, out: Path, notice: Callable[[str], object], any_version: bool) -> None:
    """Raise `ExperimentError` if finished runs used other versions of the software; only warn if `any_version`."""
    others = state.other_versions
    if not others:
        return
    changes = "; ".join(sorted({_changes(found.versions) for found in others})[:SHOWN_RUNS])
    text = f"{len(others)} finished run{'s' if len(others) > 1 else ''} in {out} used other software: {changes}"
    if any_version:
        notice(f"{text}. They count as done, because of --any-version")
        return
    problem = (
        f"{text}. Results of different versions are not mixed: run everything again in a new folder with --out, "
        "install the earlier versions, or accept the finished runs with --any-version"
    )
    raise ExperimentError([problem], "versions")


def _changes(versions: Mapping[str, str]) -> str:
    now = software_versions()
    changed = [name for name in {**versions, **now} if versions.get(name) != now.get(name)]
    return ", ".join(f"{name} {versions.get(name, 'unknown')} (now {now.get(name, 'none')})" for name in changed)
