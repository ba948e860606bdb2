"""D², gradient tracking and quasi-global momentum: corrections of D-PSGD for heterogeneous data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import (
    BATCH,
    RATE,
    STEPS,
    Shoal,
    agrees,
    altered,
    experiment,
    play,
    same_in_both_engines,
    survives_a_crash,
    survives_a_hang,
)
from shoal.algorithms.d2 import D2
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.gradient_tracking import GradientTracking
from shoal.algorithms.k_gt import KGT
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.engines.simulation.engine import Simulation
from shoal.errors import ExperimentError
from shoal.experiment import Experiment
from shoal.message import Message, Payload
from shoal.results.records import RunFolder
from shoal.testing import FakeRuntime, Faults
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


def k_gt(shoal: Shoal, w: Any, eta_s: float = 1.0) -> Any:
    """With z and c in units of gradients, as in the paper."""
    x, c = shoal.start, np.zeros_like(shoal.start)
    for _ in range(ROUNDS):
        half = x + shoal.steps(x, offset=lambda node, c=c: -RATE * c[node])
        z = (x - half) / (STEPS * RATE)
        x, c = w @ (x - eta_s * STEPS * RATE * z), c - z + w @ z
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
        (KGT(ROUNDS), k_gt),
        (KGT(ROUNDS, eta_s=0.6), partial(k_gt, eta_s=0.6)),
        (QGDSGDm(ROUNDS, beta=0.8, mu=0.7), qg_dsgdm),
    ],
    ids=["d2", "gradient tracking", "lazy gradient tracking", "k-gt", "k-gt, eta_s", "qg-dsgdm"],
)
def test_models_follow_the_matrices(algorithm: Any, oracle: Any, topology: Any, tmp_path: Path) -> None:
    described = experiment(algorithm, topology=topology)
    shoal = Shoal(described)
    agrees(described, oracle(shoal, shoal.metropolis()), tmp_path)


RATES = [RATE, RATE, RATE / 2, RATE / 2, RATE / 4, RATE / 4]


def scheduled_gradient_tracking(shoal: Shoal, w: Any) -> Any:
    """With y in units of gradients, as in the paper."""
    x = shoal.start
    g = y = -shoal.steps(x, rate=RATES[0]) / RATES[0]
    for r in range(ROUNDS):
        x = w @ x - RATES[r] * y
        if r < ROUNDS - 1:
            g, g_before = -shoal.steps(x, rate=RATES[r + 1]) / RATES[r + 1], g
            y = w @ y + g - g_before
    return x


def scheduled_d2(shoal: Shoal, w: Any) -> Any:
    """With c in units of gradients."""
    w = (w + np.eye(len(w))) / 2
    x, c = shoal.start, np.zeros_like(shoal.start)
    for rate in RATES:
        half = x + shoal.steps(x, rate=rate) + rate * c
        x, c = w @ half, c + (w @ half - half) / rate
    return x


def scheduled_k_gt(shoal: Shoal, w: Any) -> Any:
    x, c = shoal.start, np.zeros_like(shoal.start)
    for rate in RATES:
        half = x + shoal.steps(x, offset=lambda node, c=c, rate=rate: -rate * c[node], rate=rate)  # type: ignore[misc]
        z = (x - half) / (STEPS * rate)
        x, c = w @ half, c - z + w @ z
    return x


def scheduled_qg_dsgdm(shoal: Shoal, w: Any) -> Any:
    x, m = shoal.start, np.zeros_like(shoal.start)
    for rate in RATES:
        x_new = w @ (x + shoal.steps(x, rate=rate) - rate * 0.8 * m)
        x, m = x_new, 0.7 * m + 0.3 * (x - x_new) / rate
    return x


@pytest.mark.parametrize(
    ("algorithm", "oracle"),
    [
        (D2(ROUNDS), scheduled_d2),
        (GradientTracking(ROUNDS), scheduled_gradient_tracking),
        (KGT(ROUNDS), scheduled_k_gt),
        (QGDSGDm(ROUNDS, beta=0.8, mu=0.7), scheduled_qg_dsgdm),
    ],
    ids=["d2", "gradient tracking", "k-gt", "qg-dsgdm"],
)
def test_models_follow_the_matrices_when_the_rate_changes(algorithm: Any, oracle: Any, tmp_path: Path) -> None:
    schedule = {"name": "step", "every": 2, "factor": 0.5}
    training = {"lr": RATE, "batch_size": BATCH, "local_steps": STEPS, "schedule": schedule}
    described = experiment(algorithm, training=training)
    shoal = Shoal(described)
    agrees(described, oracle(shoal, shoal.metropolis()), tmp_path)


@pytest.mark.parametrize("algorithm", [D2(2), GradientTracking(2), KGT(2)], ids=lambda a: type(a).__name__)
def test_schedules_that_differ_between_nodes_are_rejected(algorithm: Any) -> None:
    """They would break Σy = Σd, or Σc = 0, for good."""

    def described(common: Any, **of_group: Any) -> Experiment:
        training = {"lr": RATE, "batch_size": BATCH, "schedule": common}
        return experiment(algorithm, training=training, group=[{"nodes": "1", "training": of_group}])

    halved = {"name": "step", "every": 2, "factor": 0.5}
    with pytest.raises(ExperimentError, match=r"schedule\.by = 'steps': .*use by = 'rounds'"):
        described({**halved, "by": "steps"})
    for other in ({"every": 3}, "constant"):
        with pytest.raises(ExperimentError, match=r"group\.training\.schedule: .*use one schedule for all nodes"):
            described(halved, schedule=other)
    assert described(halved, lr=RATE / 3).settings(1).training.lr == RATE / 3


def test_d2_follows_the_plain_matrix_if_eigenvalues_allow_it(tmp_path: Path) -> None:
    described = experiment(D2(ROUNDS, lazy=False), topology=FULL_ENOUGH)
    shoal = Shoal(described)
    agrees(described, d2(shoal, shoal.metropolis()), tmp_path)


def test_gradient_tracking_follows_dynamic_graphs(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("algorithm", [D2(4), GradientTracking(4), KGT(4), QGDSGDm(4)], ids=lambda a: type(a).__name__)
def test_processes_and_simulation_give_identical_models(algorithm: Any, tmp_path: Path) -> None:
    same_in_both_engines(experiment(algorithm, nodes=3), tmp_path)


@pytest.mark.parametrize(
    "algorithm", [D2(20), GradientTracking(60, True), KGT(20), QGDSGDm(20)], ids=lambda a: type(a).__name__
)
def test_survivors_of_a_crash_learn(algorithm: Any, tmp_path: Path) -> None:
    survives_a_crash(experiment(algorithm), tmp_path)


@pytest.mark.parametrize(
    "algorithm", [D2(60), GradientTracking(60, True), KGT(20), QGDSGDm(20)], ids=lambda a: type(a).__name__
)
def test_survivors_of_a_hang_learn(algorithm: Any, tmp_path: Path) -> None:
    survives_a_hang(experiment(algorithm), tmp_path)


# Invariants after a fault


UNEVEN = [{"nodes": "0", "speed": {"step_seconds": 0.05}}, {"nodes": "3", "speed": {"step_seconds": 0.003}}]
"""With these devices, nodes on a ring are in different rounds when they learn of a fault."""


def surviving_nodes(algorithm: Any, folder: Path, topology: Any, faults: Faults, timeout: float | None) -> list[Any]:
    """Return the nodes that did not fail, with their memory."""
    described = experiment(
        algorithm,
        topology,
        nodes=12,
        group=UNEVEN,
        fault=faults.schedule,
        simulation={"batching": "off", "receive_timeout": timeout},
        network={"name": "uniform", "latency": 0.002},
    )
    simulation = Simulation(described, RunFolder.create(folder, "survivors"))
    simulation.run()
    return [node for node in simulation.nodes if node.id not in {fault.node for fault in described.fault}]


FAULTS = pytest.mark.parametrize(
    ("topology", "faults", "timeout"),
    [
        ("ring", Faults().crash(3, round=6), None),
        ("star", Faults().crash(3, round=6), None),
        ("torus", Faults().crash(3, round=6).crash(7, round=7).crash(2, round=12), None),
        ("ring", Faults().hang(3, round=6), 2.0),
    ],
    ids=["ring", "star", "three", "hang"],
)


@FAULTS
def test_tracked_steps_of_survivors_sum_to_their_steps(
    topology: str, faults: Faults, timeout: float | None, tmp_path: Path
) -> None:
    nodes = surviving_nodes(GradientTracking(30), tmp_path, topology, faults, timeout)
    mixed, before = (
        np.sum([node.algorithm_state[key] for node in nodes], 0, np.float64) for key in ("mixed", "before")
    )
    np.testing.assert_allclose(mixed, before, atol=1e-5)
    assert np.abs(before).max() > 1e-2


@FAULTS
@pytest.mark.parametrize("algorithm", [D2(30), KGT(30)], ids=lambda a: type(a).__name__)
def test_corrections_of_survivors_sum_to_zero(
    algorithm: Any, topology: str, faults: Faults, timeout: float | None, tmp_path: Path
) -> None:
    """So the mean of their models moves by the mean of their steps."""
    nodes = surviving_nodes(algorithm, tmp_path, topology, faults, timeout)
    corrections = np.stack([node.algorithm_state["correction"] for node in nodes])
    np.testing.assert_allclose(corrections.sum(0), 0, atol=1e-12)
    assert np.abs(corrections).max() > 1e-3


def halfway_to_two(params: Any) -> Any:
    return params / 2 + 1


@pytest.mark.parametrize("algorithm", [D2(4), GradientTracking(4)], ids=lambda a: type(a).__name__)
def test_failure_of_a_service_node_changes_nothing(algorithm: Any) -> None:
    """Nodes 0 to 2 learn; node 3 is the service node of the topology."""

    def end(*failed: int) -> Any:
        names = ("params",) if isinstance(algorithm, D2) else ("x", "y")
        kind = "model" if isinstance(algorithm, D2) else "tracked"
        payload = Payload(dict.fromkeys(names, np.ones(2, np.float32)))
        fake = FakeRuntime(*[Message(peer, kind, r, payload) for peer in (1, 2) for r in range(4)]).mark_failed(
            *failed, at=2.5
        )
        node = fake.node(nodes=3, params=np.zeros(2, np.float32), train=halfway_to_two, services={"topology": 3})
        fake.run(algorithm.run(node))
        return node.params.tolist()

    assert end(3) == end()


@pytest.mark.parametrize("epoch", [-2, 1.5, True, "late", 2**60])
def test_invalid_epoch_is_rejected(epoch: Any) -> None:
    payload = Payload({"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}, {"epoch": epoch})
    fake = FakeRuntime(*[Message(peer, "tracked", 0, payload) for peer in (1, 2)])
    node = fake.node(nodes=3, params=np.zeros(2, np.float32))
    fake.run(GradientTracking(1).run(node))
    assert node.rejected_count == 2


# Heterogeneous objectives


TARGETS = np.random.default_rng(0).normal(size=(6, 3))


def towards_targets(node: int, params: Any) -> Any:
    """A gradient step on ½‖x − target‖², with a different target for every node."""
    return params - 0.2 * (params - TARGETS[node]).astype(np.float32)


@pytest.mark.parametrize("algorithm", [D2(250), GradientTracking(250)], ids=lambda a: type(a).__name__)
def test_nodes_find_the_common_optimum_of_different_objectives(algorithm: Any) -> None:
    start = np.zeros((6, 3), np.float32)
    found = np.stack([node.params for node in play(algorithm, start, Ring(), towards_targets)])
    np.testing.assert_allclose(found, np.tile(TARGETS.mean(0), (6, 1)), atol=1e-4)
    uncorrected = np.stack([node.params for node in play(DPSGD(250), start, Ring(), towards_targets)])
    assert np.abs(uncorrected - TARGETS.mean(0)).max() > 0.05


CURVATURES = np.random.default_rng(1).uniform(0.2, 1.0, (6, 3))


def with_curvature(node: int, params: Any) -> Any:
    """A gradient step on ½ Σ a (x − target)², with different a and targets for every node."""
    return params - 0.2 * (CURVATURES[node] * (params - TARGETS[node])).astype(np.float32)


def test_k_gt_finds_the_common_optimum_with_several_local_steps_and_gradient_tracking_does_not() -> None:
    optimum = (CURVATURES * TARGETS).sum(0) / CURVATURES.sum(0)

    def error(algorithm: Any) -> Any:
        nodes = play(algorithm, np.zeros((6, 3), np.float32), Ring(), with_curvature, local_steps=5)
        return np.abs(np.stack([node.params for node in nodes]) - optimum).max()

    assert error(KGT(400)) < 1e-4
    assert error(GradientTracking(400, lazy=True)) > 0.02


@pytest.mark.parametrize("algorithm", [D2(250), GradientTracking(250)], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("topology", [Full(), Ring(), Star()], ids=["full", "ring", "star"])
def test_objective_of_a_failed_node_does_not_bias_the_others(algorithm: Any, topology: Any) -> None:
    start = np.zeros((6, 3), np.float32)
    found = np.stack([node.params for node in play(algorithm, start, topology, towards_targets, failing=5)])
    np.testing.assert_allclose(found, np.tile(TARGETS[:5].mean(0), (5, 1)), atol=1e-4)


@pytest.mark.parametrize("algorithm", [D2(9), GradientTracking(9), QGDSGDm(9)], ids=lambda a: type(a).__name__)
def test_mean_is_kept_without_training(algorithm: Any) -> None:
    models = np.random.default_rng(1).normal(size=(9, 4))
    ends = np.stack([node.params for node in play(algorithm, models, Star())])
    np.testing.assert_allclose(ends.mean(0), models.mean(0), atol=1e-6)
    assert np.ptp(ends, axis=0).max() < np.ptp(models, axis=0).max()


def test_tracking_rejects_invalid_vectors() -> None:
    def tamper(to: int, message: Message) -> Message:
        x = message.payload.arrays["x"]
        broken = {1: {"x": x * np.float32(np.nan)}, 2: {"y": x[:-1]}, 3: {"y": x.astype(np.float64)}}
        return altered(message, **broken.get(message.sender, {}))

    nodes = play(GradientTracking(3), np.random.default_rng(1).normal(size=(4, 5)), Full(), tamper=tamper)
    assert [node.rejected_count for node in nodes] == [9, 6, 6, 6]
    assert all(np.isfinite(node.params).all() for node in nodes)


# Incompatible experiments


@pytest.mark.parametrize("name", ["d2", "gradient-tracking", "qg-dsgdm"])
@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"momentum": 0.9}, "training.momentum = 0.9: .* remove the momentum"),
        ({"options": {"momentum": 0.5}}, "training.momentum = 0.5"),
        ({"optimizer": "adam"}, "training.optimizer = 'adam': .* use optimizer = 'sgd'"),
    ],
)
def test_optimizers_other_than_plain_sgd_are_rejected(name: str, training: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": name}, training=training)


@pytest.mark.parametrize(
    ("algorithm", "topology", "problem"),
    [
        ({"lazy": False}, {"name": "ring"}, "smallest eigenvalue of its mixing matrix is -0.333, .*lazy = true"),
        ({}, {"name": "regular", "degree": 3, "dynamic": True}, "diverges on a graph that changes or is directed"),
        ({}, {"name": "exponential"}, "diverges on a graph that changes or is directed"),
        ({}, {"name": "gossip-sampler"}, "diverges on a graph that changes or is directed"),
    ],
)
def test_d2_rejects_graphs_on_which_it_diverges(algorithm: Any, topology: Any, problem: str) -> None:
    with pytest.raises(ExperimentError, match=problem):
        experiment({"name": "d2", **algorithm}, topology=topology)


@pytest.mark.parametrize("sharing", ["random", "topk"])
def test_d2_rejects_sharings_that_omit_parts_of_a_model(sharing: str) -> None:
    with pytest.raises(ExperimentError, match=f"sharing = '{sharing}': 'd2' diverges unless whole models are averaged"):
        experiment({"name": "d2"}, sharing={"name": sharing})


def test_custom_sharing_must_declare_that_it_sends_whole_models(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
from shoal import Traits


class Mine:
    def start(self, params): ...
    def outgoing(self, params, round): ...
    def merge(self, params, received, weights): ...


class Whole(Mine):
    traits = Traits(sends_whole_models=True)
"""
    )
    table = {"algorithm": {"name": "d2"}, "topology": {"name": "ring"}, "sharing": {"name": f"{tmp_path}/mine.py:Mine"}}
    with pytest.raises(ExperimentError, match="'d2' diverges unless whole models are averaged"):
        Experiment.from_table(table)
    Experiment.from_table({**table, "sharing": {"name": f"{tmp_path}/mine.py:Whole"}})
    for sharing in ("full", "float16", "bfloat16", "int8", "qsgd"):
        Experiment.from_table({**table, "sharing": {"name": sharing}})


@pytest.mark.parametrize("parameters", [{"beta": 1.0}, {"mu": -0.1}])
def test_momentum_outside_0_to_1_is_rejected(parameters: dict[str, float]) -> None:
    with pytest.raises(ExperimentError, match="expected number at least 0 and below 1"):
        experiment({"name": "qg-dsgdm", **parameters})


@pytest.mark.parametrize(
    ("topology", "nodes", "smallest"),
    [(Ring(), 16, -1 / 3), (Ring(), 5000, -1 / 3), (Torus(), 900, -3 / 5), (Full(), 16, 0), (Star(), 500, 0)],
    ids=lambda t: type(t).__name__,
)
def test_smallest_eigenvalue_of_small_and_large_graphs(topology: Any, nodes: int, smallest: float) -> None:
    w = matrix(Mixing(topology.build(nodes, 0)), 0)
    assert smallest_eigenvalue(w) == pytest.approx(smallest, abs=1e-5)


def test_smallest_eigenvalue_with_any_weights() -> None:
    """A star with uniform weights: two eigenvalues beside 1 and 1/2, of a matrix that is not symmetric."""
    w = matrix(Mixing(Star().build(500, 0), "uniform"), 0)
    assert smallest_eigenvalue(w) == pytest.approx(np.linalg.eigvals(w.toarray()).real.min(), abs=1e-5)
