"""The progress of a run with processes, for its user."""

from __future__ import annotations

from shoal.engines.processes.average_evaluations import AverageEvaluations
from shoal.engines.processes.node_registry import NodeRegistry
from shoal.engines.run_tracker import RunTracker


class ProgressReporter:
    """Reports rounds and traffic while nodes run, and then what the run still waits for."""

    def __init__(
        self, tracker: RunTracker, registry: NodeRegistry, averages: AverageEvaluations, evaluates_at_end: bool
    ) -> None:
        """`evaluates_at_end`: nodes evaluate the models that they kept after the algorithm has ended."""
        self._tracker = tracker
        self._registry = registry
        self._averages = averages
        self._evaluates_at_end = evaluates_at_end

    def report(self, activity: str = "") -> None:
        """Report the progress. `activity` is what the run does, if all its nodes have exited."""
        rounds = self._tracker.mean_round(lambda node: self._registry[node].rounds)
        sent = sum(entry.bytes_sent for entry in self._registry)
        done = None
        if not activity:
            activity, done = self._activity()
        self._tracker.report_progress(rounds, sent, activity=activity, activity_done=done)

    def _activity(self) -> tuple[str, float | None]:
        """What the run does after the algorithm has ended, and the finished fraction of it."""
        present, size = len(self._registry.present), self._tracker.experiment.size
        if self._tracker.phase == "finishing" and present:
            what = "evaluate their models" if self._evaluates_at_end else "end"
            return f"waiting until {present} of {size} nodes {what}", (1 - present / size) or None
        if self._averages.pending and not self._registry.working & self._tracker.training_nodes:
            return f"evaluating {self._averages.pending} averaged models", None
        return "", None
