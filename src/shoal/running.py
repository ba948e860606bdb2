"""Running an experiment, in whichever engine, from its folder to its summary."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from shoal.analysis.summary import summarize, write_metrics
from shoal.experiment import Experiment
from shoal.progress import Listener, Outcome
from shoal.records import RunFolder

VERSIONED = ("shoal", "torch", "numpy", "pyzmq", "msgspec")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: RunFolder
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.summary["status"])


def run(experiment: Experiment, out: Path, listener: Listener | None = None) -> Run:
    """Run `experiment` below the folder `out`. Errors of the run are raised after its summary is written."""
    folder = RunFolder.create(out, experiment.name)
    _write_experiment(folder, experiment)
    try:
        outcome = _engine(experiment, folder, listener)
    except BaseException as error:
        failed = Outcome("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", 0.0, 0.0)
        _finish(folder, experiment, failed)
        raise
    return Run(folder, _finish(folder, experiment, outcome))


def _engine(experiment: Experiment, folder: RunFolder, listener: Listener | None) -> Outcome:
    if experiment.engine == "simulation":
        from shoal.simulation.engine import Simulation

        outcome = Simulation(experiment, folder, listener).run()
        chosen = dataclasses.replace(experiment.simulation, batching=outcome.facts["batching"])  # type: ignore[arg-type]
        _write_experiment(folder, dataclasses.replace(experiment, simulation=chosen))
        return outcome
    from shoal.processes.supervisor import Supervisor

    return Supervisor(experiment, folder, listener).run()


def _finish(folder: RunFolder, experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    summary = summarize(folder, experiment.engine, experiment.nodes, experiment.seed, outcome)
    write_metrics(folder, experiment.nodes)
    return summary


def _write_experiment(folder: RunFolder, experiment: Experiment) -> None:
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    table = {**experiment.table(), "versions": {"python": platform.python_version(), **versions}}
    folder.experiment.write_text(tomli_w.dumps(table))
