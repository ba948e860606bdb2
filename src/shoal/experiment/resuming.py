"""Resume a run that did not end, from its latest checkpoint, in the same folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import CheckpointError, DataError, ExperimentError, NotContinuedError
from shoal.experiment.experiment import Experiment
from shoal.experiment.plugin_files import keep_plugin_files, locate_kept_files
from shoal.experiment.run_results import Run
from shoal.experiment.running import Machines, finish_run, for_agents
from shoal.experiment.writing import experiment_hash, software_versions, write_experiment
from shoal.results.checkpoints import Checkpoints, Manifest
from shoal.results.coordinator_file import read_coordinator_file, remove_coordinator_file
from shoal.results.cutting import Discarded, cut_records
from shoal.results.progress import NullProgressListener, ProgressListener
from shoal.results.records import RESUMED, Event, RecordFile, RunFolder, runs_below
from shoal.results.run_lock import lock
from shoal.types import NodeId

ENDED = ("completed", "incomplete")
"""The status of runs that reached their end."""
MUST_MATCH = ("shoal",)
"""The packages whose version must be that of the checkpoint. The others may change the last bits of results."""


def resume(
    path: str | os.PathLike[str],
    listener: ProgressListener | None = None,
    command_time: float | None = None,
    machines: Machines | None = None,
) -> Run:
    """Continue a run from its latest valid checkpoint.

    `path` is the folder of the run, or a folder above it. In a folder above it, the experiment of the latest run
    counts: its latest run that has not ended and has a checkpoint is continued.

    If its coordinator was killed, and agents of `machines` still run its nodes, the run continues where it is, and
    needs no checkpoint. `machines` are the agents that run the nodes, or the address of a Ray cluster; default: this
    machine.
    Raises `CheckpointError` if the run has ended, is still going, has no valid checkpoint, or was changed.
    """
    command_time = time.time() if command_time is None else command_time
    listener = listener or NullProgressListener()
    folder = _choose_run(Path(path), listener)
    with lock(folder):
        _check_status(folder)
        if machines is not None and machines.agents is not None:
            continued = _continue_nodes(folder, listener, command_time, machines)
            if continued is not None:
                return continued
        manifest = Checkpoints(folder).latest(listener.notice)
        if manifest is None:
            raise CheckpointError(
                f"{folder.path} has no valid checkpoint; run the experiment again, with checkpoint.every set to a "
                "number of rounds"
            )
        experiment = _read_experiment(folder, manifest, listener)
        if machines is not None and machines.agents is not None:
            experiment = for_agents(experiment, machines.agents)
            write_experiment(folder.experiment, keep_plugin_files(experiment, folder.path))
        _prepare(folder, manifest, listener)
        return finish_run(experiment, folder, listener, command_time, manifest, machines)


def unfinished_run(experiment: Experiment, out: Path, listener: ProgressListener) -> RunFolder | None:
    """The latest run of this experiment below `out` that has not ended and has a checkpoint; None if there is none."""
    folder = out / experiment.name
    for run in runs_below(folder) if folder.is_dir() else ():
        manifest = _latest_manifest(run) if _end_status(run) is None else None
        if manifest is not None and manifest.experiment == experiment_hash(experiment):
            return run
        if manifest is not None:
            listener.notice(f"the run in {run.path} is not resumed: the experiment has changed since it began")
    return None


def _choose_run(path: Path, listener: ProgressListener) -> RunFolder:
    """The run at `path`, or below it the latest run that can be continued, of the latest run's experiment.

    Returns the latest run if none can be continued. Raises `CheckpointError` if there is no run.
    """
    runs = runs_below(path)
    if not runs:
        raise CheckpointError(f"there is no run in {str(path)!r}; start one with 'shoal run FILE'")
    candidates = [run for run in runs if run.path.parent == runs[0].path.parent]  # runs/NAME/RUN
    chosen = next((run for run in candidates if _can_continue(run, listener)), None)
    if chosen is not None and chosen.path != path:
        later = "" if chosen is runs[0] else "; it is not the latest run: later ones have ended, or have no checkpoint"
        listener.notice(f"resuming the run in {chosen.path}{later}")
    return chosen or runs[0]


def _can_continue(run: RunFolder, listener: ProgressListener) -> bool:
    """Whether a run has not ended, and has a checkpoint or a coordinator whose nodes may still run."""
    if _end_status(run) is not None:
        return False
    try:
        return _latest_manifest(run) is not None or read_coordinator_file(run) is not None
    except CheckpointError as error:
        listener.notice(str(error))
        return False


def _latest_manifest(run: RunFolder) -> Manifest | None:
    """The manifest of the latest complete checkpoint, whose states may be damaged."""
    checkpoints = Checkpoints(run)
    for round in reversed(checkpoints.rounds()):
        with contextlib.suppress(CheckpointError):
            return checkpoints.manifest(round)
    return None


def _continue_nodes(
    folder: RunFolder, listener: ProgressListener, command_time: float, machines: Machines
) -> Run | None:
    """Continue a run whose coordinator was killed with the nodes that still run; None if there are none."""
    left = read_coordinator_file(folder)
    if left is None:
        return None
    table = locate_kept_files(folder.read_experiment(), folder.path)
    experiment = Experiment.from_table(table, base=Path(left.base), source=str(folder.experiment))
    if experiment_hash(experiment) != left.experiment:
        raise CheckpointError(f"{folder.experiment} was changed since the run began; restore the file")
    try:
        return finish_run(experiment, folder, listener, command_time, None, machines, left)
    except NotContinuedError as error:
        listener.notice(f"{error}: the run continues from its latest checkpoint")
        remove_coordinator_file(folder)
        return None


def _check_status(folder: RunFolder) -> None:
    if (status := _end_status(folder)) is not None:
        raise CheckpointError(
            f"{folder.path}: the run has ended, its status is {status!r}; there is nothing to resume. To train for "
            "more rounds, start a new run"
        )


def _end_status(folder: RunFolder) -> str | None:
    """The status of a run that reached its end; None if it did not."""
    if not folder.summary.exists():
        return None
    try:
        status = str(folder.read_summary()["status"])
    except (DataError, KeyError):
        return None
    return status if status in ENDED else None


def _read_experiment(folder: RunFolder, manifest: Manifest, listener: ProgressListener) -> Experiment:
    """Read the experiment of a run, and check that the checkpoint belongs to it and to this software."""
    table = locate_kept_files(folder.read_experiment(), folder.path)
    try:
        experiment = Experiment.from_table(table, base=Path(manifest.base), source=str(folder.experiment))
        same = experiment_hash(experiment) == manifest.experiment
    except ExperimentError as error:
        raise CheckpointError(f"{folder.experiment} is not the experiment of the checkpoint: {error}") from error
    if not same:
        raise CheckpointError(
            f"{folder.experiment} differs from the experiment of the checkpoint of round {manifest.round}: the file "
            "was changed, or the checkpoint belongs to another run. Restore the file, or start a new run with the "
            "changed experiment"
        )
    changed = {n: v for n, v in software_versions().items() if manifest.versions.get(n) != v}
    described = [f"{name} {manifest.versions.get(name)} (now {now})" for name, now in changed.items()]
    if any(name in MUST_MATCH for name in changed):
        raise CheckpointError(
            f"the checkpoint of round {manifest.round} was written with {', '.join(described)}; install the version "
            "that wrote it, or start a new run"
        )
    if changed:
        listener.notice(f"the checkpoint was written with {', '.join(described)}: results may differ slightly")
    return experiment


def _prepare(folder: RunFolder, manifest: Manifest, listener: ProgressListener) -> None:
    """Set the files of the run back to the checkpoint, and record that the run is resumed."""
    for file in (folder.summary, folder.metrics):
        file.unlink(missing_ok=True)
    remove_coordinator_file(folder)  # nodes of a killed coordinator must not be continued after this
    Checkpoints(folder).remove_after(manifest.round)
    discarded = cut_records(folder, manifest)
    for saved in manifest.nodes:
        detail = f"from round {saved.round + 1} on"
        if manifest.cut_by_time:
            detail += f"; {_describe(discarded[saved.node])}; messages in transit at the checkpoint are lost"
        start = manifest.time if manifest.same_start else saved.time
        records = RecordFile(folder.node(saved.node))
        records.write(Event(RESUMED, start, detail))
        records.close()
    listener.notice(f"resumed from the checkpoint of round {manifest.round}, at {manifest.time:g} s of the run")
    if manifest.cut_by_time:
        listener.notice(f"messages in transit at the checkpoint are lost; {_total(discarded)}")


def _describe(discarded: Discarded) -> str:
    return f"{discarded.rounds} later rounds with {discarded.messages} messages are discarded"


def _total(discarded: Mapping[NodeId, Discarded]) -> str:
    rounds, messages = sum(d.rounds for d in discarded.values()), sum(d.messages for d in discarded.values())
    return _describe(Discarded(rounds, messages))
