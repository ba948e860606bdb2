"""EL-Local: Epidemic Learning in which each node chooses its receivers itself.

De Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma: Epidemic Learning: Boosting Decentralized Learning with
Randomized Communication, NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.algorithms.support.requirements import requires_buildable_graph
from shoal.node import Node
from shoal.topologies.random_out import RandomOut
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds


@dataclass(frozen=True)
class ELLocal:
    """De Vos et al. 2023, EL-Local: train, send to a few random nodes, average with all models received.

    Each node sends to `peers` others (the paper's s), and averages its own model and the received ones with equal
    weights. The number of received models is random. Receivers follow from the experiment's seed, so each node knows
    its senders, and no message is needed to announce that none will come. The experiment's own topology is not used.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    peers: Annotated[int, Bounds(at_least=1)] = 5

    traits: ClassVar[Traits] = Traits(sends_to="anyone", needs_only_sum=True)

    async def run(self, node: Node) -> None:
        node.set_topology(RandomOut(self.peers), "uniform")
        async for r in node.rounds(self.rounds):
            node.params = await node.train(node.params)
            peers = await node.peers(r)
            await node.send(peers, node.sharing.outgoing(node.params, r), round=r)
            received = await node.receive_each(peers, round=r)
            node.params = node.sharing.merge(node.params, received, node.weights(received))

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_buildable_graph("peers", RandomOut(self.peers), experiment)
