"""Muffliato: each node adds noise to its model, and gossip averages the noise away.

Cyffers, Even, Bellet, Massoulié: Muffliato: Peer-to-Peer Privacy Amplification for Decentralized Optimization and
Averaging, NeurIPS 2022 (arXiv:2206.05091).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from shoal.algorithms.support.requirements import requires_plain_sgd, requires_whole_models
from shoal.errors import TopologyError
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.sharing import PayloadChecker
from shoal.topologies.graph import Mixing, cached_per_mixing
from shoal.topologies.inspection import graph_of, is_directed, is_dynamic, requires_doubly_stochastic
from shoal.traits import ExperimentView
from shoal.types import Bounds, Params

EXCHANGE = "exchange {}"
"""The message kind of each exchange in a round. The round of a message is that of the node, because rejoining peers are
recognised by it."""


@dataclass(frozen=True)
class Muffliato:
    """Cyffers et al. 2022: train with noise, then average with the neighbours many times.

    `sigma` is the standard deviation of the Gaussian noise n that a node adds to each coordinate before it sends the
    model; `noise` selects what it is added to:
    - "gradient": x ← x − η(g(x) + n), in every local step, with η = `training.lr`: the paper's Muffliato-SGD, which
      takes one local step per round. `sigma` is in the units of a gradient, and the model gets noise of ησ per step.
    - "model": x ← train(x) + n, once per round: the paper's averaging, applied to the trained model. `sigma` is in the
      units of the parameters.
    The privacy depends on the graph, on `gossip`, and on the influence of one sample, in the same units: the paper's
    σ is `sigma` divided by this sensitivity. It is stronger against distant nodes. Shoal does not compute it, and
    does not clip gradients.

    `gossip` is K, the number of averages with W in a round. The mean of all noised models is kept. `accelerated`
    applies the Chebyshev polynomial of W of degree K, which is the closest to the mean of all that K exchanges can
    reach: x¹ = Wx⁰, x^{k+1} = ω_k Wx^k + (1 − ω_k)x^{k−1}, with ω from the spectral gap of the graph, which has to be
    undirected and must not change. A dynamic graph changes with each exchange: number k of round r has graph rK + k.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    sigma: Annotated[float, Bounds(at_least=0)] = 0.1
    gossip: Annotated[int, Bounds(at_least=1)] = 5
    accelerated: bool = True
    noise: Literal["gradient", "model"] = "gradient"

    async def run(self, node: Node) -> None:
        second = _second_eigenvalue(node.mixing) if self.accelerated else 0.0
        async for r in node.rounds(self.rounds):
            x = before = await self._train_with_noise(node)
            for k, omega in zip(range(self.gossip), _chebyshev(second), strict=False):
                mixed = await self._average(node, x, r, k)
                x, before = mixed + (omega - 1) * (mixed - before), x  # in float32, ω and 1 − ω do not sum to 1
            node.params = x

    async def _train_with_noise(self, node: Node) -> Params:
        rng, size = node.rng("muffliato noise"), node.params.size
        if self.noise == "model":
            return await node.train(node.params) + np.float32(self.sigma) * rng.standard_normal(size, np.float32)
        x = node.params
        for _ in range(node.trainer.steps(None)):
            scale = np.float32(node.learning_rate * self.sigma)
            x = await node.train(x, 1) - scale * rng.standard_normal(size, np.float32)
        return x

    async def _average(self, node: Node, x: Params, r: int, k: int) -> Params:
        """This node's row of Wx, in exchange k of round r."""

        def check(payload: Payload) -> None:
            if isinstance(node.sharing, PayloadChecker):
                node.sharing.check(payload, x)

        number, kind = r * self.gossip + k, EXCHANGE.format(k)
        peers = await node.peers(number)
        await node.send(peers, node.sharing.outgoing(x, number), round=r, kind=kind)
        received = await node.receive_each(peers, round=r, kind=kind, check=check)
        return node.sharing.merge(x, received, node.weights(received))

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return self._training_problems(experiment) + self._graph_problems(experiment)

    def _training_problems(self, experiment: ExperimentView) -> list[str]:
        if self.noise == "model":
            return []
        if experiment.trainer.name != "torch":
            return [
                f"trainer = {experiment.trainer.name!r}: 'muffliato' adds noise to gradients and needs plain SGD; use "
                f"trainer = 'torch'{MODEL_NOISE}"
            ]
        return requires_plain_sgd(experiment, "adds noise to gradients", MODEL_NOISE)

    def _graph_problems(self, experiment: ExperimentView) -> list[str]:
        graph = graph_of(experiment)
        topology = f"topology = {experiment.topology.name!r}"
        if self.accelerated and (is_dynamic(experiment, graph) or is_directed(graph)):
            return [
                f"{topology}: acceleration needs an undirected graph that does not change; use such a graph or "
                "algorithm.accelerated = false"
            ]
        if graph is not None and graph.static and _gap(Mixing(graph, experiment.weights)) == 0.0:
            return [f"{topology}: {DISCONNECTED}"]
        if not self.accelerated:
            return []
        return requires_whole_models(experiment, "acceleration") + requires_doubly_stochastic(
            experiment, "algorithm.accelerated = true"
        )


MODEL_NOISE = ", or algorithm.noise = 'model'"
DISCONNECTED = "its spectral gap is 0: it is not connected, and the noise would not average away; connect the graph"


@cached_per_mixing
def _second_eigenvalue(mixing: Mixing) -> float:
    """|λ₂| of W."""
    gap = _gap(mixing)
    if gap == 0.0:
        raise TopologyError(f"the graph of 'muffliato': {DISCONNECTED}")
    return 1.0 - gap


def _gap(mixing: Mixing) -> float:
    from shoal.topologies.measures import matrix, spectral_gap  # imports scipy, which is slow

    return spectral_gap(matrix(mixing, 0))


def _chebyshev(second: float) -> Iterator[float]:
    """ω₀ = 1, ω₁, …: Golub, Varga 1961. All are 1 for |λ₂| = 0, which is plain gossip."""
    yield 1.0
    omega = 2.0
    while True:
        omega = 1.0 / (1.0 - second**2 * omega / 4.0)
        yield omega
