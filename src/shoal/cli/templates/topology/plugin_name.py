"""A topology: who is linked to whom."""

from dataclasses import dataclass
from typing import Annotated

from shoal import Bounds
from shoal.errors import TopologyError
from shoal.topologies.graph import Graph
from shoal.topologies.static import undirected


@dataclass(frozen=True)
class PluginName:
    """A ring with chords: each node is linked to those 1 and `hop` places away, on both sides."""

    hop: Annotated[int, Bounds(at_least=2)] = 3

    def build(self, nodes: int, seed: int) -> Graph:
        # Every process builds the graph for itself: it must follow from the arguments alone. For a random one, take
        # shoal.randomness.generator(seed, "a purpose"). For one that changes from round to round, return an object
        # of your own with `nodes`, `static`, `links(node, round)` and `degree(node, round)`.
        if self.hop >= nodes:
            raise TopologyError(f"hop = {self.hop} on {nodes} nodes: set it below the number of nodes")
        edges = ((i, (i + step) % nodes) for i in range(nodes) for step in (1, self.hop))
        return undirected(nodes, edges, layout="circle")
