"""The conformance suite of runtimes: the guarantees that every engine gives to a node.

    def test_my_engine():
        check_runtime(MyHarness())

Each check runs two or three nodes and inspects what their bodies return. Failures are AssertionErrors. The times are
long enough for a busy machine and short enough for a test.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.mailbox import Filter
from shoal.message import Message, Payload
from shoal.runtime import Runtime
from shoal.testing.harness import RuntimeHarness
from shoal.types import NodeId

SHORT = 0.15
"""Seconds to wait for a message that must not arrive, or for an event that other nodes must not wait for."""
LONG = 20.0
"""Seconds that no check takes: the timeout of a receive that must succeed."""
MANY = 50


def check_runtime(harness: RuntimeHarness) -> None:
    """Assert that the runtimes of `harness` keep their contract."""
    _check_messages_arrive_once_intact_and_in_order(harness)
    _check_a_receive_takes_only_what_its_filter_matches(harness)
    _check_a_repeated_message_is_received_once(harness)
    _check_early_messages_are_kept(harness)
    _check_two_tasks_receive_concurrently(harness)
    _check_a_timeout_returns_what_arrived(harness)
    _check_a_receive_does_not_wait_for_failed_nodes(harness)
    _check_a_receive_waits_for_rejoined_nodes(harness)
    _check_send_and_wait_and_send_keep_their_common_order(harness)
    _check_receive_available_takes_all_unclaimed_messages_of_a_kind(harness)
    _check_background_tasks_end_with_the_run(harness)
    _check_a_failing_background_task_ends_the_run(harness)
    _check_compute_does_not_block_messages(harness)
    _check_the_clock(harness)


def _check_messages_arrive_once_intact_and_in_order(harness: RuntimeHarness) -> None:
    sent = {sender: [_message(sender, "model", round) for round in range(MANY)] for sender in (1, 2)}

    async def sender(runtime: Runtime, id: NodeId) -> None:
        for message in sent[id]:
            await runtime.send(0, message)

    async def receiver(runtime: Runtime) -> list[Message]:
        received = [m for _ in range(2 * MANY) for m in await runtime.receive(Filter("model"), LONG)]
        return received + await runtime.receive(Filter("model"), SHORT)

    received: list[Message] = harness.run({0: receiver, 1: lambda r: sender(r, 1), 2: lambda r: sender(r, 2)})[0]
    for id, messages in sent.items():
        rounds = [m.round for m in received if m.sender == id]
        assert rounds == list(range(MANY)), f"node {id} sent rounds 0 to {MANY - 1} in order; rounds {rounds} arrived"
        for before, after in zip(messages, (m for m in received if m.sender == id), strict=True):
            _check_equal(before, after)


def _check_a_receive_takes_only_what_its_filter_matches(harness: RuntimeHarness) -> None:
    async def early(runtime: Runtime) -> None:
        for kind, round in (("model", 1), ("other", 0), ("model", 0)):
            await runtime.send(0, _message(1, kind, round))

    async def late(runtime: Runtime) -> None:
        await runtime.sleep(SHORT)
        await runtime.send(0, _message(2, "model", 0))

    async def receiver(runtime: Runtime) -> list[list[Message]]:
        both = await runtime.receive(Filter("model", 0, (1, 2)), LONG)
        next_round = await runtime.receive(Filter("model", 1, (1,)), LONG)
        other_kind = await runtime.receive(Filter("other"), LONG)
        return [both, next_round, other_kind]

    both, next_round, other_kind = harness.run({0: receiver, 1: early, 2: late})[0]
    seen = {(m.sender, m.kind, m.round) for m in both}
    assert seen == {(1, "model", 0), (2, "model", 0)}, f"waited for 'model' of round 0 from 1 and 2; got {both}"
    assert len(both) == 2, f"expected one message from each; got {both}"
    _check_is(next_round, 1, "model", 1)
    _check_is(other_kind, 1, "other", 0)


def _check_a_repeated_message_is_received_once(harness: RuntimeHarness) -> None:
    async def sender(runtime: Runtime) -> None:
        for round in (0, 0, 1, 0, 1):
            await runtime.send(0, _message(1, "model", round))
        await runtime.send(0, _message(1, "done", 0))

    async def receiver(runtime: Runtime) -> list[list[Message]]:
        first = await runtime.receive(Filter("model", 0, (1,)), LONG)
        await runtime.receive(Filter("done"), LONG)
        again = await runtime.receive(Filter("model", 0, (1,)), SHORT)
        next_round = await runtime.receive(Filter("model", 1, (1,)), LONG)
        return [first, again, next_round, runtime.receive_available("model")]

    first, again, next_round, rest = harness.run({0: receiver, 1: sender})[0]
    _check_is(first, 1, "model", 0)
    assert again == [], f"the message of node 1 for round 0 was received before, so its copy is dropped; got {again}"
    _check_is(next_round, 1, "model", 1)
    assert rest == [], f"copies for rounds 0 and 1 are dropped; collected {rest}"


def _check_early_messages_are_kept(harness: RuntimeHarness) -> None:
    async def sender(runtime: Runtime) -> None:
        for round in range(MANY):
            await runtime.send(0, _message(1, "model", round))
        await runtime.send(0, _message(1, "done", 0))

    async def receiver(runtime: Runtime) -> list[int]:
        await runtime.receive(Filter("done"), LONG)  # all other messages have arrived by now, unclaimed
        descending = range(MANY - 1, -1, -1)
        return [m.round for r in descending for m in await runtime.receive(Filter("model", r, (1,)), LONG)]

    rounds = harness.run({0: receiver, 1: sender})[0]
    assert rounds == list(range(MANY - 1, -1, -1)), f"messages that arrived before the receive: {rounds}"


def _check_two_tasks_receive_concurrently(harness: RuntimeHarness) -> None:
    async def receiver(runtime: Runtime) -> list[list[Message]]:
        got: list[list[Message]] = []

        async def answer_question() -> None:
            got.append(await runtime.receive(Filter("question"), LONG))
            await runtime.send(1, _message(0, "answer", 0))

        runtime.background(answer_question())
        got.append(await runtime.receive(Filter("model", 0, (1,)), LONG))
        return got

    async def asker(runtime: Runtime) -> None:
        await runtime.sleep(SHORT / 3)
        await runtime.send(0, _message(1, "question", 0))
        await runtime.receive(Filter("answer", 0, (0,)), LONG)
        await runtime.send(0, _message(1, "model", 0))

    question, model = harness.run({0: receiver, 1: asker})[0]
    _check_is(question, 1, "question", 0)
    _check_is(model, 1, "model", 0)


def _check_a_timeout_returns_what_arrived(harness: RuntimeHarness) -> None:
    async def receiver(runtime: Runtime) -> tuple[list[Message], list[Message], float]:
        some = await runtime.receive(Filter("model", 0, (1, 2)), 2 * SHORT)
        started = runtime.now()
        none = await runtime.receive(Filter("unsent"), SHORT)
        return some, none, runtime.now() - started

    async def sender(runtime: Runtime) -> None:
        await runtime.send(0, _message(1, "model", 0))

    async def idle(runtime: Runtime) -> None:
        await runtime.sleep(0.0)

    some, none, waited = harness.run({0: receiver, 1: sender, 2: idle})[0]
    _check_is(some, 1, "model", 0)
    assert none == [], f"no node sent 'unsent'; got {none}"
    assert SHORT * 0.99 <= waited < LONG, f"a timeout of {SHORT} s took {waited} s"


def _check_a_receive_does_not_wait_for_failed_nodes(harness: RuntimeHarness) -> None:
    async def survivor(runtime: Runtime) -> list[list[Message]]:
        got = [await runtime.receive(Filter("ready", 0, (1, 2)), LONG)]

        async def fail_peer() -> None:
            await runtime.sleep(SHORT / 3)
            harness.mark_failed(2)

        runtime.background(fail_peer())
        got.append(await runtime.receive(Filter("model", 0, (1, 2))))  # 2 fails during this receive
        assert 2 in runtime.failed_peers(), f"node 2 failed; failed_peers() returns {set(runtime.failed_peers())}"
        assert 1 not in runtime.failed_peers(), (
            f"node 1 did not fail; failed_peers() returns {set(runtime.failed_peers())}"
        )
        got.append(await runtime.receive(Filter("model", 1, (2,))))  # 2 failed before this receive
        for round in range(MANY):
            await runtime.send(2, _message(0, "model", round))
        await runtime.send(1, _message(0, "model", 0))
        return got

    async def peer(runtime: Runtime) -> list[Message]:
        await runtime.send(0, _message(1, "ready", 0))
        await runtime.send(0, _message(1, "model", 0))
        return await runtime.receive(Filter("model", 0, (0,)), LONG)

    async def victim(runtime: Runtime) -> None:
        await runtime.send(0, _message(2, "ready", 0))
        await runtime.receive(Filter("never sent"))

    results = harness.run({0: survivor, 1: peer, 2: victim})
    ready, model, nothing = results[0]
    assert len(ready) == 2, f"both nodes sent; got {ready}"
    _check_is(model, 1, "model", 0)
    assert nothing == [], f"a failed node sent nothing; got {nothing}"
    _check_is(results[1], 0, "model", 0)
    assert 2 not in results, f"node 2 failed and yet returned {results[2]}"


def _check_a_receive_waits_for_rejoined_nodes(harness: RuntimeHarness) -> None:
    async def survivor(runtime: Runtime) -> list[tuple[list[Message], float]]:
        got: list[tuple[list[Message], float]] = []

        async def receive(round: int) -> None:
            began = runtime.now()
            messages = await runtime.receive(Filter("model", round, (1, 2)), SHORT)
            got.append((messages, runtime.now() - began))

        await runtime.receive(Filter("ready", 0, (2,)), LONG)
        harness.mark_failed(2)
        runtime.mark_rejoined(2, 5)
        assert 2 not in runtime.failed_peers(), f"node 2 rejoined; failed_peers() returns {set(runtime.failed_peers())}"
        await receive(4)  # not expected before round 5
        await receive(5)  # expected from round 5 on
        return got

    async def peer(runtime: Runtime) -> None:
        for round in (4, 5):
            await runtime.send(0, _message(1, "model", round))
        await runtime.sleep(3 * SHORT)

    async def victim(runtime: Runtime) -> None:
        await runtime.send(0, _message(2, "ready", 0))
        await runtime.receive(Filter("never sent"))

    (before, waited_before), (since, waited_since) = harness.run({0: survivor, 1: peer, 2: victim})[0]
    _check_is(before, 1, "model", 4)
    _check_is(since, 1, "model", 5)
    assert waited_before < SHORT * 0.9, (
        f"the receive waited {waited_before} s for node 2 before the round in which it rejoined"
    )
    assert waited_since > SHORT * 0.9, (
        f"the receive did not wait for node 2 from the round in which it rejoined: {waited_since} s"
    )


def _check_send_and_wait_and_send_keep_their_common_order(harness: RuntimeHarness) -> None:
    async def sender(runtime: Runtime) -> list[bool]:
        left = []
        for round in range(10):
            left.append(
                await (runtime.send if round % 3 == 0 else runtime.send_and_wait)(0, _message(1, "model", round))
            )
        return left

    async def receiver(runtime: Runtime) -> list[int]:
        return [m.round for _ in range(10) for m in await runtime.receive(Filter("model"), LONG)]

    results = harness.run({0: receiver, 1: sender})
    assert results[1] == [True] * 10, f"every message left its node; send_and_wait and send returned {results[1]}"
    assert results[0] == list(range(10)), f"messages were sent in order 0 to 9, and arrived as {results[0]}"


def _check_receive_available_takes_all_unclaimed_messages_of_a_kind(harness: RuntimeHarness) -> None:
    async def sender(runtime: Runtime) -> None:
        for kind, round in (("model", 0), ("model", 3), ("other", 0), ("model", 1), ("done", 0)):
            await runtime.send(0, _message(1, kind, round))

    async def receiver(runtime: Runtime) -> list[list[Message]]:
        nothing = runtime.receive_available("done")
        await runtime.receive(Filter("done"), LONG)
        claimed = await runtime.receive(Filter("model", 3, (1,)), LONG)
        found, again = runtime.receive_available("model"), runtime.receive_available("model")
        return [nothing, claimed, found, again, await runtime.receive(Filter("other"), LONG)]

    nothing, claimed, found, again, other = harness.run({0: receiver, 1: sender})[0]
    assert nothing == [], f"no message had arrived; got {nothing}"
    _check_is(claimed, 1, "model", 3)
    rounds = [message.round for message in found]
    assert rounds == [0, 1], f"'model' of rounds 0 and 1 had arrived, in this order; received {rounds}"
    assert again == [], f"received messages are claimed; got {again}"
    _check_is(other, 1, "other", 0)


def _check_background_tasks_end_with_the_run(harness: RuntimeHarness) -> None:
    ticks: list[float] = []
    ended: list[str] = []

    async def tick(runtime: Runtime) -> None:
        try:
            while True:
                ticks.append(runtime.now())
                await runtime.sleep(SHORT / 20)
        finally:
            ended.append("ticking")

    async def wait(runtime: Runtime) -> None:
        try:
            await runtime.receive(Filter("never sent"))
        finally:
            ended.append("waiting")

    async def brief(runtime: Runtime) -> int:
        runtime.background(tick(runtime))
        runtime.background(wait(runtime))
        await runtime.sleep(SHORT)
        return len(ticks)

    async def lasting(runtime: Runtime) -> None:
        await runtime.sleep(2 * SHORT)

    before = harness.run({0: brief, 1: lasting})[0]
    assert before > 1, f"a background task ran {before} times during {SHORT} s of sleep; expected about 20"
    assert len(ticks) == before, f"a background task ran {len(ticks) - before} times after its node had ended"
    assert sorted(ended) == ["ticking", "waiting"], f"background tasks must end with their node; these ended: {ended}"


class _ExpectedError(Exception):
    """Raised by the suite on purpose."""


def _check_a_failing_background_task_ends_the_run(harness: RuntimeHarness) -> None:
    async def fail() -> None:
        raise _ExpectedError

    async def body(runtime: Runtime) -> None:
        runtime.background(fail())
        await runtime.receive(Filter("never sent"))

    try:
        harness.run({0: body})
    except _ExpectedError:
        return
    raise AssertionError("a background task raised an exception, and the run continued")


@dataclass(frozen=True)
class _SlowWork:
    """A work that only takes time."""

    seconds: float
    result: str

    @property
    def batch_key(self) -> Hashable:
        return id(self)

    def run(self) -> str:
        time.sleep(self.seconds)
        return self.result

    @staticmethod
    def run_batch(works: Sequence[Any]) -> list[Any]:
        return [work.run() for work in works]


def _check_compute_does_not_block_messages(harness: RuntimeHarness) -> None:
    async def busy(runtime: Runtime) -> list[str]:
        events: list[str] = []

        async def answer() -> None:
            await runtime.receive(Filter("question"), LONG)
            await runtime.send(1, _message(0, "answer", 0))
            events.append("answered")

        runtime.background(answer())
        events.append(await runtime.compute(_SlowWork(4 * SHORT, "computed")))
        return events

    async def asker(runtime: Runtime) -> list[Message]:
        await runtime.sleep(SHORT)
        await runtime.send(0, _message(1, "question", 0))
        return await runtime.receive(Filter("answer", 0, (0,)), LONG)

    results = harness.run({0: busy, 1: asker})
    assert results[0] == ["answered", "computed"], f"a node must answer while it computes; the order was {results[0]}"
    _check_is(results[1], 0, "answer", 0)


def _check_the_clock(harness: RuntimeHarness) -> None:
    async def body(runtime: Runtime) -> list[float]:
        times = [runtime.now()]
        for seconds in (0.0, SHORT / 3, 0.0, SHORT / 3):
            await runtime.sleep(seconds)
            times.append(runtime.now())
        return times

    for node, times in harness.run({0: body, 1: body}).items():
        assert times == sorted(times), f"node {node}: the clock ran backwards: {times}"
        assert 0.0 <= times[0] < LONG, f"node {node}: the first time is {times[0]} s; expected about 0"
        for before, after in ((times[1], times[2]), (times[3], times[4])):
            slept = after - before
            assert SHORT * 0.99 / 3 <= slept < LONG, f"node {node}: {SHORT / 3} s of sleep took {slept} s"


def _message(sender: NodeId, kind: str, round: int) -> Message:
    """A message with arrays of several types and sizes: empty ones, and ones longer than a short frame."""
    rng = np.random.default_rng([sender, round])
    arrays = {
        "params": rng.standard_normal(rng.integers(1, 3000)).astype(np.float32),
        "flags": rng.integers(0, 2, (3, round % 4)).astype(np.bool_),
        "indices": rng.integers(-5, 5, 63 + round % 3),
    }
    return Message(
        sender, kind, round, Payload(arrays, {"age": round, "name": "é" * (round % 3), "rate": 0.5}).frozen()
    )


def _check_is(messages: list[Message], sender: NodeId, kind: str, round: int) -> None:
    found = [(m.sender, m.kind, m.round) for m in messages]
    assert found == [(sender, kind, round)], f"expected {kind!r} of round {round} from node {sender}; got {messages}"


def _check_equal(sent: Message, received: Message) -> None:
    assert (received.kind, received.run) == (sent.kind, sent.run), f"{sent} arrived as {received}"
    assert dict(received.payload.fields) == dict(sent.payload.fields), f"{sent} arrived with {received.payload.fields}"
    assert received.payload.arrays.keys() == sent.payload.arrays.keys(), f"{sent} arrived with other arrays"
    for name, array in sent.payload.arrays.items():
        other = received.payload.arrays[name]
        assert other.dtype == array.dtype, f"{sent}: {name!r} arrived as {other.dtype}, not {array.dtype}"
        assert np.array_equal(other, array), f"{sent}: {name!r} arrived changed"
        assert not other.flags.writeable, f"{sent}: {name!r} arrived writable"
