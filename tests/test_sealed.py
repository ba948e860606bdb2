"""Sealed links: what travels cannot be read, changed or sent again, and nobody gets in who is not on the list."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExperimentError, LaunchError, MessageError
from shoal.experiment import Experiment
from shoal.keys import KeyPair, make
from shoal.message import RUN_LENGTH, Message, Payload, address
from shoal.processes.sealing import Seal, _Door, speaker
from shoal.processes.transport import Transport
from shoal.records import Event
from shoal.runtime import Filter, Mailbox
from shoal.testing import Faults
from test_processes import NODES, Started, _no_process_is_left, listens_on, started

__all__ = ["_no_process_is_left"]  # holds for every test here too

RUN = "r" * RUN_LENGTH
SECRET = np.random.default_rng(7).standard_normal(2000).astype(np.float32)
LONG = 30.0


def said(sender: int = 0, round: int = 0, values: Any = SECRET) -> Message:
    return Message(sender, "model", round, Payload({"params": values}).frozen(), RUN)


class Place:
    """A node's sockets, in a ZeroMQ of its own, as in a process of its own."""

    def __init__(self, id: int, pair: KeyPair | None, patience: float = 0.0) -> None:
        self.id = id
        self.context: zmq.Context[Any] = zmq.Context()
        self.came: list[Message] = []
        self.rejected: list[str] = []
        self.strangers: list[str] = []
        self.seal = None
        if pair is not None:
            self.seal = Seal(self.context, pair, self.strangers.append, time.monotonic, patience)
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
                self.seal.admit(str(node), pair.public)
            self._guarding = asyncio.create_task(self._guard(self.seal))
        self.transport.start(endpoints)

    async def _guard(self, seal: Seal) -> None:
        while True:
            seal.attend()
            await asyncio.sleep(0.01)

    def close(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        self.transport.close()
        if self.seal is not None:
            self.seal.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def places(
    sealed: bool = True, count: int = 2, through: Callable[[str], str] = str, patience: float = 0.0
) -> AsyncIterator[list[Place]]:
    """Nodes that know each other's endpoints and keys. What is sent to node 0 goes by way of `through`."""
    pairs = [KeyPair.fresh() for _ in range(count)] if sealed else []
    found = [Place(id, pairs[id] if sealed else None, patience) for id in range(count)]
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
        return data[:-1] + bytes([data[-1] ^ 1])

    async def body() -> None:
        async with places(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, said(1, round=0))
            await soon(lambda: receiver.came)
            wire.change = flipped
            await sender.transport.send(0, said(1, round=1))
            while len(receiver.came) < 2:  # over the next connection; what was in the last one is lost
                await sender.transport.send(0, said(1, round=2))
                await asyncio.sleep(0.05)
            assert {m.round for m in receiver.came} == {0, 2}
            assert not receiver.rejected
            assert not receiver.strangers
        assert wire.connections == 2

    in_time(body)


def test_what_was_recorded_and_is_sent_again_is_not_taken_in(wire: Wire) -> None:
    async def body() -> None:
        async with places(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, said(1, round=0, values=SECRET[:10]))
            await soon(lambda: receiver.came)
            wire.change = lambda data: data + data  # one small message, and the same bytes once more
            await sender.transport.send(0, said(1, round=1, values=SECRET[:10]))
            await soon(lambda: wire.ended)
            assert [m.round for m in receiver.came] == [0, 1]

    in_time(body)


# Strangers


def test_strangers_are_refused_and_counted_and_those_on_the_list_are_not(wire: Wire) -> None:
    async def body() -> None:
        async with places() as (receiver, sender):
            assert receiver.seal is not None
            assert sender.seal is not None
            endpoint, key = receiver.transport.endpoint, receiver.seal.pair.public
            strangers = [
                (None, None, "showed no key"),
                (KeyPair.fresh(), key, "which is not on the list"),
                (sender.seal.pair, KeyPair.fresh().public, "took us for somebody else"),
            ]
            for pair, taken_for, why in strangers:
                before = len(receiver.strangers)
                with knocking(endpoint, pair, taken_for) as push:
                    push.send_multipart([address(0), *said(1).frames()], zmq.NOBLOCK)
                    await soon(lambda before=before: len(receiver.strangers) > before)
                    assert why in receiver.strangers[before]
                    await asyncio.sleep(0.1)
            assert receiver.came == []
            await sender.transport.send(0, said(1))
            await soon(lambda: receiver.came)
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
    door, counted, turned_away = _Door(), 0, 0
    for now, event, number in sorted(steps, key=lambda step: step[0]):
        door.note(event, 0 if event == LET_IN else number, now)
        counted += door.turned_away(now)
        if event == LEFT and not visits[number][0]:
            turned_away += 1
        assert counted <= turned_away, "one that was let in, or may yet be, is taken for a stranger"
    counted += door.turned_away(100.0)
    assert counted == turned_away == sum(not let_in for let_in, _ in visits)


def test_who_is_on_the_list_cannot_speak_for_another() -> None:
    async def body() -> None:
        async with places(count=3) as (receiver, sender, liar):
            await liar.transport.send(0, said(1))
            await soon(lambda: receiver.rejected)
            assert receiver.rejected == ["a message of node 2's that says it is node 1's"]
            await sender.transport.send(0, said(1))
            await soon(lambda: receiver.came)
            assert len(receiver.came) == 1

    in_time(body)


def test_who_is_on_the_list_cannot_give_receipts_for_another() -> None:
    async def body() -> None:
        async with places(count=3) as (sender, receiver, liar):
            receiver.transport.redeem = lambda message, ticket: receiver.came.append(message)  # gives none
            transmitting = asyncio.create_task(sender.transport.transmit(1, said()))
            await soon(lambda: receiver.came)
            assert sender.seal is not None
            assert liar.seal is not None
            (ticket,) = sender.transport._receipts
            with knocking(sender.transport.endpoint, liar.seal.pair, sender.seal.pair.public) as push:
                push.send_multipart([address(0, ticket), RUN.encode()])
                await soon(lambda: sender.rejected)
            assert sender.rejected == ["a receipt of node 2's for what was sent to node 1"]
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
            got = [mailbox.ask(Filter("model", round, (1,)), lambda: None).messages for round in (0, 1)]
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
        speaker(zmq.Frame(b"x"))


# Keys that change


def test_one_whose_key_is_still_on_its_way_waits_and_is_let_in_under_its_new_key_only() -> None:
    async def body() -> None:
        async with places(patience=LONG) as (receiver, sender):
            assert receiver.seal is not None
            new, old = KeyPair.fresh(), sender.seal.pair  # type: ignore[union-attr]
            endpoint, key = receiver.transport.endpoint, receiver.seal.pair.public
            with knocking(endpoint, new, key) as push:
                push.send_multipart([address(0), *said(1).frames()])
                await asyncio.sleep(0.3)
                assert (receiver.came, receiver.strangers) == ([], [])
                receiver.seal.admit("1", new.public)
                await soon(lambda: receiver.came)
            receiver.seal.patience = 0.0
            with knocking(endpoint, old, key):
                await soon(lambda: receiver.strangers)

    in_time(body)


def test_one_whose_key_nobody_comes_to_know_is_refused_in_the_end() -> None:
    async def body() -> None:
        async with places(patience=0.3) as (receiver, _):
            assert receiver.seal is not None
            with knocking(receiver.transport.endpoint, KeyPair.fresh(), receiver.seal.pair.public) as push:
                push.send_multipart([address(0), *said(1).frames()])
                await soon(lambda: receiver.strangers)
            assert receiver.came == []

    in_time(body)


# Whole runs


def by_simulation(run: Started, folder: Path) -> dict[str, Any]:
    return Experiment.from_file(run.folder.experiment, {"engine": "simulation"}).run(folder).summary


def test_a_sealed_run_learns_what_a_plain_one_does_and_counts_strangers_at_every_door(tmp_path: Path) -> None:
    make(tmp_path / "keys", NODES)
    sealed = ("processes={sealed=true, keys='keys'}", "network={name='uniform', latency=0.001}")
    with started(tmp_path, *sealed, slow=0.4) as going:
        going.wait_for_round(0)
        network, *nodes = sorted(going.zygote.children(), key=lambda p: p.create_time())
        doors = [listens_on(p) for p in (nodes[0], network, psutil.Process(going.process.pid))]
        with contextlib.ExitStack() as stack:
            for port in doors:
                stack.enter_context(knocking(f"tcp://127.0.0.1:{port}"))
                stack.enter_context(knocking(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), KeyPair.fresh().public))
            code, out = going.end()
    assert code == 0, out
    summary = going.summary
    assert summary["status"] == "completed"
    assert summary["strangers"] >= 2 * len(doors)
    assert summary["events"]["stranger refused"] >= 2
    assert "a stranger was refused by the supervisor" in out
    assert "a stranger was refused by the network's process" in out
    assert summary["messages_rejected"] == summary["messages_repeated"] == 0
    simulated = by_simulation(going, tmp_path / "simulated")
    for key in ("digest", "bytes_sent", "messages_sent"):
        assert summary[key] == simulated[key]


def test_a_node_that_is_started_again_comes_back_into_a_sealed_run_with_a_new_key(tmp_path: Path) -> None:
    experiment = Experiment(
        nodes=4,
        seed=1,
        engine="processes",
        algorithm={"name": "dpsgd", "rounds": 12},
        topology={"name": "full"},
        model={"name": "mlp", "hidden": (8,)},
        training={"batch_size": 8, "local_steps": 1},
        device={"step_seconds": 0.3},
        evaluation={"every": 0, "average": False, "samples": 20},
        processes={"sealed": True},
        fault=Faults().crash(2).at(0.5).restart(2).at(1.0).schedule,
    )
    run = experiment.run(tmp_path)
    assert run.summary["status"] == "completed"
    events = [record.what for record in run.folder.read(2) if isinstance(record, Event)]
    assert "rejoined" in events
    assert run.summary["strangers"] == run.summary["messages_rejected"] == 0


def small(**processes: Any) -> Experiment:
    training = {"batch_size": 8, "local_steps": 1}
    return Experiment(nodes=4, engine="processes", training=training, processes={"sealed": True, **processes})


def test_keys_that_cannot_seal_a_run_end_it_before_anything_is_started(tmp_path: Path) -> None:
    make(tmp_path / "keys", 3)
    (tmp_path / "keys" / "node-0.key_secret").chmod(0o640)
    with pytest.raises(LaunchError, match="links cannot be sealed") as refused:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "others may read this secret" in str(refused.value)
    assert "node-3.key' is missing" in str(refused.value)
    assert not list(tmp_path.rglob("nodes.log"))


def test_without_curve_nothing_is_sent_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(LaunchError, match="built without CURVE"):
        small().run(tmp_path)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_without_sealed_links_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"nothing is encrypted with them unless processes\.sealed = true"):
        small(sealed=False, keys=tmp_path)
