"""Rounding over thousands of rounds: no algorithm may drift away from the same recursion in double precision.

Node i minimises ½ Σ a_i (x − b_i)² with gradient descent, 5,000 rounds with a small step. A rounding error that an
algorithm adds up is divided by the step size in the end, so it shows. `TOLERANCE` is about 100 times the rounding of a
model of norm 5 to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle import play
from shoal.algorithms.d2 import D2
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.gradient_tracking import GradientTracking
from shoal.algorithms.k_gt import KGT
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.algorithms.relaysum import RelaySum
from shoal.algorithms.sgp import SGP
from shoal.compression.compressors import TopKCompressor
from shoal.sharing.choco import CHOCO
from shoal.sharing.deepsqueeze import DeepSqueeze
from shoal.sharing.powergossip import PowerGossip
from shoal.topologies.exponential import Exponential
from shoal.topologies.static import Ring, Star

NODES, VALUES, ROUNDS, RATE, LOCAL_STEPS = 5, 8, 5000, 0.002, 1
TOLERANCE = 5e-5
draws = np.random.default_rng(3)
CURVATURE = draws.uniform(0.5, 1.5, (NODES, VALUES)).astype(np.float32)
CENTRE = draws.normal(1, 3, (NODES, VALUES)).astype(np.float32)
START = np.zeros((NODES, VALUES), np.float32)


def train(node: int, params: Any) -> Any:
    return params - np.float32(RATE) * (CURVATURE[node] * (params - CENTRE[node]))


def steps(models: Any) -> Any:
    """Every node's step u = train(x) − x in double precision; the rate is rounded as in `train`."""
    return -float(np.float32(RATE)) * (CURVATURE.astype(np.float64) * (models - CENTRE))


def ring() -> Any:
    w = np.zeros((NODES, NODES))
    for node in range(NODES):
        w[node, [node, (node + 1) % NODES, (node - 1) % NODES]] = 1 / 3
    return w


def lazy_ring() -> Any:
    return (ring() + np.eye(NODES)) / 2


# The oracles


def dpsgd(w: Any) -> Any:
    x = START.astype(np.float64)
    for _ in range(ROUNDS):
        x = w @ (x + steps(x))
    return x


def d2(w: Any) -> Any:
    before, u_before = START.astype(np.float64), steps(START)
    x = w @ (before + u_before)
    for _ in range(ROUNDS - 1):
        u = steps(x)
        x, before, u_before = w @ (2 * x - before + u - u_before), x, u
    return x


def gradient_tracking(w: Any) -> Any:
    x = START.astype(np.float64)
    y = d = -steps(x)
    for _ in range(ROUNDS):
        x = w @ x - y
        y, d = w @ y - steps(x) - d, -steps(x)
    return x


def k_gt(w: Any) -> Any:
    x, c = START.astype(np.float64), np.zeros((NODES, VALUES))
    for _ in range(ROUNDS):
        half = x
        for _ in range(LOCAL_STEPS):
            half = half + steps(half) - c
        z = (x - half) / LOCAL_STEPS
        x, c = w @ half, c - z + w @ z
    return x


def qg_dsgdm(w: Any) -> Any:
    x, m = START.astype(np.float64), np.zeros((NODES, VALUES))
    for _ in range(ROUNDS):
        new = w @ (x + steps(x) - 0.9 * m)
        m, x = 0.9 * m + 0.1 * (x - new), new
    return x


def sgp(w: Any) -> Any:
    """`w` is column-stochastic. All nodes of this graph have the weight 1 at all times."""
    x = START.astype(np.float64)
    for _ in range(ROUNDS):
        x = w @ (x + steps(x))
    return x


def relaysum() -> Any:
    """On a star: the centre, node 0, has all trained models of this round, a leaf those of the round before.

    A leaf has its own model and the centre's of this round, and all others as the centre received them one round ago.
    """
    x, late = START.astype(np.float64), START.astype(np.float64)
    for _ in range(ROUNDS):
        half = x + steps(x)
        x = np.empty_like(half)
        x[0] = half.mean(0)
        for leaf in range(1, NODES):
            others = [i for i in range(1, NODES) if i != leaf]
            x[leaf] = (half[leaf] + half[0] + late[others].sum(0)) / NODES
        late = half
    return x


def exponential() -> Any:
    """Column-stochastic weights of the graph in which node i sends to i + 1, i + 2 and i + 4."""
    w = np.zeros((NODES, NODES))
    for node in range(NODES):
        for hop in (0, 1, 2, 4):
            w[(node + hop) % NODES, node] = 1 / 4
    return w


@pytest.mark.parametrize(
    ("algorithm", "topology", "oracle"),
    [
        (DPSGD(ROUNDS), Ring(), lambda: dpsgd(ring())),
        (D2(ROUNDS), Ring(), lambda: d2(lazy_ring())),
        (GradientTracking(ROUNDS), Ring(), lambda: gradient_tracking(ring())),
        (KGT(ROUNDS), Ring(), lambda: k_gt(ring())),
        (QGDSGDm(ROUNDS), Ring(), lambda: qg_dsgdm(ring())),
        (SGP(ROUNDS), Exponential(), lambda: sgp(exponential())),
        (RelaySum(ROUNDS), Star(), relaysum),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "rounds") else "",
)
def test_models_follow_the_recursion_in_double_precision(algorithm: Any, topology: Any, oracle: Any) -> None:
    models = np.stack([node.params for node in play(algorithm, START, topology, train)])
    np.testing.assert_allclose(models, oracle(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "sharing",
    [
        lambda: CHOCO(gamma=0.2, compressor=TopKCompressor(0.25)),
        lambda: DeepSqueeze(),
        lambda: DeepSqueeze(gamma=0.01, compressor=TopKCompressor(0.25)),
        lambda: PowerGossip(),
    ],
    ids=["choco", "deepsqueeze", "deepsqueeze top-k", "powergossip"],
)
def test_compressed_sharing_moves_the_mean_by_the_mean_of_all_steps(sharing: Callable[[], Any]) -> None:
    total = np.zeros((NODES, VALUES))

    def counted(node: int, params: Any) -> Any:
        trained = train(node, params)
        total[node] += trained.astype(np.float64) - params
        return trained

    models = np.stack([node.params for node in play(DPSGD(ROUNDS), START, Ring(), counted, sharing=sharing)])
    assert np.abs(total).max() > 1
    np.testing.assert_allclose(models.mean(0, np.float64), total.mean(0), atol=TOLERANCE, rtol=0)
