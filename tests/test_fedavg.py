"""FedAvg follows x ← Σ n_k·train_k(x) / Σ n_k, or its server's optimizer: against a page of NumPy, in both engines."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import leaping
from conftest import CommandResult, models_of
from oracle import gradient
from shoal.algorithms.fedavg import FedAvg
from shoal.algorithms.support.server_optimizers import Adagrad, Adam, Momentum, ServerSGD, Yogi
from shoal.engines.processes.runtime import ProcessRuntime, RuntimeSettings
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.mailbox import Filter, Mailbox
from shoal.message import Message, Payload
from shoal.randomness import generator
from shoal.results.records import Evaluation, Event, Round, RunFolder
from shoal.sharing.full import FullSharing
from shoal.testing import FakeRuntime, Faults
from shoal.training.batches import Batches

NODES, ROUNDS, STEPS, BATCH, RATE = 5, 4, 2, 16, 0.2
SERVER = NODES
EVERY_NODE = range(NODES + 1)


# The oracle


def follow(
    described: Experiment,
    fraction: float = 1.0,
    server: Any = None,
    failed: Any = (),
    since: int = ROUNDS,
    weighted: bool = True,
) -> Any:
    """The server's model after the last round, in double precision; clients in `failed` fail in round `since`."""
    setup, training = Setup(described), described.training
    data = setup.data.train
    generators = [generator(described.seed, "training", node) for node in range(NODES)]
    streams = [Batches(part, BATCH, rng) for part, rng in zip(setup.parts, generators, strict=True)]
    sampling = generator(described.seed, "clients", SERVER)
    x = setup.initial.astype(np.float64)
    m, v = np.zeros_like(x), np.full_like(x, getattr(server, "tau", 0.0) ** 2)
    for r in range(ROUNDS):
        running = [c for c in range(NODES) if c not in failed or r <= since]  # it fails after it was sampled
        sampled = sorted(sampling.choice(running, max(1, round(fraction * len(running))), replace=False))
        total, average = 0, np.zeros_like(x)
        for client in sampled:
            if client in failed and r >= since:
                continue
            held, local = len(setup.parts[client]), x.copy()
            epochs = training.local_epochs
            for batch in streams[client].take(STEPS if epochs is None else math.ceil(epochs * held / BATCH)):
                grad = gradient(local, data.x[batch].astype(np.float64), data.y[batch])
                local -= RATE * (grad + training.proximal * (local - x))
            generators[client].integers(2**63)  # the seed of dropout, which this model does not use
            weight = held if weighted else 1
            total, average = total + weight, average + weight * local
        delta = average / total - x
        if isinstance(server, Momentum):
            m = server.momentum * m + delta
            x = x + server.lr * m
        elif isinstance(server, Adam | Adagrad):
            m = server.beta1 * m + (1 - server.beta1) * delta
            if isinstance(server, Adagrad):
                v = v + delta**2
            elif isinstance(server, Yogi):
                v = v - (1 - server.beta2) * delta**2 * np.sign(v - delta**2)
            else:
                v = server.beta2 * v + (1 - server.beta2) * delta**2
            x = x + server.lr * m / (np.sqrt(v) + server.tau)
        else:
            x = x + (1.0 if server is None else server.lr) * delta
    return x


# The runs


def experiment(algorithm: FedAvg | None = None, training: Any = None, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "nodes": NODES,
        "seed": 5,
        "algorithm": algorithm or FedAvg(ROUNDS),
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "model": {"name": "logistic"},
        "training": {"lr": RATE, "batch_size": BATCH, **(training or {"local_steps": STEPS})},
        "evaluation": {"every": 2},
        "simulation": {"batching": "off"},
    }
    return Experiment(**{**settings, **changed})


def records(folder: RunFolder, node: int, kind: type) -> list[Any]:
    return [r for r in folder.read(node) if isinstance(r, kind)]


def in_both(described: Experiment, root: Path) -> list[Any]:
    """Run in the simulation and as processes."""
    return [dataclasses.replace(described, engine=engine).run(root) for engine in ("simulation", "processes")]


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize(
    "server",
    [
        ServerSGD(),
        ServerSGD(lr=0.5),
        Momentum(momentum=0.7),
        Adam(lr=0.05, tau=0.01),
        Yogi(lr=0.05, tau=0.01),
        Adagrad(lr=0.1, beta1=0.5, tau=0.01),
    ],
    ids=lambda s: f"{type(s).__name__}-{s.lr}",
)
def test_server_model_follows_the_paper(server: Any, fraction: float, tmp_path: Path) -> None:
    described = experiment(FedAvg(ROUNDS, fraction, server))
    expected = follow(described, fraction, server)
    models = models_of(described.run(tmp_path), EVERY_NODE)
    assert np.abs(expected - Setup(described).initial).max() > 0.05
    np.testing.assert_allclose(models, np.tile(expected, (NODES + 1, 1)), atol=5e-5)


def test_clients_count_equally_if_their_samples_do_not_count(tmp_path: Path) -> None:
    described = experiment(FedAvg(ROUNDS, 0.6, weights="equal"))
    model, expected = models_of(described.run(tmp_path), EVERY_NODE)[SERVER], follow(described, 0.6, weighted=False)
    np.testing.assert_allclose(model, expected, atol=5e-5)
    assert np.abs(expected - follow(described, 0.6)).max() > 1e-3


def test_clients_that_mask_their_models_end_with_the_server_model(tmp_path: Path) -> None:
    described = experiment(sharing={"name": "secure"})
    run = described.run(tmp_path)
    models = models_of(run, EVERY_NODE)
    assert np.array_equal(models, np.tile(models[SERVER], (NODES + 1, 1)))
    np.testing.assert_allclose(models[SERVER], follow(described), atol=1e-3)
    found = {r.what for _, r in run.folder.read_all() if isinstance(r, Event)}
    assert not found & {"payload rejected", "server unreachable"}


def test_clients_trained_in_a_batch_give_the_same_average(tmp_path: Path) -> None:
    described = experiment(simulation={"batching": "vmap"})
    np.testing.assert_allclose(models_of(described.run(tmp_path), EVERY_NODE)[SERVER], follow(described), atol=5e-5)


@pytest.mark.parametrize("more", [{"proximal": 2.0}, {"proximal": 0.5, "local_epochs": 1}], ids=["steps", "epochs"])
def test_fedprox_keeps_clients_near_the_server_model(more: dict[str, Any], tmp_path: Path) -> None:
    training = {"local_steps": STEPS, **more} if "local_epochs" not in more else more
    described = experiment(training=training)
    model, expected = models_of(described.run(tmp_path), EVERY_NODE)[SERVER], follow(described)
    np.testing.assert_allclose(model, expected, atol=5e-5)
    free = follow(experiment(training={k: v for k, v in training.items() if k != "proximal"}))
    start = Setup(described).initial
    assert np.linalg.norm(expected - start) < 0.97 * np.linalg.norm(free - start)


def test_clients_with_more_samples_train_longer_with_local_epochs(tmp_path: Path) -> None:
    described = experiment(FedAvg(ROUNDS, 0.6), training={"local_epochs": 1})
    assert len({len(part) for part in Setup(described).parts}) > 1
    np.testing.assert_allclose(
        models_of(described.run(tmp_path), EVERY_NODE)[SERVER], follow(described, 0.6), atol=5e-5
    )


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    described = experiment(FedAvg(ROUNDS, 0.5, Momentum()))
    runs = in_both(described, tmp_path)
    models = [models_of(run, EVERY_NODE) for run in runs]
    assert np.array_equal(*models)
    np.testing.assert_allclose(models[1][SERVER], follow(described, 0.5, Momentum()), atol=5e-5)
    for counted in ("digest", "bytes_sent", "messages_sent", "rounds", "accuracy", "loss", "status", "events"):
        assert runs[0].summary[counted] == runs[1].summary[counted], counted


# Messages and records


def test_only_sampled_clients_send_models(tmp_path: Path) -> None:
    run = experiment(FedAvg(ROUNDS, 0.4)).run(tmp_path)
    sampling = generator(5, "clients", SERVER)
    sampled = [set(sampling.choice(NODES, 2, replace=False).tolist()) for _ in range(ROUNDS)]
    for client in range(NODES):
        rounds = [r for r in range(ROUNDS) if client in sampled[r]]
        assert [record.round for record in records(run.folder, client, Round)] == rounds
    joins, final_models = NODES, NODES
    assert run.summary["messages_sent"] == joins + ROUNDS * (2 + 2) + final_models
    assert run.summary["rounds"] == ROUNDS


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.5, 2), (0.7, 4)])  # 2.5 and 3.5 round to even
def test_at_least_one_client_is_sampled(fraction: float, count: int, tmp_path: Path) -> None:
    run = experiment(FedAvg(1, fraction)).run(tmp_path)
    assert run.summary["messages_sent"] == NODES + 2 * count + NODES


def test_server_is_evaluated_on_schedule_and_clients_at_the_end(tmp_path: Path) -> None:
    run = experiment().run(tmp_path)
    assert [e.round for e in records(run.folder, SERVER, Evaluation)] == [1, 3]
    final = records(run.folder, SERVER, Evaluation)[-1].scores
    for client in range(NODES):
        assert [(e.round, e.scores) for e in records(run.folder, client, Evaluation)] == [(3, final)]
    assert run.summary["accuracy"]["mean"] == pytest.approx(final["accuracy"])
    assert run.summary["accuracy"]["min"] == run.summary["accuracy"]["max"]


def test_clients_send_the_payload_that_the_sharing_builds_for_the_server() -> None:
    class Addressed(FullSharing):
        def outgoing(self, params: Any, round: int) -> Any:
            return lambda peer: Payload({"params": params}, {"to": peer})

    fake = FakeRuntime(model_message(0, np.ones(3))).deliver(model_message(0, np.full(3, 7.0), last=True), at=5.0)
    node = fake.node(
        0, nodes=2, params=np.zeros(3, np.float32), train=lambda x: x + 1, sharing=Addressed(), services=SERVICES
    )
    fake.run(FedAvg(1).run(node))
    (_, join), (to, answer) = fake.sent
    assert join.payload.fields == {"samples": 1}
    assert (to, answer.kind, answer.payload.fields) == (2, "model", {"to": 2})
    assert answer.payload.arrays["params"].tolist() == [2, 2, 2]
    assert node.params.tolist() == [7, 7, 7]


# Options


@pytest.mark.parametrize("fraction", [0, 1.5, -0.1])
def test_fraction_outside_0_to_1_is_rejected(fraction: float) -> None:
    with pytest.raises(ExperimentError, match=r"algorithm\.fraction = .*: expected number above 0 and at most 1"):
        Experiment.from_table({"algorithm": {"name": "fedavg", "fraction": fraction}})


def test_server_optimizer_is_a_name_or_a_table() -> None:
    by_name = Experiment.from_table({"algorithm": {"name": "fedavg", "server": "yogi"}})
    by_table = Experiment.from_table({"algorithm": {"name": "fedavg", "server": {"name": "adam", "lr": 0.5}}})
    assert by_name.algorithm.build().server == Yogi()
    assert by_table.algorithm.build().server == Adam(lr=0.5)
    assert Experiment.from_table(by_table.to_table()) == by_table
    with pytest.raises(ExperimentError, match=r"algorithm\.server\.name = 'adm'.*did you mean 'adam'"):
        Experiment.from_table({"algorithm": {"name": "fedavg", "server": "adm"}})
    with pytest.raises(ExperimentError, match=r"algorithm\.server\.momentum: unknown key"):
        Experiment.from_table({"algorithm": {"name": "fedavg", "server": {"name": "adam", "momentum": 0.9}}})


# Clients that fail


def test_failed_client_is_left_out_of_the_average(tmp_path: Path) -> None:
    described = experiment(fault=Faults().crash(1, round=2).schedule)
    expected = follow(described, failed=[1], since=2)
    for run in in_both(described, tmp_path):
        summary = run.summary
        assert (summary["status"], summary["rounds"], list(summary["lost"])) == ("incomplete", ROUNDS, ["1"])
        for node in (0, 2, 3, 4, SERVER):
            np.testing.assert_allclose(np.load(run.folder.model(node)), expected, atol=5e-5)


def test_client_that_times_out_is_left_out_of_the_average(tmp_path: Path) -> None:
    described = experiment(
        fault=Faults().hang(1, round=0).schedule, simulation={"batching": "off", "receive_timeout": 9.0}
    )
    run = described.run(tmp_path)
    assert run.summary["events"] == {"fault": 1, "timed out": ROUNDS}
    assert list(run.summary["lost"]) == ["1"]
    expected = follow(described, failed=[1], since=0)
    np.testing.assert_allclose(np.load(run.folder.model(SERVER)), expected, atol=5e-5)
    assert np.array_equal(np.load(run.folder.model(0)), np.load(run.folder.model(SERVER)))


def test_client_answers_the_last_of_several_waiting_models() -> None:
    fake = FakeRuntime(model_message(0, np.ones(3)))
    for r in (1, 2, 3):
        fake.deliver(model_message(r, np.full(3, r + 1.0)), at=0.1 * r)  # while the client trains in round 0
    fake.deliver(model_message(3, np.full(3, 9.0), last=True), at=5.0)
    node = fake.node(0, nodes=2, params=np.zeros(3, np.float32), train=lambda x: x + 1, services=SERVICES)
    fake.run(FedAvg(4).run(node))
    answers = [(m.round, float(m.payload.arrays["params"][0])) for _, m in fake.sent if m.kind == "model"]
    assert answers == [(0, 2.0), (3, 5.0)]


def test_client_that_is_too_slow_for_a_round_takes_part_in_a_later_one(tmp_path: Path) -> None:
    """The client trains for as long as the others in five rounds, and two and a half times as long as the timeout."""
    described = experiment(
        FedAvg(20),
        speed={"step_seconds": 0.2},
        group=[{"nodes": "0", "speed": {"step_seconds": 1.0}}],
        simulation={"batching": "off", "receive_timeout": 0.8 * STEPS / 2},
    )
    run = described.run(tmp_path)
    trained = [record.round for record in records(run.folder, 0, Round)]
    assert 4 <= len(trained) < 12
    assert trained[-1] >= 14


def test_model_is_unchanged_if_no_client_answers() -> None:
    fake = FakeRuntime(join(0, 4), join(1, 4)).mark_failed(0, 1, at=0.0)
    node = fake.node(2, nodes=2, params=np.arange(3, dtype=np.float32), services=SERVICES)
    fake.run(FedAvg(2).serve(node))
    assert [(e.what, e.detail) for e in fake.records if isinstance(e, Event)] == [
        ("no updates", f"round {r}: no client answered; the model is unchanged") for r in range(2)
    ]
    assert node.params.tolist() == [0, 1, 2]


# Invalid messages


SERVICES = {"algorithm": 2}


def join(client: int, samples: Any) -> Message:
    return Message(client, "join", 0, Payload({}, {"samples": samples}))


def model_message(round: int, params: Any, last: bool = False) -> Message:
    return Message(
        2, "global", round, Payload({"params": np.array(params, np.float32)}, {"last": True} if last else {})
    )


@pytest.mark.parametrize("samples", [0, -3, 1.5, True, "many"])
def test_client_with_an_invalid_sample_count_is_never_sampled(samples: Any) -> None:
    answer = Message(1, "model", 0, Payload({"params": np.full(3, 5, np.float32)}))
    fake = FakeRuntime(join(0, samples), join(1, 4), answer)
    node = fake.node(2, nodes=2, params=np.zeros(3, np.float32), services=SERVICES)
    fake.run(FedAvg(1).serve(node))
    assert [to for to, message in fake.sent if "last" not in message.payload.fields] == [1]
    assert node.rejected_count == 1
    assert node.params.tolist() == [5, 5, 5]


def test_client_rejects_a_global_model_of_another_size() -> None:
    fake = FakeRuntime(model_message(0, np.ones(4)), model_message(1, np.ones(3), last=True))
    node = fake.node(0, nodes=2, params=np.zeros(3, np.float32), services=SERVICES)
    fake.run(FedAvg(1).run(node))
    assert [message.kind for _, message in fake.sent] == ["join"]
    assert node.rejected_count == 1
    assert node.params.tolist() == [1, 1, 1]


# A server that fails


FILE = f"""
name       = "served"
nodes      = {NODES}
seed       = 5
algorithm  = {{ name = "fedavg", rounds = {ROUNDS} }}
dataset    = {{ name = "digits", partition = {{ name = "dirichlet", alpha = 0.5 }} }}
model      = {{ name = "logistic" }}
training   = {{ lr = {RATE}, batch_size = {BATCH}, local_steps = {STEPS} }}
evaluation = {{ every = 2 }}
simulation = {{ batching = "off" }}
"""


@pytest.mark.parametrize("engine", ["simulation", "processes"])
def test_clients_keep_the_last_global_model_if_the_server_fails(
    engine: str, shoal: Callable[..., CommandResult], tmp_path: Path
) -> None:
    (tmp_path / "served.toml").write_text(FILE + f'[[fault]]\nkind = "crash"\nnode = {SERVER}\nround = 3\n')
    result = shoal("run", "served.toml", "--engine", engine)
    assert result.code == 3, result.err
    assert "the service node of algorithm = 'fedavg'" in result.out + result.err
    folder = RunFolder(next((tmp_path / "runs" / "served").iterdir()))
    summary = folder.read_summary()
    assert (summary["status"], list(summary["lost"])) == ("incomplete", [str(SERVER)])
    assert (summary["rounds"], summary["events"]["server unreachable"]) == (3, NODES)
    after_two = experiment(FedAvg(2)).run(tmp_path / "short")
    for client in range(NODES):
        assert np.array_equal(np.load(folder.model(client)), np.load(after_two.folder.model(client)))
        (event,) = records(folder, client, Event)
        assert event.detail == f"node {SERVER} failed; this node keeps the model that it received in round 2"
        assert [e.round for e in records(folder, client, Evaluation)] == [1]
    assert summary["accuracy"]["mean"] == pytest.approx(after_two.summary["accuracy"]["mean"])


def test_run_ends_if_the_server_fails_before_the_first_round(tmp_path: Path) -> None:
    run = experiment(fault=Faults().crash(SERVER, round=0).schedule).run(tmp_path)
    assert (run.status, run.summary["events"]["server unreachable"]) == ("incomplete", NODES)
    assert np.array_equal(np.load(run.folder.model(0)), Setup(experiment()).initial)


# How long a server waits: it does not train, and learns the usual time from the answers


def wait(patience: float, answers: dict[float, list[int]], receives: int = 1) -> list[set[int]]:
    """Return which of clients 0 and 1 answered the server in each round; `answers` maps seconds to clients."""

    async def serve() -> list[set[int]]:
        mailbox, loop = Mailbox(), asyncio.get_running_loop()
        settings = RuntimeSettings(min_peer_timeout=patience, is_service=True)
        runtime = ProcessRuntime(2, None, mailbox, None, settings)  # type: ignore[arg-type]
        for seconds, clients in answers.items():
            for client in clients:
                round = sum(client in others for earlier, others in answers.items() if earlier < seconds)
                loop.call_later(seconds, mailbox.put, Message(client, "model", round, Payload({})))
        async with runtime:
            return [{m.sender for m in await runtime.receive(Filter("model", r, (0, 1)))} for r in range(receives)]

    return cast(list[set[int]], leaping.run(serve()))


def test_server_waits_for_the_first_answer_without_limit() -> None:
    assert wait(0.05, {0.5: [0, 1]}) == [{0, 1}]


def test_server_stops_waiting_for_a_client_many_times_slower_than_others() -> None:
    assert wait(0.05, {0.05: [0], 3.0: [1]}) == [{0}]
    assert wait(0.05, {0.05: [0, 1]}, receives=2) == [{0, 1}, set()]


def test_server_learns_the_training_time_from_earlier_answers() -> None:
    assert wait(0.05, {0.4: [0, 1], 0.9: [0], 1.5: [1]}, receives=2) == [{0, 1}, {0, 1}]


def test_clients_start_each_round_without_momentum_by_default(tmp_path: Path) -> None:
    def digest(**training: Any) -> Any:
        settings = {"lr": RATE, "batch_size": BATCH, "local_steps": STEPS, "momentum": 0.9, **training}
        run = dataclasses.replace(experiment(), training=settings).run(tmp_path)
        return run.summary["digest"]

    assert digest() == digest(keep_state=False)
    assert digest() != digest(keep_state=True)
