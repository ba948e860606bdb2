"""The life of a forked node: an event loop that always answers, and one thread that trains."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import zmq

from shoal.commons import Commons
from shoal.errors import LaunchError, NodeError
from shoal.experiment import Fault
from shoal.message import Message, Params
from shoal.node import Node
from shoal.operating_system import give_memory_back, memory
from shoal.processes import control
from shoal.processes.slots import Slots
from shoal.processes.transport import Transport
from shoal.progress import leading_score
from shoal.records import End, Evaluation, Event, Lines, Record, Round, RunFolder
from shoal.runtime import Filter, Mailbox, Waiter, Work
from shoal.topologies.graph import NodeId

R = TypeVar("R")
REPORT_EVERY = 0.5
BEATS = 6
"""How often a node says that it lives in the time that a peer would wait for it."""
CROWDED = 32
"""Trainings that follow each other in a slot, from which on nodes give memory back before they wait for their turn."""
ROUNDS_OF_PATIENCE = 5.0
REJECTIONS_RECORDED = 20
"""Bad messages that are recorded one by one; more are only counted."""


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
    ) -> None:
        self.id = id
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
        self._started = self._loop.time()
        self._longest_work = 0.0
        self._under_way = 0

    def now(self) -> float:
        return self._loop.time() - self._started

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends by itself: computing, sleeping, waiting with a timeout."""
        return self._under_way > 0

    async def sleep(self, seconds: float) -> None:
        with self._busy():
            await asyncio.sleep(seconds)

    async def compute(self, work: Work[R]) -> R:
        with self._busy():
            result: R = await self._trainer.call(lambda: self._compute(work))
        return result

    async def send(self, to: NodeId, message: Message) -> bool:
        return await self._transport.send(to, message)

    async def transmit(self, to: NodeId, message: Message) -> bool:
        return await self._transport.send(to, message)

    def collect(self, kind: str) -> list[Message]:
        return self.mailbox.collect(kind)

    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        future: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        waiter = self.mailbox.ask(wanted, wake)
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
                self.mailbox.withdraw(waiter)
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        started = self._loop.create_task(task)
        self._background.add(started)
        started.add_done_callback(self._background_ended)

    def gone(self) -> Collection[NodeId]:
        return self.mailbox.gone

    def patience(self) -> float:
        """Seconds to wait for a peer that is not known to be dead, before going on without it."""
        return self._min_patience + ROUNDS_OF_PATIENCE * self._longest_work * self.trainings_per_slot

    def silence(self) -> None:
        """End what runs beside the algorithm, which goes on."""
        for task in list(self._background):
            task.cancel()

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
            give_memory_back()  # the models of the last round
        with self._slots.taken(self.id):
            started = time.monotonic()
            result = work.run()
            give_memory_back()
            self._longest_work = max(self._longest_work, time.monotonic() - started)
        return result

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            if self._main is not None:
                self._main.cancel()


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


class Supervised:
    """The node's end of the line to its supervisor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 5000)
        self._socket.connect(endpoint)
        self._loop = asyncio.get_running_loop()
        self.go: asyncio.Future[control.Go] = self._loop.create_future()
        self.finish: asyncio.Future[control.Finish] = self._loop.create_future()
        self.on_gone: Any = None
        self.on_stop: Any = None
        self._loop.add_reader(self._socket.FD, self._drain)

    def say(self, said: control.FromNode, params: Params | None = None) -> None:
        frames = [control.encode(said)] if params is None else [control.encode(said), params.tobytes()]
        self._socket.send_multipart(frames)
        self._loop.call_soon(self._drain)  # sending may have swallowed the signal that something has come

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                said = control.decode_to_node(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(said, control.Go):
                self.go.set_result(said)
            elif isinstance(said, control.Gone):
                self.on_gone(said.node)
            elif said.stopped:
                self.on_stop()
            elif not self.finish.done():
                self.finish.set_result(said)


class Watcher:
    """The observer of one node process: its records go to its file, the news to the supervisor."""

    def __init__(self, id: NodeId, lines: Lines, line: Supervised, faults: list[Fault]) -> None:
        self._id = id
        self._lines = lines
        self._line = line
        self._faults = faults
        self._began = False
        self._reported = 0.0
        self._latest: tuple[int, int] = (0, 0)
        self._evaluation: Evaluation | None = None
        self.now: Any = None
        self.silence: Any = None
        """Ends what runs beside the algorithm."""
        self.hung = False
        """Whether a fault has left the node alive and silent."""

    def record(self, record: Record) -> None:
        self._lines.write(record)
        if isinstance(record, Round):
            self._latest = (record.round + 1, record.bytes_sent)
            if record.round == 0 or time.monotonic() - self._reported > REPORT_EVERY:
                self.report()
        elif isinstance(record, Evaluation):
            self._evaluation = record
            self.report()

    def report(self) -> None:
        self._reported = time.monotonic()
        evaluation, self._evaluation = self._evaluation, None
        rounds, sent = self._latest
        if evaluation is None:
            self._line.say(control.Report(self._id, rounds, sent))
        else:
            score = leading_score(evaluation.scores)
            self._line.say(control.Report(self._id, rounds, sent, evaluation.round, score))

    def model(self, round: int, params: Params) -> None:
        self._line.say(control.Model(self._id, round, self.now()), params)

    async def before_round(self, round: int) -> None:
        if not self._began:
            self._began = True
            self._line.say(control.Began(self._id))
        if self._faults and self._faults[0].round <= round:
            fault = self._faults.pop(0)
            self.record(Event("fault", self.now(), f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            self.hung = True
            self.silence()
            await asyncio.Event().wait()  # nobody sets it


def live(commons: Commons, id: NodeId, slots: Slots, start: control.Fork) -> int:
    """From fork to exit; returns the exit code."""
    try:
        return asyncio.run(_live(commons, id, slots, start))
    except Exception:
        traceback.print_exc()  # to the run's nodes.log; the supervisor sees the exit code
        return 1


async def _live(commons: Commons, id: NodeId, slots: Slots, start: control.Fork) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Enough for a connection to everybody, and for those that linger after their place was needed.
    context.set(zmq.MAX_SOCKETS, 2 * commons.experiment.size + 128)
    line = Supervised(context, start.control)
    try:
        await _take_part(commons, id, slots, start, context, line)
    except Exception as error:
        text = str(error) if isinstance(error, LaunchError) else traceback.format_exc()
        line.say(control.Failed(id, start.run, text))
        line.close()
        context.term()  # waits until that is said
        return 1
    return 0  # all is said and done: the process ends, and its sockets with it


async def _take_part(
    commons: Commons,
    id: NodeId,
    slots: Slots,
    start: control.Fork,
    context: zmq.Context[zmq.Socket[bytes]],
    line: Supervised,
) -> None:
    experiment, folder = commons.experiment, RunFolder(Path(start.folder))
    plan = experiment.processes
    lines = Lines(folder.node(id))
    mailbox = Mailbox()
    rejected = _Rejections(lines)
    transport = Transport(
        context,
        run=start.run,
        host=plan.host,
        announce=plan.announce or plan.host,
        port=None if plan.base_port is None else plan.base_port + id,
        max_message_bytes=int(plan.max_message_mib * 2**20),
        connections=plan.connections or max(64, _first_peers(commons, id)),
        send_timeout=plan.patience,
        deliver=mailbox.put,
        reject=rejected,
    )

    def lose(node: NodeId) -> None:
        mailbox.lose(node)
        transport.lose(node)

    line.on_gone = lose
    line.on_stop = lambda: os._exit(0)
    line.say(control.Hello(id, start.run, transport.endpoint))
    go = await line.go
    transport.start(go.endpoints)
    serves = id >= experiment.nodes
    runtime = ProcessRuntime(id, transport, mailbox, slots, experiment.nodes / slots.count, plan.patience, serves)
    watcher = Watcher(id, lines, line, experiment.faults(id))
    watcher.now = rejected.now = runtime.now
    watcher.silence = runtime.silence
    node = commons.node(id, runtime, watcher, start.run, plan.receive_timeout)
    line.on_stop = lambda: _leave(node, folder, experiment.checkpoint.final)
    pulse = asyncio.create_task(_beat(id, runtime, line, plan.patience / BEATS))
    cpu = time.process_time()
    try:
        await _until_nobody_is_served(commons.live(node), line, watcher, serves)
    except asyncio.CancelledError:
        if runtime.failure is None:
            raise
    except BaseException:
        transport.close()
        raise
    finally:
        pulse.cancel()
        await runtime.end()
    cpu = time.process_time() - cpu
    ended = runtime.now()
    watcher.report()
    if experiment.checkpoint.final:
        folder.save_model(id, node.params)
    give_memory_back()
    if id < experiment.nodes or not line.finish.done():
        line.say(control.Done(id))
    used = memory()  # while all others are still alive
    await line.finish
    end = End(
        ended,
        digest=hashlib.sha256(node.params.tobytes()).hexdigest(),
        bytes_sent=node.bytes_sent,
        messages_sent=node.messages_sent,
        bad_messages=node.rejected + rejected.count,
        late_messages=mailbox.late + mailbox.dropped,
        unsent_messages=transport.unsent,
        train_cpu_s=node.trainer.cpu_seconds,
        total_cpu_s=cpu,
        uss_mib=None if used is None else used.uss,
        pss_mib=None if used is None else used.pss,
    )
    lines.write(end)
    transport.close()


def _first_peers(commons: Commons, id: NodeId) -> int:
    """How many others a node talks to in its first round; one that serves talks to all."""
    nodes = commons.experiment.nodes
    return len(commons.mixing.peers(id, 0).to) if id < nodes else nodes


async def _until_nobody_is_served(
    life: Coroutine[Any, Any, None], line: Supervised, watcher: Watcher, serves: bool
) -> None:
    """Live to the end; a node that serves ends, at the latest, when the last of the others has. One that hangs does
    not even then."""
    if not serves:
        await life
        return
    living = asyncio.ensure_future(life)
    ends: list[asyncio.Future[Any]] = [living, line.finish]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if watcher.hung:
        await living
    if not living.done():
        living.cancel()
        await asyncio.wait([living])
    elif not living.cancelled():
        living.result()


async def _beat(id: NodeId, runtime: ProcessRuntime, line: Supervised, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        line.say(control.Alive(id, runtime.busy))


class _Rejections:
    """Counts messages that were refused, and records the first ones."""

    def __init__(self, lines: Lines) -> None:
        self.count = 0
        self.now: Any = lambda: 0.0
        self._lines = lines

    def __call__(self, why: str) -> None:
        self.count += 1
        if self.count <= REJECTIONS_RECORDED:
            self._lines.write(Event("message rejected", self.now(), why))


def _leave(node: Node, folder: RunFolder, save: bool) -> None:
    """The run is being stopped: keep what was learnt, and go."""
    try:
        if save:
            folder.save_model(node.id, node.params)
    finally:
        os._exit(0)
