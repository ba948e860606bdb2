"""When a checkpoint is complete: every node that is present has saved its state. Then the manifest is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import StorageError
from shoal.experiment import Experiment
from shoal.experiment.writing import experiment_hash, software_versions
from shoal.results.checkpoints import Checkpoints, Manifest, SavedNode
from shoal.results.progress import ProgressListener
from shoal.results.records import RunFolder
from shoal.traits import traits_of
from shoal.types import NodeId


@dataclass(frozen=True)
class RunPosition:
    """How far a run is: what a manifest holds beside the states of nodes."""

    time: float
    wall_s: float
    failed: dict[NodeId, str]
    incarnations: dict[NodeId, int] = field(default_factory=dict)
    """How often nodes were restarted."""
    hung: list[NodeId] = field(default_factory=list)
    ticks: int | None = None
    """The evaluations by the clock of all nodes together; None if each node has its own."""
    events: int = 0


class CheckpointTracker:
    """Collects what nodes have saved, and writes a manifest as soon as a checkpoint is complete."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        listener: ProgressListener,
        position: Callable[[], RunPosition],
        before_manifest: Callable[[], None] = lambda: None,
        completed_round: int = -1,
    ) -> None:
        """`before_manifest` writes what the manifest refers to. `completed_round` is that of a resumed run."""
        self._experiment = experiment
        self._listener = listener
        self._position = position
        self._before_manifest = before_manifest
        self._files = Checkpoints(folder)
        self._hash = experiment_hash(experiment)
        self._versions = dict(software_versions())
        self._by_time = cut_by_time(experiment)
        self._saved: dict[int, dict[NodeId, SavedNode]] = {}
        """By round, where nodes wait for each other."""
        self._latest: dict[NodeId, SavedNode] = {}
        """The latest state of each node, where nodes do not wait for each other."""
        self._without_state: set[NodeId] = set()
        self._abandoned: set[int] = set()
        self._completed = completed_round

    @property
    def completed(self) -> int:
        """The round of the latest complete checkpoint; -1 if there is none."""
        return self._completed

    def saved(self, saved: SavedNode) -> None:
        self._latest[saved.node] = saved
        if not self._by_time and saved.round > self._completed and saved.round not in self._abandoned:
            self._saved.setdefault(saved.round, {})[saved.node] = saved
        self.complete_due()

    def exclude(self, node: NodeId) -> None:
        """A service node has no state: it begins again when the run is resumed."""
        self._without_state.add(node)
        self.complete_due()

    def abandon(self, round: int, reason: str) -> None:
        """A state could not be saved. The run goes on, and earlier checkpoints remain."""
        if round in self._abandoned or round <= self._completed:
            return
        self._abandoned.add(round)
        self._saved.pop(round, None)
        self._files.remove(round)  # it takes space on a full disk
        kept = f"the checkpoint of round {self._completed} remains" if self._completed >= 0 else "there is none before"
        self._listener.notice(f"the run goes on without a checkpoint of round {round}, {kept}: {reason}")

    def complete_due(self) -> None:
        """Write the manifest of every checkpoint that is complete. Call it when a node has failed, too."""
        if not self._saved and not self._latest:
            return
        position = self._position()
        absent = {*position.failed, *position.hung, *self._without_state}
        required = set(range(self._experiment.size)) - absent
        if not required:
            return
        if self._by_time:
            self._complete_latest(required, position)
            return
        for round in sorted(self._saved):
            if round in self._saved and self._saved[round].keys() >= required:
                states = [saved for saved in self._saved[round].values() if saved.node in required]
                self._complete(round, states, position)

    def _complete_latest(self, required: set[NodeId], position: RunPosition) -> None:
        if not self._latest.keys() >= required:
            return
        chosen = [self._latest[node] for node in sorted(required)]
        round = min(saved.round for saved in chosen)
        if round <= self._completed or round in self._abandoned:
            return
        try:
            complete = all(self._files.adopt(saved, round) for saved in chosen)
        except StorageError as error:
            self.abandon(round, str(error))
            return
        if complete:
            self._complete(round, chosen, position)

    def _complete(self, round: int, nodes: list[SavedNode], position: RunPosition) -> None:
        manifest = Manifest(
            round=round,
            experiment=self._hash,
            base=str(self._experiment.base.resolve()),
            versions=self._versions,
            time=position.time if self._by_time else max([saved.time for saved in nodes]),
            wall_s=position.wall_s,
            created=time.time(),
            cut_by_time=self._by_time,
            same_start=self._by_time or self._experiment.engine == "processes",
            nodes=nodes,
            failed={str(node): reason for node, reason in sorted(position.failed.items())},
            incarnations={str(node): count for node, count in sorted(position.incarnations.items())},
            hung=sorted(position.hung),
            without_state=sorted(self._without_state),
            ticks=self._common_ticks(nodes) if position.ticks is None else position.ticks,
            events=position.events,
        )
        self._write(manifest)

    def _common_ticks(self, nodes: list[SavedNode]) -> int:
        """The evaluations by the clock that all training nodes have taken."""
        return min((saved.ticks for saved in nodes if saved.node < self._experiment.nodes), default=0)

    def _write(self, manifest: Manifest) -> None:
        round = manifest.round
        try:
            self._before_manifest()
            self._files.write(manifest)
        except StorageError as error:
            self.abandon(round, str(error))
            return
        self._completed = round
        self._saved = {later: nodes for later, nodes in self._saved.items() if later > round}
        self._abandoned = {later for later in self._abandoned if later > round}
        self._files.remove_older(round, self._experiment.checkpoint.keep)


def cut_by_time(experiment: Experiment) -> bool:
    """Whether checkpoints consist of the latest states, because nodes do not wait for each other."""
    return traits_of(experiment.algorithm.build(), "algorithm").checkpoint_cut == "time"
