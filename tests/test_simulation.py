"""The simulation: virtual time, faults, and the same results for every way to compute them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import models_of
from shoal.algorithms.dpsgd import DPSGD
from shoal.engines.simulation import batching as measure
from shoal.engines.simulation.engine import World
from shoal.environment.network.links import Uniform
from shoal.errors import DeadlockError, NodeError
from shoal.experiment import Experiment
from shoal.mailbox import Filter
from shoal.message import Message, Payload
from shoal.node import Node
from shoal.results.records import Average, End, Event, Round
from shoal.runtime import Runtime
from shoal.testing import Faults, SimulationHarness

NODES = 6
ROUNDS = 3


def experiment(**changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "seed": 1,
        "algorithm": DPSGD(ROUNDS),
        "model": {"name": "mlp", "hidden": (8,)},
        "training": {"batch_size": 8, "local_steps": 2},
        "evaluation": {"every": 0, "average": False, "samples": 20},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def only_run(folder: Path) -> Path:
    (found,) = folder.glob("experiment/*")
    return found


# A run depends only on its seed

PROGRAM = """
import sys
from shoal import Experiment
run = Experiment(
    nodes=12, seed=3, algorithm={"name": "dpsgd", "rounds": 3},
    topology={"name": "regular", "degree": 3, "dynamic": True},
    partition={"name": "dirichlet"}, network={"name": "uniform", "latency": 0.01, "upload": 1, "download": 2},
    simulation={"batching": "vmap"}, evaluation={"every": 2}, fault=[{"kind": "crash", "node": 5, "round": 1}],
).run(sys.argv[1])
lines = [p.read_text() for p in sorted(run.folder.path.glob("nodes/*.jsonl"))]
print(run.summary["digest"], run.summary["time"]["virtual_s"], [l.split('"train_cpu_s"')[0] for l in lines])
"""


def test_a_run_does_not_depend_on_the_order_of_hashes(tmp_path: Path) -> None:
    outputs = []
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1]


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    one, again, other = (experiment(seed=seed).run(tmp_path).summary["digest"] for seed in (1, 1, 2))
    assert one == again != other


# Virtual time


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    message = Message(0, "model", 0, Payload({"params": np.zeros(1000, np.float32)}))
    seconds = message.wire_size * 8e-6  # at 1 Mbit/s

    async def sender(runtime: Runtime) -> None:
        await runtime.sleep(1.0)
        await runtime.send(2, message)
        await runtime.send(2, message)

    async def other(runtime: Runtime) -> None:
        await runtime.sleep(1.0)
        await runtime.send(2, Message(1, "model", 0, message.payload))

    async def receiver(runtime: Runtime) -> list[tuple[int, float]]:
        return [(m.sender, runtime.now()) for _ in range(3) for m in await runtime.receive(Filter("model"))]

    def arrivals(network: Uniform) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = SimulationHarness(network).run({0: sender, 1: other, 2: receiver})[2]
        return found

    def about(*expected: tuple[int, float]) -> list[Any]:
        return [(node, pytest.approx(time)) for node, time in expected]

    assert arrivals(Uniform(latency=0.5)) == about((0, 1.5), (0, 1.5), (1, 1.5))
    up = arrivals(Uniform(latency=0.5, upload=2.0))  # messages to one receiver queue; two senders do not
    assert up == about((0, 1.5 + seconds / 2), (1, 1.5 + seconds / 2), (0, 1.5 + seconds))
    down = arrivals(Uniform(latency=0.5, download=2.0))  # two senders share the receiver's link, until one is done
    assert down == about((0, 1.5 + seconds), (1, 1.5 + seconds), (0, 1.5 + 1.5 * seconds))
    slow_down = arrivals(Uniform(latency=0.5, upload=4.0, download=1.0))  # the slower of the two links limits the rate
    assert slow_down[0] == (0, pytest.approx(1.5 + 2 * seconds))
    slow_up = arrivals(Uniform(latency=0.5, upload=1.0, download=4.0))
    assert slow_up[0] == (0, pytest.approx(1.5 + seconds))


def test_a_run_lasts_as_long_as_its_training_and_its_messages(tmp_path: Path) -> None:
    network = {"name": "uniform", "latency": 0.25, "upload": 1.0}
    described = experiment(nodes=3, speed={"step_seconds": 0.5}, network=network, topology={"name": "full"})
    run = described.run(tmp_path)
    size = models_of(run)[0].size
    message = Message(0, "model", 0, Payload({"params": np.zeros(size, np.float32)})).wire_size
    one = message * 8e-6
    # Two steps, then two messages that share the sender's link.
    a_round = 2 * 0.5 + 0.25 + 2 * one
    assert run.summary["time"]["virtual_s"] == pytest.approx(ROUNDS * a_round)
    times = [r.time for r in run.folder.read(2) if isinstance(r, Round)]
    assert times == pytest.approx([a_round, 2 * a_round, 3 * a_round])


def test_an_unused_timeout_does_not_lengthen_the_run(tmp_path: Path) -> None:
    plain, with_timeout = (
        experiment(simulation={"batching": "off", "receive_timeout": t}).run(tmp_path).summary for t in (None, 1000.0)
    )
    assert with_timeout["time"]["virtual_s"] == plain["time"]["virtual_s"]
    assert with_timeout["digest"] == plain["digest"]


def test_evaluation_takes_no_virtual_time(tmp_path: Path) -> None:
    often, once = (experiment(evaluation={"every": e}).run(tmp_path).summary for e in (1, 0))
    assert often["time"]["virtual_s"] == once["time"]["virtual_s"]
    assert often["digest"] == once["digest"]


# Deadlocks and faults


@dataclass(frozen=True)
class WaitsForever:
    """Node 1 sends nothing in round 1; its neighbours wait for it."""

    async def run(self, node: Node) -> None:
        for r in range(3):
            peers = await node.peers(r)
            if (node.id, r) != (1, 1):
                await node.send(peers, Payload({"params": node.params}), round=r)
            await node.receive_each(peers, round=r)


@dataclass(frozen=True)
class WritesInPlace:
    async def run(self, node: Node) -> None:
        async for _ in node.rounds(2):
            await node.sleep(1.0)
            node.params += 1


@dataclass(frozen=True)
class WritesIntoAnElement:
    async def run(self, node: Node) -> None:
        async for _ in node.rounds(2):
            await node.sleep(1.0)
            node.params[3] = 0.0


@dataclass(frozen=True)
class WritesIntoWhatItReceives:
    async def run(self, node: Node) -> None:
        peers = await node.peers(0)
        await node.send(peers, node.sharing.outgoing(node.params, 0), round=0)
        for payload in (await node.receive_each(peers, round=0)).values():
            payload.arrays["params"][:] = 0


ARRIVED: dict[int, list[Any]] = {}


@dataclass(frozen=True)
class SendsAScratchArray:
    """Sends an array that it writes into right after."""

    async def run(self, node: Node) -> None:
        if node.id == 0:
            scratch = np.full(node.params.shape, 7, np.float32)
            await node.send(range(1, node.nodes), Payload({"params": scratch}), round=0)
            scratch[:] = -1
        else:
            received = await node.receive_each([0], round=0)
            ARRIVED.setdefault(0, []).append(received[0].arrays["params"])


def test_a_deadlock_error_names_the_waiting_nodes_the_missing_senders_and_the_round(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError) as caught:
        experiment(algorithm=WaitsForever()).run(tmp_path)
    lines = str(caught.value).splitlines()
    assert "wait and no message is in transit" in lines[0]
    waiting = {line.strip() for line in lines if line.strip().startswith("node ")}
    assert "node 0 waits for 'model' of round 1 from 1, 5 (still missing: [1])" in waiting
    assert "node 2 waits for 'model' of round 1 from 1, 3 (still missing: [1])" in waiting
    assert {line.split()[1] for line in waiting} >= {"0", "2"}
    assert "simulation.receive_timeout" in lines[-1]


def test_with_a_timeout_nodes_continue_in_place_of_a_deadlock(tmp_path: Path) -> None:
    described = experiment(algorithm=WaitsForever(), simulation={"batching": "off", "receive_timeout": 5.0})
    run = described.run(tmp_path)
    assert run.status == "completed"
    (event,) = [r for r in run.folder.read(0) if isinstance(r, Event)]
    assert (event.what, event.detail) == ("timed out", "round 1: no message from 1")


@pytest.mark.parametrize("algorithm", [WritesInPlace(), WritesIntoAnElement(), WritesIntoWhatItReceives()])
def test_an_algorithm_that_writes_into_a_model_in_place_raises_an_error(algorithm: Any, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"(?s)node \d raised:.*ValueError: .*read-only"):
        experiment(algorithm=algorithm).run(tmp_path)


@pytest.mark.parametrize("network", [{"name": "ideal"}, {"name": "uniform", "latency": 3.0}], ids=["ideal", "uniform"])
def test_messages_in_flight_are_one_snapshot_that_all_recipients_share(network: Any, tmp_path: Path) -> None:
    ARRIVED.clear()
    experiment(algorithm=SendsAScratchArray(), network=network).run(tmp_path)
    arrived = ARRIVED[0]
    assert len(arrived) == NODES - 1
    assert all(np.shares_memory(array, arrived[0]) for array in arrived)
    assert (arrived[0] == 7).all()


def test_neighbours_continue_without_a_crashed_node(tmp_path: Path) -> None:
    run = experiment(
        fault=Faults().crash(2, round=1).schedule, algorithm=DPSGD(4), evaluation={"every": 1, "samples": 20}
    ).run(tmp_path)
    assert run.status == "incomplete"
    assert [str(node) for node in run.summary["lost"]] == ["2"]
    rounds = {n: [r.round for r in run.folder.read(n) if isinstance(r, Round)] for n in range(NODES)}
    assert rounds == {n: [0] if n == 2 else [0, 1, 2, 3] for n in range(NODES)}
    ended = [n for n in range(NODES) if any(isinstance(r, End) for r in run.folder.read(n))]
    assert ended == [0, 1, 3, 4, 5]
    averages = [r for r in run.folder.read_averages() if isinstance(r, Average)]
    assert [(r.round, r.nodes) for r in averages[1:]] == [(1, 5), (2, 5), (3, 5)]
    (event,) = [r for r in run.folder.read(2) if isinstance(r, Event)]
    assert (event.what, event.detail) == ("fault", "crash at round 1")


def test_a_crash_changes_nothing_before_it(tmp_path: Path) -> None:
    whole = experiment(algorithm=DPSGD(1)).run(tmp_path)
    crashed = experiment(fault=Faults().crash(2, round=1).schedule, algorithm=DPSGD(2)).run(tmp_path)
    for node in (0, 4):
        first = [next(r for r in run.folder.read(node) if isinstance(r, Round)) for run in (whole, crashed)]
        assert first[0] == first[1]


def test_when_all_nodes_crash_the_run_has_failed(tmp_path: Path) -> None:
    faults = Faults()
    for node in range(NODES):
        faults = faults.crash(node, round=1)
    assert experiment(fault=faults.schedule).run(tmp_path).status == "failed"


def test_a_node_whose_code_raises_ends_the_run_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="node 3 raises at round 1"):
        experiment(fault=Faults().raises(3, round=1).schedule).run(tmp_path)
    summary = only_run(tmp_path) / "summary.json"
    assert '"failed"' in summary.read_text()


def test_a_node_that_hangs_is_a_deadlock_without_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError, match=r"node 3 waits for 'model' of round 1 from 2, 4 \(still missing: \[4\]\)"):
        experiment(fault=Faults().hang(4, round=1).schedule).run(tmp_path)


def test_with_a_timeout_nodes_continue_without_a_hung_node_which_is_lost(tmp_path: Path) -> None:
    run = experiment(
        fault=Faults().hang(4, round=1).schedule, simulation={"batching": "off", "receive_timeout": 2.0}
    ).run(tmp_path)
    ended = [n for n in range(NODES) if any(isinstance(r, End) for r in run.folder.read(n))]
    assert ended == [0, 1, 2, 3, 5]
    assert run.status == "incomplete"
    assert len(run.summary["lost"]) == 1


# The same results for every way to compute them

TRAININGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "nesterov": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}
GROUPS = (
    {"nodes": "0-1", "training": {"optimizer": "adam", "lr": 0.01}},
    {"nodes": "3", "training": {"momentum": 0.9, "local_steps": 5}},
    {"nodes": "4", "training": {"batch_size": 3}, "speed": {"step_seconds": 0.03}},
)


def check_all_ways(tmp_path: Path, **changed: Any) -> None:
    described = {
        way: experiment(simulation={"batching": way, "workers": 2}, **changed) for way in ("off", "pool", "vmap")
    }
    runs = {way: each.run(tmp_path) for way, each in described.items()}
    models = {way: models_of(run) for way, run in runs.items()}
    assert np.abs(models["off"][0] - models["off"][1]).max() > 1e-4
    assert np.array_equal(models["pool"], models["off"])
    assert runs["pool"].summary["digest"] == runs["off"].summary["digest"]
    np.testing.assert_allclose(models["vmap"], models["off"], atol=1e-4)
    for counted in ("bytes_sent", "messages_sent", "rounds", "status"):
        assert runs["off"].summary[counted] == runs["pool"].summary[counted] == runs["vmap"].summary[counted]
    times = {way: run.summary["time"]["virtual_s"] for way, run in runs.items()}
    assert len(set(times.values())) == 1
    losses = {way: [r.loss for r in run.folder.read(1) if isinstance(r, Round)] for way, run in runs.items()}
    assert losses["off"] == losses["pool"]
    assert losses["vmap"] == pytest.approx(losses["off"], rel=1e-3)


@pytest.mark.parametrize("keep_state", [True, False], ids=["state kept", "state not kept"])
@pytest.mark.parametrize("training", TRAININGS)
def test_sequential_pooled_and_stacked_training_give_the_same_models(
    training: str, keep_state: bool, tmp_path: Path
) -> None:
    settings = {**TRAININGS[training], "keep_state": keep_state, "batch_size": 8, "local_steps": 2}
    check_all_ways(tmp_path, training=settings)


def test_all_ways_give_the_same_models_for_groups_with_different_training(tmp_path: Path) -> None:
    check_all_ways(tmp_path, group=GROUPS, network={"name": "uniform", "latency": 0.01, "upload": 10})


def test_the_size_of_stacks_does_not_change_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models_of(experiment(simulation={"batching": "vmap"}).run(tmp_path))
    monkeypatch.setattr("shoal.engines.simulation.compute.STACK_SIZE", 4)
    np.testing.assert_allclose(models_of(experiment(simulation={"batching": "vmap"}).run(tmp_path)), whole, atol=1e-5)


def test_the_chosen_batching_is_written_to_the_run_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    run = experiment(simulation={"batching": "auto"}).run(tmp_path)
    chosen = Experiment.from_file(run.folder.experiment).simulation.batching
    assert chosen in ("off", "vmap", "pool")
    again = experiment(simulation={"batching": "auto"}).run(tmp_path)
    assert again.summary["digest"] == run.summary["digest"]
    cache = tmp_path / "shoal" / "batching.json"
    (entry,) = json.loads(cache.read_text()).items()
    changed = {entry[0]: {**entry[1], "stacked": chosen != "vmap"}}
    cache.write_text(json.dumps(changed))
    other = experiment(simulation={"batching": "auto"}).run(tmp_path).summary["batching"]
    assert (other == "vmap") == (chosen != "vmap")  # not measured again
    replayed = Experiment.from_file(run.folder.experiment).run(tmp_path)
    assert replayed.summary["digest"] == run.summary["digest"]


@dataclass(frozen=True)
class EndsEarly(DPSGD):
    rounds: int = ROUNDS - 2


def test_averages_do_not_wait_for_a_node_that_ended_early(tmp_path: Path) -> None:
    run = experiment(
        evaluation={"every": 1, "samples": 20},
        group=[{"nodes": "0", "algorithm": {"name": f"{__name__}:EndsEarly"}}],
        simulation={"batching": "off", "receive_timeout": 1.0},
    ).run(tmp_path)
    averages = [r for r in run.folder.read_averages() if isinstance(r, Average)]
    assert [a.round for a in averages] == list(range(ROUNDS))
    assert [a.nodes for a in averages] == [NODES] * (ROUNDS - 2) + [NODES - 1] * 2
    assert run.summary["averaged_model"]["round"] == ROUNDS - 1


def test_an_unused_timeout_keeps_no_message_in_memory() -> None:
    harness = SimulationHarness()

    async def sender(runtime: Runtime) -> None:
        message = Message(0, "model", 0, Payload({"x": np.zeros(3, np.float32)}).frozen())
        held.append(weakref.ref(message.payload.arrays["x"]))
        await runtime.send(1, message)

    async def receiver(runtime: Runtime) -> None:
        assert await runtime.receive(Filter("model", 0, (0,)), timeout=1000.0)
        await runtime.sleep(0.0)
        freed.append(held[0]() is None)

    held: list[Any] = []
    freed: list[bool] = []
    harness.run({0: sender, 1: receiver})
    assert freed == [True]


@pytest.mark.parametrize("batching", ["vmap", "pool"])
def test_batching_does_not_change_the_result_of_an_optimizer_that_is_not_elementwise(
    batching: str, tmp_path: Path
) -> None:
    training = {"optimizer": "adafactor", "lr": 0.01, "batch_size": 8}
    alone = experiment(training=training).run(tmp_path)
    together = experiment(training=training, simulation={"batching": batching}).run(tmp_path)
    assert together.summary["digest"] == alone.summary["digest"]


def test_processor_time_includes_the_workers_of_a_pool(tmp_path: Path) -> None:
    spent = experiment(simulation={"batching": "pool", "workers": 2}).run(tmp_path).summary["time"]
    assert spent["total_cpu_s"] >= spent["train_cpu_s"] > 0


def test_a_failed_run_has_no_digest_but_records_its_batching(tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        experiment(fault=Faults().raises(3, round=1).schedule).run(tmp_path)
    folder = only_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["digest"]) == ("failed", None)
    assert summary["time"]["wall_s"] > 0
    assert 'batching = "off"' in (folder / "experiment.toml").read_text()


def test_a_node_that_has_ended_cannot_crash() -> None:
    world = World(2, training_node_count=2)
    ends: list[bool] = []

    async def nothing() -> None: ...

    world.runtimes[0].start(nothing(), ends.append)
    world.kernel.run()
    world.runtimes[0].crash()
    world.runtimes[0].finish()
    assert ends == [False]
    assert not world.runtimes[1].failed_peers()
