"""Gradient tracking: beside its model, each node keeps an estimate of everybody's average gradient.

Di Lorenzo, Scutari: NEXT, IEEE Transactions on Signal and Information Processing over Networks 2(2), 2016; Nedić,
Olshevsky, Shi: Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs, SIAM Journal on
Optimization 27(4), 2017 (DIGing, whose order this is); with stochastic gradients Pu, Nedić 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.presence import Epochs, epoch_of
from shoal.algorithms.support.requirements import unlike_plain_sgd
from shoal.algorithms.support.vectors import average, check_vectors, halved
from shoal.message import Payload
from shoal.node import Node
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds

TRACKED = "tracked"


@dataclass(frozen=True)
class GradientTracking:
    """Nedić et al. 2017: exchange models and estimates of the average gradient; step along the estimate.

    With the local step turned round, d(x) = x − train(x), which is ηg for one step of SGD, and y¹ = d(x¹):
    x^{t+1} = Wx^t − y^t, then y^{t+1} = Wy^t + d(x^{t+1}) − d(x^t). So Σy = Σd at all times, and where all agree, y
    is the average step of all. Each round trains once, at the beginning, and exchanges x and y in one message.

    Where W has negative eigenvalues, steps have to be small: with one near −0.6, as on a torus, ηL below 0.08 for
    gradients that change by at most L. With `lazy` W stands for (W + I)/2, which has none, and 0.5 is the limit.

    A death takes a part of Σy with it. So nodes that learn of one, or that miss a peer, start anew with y = d(x), in
    an epoch that they say with y: y is mixed within an epoch only, and who hears of a later one enters it
    (`presence.Epochs`). The weights of those that are missing stay with the node. Once all have heard of it, which
    takes as many rounds as they are links apart, Σy = Σd again, over those that live.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    lazy: bool = False

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        nothing, epochs = np.zeros_like(node.params), Epochs(node)
        mixed, before = node.memory.get("mixed", nothing), node.memory.get("before", nothing)
        check = partial(_check, size=node.params.size)
        async for r in node.rounds(self.rounds):
            x = node.params
            d = x - await node.train(x)
            if epochs.begins():
                mixed, before = nothing, nothing
            y = mixed + d - before
            peers = await node.peers(r)
            await node.send(peers, epochs.stamped(Payload({"x": x, "y": y})), round=r, kind=TRACKED)
            received = await epochs.hear(peers, round=r, kind=TRACKED, check=check)
            weights = halved(peers.weights) if self.lazy else peers.weights
            node.params = average(x, {j: said.arrays["x"] for j, said in received.items()}, weights) - y
            mixed = average(y, {j: said.arrays["y"] for j, said in epochs.alike(received).items()}, weights)
            before = d
            node.memory.update(mixed=mixed, before=before)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return unlike_plain_sgd(experiment)


def _check(payload: Payload, size: int) -> None:
    check_vectors(payload, size, ("x", "y"))
    epoch_of(payload)
