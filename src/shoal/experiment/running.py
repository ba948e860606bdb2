"""Run an experiment in its engine, from the creation of the run's folder to its summary."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import StorageError
from shoal.experiment import Experiment
from shoal.experiment.writing import write_experiment
from shoal.results.progress import Outcome, ProgressListener, Status
from shoal.results.records import RunFolder, replacing
from shoal.results.summary import summarize, write_metrics
from shoal.types import format_node_ids


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: RunFolder
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.summary["status"])


def run(
    experiment: Experiment,
    out: Path,
    listener: ProgressListener | None = None,
    command_time: float | None = None,
) -> Run:
    """Run `experiment` in a new folder below `out`. If the run fails, its summary is written and the error is raised.

    `command_time` is the time of `time.time` at which the user started the command; default: now.
    """
    command_time = time.time() if command_time is None else command_time
    folder = RunFolder.create(out, experiment.name)
    write_experiment(folder.experiment, experiment.to_table())
    placement = {machine: format_node_ids(nodes) for machine, nodes in experiment.placement.items()}
    with replacing(folder.mapping) as unfinished:
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(placement), indent=2) + b"\n")
    try:
        outcome = _run_engine(experiment, folder, listener, command_time)
    except BaseException as error:
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            _write_results(folder, experiment, Outcome(status, wall_s=time.time() - command_time, startup_s=None))
        except StorageError as unwritten:
            error.add_note(f"Its results are incomplete: {unwritten}")
        raise
    return Run(folder, _write_results(folder, experiment, outcome))


def _run_engine(
    experiment: Experiment, folder: RunFolder, listener: ProgressListener | None, command_time: float
) -> Outcome:
    if experiment.engine == "simulation":
        from shoal.engines.simulation.engine import Simulation

        simulation = Simulation(experiment, folder, listener, command_time)
        table = experiment.to_table()
        table["simulation"]["batching"] = simulation.batching  # a replay of the run must not choose again
        write_experiment(folder.experiment, table)
        return simulation.run()
    from shoal.engines.processes.launch import run_processes

    return run_processes(experiment, folder, listener, command_time)


def _write_results(folder: RunFolder, experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    summary = summarize(folder, experiment.engine, experiment.nodes, experiment.seed, outcome, experiment.round_nodes)
    write_metrics(folder)
    return summary
