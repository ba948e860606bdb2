"""Graphs, static or changing every round, mixing weights, and peer sampling (`sampling`).

The package may import the foundations; `sampling` also `shoal.message` and `shoal.node`. `TOPOLOGIES` is
the registry: the name in an experiment, and its class. A class is imported when an experiment names it, so that
`import shoal` stays fast.
"""

from __future__ import annotations

from shoal.topologies.graph import FromLabels, Graph, Links, Mixing, Peers, Topology, TopologyWarning, WeightScheme
from shoal.types import NodeId

TOPOLOGIES: dict[str, str] = {
    "ring": "shoal.topologies.static:Ring",
    "full": "shoal.topologies.static:Full",
    "star": "shoal.topologies.static:Star",
    "grid": "shoal.topologies.static:Grid",
    "torus": "shoal.topologies.static:Torus",
    "tree": "shoal.topologies.static:Tree",
    "regular": "shoal.topologies.regular:Regular",
    "erdos-renyi": "shoal.topologies.random_graphs:ErdosRenyi",
    "small-world": "shoal.topologies.random_graphs:SmallWorld",
    "exponential": "shoal.topologies.exponential:Exponential",
    "one-peer-exponential": "shoal.topologies.exponential:OnePeerExponential",
    "random-out": "shoal.topologies.random_out:RandomOut",
    "d-cliques": "shoal.topologies.d_cliques:DCliques",
    "file": "shoal.topologies.files:File",
    "networkx": "shoal.topologies.given:NetworkX",
    "edges": "shoal.topologies.given:Edges",
    "peer-sampler": "shoal.topologies.sampling.central:PeerSampler",
    "gossip-sampler": "shoal.topologies.sampling.gossip:GossipSampler",
}

__all__ = [
    "TOPOLOGIES",
    "FromLabels",
    "Graph",
    "Links",
    "Mixing",
    "NodeId",
    "Peers",
    "Topology",
    "TopologyWarning",
    "WeightScheme",
]
