"""D-PSGD follows X ← W(X − η∇F(X)): logistic regression on digits, against fifteen lines of NumPy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from conftest import models_of
from oracle import BATCH, RATE, STEPS, gradient
from shoal.algorithms.dpsgd import DPSGD
from shoal.experiment import Experiment
from shoal.experiment.setup import Setup
from shoal.message import Message, Payload
from shoal.randomness import generator
from shoal.training.batches import Batches

ROUNDS = 5


# The oracle


def follow(setup: Setup, matrices: list[Any], overlap: bool) -> Any:
    """Return all models after the last round, in double precision."""
    experiment, data = setup.experiment, setup.data.train
    generators = [generator(experiment.seed, "training", node) for node in range(experiment.nodes)]
    streams = [Batches(part, BATCH, rng) for part, rng in zip(setup.parts, generators, strict=True)]
    models = np.tile(setup.initial.astype(np.float64), (experiment.nodes, 1))
    for w in matrices:
        trained = models.copy()
        for node, stream in enumerate(streams):
            for batch in stream.take(STEPS):
                trained[node] -= RATE * gradient(trained[node], data.x[batch].astype(np.float64), data.y[batch])
            generators[node].integers(2**63)  # the seed of dropout, which this model does not use
        models = w @ models + (trained - models) if overlap else w @ trained
    return models


def ring(nodes: int) -> list[Any]:
    identity = np.eye(nodes)
    return [(identity + np.roll(identity, 1, 0) + np.roll(identity, -1, 0)) / 3] * ROUNDS


def one_peer(nodes: int) -> list[Any]:
    """Node i receives from i − 1, i − 2, i − 4, …, one per round."""
    identity = np.eye(nodes)
    hops = [1 << k for k in range((nodes - 1).bit_length())]
    return [(identity + np.roll(identity, -hops[r % len(hops)], 1)) / 2 for r in range(ROUNDS)]


def metropolis(setup: Setup) -> list[Any]:
    """Metropolis-Hastings matrices of any undirected graph."""
    nodes, graph = setup.experiment.nodes, setup.mixing.graph
    matrices = []
    for r in range(ROUNDS):
        adjacency = np.zeros((nodes, nodes))
        for node in range(nodes):
            adjacency[node, list(graph.links(node, r).senders)] = 1
        degrees = adjacency.sum(1)
        w = adjacency / (1 + np.maximum.outer(degrees, degrees))
        matrices.append(w + np.diag(1 - w.sum(1)))
    return matrices


# The runs


def experiment(**changed: Any) -> Experiment:
    return oracle.experiment(**{"algorithm": DPSGD(ROUNDS), **changed})


def test_gradient_of_the_oracle_matches_finite_differences() -> None:
    rng = np.random.default_rng(0)
    params, direction = rng.normal(size=650), rng.normal(size=650)
    x, y = rng.normal(size=(7, 64)), rng.integers(0, 10, 7)

    def loss(params: Any) -> float:
        logits = x @ params[:640].reshape(10, 64).T + params[640:]
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(7), y]))

    slope = (loss(params + 1e-6 * direction) - loss(params - 1e-6 * direction)) / 2e-6
    assert slope == pytest.approx(gradient(params, x, y) @ direction, rel=1e-5)


@pytest.mark.parametrize("overlap", [False, True], ids=["adapt then combine", "overlap"])
@pytest.mark.parametrize("batching", ["off", "vmap"])
@pytest.mark.parametrize(
    "topology",
    [
        {"name": "ring"},
        {"name": "regular", "degree": 3},
        {"name": "regular", "degree": 3, "dynamic": True},
        {"name": "star"},
        {"name": "one-peer-exponential"},
    ],
    ids=lambda t: t["name"] + ("-dynamic" if t.get("dynamic") else ""),
)
def test_models_follow_the_matrix(topology: dict[str, Any], batching: str, overlap: bool, tmp_path: Path) -> None:
    described = experiment(
        topology=topology, algorithm=DPSGD(ROUNDS, overlap), simulation={"batching": batching, "workers": 1}
    )
    models = models_of(described.run(tmp_path))
    setup = Setup(described)
    matrices = {"ring": ring, "one-peer-exponential": one_peer}.get(topology["name"])
    expected = follow(setup, matrices(8) if matrices else metropolis(setup), overlap)
    assert np.ptp(models, axis=0).max() > 1e-3  # nodes differ: the graph matters
    assert np.abs(expected - setup.initial).max() > 0.1
    np.testing.assert_allclose(models, expected, atol=2e-5)


def test_processes_follow_the_matrix_and_equal_the_simulation(tmp_path: Path) -> None:
    simulated = experiment(nodes=4)
    real = dataclasses.replace(simulated, engine="processes")
    runs = [each.run(tmp_path) for each in (simulated, real)]
    models = [models_of(run) for run in runs]
    np.testing.assert_allclose(models[1], follow(Setup(real), ring(4), overlap=False), atol=2e-5)
    assert np.array_equal(models[0], models[1])
    assert runs[0].summary["digest"] == runs[1].summary["digest"]
    for counted in ("bytes_sent", "messages_sent", "rounds", "accuracy", "status"):
        assert runs[0].summary[counted] == runs[1].summary[counted], counted


def test_every_message_is_counted_with_its_bytes(tmp_path: Path) -> None:
    summary = experiment().run(tmp_path).summary
    message = Message(0, "model", 0, Payload({"params": np.zeros(650, np.float32)}))
    assert summary["messages_sent"] == 8 * 2 * ROUNDS
    assert summary["bytes_sent"]["total"] == 8 * 2 * ROUNDS * message.wire_size


def test_full_graph_gives_every_node_the_mean(tmp_path: Path) -> None:
    described = experiment(topology={"name": "full"}, algorithm=DPSGD(1))
    models = models_of(described.run(tmp_path))
    np.testing.assert_allclose(models, np.tile(models.mean(0), (8, 1)), atol=1e-6)


def test_single_node_is_plain_sgd(tmp_path: Path) -> None:
    described = experiment(nodes=1)
    models = models_of(described.run(tmp_path))
    np.testing.assert_allclose(models, follow(Setup(described), [np.eye(1)] * ROUNDS, overlap=False), atol=2e-5)
