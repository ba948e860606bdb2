"""Networks, devices, availability and timed faults with real processes: the same behaviour as in the simulation."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import zmq

import leaping
from conftest import is_zygote, until
from leaping import LeapingLoop
from process_runs import NODES, Started, started
from shoal.engines.processes import control
from shoal.engines.processes.capacity import KeptMemory
from shoal.engines.processes.deferred_evaluations import DeferredEvaluations, SnapshotTimer
from shoal.engines.processes.runtime import ProcessRuntime, RuntimeSettings
from shoal.engines.processes.shaper import (
    Arrival,
    NetworkAddress,
    Shaper,
    encode,
)
from shoal.engines.processes.slots import Slots
from shoal.engines.processes.transport import Transport
from shoal.environment.devices import Speed
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.mailbox import Mailbox
from shoal.message import RUN_LENGTH, Message, Payload
from shoal.node import Node
from shoal.node_training import NodeTraining
from shoal.results.records import Average, End, Evaluation, Event, Round, RunFolder
from shoal.testing import Faults

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]

STEP = 0.1
ROUNDS = 24
LINKS = {"name": "uniform", "latency": 0.02, "upload": 20, "download": 20}
SHAPED = "network={name='uniform', latency=0.02, upload=20}"


def experiment(**changed: Any) -> Experiment:
    given: dict[str, Any] = {
        "nodes": NODES,
        "seed": 1,
        "engine": "processes",
        "algorithm": {"name": "dpsgd", "rounds": 6},
        "topology": {"name": "regular", "degree": 3},
        "model": {"name": "mlp", "hidden": (32,)},
        "training": {"batch_size": 8, "local_steps": 2},
        "speed": {"step_seconds": STEP},
        "network": LINKS,
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**given, **changed})


def records_of(run: Any, node: int, kind: type) -> list[Any]:
    return [record for record in run.folder.read(node) if isinstance(record, kind)]


def events_of(run: Any, node: int) -> dict[str, Event]:
    return {event.what: event for event in records_of(run, node, Event)}


def test_models_and_times_equal_the_simulation_with_slow_nodes_and_evaluation_by_the_clock(tmp_path: Path) -> None:
    plan = {"seconds": 0.5, "samples": 20}
    faults = Faults().slow(1, factor=2.0, what="compute").at(0.0)
    run = experiment(evaluation=plan, fault=faults.schedule).run(tmp_path)
    simulated = experiment(engine="simulation", evaluation=plan, fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == simulated.summary["status"] == "completed"
    assert run.summary["digest"] == simulated.summary["digest"]
    virtual = simulated.summary["time"]["virtual_s"]
    ends = [end.time for node in range(NODES) for end in records_of(run, node, End)]
    assert virtual * 0.95 < max(ends) < virtual + 40  # a loaded machine is slow; benchmarks measure precisely
    times = [record.time for record in records_of(run, 1, Round)]
    assert np.diff([0.0, *times]).min() > 2 * 2 * STEP * 0.95
    padded = [end.padded_s for node in range(NODES) for end in records_of(run, node, End)]
    assert run.summary["time"]["padded_s"] == pytest.approx(sum(padded))
    assert len([e for e in records_of(run, 1, Event) if e.what == "fault"]) == 1
    for node in range(NODES):
        ticks = [(evaluation.tick, evaluation.time) for evaluation in records_of(run, node, Evaluation)]
        assert ticks[:-1] == [(tick, tick * 0.5) for tick in range(1, len(ticks))]
        assert ticks[-1][0] == len(ticks) > 2
        assert ticks[-1][1] >= max(ends) - 0.01
    averages = [average for average in run.folder.read_averages() if isinstance(average, Average)]
    assert [(a.tick, a.nodes) for a in averages] == [(tick, NODES) for tick in range(1, len(ticks) + 1)]
    *_, last = simulated.folder.read_averages()
    assert averages[-1].scores == pytest.approx(last.scores, rel=1e-5)


@pytest.mark.parametrize(
    ("machine", "slowness", "padded", "overrun"),
    [(0.05, 1.0, 0.15, 0.0), (0.05, 2.0, 0.35, 0.0), (0.3, 1.0, 0.0, 0.1), (0.3, 2.0, 0.1, 0.0)],
)
def test_computing_is_extended_to_the_time_of_the_device(
    machine: float, slowness: float, padded: float, overrun: float
) -> None:
    async def body() -> tuple[float, float, float]:
        loop = cast(LeapingLoop, asyncio.get_running_loop())
        settings = RuntimeSettings(speed=Speed(step_seconds=STEP))
        async with ProcessRuntime(0, cast(Transport, None), Mailbox(), Slots(), settings) as runtime:
            runtime.slow_down(slowness)
            await runtime.compute(cast(Any, SimpleNamespace(seconds=2 * STEP, run=lambda: loop.leap(machine))))
            return runtime.now(), runtime.padded, runtime.overrun

    assert leaping.run(body()) == pytest.approx((machine + padded, padded, overrun))


def test_a_change_of_speed_applies_to_the_rest_of_a_computation_under_way() -> None:
    async def body(changes: dict[float, Callable[[ProcessRuntime], None]]) -> tuple[float, float]:
        loop = cast(LeapingLoop, asyncio.get_running_loop())
        settings = RuntimeSettings(speed=Speed(step_seconds=STEP))

        class Training:
            def run(self) -> None:
                loop.leap(1.0)

            @property
            def seconds(self) -> float:
                """Asked for when the machine is done: from now on the clock may leap to the next timer."""
                while changes:
                    loop.call_at(*changes.popitem(), runtime)
                return 8.0

        async with ProcessRuntime(0, cast(Transport, None), Mailbox(), Slots(), settings) as runtime:
            await runtime.compute(cast(Any, Training()))
            return runtime.now(), runtime.padded

    # 2 of 8 s at full speed, 2 more in 6 s, then the last 4.
    slower = {2.0: lambda runtime: runtime.slow_down(3.0), 8.0: lambda runtime: runtime.slow_down(1.0)}
    assert leaping.run(body(slower)) == (12.0, 11.0)
    offline = {at: partial(ProcessRuntime.set_online, online=online) for at, online in ((2.0, False), (12.0, True))}
    assert leaping.run(body(offline)) == (18.0, 7.0)


def test_a_node_that_hangs_completes_the_send_that_has_begun_and_nothing_after_it() -> None:
    sent: list[int] = []

    class Slow:
        """A transport that takes a second for each message."""

        async def send(self, to: int, message: Message) -> bool:
            await asyncio.sleep(1.0)
            sent.append(to)
            return True

    async def algorithm(runtime: ProcessRuntime, node: Node) -> None:
        await node.send([1, 2, 3], Payload({"params": np.zeros(1)}), round=0)
        await runtime.sleep(0.0)
        await node.send([1], Payload({"params": np.zeros(1)}), round=1)

    async def body() -> None:
        async with ProcessRuntime(0, cast(Transport, Slow()), Mailbox(), Slots()) as runtime:
            node = Setup(Experiment(nodes=4)).node(0, runtime, cast(Any, None), "0" * RUN_LENGTH, None)
            asyncio.get_running_loop().call_later(1.5, runtime.hang)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(algorithm(runtime, node), 60.0)

    leaping.run(body())
    assert sent == [1, 2, 3]


def test_peers_are_waited_for_longer_the_longer_a_training_takes_and_the_more_nodes_share_a_slot() -> None:
    async def timeouts(trainings_per_slot: float) -> list[float]:
        settings = RuntimeSettings(trainings_per_slot=trainings_per_slot, min_peer_timeout=7.0)
        async with ProcessRuntime(0, cast(Transport, None), Mailbox(), Slots(), settings) as runtime:
            found = [runtime.peer_timeout()]
            for seconds in (0.2, 0.0):
                work = SimpleNamespace(seconds=0.0, run=lambda seconds=seconds: time.sleep(seconds))
                await runtime.compute(cast(Any, work))
                found.append(runtime.peer_timeout())
            return found

    for share in (1.0, 10.0):
        before, after, later = asyncio.run(timeouts(share))
        assert before == 7.0
        assert 7.0 + 5 * 0.2 * share <= after < 7.0 + 5 * 0.2 * share + 10 * share
        assert later == after, "a shorter training does not shorten it"
    assert after > 7.0 + 5 * 0.2 * 10 > 7.0 + 5 * 1.9, "ten trainings, one after another"


def test_nodes_that_crash_and_restart_by_schedule_rejoin_together(tmp_path: Path) -> None:
    # Many rounds: the other nodes still train when nodes rejoin, even if the coordinator restarts them late.
    faults = Faults().crash("2-3").at(1.2).until(1.7).slow(2, factor=2.0, what="compute").at(1.4)
    run = experiment(algorithm={"name": "dpsgd", "rounds": ROUNDS}, fault=faults.schedule).run(tmp_path)
    assert run.summary["status"] == "completed", run.summary
    assert not run.summary["lost"]
    for node in (2, 3):
        rejoined = events_of(run, node)["rejoined"]
        faults_of_node = [str(event.detail) for event in records_of(run, node, Event) if event.what == "fault"]
        assert faults_of_node[:2] == ["nodes 2-3 crash", f"node {node} restarts"]
        restart = next(e for e in records_of(run, node, Event) if e.detail == f"node {node} restarts")
        assert 1.7 < restart.time < rejoined.time < restart.time + 60
        rounds = [r.round for r in records_of(run, node, Round) if r.time > rejoined.time]
        assert rounds == list(range(rounds[0], ROUNDS))
        before = [r.round for r in records_of(run, node, Round) if r.time < 1.7]
        assert rounds[0] > max(before, default=0)  # never its first round: the other nodes are at least in that round
        # From the agreed round on, no node continues without it.
        waits = [e for other in range(NODES) for e in records_of(run, other, Event) if e.what == "timed out"]
        assert all(int(e.detail.partition(":")[0].removeprefix("round ")) < rounds[0] for e in waits)
    last_two = [r.time for r in records_of(run, 2, Round)][-2:]
    assert last_two[1] - last_two[0] > 2 * 2 * STEP * 0.95  # as slow as before the crash
    for node in (0, 1, 4, 5):
        assert [r.round for r in records_of(run, node, Round)] == list(range(ROUNDS))


def test_offline_nodes_stand_still_a_partition_is_repaired_and_all_nodes_end_after_the_duration(tmp_path: Path) -> None:
    file = tmp_path / "intervals.csv"
    file.write_text("1,5,inf")
    run = experiment(
        algorithm={"name": "dpsgd", "rounds": 1000},
        duration=11.5,
        availability={"name": "intervals", "path": str(file)},
        fault=Faults().partition("0-2", "3-5").at(6.5).until(8.5).schedule,
        processes={"receive_timeout": 0.3},
    ).run(tmp_path)
    assert run.summary["status"] == "completed", run.summary
    first = records_of(run, 1, Round)[0]
    assert first.time > 5.0
    peers = [node for node in range(NODES) if node != 1]
    assert min(records_of(run, node, Round)[0].time for node in peers) < 5.0
    timeouts = [e for node in peers for e in records_of(run, node, Event) if e.what == "timed out"]
    assert [e for e in timeouts if e.time < 5.0]
    assert [e for e in timeouts if e.time > 6.8]
    for node in range(NODES):
        (end,) = records_of(run, node, End)
        assert 11.5 <= end.time < 120.0  # a thousand rounds take longer
        assert records_of(run, node, Round)[-1].time > 8.5
        assert np.isfinite(np.load(run.folder.model(node))).all()


def test_without_averages_the_last_evaluation_still_has_the_next_tick(tmp_path: Path) -> None:
    run = experiment(
        algorithm={"name": "fedavg", "rounds": 1000}, duration=1.7, evaluation={"seconds": 0.5, "samples": 20}
    ).run(tmp_path)
    assert run.summary["status"] == "completed", run.summary
    for node in range(NODES):
        ticks = [(evaluation.tick, evaluation.time) for evaluation in records_of(run, node, Evaluation)]
        assert ticks[:3] == [(tick, tick * 0.5) for tick in (1, 2, 3)]
        assert [tick for tick, _ in ticks] == list(range(1, len(ticks) + 1))
        assert ticks[-1][1] >= 1.7
    assert not records_of(run, NODES, Evaluation)  # the server, as in the simulation


def test_the_network_process_reads_an_endless_fault_schedule_only_as_far_as_needed(tmp_path: Path) -> None:
    run = experiment(fault=Faults().crash(1).every(1e6).lasting(1.0).schedule, processes={"receive_timeout": 20.0}).run(
        tmp_path
    )
    assert run.summary["status"] == "completed", run.summary
    assert "timed out" not in run.summary["events"]  # no node waited for a message that never arrived


def test_a_run_ends_when_all_nodes_are_offline_forever_although_events_continue(tmp_path: Path) -> None:
    file = tmp_path / "intervals.csv"
    file.write_text("".join(f"{node},0,1\n" for node in range(NODES)))
    run = experiment(
        algorithm={"name": "dpsgd", "rounds": 1000},
        availability={"name": "intervals", "path": str(file)},
        fault=Faults().slow(0, factor=2.0).every(0.5).lasting(0.5).schedule,
    ).run(tmp_path)
    assert run.summary["status"] == "failed", run.summary
    assert set(run.summary["lost"].values()) == {"hung: it is offline and will not come online again"}
    assert run.summary["time"]["wall_s"] < 60


def test_a_hung_node_does_not_continue_when_it_comes_online() -> None:
    async def body() -> bool:
        runtime = ProcessRuntime(0, cast(Transport, None), Mailbox(), Slots())
        runtime.hang()
        runtime.set_online(online=False)
        runtime.set_online(online=True)
        sleeping = asyncio.ensure_future(runtime.sleep(0.0))
        done, _ = await asyncio.wait([sleeping], timeout=0.1)
        sleeping.cancel()
        return bool(done)

    assert not asyncio.run(body())


EVALUATED_NODE = SimpleNamespace(
    id=0,
    nodes=2,
    next_round=1,
    params=np.zeros(3, np.float32),
    context=SimpleNamespace(schedule=SimpleNamespace(evaluated=True, averaged=False)),
    training=NodeTraining(cast(Any, SimpleNamespace(evaluate=lambda params: {"sum": float(params.sum())})), 0.1),
)
"""A node whose model is evaluated by the clock."""


# Unexpected ends


def children(run: Started) -> tuple[psutil.Process, list[psutil.Process]]:
    """The network process, which is forked first, and the processes of the nodes in order."""
    network, *nodes = until(
        lambda: len(found := sorted(run.zygote.children(), key=lambda p: p.pid)) == NODES + 1 and found
    )
    return network, nodes


def test_ctrl_c_in_a_shaped_run_keeps_models_and_leaves_no_process(tmp_path: Path) -> None:
    with started(tmp_path, SHAPED, held=1) as run:
        run.wait_for_round(0)
        network, _ = children(run)
        run.process.send_signal(signal.SIGINT)
        code, out = run.end()
        assert code == 130, out
        assert run.summary["status"] == "interrupted"
        assert all(run.folder.model(node).exists() for node in range(NODES))
        until(lambda: not is_zygote(network))


def test_an_interrupted_run_with_evaluation_by_the_clock_evaluates_the_models_so_far(tmp_path: Path) -> None:
    with started(tmp_path, SHAPED, "evaluation={seconds=0.3, samples=20}", held=1) as run:
        run.wait_for_round(0)
        time.sleep(0.7)  # at least two ticks
        run.process.send_signal(signal.SIGINT)
        code, out = run.end()
        assert code == 130, out
        assert run.summary["accuracy"] is not None
        for node in range(NODES):
            ticks = [r.tick for r in run.folder.read(node) if isinstance(r, Evaluation)]
            assert ticks == list(range(ticks[0], ticks[-1] + 1))  # the latest, and earlier ones as time permits
            assert len(ticks) > 2
        assert run.summary["averaged_model"] is None  # rather than an outdated one


def kept_snapshots() -> tuple[list[tuple[int, float]], Any]:
    """A place that keeps snapshots, and the tick and time of each of them."""
    kept: list[tuple[int, float]] = []

    def keep(_round: int, time: float, _params: object, tick: int, _progress: object) -> bool:
        kept.append((tick, time))
        return True

    return kept, SimpleNamespace(keep=keep, discard_after=lambda tick: None)


def snapshot_timer(deferred: Any, now: Callable[[], float] = lambda: 0.0, last_tick: int = 0) -> SnapshotTimer:
    return SnapshotTimer(cast(Any, EVALUATED_NODE), cast(Any, None), deferred, now, 0.5, last_tick)


@pytest.mark.parametrize(
    ("seen", "last", "kept"),
    [
        (3, 5, [(4, 2.0), (5, 2.2)]),  # late for the fourth tick, for which other nodes kept their models
        (4, 5, [(5, 2.2)]),
        (5, 5, []),
    ],
)
def test_a_node_that_is_late_for_a_tick_takes_its_snapshot_at_the_end(
    seen: int, last: int, kept: list[tuple[int, float]]
) -> None:
    snapshots, deferred = kept_snapshots()
    snapshot_timer(deferred, last_tick=seen).take_last(control.Finish(tick=last, time=2.2))
    assert snapshots == kept


def test_a_node_that_starts_late_takes_the_snapshots_of_earlier_ticks() -> None:
    snapshots, deferred = kept_snapshots()

    async def body() -> None:
        loop = cast(LeapingLoop, asyncio.get_running_loop())
        timer = snapshot_timer(deferred, now=lambda: loop.time() + 1.2)  # the run began before this node
        running = asyncio.create_task(timer.run())
        await asyncio.sleep(0.9)
        running.cancel()

    leaping.run(body())
    assert snapshots == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


def test_a_node_that_learns_late_of_the_end_discards_snapshots_after_it(tmp_path: Path) -> None:
    deferred = DeferredEvaluations(RunFolder.create(tmp_path, "late"))
    for tick in (1, 2, 3, 4):
        deferred.keep(0, tick * 0.5, np.full(3, tick, np.float32), tick)
    snapshot_timer(deferred, last_tick=4).take_last(control.Finish(tick=2, time=0.9))
    tested = deferred.evaluate(cast(Any, EVALUATED_NODE))
    assert [(e.tick, e.time, e.scores["sum"]) for e in tested] == [(1, 0.5, 3.0), (2, 1.0, 6.0)]


@pytest.mark.parametrize(("latest_first", "order"), [(False, [0, 1, 2]), (True, [2, 1, 0])])
def test_it_is_known_when_the_latest_of_the_kept_models_has_been_evaluated(
    latest_first: bool, order: list[int], tmp_path: Path
) -> None:
    deferred = DeferredEvaluations(RunFolder.create(tmp_path, "kept"))
    for round in range(3):
        deferred.keep(round, round * 0.5, np.full(3, round, np.float32))
    deferred.latest_first = latest_first
    tested = [(e.round, deferred.latest_evaluated) for e in deferred.evaluate(cast(Any, EVALUATED_NODE))]
    assert tested == [(round, 2 in order[: place + 1]) for place, round in enumerate(order)]


def test_a_network_process_that_is_killed_ends_the_run_with_a_clear_error(tmp_path: Path) -> None:
    with started(tmp_path, SHAPED, held=1) as run:
        run.wait_for_round(0)
        network, nodes = children(run)
        network.send_signal(signal.SIGKILL)
        code, out = run.end()
        assert code == 1, out
        assert "the network process exited unexpectedly" in out
        assert "nodes.log" in out
        until(lambda: not any(is_zygote(process) for process in nodes))


def test_in_a_shaped_run_the_neighbours_of_a_killed_node_continue(tmp_path: Path) -> None:
    with started(tmp_path, SHAPED, held=1) as run:
        run.wait_for_round(0)
        _, nodes = children(run)
        nodes[2].send_signal(signal.SIGKILL)
        run.release()
        code, out = run.end()
        assert run.summary["status"] == "incomplete", out
        assert run.summary["lost"] == {"2": "killed by SIGKILL"}
        for node in set(range(NODES)) - {2}:
            assert [r.round for r in run.folder.read(node) if isinstance(r, Round)] == [0, 1, 2, 3]
        assert code == 3, out


def test_a_node_that_has_sent_nothing_receives_in_time() -> None:
    """ZeroMQ signals a message only to a socket whose last read found nothing."""
    message = Message(1, "model", 0, Payload({}))
    delivered: list[Message] = []

    def deliver(message: Message, arrived: asyncio.Event) -> None:
        delivered.append(message)
        arrived.set()

    async def listen() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        network = context.socket(zmq.ROUTER)
        network.bind("tcp://127.0.0.1:*")
        endpoint = network.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        arrived = asyncio.Event()
        address = NetworkAddress(endpoint)
        shaper = Shaper(context, 0, "run", address, cast(Transport, None), lambda message: deliver(message, arrived))
        try:
            shaper.receive(message, 7)
            until(lambda: network.poll(0))  # blocks the event loop, so that the shaper reads nothing meanwhile
            name, _ = network.recv_multipart()
            for _ in range(3):
                network.send_multipart([name, encode([Arrival(1, 7, time.monotonic())])])
                await asyncio.sleep(0.2)
            await asyncio.wait_for(arrived.wait(), 30)
        finally:
            shaper.close()
            network.close(linger=0)
            context.destroy(linger=0)

    asyncio.run(listen())
    assert delivered == [message]


@pytest.mark.parametrize(
    ("kept", "released"),
    [
        (KeptMemory(), 2),
        (KeptMemory(2**60, min_free=0.0), 0),
        (KeptMemory(2**60, min_free=2.0**60), 2),
        (KeptMemory(1, min_free=0.0), 2),
    ],
)
def test_a_node_keeps_the_memory_of_trainings_while_enough_is_free(
    kept: KeptMemory, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("shoal.engines.processes.runtime.release_memory", lambda: calls.append(None))

    async def compute() -> None:
        settings = RuntimeSettings(kept_memory=kept)
        async with ProcessRuntime(0, cast(Transport, None), Mailbox(), Slots(), settings) as runtime:
            for _ in range(2):
                await runtime.compute(cast(Any, SimpleNamespace(seconds=0.0, run=lambda: None)))

    asyncio.run(compute())
    assert len(calls) == released
