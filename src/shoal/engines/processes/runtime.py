"""A node's hold on the real world: its clock, its messages, and the thread that computes for it."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from shoal.engines.operating_system import release_memory
from shoal.engines.processes.shaper import Shaper
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.transport import Transport
from shoal.environment.devices import Speed
from shoal.mailbox import Filter, Mailbox, Waiter
from shoal.message import Message
from shoal.runtime import Work
from shoal.types import NodeId

R = TypeVar("R")
CROWDED = 32
"""Trainings that follow each other in a slot, from which on nodes give memory back before they wait for their turn."""
ROUNDS_OF_PATIENCE = 5.0


class ProcessRuntime:
    """A node's hold on the real world."""

    def __init__(
        self,
        id: NodeId,
        transport: Transport,
        mailbox: Mailbox,
        slots: Slots,
        trainings_per_slot: float = 1.0,
        min_patience: float = 60.0,
        serves: bool = False,
        shaper: Shaper | None = None,
        speed: Speed | None = None,
        epoch: float | None = None,
    ) -> None:
        self.id = id
        self._shaper = shaper
        self._speed = speed or Speed()
        self.slowness = 1.0
        """How many times slower than usual the node computes, by a fault."""
        self.padded = 0.0
        """Seconds by which computing was drawn out, to be as slow as the node's device."""
        self.overrun = 0.0
        """Seconds by which this machine was slower than the node's device."""
        self.hung = False
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the node comes or goes, or its speed changes."""
        self._online = asyncio.Event()
        self._online.set()
        self._serves = serves
        self._longest_answer: float | None = None
        self._min_patience = min_patience
        self.trainings_per_slot = trainings_per_slot
        """How many nodes' trainings follow each other in one slot, in a round."""
        self.mailbox = mailbox
        self.failure: BaseException | None = None
        """What a background task raised."""
        self._transport = transport
        self._slots = slots
        self._trainer = TrainingThread()
        self._background: set[asyncio.Task[None]] = set()
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time() if epoch is None else epoch
        self._longest_work = 0.0
        self._under_way = 0

    def now(self) -> float:
        return self._loop.time() - self._started

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends by itself: computing, sleeping, waiting with a timeout, and being
        offline, for the supervisor knows how long."""
        return not self.hung and (self._under_way > 0 or not self._online.is_set())

    def set_online(self, online: bool) -> None:
        """Come online, or do nothing from now on: whatever ends meanwhile has to wait."""
        if online and not self.hung:
            self._online.set()
        elif not online:
            self._online.clear()
        self._changes()

    def slow_down(self, factor: float) -> None:
        """Compute so many times slower than usual, from now on."""
        self.slowness = factor
        self._changes()

    def hang(self) -> None:
        """Fall silent for good."""
        self.hung = True
        self.silence()
        self.set_online(online=False)

    def fail(self, error: BaseException) -> None:
        """End the node's algorithm with an error."""
        if self.failure is None:
            self.failure = error
            if self._main is not None:
                self._main.cancel()

    async def sleep(self, seconds: float) -> None:
        with self._busy():
            await asyncio.sleep(seconds)
        await self._online.wait()

    async def compute(self, work: Work[R]) -> R:
        began = self.now()
        with self._busy():
            result: R = await self._trainer.call(lambda: self._compute(work))
            if work.seconds:
                await self._pad(work.seconds, self.now() - began)
        await self._online.wait()
        return result

    async def send(self, to: NodeId, message: Message) -> bool:
        self._expect(message)
        if self._shaper is not None:
            return await self._shaper.send(to, message)
        return await self._transport.send(to, message)

    async def transmit(self, to: NodeId, message: Message) -> bool:
        self._expect(message)
        with self._busy():
            got_out = await (self._transport if self._shaper is None else self._shaper).transmit(to, message)
        await self._online.wait()
        return got_out

    def collect(self, kind: str) -> list[Message]:
        return self.mailbox.collect(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        future: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        waiter = self.mailbox.start_receive(wanted, wake)
        if waiter.done:
            return waiter.messages
        if timeout is None and wanted.senders is not None and not self._serves:
            timeout = self.patience()
        try:
            if timeout is None and wanted.senders is not None:
                await self._wait_for_answers(waiter, future)
            elif timeout is None or timeout == math.inf:
                await future
            else:
                await self._wait(future, timeout, wake)
        finally:
            if not waiter.done:
                self.mailbox.end_receive(waiter)
        await self._online.wait()
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        started = self._loop.create_task(task)
        self._background.add(started)
        started.add_done_callback(self._background_ended)

    def failed_peers(self) -> Collection[NodeId]:
        return self.mailbox.failed

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        self.mailbox.mark_rejoined(node, round)
        self._transport.mark_rejoined(node)

    def patience(self) -> float:
        """Seconds to wait for a peer that is not known to be dead, before going on without it."""
        return self._min_patience + ROUNDS_OF_PATIENCE * self._longest_work * self.trainings_per_slot

    def silence(self) -> None:
        """End what runs beside the algorithm, which goes on."""
        for task in list(self._background):
            task.cancel()

    async def halt(self) -> None:
        """Do no more: what is being computed is the last."""
        self.silence()
        self.set_online(online=False)
        await asyncio.to_thread(self._trainer.end)

    async def end(self) -> None:
        """End the background tasks. What one of them raised is raised here."""
        self.silence()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._trainer.end()
        if self.failure is not None:
            raise self.failure

    async def _wait(self, future: asyncio.Future[None], timeout: float, wake: Callable[[], None]) -> None:
        timer = self._loop.call_later(timeout, wake)
        try:
            with self._busy():
                await future
        finally:
            timer.cancel()

    async def _wait_for_answers(self, waiter: Waiter, future: asyncio.Future[None]) -> None:
        """Wait as one that does not train, and so cannot know from itself how long the others take.

        Before the first answer ever, it waits as long as it takes: should all be hung, the supervisor ends them. After
        that, it goes on when nobody has answered for several times as long as the longest so far.
        """
        heard, since = len(waiter.messages), self.now()
        while not future.done():
            with nullcontext() if self._longest_answer is None else self._busy():
                await asyncio.wait([future], timeout=min(1.0, self._min_patience))
            now = self.now()
            if len(waiter.messages) > heard:
                self._longest_answer = max(self._longest_answer or 0.0, now - since)
                heard, since = len(waiter.messages), now
            elif now - since > self._min_patience + ROUNDS_OF_PATIENCE * (self._longest_answer or math.inf):
                return

    async def _pad(self, usual: float, took: float) -> None:
        """Wait until the node's device would be done: one that takes so many seconds or, where nobody says how many,
        so many times as long as this machine."""
        own = self._speed.slowdown if self._speed.step_seconds is None else 1.0
        left = (took if self._speed.step_seconds is None else usual) - took / (own * self.slowness)
        if self._speed.step_seconds is not None:
            self.overrun += max(0.0, -left * self.slowness)
        while left > 0:
            await self._online.wait()
            began, slowness = self.now(), own * self.slowness
            await asyncio.wait([self._change], timeout=left * slowness)
            waited = self.now() - began
            self.padded += waited
            left -= waited / slowness

    def _expect(self, message: Message) -> None:
        """What this node says, others say to it."""
        if self.mailbox.budget is not None:
            self.mailbox.budget.expect(message.wire_size)

    def _changes(self) -> None:
        self._change.set_result(None)
        self._change = self._loop.create_future()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def _compute(self, work: Work[R]) -> R:
        """In the training thread. What it takes only while it trains is most of a node's memory: give it back."""
        if self.trainings_per_slot > CROWDED:
            release_memory()  # the models of the last round
        with self._slots.taken(self.id):
            started = time.monotonic()
            result = work.run()
            release_memory()
            self._longest_work = max(self._longest_work, time.monotonic() - started)
        return result

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


class TrainingThread:
    """One thread beside the event loop, for one call after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="train", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """What `function` returns or raises, in time."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """After the calls that were made."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (called := self._calls.get()) is not None:
            function, future = called
            try:
                outcome: tuple[Any, BaseException | None] = (function(), None)
            except BaseException as error:
                outcome = (None, error)
            self._loop.call_soon_threadsafe(_settle, future, *outcome)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
