"""Evaluation of averaged models: the agent evaluates them one after another."""

from __future__ import annotations

from collections import deque

from shoal.engines.processes import control
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.kept_averages import KeptAverages
from shoal.engines.run_tracker import RunTracker
from shoal.errors import DiskFullError
from shoal.results.checkpoints import Manifest
from shoal.results.records import RunFolder
from shoal.types import Params


class AverageEvaluations:
    """Collects the nodes' models and has every complete average evaluated.

    Where the timing of a run matters, evaluations wait until it has ended: they would take time from the nodes.
    """

    def __init__(self, tracker: RunTracker, agents: AgentGroup, folder: RunFolder, after_run: bool) -> None:
        """`after_run`: evaluate nothing while nodes run."""
        self._tracker = tracker
        self._agents = agents
        self._folder = folder
        self._after_run = after_run
        self._by_clock = tracker.experiment.evaluation.seconds is not None
        self._times: dict[int, float] = {}
        self._queue: deque[control.EvaluateAverage] = deque()
        """The first is being evaluated. At the end of a long run there may be hundreds."""
        self._kept = KeptAverages(folder, enabled=tracker.experiment.checkpoint.every > 0)
        self._waiting: list[control.EvaluateAverage] = []
        """Complete averages that are evaluated later, because the timing of the run matters."""
        self._cancelled = False
        self._skipped = -1
        """Evaluations up to this one are skipped."""
        self.last_tick: int | None = None
        """The last evaluation tick, once it is known. A node that learns late of the end may send models of later
        ticks, which are ignored."""

    @property
    def pending(self) -> int:
        """The number of averages whose evaluation has begun or comes next."""
        return len(self._queue)

    def add_model(self, snapshot: control.ModelSnapshot, params: Params) -> None:
        moment = snapshot.round if snapshot.tick is None else snapshot.tick
        if moment <= self._skipped or (self.last_tick is not None and moment > self.last_tick):
            return
        self._times[moment] = max(snapshot.time, self._times.get(moment, 0.0))
        self._tracker.add_model(snapshot.node, moment, params)
        self.evaluate_complete()

    def evaluate_complete(self) -> None:
        """Queue every average that is complete."""
        waits = self._after_run and self._tracker.phase == "running"
        if self._cancelled or (waits and not self._kept.enabled):
            return
        for average in self._tracker.complete_averages():
            request = control.EvaluateAverage(
                average.round,
                self._times.pop(average.round),
                average.nodes,
                average.consensus_distance,
                average.mean.tobytes(),
                average.round if self._by_clock else None,
            )
            self._keep(request)
            self._waiting.append(request)
        if not waits:
            self._start_waiting()

    def _keep(self, request: control.EvaluateAverage) -> None:
        try:
            self._kept.keep(request)
        except DiskFullError as error:
            self._tracker.listener.notice(
                f"if the run is resumed, the averaged model of round {request.round} is not evaluated: {error}"
            )

    def restore(self, resumed: Manifest | None) -> None:
        """Take over the evaluations that a resumed run has not made before its checkpoint."""
        if resumed is not None:
            self._waiting = self._kept.restore(resumed)

    def skip(self, last: int) -> None:
        """Skip the evaluations up to `last`: an earlier coordinator has received some of their models."""
        self._skipped = last

    def _start_waiting(self) -> None:
        for request in self._waiting:
            self._queue.append(request)
            if len(self._queue) == 1:
                self._evaluate_next()
        self._waiting = []

    def evaluated(self, report: control.AverageEvaluated) -> None:
        """The evaluation under way has ended: begin the next."""
        if not self._queue or self._queue[0].round != report.round:
            return  # an earlier coordinator has asked for it
        self._kept.remove(self._queue.popleft().round)
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
            self._agents.evaluate(self._queue[0])
