"""The simulation: all nodes of an experiment in one process, under a virtual clock."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import time
import traceback
from collections.abc import Collection, Coroutine
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from shoal.averages import Averages
from shoal.commons import Commons
from shoal.errors import DeadlockError, NodeError, ShoalError
from shoal.experiment import Experiment, Fault
from shoal.message import RUN_LENGTH, Message, Params
from shoal.network.links import Delays
from shoal.node import Node
from shoal.operating_system import processor_seconds
from shoal.progress import SHOW_EVERY, Listener, MeanScore, Nobody, Outcome, Progress, Status, leading_score
from shoal.records import Average, End, Evaluation, Event, Lines, ManyLines, Record, RunFolder
from shoal.runtime import Filter, Mailbox, Work
from shoal.simulation.compute import Computer, OneByOne, Pool, Stacked
from shoal.simulation.kernel import Crash, Kernel, Task, Timer, park
from shoal.simulation.measure import pick
from shoal.topologies.graph import NodeId

R = TypeVar("R")
_NOTHING: Any = object()


class World:
    """What simulated nodes share: the clock, the network, each other, and the work that waits to be computed."""

    def __init__(
        self,
        nodes: int,
        delays: Delays | None = None,
        computer: Computer | None = None,
        learners: int | None = None,
    ) -> None:
        self.kernel = Kernel()
        self.learners = nodes if learners is None else learners
        """Nodes from this one on serve the others; they may wait for ever."""
        self.delays = delays
        self.computer: Computer = computer or OneByOne()
        self.runtimes = [SimulatedRuntime(self, i) for i in range(nodes)]
        self._pending: dict[_Slot, None] = {}

    def submit(self, slot: _Slot) -> None:
        self._pending[slot] = None

    def forget(self, slot: _Slot) -> None:
        self._pending.pop(slot, None)

    def compute(self, slot: _Slot) -> None:
        """The work of `slot`, with as much of what has begun as is computed at once.

        Whatever has begun may be computed now: nothing that happens before its end can change it.
        """
        del self._pending[slot]
        chosen = [slot, *islice(self._pending, self.computer.at_once - 1)]
        for other in chosen[1:]:
            del self._pending[other]
        for done, result in zip(chosen, self.computer.run([s.work for s in chosen]), strict=True):
            done.result = result

    def lose(self, node: NodeId) -> None:
        """`node` has died: it gets no more messages, and nobody waits for it."""
        self.runtimes[node].dead = True
        for other in self.runtimes:
            if not other.dead:
                other.mailbox.lose(node)

    def raise_if_stuck(self) -> None:
        """Called when no event is left: every task that still waits, waits for ever."""
        waiting = [r for r in self.runtimes if not r.dead and not r.hung and r.running and r.mailbox.waiting]
        stuck = [
            f"node {runtime.id} waits for {waiter.wanted}"
            + (f" (still missing: {waiter.missing})" if waiter.missing else "")
            for runtime in waiting
            for waiter in runtime.mailbox.waiting
        ]
        if any(runtime.id < self.learners for runtime in waiting):
            raise DeadlockError(
                f"deadlock at {self.kernel.now:.3f} s: {len(stuck)} node{'s' if len(stuck) > 1 else ''} "
                "wait and nothing is on its way.\n  " + "\n  ".join(stuck) + "\n"
                "Either a peer never sends what is waited for, or it hangs; "
                "simulation.receive_timeout lets nodes go on without it."
            )


class _Slot:
    """A work and, once computed, its result."""

    __slots__ = ("result", "work")

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.result: Any = _NOTHING


class SimulatedRuntime:
    """A node's hold on the simulated world."""

    def __init__(self, world: World, id: NodeId) -> None:
        self.id = id
        self.mailbox = Mailbox()
        self.dead = False
        self.hung = False
        self.running = False
        self._world = world
        self._kernel = world.kernel
        self._main: Task | None = None
        self._background: list[Task] = []

    def now(self) -> float:
        return self._kernel.now

    async def sleep(self, seconds: float) -> None:
        kernel = self._kernel
        kernel.at(kernel.now + max(0.0, seconds), kernel.task().resume)
        await park()

    async def compute(self, work: Work[R]) -> R:
        kernel, slot = self._kernel, _Slot(work)
        self._world.submit(slot)
        kernel.at(kernel.now + work.seconds, kernel.task().resume)
        try:
            await park()
        except BaseException:  # the task is ended: nobody wants the result
            self._world.forget(slot)
            raise
        if slot.result is _NOTHING:
            self._world.compute(slot)
        result: R = slot.result
        return result

    async def send(self, to: NodeId, message: Message) -> bool:
        receiver = self._world.runtimes[to]
        delays = self._world.delays
        if delays is None:
            if not receiver.dead:
                receiver.mailbox.put(message)
            return True
        arrival = delays.arrival(self._kernel.now, self.id, to, message.wire_size)
        self._kernel.at(arrival, partial(_deliver, receiver, message))
        return True

    async def transmit(self, to: NodeId, message: Message) -> bool:
        delays = self._world.delays
        if delays is None:
            return await self.send(to, message)
        arrival = delays.arrival(self._kernel.now, self.id, to, message.wire_size)
        self._kernel.at(arrival, partial(_deliver, self._world.runtimes[to], message))
        await self.sleep(arrival - self._kernel.now)
        return True

    def collect(self, kind: str) -> list[Message]:
        return self.mailbox.collect(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        kernel = self._kernel
        resume = kernel.task().resume
        waiter = self.mailbox.ask(wanted, lambda: kernel.soon(resume))
        if waiter.done:
            return waiter.messages
        if timeout is not None and timeout != math.inf:
            timer = Timer(resume)
            kernel.at(kernel.now + timeout, timer.fire)
            await park()
            timer.action = None
        else:
            await park()
        if not waiter.done:
            self.mailbox.withdraw(waiter)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._kernel.spawn(task, self._background_ended))

    def gone(self) -> Collection[NodeId]:
        return self.mailbox.gone

    def start(self, main: Coroutine[Any, Any, None], on_end: Any = None) -> None:
        """Run `main` as the node's algorithm; `on_end(crashed)` is called when it has ended."""

        def ended(task: Task | None, crashed: bool) -> None:
            self.running = False
            for other in self._background:
                other.cancel()
            self._background.clear()
            if crashed:
                self._world.lose(self.id)
            if on_end is not None:
                on_end(crashed)

        self.running = True
        self._ended = ended
        self._main = self._kernel.spawn(main, ended)

    def finish(self) -> None:
        """End a node that serves, as if it had returned: nobody is left to be served."""
        if self.running and self._main is not None:
            self._main.cancel()
            self._ended(self._main, False)

    def hang(self) -> None:
        """Fall silent for good: what runs beside the algorithm says no more either."""
        self.hung = True
        for task in self._background:
            task.cancel()
        self._background.clear()

    def runs(self, task: Task | None) -> bool:
        """Whether `task` is one of this node's."""
        return task is not None and (task is self._main or task in self._background)

    def stop(self) -> None:
        """End what still runs."""
        for task in (self._main, *self._background):
            if task is not None:
                task.cancel()

    def _background_ended(self, task: Task, crashed: bool) -> None:
        self._background.remove(task)


def _deliver(receiver: SimulatedRuntime, message: Message) -> None:
    if not receiver.dead:
        receiver.mailbox.put(message)


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
            simulation.score.add(record.round, leading_score(record.scores))

    def model(self, round: int, params: Params) -> None:
        self._simulation.averages.add(self._id, round, params)
        self._simulation.average_if_complete()

    async def before_round(self, round: int) -> None:
        if self._id in self._simulation.experiment.paced_by:
            self._simulation.rounds_begun += 1
        if self._simulation.rounds_begun % 64 == 0:
            self._simulation.show()
        if self._faults and self._faults[0].round <= round:
            fault = self._faults.pop(0)
            self.record(Event("fault", self._simulation.world.kernel.now, f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                raise Crash
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            self._simulation.world.runtimes[self._id].hang()
            await park()  # nobody resumes it


class Simulation:
    """One run of an experiment."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        listener: Listener | None = None,
        commanded: float | None = None,
    ) -> None:
        self._commanded = time.time() if commanded is None else commanded
        self.experiment = experiment
        self.folder = folder
        self.listener: Listener = listener or Nobody()
        self.lines = ManyLines(folder, experiment.size)
        self.averages = Averages()
        self.score = MeanScore()
        self.rounds_begun = 0
        self.lost: dict[NodeId, str] = {}
        self._averages_file = Lines(folder.averages)
        self._alive = set(range(experiment.size))
        self._learning = set(range(experiment.nodes))
        self._awaited = set(range(experiment.nodes))
        """Nodes whose models are still to come."""
        self._last_end = 0.0  # the kernel's clock goes on to the last timeout, needed or not
        self._shown = 0.0
        self._started = time.monotonic()
        self.listener.progress(self._progress("loading"))
        self.commons = Commons(experiment)
        delays = experiment.network.build().build(experiment.size)
        self.world = World(experiment.size, delays, learners=experiment.nodes)
        self.nodes = [self._node(i) for i in range(experiment.size)]
        self.batching = pick(experiment, self.commons)

    def run(self) -> Outcome:
        """To the end, or to the error that ends it; what was recorded is on disk either way."""
        experiment = self.experiment
        cpu = processor_seconds()
        self.world.computer = self._computer(self.batching)
        startup = time.time() - self._commanded
        self._started = time.monotonic()
        thresholds = gc.get_threshold()
        status: Status = "failed"
        number: int | None = None
        try:
            for node in self.nodes:
                self.world.runtimes[node.id].start(self.commons.live(node), partial(self._ended, node))
            # Nodes live as long as the run, and their messages are no garbage either: do not look through them often.
            gc.freeze()
            gc.set_threshold(100_000, *thresholds[1:])
            self.world.kernel.run()
            self.world.raise_if_stuck()
            ended = self._last_end
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
            scores = self.commons.evaluate(averaged.mean)
            self._averages_file.write(
                Average(averaged.round, self.world.kernel.now, averaged.nodes, averaged.consensus_distance, scores)
            )

    def show(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._shown >= SHOW_EVERY:
            self._shown = now
            self.lines.flush_if_due()
            self.listener.progress(self._progress("running"))

    def _progress(self, phase: str) -> Progress:
        nodes = getattr(self, "nodes", [])
        pace = self.experiment.paced_by
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
        )

    def _node(self, id: NodeId) -> Node:
        return self.commons.node(
            id,
            self.world.runtimes[id],
            _Watcher(self, id, self.experiment.faults(id)),
            "0" * RUN_LENGTH,
            self.experiment.simulation.receive_timeout,
        )

    def _computer(self, batching: str) -> Computer:
        if batching == "vmap":
            return Stacked()
        if batching == "pool":
            workers = min(self.experiment.simulation.workers or os.cpu_count() or 1, self.experiment.nodes)
            return Pool([node.trainer for node in self.nodes], workers, self.commons.initial.size)  # type: ignore[misc]
        return OneByOne()

    def _ended(self, node: Node, crashed: bool) -> None:
        self._last_end = self.world.kernel.now
        self._awaited.discard(node.id)
        if crashed:
            self._alive.discard(node.id)
            self.lost[node.id] = "crashed on schedule"
            self.listener.notice(self.experiment.farewell(node.id, "crashed"))
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
            train_cpu_s=node.trainer.cpu_seconds,
        )
        self.lines.write(node.id, end)
        if self.experiment.checkpoint.final:
            self.folder.save_model(node.id, node.params)
