"""Sealed links: messages cannot be read, changed or replayed, and only listed keys can connect."""

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
"""Seconds: a generous timeout for operations that are fast on an idle machine."""


def new_message(sender: int = 0, round: int = 0, values: Any = SECRET) -> Message:
    return Message(sender, "model", round, Payload({"params": values}).frozen(), RUN)


class Peer:
    """A node's sockets, with a ZeroMQ context of its own, as in a separate process."""

    def __init__(self, id: int, pair: KeyPair | None, key_wait: float = 0.0) -> None:
        self.id = id
        self.context: zmq.Context[Any] = zmq.Context()
        self.received: list[Message] = []
        self.rejected: list[str] = []
        self.unauthenticated: list[str] = []
        self.seal = None
        if pair is not None:
            self.seal = Seal(self.context, pair, self.unauthenticated.append, time.monotonic, key_wait)
        self.transport = Transport(
            self.context,
            id=id,
            run=RUN,
            host="127.0.0.1",
            port=None,
            max_message_bytes=2**24,
            connections=8,
            send_timeout=LONG,
            deliver=self.received.append,
            reject=self.rejected.append,
            seal=self.seal,
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self, endpoints: list[str], pairs: list[KeyPair]) -> None:
        if self.seal is not None:
            for node, pair in enumerate(pairs):
                self.seal.allow(str(node), pair.public)
            self._serving = asyncio.create_task(self.seal.serve())
        self.transport.start(endpoints)

    def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self.transport.close()
        if self.seal is not None:
            self.seal.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def connected_peers(
    sealed: bool = True, count: int = 2, through: Callable[[str], str] = str, key_wait: float = 0.0
) -> AsyncIterator[list[Peer]]:
    """Nodes that know each other's endpoints and keys. Messages to node 0 pass through `through`."""
    pairs = [KeyPair.fresh() for _ in range(count)] if sealed else []
    found = [Peer(id, pairs[id] if sealed else None, key_wait) for id in range(count)]
    endpoints = [peer.transport.endpoint for peer in found]
    try:
        for peer in found:
            peer.start([through(endpoints[0]), *endpoints[1:]], pairs)
        async with asyncio.timeout(LONG):
            yield found
    finally:
        for peer in found:
            peer.close()


async def eventually(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - threads and sockets set no event
        await asyncio.sleep(0.01)


def run_async(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@contextlib.contextmanager
def connected(endpoint: str, pair: KeyPair | None = None, key: bytes | None = None) -> Any:
    """A socket with the key pair `pair` that expects `key` to be the public key of `endpoint`."""
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
    """A proxy that records a TCP connection and can change its bytes: a man in the middle."""

    def __init__(self) -> None:
        self.seen = bytearray()
        """The bytes that clients sent on all connections."""
        self.connections = 0
        self.ended = 0
        self.change: Callable[[bytes], bytes] | None = None
        """Changes the next bytes of a client; then it is None again."""
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


# Eavesdropping, changed and replayed messages


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_an_eavesdropper_can_read_a_plain_link_but_not_a_sealed_link(wire: Wire, sealed: bool) -> None:
    async def body() -> None:
        async with connected_peers(sealed, through=wire.to) as (receiver, sender):
            assert await sender.transport.send(0, new_message(1))
            await eventually(lambda: receiver.received)
            np.testing.assert_array_equal(receiver.received[0].payload.arrays["params"], SECRET)

    run_async(body)
    for open_text in (SECRET.tobytes(), SECRET[:4].tobytes(), RUN.encode(), b"model"):
        assert (open_text in wire.seen) is not sealed


def test_a_changed_message_is_rejected_and_the_next_message_arrives(wire: Wire) -> None:
    def flipped(data: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in data)  # a single bit may change only a frame's header

    async def body() -> None:
        async with connected_peers(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            wire.change = flipped
            await sender.transport.send(0, new_message(1, round=1))
            while len(receiver.received) < 2:  # over the next connection; messages of the last one are lost
                await sender.transport.send(0, new_message(1, round=2))
                await asyncio.sleep(0.05)
            assert wire.connections == 2
            for message in receiver.received:
                np.testing.assert_array_equal(message.payload.arrays["params"], SECRET)
            assert not receiver.rejected
            assert not receiver.unauthenticated

    run_async(body)


def test_replayed_bytes_are_rejected(wire: Wire) -> None:
    async def body() -> None:
        async with connected_peers(through=wire.to) as (receiver, sender):
            await sender.transport.send(0, new_message(1, round=0, values=SECRET[:10]))
            await eventually(lambda: receiver.received)
            wire.change = lambda data: data + data  # one small message, and the same bytes once more
            await sender.transport.send(0, new_message(1, round=1, values=SECRET[:10]))
            await eventually(lambda: wire.ended and len(receiver.received) > 1)
            assert [m.round for m in receiver.received] == [0, 1]

    run_async(body)


# Unauthenticated connections


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("no key", "no key, or an invalid handshake"),
        ("an unknown key", "not on the list of keys"),
        ("a wrong server key", "no key, or an invalid handshake"),
    ],
)
def test_unauthenticated_connections_are_rejected_and_counted_and_listed_keys_are_not(who: str, why: str) -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            assert receiver.seal is not None
            assert sender.seal is not None
            keys = {
                "no key": (None, None),
                "an unknown key": (KeyPair.fresh(), receiver.seal.pair.public),
                "a wrong server key": (sender.seal.pair, KeyPair.fresh().public),
            }
            with connected(receiver.transport.endpoint, *keys[who]) as push:
                push.send_multipart([address(0), *new_message(1, round=7).frames()], zmq.NOBLOCK)
                await eventually(lambda: any(why in connection for connection in receiver.unauthenticated))
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            assert [message.round for message in receiver.received] == [0]
            assert receiver.rejected == []

    run_async(body)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0", b"", bytes(1000)], ids=repr)
def test_connections_that_do_not_use_zeromq_are_counted_and_change_nothing(first: bytes) -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            port = int(receiver.transport.endpoint.rpartition(":")[2])
            await sender.transport.send(0, new_message(1, round=0))
            await eventually(lambda: receiver.received)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(first)
                await sender.transport.send(0, new_message(1, round=1))
                await eventually(lambda: len(receiver.received) == 2)
            await eventually(lambda: receiver.unauthenticated)
            assert len(receiver.unauthenticated) == 1

    run_async(body)


ACCEPTED, AUTHENTICATED, DISCONNECTED = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.randoms(use_true_random=False))
def test_failed_handshakes_are_counted_eventually_and_never_too_early(connections: Any, random: Any) -> None:
    """A connection: whether it authenticates, and if so, whether it ends before the test."""
    steps: list[tuple[float, int, int]] = []
    for number, (authenticated, leaves) in enumerate(connections):
        moments = sorted(random.uniform(0, 20) for _ in range(3))
        steps.append((moments[0], ACCEPTED, number))
        if authenticated:
            steps.append((moments[1], AUTHENTICATED, number))
        if leaves or not authenticated:
            steps.append((moments[2], DISCONNECTED, number))
    counter, counted, unauthenticated = _HandshakeCounter(), 0, 0
    for now, event, number in sorted(steps, key=lambda step: step[0]):
        counter.note(event, 0 if event == AUTHENTICATED else number, now)
        counted += counter.newly_failed(now)
        if event == DISCONNECTED and not connections[number][0]:
            unauthenticated += 1
        assert counted <= unauthenticated, "a connection that has authenticated, or still may, is counted"
    counted += counter.newly_failed(100.0)
    assert counted == unauthenticated == sum(not authenticated for authenticated, _ in connections)


def test_a_listed_node_cannot_send_messages_in_the_name_of_another() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (receiver, sender, forger):
            await forger.transport.send(0, new_message(1))
            await eventually(lambda: receiver.rejected)
            assert receiver.rejected == ["node 2 sent a message in the name of node 1"]
            await sender.transport.send(0, new_message(1))
            await eventually(lambda: receiver.received)
            assert len(receiver.received) == 1

    run_async(body)


def test_a_listed_node_cannot_return_receipts_in_the_name_of_another() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (sender, receiver, forger):
            receiver.transport.require_tickets(
                lambda message, ticket: receiver.received.append(message)
            )  # and sends none
            transmitting = asyncio.create_task(sender.transport.send_and_wait(1, new_message()))
            await eventually(lambda: receiver.received)
            assert sender.seal is not None
            assert forger.seal is not None
            (ticket,) = sender.transport._receipts
            with connected(sender.transport.endpoint, forger.seal.pair, sender.seal.pair.public) as push:
                push.send_multipart([address(0, ticket), RUN.encode()])
                await eventually(lambda: sender.rejected)
            assert sender.rejected == ["node 2 returned a receipt for a message to node 1"]
            assert not transmitting.done()
            transmitting.cancel()

    run_async(body)


def test_a_message_addressed_to_another_node_is_dropped() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (receiver, sender, _):
            assert receiver.seal is not None
            assert sender.seal is not None
            with connected(receiver.transport.endpoint, sender.seal.pair, receiver.seal.pair.public) as push:
                push.send_multipart([address(2), *new_message(1).frames()])
                push.send_multipart([address(0), *new_message(1).frames()])
                await eventually(lambda: receiver.received)
            assert receiver.rejected == ["a message for node 2, and this is node 0"]
            assert len(receiver.received) == 1

    run_async(body)


def test_a_message_that_its_sender_repeats_is_received_once() -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            for round in (0, 0, 1):
                await sender.transport.send(0, new_message(1, round))
            await eventually(lambda: len(receiver.received) == 3)
            mailbox = Mailbox()
            for message in receiver.received:
                mailbox.put(message)
            got = [mailbox.start_receive(Filter("model", round, (1,)), lambda: None).messages for round in (0, 1)]
            assert [[m.round for m in messages] for messages in got] == [[0], [1]]
            assert mailbox.repeated == 1

    run_async(body)


# Without an answer no connection is accepted


def test_without_a_zap_handler_no_connection_is_accepted() -> None:
    async def body() -> None:
        receiver, sender = (Peer(id, KeyPair.fresh()) for id in range(2))
        assert receiver.seal is not None
        assert sender.seal is not None
        pairs = [receiver.seal.pair, sender.seal.pair]
        endpoints = [receiver.transport.endpoint, sender.transport.endpoint]
        try:
            sender.start(endpoints, pairs)
            receiver.transport.start(endpoints)  # it reads messages, but answers no ZAP requests
            await sender.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert receiver.received == []
            receiver.start(endpoints, pairs)
            await asyncio.wait_for(eventually(lambda: receiver.received), LONG)
        finally:
            receiver.close()
            sender.close()

    run_async(body)


def test_after_the_seal_is_closed_no_connection_is_accepted() -> None:
    async def body() -> None:
        async with connected_peers() as (receiver, sender):
            assert receiver.seal is not None
            receiver.seal._zap.close()
            await sender.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert receiver.received == []

    run_async(body)


def test_a_sealed_sender_sends_nothing_to_a_plain_listener() -> None:
    async def body() -> None:
        plain, sealed = Peer(0, None), Peer(1, KeyPair.fresh())
        try:
            plain.start([plain.transport.endpoint, sealed.transport.endpoint], [])
            sealed.start([plain.transport.endpoint, sealed.transport.endpoint], [KeyPair.fresh(), KeyPair.fresh()])
            await sealed.transport.send(0, new_message(1))
            await asyncio.sleep(0.5)
            assert (plain.received, plain.rejected) == ([], [])
        finally:
            plain.close()
            sealed.close()

    run_async(body)


def test_a_frame_of_a_plain_link_has_no_authenticated_sender() -> None:
    with pytest.raises(MessageError, match="not sealed"):
        authenticated_sender(zmq.Frame(b"x"))


# Keys that change


def test_a_connection_waits_for_its_key_and_is_accepted_with_the_new_key_only() -> None:
    async def body() -> None:
        async with connected_peers(key_wait=LONG) as (receiver, sender):
            assert receiver.seal is not None
            new, old = KeyPair.fresh(), sender.seal.pair  # type: ignore[union-attr]
            endpoint, key = receiver.transport.endpoint, receiver.seal.pair.public
            with connected(endpoint, new, key) as push:
                push.send_multipart([address(0), *new_message(1).frames()])
                await asyncio.sleep(0.3)
                assert (receiver.received, receiver.unauthenticated) == ([], [])
                receiver.seal.allow("1", new.public)
                await eventually(lambda: receiver.received)
            receiver.seal.key_wait = 0.0
            with connected(endpoint, old, key):
                await eventually(lambda: receiver.unauthenticated)

    run_async(body)


def test_two_nodes_that_exchange_their_keys_are_both_accepted() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as (receiver, *senders):
            assert receiver.seal is not None
            pairs = [sender.seal.pair for sender in senders if sender.seal is not None]
            receiver.seal.allow_all({"1": pairs[1].public, "2": pairs[0].public})
            for name, pair in ((2, pairs[0]), (1, pairs[1])):
                with connected(receiver.transport.endpoint, pair, receiver.seal.pair.public) as push:
                    push.send_multipart([address(0), *new_message(name).frames()])
                    await eventually(lambda: [m.sender for m in receiver.received][-1:] == [name])  # noqa: B023
            assert receiver.rejected == receiver.unauthenticated == []

    run_async(body)


def test_a_cancelled_seal_leaves_no_reader_in_the_event_loop() -> None:
    async def body() -> None:
        async with connected_peers() as (peer, _):
            assert peer.seal is not None
            assert peer._serving is not None
            await asyncio.sleep(0)
            loop, descriptors = asyncio.get_running_loop(), [socket.FD for socket in peer.seal.sockets]
            peer._serving.cancel()
            await asyncio.wait([peer._serving])
            assert [loop.remove_reader(descriptor) for descriptor in descriptors] == [False] * len(descriptors)

    run_async(body)


def test_a_connection_whose_key_is_never_announced_is_rejected_after_the_wait() -> None:
    async def body() -> None:
        async with connected_peers(key_wait=0.3) as (receiver, _):
            assert receiver.seal is not None
            with connected(receiver.transport.endpoint, KeyPair.fresh(), receiver.seal.pair.public) as push:
                push.send_multipart([address(0), *new_message(1).frames()])
                await eventually(lambda: receiver.unauthenticated)
            assert receiver.received == []

    run_async(body)


# Whole runs


def by_simulation(run: Started, folder: Path) -> dict[str, Any]:
    freely = {"engine": "simulation", "algorithm.held": ROUNDS}
    return Experiment.from_file(run.folder.experiment, freely).run(folder).summary


def test_a_sealed_run_has_the_models_of_a_plain_run_and_counts_unauthenticated_connections(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", NODES)
    sealed = ("processes={sealed=true, keys='keys'}", "network={name='uniform', latency=0.001}")
    with started(tmp_path, *sealed, held=1) as going:
        going.wait_for_round(0)
        network, *nodes = sorted(going.zygote.children(), key=lambda p: p.create_time())
        descriptors = [listens_on(p) for p in (nodes[0], network, psutil.Process(going.process.pid))]
        with contextlib.ExitStack() as stack:
            for port in descriptors:
                stack.enter_context(connected(f"tcp://127.0.0.1:{port}"))
                stack.enter_context(connected(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), KeyPair.fresh().public))
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
    """A sealed run in which node 2 crashes and restarts."""
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


def test_a_restarted_node_rejoins_a_sealed_run_with_a_new_key(tmp_path: Path) -> None:
    run = restarting().run(tmp_path)
    assert run.summary["status"] == "completed"
    events = [record.what for record in run.folder.read(2) if isinstance(record, Event)]
    assert "rejoined" in events
    assert run.summary["messages_rejected"] == 0
    # A node that crashes during a handshake counts as unauthenticated, at most once at each other node.
    assert run.summary["unauthenticated_connections"] <= 3


def small(**processes: Any) -> Experiment:
    training = {"batch_size": 8, "local_steps": 1}
    return Experiment(nodes=4, engine="processes", training=training, processes={"sealed": True, **processes})


def test_invalid_keys_end_a_run_before_any_process_starts(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3)
    (tmp_path / "keys" / "node-0.key_secret").chmod(0o640)
    with pytest.raises(LaunchError, match="links cannot be sealed") as error:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "other users may read this secret key" in str(error.value)
    assert "node-3.key' is missing" in str(error.value)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_that_change_during_the_start_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_all = NodeStarter.start_all

    def late(starter: NodeStarter, request: control.StartNodes) -> None:
        make_keys(tmp_path / "keys", 4, force=True)
        start_all(starter, request)

    make_keys(tmp_path / "keys", 4)
    monkeypatch.setattr(NodeStarter, "start_all", late)
    with pytest.raises(LaunchError, match=r"node \d could not start: .*changed since the run began") as error:
        small(keys=tmp_path / "keys").run(tmp_path)
    assert "shoal keys check" in str(error.value)


def test_a_restarted_node_whose_keys_have_changed_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_curve_nothing_is_sent_unencrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(LaunchError, match="built without CURVE"):
        small().run(tmp_path)
    assert not list(tmp_path.rglob("nodes.log"))


def test_keys_without_sealed_links_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"the keys have no effect without processes\.sealed = true"):
        small(sealed=False, keys=tmp_path)


# Keys that are announced late, and many connections


def test_the_coordinator_accepts_a_node_that_connects_before_its_key_is_announced(
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


def test_beyond_the_limit_of_waiting_connections_all_listed_nodes_still_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "MAX_WAITING", 2)
    monkeypatch.setattr(sealing, "HANDSHAKE_SECONDS", 1.0)

    async def body() -> None:
        pairs = [KeyPair.fresh() for _ in range(6)]
        receiver, *senders = found = [Peer(id, pair, key_wait=math.inf) for id, pair in enumerate(pairs)]
        endpoints = [peer.transport.endpoint for peer in found]
        try:
            for sender in senders:
                sender.start(endpoints, pairs)
                await sender.transport.send(0, new_message(sender.id))
            assert receiver.seal is not None
            for _ in range(50):  # it knows no key yet
                receiver.seal.answer_pending()
                await asyncio.sleep(0.01)
            assert receiver.seal.waiting == 2
            receiver.start(endpoints, pairs)
            await asyncio.wait_for(eventually(lambda: len(receiver.received) == 5), LONG)
            assert {message.sender for message in receiver.received} == {1, 2, 3, 4, 5}
        finally:
            for peer in found:
                peer.close()

    run_async(body)


def test_connections_that_zeromq_has_closed_stop_waiting() -> None:
    clock, error = [0.0], list[str]()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        seal = Seal(context, KeyPair.fresh(), error.append, lambda: clock[0], key_wait=math.inf)
        seal.secure_server(inbox)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        with connected(f"tcp://127.0.0.1:{port}", KeyPair.fresh(), seal.pair.public):
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
"""Each connection is two events, and ZeroMQ would keep 2,000 events."""


def test_a_seal_closes_with_many_unread_connection_events() -> None:
    # In a separate process: a blocked close would block all of its threads.
    subprocess.run([sys.executable, "-c", CLOSE], check=True, timeout=LONG)


def test_without_the_peers_key_a_sealed_process_does_not_connect() -> None:
    async def body() -> None:
        nowhere = NetworkAddress("tcp://127.0.0.1:9")
        async with connected_peers() as (peer, _):
            for connect in (
                lambda: CoordinatorLink(peer.context, "tcp://127.0.0.1:9", cast(Any, None), peer.seal),
                lambda: Shaper(peer.context, 0, nowhere, peer.transport, print, seal=peer.seal),
            ):
                with pytest.raises(LaunchError, match="links are sealed"):
                    connect()

    run_async(body)


# The network process


def from_socket(*messages: list[bytes]) -> Any:
    """A socket from which exactly these messages can be read."""
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


def secure_client(socket: zmq.Socket[Any], pair: KeyPair, key: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = pair.public, pair.secret, key


class Network:
    """A sealed network process in a thread. The run has started, and it knows the nodes' keys."""

    def __init__(self, pairs: list[KeyPair]) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._coordinator = self.context.socket(zmq.ROUTER)
        seal = Seal(self.context, KeyPair.fresh(), print, time.monotonic)
        seal.secure_server(self._coordinator)
        port = self._coordinator.bind_to_random_port("tcp://127.0.0.1")
        start = control.StartNodes([], f"tcp://127.0.0.1:{port}", RUN, "", coordinator_key=seal.pair.public)
        self.pair = KeyPair.fresh()
        seal.allow(sealing.NETWORK_PROCESS, self.pair.public)
        setup = Setup(Experiment.from_table({**small().to_table(), "network": {"name": "uniform", "latency": 0.001}}))
        process = NetworkProcess(setup, start, self.pair)
        self._thread = threading.Thread(target=process.serve, daemon=True)
        self._thread.start()
        until(lambda: seal.answer_pending() or self._coordinator.poll(0))
        self._line, hello = self._coordinator.recv_multipart()
        self.endpoint = control.decode_from_node(hello).endpoint
        self.address = NetworkAddress(self.endpoint, self.pair.public)
        self._seal = seal
        self._tell(control.Start([], time.monotonic(), public_keys=[pair.public for pair in pairs]))

    def receive(self) -> control.FromNode:
        assert self._coordinator.poll(LONG * 1000)
        return control.decode_from_node(self._coordinator.recv_multipart()[1])

    def finish(self) -> control.FromNode:
        self._tell(control.Finish())
        return self.receive()

    def close(self) -> None:
        self._tell(control.Finish())
        self._thread.join(LONG)
        self._seal.close()
        self.context.destroy(linger=0)

    def _tell(self, what: control.ToNode) -> None:
        self._coordinator.send_multipart([self._line, control.encode(what)])


def test_the_network_process_reports_all_unauthenticated_connections_at_the_end() -> None:
    def connect() -> None:
        with socket.create_connection(("127.0.0.1", int(network.endpoint.rpartition(":")[2])), LONG) as raw:
            raw.sendall(bytes(100))
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(1000):  # until the connection is closed
                    pass

    with contextlib.closing(Network([])) as network:
        connect()
        first = network.receive()
        assert isinstance(first, control.UnauthenticatedConnections)
        assert (first.count, first.final) == (1, False)
        connect()  # within the interval between two reports
        last = network.finish()
        assert isinstance(last, control.UnauthenticatedConnections)
        assert (last.count, last.final) == (2, True)


def test_a_node_that_claims_another_identity_at_the_network_process_neither_receives_nor_sends_for_it() -> None:
    async def body() -> None:
        async with connected_peers(count=3) as found:
            pairs = [peer.seal.pair for peer in found if peer.seal is not None]
            with contextlib.closing(Network(pairs)) as network:
                await check(network, pairs, *found)

    async def check(network: Network, pairs: list[KeyPair], receiver: Peer, sender: Peer, forger: Peer) -> None:
        shapers = [
            Shaper(p.context, p.id, network.address, p.transport, p.received.append, seal=p.seal)
            for p in (receiver, sender)
        ]
        for peer, shaper in zip((receiver, sender), shapers, strict=True):
            peer.transport.require_tickets(shaper.receive)
        assert await shapers[1].send_and_wait(0, new_message(1, round=0))
        with forger.context.socket(zmq.DEALER) as forging:
            forging.setsockopt(zmq.IDENTITY, identity(1))
            secure_client(forging, pairs[2], network.pair.public)
            forging.connect(network.endpoint)
            forging.send(encode(Registration(time.monotonic())))
            forging.send(encode(Submission(7, 0, 100, time.monotonic(), True)))
            await eventually(lambda: forging.poll(0))
            assert [report.ticket for report in decode_network_reports(forging.recv())] == [7]
            await eventually(lambda: shapers[0].is_missing(2, 7))  # in its own name, not in node 1's
            assert await shapers[1].send_and_wait(0, new_message(1, round=1))
            await eventually(lambda: len(receiver.received) == 2)
            assert not forging.poll(0)
        for shaper in shapers:
            shaper.close()

    run_async(body)


# Key files


def test_a_file_that_another_process_writes_is_not_touched(tmp_path: Path) -> None:
    other = tmp_path / f".node-0.key_secret.{os.getpid()}"
    other.write_text("half of it")
    with pytest.raises(LaunchError, match="cannot write"):
        make_keys(tmp_path, 1)
    assert other.read_text() == "half of it"
