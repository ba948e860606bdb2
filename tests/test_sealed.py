"""Sealed links: what travels cannot be read, changed or sent again, and nobody gets in who is not on the list."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from conftest import until
from shoal.engines.processes import control, sealing
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.keys import KeyPair, make_keys
from shoal.engines.processes.network_process import NetworkProcess, NodeReports
from shoal.engines.processes.node_starter import NodeStarter
from shoal.engines.processes.sealing import Seal, _HandshakeCounter, authenticated_sender
from shoal.engines.processes.shaper import (
    NetworkAddress,
    Registration,
    Shaper,
    Submission,
    decode_network_reports,
    encode,
    identity,
)
from shoal.engines.processes.transport import Transport
from shoal.errors import ExperimentError, LaunchError, MessageError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.mailbox import Filter, Mailbox
from shoal.message import RUN_LENGTH, Message, Payload, address
from shoal.results.records import Event
from shoal.testing import Faults
from test_processes import NODES, ROUNDS, Started, listens_on, started

pytestmark = pytest.mark.usefixtures("no_process_is_left")

RUN = "r" * RUN_LENGTH
SECRET = np.random.default_rng(7).standard_normal(2000).astype(np.float32)
LONG = 120.0
"""Seconds for what takes a moment on a machine that has time."""


def said(sender: int = 0, round: int = 0, values: Any = SECRET) -> Message:
    return Message(sender, "model", round, Payload({"params": values}).frozen(), RUN)


class Place:
    """A node's sockets, in a ZeroMQ of its own, as in a process of its own."""

    def __init__(self, id: int, pair: KeyPair | None, key_wait: float = 0.0) -> None:
        self.id = id
        self.context: zmq.Context[Any] = zmq.Context()
        self.came: list[Message] = []
        self.rejected: list[str] = []
        self.strangers: list[str] = []
        self.seal = None
        if pair is not None:
            self.seal = Seal(self.context, pair, self.strangers.append, time.monotonic, key_wait)
        self.transport = Transport(
            self.context,
            id=id,
            run=RUN,
            host="127.0.0.1",
            port=None,
            max_message_bytes=2**24,
            connections=8,
            send_timeout=LONG,
            deliver=self.came.append,
            reject=self.rejected.append,
            seal=self.seal,
        )
        self._guarding: asyncio.Task[None] | None = None

    def start(self, endpoints: list[str], pairs: list[KeyPair]) -> None:
        if self.seal is not None:
            for node, pair in enumerate(pairs):
                self.seal.allow(str(node), pair.public)
            self._guarding = asyncio.create_task(self.seal.serve())
        self.transport.start(endpoints)

    def close(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        self.transport.close()
        if self.seal is not None:
            self.seal.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def places(
    sealed: bool = True, count: int = 2, through: Callable[[str], str] = str, key_wait: float = 0.0
) -> AsyncIterator[list[Place]]:
    """Nodes that know each other's endpoints and keys. What is sent to node 0 goes by way of `through`."""
    pairs = [KeyPair.fresh() for _ in range(count)] if sealed else []
    found = [Place(id, pairs[id] if sealed else None, key_wait) for id in range(count)]
    endpoints = [place.transport.endpoint for place in found]
    try:
        for place in found:
            place.start([through(endpoints[0]), *endpoints[1:]], pairs)
        async with asyncio.timeout(LONG):
            yield found
    finally:
        for place in found:
            place.close()


async def soon(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - threads and sockets set no event
        await asyncio.sleep(0.01)


def in_time(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@contextlib.contextmanager
def knocking(endpoint: str, pair: KeyPair | None = None, key: bytes | None = None) -> Any:
    """A socket of somebody's, with these keys of its own, who takes `key` to be that of whom it knocks at."""
    context: zmq.Context[Any] = zmq.Context()
    push = context.socket(zmq.PUSH)
    if pair is not None and key is not None:
        push.curve_publickey, push.curve_secretkey, push.curve_serverkey = pair.public, pair.secret, key
    push.connect(endpoint)
    try:
        yield push
    finally:
        context.destroy(linger=0)


class Wire:
    """All that goes over a TCP connection, for somebody in the middle to read and change."""

    def __init__(self) -> None:
        self.seen = bytearray()
        """What the clients sent, of all connections."""
        self.connections = 0
        self.ended = 0
        self.change: Callable[[bytes], bytes] | None = None
        """What the next bytes of a client become; then it is None again."""
        self._listener = socket.create_server(("127.0.0.1", 0))

    def to(self, endpoint: str) -> str:
        self._port = int(endpoint.rpartition(":")[2])
        threading.Thread(target=self._serve, daemon=True).start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._port))
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if forward:
                    self.seen += data
                    if (change := self.change) is not None:
                        self.change = None
                        data = change(data)
                target.sendall(data)
        self.ended += 1
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # the other thread still reads from it
            each.close()


@pytest.fixture
def wire() -> Any:
    wire = Wire()
    yield wire
    wire.close()


# Who listens in


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_an_eavesdropper_reads_a_plain_link_and_not_a_sealed_one(wire: Wire, sealed: bool) -> None:
    async def body() -> None:
        async with places(sealed, through=wire.to) as (receiver, sender):
            assert await sender.transport.send(0, said(1))
            await soon(lambda: receiver.came)
            np.testing.assert_array_equal(receiver.came[0].payload.arrays["params"], SECRET)

    in_time(body)
    for open_text in (SECRET.tobytes(), SECRET[:4].tobytes(), RUN.encode(), b"model"):
        assert (open_text in wire.seen) is not sealed


def test_what_was_changed_on_the_way_is_not_taken_in_and_the_next_message_is(wire: Wire) -> None:
    def flipped(data: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in data)  # a single one may be of a frame's head, and change nothing that counts

    async def body() -> None:
        async with places(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, said(1, round=0))
            await soon(lambda: receiver.came)
            wire.change = flipped
            await sender.transport.send(0, said(1, round=1))
            while len(receiver.came) < 2:  # over the next connection; what was in the last one is lost
                await sender.transport.send(0, said(1, round=2))
                await asyncio.sleep(0.05)
            assert wire.connections == 2
            for message in receiver.came:
                np.testing.assert_array_equal(message.payload.arrays["params"], SECRET)
            assert not receiver.rejected
            assert not receiver.strangers

    in_time(body)


def test_what_was_recorded_and_is_sent_again_is_not_taken_in(wire: Wire) -> None:
    async def body() -> None:
        async with places(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, said(1, round=0, values=SECRET[:10]))
            await soon(lambda: receiver.came)
            wire.change = lambda data: data + data  # one small message, and the same bytes once more
            await sender.transport.send(0, said(1, round=1, values=SECRET[:10]))
            await soon(lambda: wire.ended and len(receiver.came) > 1)
            assert [m.round for m in receiver.came] == [0, 1]

    in_time(body)


# Strangers


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("one without a key", "no key, or an invalid handshake"),
        ("one whose key nobody knows", "not on the list of keys"),
        ("one that takes us for another", "no key, or an invalid handshake"),
    ],
)
def test_strangers_are_refused_and_counted_and_those_on_the_list_are_not(who: str, why: str) -> None:
    async def body() -> None:
        async with places() as (receiver, sender):
            assert receiver.seal is not None
            assert sender.seal is not None
            keys = {
                "one without a key": (None, None),
                "one whose key nobody knows": (KeyPair.fresh(), receiver.seal.pair.public),
                "one that takes us for another": (sender.seal.pair, KeyPair.fresh().public),
            }
            with knocking(receiver.transport.endpoint, *keys[who]) as push:
                push.send_multipart([address(0), *said(1, round=7).frames()], zmq.NOBLOCK)
                await soon(lambda: any(why in stranger for stranger in receiver.strangers))
            await sender.transport.send(0, said(1, round=0))
            await soon(lambda: receiver.came)
            assert [message.round for message in receiver.came] == [0]
            assert receiver.rejected == []

    in_time(body)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0", b"", bytes(1000)], ids=repr)
def test_what_is_no_zeromq_does_not_disturb_and_is_counted(first: bytes) -> None:
    async def body() -> None:
        async with places() as (receiver, sender):
            port = int(receiver.transport.endpoint.rpartition(":")[2])
            await sender.transport.send(0, said(1, round=0))
            await soon(lambda: receiver.came)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(first)
                await sender.transport.send(0, said(1, round=1))
                await soon(lambda: len(receiver.came) == 2)
            await soon(lambda: receiver.strangers)
            assert len(receiver.strangers) == 1

    in_time(body)


CAME, LET_IN, LEFT = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_those_at_a_door_are_told_apart_in_time_and_nobody_is_suspected_too_early(visits: Any, random: Any) -> None:
    """A visit: whether it is let in, and if so, whether it leaves before the end."""
    steps: list[tuple[float, int, int]] = []
    for number, (let_in, leaves) in enumerate(visits):
        moments = sorted(random.uniform(0, 20) for _ in range(3))
        steps.append((moments[0], CAME, number))
        if let_in:
            steps.append((moments[1], LET_IN, number))
        if leaves or not let_in:
            steps.append((moments[2], LEFT, number))
    counter, counted, turned_away = _HandshakeCounter(), 0, 0
    for now, event, number in sorted(steps, key=lambda step: step[0]):
        counter.note(event, 0 if event == LET_IN else number, now)
        counted += counter.newly_failed(now)
        if event == LEFT and not visits[number][0]:
            turned_away += 1
        assert counted <= turned_away, "one that was let in, or may yet be, is taken for a stranger"
    counted += counter.newly_failed(100.0)
    assert counted == turned_away == sum(not let_in for let_in, _ in visits)


def test_who_is_on_the_list_cannot_speak_for_another() -> None:
    async def body() -> None:
        async with places(count=3) as (receiver, sender, liar):
            await liar.transport.send(0, said(1))
            await soon(lambda: receiver.rejected)
            assert receiver.rejected == ["node 2 sent a message in the name of node 1"]
            await sender.transport.send(0, said(1))
            await soon(lambda: receiver.came)
            assert len(receiver.came) == 1

    in_time(body)


def test_who_is_on_the_list_cannot_give_receipts_for_another() -> None:
    async def body() -> None:
        async with places(count=3) as (sender, receiver, liar):
            receiver.transport.require_tickets(lambda message, ticket: receiver.came.append(message))  # and sends none
            transmitting = asyncio.create_task(sender.transport.transmit(1, said()))
            await soon(lambda: receiver.came)
            assert sender.seal is not None
            assert liar.seal is not None
            (ticket,) = sender.transport._receipts
            with knocking(sender.transport.endpoint, liar.seal.pair, sender.seal.pair.public) as push:
                push.send_multipart([address(0, ticket), RUN.encode()])
                await soon(lambda: sender.rejected)
            assert sender.rejected == ["node 2 returned a receipt for a message to node 1"]
            assert not transmitting.done()
            transmitting.cancel()

    in_time(body)


def test_a_message_for_another_is_dropped_though_its_sender_is_on_the_list() -> None:
    async def body() -> None:
        async with places(count=3) as (receiver, sender, _):
            assert receiver.seal is not None
            assert sender.seal is not None
            with knocking(receiver.transport.endpoint, sender.seal.pair, receiver.seal.pair.public) as push:
                push.send_multipart([address(2), *said(1).frames()])
                push.send_multipart([address(0), *said(1).frames()])
                await soon(lambda: receiver.came)
            assert receiver.rejected == ["a message for node 2, and this is node 0"]
            assert len(receiver.came) == 1

    in_time(body)


def test_a_message_that_its_sender_repeats_is_received_once() -> None:
    async def body() -> None:
        async with places() as (receiver, sender):
            for round in (0, 0, 1):
                await sender.transport.send(0, said(1, round))
            await soon(lambda: len(receiver.came) == 3)
            mailbox = Mailbox()
            for message in receiver.came:
                mailbox.put(message)
            got = [mailbox.start_receive(Filter("model", round, (1,)), lambda: None).messages for round in (0, 1)]
            assert [[m.round for m in messages] for messages in got] == [[0], [1]]
            assert mailbox.repeated == 1

    in_time(body)


# Nobody gets in unasked


def test_where_nobody_answers_who_knocks_nothing_gets_in() -> None:
    async def body() -> None:
        receiver, sender = (Place(id, KeyPair.fresh()) for id in range(2))
        assert receiver.seal is not None
        assert sender.seal is not None
        pairs = [receiver.seal.pair, sender.seal.pair]
        endpoints = [receiver.transport.endpoint, sender.transport.endpoint]
        try:
            sender.start(endpoints, pairs)
            receiver.transport.start(endpoints)  # it reads what comes, and does not say whom it lets in
            await sender.transport.send(0, said(1))
            await asyncio.sleep(0.5)
            assert receiver.came == []
            receiver.start(endpoints, pairs)
            await asyncio.wait_for(soon(lambda: receiver.came), LONG)
        finally:
            receiver.close()
            sender.close()

    in_time(body)


def test_with_the_list_gone_nobody_is_let_in_any_longer() -> None:
    async def body() -> None:
        async with places() as (receiver, sender):
            assert receiver.seal is not None
            receiver.seal._zap.close()
            await sender.transport.send(0, said(1))
            await asyncio.sleep(0.5)
            assert receiver.came == []

    in_time(body)


def test_a_sealed_sender_does_not_speak_to_a_plain_listener() -> None:
    async def body() -> None:
        plain, sealed = Place(0, None), Place(1, KeyPair.fresh())
        try:
            plain.start([plain.transport.endpoint, sealed.transport.endpoint], [])
            sealed.start([plain.transport.endpoint, sealed.transport.endpoint], [KeyPair.fresh(), KeyPair.fresh()])
            await sealed.transport.send(0, said(1))
            await asyncio.sleep(0.5)
            assert (plain.came, plain.rejected) == ([], [])
        finally:
            plain.close()
            sealed.close()

    in_time(body)


def test_a_frame_that_did_not_come_over_a_sealed_link_has_no_speaker() -> None:
    with pytest.raises(MessageError, match="not sealed"):
        authenticated_sender(zmq.Frame(b"x"))


# Keys that change


def test_one_whose_key_is_still_on_its_way_waits_and_is_let_in_under_its_new_key_only() -> None:
    async def body() -> None:
        async with places(key_wait=LONG) as (receiver, sender):
            assert receiver.seal is not None
            new, old = KeyPair.fresh(), sender.seal.pair  # type: ignore[union-attr]
            endpoint, key = receiver.transport.endpoint, receiver.seal.pair.public
            with knocking(endpoint, new, key) as push:
                push.send_multipart([address(0), *said(1).frames()])
                await asyncio.sleep(0.3)
                assert (receiver.came, receiver.strangers) == ([], [])
                receiver.seal.allow("1", new.public)
                await soon(lambda: receiver.came)
            receiver.seal.key_wait = 0.0
            with knocking(endpoint, old, key):
                await soon(lambda: receiver.strangers)

    in_time(body)


def test_two_that_exchange_their_keys_are_both_let_in() -> None:
    async def body() -> None:
        async with places(count=3) as (receiver, *senders):
            assert receiver.seal is not None
            pairs = [sender.seal.pair for sender in senders if sender.seal is not None]
            receiver.seal.allow_all({"1": pairs[1].public, "2": pairs[0].public})
            for name, pair in ((2, pairs[0]), (1, pairs[1])):
                with knocking(receiver.transport.endpoint, pair, receiver.seal.pair.public) as push:
                    push.send_multipart([address(0), *said(name).frames()])
                    await soon(lambda: [m.sender for m in receiver.came][-1:] == [name])  # noqa: B023
            assert receiver.rejected == receiver.strangers == []

    in_time(body)


def test_who_guards_no_longer_leaves_nobody_at_the_door() -> None:
    async def body() -> None:
        async with places() as (place, _):
            assert place.seal is not None
            assert place._guarding is not None
            await asyncio.sleep(0)
            loop, doors = asyncio.get_running_loop(), [socket.FD for socket in place.seal.sockets]
            place._guarding.cancel()
            await asyncio.wait([place._guarding])
            assert [loop.remove_reader(door) for door in doors] == [False] * len(doors)

    in_time(body)


def test_one_whose_key_nobody_comes_to_know_is_refused_in_the_end() -> None:
    async def body() -> None:
        async with places(key_wait=0.3) as (receiver, _):
            assert receiver.seal is not None
            with knocking(receiver.transport.endpoint, KeyPair.fresh(), receiver.seal.pair.public) as push:
                push.send_multipart([address(0), *said(1).frames()])
                await soon(lambda: receiver.strangers)
            assert receiver.came == []

    in_time(body)


# Whole runs


def by_simulation(run: Started, folder: Path) -> dict[str, Any]:
    freely = {"engine": "simulation", "algorithm.held": ROUNDS}
    return Experiment.from_file(run.folder.experiment, freely).run(folder).summary


def test_a_sealed_run_learns_what_a_plain_one_does_and_counts_strangers_at_every_door(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", NODES)
    sealed = ("processes={sealed=true, keys='keys'}", "network={name='uniform', latency=0.001}")
    with started(tmp_path, *sealed, held=1) as going:
        going.wait_for_round(0)
        network, *nodes = sorted(going.zygote.children(), key=lambda p: p.create_time())
        doors = [listens_on(p) for p in (nodes[0], network, psutil.Process(going.process.pid))]
        with contextlib.ExitStack() as stack:
            for port in doors:
                stack.enter_context(knocking(f"tcp://127.0.0.1:{port}"))
                stack.enter_context(knocking(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), KeyPair.fresh().public))
            until(lambda: going.folder.node(0).read_text().count("unauthenticated connection") >= 2)
            until(lambda: going.output.count("the coordinator rejected an unauthenticated connection") >= 2)
            until(
                lambda: "the network process rejected an unauthenticated connection" in going.output
            )  # once for several
        going.release()
        code, out = going.end()
    assert code == 0, out
    summary = going.summary
    assert summary["status"] == "completed"
    at_nodes = summary["events"]["unauthenticated connection"]
    assert at_nodes >= 2
    assert summary["unauthenticated_connections"] >= at_nodes + 2 + 1
    assert summary["messages_rejected"] == summary["messages_repeated"] == 0
    simulated = by_simulation(going, tmp_path / "simulated")
    for key in ("digest", "bytes_sent", "messages_sent"):
        assert summary[key] == simulated[key]


def restarting(**processes: Any) -> Experiment:
    """A sealed run in which node 2 dies, and is started again."""
    return Experiment(
        nodes=4,
        seed=1,
        engine="processes",
        algorithm={"name": "dpsgd", "rounds": 24},
        topology={"name": "full"},
        model={"name": "mlp", "hidden": (8,)},
        training={"batch_size": 8, "local_steps": 1},
        device={"step_seconds": 0.3},
        evaluation={"every": 0, "average": False, "samples": 20},
        processes={"sealed": True, **processes},
        fault=Faults().crash(2).at(2.0).restart(2).at(2.5).schedule,
    )


def test_a_node_that_is_started_again_comes_back_into_a_sealed_run_with_a_new_key(tmp_path: Path) -> None:
    run = restarting().run(tmp_path)
    assert run.summary["status"] == "completed"
    events = [record.what for record in run.folder.read(2) if isinstance(record, Event)]
    assert "rejoined" in events
    assert run.summary["messages_rejected"] == 0
    # Whoever dies while it is shaking hands leaves as one that was not let in: at most at each of the others.
    assert run.summary["unauthenticated_connections"] <= 3


def small(**processes: Any) -> Experiment:
    training = {"batch_size": 8, "local_steps": 1}
    return Experiment(nodes=4, engine="processes", training=training, processes={"sealed": True, **processes})


def test_keys_that_cannot_seal_a_run_end_it_before_anything_is_started(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    (tmp_path / "keys" / "node-0.key_secret").chmod(0o640)
    with pytest.raises(LaunchError, match="links cannot be sealed") as refused:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "others may read this secret" in str(refused.value)
    assert "node-3.key' is missing" in str(refused.value)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_that_change_while_a_run_starts_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_all = NodeStarter.start_all

    def late(starter: NodeStarter, request: control.StartNodes) -> None:
        make_keys(tmp_path / "keys", 4, force=True)
        start_all(starter, request)

    make_keys(tmp_path / "keys", 4)
    monkeypatch.setattr(NodeStarter, "start_all", late)
    with pytest.raises(LaunchError, match=r"node \d could not start: .*changed since the run began") as refused:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "shoal keys check" in str(refused.value)


def test_a_node_that_is_started_again_after_its_keys_have_changed_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = NodeStarter.restart

    def late(starter: NodeStarter, nodes: Collection[int]) -> None:
        make_keys(tmp_path / "keys", 4, force=True)
        restart(starter, nodes)

    make_keys(tmp_path / "keys", 4)
    monkeypatch.setattr(NodeStarter, "restart", late)
    summary = restarting(keys=tmp_path / "keys").run(tmp_path).summary
    assert summary["status"] == "incomplete"
    assert summary["lost"].keys() == {"2"}
    assert "changed since the run began" in summary["lost"]["2"]


def test_without_curve_nothing_is_sent_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(LaunchError, match="built without CURVE"):
        small().run(tmp_path)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_without_sealed_links_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"the keys have no effect without processes\.sealed = true"):
        small(sealed=False, keys=tmp_path)


# Keys that are told late, and many that knock


def test_a_supervisor_that_hears_of_a_key_after_its_owner_has_knocked_lets_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = Seal.answer_pending

    def late(seal: Seal) -> None:
        if 0 < len(seal._owners) < 4:
            time.sleep(0.3)  # the zygote starts more nodes meanwhile
        attend(seal)

    monkeypatch.setattr(Seal, "answer_pending", late)
    quick = {"model": {"name": "mlp"}, "algorithm": {"name": "dpsgd", "rounds": 1}, "evaluation": {"samples": 20}}
    summary = Experiment.from_table({**small().to_table(), **quick}).run(tmp_path).summary
    assert (summary["status"], summary["unauthenticated_connections"]) == ("completed", 0)


def test_of_more_than_may_wait_nobody_who_belongs_here_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MAX_WAITING", 2)
    monkeypatch.setattr(sealing, "HANDSHAKE_SECONDS", 1.0)

    async def body() -> None:
        pairs = [KeyPair.fresh() for _ in range(6)]
        receiver, *senders = found = [Place(id, pair, key_wait=math.inf) for id, pair in enumerate(pairs)]
        endpoints = [place.transport.endpoint for place in found]
        try:
            for sender in senders:
                sender.start(endpoints, pairs)
                await sender.transport.send(0, said(sender.id))
            assert receiver.seal is not None
            for _ in range(50):  # it knows nobody's key yet
                receiver.seal.answer_pending()
                await asyncio.sleep(0.01)
            assert receiver.seal.waiting == 2
            receiver.start(endpoints, pairs)
            await asyncio.wait_for(soon(lambda: len(receiver.came) == 5), LONG)
            assert {message.sender for message in receiver.came} == {1, 2, 3, 4, 5}
        finally:
            for place in found:
                place.close()

    in_time(body)


def test_those_that_zeromq_has_hung_up_on_do_not_wait_for_an_answer_any_longer() -> None:
    clock, refused = [0.0], list[str]()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        seal = Seal(context, KeyPair.fresh(), refused.append, lambda: clock[0], key_wait=math.inf)
        seal.secure_server(inbox)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        with knocking(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), seal.pair.public):
            until(lambda: seal.answer_pending() or seal.waiting)
        clock[0] = sealing.HANDSHAKE_SECONDS
        seal.answer_pending()
        assert not seal.waiting
        seal.close()


CLOSE = """
import socket, time, zmq
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.sealing import Seal

context = zmq.Context()
inbox = context.socket(zmq.PULL)
inbox.setsockopt(zmq.BACKLOG, 4096)
seal = Seal(context, KeyPair.fresh(), print, time.monotonic)
seal.secure_server(inbox)
port = inbox.bind_to_random_port("tcp://127.0.0.1")
for _ in range(1500):
    socket.create_connection(("127.0.0.1", port)).close()
time.sleep(0.5)
seal.close()
inbox.close()
context.term()
"""
"""Each that comes and goes is two events, of which ZeroMQ would keep 2,000."""


def test_a_seal_closes_though_more_have_come_and_gone_than_anybody_looked_at() -> None:
    # In a process of its own: one that is stuck in there keeps all of its threads from going on.
    subprocess.run([sys.executable, "-c", CLOSE], check=True, timeout=LONG)


def test_without_the_other_ones_key_a_sealed_process_says_nothing() -> None:
    async def body() -> None:
        nowhere = NetworkAddress("tcp://127.0.0.1:9")
        async with places() as (place, _):
            for connect in (
                lambda: CoordinatorLink(place.context, "tcp://127.0.0.1:9", cast(Any, None), place.seal),
                lambda: Shaper(place.context, 0, nowhere, place.transport, print, seal=place.seal),
            ):
                with pytest.raises(LaunchError, match="links are sealed"):
                    connect()

    in_time(body)


# At the network's door


def from_socket(*messages: list[bytes]) -> Any:
    """A socket with these messages, and no more."""
    left = [[zmq.Frame(frame) for frame in message] for message in messages]

    def receive(*_: Any, **__: Any) -> list[zmq.Frame]:
        if not left:
            raise zmq.Again
        return left.pop(0)

    return SimpleNamespace(recv_multipart=receive)


def test_a_flood_of_messages_does_not_keep_the_network_process_from_its_other_work() -> None:
    flood = from_socket(*[[b"x", b"garbage"]] * 20_000)
    assert NodeReports(flood, 4, cast(Any, None), None, print).read() == []
    assert flood.recv_multipart(), "the rest waits for another turn"


def reach(socket: zmq.Socket[Any], pair: KeyPair, key: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, key


class Network:
    """The network's process in a thread of its own, sealed. It has begun, and knows the nodes' keys."""

    def __init__(self, pairs: list[KeyPair]) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._supervisor = self.context.socket(zmq.ROUTER)
        seal = Seal(self.context, KeyPair.fresh(), print, time.monotonic)
        seal.secure_server(self._supervisor)
        port = self._supervisor.bind_to_random_port("tcp://127.0.0.1")
        start = control.StartNodes([], f"tcp://127.0.0.1:{port}", RUN, "", coordinator_key=seal.pair.public)
        self.pair = KeyPair.fresh()
        seal.allow(sealing.NETWORK_PROCESS, self.pair.public)
        setup = Setup(Experiment.from_table({**small().to_table(), "network": {"name": "uniform", "latency": 0.001}}))
        process = NetworkProcess(setup, start, self.pair)
        self._thread = threading.Thread(target=process.serve, daemon=True)
        self._thread.start()
        until(lambda: seal.answer_pending() or self._supervisor.poll(0))
        self._line, hello = self._supervisor.recv_multipart()
        self.endpoint = control.decode_from_node(hello).endpoint
        self.address = NetworkAddress(self.endpoint, self.pair.public)
        self._seal = seal
        self._tell(control.Start([], time.monotonic(), public_keys=[pair.public for pair in pairs]))

    def heard(self) -> control.FromNode:
        assert self._supervisor.poll(LONG * 1000)
        return control.decode_from_node(self._supervisor.recv_multipart()[1])

    def finish(self) -> control.FromNode:
        self._tell(control.Finish())
        return self.heard()

    def close(self) -> None:
        self._tell(control.Finish())
        self._thread.join(LONG)
        self._seal.close()
        self.context.destroy(linger=0)

    def _tell(self, what: control.ToNode) -> None:
        self._supervisor.send_multipart([self._line, control.encode(what)])


def test_the_network_reports_all_strangers_at_the_end_whenever_they_came() -> None:
    def knock() -> None:
        with socket.create_connection(("127.0.0.1", int(network.endpoint.rpartition(":")[2])), LONG) as raw:
            raw.sendall(bytes(100))
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(1000):  # until it is hung up on
                    pass

    with contextlib.closing(Network([])) as network:
        knock()
        first = network.heard()
        assert isinstance(first, control.UnauthenticatedConnections)
        assert (first.count, first.final) == (1, False)
        knock()  # within the time in which no other report would be made
        last = network.finish()
        assert isinstance(last, control.UnauthenticatedConnections)
        assert (last.count, last.final) == (2, True)


def test_a_node_that_takes_the_name_of_another_at_the_network_neither_hears_nor_speaks_for_it() -> None:
    async def body() -> None:
        async with places(count=3) as found:
            pairs = [place.seal.pair for place in found if place.seal is not None]
            with contextlib.closing(Network(pairs)) as network:
                await check(network, pairs, *found)

    async def check(network: Network, pairs: list[KeyPair], receiver: Place, sender: Place, liar: Place) -> None:
        shapers = [
            Shaper(p.context, p.id, network.address, p.transport, p.came.append, seal=p.seal)
            for p in (receiver, sender)
        ]
        for place, shaper in zip((receiver, sender), shapers, strict=True):
            place.transport.require_tickets(shaper.receive)
        assert await shapers[1].transmit(0, said(1, round=0))
        with liar.context.socket(zmq.DEALER) as lying:
            lying.setsockopt(zmq.IDENTITY, identity(1))
            reach(lying, pairs[2], network.pair.public)
            lying.connect(network.endpoint)
            lying.send(encode(Registration(time.monotonic())))
            lying.send(encode(Submission(7, 0, 100, time.monotonic(), True)))
            await soon(lambda: lying.poll(0))
            assert [told.ticket for told in decode_network_reports(lying.recv())] == [7]
            await soon(lambda: shapers[0].is_missing(2, 7))  # its own, and not node 1's
            assert await shapers[1].transmit(0, said(1, round=1))
            await soon(lambda: len(receiver.came) == 2)
            assert not lying.poll(0)
        for shaper in shapers:
            shaper.close()

    in_time(body)


# Files of keys


def test_what_another_is_writing_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".node-0.key_secret.{os.getpid()}"
    other.write_text("half of it")
    with pytest.raises(LaunchError, match="cannot write"):
        make_keys(tmp_path, 1)
    assert other.read_text() == "half of it"
