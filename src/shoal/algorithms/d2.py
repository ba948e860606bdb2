"""D²: each step is corrected by the one before, so that nodes may hold data as different as they like.

Tang, Lian, Yan, Zhang, Liu: D²: Decentralized Training over Decentralized Data, ICML 2018 (arXiv:1803.07068).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.algorithms.support.presence import Epochs, epoch_of
from shoal.algorithms.support.requirements import inexact, unlike_plain_sgd
from shoal.algorithms.support.vectors import halved
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.graph import Graph, Mixing
from shoal.topologies.inspection import changes, directed, graph_of
from shoal.traits import ExperimentView
from shoal.types import Bounds, Params

LEAST = -1 / 3
"""The smallest eigenvalue of W has to be above this."""


@dataclass(frozen=True)
class D2:
    """Tang et al. 2018, D²: D-PSGD whose steps are corrected by those before; made for heterogeneous data.

    With the local step u = train(x) − x, which is −ηg for one step of SGD, all models follow
    x¹ = W(x⁰ + u⁰), then x^{t+1} = W(2x^t − x^{t−1} + u^t − u^{t−1}).

    This converges only where the smallest eigenvalue of W is above −1/3, which most sparse graphs miss: a ring of an
    even number of nodes has −1/3, random graphs of degree 5 some −1/2. So with `lazy` W stands for (W + I)/2, whose
    eigenvalues are all positive. Without it, a graph that does not do is refused. Sharings that leave out parts of a
    model always are, for they make W another in every round.

    The correction holds as long as all that took part in it do: only then is the mean of all models moved by the mean
    of u. So nodes that learn of a death, or that miss a peer, start anew: their next step is a first step, in an epoch
    that they say with it. Models are mixed within an epoch only, and who hears of a later one enters it
    (`presence.Epochs`). The weights of those that are missing stay with the node. Once all have heard of it, which
    takes as many rounds as they are links apart, means move as they should again, over those that live.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    lazy: bool = True

    async def run(self, node: Node) -> None:
        before: list[Params] | None = node.memory.get("before")
        epochs = Epochs(node)
        async for r in node.rounds(self.rounds):
            x = node.params
            u = await node.train(x) - x
            if epochs.begins():
                before = None
            ahead = x + u if before is None else 2 * x - before[0] + u - before[1]
            peers = await node.peers(r)
            await node.send(peers, epochs.stamped(node.sharing.outgoing(ahead, r)), round=r)
            received = epochs.alike(await epochs.hear(peers, round=r, check=_check))
            weights = {j: peers.weights[j] for j in received}
            node.params = node.sharing.merge(ahead, received, halved(weights) if self.lazy else weights)
            node.memory["before"] = before = [x, u]

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        problems = unlike_plain_sgd(experiment) + inexact(experiment, "'d2'")
        graph = graph_of(experiment)
        at = f"topology = {experiment.topology.name!r}"
        if changes(experiment) or (graph is not None and directed(graph)):
            problems.append(
                f"{at}: 'd2' diverges where links change or go one way; use an undirected graph that stays as it is, "
                "or algorithm = 'gradient-tracking'"
            )
        elif graph is not None and not self.lazy and (least := _smallest_eigenvalue(graph, experiment)) <= LEAST + 1e-5:
            problems.append(
                f"{at}: the smallest eigenvalue of its mixing matrix is {least:.3g}, and 'd2' diverges unless it is "
                "above -1/3; use algorithm.lazy = true or another graph"
            )
        return problems


def _smallest_eigenvalue(graph: Graph, experiment: ExperimentView) -> float:
    from shoal.topologies.measures import matrix, smallest_eigenvalue  # scipy takes its time

    return smallest_eigenvalue(matrix(Mixing(graph, experiment.weights), 0))


def _check(payload: Payload) -> None:
    epoch_of(payload)
