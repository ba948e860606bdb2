"""A synchronous parameter server follows x ← x + mean of steps; an asynchronous one learns and no worker waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import CommandResult
from oracle import gradient
from shoal.algorithms.parameter_server import ParameterServer
from shoal.algorithms.support.async_workers import AsyncWorkers
from shoal.algorithms.support.server import RoundServer
from shoal.algorithms.support.server_optimizers import Momentum, ServerSGD
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.randomness import generator
from shoal.results.records import Evaluation, Event, Round, RunFolder
from shoal.testing import FakeRuntime, Faults
from shoal.training.batches import Batches

NODES, ROUNDS, BATCH, RATE = 4, 5, 16, 0.2
SERVER = NODES
SLOW = [{"nodes": "0", "speed": {"step_seconds": 0.1}}]
"""Node 0 takes ten times as long as the others."""


def follow(described: Experiment, momentum: float = 0.0, without: Any = (), since: int = ROUNDS) -> Any:
    """Return the server's model after synchronous rounds of one step: x ← x − η · mean of gradients, with momentum."""
    setup = Setup(described)
    data = setup.data.train
    generators = [generator(described.seed, "training", node) for node in range(NODES)]
    streams = [Batches(part, BATCH, rng) for part, rng in zip(setup.parts, generators, strict=True)]
    x = setup.initial.astype(np.float64)
    velocity = np.zeros_like(x)
    for r in range(ROUNDS):
        grads = []
        for worker, stream in enumerate(streams):
            if worker in without and r >= since:
                continue
            (batch,) = stream.take(1)
            grads.append(gradient(x, data.x[batch].astype(np.float64), data.y[batch]))
            generators[worker].integers(2**63)  # the seed of dropout, which this model does not use
        velocity = momentum * velocity - RATE * np.mean(grads, 0)
        x = x + velocity
    return x


def experiment(algorithm: ParameterServer | None = None, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "seed": 5,
        "algorithm": algorithm or ParameterServer(ROUNDS),
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "model": {"name": "logistic"},
        "training": {"lr": RATE, "batch_size": BATCH},
        "evaluation": {"every": 2},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def model_of(run: Any, node: int = SERVER) -> Any:
    return np.load(run.folder.model(node))


def records(run: Any, node: int, kind: type) -> list[Any]:
    return [r for r in run.folder.read(node) if isinstance(r, kind)]


def in_both(described: Experiment, root: Path) -> list[Any]:
    return [dataclasses.replace(described, engine=engine).run(root) for engine in ("simulation", "processes")]


# Synchronous


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_model_follows_the_mean_of_the_gradients(momentum: float, tmp_path: Path) -> None:
    server = Momentum(momentum=momentum) if momentum else ServerSGD()
    described = experiment(ParameterServer(ROUNDS, server=server))
    run = described.run(tmp_path)
    expected = follow(described, momentum)
    assert np.abs(expected - Setup(described).initial).max() > 0.05
    for node in range(NODES + 1):
        np.testing.assert_allclose(model_of(run, node), expected, atol=2e-5)
    assert run.summary["messages_sent"] == 2 * NODES * ROUNDS + NODES
    assert [e.round for e in records(run, SERVER, Evaluation)] == [1, 3, 4]


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    runs = in_both(experiment(), tmp_path)
    for counted in ("digest", "bytes_sent", "messages_sent", "rounds", "accuracy", "loss", "status", "events"):
        assert runs[0].summary[counted] == runs[1].summary[counted], counted


def test_failed_worker_is_left_out_of_the_mean(tmp_path: Path) -> None:
    described = experiment(fault=Faults().crash(1, round=2).schedule)
    run = described.run(tmp_path)
    assert (run.status, run.summary["rounds"], list(run.summary["lost"])) == ("incomplete", ROUNDS, ["1"])
    np.testing.assert_allclose(model_of(run), follow(described, without=[1], since=2), atol=2e-5)


# Asynchronous


def test_single_asynchronous_worker_equals_a_synchronous_one(tmp_path: Path) -> None:
    runs = [experiment(ParameterServer(ROUNDS, asynchronous), nodes=1).run(tmp_path) for asynchronous in (False, True)]
    assert runs[0].summary["digest"] == runs[1].summary["digest"]


def test_asynchronous_workers_with_zero_staleness_equal_synchronous_ones(tmp_path: Path) -> None:
    run = experiment(ParameterServer(ROUNDS, True, staleness=0), group=SLOW).run(tmp_path)
    np.testing.assert_allclose(model_of(run), follow(experiment()), atol=2e-5)


def learning(**changed: Any) -> Experiment:
    """An experiment long enough to learn."""
    return experiment(ParameterServer(40, True), partition={"name": "iid"}, group=SLOW, **changed)


def test_asynchronous_workers_learn_and_the_simulation_is_reproducible(tmp_path: Path) -> None:
    one, same, other = (learning(seed=seed).run(tmp_path) for seed in (5, 5, 6))
    assert one.summary["status"] == "completed"
    assert one.summary["rounds"] == 40
    assert one.summary["accuracy"]["mean"] > 0.7
    assert one.summary["accuracy"]["min"] == one.summary["accuracy"]["max"]
    assert one.summary["digest"] == same.summary["digest"] != other.summary["digest"]
    for worker in range(NODES):
        assert [r.round for r in records(one, worker, Round)] == list(range(40))
    (event,) = records(one, SERVER, Event)
    assert event.what == "staleness"


def test_asynchronous_workers_learn_as_processes(tmp_path: Path) -> None:
    run = dataclasses.replace(learning(), engine="processes").run(tmp_path)
    assert (run.status, run.summary["messages_sent"]) == ("completed", 2 * NODES * 40 + NODES)
    assert run.summary["accuracy"]["mean"] > 0.6
    assert np.array_equal(model_of(run, 0), model_of(run))


@pytest.mark.parametrize("staleness", [1, 3, None])
def test_fastest_worker_is_never_further_ahead_than_the_staleness(staleness: int | None, tmp_path: Path) -> None:
    run = experiment(ParameterServer(8, True, staleness), group=SLOW).run(tmp_path)
    slow, fast = ([r.time for r in records(run, worker, Round)] for worker in (0, 1))
    if staleness is None:
        assert fast[-1] < slow[0]
        return
    for r in range(staleness + 1, 8):
        assert fast[r] > slow[r - staleness - 1]  # it began after that push
    assert fast[staleness] < slow[0]  # and it does run ahead of the slowest


def test_push_is_divided_by_the_number_of_workers(tmp_path: Path) -> None:
    """Each push is applied as u/n for n running workers."""
    pushes = [Message(w, "model", 0, Payload({"params": np.full(3, 4 * (w + 1), np.float32)})) for w in (0, 1)]
    fake = FakeRuntime(*pushes)
    node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services={"algorithm": 2})
    fake.run(ParameterServer(1, True).serve(node))
    assert node.params.tolist() == [6, 6, 6]
    first, second, *final_models = fake.sent
    assert [to for to, _ in (first, second, *final_models)] == [0, 1, 0, 1]


def test_push_of_another_size_is_rejected() -> None:
    bad, good = (Message(0, "model", 0, Payload({"params": np.ones(size, np.float32)})) for size in (4, 3))
    fake = FakeRuntime(bad, good)
    node = fake.node(1, nodes=1, params=np.zeros(3, np.float32), services={"algorithm": 1})
    fake.run(ParameterServer(1, True).serve(node))
    assert (node.rejected_count, node.params.tolist()) == (1, [1, 1, 1])


@pytest.mark.parametrize("staleness", [None, 1])
def test_others_continue_if_an_asynchronous_worker_fails(staleness: int | None, tmp_path: Path) -> None:
    described = experiment(ParameterServer(ROUNDS, True, staleness), fault=Faults().crash(1, round=2).schedule)
    run = described.run(tmp_path)
    assert (run.status, list(run.summary["lost"])) == ("incomplete", ["1"])
    for worker in (0, 2, 3):
        assert len(records(run, worker, Round)) == ROUNDS
        assert np.array_equal(model_of(run, worker), model_of(run))


def test_others_continue_if_an_asynchronous_worker_times_out(tmp_path: Path) -> None:
    run = experiment(
        ParameterServer(ROUNDS, True, 1),
        fault=Faults().hang(1, round=2).schedule,
        simulation={"batching": "off", "receive_timeout": 5.0},
    ).run(tmp_path)
    assert (run.summary["events"]["timed out"], list(run.summary["lost"])) == (1, ["1"])
    assert all(len(records(run, worker, Round)) == ROUNDS for worker in (0, 2, 3))


def test_late_push_of_a_slow_worker_counts(tmp_path: Path) -> None:
    """With a timeout shorter than any training, every push still counts."""
    short_timeout = {"batching": "off", "receive_timeout": 0.004}
    run = experiment(ParameterServer(ROUNDS, True), simulation=short_timeout).run(tmp_path)
    assert run.status == "completed"
    for worker in range(NODES):
        assert [r.round for r in records(run, worker, Round)] == list(range(ROUNDS))
    assert run.summary["messages_sent"] == 2 * NODES * ROUNDS + NODES
    patient = experiment(ParameterServer(ROUNDS, True)).run(tmp_path)
    assert run.summary["digest"] == patient.summary["digest"]


def test_worker_that_timed_out_does_not_hold_back_the_others(tmp_path: Path) -> None:
    short_timeout = {"batching": "off", "receive_timeout": 0.03}
    run = experiment(ParameterServer(8, True, staleness=1), group=SLOW, simulation=short_timeout).run(tmp_path)
    slow, fast = ([r.time for r in records(run, worker, Round)] for worker in (0, 1))
    assert len(slow) == len(fast) == 8
    assert run.summary["events"]["timed out"] >= 1


def test_server_ends_with_an_event_if_all_workers_failed() -> None:
    fake = FakeRuntime(Message(0, "model", 0, Payload({"params": np.ones(3, np.float32)}))).mark_failed(0, 1, at=1.0)
    node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services={"algorithm": 2})
    fake.run(ParameterServer(50, True).serve(node))
    assert [e.what for e in fake.records if isinstance(e, Event)] == ["no workers left", "staleness"]
    assert sum(isinstance(r, Round) for r in fake.records) == 0
    assert node.params.tolist() == [0.5] * 3


def test_server_abandons_workers_that_all_hang() -> None:
    fake = FakeRuntime(Message(0, "model", 0, Payload({"params": np.ones(3, np.float32)})))
    node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services={"algorithm": 2}, receive_timeout=1.0)
    fake.run(ParameterServer(50, True).serve(node))
    events = [e.what for e in fake.records if isinstance(e, Event)]
    assert events == ["timed out", "workers abandoned", "no workers left", "staleness"]
    assert node.now() == 10.0


def pushed(worker: int, round: int) -> Message:
    return Message(worker, "model", round, Payload({"params": np.ones(3, np.float32)}))


def test_abandoned_worker_that_rejoins_is_started_again() -> None:
    fake = FakeRuntime().mark_failed(0, at=11.0).deliver(pushed(0, 0), at=15.0)
    node = fake.node(1, nodes=1, params=np.zeros(3, np.float32), services={"algorithm": 1}, receive_timeout=1.0)

    async def body() -> tuple[list[int], Message | None, float]:
        workers = AsyncWorkers(node, RoundServer(node), rounds=3, max_lead=None)
        assert await workers.next_push() is None
        abandoned = workers.remaining()
        await node.sleep(2.0)
        node.mark_rejoined(0, 0)
        return abandoned, await workers.next_push(), node.now()

    remaining, push, at = fake.run(body())
    assert remaining == []
    assert push is not None
    assert (push.sender, at) == (0, 15.0)
    assert [(to, message.round) for to, message in fake.sent] == [(0, 0), (0, 0)]
    assert fake.sent_at == [0.0, 12.0]


def test_push_from_before_a_failure_counts_once_and_the_worker_starts_again() -> None:
    fake = FakeRuntime().deliver(pushed(0, 0), at=2.0).deliver(pushed(1, 0), pushed(1, 0), at=3.0)
    fake.deliver(pushed(0, 1), at=4.0).deliver(pushed(1, 1), at=5.0)
    node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services={"algorithm": 2})

    async def fail_and_rejoin() -> None:
        await node.sleep(1.0)
        fake.mailbox.mark_failed(1)
        node.mark_rejoined(1, 0)

    async def body() -> None:
        node.background(fail_and_rejoin())
        await ParameterServer(2, True).serve(node)

    fake.run(body())
    models = [(at, to, m.round) for at, (to, m) in zip(fake.sent_at, fake.sent, strict=True) if m.kind == "global"]
    assert models == [
        *[(0.0, 0, 0), (0.0, 1, 0)],
        *[(2.0, 0, 1), (2.0, 1, 0)],
        (3.0, 1, 1),
        *[(5.0, 0, 1), (5.0, 1, 1)],  # the final model, to all
    ]
    assert (node.algorithm_state["clocks"], node.params.tolist()) == ([2, 2], [2.0] * 3)


def test_restored_server_knows_the_progress_of_its_workers() -> None:
    def served(rounds: int, state: Any = None) -> Any:
        first_round = 1 if state else 0
        fake = FakeRuntime(*(pushed(worker, first_round) for worker in (0, 1)))
        node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services={"algorithm": 2})
        if state:
            node.restore(state)
        fake.run(ParameterServer(rounds, True).serve(node))
        return fake, node

    _, node = served(1)
    assert (node.algorithm_state["clocks"], node.algorithm_state["staleness"]) == ([1, 1], [2, 1, 1])
    fake, again = served(2, node.state())
    assert [(to, message.round) for to, message in fake.sent[:2]] == [(0, 1), (1, 1)]
    assert again.algorithm_state["clocks"] == [2, 2]


# A server that fails


@pytest.mark.parametrize(("engine", "asynchronous"), [("simulation", False), ("simulation", True), ("processes", True)])
def test_workers_keep_the_model_they_pulled_last_if_the_server_fails(
    engine: str, asynchronous: bool, shoal: Callable[..., CommandResult], tmp_path: Path
) -> None:
    (tmp_path / "served.toml").write_text(
        f"""
        name      = "served"
        nodes     = {NODES}
        algorithm = {{ name = "parameter-server", rounds = {ROUNDS}, asynchronous = {str(asynchronous).lower()} }}
        model     = {{ name = "logistic" }}
        fault     = [{{ kind = "crash", node = {SERVER}, round = 2 }}]
        simulation = {{ batching = "off" }}
        """
    )
    result = shoal("run", "served.toml", "--engine", engine)
    assert result.code == 3, result.err
    folder = RunFolder(next((tmp_path / "runs" / "served").iterdir()))
    summary = folder.read_summary()
    assert (summary["status"], list(summary["lost"])) == ("incomplete", [str(SERVER)])
    assert summary["events"]["server unreachable"] == NODES
    assert all(folder.model(worker).exists() for worker in range(NODES))


# Options


def test_staleness_needs_asynchronous_workers() -> None:
    with pytest.raises(ExperimentError, match="staleness is a limit for asynchronous workers"):
        Experiment.from_table({"algorithm": {"name": "parameter-server", "staleness": 2}})


def test_sharing_other_than_full_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from shoal.sharing.full import FullSharing\n\n\nclass Mine(FullSharing):\n    pass\n"
    )
    table = {"algorithm": {"name": "parameter-server"}, "sharing": {"name": "mine.py:Mine"}}
    with pytest.raises(ExperimentError, match="'parameter-server' builds its own payloads"):
        Experiment.from_table(table, base=tmp_path)
