"""The recursions of all algorithms in double precision, for `quadratics`: oracles of long runs.

An oracle is a generator: it yields what every node trains from in round 0, 1, … and the models after the last round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quadratics import NODES, START, VALUES, metropolis, step, steps, uniform
from shoal.algorithms.support.fragments import cut
from shoal.algorithms.support.server_optimizers import Adagrad, Momentum, ServerSGD, Yogi
from shoal.randomness import generator
from shoal.topologies.d_cliques import DCliques
from shoal.topologies.graph import Links
from shoal.topologies.regular import Regular
from shoal.topologies.static import StaticGraph

FIRST = START.astype(np.float64)
DELAY = 0.1
"""Seconds between the starts of two nodes, for algorithms without common rounds: a training takes a second, so the
order of all events is known."""


# Rounds in common


def averaging(matrix: Callable[[int], Any], rounds: int) -> Iterator[Any]:
    x = FIRST
    for r in range(rounds):
        yield x
        x = matrix(r) @ (x + steps(x))
    yield x


def overlapped(w: Any, rounds: int) -> Iterator[Any]:
    x = FIRST
    for _ in range(rounds):
        yield x
        x = w @ x + steps(x)
    yield x


def d2(w: Any, rounds: int) -> Iterator[Any]:
    before, u_before = FIRST, steps(FIRST)
    yield before
    x = w @ (before + u_before)
    for _ in range(rounds - 1):
        yield x
        u = steps(x)
        x, before, u_before = w @ (2 * x - before + u - u_before), x, u
    yield x


def gradient_tracking(w: Any, rounds: int) -> Iterator[Any]:
    x = FIRST
    y = d = -steps(x)
    for _ in range(rounds):
        yield x
        x = w @ x - y
        y, d = w @ y - steps(x) - d, -steps(x)
    yield x


def k_gt(w: Any, local_steps: int, eta_s: float, rounds: int) -> Iterator[Any]:
    x, c = FIRST, np.zeros((NODES, VALUES))
    for _ in range(rounds):
        yield x
        half = x
        for _ in range(local_steps):
            half = half + steps(half) - c
        z = (x - half) / local_steps
        x, c = w @ (x + eta_s * (half - x)), c - z + w @ z
    yield x


def qg_dsgdm(w: Any, rounds: int) -> Iterator[Any]:
    x, m = FIRST, np.zeros((NODES, VALUES))
    for _ in range(rounds):
        yield x
        new = w @ (x + steps(x) - 0.9 * m)
        m, x = 0.9 * m + 0.1 * (x - new), new
    yield x


IRREGULAR = {0: (1, 2), 1: (2,), 2: (0, 1, 3), 3: (0,)}
"""The receivers of each node in a directed graph in which the weights of SGP differ."""


class Irregular:
    """The topology of `IRREGULAR`."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        return StaticGraph(
            [
                Links(receivers, tuple(sender for sender, to in IRREGULAR.items() if node in to))
                for node, receivers in IRREGULAR.items()
            ]
        )


def sgp(rounds: int) -> Iterator[Any]:
    """Sums x and weights w, with models x/w, on the graph `IRREGULAR`."""
    p = np.zeros((NODES, NODES))
    for sender, receivers in IRREGULAR.items():
        p[[sender, *receivers], sender] = 1 / (1 + len(receivers))
    x, w = FIRST, np.ones((NODES, 1))
    for _ in range(rounds):
        yield x / w
        x, w = p @ (x + steps(x / w)), p @ w
    assert np.ptp(w) > 0.5
    yield x / w


def exponential() -> Any:
    """Column-stochastic weights of the graph in which node i sends to i + 1 and i + 2.

    All nodes of this graph have the weight 1 at all times, so that SGP averages with these weights.
    """
    w = np.zeros((NODES, NODES))
    for node in range(NODES):
        for hop in (0, 1, 2):
            w[(node + hop) % NODES, node] = 1 / 3
    return w


def relaysum(rounds: int) -> Iterator[Any]:
    """On a star: the centre, node 0, has all trained models of this round, a leaf those of the round before.

    A leaf has its own model and the centre's of this round, and all others as the centre received them one round ago.
    """
    x, late = FIRST, FIRST
    for _ in range(rounds):
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


def d_cliques(rounds: int) -> Iterator[Any]:
    graph = DCliques(size=3, between="ring").build_from(LABELS, 0)
    w, c = metropolis(graph), np.zeros((NODES, NODES))
    for members in graph.cliques:
        c[np.ix_(members, members)] = 1 / len(members)
    x = FIRST
    for _ in range(rounds):
        yield x
        x = w @ (x + c @ steps(x))
    yield x


def shatter(chunks: int, rounds: int) -> Iterator[Any]:
    graph, positions = Regular(2, dynamic=True).build(NODES, 0), cut(((VALUES,),), chunks, 0).positions
    x = FIRST
    for r in range(rounds):
        yield x
        half = x + steps(x)
        x = half.copy()
        for c in range(chunks):
            x[:, positions[c]] = uniform(graph, r * chunks + c) @ half[:, positions[c]]
    yield x


# A server


def sampled_server(fraction: float, rounds: int) -> Iterator[Any]:
    """The server's model, which a part of the clients trains in each round."""
    x, rng = FIRST[0], generator(0, "clients", NODES)
    for _ in range(rounds):
        yield x
        clients = rng.choice(NODES, round(fraction * NODES), replace=False)
        x = x + steps(np.tile(x, (NODES, 1)))[clients].mean(0)
    yield x


def server(optimizer: Any, rounds: int) -> Iterator[Any]:
    """The server's model, from which all clients train. All clients have the same number of samples."""
    x, m = FIRST[0], np.zeros(VALUES)
    v = np.full(VALUES, getattr(optimizer, "tau", 0.0) ** 2)
    for _ in range(rounds):
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


def asynchronous_server(rounds: int) -> Iterator[Any]:
    """Workers push in turn; each continues from the model that its push has changed."""
    x, pulled = FIRST[0], FIRST.copy()
    for _ in range(rounds):
        yield pulled.copy()
        for worker in range(NODES):
            x = x + step(worker, pulled[worker]) / NODES
            pulled[worker] = x
    yield x


# Nodes without common rounds: node i starts `DELAY`·i seconds late


def swift(w: Any, skipped: int, rounds: int) -> Iterator[Any]:
    """Nodes with lower ids have already sent the model of the next round."""
    x = FIRST.copy()
    for r in range(rounds):
        yield x.copy()
        for i in range(NODES):
            x[i] = (x[i] if (r + 1) % (skipped + 1) else w[i] @ x) + step(i, x[i])
    yield x


def latest_of_all(rounds: int) -> Iterator[Any]:
    """A node averages with the trained models of all others: of this round if they are before it, else of the last.

    A node that has ended sends nothing more: in the last round, nodes have only the models of those behind them.
    """
    x, sent = FIRST.copy(), np.zeros_like(FIRST)
    for r in range(rounds):
        yield x.copy()
        for i in range(NODES):
            trained = x[i] + step(i, x[i])
            others = [j for j in range(NODES) if (j < i and r < rounds - 1) or (j > i and r > 0)]
            x[i] = (trained + sent[others].sum(0)) / (1 + len(others))
            sent[i] = trained
    yield x


def adpsgd(rounds: int) -> Iterator[Any]:
    """On a star: each leaf averages with the centre, node 0, while both train."""
    x = FIRST.copy()
    for _ in range(rounds):
        yield x.copy()
        centre_step = step(0, x[0])
        for leaf in range(1, NODES):
            half = (x[leaf] - x[0]) / 2
            x[0] += half
            x[leaf] += step(leaf, x[leaf]) - half
        x[0] += centre_step
    yield x


def artifact_adpsgd(degree: int, rounds: int) -> Iterator[Any]:
    """Models arrive at once. A request has the trained model, an answer the model that its sender trains from.

    Of several models of a sender, the one of its latest round counts, and of two of the same round the answer.
    """
    x = FIRST.copy()
    rngs = [generator(0, "artifact adpsgd", node) for node in range(NODES)]
    arrived: list[dict[int, tuple[tuple[int, bool], Any]]] = [{} for _ in range(NODES)]

    def deliver(to: int, sender: int, rank: tuple[int, bool], model: Any) -> None:
        if sender not in arrived[to] or rank >= arrived[to][sender][0]:
            arrived[to][sender] = rank, model

    for r in range(rounds):
        yield x.copy()
        for i in range(NODES):
            trained = x[i] + step(i, x[i])
            x[i] = np.mean([trained, *(model for _, model in arrived[i].values())], 0)
            arrived[i] = {}
            if r == rounds - 1:
                continue  # a node that has ended sends nothing more
            for peer in rngs[i].choice([j for j in range(NODES) if j != i], degree // 2).tolist():
                deliver(peer, i, (r, False), trained)
                deliver(i, peer, (r + (peer < i), True), x[peer].copy())
    yield x


PERIOD = 1000.0


class OneWayRing:
    """Node i sends to node i + 1."""

    def build(self, nodes: int, seed: int) -> StaticGraph:
        return StaticGraph([Links(((node + 1) % nodes,), ((node - 1) % nodes,)) for node in range(nodes)])


def gossip(merge: str, rounds: int) -> Iterator[Any]:
    """Nodes send in the order of their clocks. A node that has sent its last model receives nothing more.

    `merge`: "age" or "average", "none" for a model that replaces another, "um" to train both models and merge by age.
    """
    clocks = np.array([generator(0, "gossip", node).random() for node in range(NODES)])
    assert np.diff(np.sort(clocks)).min() * PERIOD > 2  # trainings end before the next model is sent
    x, ages = FIRST.copy(), [0] * NODES
    for r in range(rounds):
        trained_from = x.copy()
        for sender in np.argsort(clocks).tolist():
            to = (sender + 1) % NODES
            if r == rounds - 1 and clocks[to] < clocks[sender]:
                continue
            theirs, ours = ages[sender], ages[to]
            if merge == "um":
                trained_from[to] = x[sender]
                weight = (theirs + 1) / (theirs + ours + 2)
                trained = [model + step(to, model) for model in (x[to], x[sender])]
                x[to] = trained[0] + weight * (trained[1] - trained[0])
            else:
                weight = (
                    1.0 if merge == "none" else theirs / (theirs + ours) if merge == "age" and theirs + ours else 0.5
                )
                trained_from[to] = x[to] + weight * (x[sender] - x[to])
                x[to] = trained_from[to] + step(to, trained_from[to])
            ages[to] = (theirs if merge == "none" else max(theirs, ours)) + 1
        yield trained_from
    yield x
