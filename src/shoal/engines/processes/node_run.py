"""A node's part in a run, from the coordinator's start message to the record of the node's end."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.end_record import end_record
from shoal.engines.node_states import capture, restore, restore_own
from shoal.engines.operating_system import Memory, process_memory
from shoal.engines.processes import control
from shoal.engines.processes.capacity import KeptMemory
from shoal.engines.processes.checkpoints import ProcessSaver
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.deferred_evaluations import DeferredEvaluations, SnapshotTimer, in_training_slot
from shoal.engines.processes.node_network import NodeNetwork
from shoal.engines.processes.node_observer import NodeObserver
from shoal.engines.processes.runtime import ProcessRuntime, RunClock, RuntimeSettings
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.task_scope import TaskScope
from shoal.engines.rejoining import answer_rejoining_peers, rejoin
from shoal.engines.round_faults import RoundFaults
from shoal.errors import LaunchError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.results.checkpoints import Checkpoints
from shoal.results.record_writer import END_SECONDS, RETRY_SECONDS, FinalWrite, RecordWriter
from shoal.results.records import JOINED, NOT_JOINED, REJOINED, End, Evaluation, Event, Record, RunFolder
from shoal.results.state_files import read_state
from shoal.types import NodeId

STOP_EVALUATION_SECONDS = 7.0
"""How long a node that is stopped goes on to evaluate models that it kept, and waits for space on a full disk."""
RECORDED_TRANSPORT_REJECTIONS = 20
"""Rejected messages and connections that are recorded one by one; further ones are only counted."""


@dataclass(frozen=True)
class NodeLaunch:
    """What the zygote hands to a node's process."""

    setup: Setup
    id: NodeId
    slots: Slots
    start: control.StartNodes
    kept_memory: KeptMemory = KeptMemory()
    """What the node keeps of the memory of a training for the next one."""

    @property
    def experiment(self) -> Experiment:
        return self.setup.experiment

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.start.folder))

    def saved_state(self) -> dict[str, Any] | None:
        """The state that the node of a resumed run continues from; None if it begins, or if a fault restarted it."""
        path = self.start.states.get(self.id)
        return None if path is None or self.start.restarted else read_state(Path(path))

    def round_faults(self, saved: dict[str, Any] | None) -> RoundFaults:
        """The node's faults by round, without faults from before the `saved` state of a resumed run.

        A node that was restarted, also before the run was resumed, has none.
        """
        last = -1 if saved is None else int(saved["round"])
        faults = () if self.incarnation > 0 else self.experiment.faults(self.id)
        return RoundFaults(fault for fault in faults if not fault.happens_at(last))

    @property
    def incarnation(self) -> int:
        """How often the node was restarted."""
        return self.start.incarnations.get(self.id, 0)

    @property
    def joins(self) -> bool:
        """Whether the node joins a run in progress for the first time."""
        return self.start.restarted and self.incarnation == 0

    @property
    def is_service(self) -> bool:
        """Whether the node serves the others instead of training."""
        return self.id >= self.experiment.nodes


class RejectionLog:
    """Counts rejected messages or connections, and records the first of them."""

    def __init__(self, event: str, record: Callable[[Record], None], clock: RunClock) -> None:
        self.count = 0
        self._event = event
        self._record = record
        self._clock = clock

    def __call__(self, reason: str) -> None:
        self.count += 1
        if self.count <= RECORDED_TRANSPORT_REJECTIONS:
            self._record(Event(self._event, self._clock.now(), reason))


class NodeRun:
    """Owns what a node has while it takes part in a run: its runtime, its observer and its model."""

    def __init__(
        self,
        launch: NodeLaunch,
        message: control.Start,
        network: NodeNetwork,
        link: CoordinatorLink,
        records: RecordWriter,
        clock: RunClock,
        scope: TaskScope,
    ) -> None:
        """`scope` ends when the process does, and lasts longer than the node's algorithm."""
        experiment, plan = launch.experiment, launch.experiment.processes
        self._launch = launch
        self._message = message
        self._network = network
        self._link = link
        self._records = records
        self._scope = scope
        self.runtime = ProcessRuntime(
            launch.id, network.transport, network.mailbox, launch.slots, _settings(launch), network.shaper, clock
        )
        self.runtime.set_online(not message.offline)
        saved = launch.saved_state()
        self._deferred = self._create_deferred() if launch.setup.environment.timing_matters else None
        self.observer = NodeObserver(self.runtime, records, link, launch.round_faults(saved), self._deferred)
        self._node = launch.setup.node(
            launch.id,
            self.runtime,
            self.observer,
            launch.start.run,
            plan.receive_timeout,
            self._create_saver() if experiment.checkpoint.every else None,
            launch.incarnation,
        )
        if saved is not None:
            self._restore(saved)
        scope.start(self._send_heartbeats(plan.heartbeat_interval))
        self._snapshots: SnapshotTimer | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        seconds = experiment.evaluation.seconds
        if seconds is not None and not launch.is_service:
            last_tick = int(self.runtime.now() / seconds) if launch.start.restarted else launch.start.resumed_tick
            self._snapshots = SnapshotTimer(
                self._node, self.observer, self._deferred, self.runtime.now, seconds, last_tick
            )
            self._snapshot_task = scope.start(self._snapshots.run())
        self._stopping = self._evaluating = self._algorithm_ended = self._waits_for_space = False
        self._evaluate_until = math.inf
        """When to begin no more evaluations of kept models, on the monotonic clock."""
        self._exiting: asyncio.Task[None] | None = None
        """Saves the model, evaluates kept models and ends the process, after `stop`."""
        self._ended_at: float | None = None
        """When the algorithm ended."""
        self._cpu_seconds = 0.0
        self._memory: Memory | None = None

    def _create_deferred(self) -> DeferredEvaluations:
        """Keep models in a file that outlives this process, if the run may be resumed."""
        launch = self._launch
        named = launch.experiment.checkpoint.every > 0 and not launch.is_service
        path = Checkpoints(launch.folder).kept_models(launch.id) if named else None
        return DeferredEvaluations(launch.folder, path)

    def _create_saver(self) -> ProcessSaver:
        launch = self._launch
        return ProcessSaver(
            launch.id, launch.experiment, launch.folder, self._records, self._link, self._capture, self._position
        )

    def _capture(self, round: int) -> dict[str, Any]:
        kept = [] if self._deferred is None else self._deferred.state()
        return capture(self._node, self._network.mailbox, round, kept=kept)

    def _position(self) -> tuple[float, int]:
        """The time, and the last evaluation by the clock that this node has taken."""
        return self.runtime.now(), 0 if self._snapshots is None else self._snapshots.last_tick

    def _restore(self, saved: dict[str, Any]) -> None:
        restore(self._node, self._network.mailbox, saved)
        if self._deferred is not None:
            self._deferred.restore(saved["kept"], self._node.params.nbytes)
            if self._launch.experiment.evaluation.seconds is not None:
                self._deferred.discard_after(self._launch.start.resumed_tick)

    def save_checkpoint(self, round: int) -> None:
        """Save the state of this client, because its server has finished `round`."""
        if self._ended_at is None:
            self._node.checkpoints.request(round)

    async def run(self) -> None:
        """Run the algorithm, wait until all nodes are done, and evaluate the models that were kept."""
        began = time.process_time()
        try:
            async with self.runtime:
                algorithm = self._algorithm()
                self._link.resume()
                await self._until_end(algorithm)
        finally:
            self._algorithm_ended = True
        self._cpu_seconds = time.process_time() - began
        self._ended_at = self.runtime.now()
        await self._report_end()
        finish = await self._link.finished
        if self._exiting is not None:
            await self._exiting  # `stop` came first: this task ends the process
        self._take_last_snapshot(finish)
        if self._deferred is not None:
            await self._evaluate_kept(self._deferred)
            self._deferred.remove_file()

    def stop(self, finish: control.Finish) -> None:
        """End early: save the model, evaluate as many kept models as there is time for, and exit."""
        if self._stopping:
            return
        self._stopping = True
        self._evaluate_until = time.monotonic() + STOP_EVALUATION_SECONDS
        if self._deferred is not None:
            self._deferred.latest_first = True
        ends = self._ended_at is not None or (self._launch.is_service and not self.runtime.hung)
        if ends and self._link.finished.done():
            return  # `run` saves the model and evaluates the kept models
        if self._deferred is not None:
            self._take_last_snapshot(finish)
        self._exiting = self._scope.start(self._save_and_exit())

    def end_record(self, rejected: int, unauthenticated: int) -> End:
        """`rejected` messages and `unauthenticated` connections were counted by the sockets."""
        memory = self._memory
        assert self._ended_at is not None
        end = end_record(self._node, self._network.mailbox, self._ended_at)
        return msgspec.structs.replace(
            end,
            bad_messages=end.bad_messages + rejected,
            late_messages=self._network.late_messages,
            unsent_messages=self._network.transport.unsent,
            unauthenticated_connections=unauthenticated,
            total_cpu_s=self._cpu_seconds,
            uss_mib=None if memory is None else memory.uss,
            pss_mib=None if memory is None else memory.pss,
            padded_s=self.runtime.padded or None,
        )

    def _algorithm(self) -> Coroutine[Any, Any, None]:
        setup, node = self._launch.setup, self._node
        if self._launch.start.restarted:
            others = set(range(self._launch.experiment.nodes)) - {node.id}
            for other in others:
                self._network.mailbox.mark_failed(other)  # until it answers
            return self._rejoin(others.difference(self._message.failed_nodes))
        if setup.environment.restarts:
            self.runtime.background(answer_rejoining_peers(node))
        return setup.run_node(node)

    async def _rejoin(self, others: Collection[NodeId]) -> None:
        await self._node.sleep(0.0)  # until the node is online
        files = Checkpoints(self._launch.folder)
        event = JOINED if self._launch.joins else REJOINED
        if await rejoin(self._node, others, partial(restore_own, files), event):
            await self._launch.setup.run_node(self._node)
        elif self._launch.joins:
            raise LaunchError(NOT_JOINED)

    async def _until_end(self, algorithm: Coroutine[Any, Any, None]) -> None:
        """Run the algorithm until it returns, or until the run's duration is over.

        A server's algorithm ends when all other nodes are done. A node that hangs does not end at all.
        """
        duration, serves = self._launch.experiment.duration, self._launch.is_service
        if not serves and duration is None:
            await algorithm
            return
        running = asyncio.ensure_future(algorithm)
        ends: list[asyncio.Future[Any]] = [running, self._link.finished] if serves else [running]
        left = None if serves or duration is None else max(0.0, duration - self.runtime.now())
        try:
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if self.runtime.hung:
            await running
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
        elif not running.cancelled():
            running.result()

    async def _report_end(self) -> None:
        """Send the last progress report, save the model, and report that the algorithm has ended."""
        launch, node = self._launch, self._node
        self.observer.report()
        if self.runtime.overrun > 0:
            detail = f"by {self.runtime.overrun:.3f} s: this machine could not keep up with the device"
            node.record_event("slower than its device", detail)
        await self._save_model()
        self.runtime.release_memory_if_short()
        if not launch.is_service or not self._link.finished.done():
            self._link.send(control.NodeDone(launch.id))
        self._memory = process_memory()  # while all other nodes still run

    def _take_last_snapshot(self, finish: control.Finish) -> None:
        if self._snapshots is not None and self._snapshot_task is not None:
            self._snapshot_task.cancel()
            self._snapshots.take_last(finish)

    async def _save_model(self) -> None:
        """Write the final model, if the experiment keeps it."""
        launch = self._launch
        if launch.experiment.checkpoint.final:
            await self.write_finally(lambda: launch.folder.save_model(launch.id, self._node.params))

    async def write_finally(self, write: Callable[[], None]) -> None:
        """Write something at the end of the run. If the disk is full, wait for space: see `FinalWrite`."""
        seconds = STOP_EVALUATION_SECONDS if self._stopping else END_SECONDS
        final = FinalWrite(write, self._report_full_disk, seconds)
        try:
            while final.attempt() is not None:
                self._waits_for_space = True
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._waits_for_space = False

    def _report_full_disk(self, text: str) -> None:
        self._link.send(control.DiskReport(self._launch.id, paused=True, text=text, final=True))

    async def _save_and_exit(self) -> None:
        try:
            await self._save_model()
            if self._deferred is not None:
                await self.runtime.stop_computing()
                await self._evaluate_kept(self._deferred)
            await self.write_finally(self._records.finish)
            self._link.close(control.NodeExiting(self._launch.id))
        except Exception:
            traceback.print_exc()  # to the run's nodes.log
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    async def _evaluate_kept(self, deferred: DeferredEvaluations) -> None:
        """Evaluate the kept models and record the evaluations, in the order in which the models were kept.

        After `stop`, evaluate the latest model first, and then earlier ones while there is time.
        """
        self._evaluating = True
        evaluations = deferred.evaluate(self._node)
        after_stop: list[Evaluation] = []
        async for evaluation in in_training_slot(evaluations, self._node, self._launch.slots, self._link):
            if self._stopping:
                after_stop.append(evaluation)
            else:
                self.observer.record(evaluation)
            if time.monotonic() > self._evaluate_until and deferred.latest_evaluated:
                break
        for evaluation in sorted(after_stop, key=lambda evaluation: evaluation.time):
            self.observer.record(evaluation)

    async def _send_heartbeats(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self._link.send(control.Heartbeat(self._launch.id, self._busy))
            self._records.flush_if_due()

    @property
    def _busy(self) -> bool:
        """Whether the node computes, or waits for something that ends by itself. After `stop` it has a time limit."""
        if self._stopping:
            return False
        return self._evaluating or self._waits_for_space or (not self._algorithm_ended and self.runtime.busy)


def _settings(launch: NodeLaunch) -> RuntimeSettings:
    return RuntimeSettings(
        trainings_per_slot=launch.experiment.nodes / launch.slots.count,
        min_peer_timeout=launch.experiment.processes.hang_timeout,
        is_service=launch.is_service,
        kept_memory=launch.kept_memory,
        speed=launch.setup.speeds[launch.id],
    )
