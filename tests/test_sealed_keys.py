"""Sealed links while keys change or are announced late, and with many connections."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from conftest import until
from local_transports import LONG, RUN, eventually
from sealed_peers import Peer, connected, connected_peers, new_message, run_async, small
from shoal.engines.processes import control, sealing
from shoal.engines.processes.control_server import ControlServer
from shoal.engines.processes.coordinator_link import CoordinatorLink
from shoal.engines.processes.keys import KeyPair
from shoal.engines.processes.node_network import NodeNetwork
from shoal.engines.processes.sealing import Seal
from shoal.engines.processes.shaper import (
    NetworkAddress,
    Shaper,
)
from shoal.errors import LaunchError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import address
from shoal.testing import Faults

pytestmark = pytest.mark.usefixtures("no_process_is_left")


# Keys that change


RESTART = Faults().crash(2).at(2.0).restart(2).at(2.5).schedule


@pytest.mark.parametrize(
    ("faults", "key_folder", "waits"),
    [((), None, False), (RESTART, None, True), (RESTART, "keys", False)],
    ids=["no restarts", "new keys", "keys of a folder"],
)
def test_nodes_wait_for_unknown_keys_only_if_a_restarted_node_gets_a_new_one(
    faults: Any, key_folder: str | None, waits: bool
) -> None:
    setup = Setup(Experiment(nodes=4, engine="processes", processes={"sealed": True}, fault=faults))
    pairs = [KeyPair.fresh() for _ in range(4)]

    async def body() -> float:
        with zmq.Context() as context:
            seal = Seal(context, pairs[0], lambda why: None, time.monotonic)
            start = control.StartNodes([0, 1, 2, 3], RUN, key_folder=key_folder)
            network = NodeNetwork(context, setup, 0, start, lambda why: None, seal)
            endpoints = [network.transport.endpoint] * 4
            network.start(control.Start(endpoints, public_keys=[pair.public for pair in pairs]))
            network.close()
            seal.close()
            return seal.key_wait

    assert asyncio.run(body()) == (sealing.KEY_WAIT_SECONDS if waits else 0.0)


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
            assert peer.serving is not None
            await asyncio.sleep(0)
            loop, descriptors = asyncio.get_running_loop(), [socket.FD for socket in peer.seal.sockets]
            peer.serving.cancel()
            await asyncio.wait([peer.serving])
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


# Keys that are announced late, and many connections


def test_the_coordinator_accepts_a_node_that_connects_before_its_key_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow, answer = ControlServer.allow_key, ControlServer.answer_connections
    announced: list[int | None] = []

    def counted(server: ControlServer, node: int | None, key: bytes) -> None:
        announced.append(node)
        allow(server, node, key)

    def late(server: ControlServer) -> None:
        if 0 < len(announced) < 4:
            time.sleep(0.3)  # the zygote starts more nodes meanwhile
        answer(server)

    monkeypatch.setattr(ControlServer, "allow_key", counted)
    monkeypatch.setattr(ControlServer, "answer_connections", late)
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
from shoal.engines.processes.node_network import NodeNetwork
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
                lambda: Shaper(peer.context, 0, "run", nowhere, peer.transport, print, seal=peer.seal),
            ):
                with pytest.raises(LaunchError, match="links are sealed"):
                    connect()

    run_async(body)
