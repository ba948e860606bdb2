"""The simulation: all nodes of an experiment in one process, under a virtual clock."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shoal.engines.operating_system import processor_seconds
from shoal.engines.run_tracker import RunTracker
from shoal.engines.simulation.batching import choose_batching
from shoal.engines.simulation.checkpoints import SimulatedCheckpoints
from shoal.engines.simulation.clock_evaluations import ClockEvaluations
from shoal.engines.simulation.compute import Executor, SequentialExecutor, StackedExecutor, WorkerExecutor
from shoal.engines.simulation.nodes import SimulatedNodes
from shoal.engines.simulation.pool import fork_workers
from shoal.engines.simulation.recorder import Recorder
from shoal.engines.simulation.scheduled_events import SimulatedEvents
from shoal.engines.simulation.world import World
from shoal.engines.worker import Worker
from shoal.errors import NodeError, ShoalError
from shoal.experiment import Batching, Experiment
from shoal.experiment.setup import Setup
from shoal.node import Node
from shoal.results.checkpoints import Manifest
from shoal.results.progress import Outcome, ProgressListener, Status
from shoal.results.records import RunFolder
from shoal.types import NodeId

__all__ = ["Simulation", "World"]

GARBAGE_THRESHOLD = 100_000
"""Allocations between two collections. Nodes and messages stay in use during the whole run."""


class Simulation:
    """One run of an experiment."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        listener: ProgressListener | None = None,
        command_time: float | None = None,
        start_workers: Callable[[Setup], Sequence[Worker]] | None = None,
        resumed: Manifest | None = None,
    ) -> None:
        """`command_time` is when the user asked for the run, on the clock of `time.time`; by default now.

        `start_workers` starts workers on other machines, for the batching "ray". `resumed` is the checkpoint that the
        run continues from.
        """
        self._start_workers = start_workers
        self._command_time = time.time() if command_time is None else command_time
        self._experiment = experiment
        self._tracker = RunTracker(experiment, listener, resumed)
        self._tracker.phase = "loading"
        self._report_loading()
        self.setup = Setup(experiment)
        environment = self.setup.environment
        self._world = World(
            experiment.size,
            environment.network_model(),
            training_node_count=experiment.nodes,
            has_timed_events=environment.has_timed_events,
            after_computing=lambda: self._population.report_progress_if_due(),
        )
        self._recorder = Recorder(folder, self.setup, self._tracker, self._world.kernel)
        self._checkpoints = SimulatedCheckpoints(
            experiment, folder, self._world, self._tracker, self._recorder, resumed
        )
        self._report_loading(f"building {experiment.size} nodes")
        for node in self._tracker.lost:
            self._world.mark_failed(node)
        with _rare_collections():
            self._population = SimulatedNodes(self.setup, self._world, self._tracker, self._recorder, self._checkpoints)
        self._checkpoints.begin(self._population.nodes)
        self._checkpoints.restore_all()
        self._events = SimulatedEvents(environment, self._world, self._population, self._recorder, self._checkpoints)
        self._evaluations = ClockEvaluations(
            experiment, self._world, self._population, self._events, self._recorder, self._checkpoints
        )
        if experiment.simulation.batching == "auto":
            self._report_loading("choosing simulation.batching")
        self.batching = choose_batching(experiment, self.setup)

    def _report_loading(self, activity: str = "") -> None:
        self._tracker.report_progress(round=0.0, bytes_sent=0, activity=activity)

    @property
    def nodes(self) -> list[Node]:
        return self._population.nodes

    @property
    def lost(self) -> dict[NodeId, str]:
        """Nodes that failed, with the reason."""
        return self._tracker.lost

    def run(self) -> Outcome:
        """Run to the end, or to the error that ends the run. Records are on disk in both cases."""
        cpu = processor_seconds()
        self._world.executor = self._create_executor()
        self._tracker.listener.started = True
        startup = time.time() - self._command_time
        self._tracker.phase = "running"
        self._tracker.start_training_clock(self._checkpoints.wall_s)
        stopped_by: int | None = None
        try:
            self._simulate()
            status: Status = self._tracker.final_status
        except KeyboardInterrupt as stop:
            status = "failed" if self._tracker.all_training_nodes_lost else "interrupted"
            stopped_by = stop.args[0] if stop.args else signal.SIGINT
        except ShoalError:
            raise
        except Exception as error:
            node = self._population.current_node()
            raise NodeError(f"node {node} raised:\n{traceback.format_exc()}") from error
        finally:
            gc.unfreeze()
            wall = self._tracker.training_seconds()
            try:
                self._recorder.close()
            finally:
                self._world.executor.close()
                self._population.stop_all()
        self._population.report_progress()
        return Outcome(
            status,
            wall_s=wall,
            startup_s=startup,
            virtual_s=self._world.kernel.now if status == "interrupted" else self._population.last_end,
            lost=dict(sorted(self._tracker.lost.items())),
            facts={
                "batching": self._batching_used(),
                "signal": stopped_by,
                "train_cpu_s": sum(node.trainer.cpu_seconds for node in self.nodes),
                "total_cpu_s": processor_seconds() - cpu + self._world.executor.external_cpu_seconds,
            },
        )

    def _simulate(self) -> None:
        """Run the kernel until no event is left, then end and evaluate what remains."""
        duration, kernel, population = self._experiment.duration, self._world.kernel, self._population
        self._events.skip_past()
        population.start_all()
        self._events.schedule_next()
        self._evaluations.schedule_next()
        if duration is not None:
            kernel.schedule_daemon(duration, population.finish_training_nodes)
        gc.freeze()
        with _rare_collections():
            kernel.run()
        self._world.raise_if_deadlocked(self._events.offline_forever())
        ended = population.last_end
        self._evaluations.evaluate_last(ended)
        population.finish_services()
        population.last_end = ended
        population.lose_hung_nodes()

    def _batching_used(self) -> Batching:
        """The way in which nodes were trained: all one by one, if none could be stacked."""
        executor = self._world.executor
        one_by_one = isinstance(executor, StackedExecutor) and not executor.trained_together
        return "off" if one_by_one else self.batching

    def _create_executor(self) -> Executor:
        trainers = [node.trainer for node in self.nodes]
        if self.batching == "vmap":
            return StackedExecutor()
        if self.batching == "pool":
            workers = min(self._experiment.simulation.workers or os.cpu_count() or 1, self._experiment.nodes)
            return WorkerExecutor(trainers, fork_workers(trainers, workers, self.setup.initial.size))
        if self.batching == "ray":
            assert self._start_workers is not None, "the batching 'ray' needs workers on other machines"
            executor = WorkerExecutor(trainers, self._start_workers(self.setup))
            if self._checkpoints.resumed is not None:
                executor.restore_trainers()
            return executor
        return SequentialExecutor()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python search for garbage less often: almost all objects of nodes stay in use."""
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
