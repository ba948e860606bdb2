"""Muffliato: each node hides its model in noise, and gossip averages the noise away.

Cyffers, Even, Bellet, Massoulié: Muffliato: Peer-to-Peer Privacy Amplification for Decentralized Optimization and
Averaging, NeurIPS 2022 (arXiv:2206.05091).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from shoal.algorithms.support.requirements import inexact
from shoal.errors import TopologyError
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.sharing import PayloadChecker
from shoal.topologies.graph import Mixing, cached_per_mixing
from shoal.topologies.inspection import changes, directed, graph_of
from shoal.traits import ExperimentView
from shoal.types import Bounds, Params

EXCHANGE = "exchange {}"
"""The kind of the messages of this exchange in a round. Their rounds are the node's, for by these it is known who is
back."""


@dataclass(frozen=True)
class Muffliato:
    """Cyffers et al. 2022: train, add noise once, then average with the neighbours many times.

    `sigma` is the standard deviation of the Gaussian noise that a node adds to each parameter of its trained model,
    once a round, before anyone sees it; in the units of the parameters. What privacy this gives, and how much more to
    nodes far away, depends on the graph, on `gossip`, and on how far one sample can move a model: it is not accounted
    for here, nor are gradients clipped.

    `gossip` is K, how often a round averages with W. All nodes' mean, of noised models, stays as it is. `accelerated`
    takes the Chebyshev polynomial of W of degree K, which is nearest to the mean of all that K exchanges can reach:
    x¹ = Wx⁰, x^{k+1} = ω_k Wx^k + (1 − ω_k)x^{k−1}, with ω from the spectral gap of the graph, which has to be
    undirected and stay as it is. A changing graph changes with each exchange: number k of round r has graph rK + k.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    sigma: Annotated[float, Bounds(at_least=0)] = 0.01
    gossip: Annotated[int, Bounds(at_least=1)] = 5
    accelerated: bool = True

    async def run(self, node: Node) -> None:
        second = _second_eigenvalue(node.mixing) if self.accelerated else 0.0
        noise = node.rng("muffliato noise")
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            x = trained + np.float32(self.sigma) * noise.standard_normal(trained.size, np.float32)
            before = x
            for k, omega in zip(range(self.gossip), _chebyshev(second), strict=False):
                x, before = omega * await self._mixed(node, x, r, k) + (1 - omega) * before, x
            node.params = x

    async def _mixed(self, node: Node, x: Params, r: int, k: int) -> Params:
        """This node's row of Wx, in exchange k of round r."""

        def check(said: Payload) -> None:
            if isinstance(node.sharing, PayloadChecker):
                node.sharing.check(said, x)

        number, kind = r * self.gossip + k, EXCHANGE.format(k)
        peers = await node.peers(number)
        await node.send(peers, node.sharing.outgoing(x, number), round=r, kind=kind)
        received = await node.receive_each(peers, round=r, kind=kind, check=check)
        return node.sharing.merge(x, received, node.weights(received))

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        at = f"topology = {experiment.topology.name!r}"
        if self.accelerated and (changes(experiment) or (graph is not None and directed(graph))):
            return [
                f"{at}: acceleration needs an undirected graph that stays as it is; use such a graph or "
                "algorithm.accelerated = false"
            ]
        if graph is not None and graph.static and _gap(Mixing(graph, experiment.weights)) == 0.0:
            return [f"{at}: {APART}"]
        return inexact(experiment, "acceleration") if self.accelerated else []


APART = "its spectral gap is 0: some nodes never hear of others, and noise would not average away; connect the graph"


@cached_per_mixing
def _second_eigenvalue(mixing: Mixing) -> float:
    """|λ₂| of W."""
    gap = _gap(mixing)
    if gap == 0.0:
        raise TopologyError(f"the graph of 'muffliato': {APART}")
    return 1.0 - gap


def _gap(mixing: Mixing) -> float:
    from shoal.topologies.measures import matrix, spectral_gap  # scipy takes its time

    return spectral_gap(matrix(mixing, 0))


def _chebyshev(second: float) -> Iterator[float]:
    """ω₀ = 1, ω₁, …: Golub, Varga 1961. All are 1 for |λ₂| = 0, which is plain gossip."""
    yield 1.0
    omega = 2.0
    while True:
        omega = 1.0 / (1.0 - second**2 * omega / 4.0)
        yield omega
