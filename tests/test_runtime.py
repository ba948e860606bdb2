"""Runtimes behave the same in both engines (one suite, two harnesses); the fake runtime for tests of algorithms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shoal.algorithms.dpsgd import DPSGD
from shoal.environment.network.links import Uniform
from shoal.errors import DeadlockError, ExperimentError, MessageError, NodeError
from shoal.experiment import Experiment, Fault
from shoal.mailbox import Filter
from shoal.message import Message, Payload, address
from shoal.node import RECORDED_PAYLOAD_REJECTIONS, Node
from shoal.results.records import Event, Round
from shoal.runtime import Runtime
from shoal.sharing.full import FullSharing
from shoal.testing import FakeRuntime, Faults, SimulationHarness, SocketHarness, check_runtime
from shoal.testing.harness import Body
from shoal.topologies.static import Star

HARNESSES: dict[str, Callable[[], Any]] = {
    "simulation": SimulationHarness,
    "simulation with a network": lambda: SimulationHarness(Uniform(latency=0.01, upload=50, download=50)),
    "sockets": SocketHarness,
}


def make_message(sender: int = 1, round: int = 0, kind: str = "model", values: Any = (1.0,)) -> Message:
    return Message(sender, kind, round, Payload({"params": np.array(values, np.float32)}))


@pytest.mark.parametrize("harness", HARNESSES)
def test_the_runtimes_of_both_engines_conform(harness: str) -> None:
    check_runtime(HARNESSES[harness]())


# The suite detects faulty runtimes


class Changed:
    """A runtime that differs from another in one behaviour."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SendsTwice(Changed):
    async def send(self, to: int, message: Message) -> None:
        await self._inner.send(to, message)
        await self._inner.send(to, message)


class LosesSome(Changed):
    async def send(self, to: int, message: Message) -> None:
        if message.round != 3:
            await self._inner.send(to, message)


class IgnoresTheRound(Changed):
    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        return await self._inner.receive(Filter(wanted.kind, None, wanted.senders), timeout)


class ReturnsTooEarly(Changed):
    async def receive(self, wanted: Filter, timeout: float | None = None) -> list[Message]:
        return await self._inner.receive(wanted, 0.01)


class BlocksWhileItComputes(Changed):
    async def compute(self, work: Any) -> Any:
        return work.run()


class NeverSleeps(Changed):
    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(0.0)


class HidesFailedPeers(Changed):
    def failed_peers(self) -> frozenset[int]:
        return frozenset()


class IgnoresFailures(Changed):
    def background(self, task: Coroutine[Any, Any, None]) -> None:
        async def ignore_errors() -> None:
            try:
                await task
            except Exception:
                return

        self._inner.background(ignore_errors())


class ChangedHarness(SimulationHarness):
    def __init__(self, change: type[Changed]) -> None:
        super().__init__()
        self._change = change

    def run(self, bodies: Mapping[int, Body]) -> dict[int, Any]:
        def on_changed(body: Body) -> Body:
            return lambda runtime: body(self._change(runtime))

        return super().run({id: on_changed(body) for id, body in bodies.items()})


@pytest.mark.parametrize(
    "change",
    [
        SendsTwice,
        LosesSome,
        IgnoresTheRound,
        ReturnsTooEarly,
        BlocksWhileItComputes,
        NeverSleeps,
        HidesFailedPeers,
        IgnoresFailures,
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_the_suite_detects_a_faulty_runtime(change: type[Changed]) -> None:
    with pytest.raises((AssertionError, DeadlockError)):
        check_runtime(ChangedHarness(change))


# The harnesses


@pytest.mark.parametrize("harness", HARNESSES)
def test_exceptions_of_a_body_are_raised_by_the_run(harness: str) -> None:
    async def body(runtime: Runtime) -> None:
        await runtime.sleep(0.0)
        raise MessageError("on purpose")

    with pytest.raises(MessageError, match="on purpose"):
        HARNESSES[harness]().run({0: body})


def test_bodies_that_wait_forever_are_an_error_in_both_harnesses() -> None:
    async def body(runtime: Runtime) -> None:
        await runtime.receive(Filter("model", 4))

    with pytest.raises(DeadlockError, match="node 0 waits for 'model' of round 4 from any node"):
        SimulationHarness().run({0: body})
    with pytest.raises(TimeoutError, match="these nodes are not done: 0"):
        SocketHarness(timeout=0.2).run({0: body})


def test_malformed_messages_on_a_port_are_rejected_and_the_node_continues() -> None:
    harness = SocketHarness()

    async def malicious_sender(runtime: Runtime) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(harness.endpoints[0])
        foreign = Message(1, "model", 0, Payload({}), "another run")
        empty = [b""], [address(0)], [address(0), b""]
        bad = [b"garbage"], *empty, *addressed(0, make_message(sender=9), foreign), *addressed(1, make_message())
        for frames in bad:
            socket.send_multipart(frames)
        socket.close(linger=5000)
        context.term()
        while len(harness.rejected) < len(bad):
            await runtime.sleep(0.01)
        await runtime.send(0, make_message())

    async def receiver(runtime: Runtime) -> list[Message]:
        return await runtime.receive(Filter("model"), 60)

    (message,) = harness.run({0: receiver, 1: malicious_sender})[0]
    assert message.sender == 1
    assert len(harness.rejected) == 7
    assert any("the sender is node 9, which does not exist" in why for why in harness.rejected)
    assert any(why == "a message of another run" for why in harness.rejected)
    assert any("a message for node 1, and this is node 0" in why for why in harness.rejected)


def addressed(to: int, *messages: Message) -> list[list[Any]]:
    return [[address(to), *message.frames()] for message in messages]


# The fake runtime


def test_a_fake_runtime_answers_from_its_script_and_records_sent_messages() -> None:
    async def body(runtime: Runtime) -> list[Message]:
        await runtime.send(1, make_message(0, kind="request"))
        return await runtime.receive(Filter("model", 0, (1, 2)))

    fake = FakeRuntime(make_message(2), make_message(3)).deliver(make_message(1), at=5.0)
    received = fake.run(body(fake))
    assert [m.sender for m in received] == [2, 1]
    assert [(to, m.kind) for to, m in fake.sent] == [(1, "request")]
    assert fake.sent_at == [0.0]
    assert fake.now() == 5.0


def test_the_clock_of_a_fake_runtime_moves_exactly_by_the_waiting_times() -> None:
    async def body(runtime: Runtime) -> list[float]:
        times = []
        await runtime.sleep(2.0)
        times.append(runtime.now())
        assert await runtime.receive(Filter("model"), timeout=3.0) == []
        times.append(runtime.now())
        await runtime.receive(Filter("model"), timeout=100.0)
        times.append(runtime.now())
        return times

    fake = FakeRuntime().deliver(make_message(), at=7.5)
    assert fake.run(body(fake)) == [2.0, 5.0, 7.5]
    assert fake.now() == 7.5


def test_background_tasks_of_a_fake_runtime_end_with_the_run() -> None:
    ticks = []

    async def tick(runtime: Runtime) -> None:
        while True:
            ticks.append(runtime.now())
            await runtime.sleep(1.0)

    async def body(runtime: Runtime) -> str:
        runtime.background(tick(runtime))
        await runtime.sleep(2.5)
        return "done"

    fake = FakeRuntime()
    assert fake.run(body(fake)) == "done"
    assert ticks == [0.0, 1.0, 2.0]


def test_an_endless_wait_of_a_fake_runtime_is_an_error_that_names_the_filter() -> None:
    async def body(runtime: Runtime) -> None:
        await runtime.receive(Filter("model", 3, (1, 2)))

    fake = FakeRuntime(make_message(1, round=3))
    with pytest.raises(DeadlockError, match="waits for 'model' of round 3 from 1, 2"):
        fake.run(body(fake))


def test_failed_nodes_of_a_script_are_not_waited_for() -> None:
    async def body(runtime: Runtime) -> tuple[list[int], float]:
        received = await runtime.receive(Filter("model", 0, (1, 2)))
        return [m.sender for m in received], runtime.now()

    fake = FakeRuntime(make_message(1)).mark_failed(2, at=4.0)
    assert fake.run(body(fake)) == ([1], 4.0)
    assert 2 in fake.failed_peers()


def test_an_algorithm_runs_on_a_fake_node() -> None:
    fake = FakeRuntime(
        make_message(1, 0, values=[4, 4]),
        make_message(2, 0, values=[7, 7]),
        make_message(1, 1, values=[6, 6]),
        make_message(2, 1, values=[0, 0]),
    )
    node = fake.node(nodes=3, params=np.zeros(2, np.float32), train=lambda params: params + 1)
    fake.run(DPSGD(rounds=2).run(node))
    # (1 + 4 + 7) / 3 = 4, then (5 + 6 + 0) / 3
    np.testing.assert_allclose(node.params, [11 / 3] * 2, rtol=1e-6)
    assert [(to, m.round) for to, m in fake.sent] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert fake.sent_at == [1.0, 1.0, 2.0, 2.0]
    assert [r.round for r in fake.records if isinstance(r, Round)] == [0, 1]


def test_a_fake_node_continues_without_peers_that_time_out_and_records_them() -> None:
    fake = FakeRuntime(make_message(2, values=[2]))
    node = fake.node(3, nodes=4, params=np.zeros(1, np.float32), receive_timeout=10.0)
    fake.run(DPSGD(rounds=1).run(node))
    assert node.params[0] == 1.0  # the weights 1/3 of itself and of node 2, renormalised
    (event,) = [r for r in fake.records if isinstance(r, Event)]
    assert (event.what, event.detail) == ("timed out", "round 0: no message from 0")


def test_a_neighbour_that_times_out_costs_its_timeout_once_until_it_responds_again() -> None:
    late = make_message(0, round=5, values=[2])
    on_time = [make_message(2, round=round, values=[2]) for round in range(8)]
    fake = FakeRuntime(*on_time, late)  # all arrive before the first receive
    node = fake.node(3, nodes=4, params=np.zeros(1, np.float32), receive_timeout=1000.0)
    times: list[float] = []

    async def receive() -> None:
        for round in range(8):
            received = await node.receive_each(await node.peers(round), round=round)
            assert list(received) == ([0, 2] if round == 5 else [2])
            times.append(node.now())

    fake.run(receive())
    waits = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert waits == pytest.approx([1000.0, 100.0, 10.0, 1.0, 1.0, 0.0, 1000.0, 100.0])


def test_a_neighbour_that_recovers_is_awaited_until_it_has_caught_up(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "nodes": 6,
        "seed": 1,
        "algorithm": {"name": "dpsgd", "rounds": 40},
        "topology": {"name": "ring"},
        "training": {"local_steps": 5},
        "evaluation": {"every": 0, "average": False},
        "speed": {"name": "constant", "step_seconds": 0.2},
        "network": {"name": "uniform", "latency": 0.01},
        "simulation": {"batching": "off", "receive_timeout": 10.0},
    }
    for fault in (
        {"kind": "slow", "node": 2, "factor": 23.0, "time": 10.0, "until": 33.0},  # one long training
        {"kind": "partition", "node": 2, "time": 5.0, "until": 20.0},
    ):
        run = Experiment.from_table({**settings, "fault": [fault]}).run(tmp_path)
        last = max(float(fault["until"]), 33.0) + 12.0  # type: ignore[arg-type]
        late = [r for _, r in run.folder.read_all() if isinstance(r, Event) and r.what == "timed out" and r.time > last]
        assert not late, f"{len(late)} receives without a message, long after the end of the fault"
    always_slow = {"kind": "slow", "node": 2, "factor": 30.0, "time": 5.0}
    run = Experiment.from_table({**settings, "fault": [always_slow]}).run(tmp_path)
    others = [r.time for node in (0, 4) for r in run.folder.read(node) if isinstance(r, Round) and r.round == 39]
    assert max(others) < 40 * 1.1 + 8 * 11.0, "the timeout of ten seconds is waited for a few times, not forty times"


# A node


def test_one_message_object_is_sent_to_all_receivers() -> None:
    async def body() -> None:
        await node.send([1, 2, 3], Payload({"params": writable}), round=0)
        writable[:] = 9
        await node.send([1], node.sharing.outgoing(node.params, 0), round=0)

    writable = np.zeros(2, np.float32)
    fake = FakeRuntime()
    node = fake.node(nodes=4, params=np.ones(2, np.float32))
    fake.run(body())
    (_, first), (_, second), (_, third), (_, model) = fake.sent
    assert first is second is third
    assert not first.payload.arrays["params"].any()
    assert model.payload.arrays["params"] is node.params
    assert node.messages_sent == 4
    assert node.bytes_sent == 3 * first.wire_size + model.wire_size


def test_each_peer_may_get_its_own_payload() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=4, params=np.ones(2, np.float32))
    fake.run(node.send([1, 2], lambda peer: Payload({}, {"to": peer}), round=0))
    assert [(to, m.payload.fields["to"]) for to, m in fake.sent] == [(1, 1), (2, 2)]


def test_nothing_is_sent_to_failed_peers() -> None:
    fake = FakeRuntime().mark_failed(2)
    node = fake.node(nodes=4, params=np.ones(2, np.float32))

    async def body() -> None:
        await node.sleep(1.0)
        await node.send([1, 2], Payload({}), round=0)

    fake.run(body())
    assert [to for to, _ in fake.sent] == [1]
    assert node.messages_sent == 1


def test_messages_that_a_node_waits_for_are_counted_when_they_have_left() -> None:
    fake = FakeRuntime().mark_failed(2)
    node = fake.node(nodes=4, params=np.ones(2, np.float32))

    async def body() -> list[bool]:
        await node.sleep(1.0)
        return [await node.send_and_wait(to, lambda peer: Payload({}, {"to": peer}), round=0) for to in (1, 2, 3)]

    assert fake.run(body()) == [True, False, True]
    assert [(to, message.payload.fields["to"]) for to, message in fake.sent] == [(1, 1), (3, 3)]
    assert node.messages_sent == 2
    assert node.bytes_sent == sum(message.wire_size for _, message in fake.sent)


def test_a_rejoined_peer_times_out_from_the_round_of_its_first_message_on() -> None:
    fake = FakeRuntime().mark_failed(1)
    node = fake.node(nodes=3, params=np.zeros(1, np.float32), receive_timeout=10.0)

    async def body() -> list[tuple[list[int], float]]:
        await node.sleep(1.0)
        node.mark_rejoined(1, 3)
        timed_out = []
        for round in (2, 3, 4):
            await node.receive_each([1, 2], round=round, timeout=10.0)
            timed_out.append((sorted(node.timed_out_peers), node.now()))
        return timed_out

    assert fake.run(body()) == [([2], 11.0), ([1, 2], 21.0), ([1, 2], 31.0)]
    assert [record.detail for record in fake.records if isinstance(record, Event)] == [
        "round 2: no message from 2",
        "round 3: no message from 1, 2",
        "round 4: no message from 1, 2",
    ]


def test_a_payload_that_the_sharing_rejects_is_dropped_counted_and_recorded() -> None:
    fake = FakeRuntime(make_message(1, values=[1, 2, 3]), make_message(2, values=[1]))
    node = fake.node(nodes=3, params=np.zeros(1, np.float32))
    received = fake.run(node.receive_each([1, 2], round=0))
    assert list(received) == [2]
    assert node.rejected_count == 1
    (event,) = [r for r in fake.records if isinstance(r, Event)]
    assert event.what == "payload rejected"
    assert "from node 1: expected one float32 vector 'params' of 1 values" in event.detail


def test_the_first_rejections_are_recorded_and_all_are_counted() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=3, params=np.zeros(1, np.float32))
    for i in range(RECORDED_PAYLOAD_REJECTIONS + 500):
        node.reject(1, f"invalid {i}")
    assert node.rejected_count == RECORDED_PAYLOAD_REJECTIONS + 500
    assert len(fake.records) == RECORDED_PAYLOAD_REJECTIONS


def test_received_payloads_are_in_ascending_order_of_sender() -> None:
    fake = FakeRuntime(make_message(3), make_message(1), make_message(2))
    node = fake.node(nodes=4, params=np.zeros(1, np.float32))
    assert list(fake.run(node.receive_each([3, 2, 1], round=0))) == [1, 2, 3]


def test_a_timeout_of_zero_takes_messages_that_have_arrived() -> None:
    fake = FakeRuntime(make_message(1))
    node = fake.node(nodes=3, params=np.zeros(1, np.float32), receive_timeout=50.0)
    assert list(fake.run(node.receive_each([1, 2], round=0, timeout=0.0))) == [1]
    assert fake.now() == 0.0


@pytest.mark.parametrize(("finite", "sender"), [(True, 2), (False, 1)])
def test_the_first_valid_message_of_any_peer_is_taken(finite: bool, sender: int) -> None:
    fake = FakeRuntime(make_message(1, values=[np.nan]), make_message(2, values=[1]))
    node = fake.node(nodes=3, params=np.zeros(1, np.float32))
    message = fake.run(node.receive_first([1, 2], finite=finite))
    assert message is not None
    assert (message.sender, node.rejected_count) == (sender, int(finite))


def test_weights_without_a_graph_are_equal() -> None:
    fake = FakeRuntime(make_message(1), make_message(2))
    node = fake.node(nodes=3, params=np.zeros(1, np.float32), topology=Star())
    received = fake.run(node.receive_each([1, 2], round=0))
    assert node.weights(received) == {1: 1 / 3, 2: 1 / 3}


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros(2), np.zeros((1, 2), np.float32)])
def test_a_model_of_another_size_or_type_is_rejected(wrong: Any) -> None:
    node = FakeRuntime().node(0, nodes=2, params=np.zeros(2, np.float32))
    with pytest.raises(NodeError, match="params must be a float32 vector of 2 values"):
        node.params = wrong


def test_a_model_cannot_be_written_into() -> None:
    node: Node = FakeRuntime().node(nodes=2, params=np.zeros(2, np.float32), sharing=FullSharing())
    with pytest.raises(ValueError, match="read-only"):
        node.params += 1
    node.params = node.params + 1
    with pytest.raises(ValueError, match="read-only"):
        node.params[0] = 5


def test_the_generators_of_a_node_depend_only_on_purpose_and_node() -> None:
    def draw(id: int, purpose: str) -> float:
        return float(FakeRuntime().node(id, nodes=3, params=np.zeros(1, np.float32)).rng(purpose).random())

    assert draw(0, "peers") == draw(0, "peers")
    assert len({draw(0, "peers"), draw(1, "peers"), draw(0, "masks")}) == 3
    node = FakeRuntime().node(nodes=3, params=np.zeros(1, np.float32))
    assert node.rng("peers") is node.rng("peers")


# Faults


def test_fault_methods_chain_and_build_a_schedule() -> None:
    faults = Faults().crash(3, round=2).raises(4, round=1).hang(5, round=3)
    assert faults.schedule == (Fault("crash", 3, 2), Fault("raise", 4, 1), Fault("hang", 5, 3))
    assert Experiment(nodes=6, fault=faults.schedule).fault == faults.schedule
    with pytest.raises(ExperimentError, match=r"fault\[2\].node = 5: there is no such node; nodes = 5"):
        Experiment(nodes=5, fault=faults.schedule)


def test_extending_a_schedule_leaves_the_original_unchanged() -> None:
    some = Faults().crash(1)
    some.crash(2)
    assert some.schedule == (Fault("crash", 1, 0),)
