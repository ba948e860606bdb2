"""The life of a forked node: an event loop that always answers, and one thread that trains."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any

import zmq

from shoal.engines.operating_system import process_memory, release_memory
from shoal.engines.processes import control
from shoal.engines.processes.coordinator_link import CoordinatorLink, DeferredEvaluations, NodeObserver
from shoal.engines.processes.delay import Delay
from shoal.engines.processes.keys import KeyPair, read_pair
from shoal.engines.processes.namespaces import address, enter
from shoal.engines.processes.runtime import ProcessRuntime, TrainingThread
from shoal.engines.processes.sealing import KEY_WAIT_SECONDS, Seal
from shoal.engines.processes.shaper import Shaper
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.transport import Transport
from shoal.engines.rejoining import answer_rejoining_peers, rejoin
from shoal.errors import LaunchError
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.message_budget import MessageBudget
from shoal.node import Node
from shoal.results.records import End, Evaluation, Event, RecordFile, RunFolder
from shoal.types import NodeId

BEATS = 6
"""How often a node says that it lives in the time that a peer would wait for it."""
LEAVE_SECONDS = 7.0
"""How long a node that is stopped goes on to test models that it kept, the latest first; that one it tests anyway."""
REJECTIONS_RECORDED = 20
LAST_WORDS = 2**13
"""Characters of an error that a node tells the supervisor; of more the last, which say what it was."""
"""Bad messages, and strangers, that are recorded one by one; more are only counted."""


def run_node(setup: Setup, id: NodeId, slots: Slots, start: control.StartNodes, pair: KeyPair | None = None) -> int:
    """From fork to exit; returns the exit code. `pair` are the node's keys, unless it has them in a folder."""
    try:
        if start.key_folder is not None:
            pair = read_pair(Path(start.key_folder), id, start.public_keys[id])
    except LaunchError as error:
        print(f"node {id}: {error}", file=sys.stderr)  # to the run's nodes.log; the supervisor would not let it in
        return control.EXIT_UNUSABLE_KEYS
    try:
        if start.namespaces:
            enter(start.namespaces[id])  # before there is a socket, or a thread that would make one
        return asyncio.run(_live(setup, id, slots, start, pair))
    except Exception:
        traceback.print_exc()  # to the run's nodes.log; the supervisor sees the exit code
        return 1


async def _live(setup: Setup, id: NodeId, slots: Slots, start: control.StartNodes, pair: KeyPair | None) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Enough for a connection to everybody, and for those that linger after their place was needed.
    context.set(zmq.MAX_SOCKETS, 2 * setup.experiment.size + 128)
    lines = RecordFile(RunFolder(Path(start.folder)).node(id))
    strangers = _Rejections(lines, "stranger refused")
    assert (pair is None) == (start.coordinator_key is None)
    seal = None if pair is None else Seal(context, pair, strangers, asyncio.get_running_loop().time, math.inf)
    line = CoordinatorLink(context, start.coordinator, seal, start.coordinator_key)
    try:
        await _take_part(setup, id, slots, start, context, line, lines, seal, strangers)
    except Exception as error:
        text = str(error) if isinstance(error, LaunchError) else traceback.format_exc()
        if len(text) > LAST_WORDS:
            print(f"node {id}: {text}", file=sys.stderr)  # to the run's nodes.log
            text = f"… {text[-LAST_WORDS:]}"
        line.say(control.NodeFailed(id, start.run, text))
        line.close()
        if seal is not None:
            seal.close()
        context.term()  # waits until that is said
        return 1
    return 0  # all is said and done: the process ends, and its sockets with it


async def _take_part(
    setup: Setup,
    id: NodeId,
    slots: Slots,
    start: control.StartNodes,
    context: zmq.Context[zmq.Socket[bytes]],
    line: CoordinatorLink,
    lines: RecordFile,
    seal: Seal | None,
    strangers: _Rejections,
) -> None:
    experiment, folder = setup.experiment, RunFolder(Path(start.folder))
    plan = experiment.processes
    mailbox = Mailbox(MessageBudget(setup.initial.nbytes, experiment.size))
    rejected = _Rejections(lines, "message rejected")
    host = address(id) if start.namespaces else plan.host
    delay = _delay(setup, id, mailbox)
    transport = Transport(
        context,
        id=id,
        run=start.run,
        host=host,
        announce=plan.announce or host,
        port=None if plan.base_port is None else plan.base_port + id,
        max_message_bytes=int(plan.max_message_mib * 2**20),
        connections=plan.connections or max(64, _first_peers(setup, id)),
        send_timeout=plan.hang_timeout,
        deliver=mailbox.put if delay is None else delay.take,
        reject=rejected,
        seal=seal,
    )

    def mark_failed(node: NodeId, at: float) -> None:
        mailbox.mark_failed(node)
        transport.mark_failed(node)
        if shaper is not None:
            shaper.mark_failed(node, at)
        if delay is not None:
            delay.mark_failed(node)

    def find(back: control.PeerRestarted) -> None:
        if seal is not None and back.key is not None:
            seal.allow(str(back.node), back.key)
        transport.move(back.node, back.endpoint)

    shaper: Shaper | None = None
    line.on_gone = mark_failed
    line.on_back = find
    line.on_stop = lambda stop: os._exit(0)
    guard = None if seal is None else asyncio.create_task(seal.serve())
    born = asyncio.get_running_loop().time()
    line.say(control.NodeListening(id, start.run, transport.endpoint))
    go = await line.go
    if seal is not None:
        seal.allow_all({str(node_id): key for node_id, key in enumerate(go.public_keys)})
        seal.key_wait = KEY_WAIT_SECONDS if start.key_folder is None and setup.environment.restarts else 0.0
    if go.network_endpoint is not None:
        budget = MessageBudget(setup.initial.nbytes, experiment.size)
        shaper = Shaper(context, id, go.network_endpoint, transport, mailbox.put, seal, go.network_key, budget)
        transport.redeem = shaper.take
    transport.start(go.endpoints)
    serves = id >= experiment.nodes
    runtime = ProcessRuntime(
        id,
        transport,
        mailbox,
        slots,
        experiment.nodes / slots.count,
        plan.hang_timeout,
        serves,
        shaper,
        setup.speeds[id],
        go.epoch,
    )
    if guard is not None:
        guard.add_done_callback(lambda ended: _fail_with(runtime, ended))
    runtime.set_online(not go.offline)
    watcher = NodeObserver(id, lines, line, [] if start.restarted else experiment.faults(id))
    watcher.now = rejected.now = strangers.now = runtime.now
    watcher.runtime = runtime
    line.on_attend, line.on_strike = runtime.set_online, watcher.strike
    if setup.environment.timing_matters:
        watcher.later = DeferredEvaluations(folder)
    if start.restarted and experiment.evaluation.seconds is not None:
        watcher.ticks = int(runtime.now() / experiment.evaluation.seconds)  # not those of its first life
    node = setup.node(id, runtime, watcher, start.run, plan.receive_timeout)
    leaving: set[asyncio.Task[None]] = set()

    def leave(stop: control.Finish) -> None:
        if experiment.checkpoint.final and not leaving:
            folder.save_model(id, node.params)
        if watcher.later is None:
            os._exit(0)
        if not leaving:
            pulse.cancel()  # from now on only what is tested is a sign of life
            ticks.cancel()
            _look_at_the_last(node, watcher, stop, experiment.evaluation.seconds)
            leaving.add(asyncio.create_task(_leave(node, runtime, watcher, slots, line)))

    line.on_stop = leave
    pulse = asyncio.create_task(_beat(id, runtime, line, plan.hang_timeout / BEATS))
    ticks = asyncio.create_task(_tick(node, runtime, watcher, None if serves else experiment.evaluation.seconds))
    for dead in go.failed_nodes:
        mark_failed(dead, born)
    if start.restarted:
        others = set(range(experiment.nodes)) - {id}
        for other in others:
            mailbox.mark_failed(other)  # until they have answered
        life = _relive(setup, node, others.difference(go.failed_nodes))
    else:
        if setup.environment.restarts:
            runtime.background(answer_rejoining_peers(node))
        life = setup.run_node(node)
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
    release_memory()
    if id < experiment.nodes or not line.finish.done():
        line.say(control.NodeDone(id))
    used = process_memory()  # while all others are still alive
    finish = await line.finish
    ticks.cancel()
    _look_at_the_last(node, watcher, finish, experiment.evaluation.seconds)
    if watcher.later is not None:
        async for evaluation in _tested(node, watcher.later.test(node), slots, line):
            watcher.record(evaluation)
    if seal is not None:
        seal.count_remaining()
    end = End(
        ended,
        digest=hashlib.sha256(node.params.tobytes()).hexdigest(),
        bytes_sent=node.bytes_sent,
        messages_sent=node.messages_sent,
        bad_messages=node.rejected + rejected.count,
        late_messages=mailbox.late + mailbox.dropped + (0 if shaper is None else shaper.dropped),
        repeated_messages=mailbox.repeated,
        unsent_messages=transport.unsent,
        unauthenticated_connections=strangers.count,
        train_cpu_s=node.trainer.cpu_seconds,
        total_cpu_s=cpu,
        uss_mib=None if used is None else used.uss,
        pss_mib=None if used is None else used.pss,
        padded_s=runtime.padded or None,
    )
    lines.write(end)
    if guard is not None:
        guard.cancel()
    transport.close()


def _fail_with(runtime: ProcessRuntime, ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        runtime.fail(error)


def _delay(setup: Setup, id: NodeId, mailbox: Mailbox) -> Delay | None:
    """What latency, jitter and loss are left to where the kernel shapes messages."""
    environment = setup.environment
    if environment.access_links is None or environment.timeline is None:
        return None
    return Delay(environment.timeline.initial_state, id, setup.experiment.seed, mailbox.put)


def _first_peers(setup: Setup, id: NodeId) -> int:
    """How many others a node talks to in its first round; one that serves talks to all."""
    nodes = setup.experiment.nodes
    return len(setup.mixing.peers(id, 0).to) if id < nodes else nodes


async def _relive(setup: Setup, node: Node, others: Collection[NodeId]) -> None:
    await node.sleep(0.0)  # until it is online
    if await rejoin(node, others):
        await setup.run_node(node)


async def _tick(node: Node, runtime: ProcessRuntime, watcher: NodeObserver, seconds: float | None) -> None:
    """Keep the model as it is every so many seconds of the run; whoever is late keeps it as it is then."""
    while seconds is not None:
        await asyncio.sleep(max(0.0, (watcher.ticks + 1) * seconds - runtime.now()))
        _look(node, watcher, watcher.ticks + 1, (watcher.ticks + 1) * seconds)


def _look(node: Node, watcher: NodeObserver, tick: int, time: float) -> None:
    watcher.ticks = tick
    round = max(0, node.next_round - 1)
    if watcher.later is not None and node.context.schedule.evaluated:
        watcher.later.keep(round, time, node.params, tick)
    if node.context.schedule.averaged:
        watcher.model(round, node.params, tick)


def _look_at_the_last(node: Node, watcher: NodeObserver, finish: control.Finish, seconds: float | None) -> None:
    """Keep the model as it is at the end, unless the clock has just had it kept; and at the moments before that this
    node is late for, which the others may have kept. Moments after the last, of a node that hears late of the end, are
    none."""
    if seconds is None or finish.tick is None or node.id >= node.nodes:
        return
    if watcher.later is not None:
        watcher.later.forget_after(finish.tick)
    for tick in range(watcher.ticks + 1, finish.tick):
        _look(node, watcher, tick, tick * seconds)
    if watcher.ticks < finish.tick:
        _look(node, watcher, finish.tick, finish.time)


async def _tested(
    node: Node, evaluations: Iterator[Evaluation], slots: Slots, line: CoordinatorLink
) -> AsyncIterator[Evaluation]:
    """Test models that were kept, one after another, and let the supervisor know that this goes on."""
    thread = TrainingThread()

    def test() -> Evaluation | None:
        with slots.taken(node.id):
            return next(evaluations, None)

    while (evaluation := await thread.call(test)) is not None:
        line.say(control.Heartbeat(node.id, busy=True))
        yield evaluation
    thread.end()


async def _leave(
    node: Node, runtime: ProcessRuntime, watcher: NodeObserver, slots: Slots, line: CoordinatorLink
) -> None:
    """The run is being stopped: of the models that were kept, test the latest and as many more as there is time for,
    and go."""
    until = time.monotonic() + LEAVE_SECONDS
    try:
        assert watcher.later is not None
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
    life: Coroutine[Any, Any, None],
    line: CoordinatorLink,
    runtime: ProcessRuntime,
    serves: bool,
    duration: float | None,
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


async def _beat(id: NodeId, runtime: ProcessRuntime, line: CoordinatorLink, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        line.say(control.Heartbeat(id, runtime.busy))


class _Rejections:
    """Counts what was refused, messages or strangers, and records the first ones."""

    def __init__(self, lines: RecordFile, what: str) -> None:
        self.count = 0
        self.now: Any = lambda: 0.0
        self._lines = lines
        self._what = what

    def __call__(self, why: str) -> None:
        self.count += 1
        if self.count <= REJECTIONS_RECORDED:
            self._lines.write(Event(self._what, self.now(), why))
