"""Muffliato: noise once per round, then K exchanges, plain or with the Chebyshev polynomial of W."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.polynomial import chebyshev

from oracle import RATE, Shoal, agrees, experiment, play, same_in_both_engines, survives_a_crash
from shoal.algorithms.muffliato import Muffliato
from shoal.errors import ExperimentError, TopologyError
from shoal.message import Message, Payload
from shoal.randomness import generator
from shoal.testing import FakeRuntime
from shoal.topologies.given import Edges
from shoal.topologies.regular import Regular
from shoal.topologies.static import Ring, Star

ROUNDS, SIGMA = 4, 0.05
DISCONNECTED = {"name": "edges", "edges": ((0, 1), (1, 2), (3, 4), (4, 5), (5, 6), (6, 7))}


def plain(w: Any, k: int) -> Any:
    return np.linalg.matrix_power(w, k)


def accelerated(w: Any, k: int) -> Any:
    """T_K(W/ρ)/T_K(1/ρ), by the eigenvectors of W."""
    values, vectors = np.linalg.eigh(w)
    rho = np.sort(np.abs(values))[-2]
    polynomial = [0] * k + [1]
    scaled = chebyshev.chebval(values / rho, polynomial) / chebyshev.chebval(1 / rho, polynomial)
    return vectors @ np.diag(scaled) @ vectors.T


@pytest.mark.parametrize("noise", ["gradient", "model"])
@pytest.mark.parametrize("gossip", [1, 2, 6])
@pytest.mark.parametrize("polynomial", [plain, accelerated])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_models_follow_the_polynomial(topology: str, polynomial: Any, gossip: int, noise: Any, tmp_path: Path) -> None:
    described = experiment(Muffliato(ROUNDS, SIGMA, gossip, polynomial is accelerated, noise), topology)
    shoal = Shoal(described)
    w = polynomial(shoal.metropolis(), gossip)
    rngs = [generator(described.seed, "muffliato noise", node) for node in range(8)]

    def drawn(node: int) -> Any:
        return SIGMA * rngs[node].standard_normal(650, np.float32)

    x = shoal.start
    for _ in range(ROUNDS):
        if noise == "gradient":
            noised = x + shoal.steps(x, offset=lambda node: -RATE * drawn(node))
        else:
            noised = x + shoal.steps(x) + np.stack([drawn(node) for node in range(8)])
        x = w @ noised
    run = agrees(described, x, tmp_path)
    assert run.summary["messages_sent"] == shoal.adjacency().sum() * ROUNDS * gossip


@pytest.mark.parametrize(("noise", "std"), [("gradient", 0.3), ("model", 1.0)])
def test_noise_of_gradients_is_scaled_by_the_learning_rate_of_the_node(noise: Any, std: float) -> None:
    start = np.zeros((3, 2000), np.float32)
    ends = play(Muffliato(1, 1.0, 1, noise=noise), start, Star(), learning_rate=0.3)
    # The mean of three nodes, each with its own noise.
    assert np.stack([node.params for node in ends]).mean(0).std() == pytest.approx(std / np.sqrt(3), rel=0.05)


def test_learning_rates_of_groups_and_of_optimizer_options_scale_the_noise(tmp_path: Path) -> None:
    def digest(training: dict[str, Any], **more: Any) -> Any:
        described = experiment(Muffliato(2, 0.05, 2), training={"lr": 0.2, **training}, **more)
        return described.run(tmp_path).summary["digest"]

    as_option = digest({"lr": 0.7, "options": {"lr": 0.2}})
    assert as_option == digest({})
    grouped = ({"nodes": "0-7", "training": {"lr": 0.2}},)
    assert digest({"lr": 0.7}, group=grouped) == as_option
    assert digest({"lr": 0.7}) != as_option


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"training": {"momentum": 0.9}},
            r"training.momentum = 0.9: .*remove the momentum, or algorithm.noise = 'model'",
        ),
        ({"training": {"optimizer": "adam"}}, r"use optimizer = 'sgd', or algorithm.noise = 'model'"),
        (
            {"trainer": {"name": "scikit"}, "training": {"lr": 0.1}},
            r"trainer = 'scikit': .*use trainer = 'torch', or algorithm.noise = 'model'",
        ),
    ],
)
def test_noise_of_gradients_needs_plain_sgd_and_noise_of_models_does_not(changed: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment(Muffliato(), **changed)
    experiment(Muffliato(noise="model"), **changed)


def test_plain_gossip_follows_graphs_that_change_with_each_exchange(tmp_path: Path) -> None:
    changing = {"name": "regular", "degree": 3, "dynamic": True}
    described = experiment(Muffliato(2, 0.0, 3, accelerated=False), changing)
    shoal = Shoal(described)
    x = shoal.start
    for r in range(2):
        x = x + shoal.steps(x)
        for k in range(3):
            x = shoal.metropolis(3 * r + k) @ x
    agrees(described, x, tmp_path)


def test_processes_and_simulation_give_identical_models(tmp_path: Path) -> None:
    same_in_both_engines(experiment(Muffliato(3, SIGMA, 3), nodes=5), tmp_path)


@pytest.mark.parametrize("faster", [False, True], ids=["plain", "accelerated"])
def test_survivors_of_a_crash_learn(faster: bool, tmp_path: Path) -> None:
    survives_a_crash(experiment(Muffliato(12, 0.001, 4, faster)), tmp_path)


@pytest.mark.parametrize("faster", [False, True], ids=["plain", "accelerated"])
def test_mean_of_noised_models_is_kept_and_noise_averages_away(faster: bool) -> None:
    models = np.zeros((20, 50), np.float32)
    noised = np.stack([generator(0, "muffliato noise", node).standard_normal(50, np.float32) for node in range(20)])
    ends = np.stack([node.params for node in play(Muffliato(1, 1.0, 15, faster, "model"), models, Ring())])
    np.testing.assert_allclose(ends.mean(0), noised.mean(0), atol=1e-6)
    spread = np.abs(ends - noised.mean(0)).max()
    assert (spread < 0.2) == faster  # without acceleration as many exchanges leave far more noise


def test_noise_is_drawn_independently_by_each_node_in_each_round() -> None:
    sent: list[tuple[int, str, int, Any]] = []

    def tamper(to: int, message: Message) -> Message:
        sent.append((message.round, message.kind, message.sender, message.payload.arrays["params"]))
        return message

    play(Muffliato(2, 1.0, 3, noise="model"), np.zeros((4, 200), np.float32), Ring(), tamper=tamper)
    assert {(r, kind) for r, kind, _, _ in sent} == {(r, f"exchange {k}") for r in range(2) for k in range(3)}
    first = {sender: params for r, kind, sender, params in sent if (r, kind) == (0, "exchange 0")}
    assert np.std([*first.values()]) == pytest.approx(1.0, abs=0.1)
    assert np.abs(np.corrcoef(np.stack([*first.values()])) - np.eye(4)).max() < 0.3


def test_node_without_noise_and_neighbours_only_trains() -> None:
    fake = FakeRuntime().mark_failed(1, 2)
    node = fake.node(nodes=3, params=np.ones(4, np.float32), train=lambda params: params + 1)
    fake.run(Muffliato(2, 0.0, 3).run(node))
    assert node.params.tolist() == [3.0] * 4


def test_invalid_model_is_rejected_and_counted() -> None:
    fake = FakeRuntime(
        Message(1, "exchange 0", 0, Payload({"params": np.ones(3, np.float32)})),
        Message(2, "exchange 0", 0, Payload({"params": np.full(4, 3.0, np.float32)})),
    )
    node = fake.node(nodes=3, params=np.ones(4, np.float32))
    fake.run(Muffliato(1, 0.0, 1).run(node))
    assert node.rejected_count == 1
    assert node.params.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
@pytest.mark.parametrize(
    ("algorithm", "topology", "problem"),
    [
        ({}, DISCONNECTED, "topology = 'edges': its spectral gap is 0: .* connect the graph"),
        ({"accelerated": False}, DISCONNECTED, "its spectral gap is 0"),
        ({}, {"name": "regular", "degree": 3, "dynamic": True}, r"does not change; .*accelerated = false"),
        ({}, {"name": "one-peer-exponential"}, r"accelerated = false"),
        ({}, {"name": "exponential"}, r"an undirected graph"),
        ({}, {"name": "gossip-sampler"}, r"accelerated = false"),
        ({"sigma": -1.0}, {"name": "ring"}, r"algorithm.sigma = -1.0: expected number at least 0"),
        ({"gossip": 0}, {"name": "ring"}, r"algorithm.gossip = 0: expected integer at least 1"),
    ],
)
def test_invalid_options_are_rejected_before_the_run_starts(algorithm: Any, topology: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "muffliato", **algorithm}, topology)


def test_acceleration_needs_whole_models_and_plain_gossip_does_not() -> None:
    with pytest.raises(ExperimentError, match="sharing = 'random': acceleration diverges"):
        experiment(Muffliato(), sharing={"name": "random"})
    experiment(Muffliato(accelerated=False), sharing={"name": "random"})


@pytest.mark.filterwarnings("ignore::shoal.topologies.TopologyWarning")
def test_disconnected_graph_is_rejected_at_the_start_of_a_run() -> None:
    fake = FakeRuntime()
    node = fake.node(nodes=8, params=np.ones(4, np.float32), topology=Edges(DISCONNECTED["edges"]))  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="spectral gap is 0"):
        fake.run(Muffliato(1).run(node))


def test_graph_that_cannot_be_built_raises_its_own_error(tmp_path: Path) -> None:
    described = experiment(Muffliato(1), Regular(9))
    with pytest.raises(TopologyError, match="9-regular on 8 nodes"):
        described.run(tmp_path)
