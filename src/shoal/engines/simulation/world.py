"""The simulated world that nodes share, and the runtime of each node in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from shoal.engines.rejoining import REJOIN_KINDS
from shoal.engines.simulation.compute import Executor, SequentialExecutor
from shoal.engines.simulation.kernel import Kernel, Task, Timer, park
from shoal.environment.network.model import Delivery, EnvironmentEvent, NetworkModel
from shoal.errors import DeadlockError
from shoal.mailbox import Filter, Mailbox
from shoal.message import Message
from shoal.node_activity import NodeActivity
from shoal.results.spans import OFFLINE, SEND, TRAIN, WAIT
from shoal.runtime import Work
from shoal.types import NodeId

R = TypeVar("R")
_NOTHING: Any = object()


class World:
    """What simulated nodes share: the clock, the network, and the work that waits to be computed.

    With `has_timed_events`, nodes go online and offline, and slow down, during the run.
    """

    def __init__(
        self,
        nodes: int,
        network_model: NetworkModel | None = None,
        executor: Executor | None = None,
        training_node_count: int | None = None,
        has_timed_events: bool = False,
        after_computing: Callable[[], object] = lambda: None,
    ) -> None:
        """`after_computing` is called after each batch of work."""
        self.kernel = Kernel()
        self.training_node_count = nodes if training_node_count is None else training_node_count
        """The number of training nodes. Nodes with this id or a higher one are service nodes (a server or a peer
        sampler). If only these still wait at the end, it is not a deadlock."""
        self.network_model = network_model
        """None: messages arrive at once."""
        self.has_timed_events = has_timed_events
        self.executor: Executor = executor or SequentialExecutor()
        self._after_computing = after_computing
        self.runtimes = [SimulatedRuntime(self, i) for i in range(nodes)]
        self._pending: dict[_Slot, None] = {}
        self._advance_scheduled = False
        self._due = math.inf
        """When the network model is advanced next."""

    def submit(self, slot: _Slot) -> None:
        self._pending[slot] = None

    def forget(self, slot: _Slot) -> None:
        self._pending.pop(slot, None)

    def compute(self, slot: _Slot) -> None:
        """Compute the work of `slot`, in one batch with other submitted work that has no result yet.

        The batch has at most `executor.max_batch` items. Other work may be computed before its end in virtual time,
        because no event until then can change its result.
        """
        del self._pending[slot]
        chosen = [slot, *islice(self._pending, self.executor.max_batch - 1)]
        for other in chosen[1:]:
            del self._pending[other]
        for done, result in zip(chosen, self._run([s.work for s in chosen]), strict=True):
            done.result = result

    def compute_all(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Compute work at once, in batches, and return the results."""
        size = self.executor.max_batch
        return [result for i in range(0, len(works), size) for result in self._run(works[i : i + size])]

    def _run(self, works: Sequence[Work[Any]]) -> list[Any]:
        results = self.executor.run(works)
        self._after_computing()
        return results

    def post(self, network_model: NetworkModel, delivery: Delivery) -> None:
        """Hand a message to the network, which advances once for all messages of this time."""
        network_model.send(self.kernel.now, delivery)
        if not self._advance_scheduled:
            self._advance_scheduled = True
            self.kernel.soon(partial(self._advance, network_model))

    def apply_event(self, event: EnvironmentEvent) -> None:
        """Apply an event to the network."""
        if self.network_model is not None:
            self.network_model.apply_event(self.kernel.now, event)
            self._advance(self.network_model)

    def mark_failed(self, node: NodeId) -> None:
        """Deliver no more messages to `node`, and let no other node wait for it."""
        self.runtimes[node].failed = True
        for other in self.runtimes:
            if not other.failed:
                other.mailbox.mark_failed(node)

    @property
    def is_idle(self) -> bool:
        """Whether nothing can wake an online node, except scheduled environment events."""
        return self.kernel.only_daemons and (self.network_model is None or self.network_model.idle)

    def raise_if_deadlocked(self, offline: Collection[NodeId] = ()) -> None:
        """Raise `DeadlockError` if nodes still wait when no event is left. Nodes in `offline` stay offline."""
        waiting = [r for r in self.runtimes if not r.failed and not r.hung and r.running]
        reasons = [
            f"node {runtime.id} waits for {waiter.wanted}"
            + (f" (still missing: {waiter.missing})" if waiter.missing else "")
            for runtime in waiting
            if runtime.id not in offline
            for waiter in runtime.mailbox.waiting
            if waiter.kind not in REJOIN_KINDS
        ]
        reasons += [f"node {r.id} is offline, and does not come online again" for r in waiting if r.id in offline]
        if any(runtime.id < self.training_node_count for runtime in waiting):
            count = f"{len(waiting)} nodes wait" if len(waiting) > 1 else "1 node waits"
            raise DeadlockError(
                f"deadlock at {self.kernel.now:.3f} s: {count} and no message is in transit.\n  "
                + "\n  ".join(reasons)
                + "\n"
                "Either a peer never sends the message, or the message was lost, or the peer hangs; "
                "simulation.receive_timeout lets nodes continue without it."
            )

    def _advance(self, network_model: NetworkModel) -> None:
        """Advance the network model to the current time, and schedule its next advance."""
        self._advance_scheduled = False
        kernel = self.kernel
        for _, status, delivery in network_model.advance(kernel.now):
            message, sending, sender = delivery.content
            if status == "delivered":
                receiver = self.runtimes[delivery.receiver]
                outdated = sender.failed and message.kind in REJOIN_KINDS  # it failed after it asked to rejoin
                if receiver.running and not outdated:
                    receiver.mailbox.put(message)
            elif sending is not None and not sending.ended and (status == "sent" or not delivery.sent):
                kernel.soon(self.runtimes[delivery.sender].waking(sending))
        due = network_model.next_time()
        if due < self._due:
            self._due = due
            kernel.at(due, partial(self._advance_when_due, network_model))

    def _advance_when_due(self, network_model: NetworkModel) -> None:
        if self.kernel.now >= self._due:  # else the model has advanced since
            self._due = math.inf
            self._advance(network_model)


class _Slot:
    """A unit of work and, once computed, its result."""

    __slots__ = ("result", "work")

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.result: Any = _NOTHING


class _Computation:
    """A computation on a device that may go offline, or slow down, before it ends."""

    __slots__ = ("left", "since", "task", "timer")

    def __init__(self, task: Task, seconds: float) -> None:
        self.task = task
        self.left = seconds
        """Seconds that the device still takes at its usual speed."""
        self.since = 0.0
        self.timer: Timer | None = None


class SimulatedRuntime:
    """The runtime of one node in the simulated world."""

    def __init__(self, world: World, id: NodeId) -> None:
        self.id = id
        self.mailbox = Mailbox()
        self.activity = NodeActivity()
        self.failed = False
        self.hung = False
        self.running = False
        self.offline_reasons = 0
        """For how many reasons the node is offline. An offline node does nothing, and receives nothing."""
        self._offline_since = 0.0
        self._slowness = 1.0
        self._world = world
        self._kernel = world.kernel
        self._main: Task | None = None
        self._background: list[Task] = []
        self._computations: dict[_Computation, None] = {}
        self._deferred: dict[Task, None] = {}
        """Tasks that resume when the node is online again: each once, however often it was woken."""

    def now(self) -> float:
        return self._kernel.now

    async def sleep(self, seconds: float) -> None:
        kernel = self._kernel
        kernel.at(kernel.now + max(0.0, seconds), self.waking(kernel.task()))
        await park()

    async def compute(self, work: Work[R]) -> R:
        kernel, slot = self._kernel, _Slot(work)
        self._world.submit(slot)
        task, began = kernel.task(), kernel.now
        try:
            if self._world.has_timed_events:
                await self._spend(work.seconds)
            else:
                kernel.at(began + work.seconds, task.resume)
                await park()
        except BaseException:  # the task was ended, and its result is not needed
            self._world.forget(slot)
            raise
        finally:
            if kernel.now > began:
                (self.activity.add if task is self._main else self.activity.interrupt)(TRAIN, began, kernel.now)
        if slot.result is _NOTHING:
            self._world.compute(slot)
        result: R = slot.result
        return result

    async def send(self, to: NodeId, message: Message) -> bool:
        network_model = self._world.network_model
        if network_model is not None:
            self._world.post(network_model, Delivery(self.id, to, message.wire_size, (message, None, self)))
            return True
        receiver = self._world.runtimes[to]
        if receiver.running:
            receiver.mailbox.put(message)
        return True

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        network_model = self._world.network_model
        if network_model is None:
            return await self.send(to, message)
        task, began = self._kernel.task(), self._kernel.now
        delivery = Delivery(self.id, to, message.wire_size, (message, task, self))
        self._world.post(network_model, delivery)
        try:
            await park()
        finally:
            if task is self._main and self._kernel.now > began:
                self.activity.add(SEND, began, self._kernel.now)
        return delivery.sent

    def receive_available(self, kind: str) -> list[Message]:
        return self.mailbox.receive_available(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        kernel = self._kernel
        task, began = kernel.task(), kernel.now
        resume = self.waking(task)
        waiter = self.mailbox.start_receive(wanted, lambda: kernel.soon(resume))
        if waiter.done:
            return waiter.messages
        try:
            if timeout is not None and timeout != math.inf:
                timer = Timer(resume)
                kernel.at(began + timeout, timer.fire)
                await park()
                timer.action = None
            else:
                await park()
        finally:
            if task is self._main and kernel.now > began:
                self.activity.add(WAIT, began, kernel.now)
        if not waiter.done:
            self.mailbox.end_receive(waiter)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._spawn(task, self._background_ended))

    def failed_peers(self) -> Collection[NodeId]:
        return self.mailbox.failed

    def late_messages(self, node: NodeId) -> int:
        return self.mailbox.late_from[node]

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        self.mailbox.mark_rejoined(node, round)

    def start(
        self, main: Coroutine[Any, Any, None], on_end: Callable[[bool], None] | None = None, at: float | None = None
    ) -> None:
        """Run `main` as the node's algorithm, and call `on_end(crashed)` when it has ended.

        `at` is when it begins, by default now. Messages are delivered to the node before that, too.
        """

        def ended(task: Task | None, crashed: bool) -> None:
            self.running = False
            for other in self._background:
                other.cancel()
            self._background.clear()
            if crashed:
                self._world.mark_failed(self.id)
            if on_end is not None:
                on_end(crashed)

        self.running = True
        self._ended = ended
        self._main = self._spawn(main, ended, at)

    def take_over_from(self, before: SimulatedRuntime) -> None:
        """Replace the runtime of a failed node: its device and its availability stay the same."""
        self.offline_reasons = before.offline_reasons - before.hung
        self._offline_since = self._kernel.now
        self._slowness = before._slowness

    def finish(self) -> None:
        """End the node as if its algorithm had returned: there are no clients left, or the duration is over."""
        self._end(crashed=False)

    def crash(self) -> None:
        """End the node at once."""
        self._end(crashed=True)

    def hang(self) -> None:
        """Stop responding until the end of the run, background tasks included."""
        if self.hung or not self.running:
            return
        self.hung = True
        for task in self._background:
            task.cancel()
        self._background.clear()
        if self._world.has_timed_events:
            self.go_offline(self._kernel.now)

    def go_offline(self, time: float) -> None:
        """Suspend computations, and let everything that would wake the node wait."""
        if not self.offline_reasons:
            self._offline_since = time
        self.offline_reasons += 1
        for computation in self._computations:
            self._interrupt(computation)

    def come_online(self) -> None:
        self.offline_reasons -= 1
        if not self.offline_reasons:
            if self.running:
                self.activity.interrupt(OFFLINE, self._offline_since, self._kernel.now)
            for computation in self._computations:
                self._continue(computation)
            deferred, self._deferred = self._deferred, {}
            for task in deferred:
                self._kernel.soon(task.resume)

    def slow_down(self, factor: float) -> None:
        """Compute `factor` times slower than usual from now on."""
        for computation in self._computations:
            self._interrupt(computation)
        self._slowness = factor
        if not self.offline_reasons:
            for computation in self._computations:
                self._continue(computation)

    @property
    def suspended(self) -> bool:
        """Whether a computation or a task resumes when the node is online again."""
        return bool(self._computations or self._deferred)

    def runs(self, task: Task | None) -> bool:
        """Whether `task` belongs to this node."""
        return task is not None and (task is self._main or task in self._background)

    def stop(self) -> None:
        """End all tasks that still run."""
        for task in (self._main, *self._background):
            if task is not None:
                task.cancel()

    def waking(self, task: Task) -> Callable[[], None]:
        """Return an action that resumes `task`, once the node is online."""
        return partial(self._wake, task) if self._world.has_timed_events else task.resume

    def _spawn(
        self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None], at: float | None = None
    ) -> Task:
        task = Task(self._kernel, coroutine, on_end)
        if at is None:
            self._kernel.soon(self.waking(task))
        else:
            self._kernel.at(at, self.waking(task))
        return task

    def _wake(self, task: Task) -> None:
        if self.offline_reasons:
            self._deferred[task] = None
        else:
            task.resume()

    async def _spend(self, seconds: float) -> None:
        """Wait while the device computes for `seconds`."""
        computation = _Computation(self._kernel.task(), seconds)
        self._computations[computation] = None
        if not self.offline_reasons:
            self._continue(computation)
        try:
            await park()
        finally:
            self._interrupt(computation)
            self._computations.pop(computation, None)

    def _continue(self, computation: _Computation) -> None:
        computation.since = self._kernel.now
        computation.timer = Timer(partial(self._done, computation))
        self._kernel.at(computation.since + computation.left * self._slowness, computation.timer.fire)

    def _interrupt(self, computation: _Computation) -> None:
        if computation.timer is not None:
            computation.timer.action = None
            computation.timer = None
            computation.left = max(0.0, computation.left - (self._kernel.now - computation.since) / self._slowness)

    def _done(self, computation: _Computation) -> None:
        computation.timer = None
        self._computations.pop(computation, None)
        computation.task.resume()

    def _end(self, crashed: bool) -> None:
        if self.running and self._main is not None:
            if self.offline_reasons:
                self.activity.interrupt(OFFLINE, self._offline_since, self._kernel.now)
            self._main.cancel()
            self._computations.clear()
            self._deferred.clear()
            self._ended(self._main, crashed)

    def _background_ended(self, task: Task, crashed: bool) -> None:
        self._background.remove(task)
