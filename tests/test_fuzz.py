"""Malformed messages are rejected with one kind of error, and their receivers continue.

These are short runs; `benchmarks/fuzz.py` has the long ones.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from attacked_run import AttackedRun
from local_transports import open_transport
from message_frames import frames_of, header, model, with_header
from message_frames import messages as any_message
from readers import messages as message_readers
from readers import readers
from shoal.algorithms import ALGORITHMS
from shoal.engines.operating_system import process_memory, release_memory
from shoal.engines.processes import control, shaper
from shoal.engines.processes.transport import MESSAGES_PER_TURN
from shoal.engines.simulation.world import SimulatedRuntime
from shoal.errors import MessageError
from shoal.experiment import Experiment
from shoal.message import Message, decode
from shoal.testing import Fuzzer, Mutator, Reader
from shoal.testing._mutations import FRAMES, HEADER, PAYLOAD, Frames

pytestmark = pytest.mark.usefixtures("no_process_is_left")

CASES = 30_000
DEEP = 50_000

# Everything that reads messages


def private_memory() -> float:
    gc.collect()
    release_memory()
    found = process_memory()
    return 0.0 if found is None else found.uss


def test_every_reader_accepts_or_rejects_every_message() -> None:
    fuzzer = Fuzzer(readers, seed=0)
    fuzzer.run(range(CASES // 3))
    before = private_memory()
    fuzzer.run(range(CASES // 3, CASES))
    assert not fuzzer.failures, "\n\n".join(map(str, fuzzer.failures))
    assert fuzzer.cases == CASES
    for reader in readers():
        assert fuzzer.accepted[reader.name], (
            f"{reader.name} rejects every message, so nothing behind its first check is tested"
        )
        assert fuzzer.rejected[reader.name], f"{reader.name} rejects no message"
    assert private_memory() - before < 16


@given(any_message, st.integers(0, 2**60))
def test_a_mutated_message_is_valid_or_rejected(message: Message, seed: int) -> None:
    _, frames = Mutator(seed).frames(message.frames())
    try:
        found = decode(frames)
    except MessageError:
        return
    assert frames_of(found) == frames


@given(any_message, st.integers(0, 2**60))
def test_equal_seeds_give_equal_mutations_and_every_mutation_changes_the_message(message: Message, seed: int) -> None:
    before = frames_of(message)
    how, frames = Mutator(seed).frames(before)
    assert Mutator(seed).frames(message.frames()) == (how, frames)
    assert frames_of(message) == before != frames, how


# Bugs that the fuzzer found


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["lists", "maps"])
def test_a_header_nested_deeply_after_the_shape_of_an_array_is_rejected(opening: bytes) -> None:
    deep = msgspec.Raw(opening * DEEP + b"\xc0") if len(opening) == 1 else msgspec.Raw(opening * 20_000 + b"\xc0")
    with pytest.raises(MessageError, match="does not match the schema"):
        decode(with_header(header(arrays=[["params", "<f4", [5], deep]])))


def test_an_array_description_with_an_extra_element_is_rejected() -> None:
    with pytest.raises(MessageError, match="does not match the schema"):
        decode(with_header(header(arrays=[["params", "<f4", [5], None]])))


@pytest.mark.parametrize("read", [control.decode_from_node, control.decode_to_node, shaper.decode_node_report])
def test_control_messages_that_are_nested_too_deeply_are_rejected(read: Any) -> None:
    deep = msgspec.Raw(b"\x91" * DEEP + b"\xc0")
    for message in (
        {"type": "NodeDone", "node": 0, "more": deep},
        {"type": "PeerFailed", "more": deep},
        ["Registration", 1.0, deep],
    ):
        with pytest.raises(control.DECODE_ERRORS):
            read(msgspec.msgpack.encode(message))


# The fuzzer itself


def careless(frames: Frames) -> None:
    if len(frames) == 3:
        raise KeyError("three frames")
    decode(frames)


def endless(frames: Frames) -> None:
    while len(frames) == 3:
        pass
    decode(frames)


def reading(read: Any) -> Sequence[Reader]:
    return [Reader("reader", read, [frames_of(model())])]


def test_an_error_of_another_kind_is_a_failure_that_its_seed_and_case_reproduce() -> None:
    fuzzer = Fuzzer(lambda: reading(careless), seed=3)
    fuzzer.run(range(2_000), most_failures=2)
    assert len(fuzzer.failures) == 2
    failure = fuzzer.failures[1]
    assert "KeyError: 'three frames'" in failure.error
    assert f"seed 3, case {failure.case}: reader, {failure.mutations}" in str(failure)
    assert failure.frames[0][:200].hex() in str(failure)
    again = Fuzzer(lambda: reading(careless), seed=3)
    again.run([failure.case])
    assert again.failures[0].frames == failure.frames


def test_a_reader_that_does_not_return_is_a_failure() -> None:
    fuzzer = Fuzzer(lambda: reading(endless), time_limit=0.5)
    fuzzer.run(range(2_000), most_failures=1)
    assert "HangError: not done after 0.5 s of processor time" in fuzzer.failures[0].error


def test_the_time_limit_does_not_include_making_the_message() -> None:
    def slow_mutation(mutator: Mutator, frames: Frames) -> tuple[str, Frames]:
        began = time.process_time()
        while time.process_time() < began + 0.5:
            pass
        return "made", frames

    fuzzer = Fuzzer(lambda: [Reader("reader", decode, [frames_of(model())], slow_mutation)], time_limit=0.2)
    fuzzer.run(range(2))
    assert fuzzer.accepted["reader"] == 2


def test_every_mutation_occurs_and_some_messages_stay_valid() -> None:
    fuzzer = Fuzzer(lambda: list(message_readers()))
    fuzzer.run(range(5_000))
    mutations = {mutation.__name__.replace("_", " ") for mutation in (*FRAMES, *HEADER, *PAYLOAD)}
    assert {name for name, _ in fuzzer.by_mutation} == mutations | {"several"}
    assert fuzzer.accepted.total() > 500


# Nodes with peers that send malformed messages


def experiment(**changed: Any) -> Experiment:
    topology = {"name": "tree"} if changed.get("algorithm", {}).get("name") == "relaysum" else {"name": "full"}
    settings: dict[str, Any] = {
        "nodes": 8,
        "seed": 4,
        "algorithm": {"name": "dpsgd", "rounds": 4},
        "topology": topology,
        "training": {"lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 0},
        "simulation": {"batching": "off", "receive_timeout": 20.0},
    }
    return Experiment(**{**settings, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        *({"algorithm": {"name": name, "rounds": 4}} for name in ALGORITHMS),
        {"sharing": {"name": "secure"}},
        {"topology": {"name": "peer-sampler", "graph": {"name": "regular", "degree": 3, "dynamic": True}}},
        {"topology": {"name": "gossip-sampler"}},
    ],
    ids=lambda changed: "-".join(each["name"] for each in changed.values()),
)
def test_nodes_continue_when_their_peers_send_malformed_messages(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulation, where an exception in a node ends the run. About a third of all messages are malformed."""
    send, chance, malformed = SimulatedRuntime.send, Random(1), 0

    async def send_malformed(self: SimulatedRuntime, to: int, message: Message) -> bool:
        nonlocal malformed
        if chance.random() < 0.3:
            malformed += 1
            _, frames = Mutator(chance.getrandbits(60)).payload(message.frames())
            try:
                message = decode(frames, message.run)
            except MessageError:
                return True
        return await send(self, to, message)

    monkeypatch.setattr(SimulatedRuntime, "send", send_malformed)
    ended = experiment(**changed).run(tmp_path)
    assert ended.status == "completed"
    assert malformed


# Nodes that receive messages from outside the run


def test_a_flood_of_messages_does_not_stop_other_tasks_of_a_node() -> None:
    flood = 20 * MESSAGES_PER_TURN
    rejected, progress = 0, [0]

    async def node() -> None:
        context: zmq.Context[Any] = zmq.Context()
        outsider = context.socket(zmq.PUSH)

        def reject(reason: str) -> None:
            nonlocal rejected
            rejected += 1
            if rejected < flood:
                outsider.send(b"garbage")  # the flood never ends

        transport = open_transport(context, connections=1, send_timeout=1.0, reject=reject)
        outsider.connect(transport.endpoint)
        for _ in range(2 * MESSAGES_PER_TURN):
            outsider.send(b"garbage")
        transport.start([transport.endpoint])
        while rejected < flood:
            await asyncio.sleep(0.0)
            progress.append(rejected)
        transport.close()
        context.destroy(linger=0)

    asyncio.run(node())
    assert max(after - before for before, after in itertools.pairwise(progress)) <= 2 * MESSAGES_PER_TURN


LINKS = {"name": "uniform", "latency": 0.01, "upload": 100}


@pytest.mark.parametrize(
    ("settings", "messages", "far_models"),
    [
        ({"sharing": {"name": "full"}}, 1_000, 3_000),
        ({"sharing": {"name": "secure"}}, 500, 0),
        ({"network": LINKS}, 1_000, 3_000),
    ],
    ids=["full", "secure", "with a network"],
)
def test_a_run_under_attack_ends_with_the_same_models(
    settings: dict[str, Any], messages: int, far_models: int, tmp_path: Path
) -> None:
    # A node may copy some MiB of shared memory. The models of far rounds take 55 MiB; a mailbox keeps 11 MiB.
    attacked = AttackedRun(tmp_path, messages, seed=1, settings=settings, far_models=far_models, grown_mib=16.0)
    attacked.run()
    assert not attacked.problems, "\n".join(attacked.problems)
    assert attacked.sent.total() == messages + far_models
    assert attacked.must_reject > messages // 2
    assert not far_models or attacked.summary["messages_late"] > far_models // 4, (
        "models of far rounds do not exceed the budget of the mailbox"
    )
