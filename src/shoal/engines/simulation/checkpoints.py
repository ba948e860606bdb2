"""Checkpoints of a simulation: saves the states of nodes, and continues from them.

Nodes end a round at different virtual times. In a resumed simulation, every node starts at the time at which it saved
its state, so that all later events have the times of an uninterrupted run.
"""

from __future__ import annotations

from shoal.engines.checkpoint_tracker import CheckpointTracker, RunPosition, cut_by_time
from shoal.engines.node_states import capture, restore, restore_own
from shoal.engines.run_tracker import RunTracker
from shoal.engines.simulation.compute import WorkerExecutor
from shoal.engines.simulation.recorder import Recorder
from shoal.engines.simulation.world import World
from shoal.errors import StorageError
from shoal.experiment import Experiment
from shoal.node import Node
from shoal.results.checkpoints import Checkpoints, Manifest, SavedNode
from shoal.results.records import RunFolder
from shoal.results.state_files import read_state, write_state
from shoal.types import NodeId


class SimulatedCheckpoints:
    """Saves and restores the states of all nodes of one simulation."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        world: World,
        run_tracker: RunTracker,
        recorder: Recorder,
        resumed: Manifest | None = None,
    ) -> None:
        self.every = experiment.checkpoint.every
        self.resumed = resumed
        self.ticks = self.events = 0
        """The evaluations by the clock and the timed events so far."""
        self._experiment = experiment
        self._folder = folder
        self._files = Checkpoints(folder)
        self._world = world
        self._run_tracker = run_tracker
        self._recorder = recorder
        self._by_time = cut_by_time(experiment)
        self._nodes: list[Node] = []
        self._latest: dict[NodeId, int] = {}
        self._tracker = CheckpointTracker(
            experiment,
            folder,
            run_tracker.listener,
            self._position,
            before_manifest=recorder.flush,
            completed_round=-1 if resumed is None else resumed.round,
        )

    def saver(self, node: NodeId) -> NodeSaver | None:
        """The saver of one node; None if the experiment writes no checkpoints."""
        return NodeSaver(self, node, self.every) if self.every else None

    def begin(self, nodes: list[Node]) -> None:
        """Note the nodes of the simulation; a restarted node replaces its predecessor in the list."""
        self._nodes = nodes

    def save(self, id: NodeId, round: int) -> None:
        """Save the present state of a node as its state after `round`."""
        world, node = self._world, self._nodes[id]
        if self._by_time:
            path = self._files.latest_state(round, id)
        elif round <= self._tracker.completed:
            return
        else:
            path = self._files.state(round, id)
        if self._recorder.paused:
            self._tracker.abandon(round, "records are paused, because the disk is full")
            return
        state = capture(node, world.runtimes[id].mailbox, round)
        if isinstance(world.executor, WorkerExecutor) and "trainer" in state["node"]:
            state["node"]["trainer"] = world.executor.trainer_state(node.trainer)
        try:
            file = write_state(path, state)
        except StorageError as error:
            self._tracker.abandon(round, str(error))
            return
        if self._by_time and id in self._latest:
            self._files.latest_state(self._latest[id], id).unlink(missing_ok=True)
        self._latest[id] = round
        records = self._recorder.size(id)
        self._tracker.saved(SavedNode(id, round, file, world.kernel.now, records, self.ticks, self.events))
        if id == self._experiment.services.get("algorithm"):
            for client in self._nodes[: self._experiment.nodes]:
                if world.runtimes[client.id].running:
                    client.checkpoints.request(round)

    def exclude(self, node: NodeId) -> None:
        self._tracker.exclude(node)

    def nodes_changed(self) -> None:
        """A node has failed: checkpoints may be complete without it."""
        self._tracker.complete_due()

    def restore_own(self, node: Node) -> int | None:
        """Restore a restarted node from its own latest checkpoint. Returns its round; None if there is none."""
        return restore_own(self._files, node) if self.every else None

    # A resumed run

    def start_times(self) -> dict[NodeId, float]:
        """When each node of a resumed run starts."""
        resumed = self.resumed
        if resumed is None:
            return {}
        return {saved.node: resumed.time if self._by_time else saved.time for saved in resumed.nodes}

    @property
    def wall_s(self) -> float:
        """The wall time of a resumed run until its checkpoint."""
        return 0.0 if self.resumed is None else self.resumed.wall_s

    def restore_all(self) -> None:
        """Set all nodes, and the records of the run, to the states of the checkpoint."""
        resumed = self.resumed
        if resumed is None:
            return
        times = self.start_times()
        self._world.kernel.now = min(times.values(), default=resumed.time)
        first = min(resumed.nodes, key=lambda saved: (saved.time, saved.events))
        self.ticks = resumed.ticks if self._by_time else first.ticks
        self.events = resumed.events if self._by_time else first.events
        for saved in resumed.nodes:
            state = read_state(self._files.state(resumed.round, saved.node))
            restore(self._nodes[saved.node], self._world.runtimes[saved.node].mailbox, state)
        self._recorder.skip_repeated(resumed, times)

    def _position(self) -> RunPosition:
        return RunPosition(
            self._world.kernel.now,
            self._run_tracker.training_seconds(),
            dict(self._run_tracker.lost),
            dict(self._run_tracker.incarnations),
            [runtime.id for runtime in self._world.runtimes if runtime.hung],
            self.ticks,
            self.events,
        )


class NodeSaver:
    """The saver of one simulated node."""

    def __init__(self, checkpoints: SimulatedCheckpoints, node: NodeId, every: int) -> None:
        self.every = every
        self._checkpoints = checkpoints
        self._node = node

    def save(self, round: int) -> None:
        self._checkpoints.save(self._node, round)

    def leave(self) -> None:
        self._checkpoints.exclude(self._node)
