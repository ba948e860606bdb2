"""The life of a forked node: an event loop that always answers, and one thread that trains."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from shoal.commons import Commons
from shoal.errors import LaunchError, NodeError
from shoal.message import Message, Params
from shoal.network.devices import Speed
from shoal.network.faults import Fault
from shoal.node import Node
from shoal.operating_system import give_memory_back, memory
from shoal.processes import control
from shoal.processes.delay import Delay
from shoal.processes.namespaces import address, enter
from shoal.processes.shaper import Shaper
from shoal.processes.slots import Slots
from shoal.processes.transport import Transport
from shoal.progress import leading_score
from shoal.records import End, Evaluation, Event, Lines, Record, Round, RunFolder
from shoal.rejoining import rejoin, welcome
from shoal.runtime import Filter, Mailbox, Waiter, Work
from shoal.topologies.graph import NodeId

R = TypeVar("R")
REPORT_EVERY = 0.5
BEATS = 6
"""How often a node says that it lives in the time that a peer would wait for it."""
CROWDED = 32
"""Trainings that follow each other in a slot, from which on nodes give memory back before they wait for their turn."""
ROUNDS_OF_PATIENCE = 5.0
LEAVE_SECONDS = 7.0
"""How long a node that is stopped goes on to test models that it kept, the latest first; that one it tests anyway."""
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

    def attend(self, online: bool) -> None:
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
        self.attend(online=False)

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
        if self._shaper is not None:
            return await self._shaper.send(to, message)
        return await self._transport.send(to, message)

    async def transmit(self, to: NodeId, message: Message) -> bool:
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
        await self._online.wait()
        return waiter.messages

    def background(self, task: Coroutine[Any, Any, None]) -> None:
        started = self._loop.create_task(task)
        self._background.add(started)
        started.add_done_callback(self._background_ended)

    def gone(self) -> Collection[NodeId]:
        return self.mailbox.gone

    def regain(self, node: NodeId, round: int) -> None:
        self.mailbox.regain(node, round)
        self._transport.regain(node)

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
        self.attend(online=False)
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
            give_memory_back()  # the models of the last round
        with self._slots.taken(self.id):
            started = time.monotonic()
            result = work.run()
            give_memory_back()
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
        self.on_back: Any = None
        # Of what happens to one that was started again, and waits for others that are, it hears when it begins.
        self.on_attend: Any = lambda online: None
        self.on_strike: Any = lambda said: None
        self.on_stop: Any = None
        self.heeding = False
        """Whether the node is ready for what comes after its start."""
        self._loop.add_reader(self._socket.FD, self._drain)

    def heed(self) -> None:
        """Take in what was said since the start, and what will be."""
        self.heeding = True
        self._drain()

    def say(self, said: control.FromNode, params: Params | None = None) -> None:
        frames = [control.encode(said)] if params is None else [control.encode(said), params.tobytes()]
        self._socket.send_multipart(frames)
        self._loop.call_soon(self._drain)  # sending may have swallowed the signal that something has come

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()

    def _drain(self) -> None:
        while not self._socket.closed and not (self.go.done() and not self.heeding):
            try:
                said = control.decode_to_node(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(said, control.Go):
                self.go.set_result(said)
            elif isinstance(said, control.Gone):
                self.on_gone(said.node, said.time)
            elif isinstance(said, control.Back):
                self.on_back(said.node, said.endpoint)
            elif isinstance(said, control.Attend):
                self.on_attend(said.online)
            elif isinstance(said, control.Strike):
                self.on_strike(said)
            elif said.stopped:
                self.on_stop(said)
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
        self.runtime: ProcessRuntime | None = None
        self.later: Later | None = None
        """Where models are kept that are tested when the run is over; None where they are tested at once."""
        self.ticks = 0
        """The last moment at which the model was looked at, where that is done by the clock."""

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

    def model(self, round: int, params: Params, tick: int | None = None) -> None:
        self._line.say(control.Model(self._id, round, self.now(), tick), params)

    def postpone(self, round: int, params: Params) -> bool:
        if self.later is None:
            return False
        self.later.keep(round, self.now(), params)
        return True

    async def before_round(self, round: int) -> None:
        if not self._began:
            self._began = True
            self._line.say(control.Began(self._id))
        if self._faults and self._faults[0].due(round):
            fault = self._faults.pop(0)
            self.record(Event("fault", self.now(), f"{fault.kind} at round {round}"))
            if fault.kind == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise NodeError(f"fault on schedule: node {self._id} raises at round {round}")
            assert self.runtime is not None
            self.runtime.hang()
            await asyncio.Event().wait()  # nobody sets it

    def strike(self, said: control.Strike) -> None:
        """A fault that the clock brings."""
        assert self.runtime is not None
        self.record(Event("fault", self.now(), said.detail))
        if said.kind == "slow":
            if said.factor is not None:
                self.runtime.slow_down(said.factor)
        elif said.kind == "hang":
            self.runtime.hang()
        else:
            self.runtime.fail(NodeError(f"fault on schedule: {said.detail}"))


class Later:
    """Models that are tested when the run is over, so that testing takes no time from anybody's training.

    They lie in a nameless file: gone with the process, whatever becomes of it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._file = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115 - lives as long as the process
        self._kept: list[tuple[int, float, int | None]] = []

    def keep(self, round: int, time: float, params: Params, tick: int | None = None) -> None:
        self._file.write(params.data)
        self._kept.append((round, time, tick))

    def test(self, node: Node, latest_first: bool = False) -> Iterator[Evaluation]:
        """Test all of them, in order or the other way round."""
        size, kept = node.params.nbytes, list(enumerate(self._kept))
        for place, (round, moment, tick) in reversed(kept) if latest_first else kept:
            self._file.seek(place * size)
            params = np.frombuffer(self._file.read(size), np.float32)
            yield Evaluation(round, moment, node.trainer.evaluate(params), tick)


def live(commons: Commons, id: NodeId, slots: Slots, start: control.Fork) -> int:
    """From fork to exit; returns the exit code."""
    try:
        if start.namespaces:
            enter(start.namespaces[id])  # before there is a socket, or a thread that would make one
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
    host = address(id) if start.namespaces else plan.host
    delay = _delay(commons, id, mailbox)
    transport = Transport(
        context,
        run=start.run,
        host=host,
        announce=plan.announce or host,
        port=None if plan.base_port is None else plan.base_port + id,
        max_message_bytes=int(plan.max_message_mib * 2**20),
        connections=plan.connections or max(64, _first_peers(commons, id)),
        send_timeout=plan.patience,
        deliver=mailbox.put if delay is None else delay.take,
        reject=rejected,
    )

    def lose(node: NodeId, at: float) -> None:
        mailbox.lose(node)
        transport.lose(node)
        if shaper is not None:
            shaper.lose(node, at)
        if delay is not None:
            delay.lose(node)

    shaper: Shaper | None = None
    line.on_gone = lose
    line.on_back = transport.move
    line.on_stop = lambda stop: os._exit(0)
    born = asyncio.get_running_loop().time()
    line.say(control.Hello(id, start.run, transport.endpoint))
    go = await line.go
    if go.network is not None:
        shaper = Shaper(context, id, go.network, transport, mailbox.put)
        transport.redeem = shaper.take
    transport.start(go.endpoints)
    serves = id >= experiment.nodes
    runtime = ProcessRuntime(
        id,
        transport,
        mailbox,
        slots,
        experiment.nodes / slots.count,
        plan.patience,
        serves,
        shaper,
        commons.speeds[id],
        go.epoch,
    )
    runtime.attend(not go.away)
    watcher = Watcher(id, lines, line, [] if start.again else experiment.faults(id))
    watcher.now = rejected.now = runtime.now
    watcher.runtime = runtime
    line.on_attend, line.on_strike = runtime.attend, watcher.strike
    if commons.conditions.timed:
        watcher.later = Later(folder)
    node = commons.node(id, runtime, watcher, start.run, plan.receive_timeout)
    leaving: set[asyncio.Task[None]] = set()

    def leave(stop: control.Finish) -> None:
        if experiment.checkpoint.final and not leaving:
            folder.save_model(id, node.params)
        if watcher.later is None:
            os._exit(0)
        if not leaving:
            pulse.cancel()  # from now on only what is tested is a sign of life
            leaving.add(asyncio.create_task(_leave(stop, node, runtime, watcher, slots, line)))

    line.on_stop = leave
    pulse = asyncio.create_task(_beat(id, runtime, line, plan.patience / BEATS))
    ticks = asyncio.create_task(_tick(node, runtime, watcher, None if serves else experiment.evaluation.seconds))
    for dead in go.gone:
        lose(dead, born)
    if start.again:
        others = set(range(experiment.nodes)) - {id}
        for other in others:
            mailbox.lose(other)  # until they have answered
        life = _relive(commons, node, others.difference(go.gone))
    else:
        if commons.conditions.restarts:
            runtime.background(welcome(node))
        life = commons.live(node)
    line.heed()
    cpu = time.process_time()
    try:
        await _until_the_end(life, line, runtime, serves, experiment.duration)
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
    if runtime.overrun > 0:
        node.event("slower than its device", f"by {runtime.overrun:.3f} s: this machine could not keep up with it")
    if experiment.checkpoint.final:
        folder.save_model(id, node.params)
    give_memory_back()
    if id < experiment.nodes or not line.finish.done():
        line.say(control.Done(id))
    used = memory()  # while all others are still alive
    finish = await line.finish
    ticks.cancel()
    _look_at_the_last(node, watcher, finish)
    if watcher.later is not None:
        async for evaluation in _tested(node, watcher.later.test(node), slots, line):
            watcher.record(evaluation)
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
        padded_s=runtime.padded or None,
    )
    lines.write(end)
    transport.close()


def _delay(commons: Commons, id: NodeId, mailbox: Mailbox) -> Delay | None:
    """What latency, jitter and loss are left to where the kernel shapes messages."""
    conditions = commons.conditions
    if conditions.access is None or conditions.wired is None:
        return None
    return Delay(conditions.wired.stages[0][1], id, commons.experiment.seed, mailbox.put)


def _first_peers(commons: Commons, id: NodeId) -> int:
    """How many others a node talks to in its first round; one that serves talks to all."""
    nodes = commons.experiment.nodes
    return len(commons.mixing.peers(id, 0).to) if id < nodes else nodes


async def _relive(commons: Commons, node: Node, others: Collection[NodeId]) -> None:
    await node.sleep(0.0)  # until it is online
    if await rejoin(node, others):
        await commons.live(node)


async def _tick(node: Node, runtime: ProcessRuntime, watcher: Watcher, seconds: float | None) -> None:
    """Keep the model as it is every so many seconds of the run."""
    watcher.ticks = 0 if seconds is None else int(runtime.now() / seconds)
    while seconds is not None:
        await asyncio.sleep(max(0.0, (watcher.ticks + 1) * seconds - runtime.now()))
        _look(node, watcher, watcher.ticks + 1, (watcher.ticks + 1) * seconds)


def _look(node: Node, watcher: Watcher, tick: int, time: float) -> None:
    watcher.ticks = tick
    round = max(0, node.next_round - 1)
    if watcher.later is not None and node.schedule.evaluated:
        watcher.later.keep(round, time, node.params, tick)
    if node.schedule.averaged:
        watcher.model(round, node.params, tick)


def _look_at_the_last(node: Node, watcher: Watcher, finish: control.Finish) -> None:
    """Keep the model as it is at the end, unless the clock has just had it kept."""
    if node.id < node.nodes and finish.tick is not None and watcher.ticks < finish.tick:
        _look(node, watcher, finish.tick, finish.time)


async def _tested(
    node: Node, evaluations: Iterator[Evaluation], slots: Slots, line: Supervised
) -> AsyncIterator[Evaluation]:
    """Test models that were kept, one after another, and let the supervisor know that this goes on."""
    thread = TrainingThread()

    def test() -> Evaluation | None:
        with slots.taken(node.id):
            return next(evaluations, None)

    while (evaluation := await thread.call(test)) is not None:
        line.say(control.Alive(node.id, busy=True))
        yield evaluation
    thread.end()


async def _leave(
    stop: control.Finish, node: Node, runtime: ProcessRuntime, watcher: Watcher, slots: Slots, line: Supervised
) -> None:
    """The run is being stopped: of the models that were kept, test the latest and as many more as there is time for,
    and go."""
    until = time.monotonic() + LEAVE_SECONDS
    try:
        assert watcher.later is not None
        _look_at_the_last(node, watcher, stop)
        await runtime.halt()
        found = []
        async for evaluation in _tested(node, watcher.later.test(node, latest_first=True), slots, line):
            found.append(evaluation)
            if time.monotonic() > until:
                break
        for evaluation in reversed(found):
            watcher.record(evaluation)
    finally:
        os._exit(0)


async def _until_the_end(
    life: Coroutine[Any, Any, None], line: Supervised, runtime: ProcessRuntime, serves: bool, duration: float | None
) -> None:
    """Live to the end, which is, for a node that serves, when the last of the others has ended, and for all others when
    the time is up. One that hangs does not end even then."""
    if not serves and duration is None:
        await life
        return
    living = asyncio.ensure_future(life)
    ends: list[asyncio.Future[Any]] = [living, line.finish] if serves else [living]
    left = None if serves or duration is None else max(0.0, duration - runtime.now())
    try:
        await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        living.cancel()
        raise
    if runtime.hung:
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
