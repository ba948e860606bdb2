"""D²: each step is corrected by the previous one, so that the data of nodes may differ without limit.

Tang, Lian, Yan, Zhang, Liu: D²: Decentralized Training over Decentralized Data, ICML 2018 (arXiv:1803.07068).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from shoal.algorithms.support.rate_changes import rate_change, rescaled
from shoal.algorithms.support.requirements import requires_plain_sgd, requires_whole_models, warn_of_local_steps
from shoal.algorithms.support.restart_epochs import RestartEpochs, epoch_of
from shoal.algorithms.support.vectors import lazy_weights
from shoal.node import Node
from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.inspection import graph_of, is_directed, is_dynamic, requires_doubly_stochastic
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds

EIGENVALUE_LIMIT = -1 / 3
"""The smallest eigenvalue of W has to be above this."""


@dataclass(frozen=True)
class D2:
    """Tang et al. 2018, D²: D-PSGD with each step corrected by the previous one; made for heterogeneous data.

    With the local step u = train(x) − x, which is −ηg for one step of SGD, all models follow
    x¹ = W(x⁰ + u⁰), then x^{t+1} = W(2x^t − x^{t−1} + u^t − u^{t−1}). The code uses an equal form: x½ = x + u + c,
    x ← Wx½, c ← c + (Wx½ − x½), with c = 0 at first. So c is all that mixing has moved the model so far, and Σc = 0.
    It is kept in double precision: with the first form in float32, rounding errors add up over the rounds and move the
    mean of all models.

    This converges only if the smallest eigenvalue of W is above −1/3, which most sparse graphs miss: a ring of an even
    number of nodes has −1/3, random graphs of degree 5 about −1/2. So with `lazy`, (W + I)/2 replaces W; all its
    eigenvalues are positive. Without `lazy`, a graph with a smaller eigenvalue is rejected. Sharings that omit parts of
    a model are always rejected, because they change W in every round.

    Once the models agree, c is η times the difference between a node's gradient and the average one. So if η follows a
    schedule, c is scaled to the rate of the next round; in the first form, x^t − x^{t−1} − u^{t−1} is. As in
    `gradient-tracking`, all nodes must have the same schedule, by rounds.

    The correction holds only while all nodes that took part in it remain: only then does the mean of all models move
    by the mean of u. So nodes that learn of a failure, or whose peer times out, restart: their next step is a first
    step, in a new epoch (see `support.restart_epochs`). Models are mixed only within an epoch, and a node that receives
    a later epoch enters it. The weights of missing peers stay with the node. Once all nodes have received the epoch,
    which takes as many rounds as they are hops apart, the mean moves correctly again, over the nodes that remain.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    lazy: bool = True

    traits: ClassVar[Traits] = Traits(common_schedule=True)

    async def run(self, node: Node) -> None:
        zero, epochs = np.zeros(node.params.size), RestartEpochs(node)
        correction = node.algorithm_state.get("correction", zero)
        async for r in node.rounds(self.rounds):
            correction = rescaled(correction, rate_change(node))
            trained = await node.train(node.params)
            if epochs.restart_needed():
                correction = zero
            half = (trained + correction).astype(np.float32)
            peers = await node.peers(r)
            await node.send(peers, epochs.tag(node.sharing.outgoing(half, r)), round=r)
            received = epochs.same_epoch(await epochs.receive(peers, round=r, check=epoch_of))
            weights = {j: peers.weights[j] for j in received}
            mixed = node.sharing.merge(
                half.astype(np.float64), received, lazy_weights(weights) if self.lazy else weights
            )
            node.params = mixed.astype(np.float32)
            node.algorithm_state["correction"] = correction = correction + (mixed - half)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        warn_of_local_steps(experiment)
        problems = requires_plain_sgd(experiment) + requires_whole_models(experiment, "'d2'")
        graph = graph_of(experiment)
        topology = f"topology = {experiment.topology.name!r}"
        if is_dynamic(experiment, graph) or is_directed(graph):
            problems.append(
                f"{topology}: 'd2' diverges on a graph that changes or is directed; use an undirected graph that does "
                "not change, or algorithm = 'gradient-tracking'"
            )
        elif unbalanced := requires_doubly_stochastic(experiment, "algorithm = 'd2'"):
            problems += unbalanced
        elif graph is not None and not self.lazy:
            smallest = _smallest_eigenvalue(graph, experiment)
            if smallest <= EIGENVALUE_LIMIT + 1e-5:
                problems.append(
                    f"{topology}: the smallest eigenvalue of its mixing matrix is {smallest:.3g}, and 'd2' diverges "
                    "unless it is above -1/3; use algorithm.lazy = true or another graph"
                )
        return problems


def _smallest_eigenvalue(graph: Graph, experiment: ExperimentView) -> float:
    from shoal.topologies.measures import matrix, smallest_eigenvalue  # imports scipy, which is slow

    return smallest_eigenvalue(matrix(Mixing(graph, experiment.weights), 0))
