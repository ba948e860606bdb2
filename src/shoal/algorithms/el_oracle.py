"""EL-Oracle: Epidemic Learning on a new random regular graph in each round.

De Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma: Epidemic Learning: Boosting Decentralized Learning with
Randomized Communication, NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.algorithms.support.requirements import requires_buildable_graph
from shoal.node import Node
from shoal.topologies.regular import Regular
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class ELOracle:
    """De Vos et al. 2023, EL-Oracle: train, exchange on a new random regular graph in each round, average.

    Every node averages its own model and those of its `degree` neighbours (the paper's s) with equal weights. There is
    no oracle: each node computes the graph of a round from the experiment's seed. The experiment's own topology is not
    used.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    degree: Annotated[int, Bounds(at_least=1)] = 5

    traits: ClassVar[Traits] = Traits(sends_to="anyone", needs_only_sum=True)

    async def run(self, node: Node) -> None:
        node.set_topology(self._graph(), "uniform")
        async for r in node.rounds(self.rounds):
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_buildable_graph("degree", self._graph(), experiment)

    def _graph(self) -> Regular:
        return Regular(self.degree, dynamic=True)
