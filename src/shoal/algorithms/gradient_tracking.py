"""Gradient tracking: beside its model, each node keeps an estimate of the average gradient of all nodes.

Di Lorenzo, Scutari: NEXT, IEEE Transactions on Signal and Information Processing over Networks 2(2), 2016; Nedić,
Olshevsky, Shi: Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs, SIAM Journal on
Optimization 27(4), 2017 (DIGing, whose order is used here); with stochastic gradients Pu, Nedić 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.rate_changes import rate_change, rescaled
from shoal.algorithms.support.requirements import requires_plain_sgd, warn_of_local_steps
from shoal.algorithms.support.restart_epochs import RestartEpochs, epoch_of
from shoal.algorithms.support.vectors import average, check_vectors, lazy_weights
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.inspection import requires_doubly_stochastic
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds

TRACKED = "tracked"


@dataclass(frozen=True)
class GradientTracking:
    """Nedić et al. 2017: exchange models and estimates of the average gradient; step along the estimate.

    With the negated local step d(x) = x − train(x), which is ηg for one step of SGD, and y¹ = d(x¹):
    x^{t+1} = Wx^t − y^t, then y^{t+1} = Wy^t + d(x^{t+1}) − d(x^t). So Σy = Σd at all times, and once the models
    agree, y is the average step of all nodes. Each round trains once, at its start, and sends x and y in one message.

    If W has negative eigenvalues, steps have to be small: with one near −0.6, as on a torus, ηL below 0.08 for
    gradients with Lipschitz constant L. With `lazy`, (W + I)/2 replaces W; it has none, and the limit is 0.5.

    If η follows a schedule, y and d(x^t) are scaled to the rate of the next round: then y/η tracks the average
    gradient, as with a constant η. Σy = Σd remains only if all nodes scale by the same factor in the same round, so
    schedules that differ between nodes, or that count steps, are rejected.

    A failure removes a part of Σy. So nodes that learn of one, or whose peer times out, restart with y = d(x), in a new
    epoch (see `support.restart_epochs`). y is mixed only within an epoch, and a node that receives a later epoch enters
    it. The weights of missing peers stay with the node. Once all nodes have received the epoch, which takes as many
    rounds as they are hops apart, Σy = Σd again, over the nodes that remain.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    lazy: bool = False

    traits: ClassVar[Traits] = Traits(own_payloads=True, common_schedule=True)

    async def run(self, node: Node) -> None:
        zero, epochs = np.zeros_like(node.params), RestartEpochs(node)
        mixed, before = node.algorithm_state.get("mixed", zero), node.algorithm_state.get("before", zero)
        check = partial(_check, size=node.params.size)
        async for r in node.rounds(self.rounds):
            x, change = node.params, rate_change(node)
            mixed, before = rescaled(mixed, change), rescaled(before, change)
            d = x - await node.train(x)
            if epochs.restart_needed():
                mixed, before = zero, zero
            y = mixed + d - before
            peers = await node.peers(r)
            await node.send(peers, epochs.tag(Payload({"x": x, "y": y})), round=r, kind=TRACKED)
            received = await epochs.receive(peers, round=r, kind=TRACKED, check=check)
            weights = lazy_weights(peers.weights) if self.lazy else peers.weights
            node.params = average(x, {j: p.arrays["x"] for j, p in received.items()}, weights) - y
            mixed = average(y, {j: p.arrays["y"] for j, p in epochs.same_epoch(received).items()}, weights)
            before = d
            node.algorithm_state.update(mixed=mixed, before=before)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        warn_of_local_steps(experiment)
        return requires_plain_sgd(experiment) + requires_doubly_stochastic(
            experiment, "algorithm = 'gradient-tracking'"
        )


def _check(payload: Payload, size: int) -> None:
    check_vectors(payload, size, ("x", "y"))
    epoch_of(payload)
