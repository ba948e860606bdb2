"""Shatter: each node sends the chunks of its model over different graphs, so that no node receives a whole model.

Biswas, Even, Kermarrec, Massoulié, Pires, Sharma, de Vos: Noiseless Privacy-Preserving Decentralized Learning, 2024
(arXiv:2404.09536).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from shoal.algorithms.support.fragments import VALUES, cut
from shoal.algorithms.support.peer_monitor import PeerMonitor
from shoal.algorithms.support.requirements import requires_buildable_graph
from shoal.node import Node
from shoal.topologies.regular import Regular
from shoal.traits import ExperimentView, Traits
from shoal.types import Bounds, Params

CHUNK = "chunk {}"
"""The message kind of each chunk. The round of a message is that of the node, because rejoining peers are recognised
by it."""


@dataclass(frozen=True)
class Shatter:
    """Biswas et al. 2024: train, exchange each chunk of the model with different neighbours, average.

    Each node has `virtual_nodes` (the paper's k); number c carries chunk c of the trained model. In every round a new
    random regular graph of this `degree` (the paper's r) links all virtual nodes of number c. So a doubly stochastic
    matrix mixes every parameter, X_c ← W_c X_c, and its mean over all nodes is kept. If the sender of a chunk failed or
    timed out, the average leaves this chunk out.

    The graph of chunk c in round r is number rk + c of those drawn from the experiment's seed; the experiment's own
    topology is not used. Virtual nodes are not separate processes, and messages name their sender: a receiver learns as
    much from the chunks as in the paper, but also knows who sent them.
    """

    rounds: Annotated[int, Bounds(at_least=1)] = 100
    virtual_nodes: Annotated[int, Bounds(at_least=1, at_most=10_000)] = 16
    degree: Annotated[int, Bounds(at_least=1)] = 5

    traits: ClassVar[Traits] = Traits(own_payloads=True)

    async def run(self, node: Node) -> None:
        node.set_topology(self._graph(), "uniform")
        chunks = cut(node.shapes, self.virtual_nodes, node.seed)
        monitor = PeerMonitor(node)
        async for r in node.rounds(self.rounds):
            trained = await node.train(node.params)
            peers = [await node.peers(r * self.virtual_nodes + c) for c in range(self.virtual_nodes)]
            for c in range(self.virtual_nodes):
                await node.send(peers[c], chunks.payload(trained, c), round=r, kind=CHUNK.format(c))
            received: dict[int, list[Params]] = {}
            for c in range(self.virtual_nodes):
                check = partial(chunks.check, expected=c)
                payloads = await monitor.receive(peers[c], round=r, kind=CHUNK.format(c), check=check)
                received[c] = [payload.arrays[VALUES] for payload in payloads.values()]
            node.params = chunks.average(trained, received)

    def incompatibilities(self, experiment: ExperimentView) -> list[str]:
        return requires_buildable_graph("degree", self._graph(), experiment)

    def _graph(self) -> Regular:
        return Regular(self.degree, dynamic=True)
