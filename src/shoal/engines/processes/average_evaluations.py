"""Evaluation of averaged models: the agent evaluates them one after another."""

from __future__ import annotations

from collections import deque

from shoal.engines.processes import control
from shoal.engines.processes.agent import Agent
from shoal.engines.run_tracker import RunTracker
from shoal.results.records import RunFolder
from shoal.types import Params


class AverageEvaluations:
    """Collects the nodes' models and has every complete average evaluated.

    Where the timing of a run matters, evaluations wait until it has ended: they would take time from the nodes.
    """

    def __init__(self, tracker: RunTracker, agent: Agent, folder: RunFolder, after_run: bool) -> None:
        """`after_run`: evaluate nothing while nodes run."""
        self._tracker = tracker
        self._agent = agent
        self._folder = folder
        self._after_run = after_run
        self._by_clock = tracker.experiment.evaluation.seconds is not None
        self._times: dict[int, float] = {}
        self._queue: deque[control.EvaluateAverage] = deque()
        """The first is being evaluated. At the end of a long run there may be hundreds."""
        self._cancelled = False
        self.last_tick: int | None = None
        """The last evaluation tick, once it is known. A node that learns late of the end may send models of later
        ticks, which are ignored."""

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def add_model(self, snapshot: control.ModelSnapshot, params: Params) -> None:
        moment = snapshot.round if snapshot.tick is None else snapshot.tick
        if self.last_tick is not None and moment > self.last_tick:
            return
        self._times[moment] = max(snapshot.time, self._times.get(moment, 0.0))
        self._tracker.add_model(snapshot.node, moment, params)
        self.evaluate_complete()

    def evaluate_complete(self) -> None:
        """Queue every average that is complete."""
        if self._cancelled or (self._after_run and self._tracker.phase == "running"):
            return
        for average in self._tracker.complete_averages():
            self._queue.append(
                control.EvaluateAverage(
                    average.round,
                    self._times.pop(average.round),
                    average.nodes,
                    average.consensus_distance,
                    average.mean.tobytes(),
                    str(self._folder.path.resolve()),
                    average.round if self._by_clock else None,
                )
            )
            if len(self._queue) == 1:
                self._evaluate_next()

    def evaluated(self, report: control.AverageEvaluated) -> None:
        """The evaluation under way has ended: begin the next."""
        self._queue.popleft()
        self._evaluate_next()
        if report.code:
            self._tracker.listener.notice(
                f"evaluating the averaged model of round {report.round} failed; see {self._folder.log}"
            )

    def cancel(self) -> None:
        """Begin no more evaluations: the user wants the run to end.

        The evaluation under way continues while nodes save their models. The end of the run kills it.
        """
        self._cancelled = True
        while len(self._queue) > 1:
            self._queue.pop()

    def _evaluate_next(self) -> None:
        if self._queue:
            self._agent.send(self._queue[0])
