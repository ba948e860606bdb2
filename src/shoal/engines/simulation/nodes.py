"""The nodes of a simulation: built, started, restarted and ended."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from shoal.engines.rejoining import answer_rejoining_peers, rejoin
from shoal.engines.round_faults import RoundFaults, RoundJoins
from shoal.engines.run_tracker import RunTracker
from shoal.engines.simulation.checkpoints import SimulatedCheckpoints
from shoal.engines.simulation.kernel import Crash, park
from shoal.engines.simulation.recorder import Recorder
from shoal.engines.simulation.world import SimulatedRuntime, World
from shoal.environment.faults import FaultEvent
from shoal.errors import NodeError
from shoal.experiment.setup import Setup
from shoal.message import RUN_LENGTH
from shoal.node import Node
from shoal.results.records import JOINED, NOT_JOINED, REJOINED, Event, Record
from shoal.types import NodeId, Params


class _NodeObserver:
    """The observer of one simulated node."""

    def __init__(self, nodes: SimulatedNodes, id: NodeId, faults: RoundFaults) -> None:
        self._nodes = nodes
        self._id = id
        self._faults = faults

    def record(self, record: Record) -> None:
        self._nodes.recorder.write(self._id, record)

    def submit_for_average(self, round: int, params: Params) -> None:
        self._nodes.tracker.add_model(self._id, round, params)
        self._nodes.recorder.write_complete_averages()

    async def before_round(self, round: int) -> None:
        self._nodes.round_begins(self._id, round)
        if (fault := self._faults.due(round)) is not None:
            world = self._nodes.world
            self.record(Event("fault", world.kernel.now, f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                raise Crash
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            world.runtimes[self._id].hang()
            await park()  # never resumed

    def defer_evaluation(self, round: int, params: Params, progress: tuple[int, int]) -> bool:
        return False  # an evaluation takes no virtual time


class SimulatedNodes:
    """All nodes, by id."""

    def __init__(
        self,
        setup: Setup,
        world: World,
        tracker: RunTracker,
        recorder: Recorder,
        checkpoints: SimulatedCheckpoints,
    ) -> None:
        self.world = world
        self._checkpoints = checkpoints
        self.tracker = tracker
        self.recorder = recorder
        self._setup = setup
        self._experiment = setup.experiment
        self.learning = set(range(setup.experiment.nodes))
        """Training nodes whose algorithm has not ended."""
        self.last_end = 0.0
        """When the last node ended. The kernel's clock continues to the last timeout, whether it is needed or not."""
        self._joins = RoundJoins(setup.experiment.joins_by_round, tracker.not_joined)
        self.nodes = [self._build(id) for id in range(setup.experiment.size)]

    @property
    def present_training_nodes(self) -> list[Node]:
        """The training nodes that have not crashed."""
        return [node for node in self.nodes[: self._experiment.nodes] if node.id not in self.tracker.lost]

    def start_all(self) -> None:
        """Start all nodes; in a resumed run, each at the time of its saved state."""
        self.learning -= self.tracker.lost.keys()
        resumed, times = self._checkpoints.resumed, self._checkpoints.start_times()
        order = {id: place for place, id in enumerate(times)}
        for node in sorted(self.nodes, key=lambda node: order.get(node.id, -1)):
            if node.id in self.tracker.lost:
                self.world.apply_event(FaultEvent(self.world.kernel.now, "crash", (node.id,)))
                continue
            if resumed is not None and node.id in resumed.hung:
                self._start(node, park_forever())
                self.world.runtimes[node.id].hang()
                continue
            self._start(node, self._setup.run_node(node), times.get(node.id))
            if self._setup.environment.restarts:
                self.world.runtimes[node.id].background(answer_rejoining_peers(node))

    def restart(self, id: NodeId) -> None:
        """Start a crashed node again. It has lost everything except its data."""
        if id not in self.tracker.not_joined:
            self._start_absent(id, REJOINED)

    def join(self, id: NodeId) -> None:
        """Start a node that was not there before."""
        if id in self.tracker.not_joined:
            self._start_absent(id, JOINED)

    def _start_absent(self, id: NodeId, event: str) -> None:
        """Start a node that is not there; `event` is what it records when its peers include it."""
        if id not in self.tracker.lost or not self.world.runtimes[id].failed:
            return
        self.world.apply_event(FaultEvent(self.world.kernel.now, "restart", (id,)))
        runtime = SimulatedRuntime(self.world, id)
        runtime.take_over_from(self.world.runtimes[id])
        self.world.runtimes[id] = runtime
        for other in self.world.runtimes:
            if other.id != id and (other.id < self._experiment.nodes or other.failed):
                runtime.mailbox.mark_failed(other.id)  # a training node, until it has answered
        self.tracker.node_restarted(id)
        self.nodes[id] = self._build(id)
        if id in self.tracker.training_nodes:
            self.learning.add(id)
        self.tracker.listener.notice(f"node {id} {'joins' if event == JOINED else 'was restarted'}")
        self._start(self.nodes[id], self._rejoin_and_run(self.nodes[id], event))

    def finish_training_nodes(self) -> None:
        """End all training nodes, because the duration of the run is over. A hung node does not finish."""
        for runtime in self.world.runtimes[: self._experiment.nodes]:
            if not runtime.hung:
                runtime.finish()

    def finish_services(self) -> None:
        """End the service nodes, because all training nodes have ended or hang. A hung node does not finish."""
        for id in self._experiment.services.values():
            if not self.world.runtimes[id].hung:
                self.world.runtimes[id].finish()

    def lose_hung_nodes(self) -> None:
        """At the end of the run: nodes that still run will never end."""
        for runtime in self.world.runtimes:
            if runtime.running:
                self.tracker.node_lost(runtime.id, "hung: it waits for something that never arrives")
        self.recorder.write_complete_averages()

    def stop_all(self) -> None:
        for runtime in self.world.runtimes:
            runtime.stop()

    def current_node(self) -> NodeId | None:
        """The node whose code the kernel ran last."""
        return next((r.id for r in self.world.runtimes if r.runs(self.world.kernel.current)), None)

    def round_begins(self, node: NodeId, round: int) -> None:
        """Let the nodes join that wait for this round."""
        if node in self.tracker.round_nodes:
            for late in self._joins.due(round):
                self.recorder.write_fault(late, FaultEvent(self.world.kernel.now, "join", (late,)))
                self.world.kernel.soon(partial(self.join, late))

    def report_progress_if_due(self) -> None:
        if self.tracker.progress_due():
            self.report_progress()

    def report_progress(self) -> None:
        self.recorder.flush_if_due()
        self.tracker.report_progress(
            self.tracker.mean_round(lambda node: self.nodes[node].next_round),
            sum(node.bytes_sent for node in self.nodes),
            self.world.kernel.now,
        )

    def _build(self, id: NodeId) -> Node:
        return self._setup.node(
            id,
            self.world.runtimes[id],
            _NodeObserver(self, id, self._faults(id)),
            "0" * RUN_LENGTH,
            self._experiment.simulation.receive_timeout,
            self._checkpoints.saver(id),
            self.tracker.incarnations[id],
        )

    def _faults(self, id: NodeId) -> RoundFaults:
        """The faults of a node by round, without faults from before the checkpoint of a resumed run.

        A node that was restarted, also before the run was resumed, has none.
        """
        if self.tracker.incarnations[id] > 0:
            return RoundFaults()
        resumed = self._checkpoints.resumed
        last = next((saved.round for saved in resumed.nodes if saved.node == id), -1) if resumed is not None else -1
        return RoundFaults(fault for fault in self._experiment.faults(id) if not fault.happens_at(last))

    def _start(self, node: Node, main: Coroutine[Any, Any, None], at: float | None = None) -> None:
        self.world.runtimes[node.id].start(main, partial(self._node_ended, node), at)

    async def _rejoin_and_run(self, node: Node, event: str) -> None:
        training_nodes = self.world.runtimes[: self._experiment.nodes]
        others = [r.id for r in training_nodes if r.running and r.id != node.id]
        if await rejoin(node, others, self._checkpoints.restore_own, event):
            await self._setup.run_node(node)
        elif event == JOINED:
            self.tracker.node_lost(node.id, NOT_JOINED)
            raise Crash

    def _node_ended(self, node: Node, crashed: bool) -> None:
        self.last_end = self.world.kernel.now
        if crashed:
            self.world.apply_event(FaultEvent(self.world.kernel.now, "crash", (node.id,)))
            joined = node.id not in self.tracker.not_joined
            if joined:
                self.tracker.node_lost(node.id, "crashed on schedule")
            failure = "crashed" if joined else NOT_JOINED
            self.tracker.listener.notice(self._experiment.describe_failure(node.id, failure))
        else:
            self.tracker.expect_no_more_models([node.id])
        self.recorder.write_complete_averages()
        if not crashed:
            self.recorder.write_end(node, self.world.runtimes[node.id].mailbox)
        else:
            self._checkpoints.nodes_changed()
        self.learning.discard(node.id)
        if not self.learning:
            self.finish_services()


async def park_forever() -> None:
    """The algorithm of a node that hung before its run was resumed."""
    await park()
