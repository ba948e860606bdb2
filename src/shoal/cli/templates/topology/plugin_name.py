"""A topology: which nodes are neighbours."""

from dataclasses import dataclass
from typing import Annotated

from shoal import Bounds
from shoal.errors import TopologyError
from shoal.topologies.graph import Graph
from shoal.topologies.static import undirected


@dataclass(frozen=True)
class PluginName:
    """A ring with chords: each node is linked to the nodes at distance 1 and `hop`, on both sides."""

    hop: Annotated[int, Bounds(at_least=2)] = 3

    def build(self, nodes: int, seed: int) -> Graph:
        # Every process builds the graph itself: it must depend on the arguments only. For a random graph, use
        # shoal.randomness.generator(seed, "a purpose"). For a graph that changes from round to round, return your
        # own object with `nodes`, `static`, `links(node, round)` and `degree(node, round)`.
        if self.hop >= nodes:
            raise TopologyError(f"hop = {self.hop} on {nodes} nodes: set hop below the number of nodes")
        edges = ((i, (i + step) % nodes) for i in range(nodes) for step in (1, self.hop))
        return undirected(nodes, edges, layout="circle")
