"""Malformed messages are refused, with one kind of error, and those that they are sent to go on.

What is here is a part; `benchmarks/fuzz.py` has the rest.
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

from readers import RUN, readers
from readers import messages as message_readers
from shoal.algorithms import ALGORITHMS
from shoal.engines.operating_system import process_memory, release_memory
from shoal.engines.processes import control, shaper
from shoal.engines.processes.transport import MESSAGES_PER_TURN, Transport
from shoal.engines.simulation.world import SimulatedRuntime
from shoal.errors import MessageError
from shoal.experiment import Experiment
from shoal.message import Message, decode
from shoal.testing import Fuzzer, Mutator, Reader
from shoal.testing.fuzz import Frames
from siege import Siege
from test_message import frames_of, header, model, with_header
from test_message import messages as any_message

pytestmark = pytest.mark.usefixtures("no_process_is_left")

CASES = 30_000
DEEP = 50_000

# Everything that reads messages


def used() -> float:
    gc.collect()
    release_memory()
    found = process_memory()
    return 0.0 if found is None else found.uss


def test_whatever_reads_messages_takes_them_or_refuses_them() -> None:
    fuzzer = Fuzzer(readers, seed=0)
    fuzzer.run(range(CASES // 3))
    before = used()
    fuzzer.run(range(CASES // 3, CASES))
    assert not fuzzer.failures, "\n\n".join(map(str, fuzzer.failures))
    assert fuzzer.cases == CASES
    for reader in readers():
        assert fuzzer.good[reader.name], f"{reader.name} refuses everything: nothing is tried behind its first check"
        assert fuzzer.refused[reader.name], f"{reader.name} refuses nothing"
    assert used() - before < 16


@given(any_message, st.integers(0, 2**60))
def test_any_message_that_something_was_done_to_is_a_message_or_refused(message: Message, seed: int) -> None:
    _, frames = Mutator(seed).frames(message.frames())
    try:
        found = decode(frames)
    except MessageError:
        return
    assert frames_of(found) == frames


@given(any_message, st.integers(0, 2**60))
def test_equal_seeds_give_equal_messages_and_none_is_as_it_was(message: Message, seed: int) -> None:
    before = frames_of(message)
    how, frames = Mutator(seed).frames(before)
    assert Mutator(seed).frames(message.frames()) == (how, frames)
    assert frames_of(message) == before != frames, how


# What was found


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["lists", "maps"])
def test_a_header_nested_deep_behind_an_arrays_shape_is_refused(opening: bytes) -> None:
    deep = msgspec.Raw(opening * DEEP + b"\xc0") if len(opening) == 1 else msgspec.Raw(opening * 20_000 + b"\xc0")
    with pytest.raises(MessageError, match="does not match the schema"):
        decode(with_header(header(arrays=[["params", "<f4", [5], deep]])))


def test_a_header_with_more_to_say_of_an_array_is_refused() -> None:
    with pytest.raises(MessageError, match="does not match the schema"):
        decode(with_header(header(arrays=[["params", "<f4", [5], None]])))


@pytest.mark.parametrize("read", [control.decode_from_node, control.decode_to_node, shaper.decode_node_report])
def test_what_is_nested_too_deep_for_those_who_listen_to_nodes_is_one_of_their_refusals(read: Any) -> None:
    deep = msgspec.Raw(b"\x91" * DEEP + b"\xc0")
    for said in (
        {"type": "Done", "node": 0, "more": deep},
        {"type": "Gone", "more": deep},
        ["Registration", 1.0, deep],
    ):
        with pytest.raises(control.DECODE_ERRORS):
            read(msgspec.msgpack.encode(said))


# The fuzzer finds what there is to find


def careless(frames: Frames) -> None:
    if len(frames) == 3:
        raise KeyError("three frames")
    decode(frames)


def endless(frames: Frames) -> None:
    while len(frames) == 3:
        pass
    decode(frames)


def reading(read: Any) -> Sequence[Reader]:
    return [Reader("somebody", read, [frames_of(model())])]


def test_an_error_of_another_kind_is_a_failure_that_its_seed_and_case_bring_back() -> None:
    fuzzer = Fuzzer(lambda: reading(careless), seed=3)
    fuzzer.run(range(2_000), most_failures=2)
    assert len(fuzzer.failures) == 2
    failure = fuzzer.failures[1]
    assert "KeyError: 'three frames'" in failure.why
    assert f"seed 3, case {failure.case}: somebody, {failure.how}" in str(failure)
    assert failure.frames[0][:200].hex() in str(failure)
    again = Fuzzer(lambda: reading(careless), seed=3)
    again.run([failure.case])
    assert again.failures[0].frames == failure.frames


def test_a_reader_that_does_not_come_back_is_a_failure() -> None:
    fuzzer = Fuzzer(lambda: reading(endless), patience=0.5)
    fuzzer.run(range(2_000), most_failures=1)
    assert "HangError: not done after 0.5 s of processor time" in fuzzer.failures[0].why


def test_the_time_that_a_message_takes_to_make_is_not_its_readers() -> None:
    def long_made(mutator: Mutator, frames: Frames) -> tuple[str, Frames]:
        began = time.process_time()
        while time.process_time() < began + 0.5:
            pass
        return "made", frames

    fuzzer = Fuzzer(lambda: [Reader("somebody", decode, [frames_of(model())], long_made)], patience=0.2)
    fuzzer.run(range(2))
    assert fuzzer.good["somebody"] == 2


def test_every_way_is_taken_and_some_messages_stay_good() -> None:
    fuzzer = Fuzzer(lambda: list(message_readers()))
    fuzzer.run(range(5_000))
    ways = {way.replace("_", " ") for way in (*Mutator.IN_FRAMES, *Mutator.IN_HEADERS, *Mutator.IN_ARRAYS)}
    assert {how for how, _ in fuzzer.by_way} == ways | {"several things"}
    assert fuzzer.good.total() > 500


# Nodes that are told nonsense by their peers


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
def test_nodes_go_on_whatever_their_peers_tell_them(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulation, where what a node raises ends the run. A third of all messages make no sense on arrival."""
    send, chance, told = SimulatedRuntime.send, Random(1), 0

    async def send_nonsense(self: SimulatedRuntime, to: int, message: Message) -> bool:
        nonlocal told
        if chance.random() < 0.3:
            told += 1
            _, frames = Mutator(chance.getrandbits(60)).payload(message.frames())
            try:
                message = decode(frames, message.run)
            except MessageError:
                return True
        return await send(self, to, message)

    monkeypatch.setattr(SimulatedRuntime, "send", send_nonsense)
    ended = experiment(**changed).run(tmp_path)
    assert ended.status == "completed"
    assert told


# Nodes that strangers speak to


def test_a_flood_of_messages_does_not_keep_a_node_from_its_work() -> None:
    flood = 20 * MESSAGES_PER_TURN
    refused, at_work = 0, [0]

    async def node() -> None:
        context: zmq.Context[Any] = zmq.Context()
        stranger = context.socket(zmq.PUSH)

        def refuse(why: str) -> None:
            nonlocal refused
            refused += 1
            if refused < flood:
                stranger.send(b"garbage")  # there is always more

        transport = Transport(
            context, id=0, run=RUN, host="127.0.0.1", port=None, max_message_bytes=2**20, connections=1,
            send_timeout=1.0, deliver=lambda message: None, reject=refuse,
        )  # fmt: skip
        stranger.connect(transport.endpoint)
        for _ in range(2 * MESSAGES_PER_TURN):
            stranger.send(b"garbage")
        transport.start([transport.endpoint])
        while refused < flood:
            await asyncio.sleep(0.0)
            at_work.append(refused)
        transport.close()
        context.destroy(linger=0)

    asyncio.run(node())
    assert max(after - before for before, after in itertools.pairwise(at_work)) <= 2 * MESSAGES_PER_TURN


LINKS = {"name": "uniform", "latency": 0.01, "upload": 100}


@pytest.mark.parametrize(
    ("settings", "messages", "hoard"),
    [
        ({"sharing": {"name": "full"}}, 1_000, 3_000),
        ({"sharing": {"name": "secure"}}, 500, 0),
        ({"network": LINKS}, 1_000, 3_000),
    ],
    ids=["full", "secure", "with a network"],
)
def test_a_run_under_siege_goes_on_as_in_peace(
    settings: dict[str, Any], messages: int, hoard: int, tmp_path: Path
) -> None:
    # A node may come to own some MiB that it shared before. What is hoarded is 55 MiB, and its room is 11.
    siege = Siege(tmp_path, messages, seed=1, settings=settings, hoard=hoard, grown_mib=16.0)
    siege.run()
    assert not siege.problems, "\n".join(siege.problems)
    assert siege.sent.total() == messages + hoard
    assert siege.must_refuse > messages // 2
    assert not hoard or siege.summary["messages_late"] > hoard // 4, "what is far ahead fills a mailbox"
