"""Each node sends to a few random others, new ones in each round; in-degrees are random.

De Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma: Epidemic Learning: Boosting Decentralized Learning with
Randomized Communication, NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TopologyError
from shoal.randomness import generator
from shoal.topologies.graph import Links
from shoal.topologies.recent_rounds import RecentRounds
from shoal.topologies.static import Layout
from shoal.types import Bounds, NodeId

Uint64s: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True)
class RandomOut:
    """In each round every node sends to new random others (EL-Local, de Vos et al. 2023).

    In the paper a node draws its receivers alone, and no node knows how many models will arrive. Here all nodes draw
    from the experiment's seed, so a node also knows its senders, and when a round is complete. With weights "uniform" a
    node averages its own and the received models with equal weights, as in the paper.
    """

    peers: Annotated[int, Bounds(at_least=1)] = 5

    def build(self, nodes: int, seed: int) -> RandomOutRounds:
        if self.peers >= nodes:
            advice = f"try peers = {nodes - 1}" if nodes > 1 else "at least 2 nodes are needed"
            raise TopologyError(
                f"{self.peers} random peers on {nodes} node{'s' if nodes != 1 else ''}: there must be fewer peers"
                f" than nodes; {advice}"
            )
        return RandomOutRounds(nodes, self.peers, seed)


class RandomOutRounds:
    """A new directed graph in each round: out-degrees are equal, in-degrees are binomial.

    The senders to a node depend on the draws of all nodes, so a round is computed as a whole.
    """

    static = False
    layout: Layout = "circle"

    def __init__(self, nodes: int, peers: int, seed: int) -> None:
        self.nodes = nodes
        self.recent = RecentRounds(partial(_Round, nodes, peers, seed))

    def links(self, node: NodeId, round: int) -> Links:
        return self.recent.get(round).links(node)

    def degree(self, node: NodeId, round: int) -> int:
        return self.recent.get(round).in_degree(node)


class _Round:
    """One round: the receivers of each node, and one array of the senders to node 0, then to node 1, …"""

    def __init__(self, nodes: int, peers: int, seed: int, round: int) -> None:
        key = int(generator(seed, "topology", round).integers(1 << 64, dtype=np.uint64))
        self._receivers = receivers(nodes, peers, key)
        # Sorting receiver and sender combined in one number is several times faster than a stable sort of receivers.
        pairs = self._receivers * nodes + np.arange(nodes)[:, None]
        self._senders = np.sort(pairs, axis=None) % nodes
        counts = np.bincount(self._receivers.ravel(), minlength=nodes)
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]

    def links(self, node: NodeId) -> Links:
        senders = self._senders[self._starts[node] : self._starts[node + 1]]
        return Links(tuple(self._receivers[node].tolist()), tuple(senders.tolist()))

    def in_degree(self, node: NodeId) -> int:
        return self._starts[node + 1] - self._starts[node]


def receivers(nodes: int, peers: int, key: int) -> NDArray[np.int64]:
    """Return in row i `peers` distinct nodes other than i, in ascending order; every such set is equally likely.

    Floyd's sampling for all nodes at once: each draw has one more candidate than the previous one, and a repeated draw
    is replaced by the new candidate.
    """
    node = np.arange(nodes, dtype=np.int64)
    chosen = np.empty((peers, nodes), dtype=np.int64)
    for k in range(peers):
        last = nodes - 1 - peers + k
        bits = random_bits(key, np.arange(k * nodes, (k + 1) * nodes, dtype=np.uint64))
        drawn = ((bits >> np.uint64(32)) * np.uint64(last + 1) >> np.uint64(32)).astype(np.int64)
        repeated = (chosen[:k] == drawn).any(axis=0)
        chosen[k] = np.where(repeated, last, drawn)
    chosen += chosen >= node  # no node draws itself
    return np.sort(chosen.T, axis=1)


def random_bits(key: int, counters: Uint64s) -> Uint64s:
    """64 random bits for each counter: SplitMix64 (Steele, Lea, Flood: Fast Splittable Generators, OOPSLA 2014)."""
    x = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
