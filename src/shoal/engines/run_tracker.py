"""The state of a run that both engines keep: lost nodes, models to be averaged, progress and the final status."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeAlias

from shoal.engines.averaging import ModelAverage, ModelAverages
from shoal.experiment import Experiment
from shoal.results.checkpoints import Manifest
from shoal.results.monitor import RunMonitor
from shoal.results.progress import (
    PROGRESS_INTERVAL,
    MeanScore,
    Progress,
    ProgressListener,
    Score,
    Status,
)
from shoal.results.records import NOT_JOINED
from shoal.types import NodeId, Params

Phase: TypeAlias = Literal["starting", "loading", "forking", "running", "finishing"]


def _incarnations(resumed: Manifest | None) -> dict[NodeId, int]:
    return {} if resumed is None else {int(node): count for node, count in resumed.incarnations.items()}


def _absent_nodes(experiment: Experiment, resumed: Manifest | None) -> dict[NodeId, str]:
    """The nodes that are not there when a run begins, or continues from a checkpoint, with the reason."""
    if resumed is not None:
        return {int(node): reason for node, reason in resumed.failed.items()}
    return dict.fromkeys(sorted(experiment.late_nodes), NOT_JOINED)


class RunTracker:
    """Follows one run from start to end and reports it to the listener."""

    def __init__(
        self, experiment: Experiment, listener: ProgressListener | None = None, resumed: Manifest | None = None
    ) -> None:
        """`resumed` is the checkpoint that the run continues from."""
        self.experiment = experiment
        self.listener = RunMonitor.of(listener)
        self.phase: Phase = "starting"
        self.training_nodes = frozenset(range(experiment.nodes))
        """The nodes that train. The others provide services to them."""
        self.round_nodes = frozenset(experiment.round_nodes)
        """The nodes whose rounds count as the progress of the run."""
        self.lost = _absent_nodes(experiment, resumed)
        """Nodes that failed or have not joined, with the reason."""
        self.listener.expect(self.round_nodes, experiment.scored_nodes, self.lost)
        self.listener.evaluates_after_end = experiment.evaluation.seconds is not None
        self.incarnations = Counter(_incarnations(resumed))
        """How often each node was restarted."""
        self._awaited = set(self.training_nodes.difference(self.lost))
        """Nodes that will still send models to be averaged."""
        self._averages = ModelAverages()
        self._score = MeanScore()
        self._diverged = False
        self._training_began = time.monotonic()
        self._progress_shown = 0.0

    # Nodes

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.lost[node] = reason
        self.listener.node_left(node)
        self._awaited.discard(node)

    @property
    def not_joined(self) -> set[NodeId]:
        """Late nodes that have not joined yet."""
        return {node for node, reason in self.lost.items() if reason == NOT_JOINED}

    def node_restarted(self, node: NodeId) -> None:
        """A node that failed starts again, or a late node joins."""
        if self.lost.pop(node) != NOT_JOINED:
            self.incarnations[node] += 1
        self.listener.node_joined(node)
        if node in self.training_nodes:
            self._awaited.add(node)

    def expect_no_more_models(self, nodes: Collection[NodeId] | None = None) -> None:
        """These nodes, by default all, send no more models: averages are complete without them."""
        self._awaited.difference_update(self._awaited.copy() if nodes is None else nodes)

    @property
    def all_training_nodes_lost(self) -> bool:
        return self.training_nodes <= self.lost.keys()

    @property
    def final_status(self) -> Status:
        """The status of a run that came to its end without an interruption."""
        if self.all_training_nodes_lost:
            return "failed"
        return "incomplete" if self.lost else "completed"

    # Models and scores

    def add_model(self, node: NodeId, round: int, params: Params) -> None:
        self._averages.add(node, round, params)

    def complete_averages(self) -> Iterator[ModelAverage]:
        """Remove and return, in order, the averages for which no more models are expected."""
        return self._averages.complete(self._awaited)

    def add_score(self, round: int, score: Score | None) -> None:
        self._score.add(round, score)

    def node_diverged(self, node: NodeId, detail: str) -> None:
        """Warn of the first node whose training diverged. The summary has all of them."""
        if not self._diverged:
            self._diverged = True
            self.listener.notice(
                f"node {node} diverged in {detail}; try a smaller training.lr, or set training.clip_norm"
            )

    # Progress

    def start_training_clock(self, before: float = 0.0) -> None:
        """Count the wall time of the run from now on. Startup is not part of it.

        `before` is the wall time of a resumed run until its checkpoint.
        """
        self._training_began = time.monotonic() - before

    def training_seconds(self, until: float | None = None) -> float:
        """Wall time since training began, up to `until` on the monotonic clock, by default up to now."""
        return (time.monotonic() if until is None else until) - self._training_began

    def progress_due(self) -> bool:
        """Whether the listener wants progress now. True at most once in `PROGRESS_INTERVAL` seconds."""
        now = time.monotonic()
        if now - self._progress_shown < PROGRESS_INTERVAL:
            return False
        self._progress_shown = now
        return True

    def mean_round(self, rounds: Callable[[NodeId], int]) -> float:
        """Return the mean of the finished `rounds` of nodes. Failed nodes do not count, unless all have failed."""
        nodes = self.round_nodes.difference(self.lost) or self.round_nodes
        return sum(map(rounds, nodes)) / len(nodes)

    def report_progress(
        self,
        round: float,
        bytes_sent: int,
        virtual_seconds: float | None = None,
        activity: str = "",
        activity_done: float | None = None,
    ) -> None:
        self.listener.progress(
            Progress(
                self.phase,
                nodes=self.experiment.size,
                alive=self.experiment.size - len(self.lost),
                seconds=self.training_seconds(),
                round=round,
                rounds=self.experiment.algorithm.options.get("rounds"),
                score=self._score.mean,
                bytes_sent=bytes_sent,
                virtual_seconds=virtual_seconds,
                duration=self.experiment.duration,
                failed=len(self.lost) - len(self.not_joined),
                activity=activity,
                activity_done=activity_done,
            )
        )
