"""Run an experiment in its engine, from the creation of the run's folder to its summary."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.errors import ExperimentError, LaunchError, NotContinuedError, RunError, SetupError, StorageError
from shoal.experiment import Experiment
from shoal.experiment.plugin_files import keep_plugin_files
from shoal.experiment.process_state import process_state_kept
from shoal.experiment.run_results import Run
from shoal.experiment.writing import write_experiment, write_mapping
from shoal.plugin_modules import file_being_imported
from shoal.results.checkpoints import Manifest
from shoal.results.frames import read_lines
from shoal.results.monitor import RunMonitor
from shoal.results.node_data import write_node_data
from shoal.results.progress import Outcome, ProgressListener, Status
from shoal.results.record_writer import write_finally
from shoal.results.records import RunFolder
from shoal.results.run_lock import lock
from shoal.results.summary import summarize
from shoal.types import format_node_ids

if TYPE_CHECKING:
    from shoal.engines.processes.remote.agents_plan import AgentsPlan
    from shoal.engines.worker import Worker
    from shoal.experiment.setup import Setup
    from shoal.results.coordinator_file import CoordinatorFile

WorkerStarter: TypeAlias = "Callable[[Setup], Sequence[Worker]]"


@dataclass(frozen=True)
class Machines:
    """Where a run computes; by default on this machine."""

    agents: AgentsPlan | None = None
    """The agents that run the nodes of the process engine."""
    ray: str | None = None
    """The address of the Ray cluster: its CPUs train for the simulation (batching = "ray"), or run the nodes of the
    process engine."""

    def __post_init__(self) -> None:
        if self.agents is not None and self.ray is not None:
            problem = "Ray starts the agents itself: choose --ray, or --agents and --listen"
            raise ExperimentError([problem], "the machines of the run")


def run(
    experiment: Experiment,
    out: Path,
    listener: ProgressListener | None = None,
    command_time: float | None = None,
    agents: AgentsPlan | None = None,
    ray: str | None = None,
) -> Run:
    """Run `experiment` in a new folder below `out`. If the run fails, its summary is written and the error is raised.

    If the input is wrong, or the nodes cannot be started on this machine, the error leaves no folder.

    `command_time` is the time of `time.time` at which the user started the command; default: now. `agents` are the
    machines that run the nodes; default: this one. `ray` is the address of a Ray cluster, or "local" to start Ray on
    this machine for this run only. Its machines run the nodes of the process engine, or the training of a simulation
    with simulation.batching = "ray" (there "local" is the default).
    """
    if (file := file_being_imported()) is not None:
        problem = (
            f"{file} starts a run while other processes import it for its classes; write the run below a line "
            "if __name__ == '__main__':"
        )
        raise ExperimentError([problem], experiment.title)
    machines = Machines(agents, ray)
    if agents is not None:
        experiment = for_agents(experiment, agents)
    command_time = time.time() if command_time is None else command_time
    folder = RunFolder.create(out, experiment.name)
    write_experiment(folder.experiment, keep_plugin_files(experiment, folder.path))
    write_mapping(folder.mapping, experiment.placement)
    with lock(folder):
        return finish_run(experiment, folder, listener, command_time, machines=machines)


def finish_run(
    experiment: Experiment,
    folder: RunFolder,
    listener: ProgressListener | None,
    command_time: float,
    resumed: Manifest | None = None,
    machines: Machines | None = None,
    left: CoordinatorFile | None = None,
) -> Run:
    """Run an experiment whose folder is prepared, from the start or from a checkpoint, and write its results.

    `left` is what a killed coordinator has left of a run that its nodes continue. Raises `NotContinuedError` if they do
    not.
    """
    monitor = RunMonitor.of(listener)
    try:
        with _errors_named(experiment):
            outcome = _run_engine(experiment, folder, monitor, command_time, resumed, machines or Machines(), left)
        if outcome.status != "interrupted":
            monitor.finish()
        if monitor.error is not None:
            raise monitor.error  # an algorithm has handled it
    except BaseException as error:
        if left is not None and isinstance(error, NotContinuedError | LaunchError):
            raise  # nothing has changed: the user can try again, or resume the run from a checkpoint
        if resumed is None and left is None and not monitor.started and _explains_itself(error):
            folder.remove()
            raise
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            _write_results(folder, experiment, Outcome(status, wall_s=time.time() - command_time, startup_s=None))
        except StorageError as unwritten:
            error.add_note(f"Its results are incomplete: {unwritten}")
        if monitor.error is not None:
            raise monitor.error from None
        raise
    summary: dict[str, Any] = {}

    def write() -> None:
        summary.update(_write_results(folder, experiment, outcome))

    if outcome.status == "interrupted":
        write()
    else:
        write_finally(write, monitor.notice)
    if diverged := summary["diverged"]:
        monitor.notice(f"{len(diverged)} of {experiment.nodes} nodes diverged: {format_node_ids(diverged, most=10)}")
    return Run(folder, summary, experiment)


@contextlib.contextmanager
def _errors_named(experiment: Experiment) -> Iterator[None]:
    """Let errors about the experiment begin with its file. Most components do not know it."""
    try:
        yield
    except ExperimentError as error:
        if not experiment.source or error.source not in ("experiment", experiment.name):
            raise  # it has no file, or the error is in another file or in an option of the command
        raise ExperimentError(error.problems, experiment.source) from error


def _explains_itself(error: BaseException) -> bool:
    """Whether an error from before the start of nodes needs no file of the run. Other errors refer to its log."""
    return isinstance(error, Exception) and (
        not isinstance(error, RunError) or isinstance(error, LaunchError | SetupError)
    )


def _run_engine(
    experiment: Experiment,
    folder: RunFolder,
    monitor: RunMonitor,
    command_time: float,
    resumed: Manifest | None,
    machines: Machines,
    left: CoordinatorFile | None = None,
) -> Outcome:
    if experiment.engine == "simulation":
        with _worker_starter(experiment, machines.ray) as start_workers:
            return _simulate(experiment, folder, monitor, command_time, start_workers, resumed)
    if machines.ray is None:
        return _run_processes(experiment, folder, monitor, command_time, machines.agents, resumed, left)
    from shoal.engines.ray.agents import ray_agents

    with ray_agents(machines.ray, experiment, monitor.notice) as plan:
        experiment = for_agents(experiment, plan)
        write_experiment(folder.experiment, keep_plugin_files(experiment, folder.path))
        return _run_processes(experiment, folder, monitor, command_time, plan, resumed)


def _run_processes(
    experiment: Experiment,
    folder: RunFolder,
    monitor: RunMonitor,
    command_time: float,
    agents: AgentsPlan | None,
    resumed: Manifest | None,
    left: CoordinatorFile | None = None,
) -> Outcome:
    from shoal.engines.processes.launch import run_processes

    return run_processes(experiment, folder, monitor, command_time, agents, resumed, left)


def for_agents(experiment: Experiment, agents: AgentsPlan) -> Experiment:
    """The experiment as it runs on agents: links between machines are sealed, unless the user allows plain ones."""
    if experiment.engine != "processes":
        raise ExperimentError(
            ["agents run processes: add engine = 'processes', or --engine processes"], experiment.title
        )
    plan = experiment.processes
    if agents.stays_on_loopback or plan.sealed or plan.allow_unsealed:
        return experiment
    return dataclasses.replace(experiment, processes=dataclasses.replace(plan, sealed=True))


@contextlib.contextmanager
def _worker_starter(experiment: Experiment, ray: str | None) -> Iterator[WorkerStarter | None]:
    """Provide a function that starts workers on a Ray cluster, if the experiment wants them."""
    if experiment.simulation.batching != "ray":
        yield None
        return
    from shoal.engines.ray.actors import start_actors
    from shoal.engines.ray.cluster import LOCAL, ray_cluster

    with ray_cluster(ray or LOCAL, experiment.simulation.workers, experiment.nodes) as cluster:
        yield functools.partial(start_actors, cluster)


def _simulate(
    experiment: Experiment,
    folder: RunFolder,
    monitor: RunMonitor,
    command_time: float,
    start_workers: WorkerStarter | None,
    resumed: Manifest | None,
) -> Outcome:
    from shoal.engines.simulation.engine import Simulation

    with process_state_kept(experiment):
        simulation = Simulation(experiment, folder, monitor, command_time, start_workers, resumed)
        table = keep_plugin_files(experiment, folder.path)
        table["simulation"]["batching"] = simulation.batching  # a replay of the run must not choose again
        write_experiment(folder.experiment, table)
        write_node_data(folder, simulation.setup.node_data())
        return simulation.run()


def _write_results(folder: RunFolder, experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    from shoal.results.metrics_file import write_metrics

    records = read_lines(folder)
    plan = experiment
    summary = summarize(folder, plan.engine, plan.nodes, plan.seed, outcome, plan.round_nodes, records)
    write_metrics(folder, records)
    return summary
