"""Shatter: each node sends the chunks of its model over graphs of their own, so that nobody is sent a whole model.

Biswas, Even, Kermarrec, Massoulié, Pires, Sharma, de Vos: Noiseless Privacy-Preserving Decentralized Learning, 2024
(arXiv:2404.09536).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from shoal.algorithms.support.fragments import VALUES, cut
from shoal.algorithms.support.presence import PeerMonitor
from shoal.algorithms.support.requirements import unbuildable
from shoal.node import Node
from shoal.topologies.regular import Regular
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, Params

CHUNK = "chunk {}"
"""The kind of the messages that carry this chunk. Their rounds are the node's, for by these it is known who is back."""


@dataclass(frozen=True)
class Shatter:
    """Biswas et al. 2024: train, exchange each chunk of the model with neighbours of its own, average.

    Each node has `virtual_nodes` (the paper's k); number c carries chunk c of the trained model. In every round all
    virtual nodes of number c are linked by a new random regular graph of this `degree` (the paper's r). So every
    parameter is mixed by a doubly stochastic matrix, X_c ← W_c X_c, and its mean over all nodes stays as it is. A chunk
    that does not come, since its sender died or keeps silent, is not counted in the average.

    The graph of chunk c in round r is number rk + c of those that follow from the experiment's seed, whose own topology
    is not used. Virtual nodes are no processes of their own here, and messages say whose they are: what a receiver can
    learn from chunks is as in the paper, but who sent them is not hidden.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    virtual_nodes: Annotated[int, Bounds(at_least=1, at_most=10_000)] = 16
    degree: Annotated[int, Bounds(at_least=1)] = 5

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        node.rewire(self._graph(), "uniform")
        chunks = cut(node.context.shapes, self.virtual_nodes, node.seed)
        listener = PeerMonitor(node)
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            peers = [await node.peers(r * self.virtual_nodes + c) for c in range(self.virtual_nodes)]
            for c in range(self.virtual_nodes):
                await node.send(peers[c], chunks.payload(trained, c), round=r, kind=CHUNK.format(c))
            received: dict[int, list[Params]] = {}
            for c in range(self.virtual_nodes):
                check = partial(chunks.check, expected=c)
                heard = await listener.hear(peers[c], round=r, kind=CHUNK.format(c), check=check)
                received[c] = [said.arrays[VALUES] for said in heard.values()]
            node.params = chunks.average(trained, received)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return unbuildable("degree", self._graph(), experiment)

    def _graph(self) -> Regular:
        return Regular(self.degree, dynamic=True)
