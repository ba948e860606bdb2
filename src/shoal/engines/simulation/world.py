"""The simulated world: what nodes share, and each node's hold on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from shoal.engines.rejoining import REJOIN_KINDS
from shoal.engines.simulation.compute import Computer, SequentialComputer
from shoal.engines.simulation.kernel import Kernel, Task, Timer, park
from shoal.environment.network.model import Delivery, EnvironmentEvent, NetworkModel
from shoal.errors import DeadlockError
from shoal.mailbox import Filter, Mailbox
from shoal.message import Message
from shoal.runtime import Work
from shoal.types import NodeId

R = TypeVar("R")
_NOTHING: Any = object()


class World:
    """What simulated nodes share: the clock, the network, each other, and the work that waits to be computed.

    In an `has_timed_events` world nodes come and go, and slow down, while others go on.
    """

    def __init__(
        self,
        nodes: int,
        network_model: NetworkModel | None = None,
        computer: Computer | None = None,
        learners: int | None = None,
        has_timed_events: bool = False,
    ) -> None:
        self.kernel = Kernel()
        self.learners = nodes if learners is None else learners
        """Nodes from this one on serve the others; they may wait for ever."""
        self.network_model = network_model
        """None: messages take no time, and nothing stands between nodes."""
        self.has_timed_events = has_timed_events
        self.computer: Computer = computer or SequentialComputer()
        self.runtimes = [SimulatedRuntime(self, i) for i in range(nodes)]
        self._pending: dict[_Slot, None] = {}
        self._looking = False
        self._due = math.inf
        """When the carrier is looked at next."""

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

    def post(self, network_model: NetworkModel, delivery: Delivery) -> None:
        """Hand a message to the network. What it does to all that were sent at this time is worked out once."""
        network_model.send(self.kernel.now, delivery)
        if not self._looking:
            self._looking = True
            self.kernel.soon(partial(self._look, network_model))

    def apply_event(self, event: EnvironmentEvent) -> None:
        """Something happens to the network."""
        if self.network_model is not None:
            self.network_model.apply_event(self.kernel.now, event)
            self._look(self.network_model)

    def mark_failed(self, node: NodeId) -> None:
        """`node` has died: it gets no more messages, and nobody waits for it."""
        self.runtimes[node].failed = True
        for other in self.runtimes:
            if not other.failed:
                other.mailbox.mark_failed(node)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that could wake anybody who is online, apart from what the agenda may hold."""
        return self.kernel.only_daemons and (self.network_model is None or self.network_model.idle)

    def raise_if_deadlocked(self, offline: Collection[NodeId] = ()) -> None:
        """Called when no event is left: every task that still waits, waits for ever. `offline`: who is so for good."""
        waiting = [r for r in self.runtimes if not r.failed and not r.hung and r.running]
        is_idle = [
            f"node {runtime.id} waits for {waiter.wanted}"
            + (f" (still missing: {waiter.missing})" if waiter.missing else "")
            for runtime in waiting
            if runtime.id not in offline
            for waiter in runtime.mailbox.waiting
            if waiter.kind not in REJOIN_KINDS
        ]
        is_idle += [f"node {r.id} is offline, and does not come back" for r in waiting if r.id in offline]
        if any(runtime.id < self.learners for runtime in waiting):
            count = f"{len(waiting)} nodes wait" if len(waiting) > 1 else "1 node waits"
            raise DeadlockError(
                f"deadlock at {self.kernel.now:.3f} s: {count} and nothing is on its way.\n  "
                + "\n  ".join(is_idle)
                + "\n"
                "Either a peer never sends what is waited for, or what it sent was lost, or it hangs; "
                "simulation.receive_timeout lets nodes go on without it."
            )

    def _look(self, network_model: NetworkModel) -> None:
        """What the network has for the present moment, and when to look again."""
        self._looking = False
        kernel = self.kernel
        for _, fate, delivery in network_model.advance(kernel.now):
            message, sending, sender = delivery.content
            if fate == "delivered":
                receiver = self.runtimes[delivery.receiver]
                died = sender.failed and message.kind in REJOIN_KINDS  # since it asked to be counted on
                if receiver.running and not died:
                    receiver.mailbox.put(message)
            elif sending is not None and not sending.ended and (fate == "sent" or not delivery.sent):
                kernel.soon(self.runtimes[delivery.sender].waking(sending))
        due = network_model.next_time()
        if due < self._due:
            self._due = due
            kernel.at(due, partial(self._look_again, network_model))

    def _look_again(self, network_model: NetworkModel) -> None:
        if self.kernel.now >= self._due:  # else something came in between
            self._due = math.inf
            self._look(network_model)


class _Slot:
    """A work and, once computed, its result."""

    __slots__ = ("result", "work")

    def __init__(self, work: Work[Any]) -> None:
        self.work = work
        self.result: Any = _NOTHING


class _Spell:
    """A computation under way on a device that may be turned off, or slowed down, in the midst of it."""

    __slots__ = ("left", "since", "task", "timer")

    def __init__(self, task: Task, seconds: float) -> None:
        self.task = task
        self.left = seconds
        """Seconds that the device at its usual speed still takes."""
        self.since = 0.0
        self.timer: Timer | None = None


class SimulatedRuntime:
    """A node's hold on the simulated world."""

    def __init__(self, world: World, id: NodeId) -> None:
        self.id = id
        self.mailbox = Mailbox()
        self.failed = False
        self.hung = False
        self.running = False
        self.offline_reasons = 0
        """For how many reasons the node is offline: it does nothing then, and hears nothing."""
        self._slowness = 1.0
        self._world = world
        self._kernel = world.kernel
        self._main: Task | None = None
        self._background: list[Task] = []
        self._spells: dict[_Spell, None] = {}
        self._deferred: dict[Task, None] = {}
        """What goes on when the node is online again: each once, for whatever reasons it would have gone on before."""

    def now(self) -> float:
        return self._kernel.now

    async def sleep(self, seconds: float) -> None:
        kernel = self._kernel
        kernel.at(kernel.now + max(0.0, seconds), self.waking(kernel.task()))
        await park()

    async def compute(self, work: Work[R]) -> R:
        kernel, slot = self._kernel, _Slot(work)
        self._world.submit(slot)
        try:
            if self._world.has_timed_events:
                await self._spend(work.seconds)
            else:
                kernel.at(kernel.now + work.seconds, kernel.task().resume)
                await park()
        except BaseException:  # the task is ended: nobody wants the result
            self._world.forget(slot)
            raise
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

    async def transmit(self, to: NodeId, message: Message) -> bool:
        network_model = self._world.network_model
        if network_model is None:
            return await self.send(to, message)
        delivery = Delivery(self.id, to, message.wire_size, (message, self._kernel.task(), self))
        self._world.post(network_model, delivery)
        await park()
        return delivery.sent

    def collect(self, kind: str) -> list[Message]:
        return self.mailbox.collect(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        kernel = self._kernel
        resume = self.waking(kernel.task())
        waiter = self.mailbox.start_receive(wanted, lambda: kernel.soon(resume))
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
            self.mailbox.end_receive(waiter)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        self._background.append(self._spawn(task, self._background_ended))

    def failed_peers(self) -> Collection[NodeId]:
        return self.mailbox.failed

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        self.mailbox.mark_rejoined(node, round)

    def start(self, main: Coroutine[Any, Any, None], on_end: Any = None) -> None:
        """Run `main` as the node's algorithm; `on_end(crashed)` is called when it has ended."""

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
        self._main = self._spawn(main, ended)

    def take_over_from(self, before: SimulatedRuntime) -> None:
        """Take the place of one whose node has died: the device, and where it is, are the same."""
        self.offline_reasons = before.offline_reasons - before.hung
        self._slowness = before._slowness

    def finish(self) -> None:
        """End the node as if it had returned: nobody is left to be served, or time is up."""
        self._end(crashed=False)

    def crash(self) -> None:
        """End the node on the spot."""
        self._end(crashed=True)

    def hang(self) -> None:
        """Fall silent for good: what runs beside the algorithm says no more either."""
        if self.hung or not self.running:
            return
        self.hung = True
        for task in self._background:
            task.cancel()
        self._background.clear()
        if self._world.has_timed_events:
            self.go_offline()

    def go_offline(self) -> None:
        """Do nothing from now on: what is being computed stands still, and whatever would wake the node waits."""
        self.offline_reasons += 1
        for spell in self._spells:
            self._interrupt(spell)

    def come_online(self) -> None:
        self.offline_reasons -= 1
        if not self.offline_reasons:
            for spell in self._spells:
                self._go_on(spell)
            deferred, self._deferred = self._deferred, {}
            for task in deferred:
                self._kernel.soon(task.resume)

    def slow_down(self, factor: float) -> None:
        """Compute so many times slower than usual, from now on."""
        for spell in self._spells:
            self._interrupt(spell)
        self._slowness = factor
        if not self.offline_reasons:
            for spell in self._spells:
                self._go_on(spell)

    @property
    def suspended(self) -> bool:
        """Whether something goes on as soon as the node is online again."""
        return bool(self._spells or self._deferred)

    def runs(self, task: Task | None) -> bool:
        """Whether `task` is one of this node's."""
        return task is not None and (task is self._main or task in self._background)

    def stop(self) -> None:
        """End what still runs."""
        for task in (self._main, *self._background):
            if task is not None:
                task.cancel()

    def waking(self, task: Task) -> Any:
        """What resumes `task`, or has it wait until the node is online."""
        return partial(self._wake, task) if self._world.has_timed_events else task.resume

    def _spawn(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Task, bool], None]) -> Task:
        task = Task(self._kernel, coroutine, on_end)
        self._kernel.soon(self.waking(task))
        return task

    def _wake(self, task: Task) -> None:
        if self.offline_reasons:
            self._deferred[task] = None
        else:
            task.resume()

    async def _spend(self, seconds: float) -> None:
        """Let the device compute for so long."""
        spell = _Spell(self._kernel.task(), seconds)
        self._spells[spell] = None
        if not self.offline_reasons:
            self._go_on(spell)
        try:
            await park()
        finally:
            self._interrupt(spell)
            self._spells.pop(spell, None)

    def _go_on(self, spell: _Spell) -> None:
        spell.since = self._kernel.now
        spell.timer = Timer(partial(self._done, spell))
        self._kernel.at(spell.since + spell.left * self._slowness, spell.timer.fire)

    def _interrupt(self, spell: _Spell) -> None:
        if spell.timer is not None:
            spell.timer.action = None
            spell.timer = None
            spell.left = max(0.0, spell.left - (self._kernel.now - spell.since) / self._slowness)

    def _done(self, spell: _Spell) -> None:
        spell.timer = None
        self._spells.pop(spell, None)
        spell.task.resume()

    def _end(self, crashed: bool) -> None:
        if self.running and self._main is not None:
            self._main.cancel()
            self._spells.clear()
            self._deferred.clear()
            self._ended(self._main, crashed)

    def _background_ended(self, task: Task, crashed: bool) -> None:
        self._background.remove(task)
