"""Rounding over thousands of rounds: no algorithm drifts away from the same recursion in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from quadratics import (
    NODES,
    ROUNDED_STEPS,
    ROUNDS,
    START,
    VALUES,
    Case,
    lazy,
    metropolis,
    ring,
    step,
    steps,
    uniform,
)
from shoal.algorithms.adpsgd import ADPSGD
from shoal.algorithms.artifact_baselines import ArtifactSWIFT
from shoal.algorithms.d2 import D2
from shoal.algorithms.d_cliques import DCliquesSGD
from shoal.algorithms.divshare import DivShare
from shoal.algorithms.dpsgd import DPSGD
from shoal.algorithms.el_local import ELLocal
from shoal.algorithms.el_oracle import ELOracle
from shoal.algorithms.fedavg import FedAvg
from shoal.algorithms.gossip import Gossip
from shoal.algorithms.gradient_tracking import GradientTracking
from shoal.algorithms.ipls import IPLS
from shoal.algorithms.k_gt import KGT
from shoal.algorithms.muffliato import Muffliato
from shoal.algorithms.parameter_server import ParameterServer
from shoal.algorithms.qg_dsgdm import QGDSGDm
from shoal.algorithms.relaysum import RelaySum
from shoal.algorithms.sgp import SGP
from shoal.algorithms.shatter import Shatter
from shoal.algorithms.support.fragments import cut
from shoal.algorithms.support.server_optimizers import Adagrad, Adam, Momentum, ServerSGD, Yogi
from shoal.algorithms.swift import SWIFT
from shoal.randomness import generator
from shoal.topologies.dcliques import DCliques
from shoal.topologies.exponential import Exponential
from shoal.topologies.graph import Links
from shoal.topologies.random_out import RandomOut
from shoal.topologies.regular import Regular
from shoal.topologies.static import Ring, Star, StaticGraph

FIRST = START.astype(np.float64)
DELAY = 0.1
"""Seconds between the starts of two nodes, for algorithms without common rounds: a training takes a second, so the
order of all events is known."""


# Rounds in common


def averaging(matrix: Callable[[int], Any]) -> Iterator[Any]:
    x = FIRST
    for r in range(ROUNDS):
        yield x
        x = matrix(r) @ (x + steps(x))
    yield x


def overlapped(w: Any) -> Iterator[Any]:
    x = FIRST
    for _ in range(ROUNDS):
        yield x
        x = w @ x + steps(x)
    yield x


def d2(w: Any) -> Iterator[Any]:
    before, u_before = FIRST, steps(FIRST)
    yield before
    x = w @ (before + u_before)
    for _ in range(ROUNDS - 1):
        yield x
        u = steps(x)
        x, before, u_before = w @ (2 * x - before + u - u_before), x, u
    yield x


def gradient_tracking(w: Any) -> Iterator[Any]:
    x = FIRST
    y = d = -steps(x)
    for _ in range(ROUNDS):
        yield x
        x = w @ x - y
        y, d = w @ y - steps(x) - d, -steps(x)
    yield x


def k_gt(w: Any, local_steps: int) -> Iterator[Any]:
    x, c = FIRST, np.zeros((NODES, VALUES))
    for _ in range(ROUNDS):
        yield x
        half = x
        for _ in range(local_steps):
            half = half + steps(half) - c
        z = (x - half) / local_steps
        x, c = w @ half, c - z + w @ z
    yield x


def qg_dsgdm(w: Any) -> Iterator[Any]:
    x, m = FIRST, np.zeros((NODES, VALUES))
    for _ in range(ROUNDS):
        yield x
        new = w @ (x + steps(x) - 0.9 * m)
        m, x = 0.9 * m + 0.1 * (x - new), new
    yield x


def exponential() -> Any:
    """Column-stochastic weights of the graph in which node i sends to i + 1 and i + 2.

    All nodes of this graph have the weight 1 at all times, so that SGP averages with these weights.
    """
    w = np.zeros((NODES, NODES))
    for node in range(NODES):
        for hop in (0, 1, 2):
            w[(node + hop) % NODES, node] = 1 / 3
    return w


def relaysum() -> Iterator[Any]:
    """On a star: the centre, node 0, has all trained models of this round, a leaf those of the round before.

    A leaf has its own model and the centre's of this round, and all others as the centre received them one round ago.
    """
    x, late = FIRST, FIRST
    for _ in range(ROUNDS):
        yield x
        half = x + steps(x)
        x = np.empty_like(half)
        x[0] = half.mean(0)
        for leaf in range(1, NODES):
            others = [i for i in range(1, NODES) if i != leaf]
            x[leaf] = (half[leaf] + half[0] + late[others].sum(0)) / NODES
        late = half
    yield x


def chebyshev(w: Any, count: int) -> Any:
    """T_K(W/ρ)/T_K(1/ρ), by the three-term recursion of Chebyshev polynomials."""
    rho = np.sort(np.abs(np.linalg.eigvalsh(w)))[-2]
    before, t, scalar_before, scalar = np.eye(NODES), w / rho, 1.0, 1 / rho
    for _ in range(count - 1):
        before, t = t, 2 * w / rho @ t - before
        scalar_before, scalar = scalar, 2 / rho * scalar - scalar_before
    return t / scalar


LABELS = np.eye(NODES, dtype=np.int64)


def d_cliques() -> Iterator[Any]:
    graph = DCliques(size=3, between="ring").build_from(LABELS, 0)
    w, c = metropolis(graph), np.zeros((NODES, NODES))
    for members in graph.cliques:
        c[np.ix_(members, members)] = 1 / len(members)
    x = FIRST
    for _ in range(ROUNDS):
        yield x
        x = w @ (x + c @ steps(x))
    yield x


def shatter(chunks: int) -> Iterator[Any]:
    graph, positions = Regular(2, dynamic=True).build(NODES, 0), cut(((VALUES,),), chunks, 0).positions
    x = FIRST
    for r in range(ROUNDS):
        yield x
        half = x + steps(x)
        x = half.copy()
        for c in range(chunks):
            x[:, positions[c]] = uniform(graph, r * chunks + c) @ half[:, positions[c]]
    yield x


# A server


def server(optimizer: Any) -> Iterator[Any]:
    """The server's model, from which all clients train. All clients have the same number of samples."""
    x, m = FIRST[0], np.zeros(VALUES)
    v = np.full(VALUES, getattr(optimizer, "tau", 0.0) ** 2)
    for _ in range(ROUNDS):
        yield x
        delta = steps(np.tile(x, (NODES, 1))).mean(0)
        if isinstance(optimizer, ServerSGD):
            x = x + delta
            continue
        if isinstance(optimizer, Momentum):
            m = optimizer.momentum * m + delta
            x = x + optimizer.lr * m
            continue
        m = optimizer.beta1 * m + (1 - optimizer.beta1) * delta
        if isinstance(optimizer, Adagrad):
            v = v + delta**2
        elif isinstance(optimizer, Yogi):
            v = v - (1 - optimizer.beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = optimizer.beta2 * v + (1 - optimizer.beta2) * delta**2
        x = x + optimizer.lr * m / (np.sqrt(v) + optimizer.tau)
    yield x


def asynchronous_server() -> Iterator[Any]:
    """Workers push in turn; each continues from the model that its push has changed."""
    x, pulled = FIRST[0], FIRST.copy()
    for _ in range(ROUNDS):
        yield pulled.copy()
        for worker in range(NODES):
            x = x + step(worker, pulled[worker]) / NODES
            pulled[worker] = x
    yield x


# Nodes without common rounds: node i starts `DELAY`·i seconds late


def swift(w: Any) -> Iterator[Any]:
    """Nodes with lower ids have already sent the model of the next round."""
    x = FIRST.copy()
    for _ in range(ROUNDS):
        yield x.copy()
        for i in range(NODES):
            x[i] = w[i] @ x + step(i, x[i])
    yield x


def latest_of_all() -> Iterator[Any]:
    """A node averages with the trained models of all others: of this round if they are before it, else of the last.

    A node that has ended sends nothing more: in the last round, nodes have only the models of those behind them.
    """
    x, sent = FIRST.copy(), np.zeros_like(FIRST)
    for r in range(ROUNDS):
        yield x.copy()
        for i in range(NODES):
            trained = x[i] + step(i, x[i])
            others = [j for j in range(NODES) if (j < i and r < ROUNDS - 1) or (j > i and r > 0)]
            x[i] = (trained + sent[others].sum(0)) / (1 + len(others))
            sent[i] = trained
    yield x


def adpsgd() -> Iterator[Any]:
    """On a star: each leaf averages with the centre, node 0, while both train."""
    x = FIRST.copy()
    for _ in range(ROUNDS):
        yield x.copy()
        centre_step = step(0, x[0])
        for leaf in range(1, NODES):
            half = (x[leaf] - x[0]) / 2
            x[0] += half
            x[leaf] += step(leaf, x[leaf]) - half
        x[0] += centre_step
    yield x


PERIOD = 1000.0


class OneWayRing:
    """Node i sends to node i + 1."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        return StaticGraph([Links(((node + 1) % nodes,), ((node - 1) % nodes,)) for node in range(nodes)])


def gossip(merge: str) -> Iterator[Any]:
    """Nodes send in the order of their clocks. A node that has sent its last model receives nothing more."""
    clocks = np.array([generator(0, "gossip", node).random() for node in range(NODES)])
    assert np.diff(np.sort(clocks)).min() * PERIOD > 1  # a training ends before the next model is sent
    x, ages = FIRST.copy(), [0] * NODES
    for r in range(ROUNDS):
        trained_from = x.copy()
        for sender in np.argsort(clocks).tolist():
            to = (sender + 1) % NODES
            if r == ROUNDS - 1 and clocks[to] < clocks[sender]:
                continue
            total = ages[sender] + ages[to]
            weight = ages[sender] / total if merge == "age" and total else 0.5
            trained_from[to] = x[to] + weight * (x[sender] - x[to])
            x[to] = trained_from[to] + step(to, trained_from[to])
            ages[to] = max(ages[sender], ages[to]) + 1
        yield trained_from
    yield x


# The cases


def _muffliato(accelerated: bool) -> Case:
    polynomial = chebyshev(ring(), 2) if accelerated else np.linalg.matrix_power(ring(), 2)
    algorithm = Muffliato(sigma=0.0, gossip=2, accelerated=accelerated)
    return Case(algorithm, Ring(), lambda: averaging(lambda r: polynomial))


def _fedavg(optimizer: Any) -> Case:
    return Case(FedAvg(server=optimizer), Ring(), partial(server, optimizer), tolerance=ROUNDED_STEPS)


def _gossip(merge: Any) -> Case:
    return Case(Gossip(period=PERIOD, merge=merge), OneWayRing(), lambda: gossip(merge), tolerance=ROUNDED_STEPS)


def _epidemic(algorithm: Any, topology: Any) -> Case:
    return Case(algorithm, Ring(), lambda: averaging(partial(uniform, topology.build(NODES, 0))))


def _late(algorithm: Any, topology: Any, oracle: Callable[[], Iterator[Any]]) -> Case:
    return Case(algorithm, topology, oracle, settings={"delay": DELAY})


CASES: dict[str, Case] = {
    "dpsgd": Case(DPSGD(), Ring(), lambda: averaging(lambda r: ring())),
    "dpsgd, overlap": Case(DPSGD(overlap=True), Ring(), lambda: overlapped(ring())),
    "el-oracle": _epidemic(ELOracle(degree=2), Regular(2, dynamic=True)),
    "el-local": _epidemic(ELLocal(peers=2), RandomOut(2)),
    "d2": Case(D2(), Ring(), lambda: d2(lazy(ring()))),
    "gradient-tracking": Case(GradientTracking(), Ring(), lambda: gradient_tracking(ring())),
    "k-gt, 3 local steps": Case(KGT(), Ring(), lambda: k_gt(ring(), 3), 3, tolerance=ROUNDED_STEPS),
    "qg-dsgdm": Case(QGDSGDm(), Ring(), lambda: qg_dsgdm(ring())),
    "sgp": Case(SGP(), Exponential(), lambda: averaging(lambda r: exponential())),
    "relaysum": Case(RelaySum(), Star(), relaysum),
    "muffliato, plain": _muffliato(accelerated=False),
    "muffliato, accelerated": _muffliato(accelerated=True),
    "d-cliques": Case(DCliquesSGD(size=3, between="ring"), Ring(), d_cliques, settings={"labels": LABELS}),
    "shatter": Case(Shatter(virtual_nodes=2, degree=2), Ring(), lambda: shatter(2)),
    "ipls": Case(IPLS(), Ring(), lambda: server(ServerSGD())),
    "fedavg": _fedavg(ServerSGD()),
    "fedavg, momentum": _fedavg(Momentum()),
    "fedavg, adam": _fedavg(Adam(lr=0.003)),
    "fedavg, yogi": _fedavg(Yogi(lr=0.003)),
    "fedavg, adagrad": _fedavg(Adagrad()),
    "parameter-server": Case(ParameterServer(), Ring(), lambda: server(ServerSGD())),
    "parameter-server, asynchronous": Case(ParameterServer(asynchronous=True), Ring(), asynchronous_server),
    "swift": _late(SWIFT(), Ring(), lambda: swift(ring())),
    "swift-artifact": _late(ArtifactSWIFT(degree=NODES - 1), Ring(), latest_of_all),
    "divshare": _late(DivShare(fraction=0.5, degree=NODES - 1), Ring(), latest_of_all),
    "adpsgd": _late(ADPSGD(), Star(), adpsgd),
    "gossip": _gossip("age"),
    "gossip, average": _gossip("average"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_models_follow_the_recursion_in_double_precision(case: Case) -> None:
    found = case.errors()
    assert max(found.values()) < case.tolerance, found
