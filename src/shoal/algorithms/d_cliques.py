"""D-Cliques: cliques that hold all classes average gradients, and all neighbours average models.

Bellet, Kermarrec, Lavoie: D-Cliques: Compensating for Data Heterogeneity with Topology in Decentralized Federated
Learning, SRDS 2022 (arXiv:2104.07365).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from shoal.algorithms.support.vectors import average, check_vectors
from shoal.message import Payload
from shoal.node import Node
from shoal.topologies.d_cliques import Between, CliqueGraph, DCliques
from shoal.types import Bounds

STEP = "step"


@dataclass(frozen=True)
class DCliquesSGD:
    """Bellet et al. 2022: average steps in a clique that holds all classes, then average models with all neighbours.

    Each clique of up to `size` nodes has the label distribution of all nodes; `between` is the graph that links
    cliques, `links` its number of links per scale, and `steps` is the number of attempts to improve the cliques (see
    `shoal.topologies.d_cliques.DCliques`). Without averages of steps, this is `dpsgd` with topology "d-cliques".
    With the local step u = train(x) − x, which is −ηg for one step of SGD: x½ = x + mean of u over the clique, then
    x ← Wx½ with Metropolis-Hastings weights. Steps are sent in full, models by the experiment's sharing. The
    experiment's own topology is not used.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    size: Annotated[int, Bounds(at_least=2)] = 10
    between: Between = "small-world"
    steps: Annotated[int, Bounds(at_least=0)] | None = None
    links: Annotated[int, Bounds(at_least=1)] = 2

    async def run(self, node: Node) -> None:
        node.set_topology(DCliques(self.size, self.between, self.steps, self.links), "metropolis-hastings")
        graph = node.mixing.graph
        assert isinstance(graph, CliqueGraph)
        others = [member for member in graph.clique(node.id) if member != node.id]
        check = partial(check_vectors, size=node.params.size, names=("step",))
        async for r in node.rounds(self.rounds):
            step = await node.train(node.params) - node.params
            await node.send(others, Payload({"step": step}), round=r, kind=STEP)
            steps = await node.receive_each(others, round=r, kind=STEP, check=check)
            half = node.params + average(step, {j: s.arrays["step"] for j, s in steps.items()}, node.weights(steps))

            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(half, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(half, received, node.weights(received))
