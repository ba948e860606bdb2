"""Random graphs, drawn once from the seed of the experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from shoal.errors import TopologyError
from shoal.randomness import derived_seed
from shoal.topologies.static import StaticGraph, undirected
from shoal.types import Bounds

MAX_DRAWS = 200
"""The number of attempts to draw a connected small world."""


@dataclass(frozen=True)
class ErdosRenyi:
    """Each pair of nodes is linked with the same probability (Erdős and Rényi 1959).

    The default is 2 ln(n)/n, twice the threshold above which large graphs are connected. The graph may still be
    disconnected; then a warning is issued. A node without links trains alone.
    """

    probability: Annotated[float, Bounds(at_least=0, at_most=1)] | None = None

    def build(self, nodes: int, seed: int) -> StaticGraph:
        import networkx

        probability = self.probability
        if probability is None:
            probability = min(1.0, 2 * math.log(nodes) / nodes)
        graph = networkx.fast_gnp_random_graph(nodes, probability, seed=derived_seed(seed, "topology"))
        return undirected(nodes, graph.edges)


@dataclass(frozen=True)
class SmallWorld:
    """A ring of near neighbours with some links rewired at random, connected (Watts and Strogatz 1998)."""

    neighbours: Annotated[int, Bounds(at_least=2)] = 4
    rewiring: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.1

    def build(self, nodes: int, seed: int) -> StaticGraph:
        import networkx

        if self.neighbours % 2:
            raise TopologyError(
                f"{self.neighbours} neighbours in a small world: half of them are on each side, so the number"
                f" must be even; try neighbours = {self.neighbours - 1}"
            )
        if self.neighbours >= nodes:
            advice = f"try neighbours = {(nodes - 1) // 2 * 2}" if nodes > 2 else "at least 3 nodes are needed"
            raise TopologyError(
                f"{self.neighbours} neighbours in a small world of {nodes} nodes: there must be fewer"
                f" neighbours than nodes; {advice}"
            )
        try:
            graph = networkx.connected_watts_strogatz_graph(
                nodes, self.neighbours, self.rewiring, tries=MAX_DRAWS, seed=derived_seed(seed, "topology")
            )
        except networkx.NetworkXError:
            raise TopologyError(
                f"a small world of {nodes} nodes with {self.neighbours} neighbours and rewiring"
                f" {self.rewiring}: none of {MAX_DRAWS} draws was connected;"
                " use more neighbours or less rewiring"
            ) from None
        return undirected(nodes, graph.edges, layout="circle")
