"""The runtime of a node process: the real clock, TCP messages, and a thread that computes."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from shoal.engines.heap import heap_free_bytes
from shoal.engines.operating_system import available_memory, release_memory
from shoal.engines.processes.capacity import KeptMemory
from shoal.engines.processes.shaper import Shaper
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.task_scope import TaskScope
from shoal.engines.processes.transport import Transport
from shoal.environment.devices import Speed
from shoal.mailbox import Filter, Mailbox, Waiter
from shoal.message import Message
from shoal.node_activity import NodeActivity
from shoal.results.spans import OFFLINE, SEND, TRAIN, WAIT
from shoal.runtime import Work
from shoal.types import NodeId

R = TypeVar("R")
MANY_TRAININGS_PER_SLOT = 32
"""From so many on, nodes release memory before they wait for a training slot, not only after training."""
MEMORY_CHECK_SECONDS = 1.0
"""How often a node that may keep memory checks how much is free."""
TIMEOUT_FACTOR = 5.0
"""A peer times out after this many times the longest time that a round's trainings, or an answer, took so far."""
DIGITS = 6
"""The precision of recorded times: microseconds. All digits would double the size of the records."""
LONGEST_GAP = 1e-3
"""Seconds between two sends, or other activities of one kind, that the node's records do not show."""


class RunClock:
    """Seconds since the run began; 0 until `start`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoch: float | None = None

    def start(self, epoch: float | None = None) -> None:
        """`epoch` is when the run began on the machine's monotonic clock; None: now."""
        self._epoch = self._loop.time() if epoch is None else epoch

    def now(self) -> float:
        return 0.0 if self._epoch is None else self._loop.time() - self._epoch


@dataclass(frozen=True)
class RuntimeSettings:
    """How a node computes, and how long it waits for peers."""

    trainings_per_slot: float = 1.0
    """How many nodes train one after another in one slot, in each round."""
    min_peer_timeout: float = 60.0
    """Seconds that a node waits for a peer at the least."""
    is_service: bool = False
    """Whether the node serves the others instead of training."""
    kept_memory: KeptMemory = KeptMemory()
    """What the node keeps of the memory of a training for the next one."""
    speed: Speed = Speed()
    """The speed of the node's device."""


class ProcessRuntime:
    """The runtime of one node: an asynchronous context manager, which the node's main task enters.

    On exit it ends the background tasks and the training thread, and raises the error of a background task that failed.
    """

    def __init__(
        self,
        id: NodeId,
        transport: Transport,
        mailbox: Mailbox,
        slots: Slots,
        settings: RuntimeSettings = RuntimeSettings(),  # noqa: B008 - frozen
        shaper: Shaper | None = None,
        clock: RunClock | None = None,
    ) -> None:
        """Without `clock` the run begins now."""
        self.id = id
        self.mailbox = mailbox
        self.activity = NodeActivity(LONGEST_GAP)
        self.slowness = 1.0
        """How many times slower than usual the node computes, because of a fault."""
        self.padded = 0.0
        """Seconds that were added to computations, to be as slow as the node's device."""
        self.overrun = 0.0
        """Seconds by which this machine was slower than the node's device."""
        self.hung = False
        self._transport = transport
        self._slots = slots
        self._settings = settings
        self._shaper = shaper
        self._loop = asyncio.get_running_loop()
        if clock is None:
            clock = RunClock()
            clock.start()
        self._clock = clock
        self._trainer = TrainingThread()
        self._background = TaskScope()
        self._change: asyncio.Future[None] = self._loop.create_future()
        """Done when the node goes online or offline, or its speed changes."""
        self._online = asyncio.Event()
        self._online.set()
        self._offline_since = 0.0
        self._longest_work = 0.0
        self._longest_answer: float | None = None
        """Seconds between two answers to a server; None before the first answer."""
        self._ended = False
        self._memory_is_short = True
        self._checks_memory_at = 0.0
        self._timed_operations = 0
        """Operations under way that end by themselves."""

    async def __aenter__(self) -> ProcessRuntime:
        await self._background.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._background.__aexit__(kind, error, trace)
        finally:
            self._ended = True
            await asyncio.to_thread(self._trainer.end)  # the event loop sends heartbeats meanwhile

    def now(self) -> float:
        return self._clock.now()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way that ends by itself: computing, sleeping, or waiting with a timeout.

        A node that is offline is busy too: the coordinator knows for how long.
        """
        return not self.hung and (self._timed_operations > 0 or not self._online.is_set())

    def set_online(self, online: bool) -> None:
        """Go online or offline. Operations that end while the node is offline return when it is online again."""
        if online and not self.hung:
            if not self._online.is_set():
                self._record_offline(self.now())
            self._online.set()
        elif not online:
            if self._online.is_set():
                self._offline_since = self.now()
            self._online.clear()
        self._notify_change()

    def slow_down(self, factor: float) -> None:
        """Compute `factor` times slower than usual from now on."""
        self.slowness = factor
        self._notify_change()

    def hang(self) -> None:
        """Stop responding until the process ends."""
        self.hung = True
        self._background.cancel()
        self.set_online(online=False)

    def fail(self, error: BaseException) -> None:
        """End the node's algorithm with an error."""
        self._background.fail(error)

    async def sleep(self, seconds: float) -> None:
        with self._busy():
            await asyncio.sleep(seconds)
        await self._online.wait()

    async def compute(self, work: Work[R]) -> R:
        began = self.now()
        slot_taken: list[float] = []
        try:
            with self._busy():
                result: R = await self._trainer.call(lambda: self._compute(work, slot_taken))
                if work.seconds:
                    await self._pad(work.seconds, self.now() - began)
            await self._online.wait()
        finally:
            if slot_taken and work.seconds:  # otherwise it is an evaluation
                self._record(TRAIN, slot_taken[0])
        return result

    async def send(self, to: NodeId, message: Message) -> bool:
        self._expect(message)
        began = self.now()
        try:
            return await (self._transport if self._shaper is None else self._shaper).send(to, message)
        finally:
            self._record(SEND, began)

    async def send_and_wait(self, to: NodeId, message: Message) -> bool:
        self._expect(message)
        began = self.now()
        try:
            with self._busy():
                was_sent = await (self._transport if self._shaper is None else self._shaper).send_and_wait(to, message)
            await self._online.wait()
        finally:
            self._record(SEND, began)
        return was_sent

    def receive_available(self, kind: str) -> list[Message]:
        return self.mailbox.receive_available(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        future: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        waiter = self.mailbox.start_receive(wanted, wake)
        if waiter.done:
            return waiter.messages
        if timeout is None and wanted.senders is not None and not self._settings.is_service:
            timeout = self.peer_timeout()
        began = self.now()
        try:
            if timeout is None and wanted.senders is not None:
                await self._wait_for_answers(waiter, future)
            elif timeout is None or timeout == math.inf:
                await future
            else:
                await self._wait(future, timeout, wake)
            if not waiter.done:
                self.mailbox.end_receive(waiter)
            await self._online.wait()
        finally:
            if not waiter.done:
                self.mailbox.end_receive(waiter)
            self._record(WAIT, began)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        self._background.start(task)

    def failed_peers(self) -> Collection[NodeId]:
        return self.mailbox.failed

    def late_messages(self, node: NodeId) -> int:
        return self.mailbox.late_from[node]

    def mark_rejoined(self, node: NodeId, round: int) -> None:
        self.mailbox.mark_rejoined(node, round)
        self._transport.mark_rejoined(node)

    def peer_timeout(self) -> float:
        """Seconds to wait for a peer that is not known to have failed."""
        settings = self._settings
        return settings.min_peer_timeout + TIMEOUT_FACTOR * self._longest_work * settings.trainings_per_slot

    def release_memory_if_short(self) -> None:
        """Return freed memory to the system, unless the machine has plenty. Called after computations."""
        kept = self._settings.kept_memory
        if kept.most and time.monotonic() > self._checks_memory_at:
            self._checks_memory_at = time.monotonic() + MEMORY_CHECK_SECONDS
            self._memory_is_short = available_memory() < kept.min_free
        if self._memory_is_short or heap_free_bytes() > kept.most:
            release_memory()

    async def stop_computing(self) -> None:
        """Compute nothing more after the computation under way, if any, and go offline."""
        self._background.cancel()
        self.set_online(online=False)
        await asyncio.to_thread(self._trainer.end)

    async def _wait(self, future: asyncio.Future[None], timeout: float, wake: Callable[[], None]) -> None:
        timer = self._loop.call_later(timeout, wake)
        try:
            with self._busy():
                await future
        finally:
            timer.cancel()

    async def _wait_for_answers(self, waiter: Waiter, future: asyncio.Future[None]) -> None:
        """Wait as a server, which does not train and so cannot know from its own training how long the others take.

        Before its first answer ever, the server waits without a timeout: if all nodes hang, the coordinator ends them.
        After that, it stops waiting when no answer has arrived for several times the longest wait so far.
        """
        timeout = self._settings.min_peer_timeout
        answers, since = len(waiter.messages), self.now()
        while not future.done():
            with nullcontext() if self._longest_answer is None else self._busy():
                await asyncio.wait([future], timeout=min(1.0, timeout))
            now = self.now()
            if len(waiter.messages) > answers:
                self._longest_answer = max(self._longest_answer or 0.0, now - since)
                answers, since = len(waiter.messages), now
            elif now - since > timeout + TIMEOUT_FACTOR * (self._longest_answer or math.inf):
                return

    async def _pad(self, usual: float, took: float) -> None:
        """Wait until the node's device would be done.

        The device takes `usual` seconds where its step time is known, and a multiple of this machine's time elsewhere.
        """
        speed = self._settings.speed
        own = speed.slowdown if speed.step_seconds is None else 1.0
        left = (took if speed.step_seconds is None else usual) - took / (own * self.slowness)
        if speed.step_seconds is not None:
            self.overrun += max(0.0, -left * self.slowness)
        while left > 0:
            await self._online.wait()
            began, slowness = self.now(), own * self.slowness
            await asyncio.wait([self._change], timeout=left * slowness)
            waited = self.now() - began
            self.padded += waited
            left -= waited / slowness

    def _expect(self, message: Message) -> None:
        """Budget for messages of this size: peers send what this node sends."""
        if self.mailbox.budget is not None:
            self.mailbox.budget.expect(message.wire_size)

    def _record(self, activity: str, began: float) -> None:
        """Record what the node's algorithm did until now. Of background tasks, only training is recorded."""
        in_background = self._background.has(asyncio.current_task())
        if in_background and activity != TRAIN:
            return
        now = self.now()
        if not self._online.is_set():
            self._record_offline(now)
        add = self.activity.interrupt if in_background else self.activity.add
        add(activity, round(began, DIGITS), round(now, DIGITS))

    def _record_offline(self, now: float) -> None:
        self.activity.interrupt(OFFLINE, round(self._offline_since, DIGITS), round(now, DIGITS))
        self._offline_since = now

    def _notify_change(self) -> None:
        self._change.set_result(None)
        self._change = self._loop.create_future()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._timed_operations += 1
        try:
            yield
        finally:
            self._timed_operations -= 1

    def _compute(self, work: Work[R], slot_taken: list[float]) -> R:
        """Compute in the training thread, then release the memory of training, which is most of a node's memory.

        `slot_taken` gets the time at which a processor is free for the node.
        Where memory is plentiful, the node keeps it, and its next training need not get it again.
        """
        if self._settings.trainings_per_slot > MANY_TRAININGS_PER_SLOT:
            self.release_memory_if_short()  # of the models of the last round
        with self._slots.taken():
            if self._ended:
                raise RuntimeError("the node's algorithm has ended, and needs no result")
            slot_taken.append(self.now())
            started = time.monotonic()
            result = work.run()
            self.release_memory_if_short()
            self._longest_work = max(self._longest_work, time.monotonic() - started)
        return result


class TrainingThread:
    """A thread beside the event loop that makes one call after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="train", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call `function` in the thread; the future has its result or its exception."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """Wait for the calls made so far, and end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                outcome: tuple[Any, BaseException | None] = (function(), None)
            except BaseException as error:
                outcome = (None, error)
            self._loop.call_soon_threadsafe(_set_outcome, future, *outcome)


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
