"""Checkpoints of a run with processes: nodes save their states, and the coordinator writes the manifests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.engines.checkpoint_tracker import CheckpointTracker, RunPosition, cut_by_time
from shoal.engines.processes import control
from shoal.engines.processes.agent_group import AgentGroup
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.node_registry import NodeRegistry, NodeState
from shoal.engines.processes.remote.protocol import NodeReport
from shoal.engines.processes.run_times import RunTimes
from shoal.engines.run_tracker import RunTracker
from shoal.errors import StorageError
from shoal.experiment import Experiment
from shoal.results.checkpoints import Checkpoints, Manifest, SavedNode
from shoal.results.record_writer import RecordWriter
from shoal.results.records import RunFolder
from shoal.results.state_files import write_state
from shoal.types import NodeId


class ProcessSaver:
    """Saves the state of one node process, and reports it to the coordinator."""

    def __init__(
        self,
        node: NodeId,
        experiment: Experiment,
        folder: RunFolder,
        records: RecordWriter,
        link: CoordinatorLink,
        capture: Callable[[int], dict[str, Any]],
        position: Callable[[], tuple[float, int]],
    ) -> None:
        """`capture` returns the node's state after a round; `position` the time and the last evaluation tick."""
        self.every = experiment.checkpoint.every
        self._node = node
        self._by_time = cut_by_time(experiment)
        self._files = Checkpoints(folder)
        self._records = records
        self._link = link
        self._capture = capture
        self._position = position
        self._written: list[str] = []
        """The last two files, where nodes do not wait for each other. The coordinator may still need the earlier."""

    def save(self, round: int) -> None:
        if self._by_time:
            path = self._files.latest_state_name(round, self._node)
        elif self._files.is_complete(round):
            return  # the node was restarted by a fault since
        else:
            path = self._files.state_name(round, self._node)
        try:
            self._records.flush()  # the size of the records is part of the checkpoint
            file = write_state(path, self._capture(round))
        except StorageError as error:
            self._link.send(control.CheckpointFailed(self._node, round, str(error)))
            return
        if self._by_time:
            self._written.append(path)
            while len(self._written) > 2:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._written.pop(0))
        time, ticks = self._position()
        saved = SavedNode(self._node, round, file, time, self._records.size(self._node), ticks)
        self._link.send(control.CheckpointSaved(self._node, saved))

    def leave(self) -> None:
        self._link.send(control.CheckpointSaved(self._node, None))


class CheckpointCollector:
    """The coordinator's part: collects the reports of nodes, and writes manifests."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        run_tracker: RunTracker,
        agents: AgentGroup,
        registry: NodeRegistry,
        times: RunTimes,
        resumed: Manifest | None,
    ) -> None:
        self.resumed = resumed
        self._experiment = experiment
        self._folder = folder
        self._run_tracker = run_tracker
        self._agents = agents
        self._registry = registry
        self._times = times
        completed = max((r for r in Checkpoints(folder).rounds() if Checkpoints(folder).is_complete(r)), default=-1)
        self._tracker = CheckpointTracker(
            experiment, folder, run_tracker.listener, self._position, completed_round=completed
        )

    @property
    def start_time(self) -> float:
        """The time of the run's clock when nodes start."""
        return 0.0 if self.resumed is None else self.resumed.time

    @property
    def wall_s(self) -> float:
        """The wall time of a resumed run until its checkpoint."""
        return 0.0 if self.resumed is None else self.resumed.wall_s

    def states(self) -> dict[NodeId, str]:
        """The file with the state of each node of a resumed run."""
        if self.resumed is None:
            return {}
        files = Checkpoints(self._folder)
        return {s.node: str(files.state(self.resumed.round, s.node).resolve()) for s in self.resumed.nodes}

    def restore(self, nodes: Iterable[NodeReport]) -> None:
        """Take over what nodes have saved for checkpoints that an earlier coordinator has not completed."""
        for node in nodes:
            if not node.has_state:
                self._tracker.exclude(node.node)
            for saved in node.saved:
                self._tracker.saved(saved)

    def handle(self, message: control.CheckpointSaved | control.CheckpointFailed) -> None:
        if isinstance(message, control.CheckpointFailed):
            self._tracker.abandon(message.round, message.text)
            return
        if message.saved is None:
            self._tracker.exclude(message.node)
            return
        if message.saved.node != message.node or message.saved.round < 0:
            return
        self._tracker.saved(message.saved)
        if message.node == self._experiment.services.get("algorithm"):
            clients = self._registry.working & self._run_tracker.training_nodes
            self._agents.send(clients, control.SaveCheckpoint(message.saved.round))

    def nodes_changed(self) -> None:
        """A node has failed: checkpoints may be complete without it."""
        self._tracker.complete_due()

    def _position(self) -> RunPosition:
        tracker = self._run_tracker
        return RunPosition(
            self._times.now(), tracker.training_seconds(), dict(tracker.lost), dict(tracker.incarnations)
        )


def mark_absent(nodes: Mapping[NodeId, str], registry: NodeRegistry) -> None:
    """Note the nodes that are not there at the start, with the reason. They are not started, until a fault does."""
    for node, reason in nodes.items():
        entry = registry[node]
        entry.state = NodeState.EXITED
        entry.failure = reason
        if entry.public_key is None:
            entry.public_key = KeyPair.fresh().public  # of no process: the node announces its own when it starts
