"""D², gradient tracking and quasi-global momentum: what corrects D-PSGD where nodes hold different data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Shoal, agrees, altered, experiment, play, same_in_both_engines, survives_a_crash
from shoal.algorithms.d2 import D2
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.gradient_tracking import GradientTracking
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.errors import ExperimentError
from shoal.message import Message
from shoal.topologies.graph import Mixing
from shoal.topologies.measures import matrix, smallest_eigenvalue
from shoal.topologies.static import Full, Ring, Star, Torus

ROUNDS = 6
FULL_ENOUGH = {"name": "regular", "degree": 6}
"""A graph on 8 nodes whose smallest eigenvalue is above −1/3."""


# The oracles


def d2(shoal: Shoal, w: Any) -> Any:
    x_before, u_before = shoal.start, shoal.steps(shoal.start)
    x = w @ (x_before + u_before)
    for _ in range(ROUNDS - 1):
        u = shoal.steps(x)
        x, x_before, u_before = w @ (2 * x - x_before + u - u_before), x, u
    return x


def gradient_tracking(shoal: Shoal, w: Any) -> Any:
    x = shoal.start
    d = -shoal.steps(x)
    y = d
    for r in range(ROUNDS):
        x = w @ x - y
        if r < ROUNDS - 1:
            d, d_before = -shoal.steps(x), d
            y = w @ y + d - d_before
    return x


def qg_dsgdm(shoal: Shoal, w: Any, beta: float = 0.8, mu: float = 0.7, rate: float = 0.2) -> Any:
    """With m as in the paper, in units of gradients."""
    x = shoal.start
    m = np.zeros_like(x)
    for _ in range(ROUNDS):
        g = -shoal.steps(x) / rate
        x_new = w @ (x - rate * (beta * m + g))
        m = mu * m + (1 - mu) * (x - x_new) / rate
        x = x_new
    return x


@pytest.mark.parametrize("topology", [{"name": "ring"}, {"name": "star"}], ids=["ring", "star"])
@pytest.mark.parametrize(
    ("algorithm", "oracle"),
    [
        (D2(ROUNDS), lambda shoal, w: d2(shoal, (w + np.eye(8)) / 2)),
        (GradientTracking(ROUNDS), gradient_tracking),
        (GradientTracking(ROUNDS, lazy=True), lambda shoal, w: gradient_tracking(shoal, (w + np.eye(8)) / 2)),
        (QGDSGDm(ROUNDS, beta=0.8, mu=0.7), qg_dsgdm),
    ],
    ids=["d2", "gradient tracking", "lazy gradient tracking", "qg-dsgdm"],
)
def test_all_models_follow_the_matrices(algorithm: Any, oracle: Any, topology: Any, tmp_path: Path) -> None:
    described = experiment(algorithm, topology=topology)
    shoal = Shoal(described)
    agrees(described, oracle(shoal, shoal.metropolis()), tmp_path)


def test_d2_follows_the_plain_matrix_where_it_may(tmp_path: Path) -> None:
    described = experiment(D2(ROUNDS, lazy=False), topology=FULL_ENOUGH)
    shoal = Shoal(described)
    agrees(described, d2(shoal, shoal.metropolis()), tmp_path)


def test_gradient_tracking_follows_graphs_that_change(tmp_path: Path) -> None:
    described = experiment(GradientTracking(2), topology={"name": "regular", "degree": 3, "dynamic": True})
    shoal = Shoal(described)
    x = shoal.start
    d = y = -shoal.steps(x)
    for r in range(2):
        w = shoal.metropolis(r)
        x = w @ x - y
        d, d_before = -shoal.steps(x), d
        y = w @ y + d - d_before
    agrees(described, x, tmp_path)


@pytest.mark.parametrize("algorithm", [D2(4), GradientTracking(4), QGDSGDm(4)], ids=lambda a: type(a).__name__)
def test_processes_agree_with_the_simulation_to_the_bit(algorithm: Any, tmp_path: Path) -> None:
    same_in_both_engines(experiment(algorithm, nodes=3), tmp_path)


@pytest.mark.parametrize("algorithm", [D2(20), GradientTracking(60), QGDSGDm(20)], ids=lambda a: type(a).__name__)
def test_survivors_of_a_crash_learn(algorithm: Any, tmp_path: Path) -> None:
    survives_a_crash(experiment(algorithm), tmp_path)


# What they are for


TARGETS = np.random.default_rng(0).normal(size=(6, 3))


def towards_targets(node: int, params: Any) -> Any:
    """A step down ½‖x − target‖², of which every node has another."""
    return params - 0.2 * (params - TARGETS[node]).astype(np.float32)


@pytest.mark.parametrize("algorithm", [D2(250), GradientTracking(250)], ids=lambda a: type(a).__name__)
def test_every_node_finds_the_optimum_of_all_though_each_wants_another(algorithm: Any) -> None:
    start = np.zeros((6, 3), np.float32)
    found = np.stack([node.params for node in play(algorithm, start, Ring(), towards_targets)])
    np.testing.assert_allclose(found, np.tile(TARGETS.mean(0), (6, 1)), atol=1e-4)
    uncorrected = np.stack([node.params for node in play(DPSGD(250), start, Ring(), towards_targets)])
    assert np.abs(uncorrected - TARGETS.mean(0)).max() > 0.05


@pytest.mark.parametrize("algorithm", [D2(250), GradientTracking(250)], ids=lambda a: type(a).__name__)
def test_what_a_dead_node_wanted_does_not_drag_the_others_for_ever(algorithm: Any) -> None:
    """On a full graph, for there the weights of those that are left are doubly stochastic again."""
    start = np.zeros((6, 3), np.float32)
    found = np.stack([node.params for node in play(algorithm, start, Full(), towards_targets, lost=5)])
    np.testing.assert_allclose(found, np.tile(TARGETS[:5].mean(0), (5, 1)), atol=1e-4)


@pytest.mark.parametrize("algorithm", [D2(9), GradientTracking(9), QGDSGDm(9)], ids=lambda a: type(a).__name__)
def test_the_mean_stays_when_nobody_learns(algorithm: Any) -> None:
    models = np.random.default_rng(1).normal(size=(9, 4))
    ends = np.stack([node.params for node in play(algorithm, models, Star())])
    np.testing.assert_allclose(ends.mean(0), models.mean(0), atol=1e-6)
    assert np.ptp(ends, axis=0).max() < np.ptp(models, axis=0).max()


def test_tracking_drops_what_is_not_two_finite_vectors() -> None:
    def told(to: int, message: Message) -> Message:
        x = message.payload.arrays["x"]
        broken = {1: {"x": x * np.float32(np.nan)}, 2: {"y": x[:-1]}, 3: {"y": x.astype(np.float64)}}
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(GradientTracking(3), np.random.default_rng(1).normal(size=(4, 5)), Full(), told=told)
    assert [node.rejected for node in nodes] == [9, 6, 6, 6]
    assert all(np.isfinite(node.params).all() for node in nodes)


# What does not go with them


@pytest.mark.parametrize("name", ["d2", "gradient-tracking", "qg-dsgdm"])
@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"momentum": 0.9}, "training.momentum = 0.9: .* leave the momentum out"),
        ({"options": {"momentum": 0.5}}, "training.momentum = 0.5"),
        ({"optimizer": "adam"}, "training.optimizer = 'adam': .* use optimizer = 'sgd'"),
    ],
)
def test_only_plain_sgd_shows_gradients(name: str, training: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": name}, training=training)


@pytest.mark.parametrize(
    ("algorithm", "topology", "problem"),
    [
        ({"lazy": False}, {"name": "ring"}, "smallest eigenvalue of its mixing matrix is -0.333, .*lazy = true"),
        ({}, {"name": "regular", "degree": 3, "dynamic": True}, "diverges where links change or go one way"),
        ({}, {"name": "exponential"}, "diverges where links change or go one way"),
        ({}, {"name": "gossip-sampler"}, "diverges where links change or go one way"),
    ],
)
def test_d2_refuses_graphs_on_which_it_diverges(algorithm: Any, topology: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "d2", **algorithm}, topology=topology)


@pytest.mark.parametrize("sharing", ["random", "topk"])
def test_d2_refuses_sharings_that_leave_out_parts_of_a_model(sharing: str) -> None:
    with pytest.raises(ExperimentError, match=f"sharing = '{sharing}': 'd2' diverges unless whole models are averaged"):
        experiment({"name": "d2"}, sharing={"name": sharing})


@pytest.mark.parametrize("parameters", [{"beta": 1.0}, {"mu": -0.1}])
def test_momenta_are_from_0_to_1(parameters: dict[str, float]) -> None:
    with pytest.raises(ExperimentError, match="expected number at least 0 and below 1"):
        experiment({"name": "qg-dsgdm", **parameters})


@pytest.mark.parametrize(
    ("topology", "nodes", "least"),
    [(Ring(), 16, -1 / 3), (Ring(), 5000, -1 / 3), (Torus(), 900, -3 / 5), (Full(), 16, 0), (Star(), 500, 0)],
    ids=lambda t: type(t).__name__,
)
def test_the_smallest_eigenvalue_is_found_on_small_and_large_graphs(topology: Any, nodes: int, least: float) -> None:
    w = matrix(Mixing(topology.build(nodes, 0)), 0)
    assert smallest_eigenvalue(w) == pytest.approx(least, abs=1e-5)


def test_eigenvalues_are_those_of_any_weights() -> None:
    """A star with uniform weights: two eigenvalues beside 1 and 1/2, of a matrix that is not symmetric."""
    w = matrix(Mixing(Star().build(500, 0), "uniform"), 0)
    assert smallest_eigenvalue(w) == pytest.approx(np.linalg.eigvals(w.toarray()).real.min(), abs=1e-5)
