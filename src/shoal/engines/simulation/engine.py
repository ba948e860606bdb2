"""The simulation: all nodes of an experiment in one process, under a virtual clock."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import time
import traceback
from collections.abc import Iterator
from functools import partial

from shoal.engines.averaging import ModelAverage, ModelAverages
from shoal.engines.operating_system import processor_seconds
from shoal.engines.rejoining import answer_rejoining_peers, rejoin
from shoal.engines.simulation.batching import choose_batching
from shoal.engines.simulation.compute import Computer, SequentialComputer, StackedComputer, WorkerPool
from shoal.engines.simulation.kernel import Crash, park
from shoal.engines.simulation.world import SimulatedRuntime, World
from shoal.environment.faults import Fault, FaultEvent
from shoal.environment.network.model import EnvironmentEvent
from shoal.environment.network.network import AvailabilityChange
from shoal.errors import NodeError, ShoalError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import RUN_LENGTH
from shoal.node import Node
from shoal.results.progress import (
    PROGRESS_INTERVAL,
    MeanScore,
    NullProgressListener,
    Outcome,
    Progress,
    ProgressListener,
    Status,
    main_score,
)
from shoal.results.records import Average, BufferedRecordFiles, End, Evaluation, Event, Record, RecordFile, RunFolder
from shoal.training.trainer import Evaluate
from shoal.types import NodeId, Params

__all__ = ["Simulation", "World"]


class _Watcher:
    """The observer of one simulated node."""

    def __init__(self, simulation: Simulation, id: NodeId, faults: list[Fault]) -> None:
        self._simulation = simulation
        self._id = id
        self._faults = faults

    def record(self, record: Record) -> None:
        simulation = self._simulation
        simulation.lines.write(self._id, record)
        if isinstance(record, Evaluation):
            simulation.score.add(record.tick or record.round, main_score(record.scores))

    def model(self, round: int, params: Params) -> None:
        self._simulation.averages.add(self._id, round, params)
        self._simulation.average_if_complete()

    async def before_round(self, round: int) -> None:
        if self._id in self._simulation.experiment.round_nodes:
            self._simulation.rounds_begun += 1
        if self._simulation.rounds_begun % 64 == 0:
            self._simulation.show()
        if self._faults and self._faults[0].strikes_at(round):
            fault = self._faults.pop(0)
            self.record(Event("fault", self._simulation.world.kernel.now, f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                raise Crash
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            self._simulation.world.runtimes[self._id].hang()
            await park()  # nobody resumes it

    def defer_evaluation(self, round: int, params: Params) -> bool:
        return False  # the virtual clock stands still meanwhile


class Simulation:
    """One run of an experiment."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        listener: ProgressListener | None = None,
        command_time: float | None = None,
    ) -> None:
        self._command_time = time.time() if command_time is None else command_time
        self.experiment = experiment
        self.folder = folder
        self.listener: ProgressListener = listener or NullProgressListener()
        self.lines = BufferedRecordFiles(folder, experiment.size)
        self.averages = ModelAverages()
        self.score = MeanScore()
        self.rounds_begun = 0
        self.lost: dict[NodeId, str] = {}
        self._averages_file = RecordFile(folder.averages)
        self._alive = set(range(experiment.size))
        self._learning = set(range(experiment.nodes))
        self._awaited = set(range(experiment.nodes))
        """Nodes whose models are still to come."""
        self._last_end = 0.0  # the kernel's clock goes on to the last timeout, needed or not
        self._shown = 0.0
        self._started = time.monotonic()
        self.listener.progress(self._progress("loading"))
        self.setup = Setup(experiment)
        self._environment = self.setup.environment
        self._events: Iterator[EnvironmentEvent] = (
            self._environment.events() if self._environment.has_timed_events else iter(())
        )
        self._remedies = self._environment.unblocking_times()
        self._next_remedy = next(self._remedies, math.inf)
        self.world = World(
            experiment.size,
            self._environment.network_model(),
            learners=experiment.nodes,
            has_timed_events=self._environment.has_timed_events,
        )
        self._ticks = 0
        self.nodes = [self._node(i) for i in range(experiment.size)]
        self.batching = choose_batching(experiment, self.setup)

    def run(self) -> Outcome:
        """To the end, or to the error that ends it; what was recorded is on disk either way."""
        experiment = self.experiment
        cpu = processor_seconds()
        self.world.computer = self._computer(self.batching)
        startup = time.time() - self._command_time
        self._started = time.monotonic()
        thresholds = gc.get_threshold()
        status: Status = "failed"
        number: int | None = None
        try:
            for node in self.nodes:
                self._start(node)
            self._await_event()
            self._await_tick()
            if experiment.duration is not None:
                self.world.kernel.schedule_daemon(experiment.duration, self._time_is_up)
            # Nodes live as long as the run, and their messages are no garbage either: do not look through them often.
            gc.freeze()
            gc.set_threshold(100_000, *thresholds[1:])
            self.world.kernel.run()
            self.world.raise_if_deadlocked(self._offline_for_good())
            ended = self._last_end
            if experiment.evaluation.seconds is not None:
                self._look_at_all(ended)
            self._finish_services()
            self._last_end = ended
            hung = {r.id: "hung: it waits for nothing that could come" for r in self.world.runtimes if r.running}
            self.lost.update(hung)
            self._awaited -= hung.keys()
            self.average_if_complete()
            status = "incomplete" if self.lost else "completed"
        except KeyboardInterrupt as stop:
            status = "interrupted"
            number = stop.args[0] if stop.args else signal.SIGINT
        except ShoalError:
            raise
        except Exception as error:
            who = next((r.id for r in self.world.runtimes if r.runs(self.world.kernel.current)), None)
            raise NodeError(f"node {who} raised:\n{traceback.format_exc()}") from error
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            self.lines.flush()
            self._averages_file.close()
            self.world.computer.close()
            for runtime in self.world.runtimes:
                runtime.stop()
            wall = time.monotonic() - self._started
        if experiment.nodes <= len([node for node in self.lost if node < experiment.nodes]):
            status = "failed"
        self.show(force=True)
        return Outcome(
            status,
            wall_s=wall,
            startup_s=startup,
            virtual_s=self.world.kernel.now if status == "interrupted" else self._last_end,
            lost=dict(sorted(self.lost.items())),
            facts={
                "batching": self.batching,
                "signal": number,
                "train_cpu_s": sum(n.trainer.cpu_seconds for n in self.nodes),
                "total_cpu_s": processor_seconds() - cpu,
            },
        )

    def average_if_complete(self) -> None:
        for averaged in self.averages.complete(self._awaited):
            self._write_average(averaged, self.world.kernel.now)

    def _write_average(self, averaged: ModelAverage, time: float, tick: int | None = None) -> None:
        scores = self.setup.evaluate(averaged.mean)
        self._averages_file.write(
            Average(averaged.round, time, averaged.nodes, averaged.consensus_distance, scores, tick)
        )

    def show(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._shown >= PROGRESS_INTERVAL:
            self._shown = now
            self.lines.flush_if_due()
            self.listener.progress(self._progress("running"))

    def _progress(self, phase: str) -> Progress:
        nodes = getattr(self, "nodes", [])
        pace = self.experiment.round_nodes
        under_way = len(pace) if len(self._alive) == self.experiment.size else len(self._alive.intersection(pace))
        return Progress(
            phase,
            nodes=self.experiment.size,
            alive=len(self._alive),
            seconds=time.monotonic() - self._started,
            round=max(0, self.rounds_begun - under_way) / len(pace),
            rounds=self.experiment.algorithm.options.get("rounds"),
            score=self.score.mean,
            bytes_sent=sum(node.bytes_sent for node in nodes),
            virtual_seconds=self.world.kernel.now if nodes else None,
            duration=self.experiment.duration,
        )

    def _node(self, id: NodeId) -> Node:
        return self.setup.node(
            id,
            self.world.runtimes[id],
            _Watcher(self, id, self.experiment.faults(id)),
            "0" * RUN_LENGTH,
            self.experiment.simulation.receive_timeout,
        )

    def _computer(self, batching: str) -> Computer:
        if batching == "vmap":
            return StackedComputer()
        if batching == "pool":
            workers = min(self.experiment.simulation.workers or os.cpu_count() or 1, self.experiment.nodes)
            return WorkerPool([node.trainer for node in self.nodes], workers, self.setup.initial.size)
        return SequentialComputer()

    def _start(self, node: Node, again: bool = False) -> None:
        """Let a node live, for the first time or after a crash."""
        runtime = self.world.runtimes[node.id]
        runtime.start(self._relive(node) if again else self.setup.run_node(node), partial(self._ended, node))
        if self._environment.restarts and not again:
            runtime.background(answer_rejoining_peers(node))

    async def _relive(self, node: Node) -> None:
        learners = self.world.runtimes[: self.experiment.nodes]
        if await rejoin(node, [r.id for r in learners if r.running and r.id != node.id]):
            await self.setup.run_node(node)

    # What happens by the clock

    def _await_event(self) -> None:
        event = next(self._events, None)
        if event is not None:
            self.world.kernel.schedule_daemon(event.time, partial(self._apply_event, event))

    def _apply_event(self, event: EnvironmentEvent) -> None:
        if not self._learning or self._is_over():
            return
        if isinstance(event, AvailabilityChange):
            self._attend(event)
        elif isinstance(event, FaultEvent):
            self._strike(event)
        else:
            self.world.apply_event(event)
        self._await_event()

    def _is_over(self) -> bool:
        """Whether nobody can go on any more, whatever the clock brings: the kernel ends, and who is stuck is said."""
        now, duration = self.world.kernel.now, self.experiment.duration
        if (duration is not None and now < duration) or not self.world.is_idle:
            return False
        while self._next_remedy < now:
            self._next_remedy = next(self._remedies, math.inf)
        suspended = [r.id for r in self.world.runtimes if r.suspended and not r.hung]
        return self._next_remedy == math.inf and not any(
            self._environment.will_be_online(node, now) for node in suspended
        )

    def _offline_for_good(self) -> list[NodeId]:
        now = self.world.kernel.now
        offline = [runtime.id for runtime in self.world.runtimes if runtime.offline_reasons]
        return [id for id in offline if not self._environment.will_be_online(id, now)]

    def _attend(self, presence: AvailabilityChange) -> None:
        runtime = self.world.runtimes[presence.node]
        self.world.apply_event(presence)
        if presence.online:
            runtime.come_online()
        else:
            runtime.go_offline()

    def _strike(self, fault_event: FaultEvent) -> None:
        kernel, world = self.world.kernel, self.world
        for node in fault_event.nodes if fault_event.kind in ("crash", "restart", "hang", "raise", "slow") else ():
            if world.runtimes[node].running or fault_event.kind == "restart":
                self.lines.write(node, Event("fault", kernel.now, str(fault_event)))
        if fault_event.kind == "restart":
            for node in fault_event.nodes:
                self._restart(node)
        elif fault_event.kind == "crash":
            for node in fault_event.nodes:
                world.runtimes[node].crash()
        elif fault_event.kind == "hang":
            for node in fault_event.nodes:
                world.runtimes[node].hang()
        elif fault_event.kind == "raise":
            raise NodeError(f"fault on schedule: {fault_event} at {kernel.now:g} s")
        else:
            self.listener.notice(f"at {kernel.now:g} s: {fault_event}")
            world.apply_event(fault_event)
            if fault_event.kind == "slow" and fault_event.what != "network":
                for node in fault_event.nodes:
                    world.runtimes[node].slow_down(fault_event.value)

    def _restart(self, id: NodeId) -> None:
        """A node that crashed begins again, with nothing but its data."""
        if id not in self.lost or not self.world.runtimes[id].failed:
            return
        self.world.apply_event(FaultEvent(self.world.kernel.now, "restart", (id,)))
        runtime = SimulatedRuntime(self.world, id)
        runtime.take_over_from(self.world.runtimes[id])
        self.world.runtimes[id] = runtime
        for other in self.world.runtimes:
            if other.id != id and (other.id < self.experiment.nodes or other.failed):
                runtime.mailbox.mark_failed(other.id)  # those that learn, until they have answered
        self.nodes[id] = self._node(id)
        del self.lost[id]
        self._alive.add(id)
        self._awaited.add(id)
        self._learning.add(id)
        self.listener.notice(f"node {id} was started again")
        self._start(self.nodes[id], again=True)

    def _time_is_up(self) -> None:
        for runtime in self.world.runtimes[: self.experiment.nodes]:
            if not runtime.hung:
                runtime.finish()

    def _await_tick(self) -> None:
        seconds = self.experiment.evaluation.seconds
        if seconds is not None:
            self.world.kernel.schedule_daemon((self._ticks + 1) * seconds, self._tick)

    def _tick(self) -> None:
        if self._learning and not self._is_over():
            self._look_at_all(self.world.kernel.now)
            self._await_tick()

    def _look_at_all(self, time: float) -> None:
        """Test every node's model as it is now, and their average."""
        self._ticks += 1
        there = [node for node in self.nodes[: self.experiment.nodes] if node.id in self._alive]
        tested = [node for node in there if node.context.schedule.evaluated]
        works = [Evaluate(node.trainer, node.params) for node in tested]
        at_once = self.world.computer.at_once
        scores = [s for i in range(0, len(works), at_once) for s in self.world.computer.run(works[i : i + at_once])]
        for node, found in zip(tested, scores, strict=True):
            record = Evaluation(max(0, node.next_round - 1), time, found, self._ticks)
            self.lines.write(node.id, record)
            self.score.add(self._ticks, main_score(found))
        if self.experiment.evaluation.average and "algorithm" not in self.experiment.services:
            averages = ModelAverages()
            for node in there:
                averages.add(node.id, self._ticks, node.params)
            for averaged in averages.complete(set()):
                self._write_average(averaged, time, self._ticks)

    def _ended(self, node: Node, crashed: bool) -> None:
        self._last_end = self.world.kernel.now
        self._awaited.discard(node.id)
        if crashed:
            self.world.apply_event(FaultEvent(self.world.kernel.now, "crash", (node.id,)))
            self._alive.discard(node.id)
            self.lost[node.id] = "crashed on schedule"
            self.listener.notice(self.experiment.describe_failure(node.id, "crashed"))
        self.average_if_complete()
        if not crashed:
            self._keep(node)
        self._learning.discard(node.id)
        if not self._learning:
            self._finish_services()

    def _finish_services(self) -> None:
        """Nobody is left to be served: those that learn have ended, or hang. One that hangs itself does not finish."""
        for id in self.experiment.services.values():
            if not self.world.runtimes[id].hung:
                self.world.runtimes[id].finish()

    def _keep(self, node: Node) -> None:
        """Write down how a node ended, and what it learnt."""
        mailbox = self.world.runtimes[node.id].mailbox
        end = End(
            self.world.kernel.now,
            digest=hashlib.sha256(node.params.tobytes()).hexdigest(),
            bytes_sent=node.bytes_sent,
            messages_sent=node.messages_sent,
            bad_messages=node.rejected,
            late_messages=mailbox.late + mailbox.dropped,
            repeated_messages=mailbox.repeated,
            train_cpu_s=node.trainer.cpu_seconds,
        )
        self.lines.write(node.id, end)
        if self.experiment.checkpoint.final:
            self.folder.save_model(node.id, node.params)
