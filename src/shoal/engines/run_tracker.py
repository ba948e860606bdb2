"""The state of a run that both engines keep: lost nodes, models to be averaged, progress and the final status."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Literal, TypeAlias

from shoal.engines.averaging import ModelAverage, ModelAverages
from shoal.experiment import Experiment
from shoal.results.progress import (
    PROGRESS_INTERVAL,
    MeanScore,
    NullProgressListener,
    Progress,
    ProgressListener,
    Score,
    Status,
)
from shoal.types import NodeId, Params

Phase: TypeAlias = Literal["starting", "loading", "forking", "running", "finishing"]


class RunTracker:
    """Follows one run from start to end and reports it to the listener."""

    def __init__(self, experiment: Experiment, listener: ProgressListener | None = None) -> None:
        self.experiment = experiment
        self.listener: ProgressListener = listener or NullProgressListener()
        self.phase: Phase = "starting"
        self.training_nodes = frozenset(range(experiment.nodes))
        """The nodes that train. The others provide services to them."""
        self.round_nodes = frozenset(experiment.round_nodes)
        """The nodes whose rounds count as the progress of the run."""
        self.lost: dict[NodeId, str] = {}
        """Nodes that failed, with the reason."""
        self._awaited = set(self.training_nodes)
        """Nodes that will still send models to be averaged."""
        self._averages = ModelAverages()
        self._score = MeanScore()
        self._training_began = time.monotonic()
        self._progress_shown = 0.0

    # Nodes

    def node_lost(self, node: NodeId, reason: str) -> None:
        self.lost[node] = reason
        self._awaited.discard(node)

    def node_restarted(self, node: NodeId) -> None:
        del self.lost[node]
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

    def report_progress(self, round: float, bytes_sent: int, virtual_seconds: float | None = None) -> None:
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
            )
        )
