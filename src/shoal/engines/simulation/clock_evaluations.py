"""Evaluation of all models at regular times of the virtual clock."""

from __future__ import annotations

from shoal.engines.averaging import ModelAverages
from shoal.engines.simulation.checkpoints import SimulatedCheckpoints
from shoal.engines.simulation.nodes import SimulatedNodes
from shoal.engines.simulation.recorder import Recorder
from shoal.engines.simulation.scheduled_events import SimulatedEvents
from shoal.engines.simulation.world import World
from shoal.experiment import Experiment
from shoal.results.records import Evaluation


class ClockEvaluations:
    """Evaluates every `evaluation.seconds`, if the experiment sets it, and once more at the end."""

    def __init__(
        self,
        experiment: Experiment,
        world: World,
        nodes: SimulatedNodes,
        events: SimulatedEvents,
        recorder: Recorder,
        checkpoints: SimulatedCheckpoints,
    ) -> None:
        self._seconds = experiment.evaluation.seconds
        self._averaged = experiment.evaluation.average and "algorithm" not in experiment.services
        self._world = world
        self._nodes = nodes
        self._events = events
        self._recorder = recorder
        self._checkpoints = checkpoints

    def schedule_next(self) -> None:
        if self._seconds is not None:
            self._world.kernel.schedule_daemon((self._checkpoints.ticks + 1) * self._seconds, self._tick)

    def evaluate_last(self, time: float) -> None:
        if self._seconds is not None:
            self._evaluate(time)

    def _tick(self) -> None:
        if not self._events.run_is_over():
            self._evaluate(self._world.kernel.now)
            self.schedule_next()

    def _evaluate(self, time: float) -> None:
        """Evaluate the present models of all nodes, and their average."""
        self._checkpoints.ticks += 1
        tick = self._checkpoints.ticks
        present = self._nodes.present_training_nodes
        evaluated = [node for node in present if node.context.schedule.evaluated]
        works = [node.training.evaluation(node.params, node.training.progress) for node in evaluated]
        for node, found in zip(evaluated, self._world.compute_all(works), strict=True):
            self._recorder.write(node.id, Evaluation(max(0, node.next_round - 1), time, found, tick))
        if self._averaged:
            averages = ModelAverages()
            for node in present:
                averages.add(node.id, tick, node.params)
            for average in averages.complete(set()):
                self._recorder.write_average(average, time, tick)
